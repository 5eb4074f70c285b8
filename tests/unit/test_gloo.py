"""Gloo's ranges and the operators that issued them."""

from __future__ import annotations

from typing import Any

import pytest
from growth import LINEAR, growth
from hypothesis import given
from hypothesis import strategies as st

from fsdpviz.base.kinds import Kind
from fsdpviz.trace.kineto.reader import Tensors
from fsdpviz.trace.meaning import gloo

KINDS = [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE]
Spans = list[gloo.Span]


def tensors(*sizes: tuple[int, ...]) -> Tensors:
    return Tensors(sizes, ("float32",) * len(sizes))


def spans(first_row: int) -> st.SearchStrategy[Spans]:
    sizes = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2).map(tuple), max_size=2)
    one = st.tuples(st.integers(0, 5), st.sampled_from(KINDS), st.none() | sizes.map(lambda given: tensors(*given)))
    return st.lists(one, max_size=8).map(
        lambda rows: [gloo.Span(row, at, at + 1, kind, own) for row, (at, kind, own) in enumerate(rows, first_row)]
    )


def issuers_by_the_rule(ranges: Spans, operators: Spans) -> dict[int, int]:
    """The same, looking through all that is left for each range: what is latest, then of the size itself or of that
    which came first, then listed last.
    """
    alike = {Kind.REDUCE_SCATTER: Kind.ALL_REDUCE}  # as gloo calls them
    left: list[tuple[Kind, int | None, gloo.Span]] = []
    for operator in sorted(operators, key=lambda span: span.start_ns):
        left += [(alike.get(operator.kind, operator.kind), size, operator) for size in gloo._sent_by(operator)]
    order = list(dict.fromkeys((kind, size) for kind, size, _ in left))
    found: dict[int, int] = {}
    for span in sorted(ranges, key=lambda span: span.start_ns, reverse=True):
        kind, wanted = alike.get(span.kind, span.kind), gloo._sent_in(span)
        places = [(kind, wanted), (kind, None)] if wanted is not None else order
        fits = [
            (entry[2].start_ns, -places.index(entry[:2]), at)
            for at, entry in enumerate(left)
            if entry[0] is kind and entry[:2] in places and entry[2].start_ns <= span.start_ns
        ]
        if fits:
            at = max(fits)[2]
            found[span.row] = left[at][2].row
            if not gloo._shows_output_alone(left[at][2]):
                del left[at]
    return found


@given(spans(0), spans(100))
def test_issuers_are_as_the_rule_says(ranges: Spans, operators: Spans) -> None:
    assert gloo.issuers(ranges, operators) == issuers_by_the_rule(ranges, operators)


@pytest.mark.parametrize("own", [None, tensors((1,))])
def test_ranges_of_operators_that_all_have_sizes_of_their_own(own: Tensors | None) -> None:
    """A range without sizes may be of any of them."""

    def given(count: int) -> tuple[Spans, Spans]:
        gather: Any = Kind.ALL_GATHER
        operators = [gloo.Span(at, 10 * at, 0, gather, tensors((2 * at + 2,), (at + 1,))) for at in range(count)]
        return [gloo.Span(count + at, 10 * at + 5, 0, gather, own) for at in range(count)], operators

    if own is None:
        assert gloo.issuers(*given(3)) == {5: 2, 4: 1, 3: 0}
    assert growth(lambda made: gloo.issuers(*made), given, 300) < LINEAR
