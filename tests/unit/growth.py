"""How the work for an input grows with the input, where nothing of it can be counted but time."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time_ns
from typing import Any

TIMES = 8
LINEAR = 24  # below: 8 if the work is linear in the input, 64 if it is quadratic, and a noisy machine doubles either


def growth(work: Callable[[Any], Any], input_of: Callable[[int], Any], size: int) -> float:
    """By how much the time grows when the input is TIMES as long; the least of several turns each."""
    short, long = input_of(size), input_of(TIMES * size)
    turns = [(_ns(work, short), _ns(work, long)) for _ in range(9)]
    return min(long_ns for _, long_ns in turns) / max(1, min(short_ns for short_ns, _ in turns))


def _ns(work: Callable[[Any], Any], given: Any) -> int:
    before = process_time_ns()
    work(given)
    return process_time_ns() - before
