"""A sharded model and its optimizer as DTensors, which torch.distributed.checkpoint saves, and loads at any world size.

[Note: why the chunks are not the shards]
A shard here is a stretch of its unit's flat buffer: it begins and ends in the midst of a row. A checkpoint that other
world sizes, FSDP2 or a single process shall read has to say which elements of which parameter are where, and what all
of them understand is a DTensor sharded along dim 0: FSDP2's own format. So each unit is gathered once a save, each
rank keeps its rows of each parameter, and the rest goes. Loading runs the same way back. One unit is whole at a time,
as in a forward; a save moves as many bytes as one forward's gathers do, for each tensor of optimizer state once more.
The other way, 1-D chunks of flat buffers, would move nothing and be of no use to anybody else.

Shapes: W shard ranks × K elements a rank: rows of all parameters of a region, each padded to W equal chunks.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...base.errors import FsdpvizError
from .held import Held
from .layout import Slot
from .state import gathered, persistent_buffers

if TYPE_CHECKING:
    from .model import ShardedModel
    from .unit import Unit


def sharded_state_dict(model: ShardedModel) -> dict[str, Any]:
    """Parameters as DTensors of this rank's rows, and buffers, on the CPU. Collective. Names are the original ones."""
    state: dict[str, Any] = {}
    for unit in model.units().values():
        for held, shard_S in _with_shards(unit):  # noqa: N806
            for slot, names, rows in zip(
                held.region.slots, held.names, _rows_of(model, unit, held, shard_S), strict=True
            ):
                state |= dict.fromkeys(names, _as_dtensor(model, slot, rows))
    return state | {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(model.module).items()}


def load_sharded_state_dict(model: ShardedModel, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Takes what ``sharded_state_dict`` gave, or plain whole tensors. Collective over all ranks."""
    buffers = persistent_buffers(model.module)
    known = {name for unit in model.units().values() for held, _ in _with_shards(unit) for name in _all_names(held)}
    missing, unknown = sorted((known | buffers.keys()) - state.keys()), sorted(state.keys() - known - buffers.keys())
    if strict and (missing or unknown):
        raise FsdpvizError(
            f"a state dict must have the model's parameters and buffers; missing {missing[:3]}, unknown {unknown[:3]}. "
            "Use strict=False to take what is there"
        )
    with torch.no_grad():
        for unit in model.units().values():
            for held, shard_S in _with_shards(unit):  # noqa: N806
                values = {slot: state[slot.name] for slot in held.region.slots if slot.name in state}
                for slot, whole in _wholes_of(model, unit, values).items():
                    shard_S[held.region.piece(slot, model.collectives.shard_rank)] = _piece_of(model, held, slot, whole)
            unit.store.rewritten()
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(state[name])


def sharded_optimizer_state(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State as DTensors by parameter name, and groups of names: the layout of PyTorch's own. Collective.

    An optimizer that has not stepped gives zeros for a checkpoint to be read into. What is still zero when it comes
    back, such as the state of a parameter that no step has used, is not taken.
    """
    names = {shard: slot.name for slot, shard in _trainables(model)}
    template = {} if optimizer.state else _template(optimizer)
    state: dict[str, dict[str, Any]] = defaultdict(dict)
    for unit in model.units().values():
        of_slot = {
            slot: optimizer.state.get(shard) or template.get(shard, {})
            for slot, shard in zip(unit.trainable.region.slots, unit.trainable.shards, strict=True)
        }
        for key in dict.fromkeys(key for entry in of_slot.values() for key in entry):
            having = {slot: entry[key] for slot, entry in of_slot.items() if key in entry}
            sharded = {slot: value for slot, value in having.items() if _is_sharded(value)}
            for slot, rows in zip(sharded, _rows_of_pieces(model, unit, sharded), strict=True):
                state[slot.name][key] = _as_dtensor(model, slot, rows)
            for slot, value in having.items():
                if slot not in sharded:
                    state[slot.name][key] = value.clone() if isinstance(value, torch.Tensor) else value
    groups = [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": dict(state), "param_groups": groups}


def load_sharded_optimizer_state(
    model: ShardedModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Takes what ``sharded_optimizer_state`` gave. Collective over all ranks."""
    names = {shard: slot.name for slot, shard in _trainables(model)}
    for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
        mine = [names[parameter] for parameter in group["params"]]
        if sorted(mine) != sorted(loaded["params"]):
            raise FsdpvizError(
                "an optimizer's state must have the same groups of parameters; the checkpoint has "
                f"{loaded['params'][:3]} where this optimizer has {mine[:3]}. Make its groups as they were"
            )
        group |= {key: value for key, value in loaded.items() if key != "params"}
    with torch.no_grad():
        for unit in model.units().values():
            shards = dict(zip(unit.trainable.region.slots, unit.trainable.shards, strict=True))
            entries = {slot: dict(state["state"].get(slot.name, {})) for slot in shards}
            for key in dict.fromkeys(key for entry in entries.values() for key in entry):
                sharded = {slot: entry[key] for slot, entry in entries.items() if _is_sharded(entry.get(key))}
                for slot, whole in _wholes_of(model, unit, sharded).items():
                    entries[slot][key] = whole
            for slot, entry in entries.items():
                _take(model, unit.trainable, optimizer.state, shards[slot], slot, entry)


def _take(
    model: ShardedModel,
    held: Held,
    state: MutableMapping[Any, dict[str, Any]],
    shard: torch.Tensor,
    slot: Slot,
    loaded: Mapping[str, Any],
) -> None:
    """Writes into the state that is there, whatever tier it is on, or begins it. Nothing begins with zeros alone."""
    tensors = [value for value in loaded.values() if isinstance(value, torch.Tensor)]
    if shard not in state and not any(value.any() for value in tensors):
        return
    entry = state[shard]
    for key in entry.keys() - loaded.keys():
        _ = entry[key].zero_() if isinstance(entry[key], torch.Tensor) else None
    for key, value in loaded.items():
        if not _is_sharded(value):
            entry[key] = value.clone() if isinstance(value, torch.Tensor) else value
            continue
        if not isinstance(entry.get(key), torch.Tensor):
            entry[key] = torch.empty_like(shard.detach(), dtype=value.dtype)
        entry[key].copy_(_piece_of(model, held, slot, value))


# -- rows and pieces: a rank's rows are whole parameters' dim 0 in W chunks, its pieces are its shard's


def _rows_of(model: ShardedModel, unit: Unit, held: Held, shard_S: torch.Tensor) -> Iterator[torch.Tensor]:  # noqa: N803
    """This rank's rows of each slot, copied to the CPU. Collective."""
    full = gathered(model, unit.name, shard_S)
    for slot in held.region.slots:
        yield _my_rows(model, full[slot.start : slot.stop].view(slot.shape)).cpu().clone()


def _rows_of_pieces(model: ShardedModel, unit: Unit, pieces: Mapping[Slot, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same for tensors of the shape of this rank's shards, of some slots of the trainable region. Collective."""
    if not pieces:
        return
    held, rank = unit.trainable, model.collectives.shard_rank
    shard_T = torch.zeros(held.region.shard_numel, dtype=next(iter(pieces.values())).dtype)  # noqa: N806
    for slot, piece in pieces.items():
        shard_T[held.region.piece(slot, rank)] = piece.detach().cpu()
    rows = dict(zip(held.region.slots, _rows_of(model, unit, held, shard_T), strict=True))
    yield from (rows[slot] for slot in pieces)


def _wholes_of(model: ShardedModel, unit: Unit, values: Mapping[Slot, Any]) -> dict[Slot, torch.Tensor]:
    """Each value, which is a DTensor of rows or a whole tensor, whole and flat on the CPU. Collective."""
    if not values:
        return {}
    ranks = model.collectives.mesh.shard
    chunk_numels = {slot: -(-(slot.shape or (1,))[0] // ranks) * math.prod(slot.shape[1:]) for slot in values}
    mine_K = torch.zeros(sum(chunk_numels.values()), dtype=next(iter(values.values())).dtype)  # noqa: N806
    start = 0
    for slot, value in values.items():
        rows = _loaded_rows(model, slot, value).flatten()
        mine_K[start : start + rows.numel()] = rows
        start += chunk_numels[slot]
    all_WK = gathered(model, unit.name, mine_K).view(ranks, -1)  # noqa: N806
    wholes, start = {}, 0
    for slot, chunk_numel in chunk_numels.items():
        wholes[slot] = all_WK[:, start : start + chunk_numel].flatten()[: slot.numel]
        start += chunk_numel
    return wholes


def _piece_of(model: ShardedModel, held: Held, slot: Slot, whole: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole and flat parameter."""
    rank = model.collectives.shard_rank
    piece = held.region.piece(slot, rank)
    first = rank * held.region.shard_numel + piece.start - slot.start
    return whole[first : first + piece.stop - piece.start]


def _loaded_rows(model: ShardedModel, slot: Slot, value: Any) -> torch.Tensor:
    if tuple(value.shape) != slot.shape:
        raise FsdpvizError(f"parameter {slot.name} has shape {slot.shape}; the state dict's has {tuple(value.shape)}")
    if not isinstance(value, DTensor):
        return _my_rows(model, value)
    is_ours = tuple(value.placements) == _placements(model, slot) and value.device_mesh.shape == _mesh(model).shape
    return value.to_local() if is_ours else _my_rows(model, value.full_tensor())


def _my_rows(model: ShardedModel, whole: torch.Tensor) -> torch.Tensor:
    """Chunk r of dim 0, as ``torch.chunk`` cuts it, and none where it cuts fewer. Every rank has all of a scalar."""
    if not whole.dim():
        return whole
    ranks, rank = model.collectives.mesh.shard, model.collectives.shard_rank
    count = -(-whole.shape[0] // ranks)
    return whole[min(rank * count, whole.shape[0]) : (rank + 1) * count]


def _as_dtensor(model: ShardedModel, slot: Slot, rows: torch.Tensor) -> torch.Tensor:
    stride = torch.empty(slot.shape, device="meta").stride()
    placements = _placements(model, slot)
    return DTensor.from_local(
        rows, _mesh(model), placements, run_check=False, shape=torch.Size(slot.shape), stride=stride
    )


def _placements(model: ShardedModel, slot: Slot) -> tuple[Placement, ...]:
    within: Placement = Shard(0) if slot.shape else Replicate()
    return (within,) if model.collectives.mesh.replicate == 1 else (Replicate(), within)


def _mesh(model: ShardedModel) -> DeviceMesh:
    return model.collectives.device_mesh()


# -- what is there


def _with_shards(unit: Unit) -> Sequence[tuple[Held, torch.Tensor]]:
    held = [each for each in (unit.trainable, unit.frozen) if each.region.slots]
    return list(zip(held, unit.store.tensor.split([each.region.shard_numel for each in held]), strict=True))


def _all_names(held: Held) -> list[str]:
    return [name for names in held.names for name in names]


def _trainables(model: ShardedModel) -> Iterator[tuple[Slot, torch.Tensor]]:
    for unit in model.units().values():
        for held, _ in _with_shards(unit):
            yield from zip(held.region.slots, held.shards, strict=True)


def _is_sharded(value: Any) -> bool:
    """Whether a value of an optimizer's state has a piece on each rank; a count of steps has not."""
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)


def _template(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    """The state that a first step would make, all zeros. Steps a twin, on zeros; the optimizer is left alone."""
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), []
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    for group in optimizer.param_groups:
        mine = {torch.zeros_like(shard.detach()): shard for shard in group["params"] if shard.requires_grad}
        for stand_in in mine:
            stand_in.grad = torch.zeros_like(stand_in)
        stand_ins |= mine
        twin.param_groups.append(group | {"params": list(mine), "lr": 0.0})
    twin.step()
    return {
        stand_ins[stand_in]: {key: _zeroed(value) for key, value in entry.items()}
        for stand_in, entry in twin.state.items()
    }


def _zeroed(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
