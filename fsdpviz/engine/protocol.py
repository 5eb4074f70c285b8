"""What an engine is: how a module is sharded, and how one microbatch's gradients are handled.

An adapter holds no logic of its own beyond turning an Experiment's knobs into its library's arguments. To add an
engine, write one file with a subclass and name it in ``engine/__init__.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..experiment import Experiment


@dataclass(frozen=True)
class RankContext:
    """Where this rank is. ``mesh`` has the axes (replicate, shard); it is None for one rank without a process group.

    ``control`` is a gloo group of all ranks for what is not training, None where there is nobody to talk to.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | None
    control: dist.ProcessGroup | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered and freed together. ``name`` is what the engine's ranges call it."""

    name: str
    modules: tuple[nn.Module, ...]


class Engine(ABC):
    """One way to spread a module over ranks."""

    emits_unit_ranges = False  # whether the library itself records a range a unit; otherwise capture adds them

    def __init__(self, experiment: Experiment, context: RankContext) -> None:
        self.experiment = experiment
        self.context = context

    @abstractmethod
    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        """The module to call in place of ``module``; ``units`` are in forward order, without the root. Collective."""

    def reduces_gradients(self, model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
        """A context for one microbatch's forward and backward, in which gradients are reduced or only accumulated."""
        return nullcontext()

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """What steps the model, given an optimizer of its parameters."""
        return optimizer

    def accounted_memory(self) -> dict[str, int] | None:
        """Bytes by name, from an engine that counts its own memory; None leaves the counting to capture."""
        return None

    def full_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Every parameter, whole and on the CPU, by its name in the unwrapped module. Collective over all ranks."""
        return {clean_name(name): _whole(parameter, self.context) for name, parameter in model.named_parameters()}

    def close(self) -> None:  # noqa: B027  # most engines start none
        """Ends threads that the engine started."""


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _whole(parameter: torch.Tensor, context: RankContext) -> torch.Tensor:
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        on_device = cast(DTensor, tensor.to(context.device))  # offloaded shards are gathered on the device
        tensor = on_device.full_tensor()
    return tensor.cpu().clone()
