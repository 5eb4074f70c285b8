"""How the work for an input grows with the input, where nothing of it can be counted but time."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time_ns
from typing import Any


def growth(work: Callable[[Any], Any], input_of: Callable[[int], Any], size: int) -> float:
    """By how much the time grows when the input is four times as long: 4 if it is linear in it, 16 if quadratic."""
    return _least_ns(work, input_of(4 * size)) / _least_ns(work, input_of(size))


def _least_ns(work: Callable[[Any], Any], given: Any) -> int:
    times = []
    for _ in range(9):
        before = process_time_ns()
        work(given)
        times.append(process_time_ns() - before)
    return max(1, min(times))
