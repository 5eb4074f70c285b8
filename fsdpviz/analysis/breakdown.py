r"""Where a step's time goes, for each rank and step.

    span = compute + exposed communication + exposed copies + idle

    compute               |∪ compute, optimizer|
    communication         |∪ collectives, point-to-point|
    exposed communication |∪ communication \ ∪ compute|
    exposed copies        |∪ copies \ ∪ compute \ ∪ communication|
    overlap               |∪ communication ∩ ∪ compute| / |∪ communication|

The definitions of exposed time are TraceLens's, that of overlap is HTA's; unlike both, nothing is rounded
and no span is dropped for want of a launch. Every set is clipped to the step's window first.

[Note: the window of a step] On CPU it is the step's own range. On a device work runs after the range that
launched it has ended, so the window begins with the first work that was launched in the step, though not while an
earlier step still computes on the lane that computes most: inputs are copied, and gathers prepared, ahead on others.
It ends where the next step's begins, the last one's with the last work launched in it. Windows of a rank never
overlap: no moment counts for two steps. Of a selection the windows are those of the whole recording.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from ..base.kinds import COMMUNICATION, COMPUTATION, COPIES, WORK, Kind
from ..trace.table import Trace
from .intervals import Intervals, clip, difference, intersection, join, nothing, total, union


@dataclass(frozen=True)
class StepBreakdown:
    """One rank's step. ``step`` is None where the recording has no steps: it is then taken whole.

    ``overlap_frac`` (0–1) is None without communication. ``intervals`` are the sets behind the numbers, by
    name: compute, comm, exposed_comm, copy, exposed_copy, idle; each (n, 2) int64, absolute ns.
    """

    rank: int
    step: int | None
    span_ns: int
    compute_ns: int
    comm_ns: int
    exposed_comm_ns: int
    copy_ns: int
    exposed_copy_ns: int
    idle_ns: int
    overlap_frac: float | None
    start_ns: int = field(default=0, compare=False)
    intervals: Mapping[str, Intervals] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Window:
    """The time in which a rank's step is looked at."""

    rank: int
    step: int | None
    start_ns: int
    end_ns: int


def windows(trace: Trace, rank: int) -> list[Window]:
    """The rank's windows, in order, of the steps and the time that were selected. See [Note: the window of a step]."""
    found, context = _windows(trace.whole, rank), trace.context
    if context and context.asked is not None:
        found = [window for window in found if window.step in context.asked]
    return list(_within(found, *context.bounds_ns)) if context and context.bounds_ns else found


def _windows(trace: Trace, rank: int) -> list[Window]:
    work = trace.spans.filter((pl.col("rank") == rank) & pl.col("kind").is_in(_values(WORK)))
    steps = trace.steps.filter(pl.col("rank") == rank).sort("start_ns")
    if steps.is_empty():
        if work.is_empty():
            return []
        ends_ns = work["start_ns"] + work["duration_ns"]
        return [Window(rank, None, _bound(work["start_ns"].min()), _bound(ends_ns.max()))]
    is_on_device = not trace.lanes.filter((pl.col("rank") == rank) & pl.col("is_device")).is_empty()
    # a device whose file holds no launch at all has steps by time only
    return (is_on_device and _device_windows(work, rank)) or _host_windows(steps, rank)


def _within(found: Iterable[Window], start_ns: int, end_ns: int) -> Iterator[Window]:
    for window in found:
        begin_ns, until_ns = max(window.start_ns, start_ns), min(window.end_ns, end_ns)
        if begin_ns < until_ns:
            yield replace(window, start_ns=begin_ns, end_ns=until_ns)


def _host_windows(steps: pl.DataFrame, rank: int) -> list[Window]:
    found: list[Window] = []
    for row in steps.iter_rows(named=True):
        start_ns = max(row["start_ns"], found[-1].end_ns if found else row["start_ns"])
        found.append(Window(rank, row["step"], start_ns, max(row["end_ns"], start_ns)))
    return found


def _device_windows(work: pl.DataFrame, rank: int) -> list[Window]:
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    is_compute = pl.col("kind").is_in(_values(COMPUTATION))
    by_lane = work.filter(is_compute).group_by("lane").agg(pl.col("duration_ns").sum()).sort("duration_ns", "lane")
    computes = is_compute & pl.col("lane").is_in(by_lane["lane"].tail(1).to_list())  # the lane that computes most
    steps = (
        work.filter(pl.col("step").is_not_null())
        .group_by("step")
        .agg(
            first_ns=start.min(),
            computes_ns=start.filter(computes).min(),
            computed_ns=end.filter(computes).max(),
            end_ns=end.max(),
        )
        .sort(pl.coalesce("computes_ns", "first_ns"))
    )
    if steps.is_empty():
        return []
    computed_ns = pl.col("computed_ns").cum_max().forward_fill().shift()  # when all earlier steps had; null before one
    begin_ns = pl.min_horizontal("computes_ns", pl.max_horizontal("first_ns", computed_ns)).cum_max()
    starts_ns = steps.select(begin_ns).to_series().to_list()
    ends_ns = [*starts_ns[1:], max(starts_ns[-1], steps["end_ns"][-1])]
    rows = zip(steps["step"], starts_ns, ends_ns, strict=True)
    return [Window(rank, step, start_ns, end_ns) for step, start_ns, end_ns in rows]


class RankWork:
    """The covered time of one rank by kind, made once and clipped for each step."""

    def __init__(self, trace: Trace, rank: int) -> None:
        spans = trace.whole.spans.filter((pl.col("rank") == rank) & pl.col("kind").is_in(_values(WORK)))
        self._kind = spans["kind"].cast(pl.String).to_numpy()
        self._start_ns = spans["start_ns"].to_numpy()
        self._end_ns = self._start_ns + spans["duration_ns"].to_numpy()

    def of(self, kinds: Collection[Kind]) -> Intervals:
        """The union of all spans of these kinds."""
        chosen = np.isin(self._kind, _values(kinds)) if len(self._kind) else np.zeros(0, bool)
        return union(self._start_ns[chosen], self._end_ns[chosen])


def breakdowns(trace: Trace, rank: int) -> list[StepBreakdown]:
    """One for each of the rank's windows, in order."""
    work = RankWork(trace, rank)
    compute, comm, copy = work.of(COMPUTATION), work.of(COMMUNICATION), work.of(COPIES)
    return [_breakdown(window, compute, comm, copy) for window in windows(trace, rank)]


def _breakdown(window: Window, compute: Intervals, comm: Intervals, copy: Intervals) -> StepBreakdown:
    bounds = window.start_ns, window.end_ns
    whole = np.array([bounds], np.int64) if window.end_ns > window.start_ns else nothing()
    compute, comm, copy = clip(compute, *bounds), clip(comm, *bounds), clip(copy, *bounds)
    busy = join(compute, comm)
    sets = {
        "compute": compute,
        "comm": comm,
        "exposed_comm": difference(comm, compute),
        "copy": copy,
        "exposed_copy": difference(copy, busy),
        "idle": difference(whole, join(busy, copy)),
    }
    comm_ns = total(comm)
    return StepBreakdown(
        rank=window.rank,
        step=window.step,
        span_ns=total(whole),
        **{f"{name}_ns": total(intervals) for name, intervals in sets.items()},
        overlap_frac=total(intersection(comm, compute)) / comm_ns if comm_ns else None,
        start_ns=window.start_ns,
        intervals=sets,
    )


def _values(kinds: Collection[Kind]) -> list[str]:
    return [kind.value for kind in kinds]


def _bound(value: object) -> int:
    assert isinstance(value, int)  # an aggregate of a column without nulls
    return value
