"""What is issued when: pure functions and one pure machine, used by engines and by whoever replays a step.

Units are in forward order, the root first; it holds what no block holds and runs around all of them.

``Scheduler`` is told what the model does ("unit u is about to run forward") and answers with what is to be issued,
in order. The glass box carries the answer out; ``step_events`` feeds it an ideal step and returns the whole order.
Nothing here knows of tensors, threads or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from .base.errors import FsdpvizError


def forward_prefetch_targets(units: Sequence[str], depth: int) -> dict[str, list[str]]:
    """For each unit, the units whose all-gather it issues before its own forward: the next ``depth`` ones."""
    return {unit: list(units[i + 1 : i + 1 + depth]) for i, unit in enumerate(units)}


def backward_prefetch_targets(units: Sequence[str], depth: int) -> dict[str, list[str]]:
    """For each unit, the units whose all-gather it issues before its own gradients are computed.

    Backward visits the root first (its output is the loss's input) and then the blocks from the last to the first.
    """
    root, *blocks = units
    return forward_prefetch_targets([root, *reversed(blocks)], depth)


class Tier(StrEnum):
    """Where shards lie between uses."""

    DEVICE = "device"
    HOST = "host"  # pinned where there is a device to copy to
    DISK = "disk"  # a memory-mapped file


def crosses(tier: Tier, side: Tier) -> bool:
    """True where ``tier`` and ``side`` are not both the device's, or both the host's; a disk is on the host's side."""
    return (tier is Tier.DEVICE) != (side is Tier.DEVICE)


@dataclass(frozen=True)
class Policy:
    """Every decision about order. The defaults overlap; ``naive()`` is chapter one's engine.

    ``order`` "pre" issues prefetches before a unit computes, "post" after it has been freed (less memory, less
    overlap). ``gathered_limit`` bounds the units that are gathered or being gathered when a prefetch is issued; a
    unit that is needed now is always gathered. ``reshard_after_forward`` as in Experiment: an integer keeps 1/n of
    the parameters and gathers among n ranks in backward. ``keep_last`` units at the end of forward stay gathered, for
    backward begins with them; up to one more than the prefetch depth it costs no memory, since as many are gathered
    at once anyway. ``reduce_when`` "unit" reduces a unit as soon as its
    gradients exist, "end" after the whole backward. ``reduces_in_flight`` bounds the reductions under way, and with
    them the memory of unreduced gradients. ``optimizer_when`` "backward" steps a unit once its gradient shard has
    arrived. Each of ``parameters_on``, ``gradients_on`` and ``optimizer_on`` is any tier; what the optimizer does not
    find on its ``side`` comes there for the step, unit by unit.
    """

    forward_depth: int = 1
    backward_depth: int = 1
    order: Literal["pre", "post"] = "pre"
    gathered_limit: int | None = None
    reshard_after_forward: bool | int = True
    keep_last: int = 0
    streams: Literal["separate", "one"] = "separate"
    reduce_when: Literal["unit", "end"] = "unit"
    reduces_in_flight: int = 2
    optimizer_when: Literal["step", "backward"] = "step"
    parameters_on: Tier = Tier.DEVICE
    gradients_on: Tier = Tier.DEVICE
    optimizer_on: Tier = Tier.DEVICE

    def __post_init__(self) -> None:
        least = {"forward_depth": 0, "backward_depth": 0, "keep_last": 0, "reduces_in_flight": 1}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise FsdpvizError(f"Policy.{name} must be at least {minimum}; got {getattr(self, name)}")
        if self.gathered_limit is not None and self.gathered_limit < 1:
            raise FsdpvizError(f"Policy.gathered_limit must be at least 1, or None; got {self.gathered_limit}")

    @property
    def side(self) -> Tier:
        """Where the optimizer steps: on the device, or on the host for parameters that lie there or on disk."""
        return Tier.DEVICE if self.parameters_on is Tier.DEVICE else Tier.HOST

    @property
    def small_ranks(self) -> int | None:
        """Among how many ranks backward gathers what an integer ``reshard_after_forward`` keeps a part of."""
        reshard = self.reshard_after_forward
        return None if isinstance(reshard, bool) else reshard

    @property
    def gradients_rest_on(self) -> Tier:
        """Where a reduced gradient waits for its step. One that is stepped with in backward goes there at once."""
        is_detour = self.optimizer_when == "backward" and crosses(self.gradients_on, self.side)
        return self.side if is_detour else self.gradients_on

    @classmethod
    def naive(cls) -> Policy:
        """One stream, nothing ahead: gather, wait, compute, free, reduce, one after the other."""
        return cls(forward_depth=0, backward_depth=0, streams="one", reduces_in_flight=1)


class Op(StrEnum):
    """What can be issued for a unit. READ, COPY_IN, COPY_OUT and WRITE exist only for shards that lie elsewhere."""

    READ = "read"  # parameter shard, disk → host
    COPY_IN = "copy_in"  # parameter shard, host → device
    GATHER = "gather"
    WAIT = "wait"  # compute waits for the gather
    FORWARD = "forward"
    RESHARD = "reshard"  # keep 1/n of the parameters, free the rest
    FREE = "free"
    BACKWARD = "backward"
    REDUCE = "reduce"  # reduce-scatter inside the shard group
    ALL_REDUCE = "all_reduce"  # of the reduced shard, across replicas
    COPY_OUT = "copy_out"  # gradient shard, device → host
    WAIT_REDUCED = "wait_reduced"  # compute waits for the last of REDUCE, ALL_REDUCE, COPY_OUT
    OPTIMIZER = "optimizer"
    WRITE = "write"  # shard, host → disk


class Event(NamedTuple):
    op: Op
    unit: str

    def __str__(self) -> str:
        return f"{self.op}({self.unit})"


class Scheduler:
    """Answers what to issue. One a model; it remembers which units are gathered and which reductions are under way."""

    def __init__(self, units: Sequence[str], policy: Policy, *, replicas: int = 1) -> None:
        root, *blocks = units
        self.policy = policy
        self.units = tuple(units)
        self._root = root
        self._kept = frozenset(blocks[max(0, len(blocks) - policy.keep_last) :])
        self._has_replicas = replicas > 1
        self._ahead = {
            Op.FORWARD: forward_prefetch_targets(units, policy.forward_depth),
            Op.BACKWARD: backward_prefetch_targets([root, *blocks], policy.backward_depth),
        }
        self._gathered: dict[str, None] = {}  # gathered or being gathered, in order of issue
        self._resharded: set[str] = set()  # those that kept 1/n after forward
        self._reducing: dict[str, None] = {}  # reductions that nobody has waited for, in order of issue
        self._late: dict[str, None] = {}  # reduce_when "end": units that wait for the end of backward

    def before_forward(self, unit: str) -> list[Event]:
        return self._before(Op.FORWARD, unit)

    def after_forward(self, unit: str, *, will_backward: bool = True) -> list[Event]:
        """Frees the unit if the policy says so. The root stays for backward, which needs it at once."""
        is_needed_soon = unit in self._kept or (unit == self._root and len(self.units) > 1)
        stays = self.policy.reshard_after_forward is False or is_needed_soon
        if will_backward and stays:
            freed = []
        elif will_backward and self.policy.small_ranks is not None:
            freed = self._let_go(Op.RESHARD, unit)
            self._resharded.add(unit)
        else:
            freed = self._free(unit)
        return freed + self._prefetch_after(Op.FORWARD, unit)

    def before_backward(self, unit: str) -> list[Event]:
        return self._before(Op.BACKWARD, unit)

    def after_backward(self, unit: str, *, reduces: bool = True) -> list[Event]:
        """The unit's gradients are complete. ``reduces`` is False while gradients are only accumulated.

        Nothing is to be done for a unit that waits for the end of backward already.
        """
        if unit in self._late:
            return []
        events = self._free(unit)
        if reduces and self.policy.reduce_when == "end":
            self._late[unit] = None
        elif reduces:
            events += self._reduce(unit)
        return events + self._prefetch_after(Op.BACKWARD, unit)

    def end_backward(self) -> list[Event]:
        """After the last gradient: late reductions, then wait for all, then free what was gathered in vain."""
        events = [event for unit in self._late for event in self._reduce(unit)]
        self._late.clear()
        events += [Event(Op.WAIT_REDUCED, unit) for unit in self._reducing]
        self._reducing.clear()
        left = dict.fromkeys([*self._gathered, *sorted(self._resharded)])
        return events + [event for unit in left for event in self._free(unit)]

    def optimizer_step(self) -> list[Event]:
        """The optimizer's turn after backward; nothing is left to do where it stepped in backward."""
        if self.policy.optimizer_when == "backward":
            return []
        return [event for unit in self.units for event in self._optimize(unit)]

    def abandon(self) -> list[Event]:
        """What ends a step early: wait for what is under way, free what is gathered."""
        self._late.clear()
        return self.end_backward()

    def forget(self) -> None:
        """Nothing is gathered or under way: what a step that raised leaves, once each unit has been given up."""
        for record in (self._gathered, self._resharded, self._reducing, self._late):
            record.clear()

    def _before(self, op: Op, unit: str) -> list[Event]:
        """Gather what is needed, then what comes next, then wait: the stream never idles while compute waits."""
        events = self._fetch(unit)
        if self.policy.order == "pre":
            events += self._prefetch(op, unit)
        events += [Event(Op.WAIT, unit), Event(op, unit)]
        # the root's own end comes after all blocks, too late to gather them
        return events + (self._prefetch(op, unit) if self.policy.order == "post" and unit == self._root else [])

    def _prefetch_after(self, op: Op, unit: str) -> list[Event]:
        return self._prefetch(op, unit) if self.policy.order == "post" and unit != self._root else []

    def _prefetch(self, op: Op, unit: str) -> list[Event]:
        events: list[Event] = []
        for target in self._ahead[op].get(unit, ()):
            limit = self.policy.gathered_limit
            if limit is not None and len(self._gathered) >= limit:
                break
            events += self._fetch(target)
        return events

    def _fetch(self, unit: str) -> list[Event]:
        if unit in self._gathered:
            return []
        self._gathered[unit] = None
        if unit in self._resharded:  # its part is on the device
            return [Event(Op.GATHER, unit)]
        where = self.policy.parameters_on
        events = [Event(Op.READ, unit)] if where is Tier.DISK else []
        events += [Event(Op.COPY_IN, unit)] if where is not Tier.DEVICE else []
        return [*events, Event(Op.GATHER, unit)]

    def _free(self, unit: str) -> list[Event]:
        if unit in self._resharded:
            self._resharded.remove(unit)
            self._gathered.setdefault(unit, None)  # a part that nobody gathered again has to go too
        return self._let_go(Op.FREE, unit)

    def _let_go(self, op: Op, unit: str) -> list[Event]:
        if unit not in self._gathered:
            return []
        del self._gathered[unit]
        return [Event(op, unit)]

    def _reduce(self, unit: str) -> list[Event]:
        events = []
        while len(self._reducing) >= self.policy.reduces_in_flight:
            oldest = next(iter(self._reducing))
            del self._reducing[oldest]
            events.append(Event(Op.WAIT_REDUCED, oldest))
        self._reducing[unit] = None
        events.append(Event(Op.REDUCE, unit))
        if self._has_replicas:
            events.append(Event(Op.ALL_REDUCE, unit))
        if self.policy.gradients_rest_on is not Tier.DEVICE:
            events.append(Event(Op.COPY_OUT, unit))
        if self.policy.optimizer_when == "backward":
            events += self._optimize(unit)
        return events

    def _optimize(self, unit: str) -> list[Event]:
        writes = self.policy.parameters_on is Tier.DISK or self.policy.optimizer_on is Tier.DISK
        return [Event(Op.OPTIMIZER, unit), *([Event(Op.WRITE, unit)] if writes else [])]


def step_events(
    units: Sequence[str], policy: Policy, *, replicas: int = 1, reduces: Iterable[bool] = (True,)
) -> list[Event]:
    """The exact order of issues of one step; ``reduces`` has one entry a microbatch.

    The root's forward is around all blocks', so its gradients are complete last.
    """
    scheduler = Scheduler(units, policy, replicas=replicas)
    root, *blocks = units
    events: list[Event] = []
    for reduce in reduces:
        events += scheduler.before_forward(root)
        for unit in blocks:
            events += scheduler.before_forward(unit)
            events += scheduler.after_forward(unit)
        events += scheduler.after_forward(root)
        events += scheduler.before_backward(root)
        for unit in reversed(blocks):
            events += scheduler.before_backward(unit)
            events += scheduler.after_backward(unit, reduces=reduce)
        events += scheduler.after_backward(root, reduces=reduce)
        events += scheduler.end_backward()
    return events + scheduler.optimizer_step()
