"""Interval algebra against a bitmap: one bit a nanosecond, and nothing clever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpviz.analysis.intervals import Intervals, clip, difference, intersection, join, nothing, total, union

SIZE = 40
SPANS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12)


def made(spans: list[list[int]]) -> Intervals:
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    return union(pairs[:, 0], pairs[:, 1])


def bitmap(spans: list[list[int]] | Intervals) -> np.ndarray:
    bits = np.zeros(SIZE, bool)
    for start, end in spans:
        bits[start:end] = True
    return bits


def check(intervals: Intervals, bits: np.ndarray) -> None:
    assert intervals.dtype == np.int64
    assert intervals.shape[1] == 2
    assert bitmap(intervals).tolist() == bits.tolist()
    assert total(intervals) == bits.sum()
    edges = intervals.ravel()
    assert (edges[1:] > edges[:-1]).all()  # sorted, disjoint, not touching, none empty


@given(SPANS)
def test_union(spans: list[list[int]]) -> None:
    check(made(spans), bitmap(spans))


@given(SPANS, SPANS)
def test_set_operations(first: list[list[int]], second: list[list[int]]) -> None:
    a, b = made(first), made(second)
    bits_a, bits_b = bitmap(first), bitmap(second)
    check(join(a, b), bits_a | bits_b)
    check(intersection(a, b), bits_a & bits_b)
    check(difference(a, b), bits_a & ~bits_b)


@given(SPANS, st.integers(0, SIZE), st.integers(0, SIZE))
def test_clip(spans: list[list[int]], start: int, end: int) -> None:
    window = np.zeros(SIZE, bool)
    window[start:end] = True
    check(clip(made(spans), start, end), bitmap(spans) & window)


def test_by_hand() -> None:
    # 0–4 and 2–6 overlap, 6–8 touches them, 10–10 has no length, 12–13 stands alone
    a = union(np.array([2, 0, 6, 10, 12]), np.array([6, 4, 8, 10, 13]))
    assert a.tolist() == [[0, 8], [12, 13]]
    b = union(np.array([3, 12]), np.array([5, 20]))
    assert intersection(a, b).tolist() == [[3, 5], [12, 13]]
    assert difference(a, b).tolist() == [[0, 3], [5, 8]]
    assert difference(b, a).tolist() == [[13, 20]]
    assert difference(a, a).tolist() == []
    assert total(nothing()) == 0


def test_times_since_1970_stay_exact() -> None:
    start = 1_790_862_152_712_198_681
    both = intersection(
        union(np.array([start]), np.array([start + 2])), union(np.array([start + 1]), np.array([start + 9]))
    )
    assert both.tolist() == [[start + 1, start + 2]]


def test_the_checks_can_fail() -> None:
    with pytest.raises(AssertionError):
        check(np.array([[0, 2], [2, 3]], np.int64), bitmap([[0, 3]]))  # touching
    with pytest.raises(AssertionError):
        check(made([[0, 3]]), bitmap([[0, 4]]))
