"""Two timelines under one another on one time axis."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from ..analysis.breakdown import breakdowns
from ..base.kinds import Kind
from ..base.provenance import Provenance
from ..base.units import NS_PER_MS, format_ns
from ..trace.table import Trace
from .bars import MAX_BARS
from .palette import MUTED
from .panel import RIGHT_PX, Panel, badge, label_margin
from .selection import Lanes, Selection, Steps, select
from .text import cut, safe
from .timeline import (
    AXIS_PX,
    NOTE_LINE_PX,
    base_layout,
    heading,
    lane_px,
    legend,
    note_annotations,
    note_lines,
    step_words,
    time_axis,
)

_HEADER_PX = 86  # a panel's title and the line of numbers under it, and some air above
_LEGEND_PX = 40
_LANES_PER_TRACE = 8  # shown unless ranks are asked for
_SOONER_FILL = "#e8f5ec"


def compare_timeline(
    a: Trace,
    b: Trace,
    *,
    names: tuple[str, str] = ("A", "B"),
    ranks: Iterable[int] | int | None = None,
    steps: Steps = None,
    lanes: Lanes = None,
    kinds: Collection[Kind] | None = None,
    title: str | None = None,
) -> go.Figure:
    """``a`` above ``b`` on one shared axis in ms, each from its own step's start; at most 2,000 bars in all.

    Each has its provenance, the length of its step and its exposed communication (mean over the shown ranks
    and steps) above it. The arguments are those of ``timeline``; by default as many ranks as stay readable.
    Raises TraceError for a rank, step or lane that either trace lacks.
    """
    chosen = {"ranks": ranks, "steps": steps, "lanes": lanes, "kinds": kinds}
    selections = [_select(trace, **chosen) for trace in (a, b)]
    axis_ns = max(selection.view_ns for selection in selections)
    panels = [
        Panel.of(selection, trace.provenance, max_bars=MAX_BARS // 2, axis_ns=axis_ns)
        for selection, trace in zip(selections, (a, b), strict=True)
    ]
    row_px = lane_px(sum(len(panel.selection.lanes) for panel in panels))
    heights = [round(panel.height * row_px) for panel in panels]
    plot_px = heights[0] + _HEADER_PX + heights[1]
    notes = note_lines(_sentences(panels, names))
    top_px = _HEADER_PX + _LEGEND_PX + (34 if title else 0)
    bottom_px = AXIS_PX + NOTE_LINE_PX * len(notes) + 8
    left_px = label_margin(panels)

    figure = go.Figure()
    legend_seen: set[str] = set()
    for panel, yaxis in zip(panels, ("y", "y2"), strict=True):
        figure.add_traces(panel.traces(yaxis, legend_seen))
    figure.update_layout(
        **base_layout(),
        height=plot_px + top_px + bottom_px,
        margin={"l": left_px, "r": RIGHT_PX, "t": top_px, "b": bottom_px, "pad": 2},
        xaxis={**time_axis(axis_ns / NS_PER_MS, "time from the start of each step"), "anchor": "y2"},
        yaxis={**panels[0].axis(), "domain": [1 - heights[0] / plot_px, 1]},
        yaxis2={**panels[1].axis(), "domain": [0, heights[1] / plot_px]},
        legend=legend(y=1 + _HEADER_PX / plot_px),
        meta={
            "provenance": [panel.provenance.value for panel in panels],
            "spans": [panel.bars.spans for panel in panels],
            "bars": [panel.bars.table.height for panel in panels],
        },
    )
    edge = 8 - left_px
    annotations = [heading(title, y=1, yshift=top_px - 36, xshift=edge)] if title else []
    tops = (1.0, heights[1] / plot_px)
    for trace, panel, name, top, yref in zip((a, b), panels, names, tops, ("y", "y2"), strict=True):
        annotations += _header(trace, panel, name, top, edge)
        annotations += panel.step_labels(yref)
    annotations += _sooner(figure, panels)
    annotations += note_annotations(notes, y=0, yshift=-AXIS_PX, xshift=edge)
    figure.update_layout(annotations=annotations)
    return figure


def _select(trace: Trace, *, ranks: Iterable[int] | int | None, steps: Steps, lanes: Lanes, kinds: Any) -> Selection:
    selection = select(trace, ranks=ranks, steps=steps, lanes=lanes, kinds=kinds, max_lanes=50)
    if ranks is not None or len(selection.lanes) <= _LANES_PER_TRACE:
        return selection
    # whole ranks only, and at least one: half a rank would hide the gathers that another shows
    shown: list[int] = []
    for rank in selection.ranks:
        if shown and sum(row.rank in (*shown, rank) for row in selection.lanes) > _LANES_PER_TRACE:
            break
        shown.append(rank)
    chosen = select(trace, ranks=shown, steps=steps, lanes=lanes, kinds=kinds, max_lanes=50)
    note = f"{len(shown)} of {len(trace.ranks)} ranks shown; others by ranks=…"
    return replace(chosen, notes=(note, *chosen.notes))


def _sentences(panels: list[Panel], names: tuple[str, str]) -> list[str]:
    """Each panel's notes once, with the name of the run where only one of them has it."""
    first, second = (panel.sentences() for panel in panels)
    shared = [sentence for sentence in first if sentence in second]
    only = [
        f"{cut(name, 40)}: {sentence}"
        for name, sentences in zip(names, (first, second), strict=True)
        for sentence in sentences
        if sentence not in shared
    ]
    return shared + only


def _header(trace: Trace, panel: Panel, name: str, top: float, edge: int) -> list[dict[str, Any]]:
    place = {"xref": "paper", "yref": "paper", "y": top, "yanchor": "bottom"}
    return [
        heading(name, y=top, yshift=36, xshift=edge),
        {
            "text": safe(_numbers(trace, panel), 200),
            "showarrow": False,
            "font": {"size": 14},
            "x": 0,
            "xanchor": "left",
            "xshift": edge,
            "yshift": 16,
            **place,
        },
        badge(panel.provenance, x=1, xanchor="right", yshift=34, **place),
    ]


def _numbers(trace: Trace, panel: Panel) -> str:
    """Means over the shown ranks and steps, as the report has them."""
    steps = panel.selection.step_numbers
    words = step_words(steps)
    rows = [
        row
        for rank in panel.selection.ranks
        for row in breakdowns(trace, rank)
        if row.step in steps or row.step is None
    ]
    if not rows:
        return words
    step, exposed, comm = (
        format_ns(fmean(getattr(row, name) for row in rows)) for name in ("span_ns", "exposed_comm_ns", "comm_ns")
    )
    return f"{words}: {step} · exposed communication {exposed} of {comm}"


def _sooner(figure: go.Figure, panels: list[Panel]) -> list[dict[str, Any]]:
    """Marks how much sooner the quicker run ended, where both show one step whose length means something.

    Two cores shared by compute and gloo do not get faster by overlapping: an unpaced CPU run says nothing.
    """
    if any(panel.provenance is Provenance.CPU or len(panel.selection.step_numbers) != 1 for panel in panels):
        return []
    quick, slow = sorted((0, 1), key=lambda index: panels[index].selection.view_ns)
    start_ns, end_ns = panels[quick].selection.view_ns, panels[slow].selection.view_ns
    if end_ns - start_ns < 0.005 * end_ns:
        return []
    axis = ("y", "y2")[quick]
    figure.add_shape(
        type="rect",
        layer="below",
        xref="x",
        yref=f"{axis} domain",
        x0=start_ns / NS_PER_MS,
        x1=end_ns / NS_PER_MS,
        y0=0,
        y1=1,
        fillcolor=_SOONER_FILL,
        line={"width": 0},
    )
    return [
        {
            "text": f"{format_ns(end_ns - start_ns)}<br>sooner",
            "showarrow": False,
            "font": {"size": 13, "color": MUTED},
            "xref": "x",
            "yref": f"{axis} domain",
            "x": (start_ns + end_ns) / 2 / NS_PER_MS,
            "y": 0.5,
        }
    ]
