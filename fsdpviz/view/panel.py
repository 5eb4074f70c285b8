"""One trace drawn into one subplot: rows for lanes, bars for spans, a strip for phases, lines for steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from ..base.kinds import Kind
from ..base.provenance import Provenance
from ..base.units import NS_PER_MS, format_ns
from .bar_text import FONT_PX, bar_hover, bar_label
from .bars import MAX_BARS, Bars, to_bars
from .palette import (
    BADGE_COLOURS,
    GRID,
    INK,
    KIND_STYLES,
    MUTED,
    OTHER_PHASE_FILL,
    PAINT_ORDER,
    PHASE_FILLS,
    STEP_LINE,
)
from .selection import LaneRow, Selection
from .text import cut, safe

_STRIP = 0.5  # height of a phase strip, in lanes
_RANK_GAP = 0.3
_BAR_THICKNESS = 0.8
_MAX_STRIPS = 200
_MAX_STEP_MARKS = 100
_MAX_STEP_LABELS = 12
_NAME_LIMIT = 34  # characters of a lane's name beside the axis; the hover has it whole


@dataclass(frozen=True, eq=False)
class Panel:
    """A selection with its bars and the places of its rows. y counts lanes downwards from 0.

    ``axis_ns`` is the length of the time axis, which may be longer than the selection.
    """

    selection: Selection
    bars: Bars
    provenance: Provenance
    axis_ns: int

    @classmethod
    def of(
        cls,
        selection: Selection,
        provenance: Provenance,
        *,
        max_bars: int = MAX_BARS,
        axis_ns: int | None = None,
    ) -> Panel:
        """Draws at most ``max_bars`` bars, phase strips and step marks together."""
        room = max_bars - min(selection.phases.height, _MAX_STRIPS) - _MAX_STEP_MARKS
        length_ns = axis_ns or selection.view_ns
        return cls(selection, to_bars(selection.spans, length_ns, room), provenance, length_ns)

    @cached_property
    def strips(self) -> pl.DataFrame:
        """Phase stretches, the longest first where there are more than can be drawn."""
        return self.selection.phases.sort(pl.col("start_ns") - pl.col("end_ns")).head(_MAX_STRIPS)

    @cached_property
    def _places(self) -> tuple[dict[tuple[int, int], float], dict[int, tuple[float, float]], float]:
        lanes: dict[tuple[int, int], float] = {}
        ranks: dict[int, tuple[float, float]] = {}
        with_strip = set(self.strips["rank"].to_list())
        y = 0.0
        for rank in self.selection.ranks:
            top = y
            y += _STRIP if rank in with_strip else 0.0
            for row in self.selection.lanes:
                if row.rank == rank:
                    lanes[rank, row.lane] = y + 0.5
                    y += 1
            ranks[rank] = (top, y)
            y += _RANK_GAP
        return lanes, ranks, max(y - _RANK_GAP, 1.0)

    @property
    def lane_y(self) -> dict[tuple[int, int], float]:
        return self._places[0]

    @property
    def rank_y(self) -> dict[int, tuple[float, float]]:
        """Top and bottom of each rank's rows."""
        return self._places[1]

    @property
    def height(self) -> float:
        return self._places[2]

    def ms(self, times_ns: Iterable[int]) -> np.ndarray:
        """Times as milliseconds from the start of the view."""
        relative = np.asarray(list(times_ns), dtype=np.int64) - self.selection.start_ns
        return relative / NS_PER_MS

    def traces(self, yaxis: str = "y", legend_seen: set[str] | None = None) -> list[go.Bar | go.Scatter]:
        """Phase strips first, then one Bar trace a kind, then the step lines."""
        seen = set() if legend_seen is None else legend_seen
        strips = [] if self.strips.is_empty() else [self._strip_trace(yaxis), self._strip_names(yaxis)]
        present = set(self.bars.table["kind"].to_list())
        bars = [self._kind_trace(kind, yaxis, seen) for kind in PAINT_ORDER if kind.value in present]
        lines = [self._step_trace(yaxis)] if not self.selection.steps.is_empty() else []
        return [*strips, *bars, *lines]

    def _kind_trace(self, kind: Kind, yaxis: str, legend_seen: set[str]) -> go.Bar:
        style = KIND_STYLES[kind]
        table = self.bars.table.filter(pl.col("kind") == kind.value)
        names = {(row.rank, row.lane): row.name for row in self.selection.lanes}
        bars = list(table.iter_rows(named=True))
        edgeless = [bar["spans"] > 1 or bar["duration_ns"] < self.axis_ns / 150 for bar in bars]
        first = kind.value not in legend_seen
        legend_seen.add(kind.value)
        return go.Bar(
            orientation="h",
            base=self.ms(table["start_ns"]),
            x=table["duration_ns"].to_numpy() / NS_PER_MS,
            y=[self._bar_y(bar) for bar in bars],
            width=[_thickness(bar) for bar in bars],
            yaxis=yaxis,
            name=style.words,
            legendgroup=kind.value,
            legendrank=1 + list(KIND_STYLES).index(kind),
            showlegend=first,
            marker={
                "color": style.fill,
                # a white edge parts wide neighbours; a narrow bar keeps its colour, and a pixel, at any zoom
                "line": {"width": 1, "color": [style.fill if same else "#ffffff" for same in edgeless]},
                "pattern": {
                    "shape": style.pattern,
                    "fgcolor": style.hatch,
                    "fgopacity": 0.45,
                    "fillmode": "overlay",
                    "solidity": 0.15,
                    "size": 7,
                },
            },
            text=[bar_label(bar, self.axis_ns) for bar in bars],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": style.ink, "size": FONT_PX},
            hovertext=[bar_hover(bar, names[bar["rank"], bar["lane"]], self.selection.start_ns) for bar in bars],
            hoverinfo="text",
            hoverlabel={"bgcolor": "#ffffff", "bordercolor": style.fill},
        )

    def _bar_y(self, bar: dict[str, Any]) -> float:
        """The middle of the bar. Merged bars stand on the lane's floor, or on one another."""
        middle = self.lane_y[bar["rank"], bar["lane"]]
        if bar["spans"] == 1:
            return middle
        return middle + _BAR_THICKNESS * (0.5 - bar["below"] - bar["share"] / 2)

    def _strip_trace(self, yaxis: str) -> go.Bar:
        strips = self.strips
        lengths_ns = (strips["end_ns"] - strips["start_ns"]).to_list()
        hover = [
            f"<b>{safe(phase, 40)}</b><br>rank {rank} · {format_ns(length)}"
            for phase, rank, length in zip(strips["phase"], strips["rank"], lengths_ns, strict=True)
        ]
        return go.Bar(
            orientation="h",
            base=self.ms(strips["start_ns"]),
            x=np.asarray(lengths_ns) / NS_PER_MS,
            y=[self.rank_y[rank][0] + _STRIP / 2 for rank in strips["rank"]],
            width=_STRIP * 0.86,
            yaxis=yaxis,
            name="phase",
            showlegend=False,
            marker={
                "color": [PHASE_FILLS.get(phase, OTHER_PHASE_FILL) for phase in strips["phase"]],
                "line": {"width": 0},
            },
            hovertext=hover,
            hoverinfo="text",
            hoverlabel={"bgcolor": "#ffffff"},
        )

    def _strip_names(self, yaxis: str) -> go.Scatter:
        """The phases' names in strips wide enough; a bar's own text would need a taller strip."""
        wide = self.strips.filter(pl.col("end_ns") - pl.col("start_ns") > self.axis_ns / 15)
        return go.Scatter(
            x=self.ms((wide["start_ns"] + wide["end_ns"]) // 2),
            y=[self.rank_y[rank][0] + _STRIP / 2 for rank in wide["rank"]],
            yaxis=yaxis,
            mode="text",
            text=[safe(phase, 40) for phase in wide["phase"]],
            textposition="middle center",
            textfont={"color": INK, "size": 12},
            name="phase",
            showlegend=False,
            hoverinfo="skip",
        )

    def _step_trace(self, yaxis: str) -> go.Scatter:
        x: list[float | None] = []
        y: list[float | None] = []
        shown = self.selection.steps.filter(pl.col("rank").is_in(list(self.rank_y))).head(_MAX_STEP_MARKS // 2)
        for rank, start_ns, end_ns in shown.select("rank", "start_ns", "end_ns").iter_rows():
            top, bottom = self.rank_y[rank]
            for time_ms in self.ms([start_ns, end_ns]):
                x += [float(time_ms), float(time_ms), None]
                y += [top, bottom, None]
        return go.Scatter(
            x=x,
            y=y,
            yaxis=yaxis,
            mode="lines",
            line={"color": STEP_LINE, "width": 1.5, "dash": "dot"},
            name="step",
            showlegend=False,
            hoverinfo="skip",
        )

    def step_labels(self, yref: str = "y") -> list[dict[str, Any]]:
        """Annotations beside the end of each step, unless there are too many to read."""
        ends = self.selection.steps.group_by("step").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        if ends.height > _MAX_STEP_LABELS:
            return []
        return [
            {
                "text": f"step {step}: {format_ns(end_ns - start_ns)}",
                "x": float(self.ms([end_ns])[0]),
                "y": 0,
                "xref": "x",
                "yref": yref,
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 12, "color": MUTED},
            }
            for step, start_ns, end_ns in ends.sort("step").iter_rows()
        ]

    def axis(self) -> dict[str, Any]:
        """The y axis: a tick a lane; zoom stays along the time."""
        return {
            "range": [self.height, 0],
            "tickmode": "array",
            "tickvals": [self.lane_y[row.rank, row.lane] for row in self.selection.lanes],
            "ticktext": [row_label(row) for row in self.selection.lanes],
            "tickfont": {"size": 13, "color": INK},
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "linecolor": GRID,
        }

    def sentences(self) -> list[str]:
        """What merged, nested or was left out, for the line under the picture."""
        notes = list(self.selection.notes)
        drawn = f"{self.bars.spans:,} spans drawn as {self.bars.table.height:,} bars"
        if self.bars.resolution_ns:
            width = format_ns(self.bars.resolution_ns)
            merging = f"neighbours of one kind narrower than {width} merge into a bar as tall as they were busy"
            choice = "ranks=…" if self.selection.steps.is_empty() else "steps=…"
            notes.insert(0, f"{drawn}: {merging}; zoom by {choice}")
        elif self.bars.nested:
            notes.insert(0, f"{drawn}: {self.bars.nested:,} lie inside another of their kind")
        if self.bars.table.is_empty():
            notes.insert(0, "no spans to draw")
        if hidden := self.selection.phases.height - self.strips.height:
            notes.append(f"the {hidden} shortest phase stretches left out")
        if self.selection.steps.height > _MAX_STEP_MARKS // 2:
            notes.append(f"only the first {_MAX_STEP_MARKS // 2} steps are marked")
        return notes


def _thickness(bar: dict[str, Any]) -> float:
    lone_wait = bar["kind"] == Kind.WAIT.value and bar["spans"] == 1
    return _BAR_THICKNESS * (0.5 if lone_wait else bar["share"])


def row_label(row: LaneRow) -> str:
    return f"rank {row.rank} · {safe(row.name, _NAME_LIMIT)}"


RIGHT_PX = 44  # beside the panels, where the mode bar covers nothing


def label_margin(panels: Iterable[Panel]) -> int:
    """Pixels that the longest row label needs."""
    longest = max(
        (len(f"rank {row.rank} · {cut(row.name, _NAME_LIMIT)}") for panel in panels for row in panel.selection.lanes),
        default=8,
    )
    return min(40 + int(7.0 * longest), 320)


def badge(provenance: Provenance, **place: Any) -> dict[str, Any]:
    """The provenance as a visible annotation."""
    background, border = BADGE_COLOURS[provenance]
    return {
        "text": safe(provenance.value),
        "showarrow": False,
        "font": {"size": 13, "color": INK},
        "bgcolor": background,
        "bordercolor": border,
        "borderwidth": 1.5,
        "borderpad": 4,
        "name": "provenance",
        **place,
    }
