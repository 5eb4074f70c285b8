"""From a module to units: checks, real values for meta modules, equal values on all ranks, shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ...base.errors import FsdpvizError
from ...schedule import Policy, Tier
from .accelerator import Accelerator
from .cpu import CpuAccelerator
from .cuda import CudaAccelerator
from .held import Held, UnitContext
from .memory import Replay, UnitBytes, check_budgets
from .storage import ShardStore
from .unit import Unit
from .wrapping import grouped


def accelerator_of(module: nn.Module, policy: Policy) -> Accelerator:
    """The accelerator of the device that the module is on; meta and CPU are the CPU."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    one = policy.streams == "one"
    if device.type == "cuda":
        return CudaAccelerator(device, one_stream=one, steps_on_host=policy.parameters_on is not Tier.DEVICE)
    return CpuAccelerator(one_stream=one)


def build_units(
    module: nn.Module, modules: Mapping[str, tuple[nn.Module, ...]], context: UnitContext
) -> dict[str, Unit]:
    """The units by name, the root first where it holds parameters. Changes ``module``. Collective over all ranks."""
    device, policy = context.accelerator.device, context.policy
    materialise(module, device)
    laid_out = grouped(module, modules, context.collectives.mesh.shard)
    laid_out = {name: held for name, held in laid_out.items() if held[0].places or held[1].places}
    check_memory(laid_out, context)
    units = {}
    for name, held in laid_out.items():
        shard = flat_shard(held, context.collectives.shard_rank, device)
        file = context.folder / f"{name}.parameters"
        store = ShardStore(name, shard, policy.parameters_on, context.accelerator, file)
        units[name] = Unit(name, *held, store, context)
    _synchronise_buffers(module, device)
    return units


def replayed_peaks(
    laid_out: Mapping[str, tuple[Held, Held]],
    context: UnitContext,
    state_bytes: Mapping[str, int] | None = None,
    reduces: Iterable[bool] = (True,),
) -> dict[Tier, int]:
    """The bytes that a step takes at most in each tier. ``state_bytes`` is the optimizer's state, by unit.

    ``reduces`` as in ``Replay``.
    """
    state, collectives = state_bytes or {}, context.collectives
    sizes = {
        name: UnitBytes.of(trainable.region, frozen.region, context.precision, state.get(name, 0))
        for name, (trainable, frozen) in laid_out.items()
    }
    replicas = collectives.mesh.replicate
    return Replay(sizes, context.policy, replicas=replicas, reduces=reduces).peaks()


def check_memory(
    laid_out: Mapping[str, tuple[Held, Held]], context: UnitContext, state_bytes: Mapping[str, int] | None = None
) -> None:
    """Raises FsdpvizError where a step would break a budget."""
    peaks = replayed_peaks(laid_out, context, state_bytes)
    check_budgets(peaks, context.accelerator.pools, context.collectives.rank)


def check_parameters(module: nn.Module, device: torch.device) -> torch.dtype:
    """The type that all parameters share. Raises FsdpvizError for what cannot be sharded."""
    named = dict(module.named_parameters())
    if not named:
        raise FsdpvizError(f"a model needs parameters to be sharded; {type(module).__name__} has none")
    dtypes = {parameter.dtype for parameter in named.values()}
    if len(dtypes) > 1:
        raise FsdpvizError(
            f"the parameters of a model must have one type; got {', '.join(sorted(map(str, dtypes)))}. "
            "Use model.float() and param_dtype"
        )
    for name, parameter in named.items():
        if parameter.device.type not in ("meta", "cpu", device.type):
            raise FsdpvizError(
                f"parameter {name} is on {parameter.device}; the engine's device is {device}. "
                f"Use module.to({str(device)!r})"
            )
        if not parameter.dtype.is_floating_point:
            raise FsdpvizError(f"parameter {name} is {parameter.dtype}; only floating-point parameters are sharded")
    return dtypes.pop()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Gives modules on the meta device real values through their own ``reset_parameters``."""
    for name, child in module.named_modules():
        own = (*child.parameters(recurse=False), *child.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            continue
        reset = getattr(child, "reset_parameters", None)
        if reset is None:
            raise FsdpvizError(
                f"module {name!r} ({type(child).__name__}) is on the meta device and has no reset_parameters(). "
                "Give it one, or build it on the CPU"
            )
        child.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()


def flat_shard(held: tuple[Held, Held], rank: int, device: torch.device) -> torch.Tensor:
    """This rank's part of rank 0's values: trainable, then frozen. Collective over all ranks."""
    pieces = []
    for region, places in ((each.region, each.places) for each in held if each.region.slots):
        parameters = [places_[0].module._parameters[places_[0].attribute] for places_ in places]
        flat = torch.cat([parameter.detach().to(device).flatten() for parameter in parameters if parameter is not None])
        if dist.get_world_size() > 1:
            dist.broadcast(flat, src=0)
        padded = torch.nn.functional.pad(flat, (0, region.full_numel - region.numel))
        pieces.append(padded[rank * region.shard_numel : (rank + 1) * region.shard_numel])
    return torch.cat(pieces) if pieces else torch.empty(0, device=device)


def _synchronise_buffers(module: nn.Module, device: torch.device) -> None:
    """Moves buffers to the device and gives every rank rank 0's."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = on_device = buffer.to(device)
                if dist.get_world_size() > 1:
                    dist.broadcast(on_device, src=0)
