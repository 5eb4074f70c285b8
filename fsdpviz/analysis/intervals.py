"""Interval algebra on integer nanoseconds.

A set of intervals is an int64 array of shape (n, 2), rows [start, end) that are sorted, disjoint and not
touching. ``union`` makes one of anything; the other functions take and give such sets.
"""

from __future__ import annotations

import numpy as np

Intervals = np.ndarray  # (n, 2) int64


def nothing() -> Intervals:
    """The empty set."""
    return np.zeros((0, 2), np.int64)


def union(starts_ns: np.ndarray, ends_ns: np.ndarray) -> Intervals:
    """The time that at least one of the spans covers. Spans without length cover none."""
    starts_ns, ends_ns = np.asarray(starts_ns, np.int64), np.asarray(ends_ns, np.int64)
    has_length = ends_ns > starts_ns
    starts_ns, ends_ns = starts_ns[has_length], ends_ns[has_length]
    if not len(starts_ns):
        return nothing()
    order = np.argsort(starts_ns, kind="stable")
    starts_ns, latest_ns = starts_ns[order], np.maximum.accumulate(ends_ns[order])
    begins = np.flatnonzero(np.concatenate(([True], starts_ns[1:] > latest_ns[:-1])))
    return np.column_stack((starts_ns[begins], latest_ns[np.append(begins[1:], len(latest_ns)) - 1]))


def join(first: Intervals, second: Intervals) -> Intervals:
    """What lies in either."""
    both = np.concatenate((first, second))
    return union(both[:, 0], both[:, 1])


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """What lies in both."""
    return _select(first, second, lambda in_first, in_second: in_first & in_second)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """What lies in the first and not in the second."""
    return _select(first, second, lambda in_first, in_second: in_first & ~in_second)


def clip(intervals: Intervals, start_ns: int, end_ns: int) -> Intervals:
    """What lies inside [start, end)."""
    edges = intervals.ravel()  # rise strictly: what lies outside is not looked at, or each step would look at all
    first, last = np.searchsorted(edges, start_ns, "right") // 2, (np.searchsorted(edges, end_ns, "left") + 1) // 2
    bounded = np.clip(intervals[first:last], start_ns, max(start_ns, end_ns))
    return bounded[bounded[:, 1] > bounded[:, 0]]


def total(intervals: Intervals) -> int:
    """The covered time, in ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def _select(first: Intervals, second: Intervals, keep) -> Intervals:
    """Between two neighbouring edges of either set nothing changes: each such piece is kept or not as a
    whole.
    """
    edges = np.unique(np.concatenate((first.ravel(), second.ravel())))
    if len(edges) < 2:
        return nothing()
    kept = keep(_covers(first, edges[:-1]), _covers(second, edges[:-1]))
    return union(edges[:-1][kept], edges[1:][kept])


def _covers(intervals: Intervals, points: np.ndarray) -> np.ndarray:
    # edges rise strictly, so that an odd number of them lies at or before a point inside
    return np.searchsorted(intervals.ravel(), points, "right") % 2 == 1
