"""How much memory a step takes in each tier: the schedule replayed over sizes. Pure: numbers, no tensors.

The replay counts what the engine's pools count: shards, gathered parameters, gradients, buffers of reductions, copies
on their way, optimizer state. Activations, autograd's temporaries and the page cache are not in it. It supposes that
every forward and backward uses every unit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...base.errors import FsdpvizError
from ...base.labels import ROOT
from ...schedule import Event, Op, Policy, Tier, crosses, step_events
from .accelerator import Pool, Pools
from .layout import Region
from .precision import Precision


@dataclass(frozen=True)
class UnitBytes:
    """One unit's sizes on one rank, in bytes, as ``of`` has them."""

    shard: int  # parameters as the optimizer sees them
    full: int  # gathered
    gradients: int  # unreduced, as autograd leaves them
    reduction: int  # the flat buffer and the reduced shard
    gradient_shard: int
    state: int = 0  # of the optimizer

    @classmethod
    def of(cls, trainable: Region, frozen: Region, precision: Precision, state_bytes: int = 0) -> UnitBytes:
        shard, param, reduce = (each.itemsize for each in (precision.shard, precision.param, precision.reduce))
        return cls(
            shard=(trainable.shard_numel + frozen.shard_numel) * shard,
            full=(trainable.full_numel + frozen.full_numel) * param,
            gradients=trainable.numel * param,
            reduction=(trainable.full_numel + trainable.shard_numel) * reduce,
            gradient_shard=trainable.shard_numel * shard,
            state=state_bytes,
        )


class _Tally:
    """Bytes in each tier now, and at most so far."""

    def __init__(self) -> None:
        self.now: Counter[Tier] = Counter()
        self.peak: Counter[Tier] = Counter()

    def add(self, tier: Tier, count_bytes: int) -> None:
        self.now[tier] += count_bytes
        self.peak[tier] = max(self.peak[tier], self.now[tier])


class Replay:
    """One step of ``units``, by name in forward order, replayed. ``peaks()`` are the bytes at most in each tier.

    ``reduces`` has one entry a microbatch: whether its backward reduces gradients or only adds them up.
    """

    def __init__(
        self,
        units: Mapping[str, UnitBytes],
        policy: Policy,
        *,
        replicas: int = 1,
        reduces: Iterable[bool] = (True,),
    ) -> None:
        self._units, self._policy = units, policy
        self._tally = _Tally()
        self._gathered: set[str] = set()
        self._parts: set[str] = set()
        self._staged: set[str] = set()
        self._unreduced: set[str] = set()  # units with gradients that no reduction has taken over
        self._landed: set[str] = set()  # units whose gradient shards are on the device; the next ones are added to them
        self._visiting: dict[str, bool] = {}  # units whose guests are here; True: their gradients too
        for unit in units.values():
            self._tally.add(policy.parameters_on, unit.shard)
            self._tally.add(policy.optimizer_on, unit.state)
            if policy.gradients_rest_on is not Tier.DEVICE:
                self._tally.add(policy.gradients_rest_on, unit.gradient_shard)
        names = [ROOT, *(name for name in units if name != ROOT)]  # a root without parameters is scheduled all the same
        for event in step_events(names, policy, replicas=replicas, reduces=reduces):
            if event.unit in units and event.op not in (Op.OPTIMIZER, Op.WRITE):
                self._count(event, units[event.unit])
            elif event.unit in units and event.op is Op.OPTIMIZER and policy.optimizer_when == "backward":
                self._visit(event.unit)
        if policy.optimizer_when == "step":
            self._step_by_turns()

    def peaks(self) -> dict[Tier, int]:
        return {tier: self._tally.peak[tier] for tier in Tier}

    def _count(self, event: Event, unit: UnitBytes) -> None:
        name, add = event.unit, self._tally.add
        match event.op:
            case Op.READ:
                add(Tier.HOST, unit.shard)
            case Op.COPY_IN:
                add(Tier.DEVICE, unit.shard)
                self._staged.add(name)
            case Op.GATHER:
                add(Tier.DEVICE, unit.full)
                self._gathered.add(name)
            case Op.WAIT:
                self._let_go(name, unit)
            case Op.RESHARD:
                add(Tier.DEVICE, self._part_bytes(unit))
                self._parts.add(name)
                self._free(name, unit)
            case Op.FREE:
                self._let_go(name, unit)
                self._free(name, unit)
            case Op.BACKWARD:
                add(Tier.DEVICE, 0 if name in self._unreduced else unit.gradients)
                self._unreduced.add(name)
            case Op.REDUCE:
                add(Tier.DEVICE, unit.reduction)
                self._unreduced.discard(name)
            case Op.WAIT_REDUCED:
                stays = self._policy.optimizer_when == "step" and self._policy.gradients_rest_on is Tier.DEVICE
                if stays and name not in self._landed:
                    add(Tier.DEVICE, unit.gradient_shard)  # until zero_grad
                    self._landed.add(name)
                add(Tier.DEVICE, -unit.gradients - unit.reduction)
                self._end_visit(name)

    def _let_go(self, name: str, unit: UnitBytes) -> None:
        """What the gather read is not needed any more."""
        if name in self._parts and name in self._gathered:
            self._parts.remove(name)
            self._tally.add(Tier.DEVICE, -self._part_bytes(unit))
        if name in self._staged:
            self._staged.remove(name)
            self._tally.add(Tier.DEVICE, -unit.shard)
            if self._policy.parameters_on is Tier.DISK:
                self._tally.add(Tier.HOST, -unit.shard)

    def _free(self, name: str, unit: UnitBytes) -> None:
        if name in self._gathered:
            self._gathered.remove(name)
            self._tally.add(Tier.DEVICE, -unit.full)
        elif name in self._parts:
            self._parts.remove(name)
            self._tally.add(Tier.DEVICE, -self._part_bytes(unit))

    def _part_bytes(self, unit: UnitBytes) -> int:
        assert self._policy.small_ranks is not None  # an integer reshard_after_forward
        return unit.full // self._policy.small_ranks

    # -- the step, see visits.py

    def _step_by_turns(self) -> None:
        names = list(self._units)
        leaving: deque[str] = deque()
        for index, name in enumerate(names):
            for near in names[index : index + 2]:
                if near not in self._visiting:
                    self._visit(near, with_gradient=True)
            leaving.append(name)
            if len(leaving) > 1:
                self._end_visit(leaving.popleft())

    def _visit(self, name: str, *, with_gradient: bool = False) -> None:
        self._visiting[name] = with_gradient
        for tier, count_bytes in self._visit_bytes(name):
            self._tally.add(tier, count_bytes)

    def _end_visit(self, name: str) -> None:
        if name in self._visiting:
            for tier, count_bytes in self._visit_bytes(name):
                self._tally.add(tier, -count_bytes)
            del self._visiting[name]

    def _visit_bytes(self, name: str) -> Iterator[tuple[Tier, int]]:
        unit, side = self._units[name], self._policy.side
        guests = [(self._policy.optimizer_on, unit.state)]
        guests += [(self._policy.gradients_rest_on, unit.gradient_shard)] if self._visiting[name] else []
        crossing = [(tier, count_bytes) for tier, count_bytes in guests if crosses(tier, side)]
        yield Tier.HOST, sum(count_bytes for tier, count_bytes in crossing if tier is Tier.DISK)
        yield side, sum(count_bytes for _, count_bytes in crossing)


def check_budgets(peaks: Mapping[Tier, int], pools: Pools, rank: int) -> None:
    """Raises FsdpvizError where a step needs more of a tier than its budget, with the smallest that would do."""
    pool_of: dict[Tier, Pool] = {Tier.DEVICE: pools.device, Tier.HOST: pools.host, Tier.DISK: pools.disk}
    for tier, pool in pool_of.items():
        if pool.budget_bytes is not None and peaks[tier] > pool.budget_bytes:
            raise FsdpvizError(
                f"rank {rank}: {tier} memory has a budget of {pool.budget_bytes:,} bytes, and a step of this model "
                f"under this policy needs {peaks[tier]:,}. Raise the budget to that, offload more, or prefetch less"
            )
