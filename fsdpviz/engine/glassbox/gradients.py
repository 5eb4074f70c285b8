"""The way of one unit's gradients.

    where                                            until
    nowhere                                          backward reaches the unit
    full, on this rank (``full_parameter.grad``)     reduce; gradients that are only accumulated stay here
    on side streams                                  wait_reduced
    this rank's shard (``shard_parameter.grad``)     the optimizer's zero_grad

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
from ...schedule import Tier
from .accelerator import Cargo, Event, Lane, Wire
from .disk import MappedFile
from .held import Held, UnitContext
from .storage import place


@dataclass(eq=False)
class Reduction:
    """A reduction under way. All it refers to lives until compute has waited for ``done``."""

    gradients: list[torch.Tensor | None]  # full, None for parameters that this backward did not use
    counted_bytes: int  # on the device, for all that is held here
    accumulates: bool  # onto shards of gradients that are there already
    flat_WT: torch.Tensor | None = None  # noqa: N815  # dtype of reduction
    shard_T: torch.Tensor | None = None  # noqa: N815  # dtype of reduction, then of the shard
    done: Event | None = None
    has_landed: bool = False


class Gradients:
    """See the table above. Every method is called by the training thread, in the order that the schedule says."""

    def __init__(self, unit: str, held: Held, context: UnitContext) -> None:
        self._unit, self._held, self._region = unit, held, held.region
        self._accelerator, self._collectives = context.accelerator, context.collectives
        self._precision, self._division = context.precision, context.division
        self._tier = context.policy.gradients_on
        self._has_replicas = context.collectives.mesh.replicate > 1
        self._device = context.accelerator.pools.device
        self._arrived = 0  # trainable parameters whose gradient is complete in this backward
        self._local_bytes = 0  # counted for full gradients; given back with the reduction that took them over
        self._landed_bytes = 0  # counted for shards of gradients on the device; given back once they are dropped
        self._going: Reduction | None = None  # lives from reduce to wait_reduced
        self._home_T: torch.Tensor | None = None  # offloaded gradients' place, as long as the model
        self.home_file: MappedFile | None = None
        if self._tier is not Tier.DEVICE:
            empty = torch.zeros(self._region.shard_numel, dtype=self._precision.shard)
            file = context.folder / f"{unit}.gradients"
            self._home_T, self.home_file = place(empty, self._tier, self._accelerator, file)
        self.when_complete: Callable[[], None] = _nothing

    @property
    def full_bytes(self) -> int:
        """What one reduce-scatter of the unit takes."""
        return self._region.full_numel * self._precision.reduce.itemsize

    @property
    def are_complete(self) -> bool:
        return self._arrived >= len(self._region.slots)

    @property
    def are_local(self) -> bool:
        """True when some full gradient waits to be reduced."""
        return any(parameter.grad is not None for parameter in self._held.fulls)

    def watch(self) -> None:
        """Calls ``when_complete`` in each backward when the last trainable parameter has its gradient."""
        for parameter in self._held.fulls:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _arrive(self, _parameter: torch.Tensor) -> None:
        if not self._local_bytes:
            local_bytes = self._region.numel * self._precision.param.itemsize
            self._device.take(local_bytes)
            self._local_bytes = local_bytes
        self._arrived += 1
        if self.are_complete:
            self.when_complete()

    def end_backward(self) -> None:
        """The next backward counts anew."""
        self._arrived = 0

    def give_up(self) -> None:
        """Forgets gradients of a step that raised; what is being reduced will not land."""
        self._arrived = 0
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
                self._device.give(going.counted_bytes)

    def reduce(self) -> None:
        """Issues the reduce-scatter of the unit's gradients. Collective over the shard group."""
        gradients = [parameter.grad for parameter in self._held.fulls]
        for parameter in self._held.fulls:
            parameter.grad = None
        self.settle()
        dtype = self._precision.reduce
        buffers_bytes = (self._region.full_numel + self._region.shard_numel) * dtype.itemsize
        self._device.take(buffers_bytes)
        accumulates = any(shard.grad is not None for shard in self._held.shards)
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

    def copy_out(self) -> None:
        """Issues the copy of the reduced shard to the gradients' tier, adding to what accumulates there."""
        going, home_T = self._under_way(), self._home_T  # noqa: N806
        assert home_T is not None

        def copy_out() -> None:
            assert going.shard_T is not None
            if going.accumulates:
                home_T.add_(going.shard_T.to(home_T.device))
            else:
                home_T.copy_(going.shard_T, non_blocking=True)

        cargo = Cargo(Wire.D2H, self._region.shard_numel * self._precision.shard.itemsize)
        self._issue(Lane.D2H, "d2h", copy_out, cargo)

    def wait_reduced(self) -> None:
        """Compute waits for the reduction; the optimizer sees its result and the buffers go."""
        going = self._under_way()
        assert going.done is not None
        with record_function(loop_label("reduce_wait", self._unit)):
            going.done.wait()
            if self._home_T is not None:
                going.done.synchronize()  # the optimizer is the host's
        self.land(going)
        self._device.give(going.counted_bytes)
        self._going = None

    def land(self, going: Reduction) -> None:
        """Gives each shard parameter its piece of the reduced gradient, once; unused ones keep None."""
        landed_T = going.shard_T if self._home_T is None else self._home_T  # noqa: N806
        if going.has_landed or landed_T is None:
            return
        going.has_landed = True
        if self._home_T is None and not going.accumulates:
            self._device.take(landed_T.nbytes)
            self._landed_bytes = landed_T.nbytes
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
        if self._landed_bytes and all(shard.grad is None for shard in self._held.shards):
            self._device.give(self._landed_bytes)
            self._landed_bytes = 0

    def step_behind(self, step: Callable[[], None]) -> Event:
        """Lands the reduction and runs ``step`` on the optimizer's stream; to wait for the one is to wait for both."""
        going = self._under_way()

        def land_and_step() -> None:
            self.land(going)
            step()

        after = [going.done] if going.done else []
        label = loop_label(Phase.OPTIMIZER)
        going.done = self._accelerator.stream(Lane.OPTIMIZER).submit(label, land_and_step, after)
        return going.done

    def _finish_sum(self, going: Reduction) -> None:
        assert going.shard_T is not None
        if self._division.after != 1:
            going.shard_T.div_(self._division.after)
        going.shard_T = going.shard_T.to(self._precision.shard)

    def _issue(self, lane: Lane, what: str, work: Callable[[], None], cargo: Cargo) -> None:
        going = self._under_way()
        after = [self._accelerator.compute_event(), *([going.done] if going.done else [])]
        going.done = self._accelerator.stream(lane).submit(loop_label(what, self._unit), work, after, cargo)

    def _under_way(self) -> Reduction:
        assert self._going is not None  # the schedule reduces before it waits
        return self._going


def _nothing() -> None:
    pass
