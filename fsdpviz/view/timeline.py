"""The timeline of one trace as a plain Plotly figure."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from ..base.kinds import Kind
from ..base.units import NS_PER_MS
from ..trace.table import Trace
from .palette import FONT, GRID, INK, MUTED, PAPER
from .panel import RIGHT_PX, Panel, badge, label_margin
from .selection import Lanes, Selection, Steps, select
from .text import safe

NOTE_LINE_PX = 17
AXIS_PX = 48  # tick labels and the axis title
_NOTE_CHARACTERS = 150
_TITLE_LIMIT = 90
# the last one would upload the chart
_BUTTONS_OUT = ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud"]


def timeline(
    trace: Trace,
    *,
    ranks: Iterable[int] | int | None = None,
    steps: Steps = None,
    lanes: Lanes = None,
    kinds: Collection[Kind] | None = None,
    title: str | None = None,
) -> go.Figure:
    """Horizontal bars over time: a row a lane, grouped by rank, colour by kind; at most 2,000 bars.

    Time is in ms from the start of the view. ``steps`` are recorded step numbers or ``"all"``; by default the
    first recorded step, of at most 8 ranks. ``lanes`` are parts of lane names; ``kinds`` defaults to work and
    waits. What the picture leaves out or merges is said in a line under it. Raises TraceError for a rank,
    step or lane that the trace does not have.
    """
    selection = select(trace, ranks=ranks, steps=steps, lanes=lanes, kinds=kinds)
    panel = Panel.of(selection, trace.provenance)
    figure = go.Figure(panel.traces())
    notes = note_lines(panel.sentences())
    rows_px = round(panel.height * lane_px(len(selection.lanes)))
    top_px = 122
    bottom_px = AXIS_PX + NOTE_LINE_PX * len(notes) + 8
    left_px = label_margin([panel])
    figure.update_layout(
        **base_layout(),
        height=rows_px + top_px + bottom_px,
        margin={"l": left_px, "r": RIGHT_PX, "t": top_px, "b": bottom_px, "pad": 2},
        xaxis=time_axis(panel.axis_ns / NS_PER_MS, "time from the start of " + _start_words(selection)),
        yaxis=panel.axis(),
        legend=legend(y=1 + 26 / max(rows_px, 1)),
        meta={
            "provenance": trace.provenance.value,
            "spans": panel.bars.spans,
            "bars": panel.bars.table.height,
        },
    )
    corner = {"xref": "paper", "yref": "paper"}
    annotations = [
        *panel.step_labels(),
        heading(title or _default_title(selection), y=1, yshift=top_px - 40, xshift=8 - left_px),
        badge(trace.provenance, x=1, xanchor="right", y=1, yanchor="bottom", yshift=top_px - 38, **corner),
        *note_annotations(notes, y=0, yshift=-AXIS_PX, xshift=8 - left_px),
    ]
    figure.update_layout(annotations=annotations)
    return figure


def base_layout() -> dict[str, Any]:
    """What every timeline shares."""
    return {
        "template": "none",
        "barmode": "overlay",
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "font": {"family": FONT, "size": 14, "color": INK},
        # all labels in one size; what does not fit is hidden until a zoom makes room
        "uniformtext": {"mode": "hide", "minsize": 12},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "font": {"family": FONT, "size": 14, "color": INK}, "namelength": 0},
        "dragmode": "zoom",
        "modebar": {"remove": _BUTTONS_OUT, "orientation": "v"},
    }


def time_axis(view_ms: float, title: str) -> dict[str, Any]:
    """The x axis, with a hair of room at both ends and a line that follows the pointer."""
    return {
        "range": [-0.01 * view_ms, 1.015 * view_ms],
        "title": {"text": title, "font": {"size": 14}, "standoff": 6},
        "ticksuffix": " ms",
        "exponentformat": "none",
        "nticks": 14,
        "showgrid": True,
        "gridcolor": GRID,
        "zeroline": False,
        "rangeslider": {"visible": False},
        "showspikes": True,
        "spikemode": "across",
        "spikesnap": "cursor",
        "spikethickness": 1,
        "spikedash": "solid",
        "spikecolor": MUTED,
    }


def legend(y: float) -> dict[str, Any]:
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": y,
        "yanchor": "bottom",
        "font": {"size": 14},
        "itemsizing": "constant",
        "traceorder": "normal",
    }


def lane_px(lanes: int) -> int:
    """Height of a lane: tall enough to read from the last row, less so where there are many."""
    return 36 if lanes <= 8 else 28 if lanes <= 16 else 22


def heading(text: str, **place: Any) -> dict[str, Any]:
    """A title inside the picture, at its left edge."""
    return {
        "text": f"<b>{safe(text, _TITLE_LIMIT)}</b>",
        "showarrow": False,
        "font": {"size": 19, "color": INK},
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        **place,
    }


def note_lines(sentences: Sequence[str]) -> list[str]:
    """The sentences as lines that fit under a picture."""
    text = " ".join(f"{one[0].upper()}{one[1:]}{'' if one.endswith('…') else '.'}" for one in sentences)
    return textwrap.wrap(text, _NOTE_CHARACTERS)


def note_annotations(lines: Sequence[str], **place: Any) -> list[dict[str, Any]]:
    if not lines:
        return []
    return [
        {
            "text": "<br>".join(safe(line, 2 * _NOTE_CHARACTERS) for line in lines),
            "showarrow": False,
            "font": {"size": 13, "color": MUTED},
            "xref": "paper",
            "yref": "paper",
            "x": 0,
            "xanchor": "left",
            "yanchor": "top",
            "align": "left",
            "name": "note",
            **place,
        }
    ]


def step_words(numbers: Sequence[int]) -> str:
    """``"step 3"``, ``"steps 3-5"`` or, where the recording has none, ``"the recording"``."""
    if not numbers:
        return "the recording"
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]}-{numbers[-1]}"


def _start_words(selection: Selection) -> str:
    numbers = selection.step_numbers
    return f"step {numbers[0]}" if numbers else "the recording"


def _default_title(selection: Selection) -> str:
    ranks = selection.ranks
    of_ranks = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    words = step_words(selection.step_numbers)
    return f"{words[0].upper()}{words[1:]} on {of_ranks}" if ranks else "Empty recording"
