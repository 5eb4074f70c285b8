"""The part of a recording that was asked for: ranks, steps, a window of time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import polars as pl

from ...base.errors import TraceError
from ...base.units import NS_PER_MS
from ..meaning.units import needed_spans
from ..table import STEP_SCHEMA, Context, Note, Trace

Window = tuple[float, float]  # ms from the recording's origin


def chosen(present: Sequence[int], wanted: Collection[int] | None, name: str) -> list[int]:
    """The ranks to keep, in order. Raises TraceError for one that is not there."""
    if wanted is None:
        return list(present)
    missing = sorted(set(wanted) - set(present))
    if missing:
        raise TraceError(f"{name} has ranks {list(present)}; asked for {missing}")
    return [rank for rank in present if rank in wanted]


def selected(trace: Trace, steps: Collection[int] | None, window: Window | None) -> Trace:
    """The spans of these steps, and those that touch the window (ms from the origin, half-open); none is cut.

    Spans outside every step go with ``steps``. How many were left out is noted. What numbers depend on is kept beside
    them, see ``Trace.whole``. Raises TraceError for a step that is not there and for a window that is none.
    """
    if steps is None and window is None:
        return trace
    kept, kept_steps, bounds_ns = trace.spans, trace.steps, None
    if steps is not None:
        there = sorted(trace.steps["step"].unique().to_list())
        missing = sorted(set(steps) - set(there))
        if missing:
            raise TraceError(f"the recording has steps {there}; asked for {missing}")
        kept = kept.filter(pl.col("step").is_in(list(steps)))
        kept_steps = kept_steps.filter(pl.col("step").is_in(list(steps)))
    if window is not None:
        start_ns, end_ns = bounds_ns = _bounds(window, trace.origin_ns)
        after_start = pl.col("start_ns") + pl.col("duration_ns").clip(lower_bound=1) > start_ns
        kept = kept.filter(after_start & (pl.col("start_ns") < end_ns))
        # a device works on a step when the host has left it
        ran = set(kept.select("rank", "step").unique().rows())
        touched = [
            (rank, step) in ran or (until_ns > start_ns and since_ns < end_ns)
            for rank, step, since_ns, until_ns in kept_steps.select(*STEP_SCHEMA).iter_rows()
        ]
        kept_steps = kept_steps.filter(pl.Series(touched, dtype=pl.Boolean))
    left_out = len(trace.spans) - len(kept)
    notes = trace.notes
    if left_out:
        notes = (*notes, Note("spans outside the steps or the window asked for", left_out))
    asked = None if steps is None else tuple(sorted(set(steps)))
    context = Context(needed_spans(trace.spans), trace.steps, bounds_ns, asked)
    return replace(trace, spans=kept, steps=kept_steps, notes=notes, context=context)


def _bounds(window: Window, origin_ns: int) -> tuple[int, int]:
    try:
        start_ms, end_ms = (float(bound) for bound in window)
        start_ns, end_ns = (origin_ns + round(bound * NS_PER_MS) for bound in (start_ms, end_ms))
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"a window is (start_ms, end_ms) from the recording's origin; got {window!r}") from None
    if end_ns <= start_ns:
        raise TraceError(f"a window ends after it starts; got {start_ms} to {end_ms} ms")
    return start_ns, end_ns
