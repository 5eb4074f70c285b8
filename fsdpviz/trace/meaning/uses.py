"""When FSDP's units are used: in forward from pre-forward to post-forward, in backward from pre-backward to
post-backward.

[Note: modules of one unit] ``fully_shard([a, b])`` makes one unit of two modules, called ``a, b``. Each module's
forward begins with the unit's pre-forward (in older versions of torch the first one's alone does), and the last one's
ends with its post-forward. What lies between is the unit's, until a unit begins that is in none of its modules: of an
embedding and an output layer that share their weights the blocks between are not.

[Note: hooks on one output] A module that returns what its last child returned, as a model does with its output layer,
has its hook on the same tensor. The child's runs first, for it was made first, so that the parent's backward begins
inside the child's and goes on after it. Until the child's ends, what runs is the child's: forward tells which unit
lies in which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...base.labels import Phase, RangeLabel

Range = tuple[int, int, int, str]  # lane, start_ns, end_ns, name
Use = tuple[int, int, int, str]  # lane, start_ns, end_ns, unit
_Owner = tuple[int, str, int | None]  # lane, unit, parameter group

POST_BACKWARD = (
    "post_backward_accumulate",
    "post_backward_reshard",
    "post_backward_rs_wait",
    "post_backward_reduce",
)
_AND = ", "  # between the names of a unit's modules


def unit_windows(labelled: Iterable[tuple[Range, RangeLabel]]) -> tuple[list[Use], list[Use]]:
    """Forward and backward windows, of ranges sorted by lane, start and −end.

    A range whose partner is missing (the recording's window cut it, checkpointing stopped early) stands for
    itself.
    """
    forward = _Forward()
    backward: list[Use] = []
    open_backward: dict[_Owner, Range] = {}
    for item, label in labelled:
        lane, start, end, _ = item
        unit = label.unit
        if unit is None:  # the loop's own phases, and hooks of FSDP1 whose unit is not known
            continue
        owner = lane, unit, label.param_group
        if label.family == "fsdpviz":
            if label.phase in (Phase.FORWARD, Phase.BACKWARD):
                (forward.found if label.phase == Phase.FORWARD else backward).append((lane, start, end, unit))
        elif label.phase == "pre_forward":
            forward.begin(owner, item)
        elif label.phase == "post_forward":
            forward.end(owner, item)
        elif label.phase == "pre_backward":
            if left_open := open_backward.pop(owner, None):
                backward.append((*left_open[:3], unit))
            open_backward[owner] = item
        elif label.phase in POST_BACKWARD:
            forward.give_up(owner)
            begun = open_backward.pop(owner, item)
            backward.append((lane, begun[1], end, unit))
    for owner in [*forward.open]:
        forward.give_up(owner)
    return forward.found, backward + [(*item[:3], unit) for (_, unit, _), item in open_backward.items()]


class _Forward:
    """The forward windows while the hooks are read. See [Note: modules of one unit]."""

    def __init__(self) -> None:
        self.found: list[Use] = []
        self.open: defaultdict[_Owner, list[Range]] = defaultdict(list)  # one in one where two models call units alike
        self._groups: set[_Owner] = set()  # the open ones of several modules
        self._left: dict[_Owner, Range] = {}  # those that another unit's forward ended, until the next module's begins

    def begin(self, owner: _Owner, item: Range) -> None:
        for group in [group for group in self._groups if group[0] == owner[0] and not _lies_in(owner[1], group[1])]:
            self._groups.remove(group)
            self._left[group] = begun = self.open[group].pop()
            self.found.append((item[0], begun[1], item[1], group[1]))
        if owner in self._groups:
            return
        self._left.pop(owner, None)
        self.open[owner].append(item)
        if _AND in owner[1]:
            self._groups.add(owner)

    def end(self, owner: _Owner, item: Range) -> None:
        self._groups.discard(owner)
        left = self._left.pop(owner, item)
        begun = self.open[owner].pop() if self.open[owner] else left
        self.found.append((item[0], begun[1], item[2], owner[1]))

    def give_up(self, owner: _Owner) -> None:
        """What began and did not end stands for itself: its backward is over, or the recording."""
        self._groups.discard(owner)
        self._left.pop(owner, None)
        self.found += [(*item[:3], owner[1]) for item in self.open.pop(owner, ())]


def _lies_in(unit: str, group: str) -> bool:
    return unit == group or any(unit.startswith(f"{module}.") for module in group.split(_AND))


def outer_first(backward: Sequence[Use], forward: Sequence[Use]) -> list[Use]:
    """The backward windows, a parent's from where its child's began, so that the child's is inside it.

    See [Note: hooks on one output].
    """
    found: list[Use] = []
    open_: list[Use] = []
    nested: set[tuple[str, str]] | None = None
    for window in sorted(backward):
        lane, start, end, unit = window
        open_ = [other for other in open_ if other[0] == lane and other[2] > start]
        if over_before := [other for other in open_ if other[2] < end]:
            nested = _nested(forward) if nested is None else nested
            start = min((other[1] for other in over_before if (unit, other[3]) in nested), default=start)
        found.append((lane, start, end, unit))
        open_.append(window)
    return found


def _nested(forward: Iterable[Use]) -> set[tuple[str, str]]:
    """Pairs of units, the second's forward inside the first's."""
    found: set[tuple[str, str]] = set()
    open_: list[Use] = []
    for window in sorted(forward, key=lambda use: (use[0], use[1], -use[2])):
        open_ = [other for other in open_ if other[0] == window[0] and other[2] >= window[2]]
        found |= {(other[3], window[3]) for other in open_}
        open_.append(window)
    return found
