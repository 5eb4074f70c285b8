"""The way of one unit's gradients.

    where                                            until
    nowhere                                          backward reaches the unit
    full, on this rank (``full_parameter.grad``)     reduce; gradients that are only accumulated stay here
    on side streams                                  wait_reduced
    this rank's shard (``shard_parameter.grad``)     the optimizer's zero_grad

Where the optimizer works on another side than that on which gradients lie, the shard rests out of sight instead, and is
``.grad`` for the time of the step alone, see ``visits.py``.

Shapes: W shard ranks × T trainable elements a rank.

[Note: what backward has finished with]
A unit's backward is over when autograd has accumulated the gradient of its last trainable parameter: by then every
operator that uses a trainable parameter has run. Operators that only need frozen parameters may still come, so a
unit that has some also waits for the gradients of its inputs; the model sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from ...base.labels import Phase, loop_label
from ...schedule import Tier, crosses
from .accelerator import Cargo, Event, Lane, Wire
from .disk import MappedFile
from .held import Held, UnitContext
from .storage import ShardStore, place
from .visits import Guest, Visit


@dataclass(eq=False)
class Reduction:
    """A reduction under way. All it refers to lives until compute has waited for ``done``."""

    gradients: list[torch.Tensor | None]  # full, None for parameters that this backward did not use
    counted_bytes: int  # on the device, for all that is held here
    accumulates: bool  # onto shards of gradients that are there already
    flat_WT: torch.Tensor | None = None  # noqa: N815  # dtype of reduction
    shard_T: torch.Tensor | None = None  # noqa: N815  # dtype of reduction, then of the shard
    summed_T: torch.Tensor | None = None  # noqa: N815  # what shard_T was cast from, perhaps on another stream
    done: Event | None = None
    has_landed: bool = False
    visit: Visit | None = None  # of optimizer state, for a step in backward


class Gradients:
    """See the table above. Every method is called by the training thread, in the order that the schedule says."""

    def __init__(self, unit: str, held: Held, context: UnitContext) -> None:
        self._unit, self._held, self._region = unit, held, held.region
        self._accelerator, self._collectives = context.accelerator, context.collectives
        self._precision, self._division = context.precision, context.division
        self._tier = context.policy.gradients_rest_on
        self._rests_elsewhere = crosses(self._tier, context.policy.side)
        self._has_replicas = context.collectives.mesh.replicate > 1
        self._device = context.accelerator.pools.device
        self._arrived: set[int] = set()  # ids of trainable parameters whose gradient is complete in this backward
        self._local_bytes = 0  # counted for full gradients; given back with the reduction that took them over
        self._landed_bytes = 0  # counted for shards of gradients on the device; given back once they are dropped
        self._going: Reduction | None = None  # lives from reduce to wait_reduced
        self._home_T: torch.Tensor | None = None  # offloaded gradients' place, as long as the model
        self._home_file: MappedFile | None = None
        if self._tier is not Tier.DEVICE:
            empty = torch.zeros(self._region.shard_numel, dtype=self._precision.shard)
            file = context.folder / f"{unit}.gradients"
            self._home_T, self._home_file = place(empty, self._tier, self._accelerator, file)
        self._rest_T: torch.Tensor | None = None  # rests elsewhere; lives from its landing to zero
        self._rests: list[bool] = []  # by slot: whether the backward used it
        self.when_complete: Callable[[], None] = _nothing

    @property
    def full_bytes(self) -> int:
        """What one reduce-scatter of the unit takes."""
        return self._region.full_numel * self._precision.reduce.itemsize

    @property
    def are_complete(self) -> bool:
        return len(self._arrived) >= len(self._region.slots)

    @property
    def are_local(self) -> bool:
        """True when some full gradient waits to be reduced."""
        return any(parameter.grad is not None for parameter in self._held.fulls)

    def watch(self) -> None:
        """Calls ``when_complete`` in each backward when the last trainable parameter has its gradient."""
        for parameter in self._held.fulls:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, parameter: torch.Tensor) -> None:
        if not self._local_bytes:
            local_bytes = self._region.numel * self._precision.param.itemsize
            self._device.take(local_bytes)
            self._local_bytes = local_bytes
        self._arrived.add(id(parameter))
        if self.are_complete:
            self.when_complete()

    def end_backward(self) -> None:
        """What comes now is counted anew: the next backward's, or what a reentrant checkpoint runs once more."""
        self._arrived.clear()

    def give_up(self) -> None:
        """Forgets gradients of a step that raised; what is being reduced will not land."""
        self._arrived.clear()
        going, self._going = self._going, None
        for parameter in self._held.fulls:
            parameter.grad = None
        self._device.give(self._local_bytes)
        self._local_bytes = 0
        if going is not None:
            going.has_landed = True
            try:
                if going.done is not None:
                    going.done.wait()
            finally:
                self._release(going)

    def reduce(self) -> None:
        """Issues the reduce-scatter of the unit's gradients. Collective over the shard group."""
        gradients = [parameter.grad for parameter in self._held.fulls]
        for parameter in self._held.fulls:
            parameter.grad = None
        self.settle()
        dtype = self._precision.reduce
        buffers_bytes = (self._region.full_numel + self._region.shard_numel) * dtype.itemsize
        self._device.take(buffers_bytes)
        accumulates = self._rest_T is not None or any(shard.grad is not None for shard in self._held.shards)
        going = self._going = Reduction(gradients, self._local_bytes + buffers_bytes, accumulates)
        self._local_bytes = 0

        def reduce() -> None:
            device = self._accelerator.device
            going.flat_WT = flat = torch.empty(self._region.full_numel, dtype=dtype, device=device)
            for slot, gradient in zip(self._region.slots, going.gradients, strict=True):
                here = flat[slot.start : slot.stop].view(slot.shape)
                _ = here.zero_() if gradient is None else here.copy_(gradient)
            flat[self._region.numel :].zero_()
            if self._division.before != 1:
                flat.div_(self._division.before)
            going.shard_T = torch.empty(self._region.shard_numel, dtype=dtype, device=device)
            self._collectives.reduce(going.shard_T, flat)
            if not self._has_replicas:
                self._finish_sum(going)

        cargo = self._collectives.reduce_cargo(self._region.full_numel * dtype.itemsize)
        self._issue(Lane.REDUCE, self._collectives.named("reduce_scatter"), reduce, cargo)

    def all_reduce(self) -> None:
        """Issues the all-reduce of the reduced shard across replicas. Collective over the replicate group."""
        going = self._under_way()

        def replicate() -> None:
            assert going.shard_T is not None
            self._collectives.replicate(going.shard_T)
            self._finish_sum(going)

        shard_bytes = self._region.shard_numel * self._precision.reduce.itemsize
        self._issue(Lane.REPLICATE, "all_reduce", replicate, self._collectives.replicate_cargo(shard_bytes))

    def copy_out(self, store: ShardStore) -> None:
        """Issues the copy of the reduced shard to the gradients' tier, adding to what accumulates there."""
        going, home_T = self._under_way(), self._home_T  # noqa: N806
        assert home_T is not None

        def copy_out() -> None:
            assert going.shard_T is not None
            if going.accumulates:
                home_T.add_(going.shard_T.to(home_T.device))
            else:
                home_T.copy_(going.shard_T, non_blocking=True)

        self._issue(Lane.D2H, "d2h", copy_out, Cargo(Wire.D2H, home_T.nbytes), says_bytes=True)
        if self._home_file is not None and going.done is not None:
            store.write(self._home_file.flush, [going.done])

    def wait_reduced(self) -> None:
        """Compute waits for the reduction; the optimizer sees its result and the buffers go."""
        going = self._under_way()
        assert going.done is not None
        with record_function(loop_label("reduce_wait", self._unit)):
            going.done.wait()
            if self._home_T is not None or (going.visit is not None and going.visit.crosses):
                going.done.synchronize()  # the host reads it next
        self.land(going)
        self._release(going)
        self._going = None

    def land(self, going: Reduction, *, stays: bool = True) -> None:
        """Gives each shard parameter its piece of the reduced gradient, once; unused ones keep None.

        One that does not stay, since it is stepped with at once, is counted with its reduction.
        """
        landed_T = going.shard_T if self._home_T is None else self._home_T  # noqa: N806
        if going.has_landed or landed_T is None:
            return
        going.has_landed = True
        if self._home_T is None and not going.accumulates and stays:
            self._device.take(landed_T.nbytes)
            self._landed_bytes = landed_T.nbytes
        used = [full is not None for full in going.gradients]
        if self._rests_elsewhere:
            if self._rest_T is None:
                self._rest_T, self._rests = landed_T, used
            else:
                _ = self._rest_T.add_(landed_T) if self._home_T is None else None  # home has been added to
                self._rests = [before or now for before, now in zip(self._rests, used, strict=True)]
            return
        rank = self._collectives.shard_rank
        for slot, shard, full in zip(self._region.slots, self._held.shards, going.gradients, strict=True):
            piece = landed_T[self._region.piece(slot, rank)]
            if shard.grad is None and full is not None:
                shard.grad = piece
            elif full is not None and self._home_T is None:
                assert shard.grad is not None
                shard.grad += piece

    def settle(self) -> None:
        """Gives back the account of gradients that the optimizer has dropped."""
        if self._landed_bytes and self._rest_T is None and all(shard.grad is None for shard in self._held.shards):
            self._device.give(self._landed_bytes)
            self._landed_bytes = 0

    def zero(self) -> None:
        """The optimizer's zero_grad has dropped what it sees; what rests elsewhere goes too."""
        self._rest_T = None
        self.settle()

    def shards(self) -> list[torch.Tensor]:
        """This rank's pieces of the reduced gradients, wherever they lie; none for what no backward used."""
        if self._rest_T is None:
            return [shard.grad for shard in self._held.shards if shard.grad is not None]
        return [self._rest_T[piece] for piece, rests in zip(self._pieces(), self._rests, strict=True) if rests]

    def guests(self) -> list[Guest]:
        """What has to come to the optimizer's side for a step."""
        return [] if self._rest_T is None else [Guest(self._rest_T, self._tier, self._show, returns=False)]

    def _show(self, rest_T: torch.Tensor | None) -> None:  # noqa: N803
        for piece, shard, rests in zip(self._pieces(), self._held.shards, self._rests, strict=True):
            shard.grad = rest_T[piece] if rest_T is not None and rests else None

    def _pieces(self) -> list[slice]:
        return [self._region.piece(slot, self._collectives.shard_rank) for slot in self._region.slots]

    def step_behind(self, step: Callable[[], None], visit: Visit, store: ShardStore) -> Event:
        """Lands the reduction and runs ``step`` on the optimizer's stream, once the guests of ``visit`` are there.

        To wait for the reduction is to wait for all of it, their way home too. The event is the end of the step.
        """
        going = self._under_way()
        going.visit = visit
        visit.come()

        def land_and_step() -> None:
            self.land(going, stays=False)
            step()

        after = [*([going.done] if going.done else []), *visit.arrived]
        label = loop_label(Phase.OPTIMIZER)
        stepped = self._accelerator.stream(Lane.OPTIMIZER).submit(label, land_and_step, after)
        going.done = visit.go([stepped], store)[-1]
        return stepped

    def _release(self, going: Reduction) -> None:
        self._device.give(going.counted_bytes)
        if going.visit is not None:
            going.visit.end()

    def _finish_sum(self, going: Reduction) -> None:
        assert going.shard_T is not None
        if self._division.after != 1:
            going.shard_T.div_(self._division.after)
        going.summed_T = going.shard_T
        going.shard_T = going.shard_T.to(self._precision.shard)

    def _issue(
        self, lane: Lane, what: str, work: Callable[[], None], cargo: Cargo, *, says_bytes: bool = False
    ) -> None:
        going = self._under_way()
        after = [self._accelerator.compute_event(), *([going.done] if going.done else [])]
        label = loop_label(what, self._unit, int(cargo.wire_bytes) if says_bytes else None)
        going.done = self._accelerator.stream(lane).submit(label, work, after, cargo)

    def _under_way(self) -> Reduction:
        assert self._going is not None  # the schedule reduces before it waits
        return self._going


def _nothing() -> None:
    pass
