"""A sharded model's parameters, whole again, and back: what checkpoints of any world size are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from .accelerator import Lane
from .held import Held
from .layout import Slot
from .wrapping import clean_name

if TYPE_CHECKING:
    from .model import ShardedModel


def full_state_dict(model: ShardedModel) -> dict[str, torch.Tensor]:
    """Every parameter and buffer on the CPU, by its original name and shape. Collective over all ranks.

    One unit at a time is whole on the device. Tied parameters are there under each of their names.
    """
    state: dict[str, torch.Tensor] = {}
    for unit in model.units().values():
        held = [each for each in (unit.trainable, unit.frozen) if each.region.slots]
        sizes = [each.region.shard_numel for each in held]
        for each, shard in zip(held, unit.store.tensor.split(sizes), strict=True):
            full = gathered(model, unit.name, shard)
            for slot, names in zip(each.region.slots, each.names, strict=True):
                whole = full[slot.start : slot.stop].view(slot.shape).clone()
                state |= dict.fromkeys(names, whole)
    return state | {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(model.module).items()}


def load_full_state_dict(model: ShardedModel, state: Mapping[str, torch.Tensor]) -> None:
    """Takes this rank's pieces out of whole parameters, by their original names. Every rank does; not collective."""
    buffers = persistent_buffers(model.module)
    names = {
        names[0] for unit in model.units().values() for held in (unit.trainable, unit.frozen) for names in held.names
    }
    if missing := sorted((names | buffers.keys()) - state.keys()):
        raise FsdpvizError(f"a full state dict must have every parameter and buffer; {', '.join(missing[:5])} missing")
    with torch.no_grad():
        for unit in model.units().values():
            for held in (unit.trainable, unit.frozen):
                for slot, shard in zip(held.region.slots, held.shards, strict=True):
                    _load_piece(model, held, slot, shard, state[slot.name])
            unit.store.rewritten()
        for name, buffer in buffers.items():
            buffer.copy_(state[name])


def _load_piece(model: ShardedModel, held: Held, slot: Slot, shard: torch.Tensor, whole: torch.Tensor) -> None:
    if tuple(whole.shape) != slot.shape:
        raise FsdpvizError(f"parameter {slot.name} has shape {slot.shape}; the state dict's has {tuple(whole.shape)}")
    rank = model.collectives.shard_rank
    first = held.region.piece(slot, rank).start + rank * held.region.shard_numel - slot.start
    if shard.numel():
        shard.copy_(whole.flatten()[first : first + shard.numel()])


def gathered(model: ShardedModel, unit: str, shard: torch.Tensor) -> torch.Tensor:
    """The equal shards of all ranks of the shard group end to end, on the CPU. Collective over that group."""
    model.collectives.agreement.note(f"all_gather of {unit} for the state")
    device = model.accelerator.device
    full = torch.empty(shard.numel() * model.collectives.mesh.shard, dtype=shard.dtype, device=device)
    on_device = shard.to(device)
    event = model.accelerator.stream(Lane.GATHER).submit(
        loop_label("all_gather", unit),
        lambda: model.collectives.gather(full, on_device),
        [model.accelerator.compute_event()],
    )
    event.wait()
    return full.cpu()


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a state dict has, by the original names."""
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }
