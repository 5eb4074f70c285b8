"""Named windows of time on lanes, and the question which one is innermost at a point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from typing import Generic, TypeVar

import numpy as np

Name = TypeVar("Name")
_DEEPEST = np.iinfo(np.int16).max
_FEW_LANES = 16  # of which each is looked for alone
_FEW_AROUND = 16  # windows around a point: as many may be written one over the other
_NO_TIMES = np.zeros(0, np.int64)


class Windows(Generic[Name]):
    """Half-open windows [start, end), each on one lane, with a name. They may nest, or overlap anyhow."""

    names: Sequence[Name]

    def __init__(self, windows: Iterable[tuple[int, int, int, Name]]) -> None:
        """From tuples of lane, start_ns, end_ns, name."""
        given = list(windows)
        if not given:  # as most are in most recordings
            self._lanes, self.names = [], []
            self.lane = self.start_ns = self.end_ns = _NO_TIMES
            return
        lanes, starts, ends, _ = zip(*given, strict=True)
        lane, start_ns, end_ns = (np.array(values, np.int64) for values in (lanes, starts, ends))
        self._lanes = sorted(set(lanes))
        order = np.lexsort((-end_ns, start_ns, lane))
        self.lane, self.start_ns, self.end_ns = lane[order], start_ns[order], end_ns[order]
        self.names = [given[index][3] for index in order.tolist()]

    def __len__(self) -> int:
        return len(self.names)

    def at(self, lanes: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
        """For each point, the index of the window that started last among those around it; −1 where none
        is.
        """
        found = np.full(len(times_ns), -1, np.int64)
        for mine, points in self._by_lane(lanes):
            if not len(points):
                continue
            times = times_ns[points]
            if not (times[1:] >= times[:-1]).all():
                points = points[np.argsort(times, kind="stable")]
                times = times_ns[points]
            first = np.searchsorted(times, self.start_ns[mine], "left")
            last = np.searchsorted(times, self.end_ns[mine], "left")
            found[points] = _last_begun(first, last, mine.start, len(points))
        return found

    def _by_lane(self, lanes: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Of each lane its windows, and which of the points are on it."""
        bounds = np.searchsorted(self.lane, self._lanes, "left").tolist()
        windows = [slice(*pair) for pair in pairwise((*bounds, len(self)))]
        if len(self._lanes) <= _FEW_LANES:
            for lane, mine in zip(self._lanes, windows, strict=True):
                yield mine, (lanes == lane).nonzero()[0]
            return
        order = np.argsort(lanes, kind="stable")
        first, last = (np.searchsorted(lanes[order], self._lanes, side).tolist() for side in ("left", "right"))
        for mine, low, high in zip(windows, first, last, strict=True):
            yield mine, order[low:high]

    def hold(self, lanes: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
        """Which windows hold one of the points (bool), which are sorted by lane and time."""
        found = np.zeros(len(self), bool)
        low, high = (np.searchsorted(lanes, self._lanes, side).tolist() for side in ("left", "right"))
        bounds = np.searchsorted(self.lane, self._lanes, "left").tolist()
        for (begin, end), first, last in zip(pairwise((*bounds, len(self))), low, high, strict=True):
            mine, times = slice(begin, end), times_ns[first:last]
            ends = np.searchsorted(times, self.end_ns[mine], "left")
            found[mine] = ends > np.searchsorted(times, self.start_ns[mine], "left")
        return found

    def only(self, chosen: np.ndarray) -> Windows[Name]:
        """The chosen ones of these windows."""
        times = zip(self.lane.tolist(), self.start_ns.tolist(), self.end_ns.tolist(), self.names, strict=True)
        return Windows(compress(times, chosen))

    def names_at(self, lanes: np.ndarray, times_ns: np.ndarray) -> list[Name | None]:
        """The innermost window's name for each point, None outside all."""
        names = self.names
        return [names[index] if index >= 0 else None for index in self.at(lanes, times_ns).tolist()]


def _last_begun(first: np.ndarray, last: np.ndarray, number: int, count: int) -> np.ndarray:
    """Of each of ``count`` points the last window that holds it, −1 where none does. Windows are numbered from
    ``number`` on; each holds the points from ``first``, which rises, until ``last``.
    """
    inner = np.full(count, -1, np.int64)
    lows, highs = first.tolist(), last.tolist()
    if (last - first).sum() <= _FEW_AROUND * (count + len(first)):
        for window, (low, high) in enumerate(zip(lows, highs, strict=True), number):
            inner[low:high] = window  # an inner one overwrites its outer one
        return inner
    open_: list[tuple[int, int]] = []  # a window and where it ends; those that began later are on top
    for window, (low, until, high) in enumerate(zip(lows, [*lows[1:], count], highs, strict=True), number):
        open_.append((window, high))
        while open_ and low < until:
            top, end = open_[-1]
            if low < end:
                inner[low : min(end, until)] = top
                low = min(end, until)
            if end <= low:
                open_.pop()
    return inner


def _runs(lanes: np.ndarray) -> Iterable[tuple[int, int]]:
    """Where each lane's spans begin and end, for spans sorted by lane."""
    cuts = ((lanes[1:] != lanes[:-1]).nonzero()[0] + 1).tolist()
    return pairwise((0, *cuts, len(lanes))) if len(lanes) else ()


def depths(lanes: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """How many spans of the same lane are open when each starts (int16). Spans must be sorted by lane,
    start, −end.
    """
    found = np.zeros(len(lanes), np.int16)
    # a span without length counts as one nanosecond long, or it would close before it opened
    ends_ns = np.maximum(end_ns, start_ns + 1)
    is_nested = (start_ns[1:] < ends_ns[:-1]) & (lanes[1:] == lanes[:-1])
    nested = np.bincount(lanes[1:][is_nested])  # by lane; of most streams no span is inside another
    for low, high in _runs(lanes):
        lane = lanes[low]
        if lane < len(nested) and nested[lane]:
            ends = np.sort(ends_ns[low:high])
            open_ = np.arange(high - low) - np.searchsorted(ends, start_ns[low:high], "right")
            found[low:high] = np.minimum(open_, _DEEPEST)
    return found


def outermost(lanes: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Which of the chosen spans start inside no other chosen one of their lane. Sorted by lane, start,
    −end.
    """
    found = np.zeros(len(lanes), bool)
    for low, high in _runs(lanes):
        rows = low + chosen[low:high].nonzero()[0]
        if len(rows):
            latest = np.maximum.accumulate(end_ns[rows])
            found[rows[0]] = True
            found[rows[1:]] = start_ns[rows[1:]] >= latest[:-1]
    return found


def holds_any(
    lanes: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray, candidates: np.ndarray, marks: np.ndarray
) -> np.ndarray:
    """Which candidates have a mark of their own lane starting inside them. Sorted by lane, start, −end."""
    found = np.zeros(len(lanes), bool)
    for low, high in _runs(lanes):
        mark_starts = start_ns[low:high][marks[low:high]]
        rows = low + candidates[low:high].nonzero()[0]
        if len(rows) and len(mark_starts):
            before = np.searchsorted(mark_starts, start_ns[rows], "left")
            found[rows] = np.searchsorted(mark_starts, end_ns[rows], "left") > before
    return found


def union(starts_ns: np.ndarray, ends_ns: np.ndarray) -> np.ndarray:
    """The time that at least one of the spans covers: sorted, disjoint rows [start, end) of an int64 array (n, 2)."""
    order = np.argsort(starts_ns, kind="stable")
    starts_ns, latest_ns = starts_ns[order], np.maximum.accumulate(ends_ns[order])
    if not len(starts_ns):
        return np.zeros((0, 2), np.int64)
    begins = np.concatenate(([True], starts_ns[1:] > latest_ns[:-1])).nonzero()[0]
    return np.column_stack((starts_ns[begins], latest_ns[np.append(begins[1:], len(latest_ns)) - 1]))


def covered_ns(intervals: np.ndarray, starts_ns: np.ndarray, ends_ns: np.ndarray) -> np.ndarray:
    """How much of each [start, end) the disjoint, sorted intervals cover, in ns (int64)."""
    if not len(intervals):
        return np.zeros(len(starts_ns), np.int64)
    before = np.concatenate(([0], np.cumsum(intervals[:, 1] - intervals[:, 0])))

    def until(times_ns: np.ndarray) -> np.ndarray:
        at = np.searchsorted(intervals[:, 0], times_ns, "right")
        last = np.maximum(at - 1, 0)
        return before[at] - np.where(at > 0, np.maximum(intervals[last, 1] - times_ns, 0), 0)

    return until(ends_ns) - until(starts_ns)
