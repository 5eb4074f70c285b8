"""Peak memory of a rank: CUDA's allocator statistics, or, on CPU, bytes accounted at unit boundaries.

On CPU nothing tells device memory from host memory, so this file counts what would lie on a device:

    peak_device_bytes = max over samples of (parameters + gathered + gradients) + optimizer state

with parameters this rank's shards, gathered the unsharded parameters of the units that are gathered at that
moment, and gradients those that exist. Samples are taken when a unit's forward begins and ends, when its backward
begins, and before the optimizer's step, in one warm-up step.
Parameters that are offloaded, with their gradients and optimizer state, lie on the host and are left out.
``peak_host_bytes`` is the process's largest resident set, everything included.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ..engine.train import Training
from ..experiment.run_folder import RankFolder, write_json
from .units import on_backward_begin


class MemoryWatch:
    """Watches one training. ``around(step)`` goes around every step; ``write`` leaves ``memory.json``."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._is_cuda = training.context.is_cuda
        self._parameters = _storages(training.model.parameters())
        self._peaks = {"gathered_peak_bytes": 0, "gradient_peak_bytes": 0, "sampled_peak_bytes": 0}
        steps = training.experiment.steps
        # sampling costs time, so not in a measured step; and an engine that counts by itself may have other threads
        # that set gradients, which nobody may read meanwhile
        counts_itself = training.engine.accounted_memory() is not None
        self._sampled_step = None if counts_itself else max(steps.warmup - 1, 0)
        self._first_measured = steps.warmup
        if self._is_cuda and training.experiment.capture.memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=200_000)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if self._is_cuda:
            if step == self._first_measured:
                torch.cuda.reset_peak_memory_stats(self._training.context.device)
            yield
        elif step == self._sampled_step:
            handles = self._hook_units()
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
        else:
            yield

    def write(self, folder: RankFolder) -> None:
        capture = self._training.experiment.capture
        content = self._cuda() if self._is_cuda else self._accounted()
        write_json(folder.memory, content | {"peak_host_bytes": peak_rss_bytes()})
        if self._is_cuda and capture.memory_snapshot:
            torch.cuda.memory._dump_snapshot(str(folder.snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _cuda(self) -> dict[str, Any]:
        device = self._training.context.device
        return {
            "source": "cuda allocator",
            "parameter_bytes": sum(self._parameters.values()),
            "optimizer_bytes": self._optimizer_bytes(),
            "peak_device_bytes": torch.cuda.max_memory_allocated(device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        }

    def _accounted(self) -> dict[str, Any]:
        parameters, optimizer = sum(self._parameters.values()), self._optimizer_bytes()
        own = self._training.engine.accounted_memory()
        if own is not None:
            return {
                "source": "accounted by the engine, every allocation",
                "parameter_bytes": parameters,
                "optimizer_bytes": optimizer,
                **own,
            }
        offloaded = self._training.experiment.offload.parameters
        on_device = self._peaks["gathered_peak_bytes"] if offloaded else self._peaks["sampled_peak_bytes"] + optimizer
        return {
            "source": "accounted at unit boundaries",
            "parameter_bytes": parameters,
            "optimizer_bytes": optimizer,
            "gathered_peak_bytes": self._peaks["gathered_peak_bytes"],
            "gradient_peak_bytes": self._peaks["gradient_peak_bytes"],
            "parameters_on": "host" if offloaded else "device",
            "peak_device_bytes": on_device,
        }

    def _optimizer_bytes(self) -> int:
        state = self._training.optimizer.state
        return sum(_storages(value for slots in state.values() for value in slots.values()).values())

    def _hook_units(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = [self._training.optimizer.register_step_pre_hook(lambda *_: self._sample())]
        for module in (self._training.model, *(m for unit in self._training.units for m in unit.modules)):
            handles += [
                module.register_forward_pre_hook(lambda *_: self._sample()),
                module.register_forward_hook(lambda *_: self._sample()),
                on_backward_begin(module, self._sample),
            ]
        return handles

    def _sample(self) -> None:
        model = self._training.model
        now = _storages(model.parameters())
        gathered = sum(size for storage, size in now.items() if storage not in self._parameters)
        gradients = sum(_storages(p.grad for p in model.parameters() if p.grad is not None).values())
        total = sum(self._parameters.values()) + gathered + gradients
        for name, value in (("gathered", gathered), ("gradient", gradients), ("sampled", total)):
            self._peaks[f"{name}_peak_bytes"] = max(self._peaks[f"{name}_peak_bytes"], value)


def _storages(tensors: Iterator[Any] | Any) -> dict[int, int]:
    """Address → bytes of the distinct storages behind ``tensors``; shards of DTensors count, not their wholes."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        local = tensor.detach()
        storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def peak_rss_bytes() -> int:
    """The largest resident set that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere
