"""Named windows of time on lanes, and the question which one is innermost at a point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

Name = TypeVar("Name")


class Windows(Generic[Name]):
    """Half-open windows [start, end), each on one lane, with a name. They may nest, or overlap anyhow."""

    def __init__(self, windows: Iterable[tuple[int, int, int, Name]]) -> None:
        """From tuples of lane, start_ns, end_ns, name."""
        ordered = sorted(windows, key=lambda window: (window[0], window[1], -window[2]))
        self.lane = np.array([window[0] for window in ordered], np.int64)
        self.start_ns = np.array([window[1] for window in ordered], np.int64)
        self.end_ns = np.array([window[2] for window in ordered], np.int64)
        self.names: Sequence[Name] = [window[3] for window in ordered]

    def __len__(self) -> int:
        return len(self.names)

    def at(self, lanes: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
        """For each point, the index of the window that started last among those around it; −1 where none
        is.
        """
        found = np.full(len(times_ns), -1, np.int64)
        for lane in np.unique(self.lane):
            points = np.flatnonzero(lanes == lane)
            if not len(points):
                continue
            points = points[np.argsort(times_ns[points], kind="stable")]
            times = times_ns[points]
            mine = np.flatnonzero(self.lane == lane)
            first = np.searchsorted(times, self.start_ns[mine], "left")
            last = np.searchsorted(times, self.end_ns[mine], "left")
            inner = np.full(len(points), -1, np.int64)
            for window, low, high in zip(mine.tolist(), first.tolist(), last.tolist(), strict=True):
                inner[low:high] = window  # by rising start, so that an inner one overwrites its outer one
            found[points] = inner
        return found

    def names_at(self, lanes: np.ndarray, times_ns: np.ndarray) -> list[Name | None]:
        """The innermost window's name for each point, None outside all."""
        names = self.names
        return [names[index] if index >= 0 else None for index in self.at(lanes, times_ns).tolist()]


def depths(lanes: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """How many spans of the same lane are open when each starts (int16). Spans must be sorted by lane,
    start, −end.
    """
    found = np.zeros(len(lanes), np.int64)
    edges = np.flatnonzero(np.diff(lanes, prepend=-1, append=-1))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        # a span without length counts as one nanosecond long, or it would close before it opened
        ends = np.sort(np.maximum(end_ns[low:high], start_ns[low:high] + 1))
        found[low:high] = np.arange(high - low) - np.searchsorted(ends, start_ns[low:high], "right")
    return np.clip(found, 0, np.iinfo(np.int16).max).astype(np.int16)


def outermost(lanes: np.ndarray, start_ns: np.ndarray, end_ns: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Which of the chosen spans start inside no other chosen one of their lane. Sorted by lane, start,
    −end.
    """
    found = np.zeros(len(lanes), bool)
    edges = np.flatnonzero(np.diff(lanes, prepend=-1, append=-1))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        rows = low + np.flatnonzero(chosen[low:high])
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
    edges = np.flatnonzero(np.diff(lanes, prepend=-1, append=-1))
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        mark_starts = start_ns[low:high][marks[low:high]]
        rows = low + np.flatnonzero(candidates[low:high])
        if len(rows) and len(mark_starts):
            before = np.searchsorted(mark_starts, start_ns[rows], "left")
            found[rows] = np.searchsorted(mark_starts, end_ns[rows], "left") > before
    return found
