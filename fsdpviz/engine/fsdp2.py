"""PyTorch's ``fully_shard`` (FSDP2) on a 1-D mesh, and on a 2-D mesh for HSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from ..base.labels import ROOT
from ..schedule import backward_prefetch_targets, forward_prefetch_targets
from .async_unshard import set_async_unshard
from .dtypes import torch_dtype
from .links import EmulatedLinks
from .protocol import Engine, Unit


class Fsdp2(Engine):
    emits_unit_ranges = True
    _links: EmulatedLinks | None = None

    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        experiment, context = self.experiment, self.context
        assert context.mesh is not None  # only engine "single" runs without one
        mesh = context.mesh if experiment.mesh.replicate > 1 else context.mesh["shard"]
        precision = experiment.precision
        policy = MixedPrecisionPolicy(
            torch_dtype(precision.param), torch_dtype(precision.reduce), torch_dtype(precision.output)
        )
        offload = self._offload_policy()
        reshard = experiment.reshard_after_forward
        for unit in units:
            modules = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            fully_shard(modules, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
        # the root is needed again at once in backward, so FSDP2 keeps it gathered unless it is the only unit
        root_reshard = None if units else reshard
        fully_shard(module, mesh=mesh, reshard_after_forward=root_reshard, mp_policy=policy, offload_policy=offload)

        sharded = {ROOT: cast(FSDPModule, module)} | {unit.name: cast(FSDPModule, unit.modules[0]) for unit in units}
        self._set_prefetch(sharded)
        self._set_divide_factor(sharded)
        if experiment.links is not None:
            self._links = EmulatedLinks(experiment.links, mesh)
            self._links.attach(sharded)
        return module

    @contextmanager
    def _syncing(self, model: FSDPModule, reduce: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(reduce)
        model.set_is_last_backward(reduce)
        yield

    def reduces_gradients(self, model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
        return self._syncing(cast(FSDPModule, model), reduce)

    def close(self) -> None:
        if self._links is not None:
            self._links.close()

    def _offload_policy(self) -> OffloadPolicy:
        offload = self.experiment.offload
        if not offload.parameters:
            return OffloadPolicy()
        pin = self.context.is_cuda if offload.pin_memory is None else offload.pin_memory
        return CPUOffloadPolicy(pin_memory=pin)

    def _set_prefetch(self, sharded: dict[str, FSDPModule]) -> None:
        """Explicit prefetch lists. See [Note: an empty list is not "none"]."""
        names, prefetch = list(sharded), self.experiment.prefetch
        if prefetch.forward is not None:
            for unit, targets in forward_prefetch_targets(names, prefetch.forward).items():
                sharded[unit].set_modules_to_forward_prefetch([sharded[target] for target in targets or [unit]])
        if prefetch.backward is not None:
            for unit, targets in backward_prefetch_targets(names, prefetch.backward).items():
                sharded[unit].set_modules_to_backward_prefetch([sharded[target] for target in targets or [unit]])
        if self._wants_async_unshard():
            set_async_unshard(sharded[ROOT])

    def _wants_async_unshard(self) -> bool:
        """On gloo an explicit prefetch overlaps only with async unshard. On CUDA a depth of 0 is none only with it:
        the gather is then issued from the compute stream, and the CPU cannot run ahead of the GPU with it."""
        depths = (self.experiment.prefetch.forward, self.experiment.prefetch.backward)
        if self.context.is_cuda:
            return 0 in depths
        return any(depth for depth in depths)

    def _set_divide_factor(self, sharded: dict[str, FSDPModule]) -> None:
        factor = self.experiment.gradient.divide_factor
        if factor is None:
            return
        for module in sharded.values():
            module.set_gradient_divide_factor(factor)
            if not self.context.is_cuda:  # gloo has no pre-multiplied sum
                module.set_force_sum_reduction_for_comms(True)


# [Note: an empty list is not "none"]
# set_modules_to_backward_prefetch([]) means FSDP2's default, one unit ahead. A unit that names itself prefetches
# nothing: it is gathered already when its turn to prefetch comes.
