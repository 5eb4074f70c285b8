"""A sharded model's parameters, whole again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...base.labels import loop_label
from .accelerator import Lane
from .held import Held

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
            full = _gathered(model, unit.name, each, shard)
            for slot, names in zip(each.region.slots, each.names, strict=True):
                whole = full[slot.start : slot.stop].view(slot.shape).clone()
                state |= dict.fromkeys(names, whole)
    return state | {name: buffer.detach().cpu().clone() for name, buffer in model.module.named_buffers()}


def _gathered(model: ShardedModel, unit: str, held: Held, shard: torch.Tensor) -> torch.Tensor:
    device = model.accelerator.device
    full = torch.empty(held.region.full_numel, dtype=shard.dtype, device=device)
    on_device = shard.to(device)
    event = model.accelerator.stream(Lane.GATHER).submit(
        loop_label("all_gather", unit),
        lambda: model.collectives.gather(full, on_device),
        [model.accelerator.compute_event()],
    )
    event.wait()
    return full.cpu()
