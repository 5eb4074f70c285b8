"""Calls of several processes with one correlation id, and device spans that do not say whose they are."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fsdpviz.trace.meaning.contested import Calls, chosen

Call = tuple[int, int, int]  # process, id, start
Span = tuple[int, int, int]  # device, id, start


def owners(calls: list[Call], spans: list[Span]) -> list[Call | None]:
    """Of each span the call that launched it; None where there is none."""
    process, ids, started = np.array(calls, np.int64).T
    device, wanted, start_ns = np.array(spans, np.int64).T
    known = Calls(np.arange(len(calls)), ids, process, started)
    return [calls[row] if row >= 0 else None for row in chosen(known, wanted, start_ns, device)[0].tolist()]


def test_a_device_whose_clock_is_ahead_does_not_hide_whose_an_id_is() -> None:
    """No call began before the kernel, so that no process explains it; only one has its id."""
    assert owners([(100, 1, 20), (200, 2, 20)], [(0, 2, 19)]) == [(200, 2, 20)]


def test_a_call_after_its_kernel_is_taken_where_the_device_s_process_has_none() -> None:
    calls = [(100, 1, 10), (200, 1, 11), (200, 2, 50)]
    assert owners(calls, [(0, 1, 10), (0, 2, 40)]) == [(100, 1, 10), (200, 2, 50)]


def test_of_two_processes_that_explain_a_device_the_nearer_is_its_own() -> None:
    calls = [(100, 1, 10), (200, 1, 15), (100, 2, 28), (200, 2, 21)]  # 10 + 2 before the kernels, and 5 + 9
    assert owners(calls, [(0, 1, 20), (0, 2, 30)]) == [(100, 1, 10), (100, 2, 28)]


NUMBERS = st.integers(0, 3)


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 9)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 1), NUMBERS, st.integers(0, 9)), min_size=1, max_size=8),
)
def test_calls_are_chosen_as_the_rule_says(calls: list[Call], spans: list[Span]) -> None:
    first: dict[tuple[int, int], Call] = {}
    for call in calls:
        first.setdefault(call[:2], call)
    for span, owner in zip(spans, owners(calls, spans), strict=True):
        with_id = [call for call in first.values() if call[1] == span[1]]
        before = [call for call in with_id if call[2] <= span[2]]
        others = [other for other in spans if other[0] == span[0]]
        far = {process: _distance(process, others, first) for process in range(4)}
        nearest = min((one for one in far.values() if one is not None), default=None)
        own = [call for call in with_id if nearest is not None and far[call[0]] == nearest]
        if len(with_id) < 2:
            assert [owner] == (with_id or [None])
        elif own:
            assert owner in own
        elif before:
            assert owner is not None and owner[2] == max(call[2] for call in before)
        else:
            assert owner in with_id


def _distance(process: int, spans: list[Span], first: dict[tuple[int, int], Call]) -> int | None:
    """None where the process does not explain all spans that any does, or where none does."""
    found = []
    for _, number, start in spans:
        if any(call[1] == number and call[2] <= start for call in first.values()):
            call = first.get((process, number))
            if call is None or call[2] > start:
                return None
            found.append(start - call[2])
    return sum(found) if found else None


def test_memory_is_that_of_calls_and_spans() -> None:
    """A table of 3,000 processes and 3,000 spans would be 72 MB, of one column."""
    several = np.arange(3000)
    for ids in (several, np.zeros(3000, np.int64)):
        tracemalloc.start()
        found, _ = chosen(Calls(several, ids, several, several), ids, several + 1, several % 2)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (found >= 0).all()
        assert peak < 3_000_000
