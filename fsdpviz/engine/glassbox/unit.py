"""One unit: parameters that are gathered, used, freed and reduced together.

    state      where the parameters are                           left by
    SHARDED    this rank's shard, in its tier                     gather
    GATHERING  the full buffer is allocated and being written     wait
    READY      the modules see full parameters                    free, reshard
    PART       1/n of the full buffer is kept on the device       gather (among n ranks), free

``_move`` alone changes the state, but for ``give_up``, which ends a step that raised.
Gradients have a way of their own, see ``gradients.py``.
Shapes: W shard ranks × T trainable elements a rank, F frozen ones, S = T + F.

[Note: gathered in place]
Shards lie end to end, so an all-gather's output *is* the unit's parameters laid end to end, and the full parameters
are views of it: nothing is copied out. Only a unit that has frozen parameters besides trainable ones copies, since
its gathered buffer is W × (T + F) and each region must be contiguous.

[Note: freeing keeps the views]
Autograd has saved the full parameters for backward. Freeing resizes their storage to nothing and gathering again
resizes it back, so what autograd saved is valid again. The views hang on ``.data``, whose version counter no write
of ours touches; autograd would otherwise call them modified.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum

import torch
from torch import nn
from torch.profiler import record_function

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from .accelerator import Event, Lane
from .gradients import Gradients
from .held import Held, UnitContext
from .storage import ShardStore


class State(StrEnum):
    SHARDED = "sharded"
    GATHERING = "gathering"
    READY = "ready"
    PART = "part"


_MOVES = {
    State.SHARDED: {State.GATHERING},
    State.GATHERING: {State.READY},
    State.READY: {State.SHARDED, State.PART},
    State.PART: {State.GATHERING, State.SHARDED},
}


class Unit:
    """See the table above. Every method is called by the training thread, in the order that the schedule says."""

    def __init__(self, name: str, trainable: Held, frozen: Held, store: ShardStore, context: UnitContext) -> None:
        self.name, self.store = name, store
        self.state = State.SHARDED
        self.trainable, self.frozen = trainable, frozen
        self._held = [held for held in (trainable, frozen) if held.region.slots]
        self._accelerator, self._collectives = context.accelerator, context.collectives
        self._dtype = context.precision.param  # of the full buffer
        self._gathered: Event | None = None  # lives from gather to wait
        self._part: torch.Tensor | None = None  # 1/n of the full buffer; lives from reshard to the next wait
        pieces = store.tensor.split([held.region.shard_numel for held in self._held]) if self._held else ()
        for held, shard in zip(self._held, pieces, strict=True):
            self._make_shards(held, shard)
        self.gradients = Gradients(name, trainable, context)
        self.to_run: set[nn.Module] = set()  # modules of the unit that its forward has still to run
        self.in_backward = False  # between the gradient of its output and that of its last parameter
        self.has_stepped = False  # in this backward
        self._show(full=False)

    @property
    def full_bytes(self) -> int:
        """What one gather of the unit makes."""
        return sum(held.region.full_numel for held in self._held) * self._dtype.itemsize

    def gather(self) -> None:
        """Issues the all-gather of the shards, or of the kept parts among n ranks. Collective over that group."""
        part, self._gathered = self._part, None
        self._accelerator.pools.device.take(self.full_bytes)
        self._move(State.GATHERING)
        fulls = [self._allocate(held) for held in self._held]
        after = [self._accelerator.compute_event(), *([] if part is not None else self.store.gather_after())]

        def gather() -> None:
            source_S = part if part is not None else self.store.on_device.to(self._dtype)  # noqa: N806
            if len(fulls) == 1:
                self._collectives.gather(fulls[0], source_S, small=part is not None)
                return
            ranks = fulls[0].numel() // self.trainable.region.shard_numel
            mixed_WS = torch.empty(sum(full.numel() for full in fulls), dtype=source_S.dtype, device=source_S.device)  # noqa: N806
            self._collectives.gather(mixed_WS, source_S, small=part is not None)
            by_region = mixed_WS.view(ranks, -1).split([held.region.shard_numel for held in self._held], dim=1)
            for full, mine in zip(fulls, by_region, strict=True):
                full.view(ranks, -1).copy_(mine)

        cargo = self._collectives.gather_cargo(self.full_bytes, small=part is not None)
        stream = self._accelerator.stream(Lane.GATHER)
        self._gathered = stream.submit(
            loop_label(self._collectives.named("all_gather"), self.name), gather, after, cargo
        )

    def wait(self) -> None:
        """Compute waits for the gather; from here on the modules see full parameters."""
        if self.state is not State.GATHERING:
            return
        assert self._gathered is not None
        with record_function(loop_label("gather_wait", self.name)):
            self._gathered.wait()
        self._move(State.READY)
        self._drop_part()
        self.store.let_go()
        for held in self._held:
            if not held.fulls:
                self._make_fulls(held)
        self._show(full=True)

    def reshard(self) -> None:
        """Keeps this rank's 1/n of the full parameters on the device and frees the rest."""
        small_ranks = self._collectives.small_ranks
        assert small_ranks is not None
        first, count = self._collectives.shard_rank % small_ranks, self._collectives.mesh.shard // small_ranks
        pieces = [full_of(held).view(small_ranks, count, -1)[first].reshape(count, -1) for held in self._held]
        part = torch.cat(pieces, dim=1).flatten() if len(pieces) > 1 else pieces[0].flatten().clone()
        self._accelerator.pools.device.take(part.nbytes)
        self._free_full()
        self._part = part
        self._move(State.PART)

    def free(self) -> None:
        """The modules see shards again and the full buffer is gone. What was gathered in vain is waited for."""
        if self.state is State.GATHERING:
            self.wait()
        if self.state is State.READY:
            self._free_full()
        self._drop_part()
        self._move(State.SHARDED)

    def end_backward(self) -> None:
        """The gradient of its last parameter has come, or none comes any more."""
        self.in_backward = False
        self.to_run.clear()  # a checkpoint stops what it runs again as soon as it has what it wants
        self.gradients.end_backward()

    def begin_step(self) -> None:
        """Raises FsdpvizError where this backward has stepped the unit already."""
        if self.has_stepped:
            raise FsdpvizError(
                f"the gradients of {self.name} are complete twice in one backward, as where reentrant checkpoints run "
                "it again, and would be stepped with twice. Use use_reentrant=False or Policy(optimizer_when='step')"
            )
        self.has_stepped = True

    def give_up(self) -> None:
        """Back to SHARDED from wherever a step that raised has left the unit. Raises what was under way then raises."""
        self.end_backward()
        self.has_stepped = False
        with ExitStack() as stack:  # from the last to the first; one that fails does not keep the others from their end
            stack.callback(self.gradients.give_up)
            stack.callback(self.store.give_up)  # what the gather sends
            stack.callback(self._give_up_gather)

    def _give_up_gather(self) -> None:
        gathered, was = self._gathered, self.state
        self.state, self._gathered = State.SHARDED, None
        self._drop_part()
        try:
            if was is State.GATHERING and gathered is not None:
                gathered.wait()
        finally:
            if was in (State.GATHERING, State.READY):
                self._free_full()

    # -- what the modules and the optimizer see

    def _make_shards(self, held: Held, shard: torch.Tensor) -> None:
        """One parameter a slot: this rank's piece of it, a view of the shard of one dim, often empty."""
        rank = self._collectives.shard_rank
        trains = held is self.trainable
        for slot in held.region.slots:
            piece = shard[held.region.piece(slot, rank)]
            held.shards.append(nn.Parameter(piece, requires_grad=trains))

    def _make_fulls(self, held: Held) -> None:
        """See [Note: freeing keeps the views]."""
        flat = full_of(held).data
        trains = held is self.trainable
        for slot in held.region.slots:
            full = nn.Parameter(flat[slot.start : slot.stop].view(slot.shape), requires_grad=trains)
            held.fulls.append(full)
        if trains:
            self.gradients.watch()

    def _show(self, *, full: bool) -> None:
        for held in self._held:
            for places, parameter in zip(held.places, held.fulls if full else held.shards, strict=True):
                for place in places:
                    place.module._parameters[place.attribute] = parameter

    # -- memory

    def _allocate(self, held: Held) -> torch.Tensor:
        if held.full_WT is None:
            held.full_WT = torch.empty(held.region.full_numel, dtype=self._dtype, device=self._accelerator.device)
        else:
            held.full_WT.untyped_storage().resize_(held.region.full_numel * self._dtype.itemsize)
        return held.full_WT

    def _free_full(self) -> None:
        self._show(full=False)
        for held in self._held:
            if held.full_WT is not None:
                held.full_WT.untyped_storage().resize_(0)
        self._accelerator.pools.device.give(self.full_bytes)

    def _drop_part(self) -> None:
        if self._part is not None:
            self._accelerator.pools.device.give(self._part.nbytes)
            self._part = None

    def _move(self, state: State) -> None:
        assert state in _MOVES[self.state], f"unit {self.name}: {self.state} → {state}"
        self.state = state


def full_of(held: Held) -> torch.Tensor:
    assert held.full_WT is not None  # gathered before it is used
    return held.full_WT
