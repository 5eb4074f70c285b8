"""Which unit, phase and step a moment on a host thread belongs to, from the ranges that engines record.

FSDP2 does not record "the forward of unit u": it records ``FSDP::pre_forward (u)`` before and
``FSDP::post_forward (u)`` after it. The windows here run from the one to the other.

[Note: recompute] A checkpointed block runs its forward again inside backward, and FSDP's hooks are silent then: they
see that the unit is in backward. What tells is autograd. An operator of backward is not recorded for autograd; one
that is run again is, so that Kineto gives it a sequence number and forward thread 0, inside the node that needed it.
Such operators inside backward are recompute, and what they launch. Not so where backward is differentiated too
(``create_graph``), nor in exports without those arguments (Nsight): there it stays backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...base.labels import Phase, RangeLabel, parse_label
from .fsdp1 import NODE, fsdp1_labels
from .uses import POST_BACKWARD, Range, outer_first, unit_windows
from .windows import Windows

_STEP = re.compile(r"^ProfilerStep\s*#(\d{1,9})$")
COUNTED_STEP = re.compile(r"^(?i:train(?:ing)?[ _-]?)?(?i:step|iter(?:ation)?)[ _:#=-]*(\d{1,9})$")
_OPTIMIZER = re.compile(r"^Optimizer\.step#")
_HAND_WRITTEN = re.compile(r"^##\s*(forward|backward|optimizer)\s*##$")
_FORWARD = ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward")
_BACKWARD = (NODE, "FSDP::root_post_backward_callback")
_NEITHER = re.compile(r"^(?:Optimizer\.zero_grad#|enumerate\(DataLoader\)|fsdpviz::data$|## zero_grad ##)")
_LOOP_PHASES = {phase.value: phase for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)}


@dataclass(frozen=True)
class Attribution:
    """The windows of one rank. Units, phases and optimizer windows are by host lane; steps are on lane 0
    for all.
    """

    units: Windows[str]
    issuers: Windows[str]  # the units that issue collectives: FSDP's own ranges only
    phases: Windows[Phase | None]  # None: a range that is known to be neither forward nor backward
    optimizer: Windows[str]
    steps: Windows[int]
    has_loop_ranges: bool  # fsdpviz::forward and the like, which leave nothing to guess
    counted: Sequence[str] = ()  # names of the ranges that were taken for steps where the profiler's are not there

    @property
    def knows_backward(self) -> bool:
        """True if something says where backward is; then other compute on a host thread is forward."""
        return Phase.BACKWARD in self.phases.names


_NO_WINDOWS = Attribution(Windows([]), Windows([]), Windows([]), Windows([]), Windows([]), has_loop_ranges=False)


def attribution(ranges: Sequence[Range]) -> Attribution:
    """The windows that named ranges of host threads imply; ``ranges`` need no order."""
    if not ranges:
        return _NO_WINDOWS
    ordered = sorted(ranges, key=lambda item: (item[0], item[1], -item[2]))
    labels = _labels(ordered)
    labelled = labelled_ranges(ordered, labels)
    forward, backward = unit_windows(labelled)
    phases = [*_phases_of_loop(labelled), *_phases_by_name(ordered, labels)]
    phases += [(*window[:3], Phase.BACKWARD) for window in backward]
    phases += _forward_or_recompute(forward, phases)
    of_fsdp = [(item, label) for item, label in labelled if label.family == "FSDP"]
    optimizers = {name for name, label in labels.items() if _steps_optimizer(name, label)}
    numbered, is_profilers = _steps_of_profiler_or_program(ordered, labels)
    return Attribution(
        units=Windows([*forward, *outer_first(backward, forward), *_own_windows(labelled)]),
        # around a block lie other units' collectives too, and such as are no unit's: DDP's buckets, tensor parallelism
        issuers=Windows(_own_windows(of_fsdp)),
        phases=Windows(phases),
        optimizer=Windows([item for item in ordered if item[3] in optimizers]),
        steps=Windows(_steps(numbered)),
        has_loop_ranges=any(label.family == "fsdpviz" and label.phase in _LOOP_PHASES for _, label in labelled),
        counted=[] if is_profilers else [item[3] for item, _ in numbered],
    )


def _steps_of_profiler_or_program(
    ordered: Sequence[Range], names: Iterable[str]
) -> tuple[list[tuple[Range, int]], bool]:
    """Ranges of steps with their numbers, and whether they are the profiler's. Without those they are what a program
    calls step or iteration, if no number comes twice (an epoch begins anew) and none is in another (micro-batches).
    """
    names = list(names)
    if found := _numbered(ordered, names, _STEP):
        return found, True
    found = _numbered(ordered, names, COUNTED_STEP)
    times = sorted(item[1:3] for item, _ in found)
    is_clear = len({number for _, number in found}) == len(found)
    is_clear &= all(end <= begin for (_, end), (begin, _) in pairwise(times))
    return found if is_clear else [], False


def _numbered(ordered: Sequence[Range], names: Sequence[str], pattern: re.Pattern[str]) -> list[tuple[Range, int]]:
    numbers = {name: int(match[1]) for name in names if (match := pattern.match(name))}
    return [(item, numbers[item[3]]) for item in ordered if item[3] in numbers]


def _steps(numbered: Iterable[tuple[Range, int]]) -> list[tuple[int, int, int, int]]:
    """One window a step, on lane 0. Threads that each record a step are in it from the first's begin to the last's end;
    of ranges apart with one number the last is taken.
    """
    found: dict[int, tuple[int, int, int, int]] = {}
    for (_, start, end, _), step in sorted(numbered, key=lambda pair: pair[0][1:3]):
        before = found.get(step)
        if before and start < before[2] and before[1] < end:
            start, end = min(start, before[1]), max(end, before[2])
        found[step] = 0, start, end, step
    return list(found.values())


def differentiates_backward(names: Iterable[str]) -> bool:
    """True if an operator that only backward has was itself recorded for autograd: a second derivative is wanted,
    and backward's operators cannot be told from recomputed ones.
    """
    return any(name.endswith(("_backward", "Backward0", "_backward_data")) for name in names)


def with_recompute(windows: Attribution, spans: Iterable[tuple[int, int, int]]) -> Attribution:
    """The windows with these times (lane, start, end) as recompute. See [Note: recompute]."""
    phases = windows.phases
    known = zip(phases.lane.tolist(), phases.start_ns.tolist(), phases.end_ns.tolist(), phases.names, strict=True)
    again = [(*span, Phase.RECOMPUTE) for span in spans]
    return replace(windows, phases=Windows([*known, *again]))


def labelled_ranges(
    ranges: Sequence[Range], labels: Mapping[str, RangeLabel | None] | None = None
) -> list[tuple[Range, RangeLabel]]:
    """The ranges of FSDP1, FSDP2 and our own engines with their labels, by lane, start and −end. ``labels`` are those
    of the ranges' names, where they are known already.
    """
    labels = _labels(ranges) if labels is None else labels
    found = [(item, label) for item in ranges if (label := labels[item[3]]) is not None]
    return sorted([*found, *fsdp1_labels(ranges)], key=lambda pair: (pair[0][0], pair[0][1], -pair[0][2]))


def _labels(ranges: Sequence[Range]) -> dict[str, RangeLabel | None]:
    return {name: parse_label(name) for name in {item[3] for item in ranges}}


def _own_windows(labelled: Sequence[tuple[Range, RangeLabel]]) -> list[tuple[int, int, int, str]]:
    return [(*item[:3], label.unit) for item, label in labelled if label.unit is not None]


def _steps_optimizer(name: str, label: RangeLabel | None) -> bool:
    if label is not None:
        return label.family == "fsdpviz" and label.phase == Phase.OPTIMIZER
    return _OPTIMIZER.match(name) is not None


def _phases_of_loop(labelled: Sequence[tuple[Range, RangeLabel]]) -> Iterator[tuple[int, int, int, Phase | None]]:
    for item, label in labelled:
        if label.family == "fsdpviz" and label.unit is None and label.phase in _LOOP_PHASES:
            yield (*item[:3], _LOOP_PHASES[label.phase])
        elif label.family == "FSDP" and label.phase in POST_BACKWARD:
            yield (*item[:3], Phase.BACKWARD)


def _phases_by_name(ordered: Sequence[Range], names: Iterable[str]) -> list[tuple[int, int, int, Phase | None]]:
    """The windows of ranges whose name alone says what they are; ``names`` are the distinct ones."""
    known: dict[str, Phase | None] = {}
    for name in names:
        if _OPTIMIZER.match(name):
            known[name] = Phase.OPTIMIZER
        elif name.startswith(_BACKWARD):
            known[name] = Phase.BACKWARD
        elif name.startswith(_FORWARD):
            known[name] = Phase.FORWARD
        elif match := _HAND_WRITTEN.match(name):
            known[name] = Phase(match[1])
        elif _NEITHER.match(name):
            known[name] = None
    return [(*item[:3], known[item[3]]) for item in ordered if item[3] in known]


def _forward_or_recompute(
    forward: Sequence[tuple[int, int, int, str]], phases: Sequence[tuple[int, int, int, Phase | None]]
) -> list[tuple[int, int, int, Phase | None]]:
    """A unit's forward that starts inside backward is run again for activation checkpointing."""
    if not forward:
        return []
    backward = Windows([window for window in phases if window[3] is Phase.BACKWARD])
    lanes = np.array([window[0] for window in forward], np.int64)
    starts = np.array([window[1] for window in forward], np.int64)
    inside = backward.at(lanes, starts) >= 0
    return [
        (*window[:3], Phase.RECOMPUTE if again else Phase.FORWARD)
        for window, again in zip(forward, inside.tolist(), strict=True)
    ]
