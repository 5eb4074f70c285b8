"""What an analysis found, as tables for a terminal and a notebook. Units and percent are put on here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..analysis.breakdown import StepBreakdown
from ..analysis.compare import Comparison, Traffic, main_numbers, ratio
from ..analysis.intervals import Intervals
from ..analysis.report import Mean, Measures, Report
from ..base.provenance import Provenance
from ..base.units import NS_PER_MS, format_memory, format_ns, format_payload
from .table_format import UNKNOWN, Table, as_html, as_text
from .text import cut

_MAX_ROWS = 32  # shown; the frame has all


@dataclass(frozen=True, eq=False)
class ReportTable:
    """A report that shows itself: text in a terminal, HTML in a notebook; the numbers pass through."""

    report: Report

    @property
    def rows(self) -> tuple[StepBreakdown, ...]:
        return self.report.rows

    @property
    def measures(self) -> Measures:
        return self.report.measures

    def mean(self) -> Mean | None:
        """Means over ranks and steps, in ms; None for a recording without work."""
        return self.report.mean()

    def intervals(self, rank: int, step: int | None = None) -> Mapping[str, Intervals]:
        """The sets of time behind a row's numbers; (n, 2) int64, absolute ns."""
        return self.report.intervals(rank, step)

    def frame(self) -> pl.DataFrame:
        """One row for each rank and step, times in ns."""
        return self.report.frame()

    def to_dict(self) -> dict[str, Any]:
        return self.report.to_dict()

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        return as_text([self.report.provenance], headline(self.report), self._tables(), self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html([self.report.provenance], headline(self.report), self._tables(), self._notes())

    def _tables(self) -> list[Table]:
        return [_breakdown(self.report), _measures(self.report)]

    def _notes(self) -> list[str]:
        hidden = len(self.report.rows) - _MAX_ROWS
        more = [f"{hidden} more rows; .frame() has them all"] if hidden > 0 else []
        return [*more, *(str(note) for note in self.report.notes)]


@dataclass(frozen=True, eq=False)
class ComparisonTable:
    """Two reports side by side with the ratio of the second to the first; the numbers pass through."""

    comparison: Comparison
    names: tuple[str, str] = ("A", "B")

    def frame(self) -> pl.DataFrame:
        """``quantity, a, b, ratio``, a row a number of the reports; the unit ends the quantity's name."""
        a, b = main_numbers(self.comparison.a), main_numbers(self.comparison.b)
        ratios = self.comparison.ratios
        rows = [(name, a.get(name), b.get(name), ratios.get(name)) for name in {**a, **b}]
        schema = {"quantity": pl.String, "a": pl.Float64, "b": pl.Float64, "ratio": pl.Float64}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def to_dict(self) -> dict[str, Any]:
        return self.comparison.to_dict()

    def json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        return as_text(self._badges(), self._headline(), [self._table()], self._notes())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._badges(), self._headline(), [self._table()], self._notes())

    def _badges(self) -> list[Provenance]:
        return [self.comparison.a.provenance, self.comparison.b.provenance]

    def _headline(self) -> str:
        a, b = self.comparison.a.mean(), self.comparison.b.mean()
        if a is None or b is None:
            return "a run without a recorded step cannot be compared"
        ratio = self.comparison.ratios.get("exposed_comm_ms")
        times = f" (× {ratio:.2f})" if ratio is not None else ""
        exposed = f"{_ms(a.exposed_comm_ms)} → {_ms(b.exposed_comm_ms)}{times}"
        return f"exposed communication a step {exposed} · step {_ms(a.span_ms)} → {_ms(b.span_ms)}"

    def _table(self) -> Table:
        first, second = (cut(name, 40) for name in self.names)
        a, b = main_numbers(self.comparison.a), main_numbers(self.comparison.b)
        ratios = self.comparison.ratios
        rows = [
            (one.label, one.show(a.get(one.key)), one.show(b.get(one.key)), _ratio(ratios.get(one.key)))
            for one in (*BREAKDOWN, *MEASURES)
        ]
        gathers = self.comparison.all_gathers_a, self.comparison.all_gathers_b
        rows.append(_traffic_row("all-gathers a step", gathers, "count_per_step", lambda count: f"{count:g}"))
        rows.append(_traffic_row("all-gathered a step", gathers, "bytes_per_step", format_payload))
        strong = frozenset(i for i, one in enumerate(BREAKDOWN) if one.key == "exposed_comm_ms")
        return Table(("mean over ranks and steps", first, second, "second / first"), tuple(rows), strong)

    def _notes(self) -> list[str]:
        sides = zip(self.names, (self.comparison.a, self.comparison.b), strict=True)
        notes = [f"{cut(name, 40)}: {note}" for name, side in sides for note in side.notes]
        difference = self.comparison.max_loss_difference
        if difference is None:
            return notes
        losses = "losses are equal, bit for bit" if not difference else f"losses differ by at most {difference:.3g}"
        return [losses, *notes]


@dataclass(frozen=True)
class Quantity:
    """One of a report's ``main_numbers``: how to call it and how to write it."""

    key: str
    label: str
    write: Callable[[float], str]

    def show(self, value: float | None) -> str:
        return UNKNOWN if value is None else self.write(value)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _ms(value_ms: float) -> str:
    return format_ns(value_ms * NS_PER_MS) if value_ms else "0 ms"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.1f} samples/s"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _traffic_row(
    label: str, sides: tuple[Traffic, Traffic], field: str, write: Callable[[float], str]
) -> tuple[str, str, str, str]:
    a, b = (getattr(side, field) for side in sides)
    first, second = (UNKNOWN if value is None else write(value) for value in (a, b))
    return label, first, second, _ratio(ratio(a, b))


BREAKDOWN: tuple[Quantity, ...] = (
    Quantity("span_ms", "step", _ms),
    Quantity("compute_ms", "compute", _ms),
    Quantity("comm_ms", "communication", _ms),
    Quantity("exposed_comm_ms", "exposed communication", _ms),
    Quantity("overlap_frac", "communication hidden", percent),
    Quantity("copy_ms", "copies", _ms),
    Quantity("exposed_copy_ms", "exposed copies", _ms),
    Quantity("idle_ms", "idle", _ms),
)
MEASURES: tuple[Quantity, ...] = (
    Quantity("samples_per_s", "throughput", _rate),
    Quantity("peak_device_bytes", "peak device memory", format_memory),
    Quantity("peak_host_bytes", "peak host memory", format_memory),
    Quantity("all_gather_ms", "all-gather time a step", _ms),
    Quantity("h2d_ms", "host → device copies a step", _ms),
    Quantity("d2h_ms", "device → host copies a step", _ms),
)


def headline(report: Report) -> str:
    """One line: the step, the communication that nothing hides, what share is hidden, the throughput."""
    mean = report.mean()
    if mean is None:
        return "no work was recorded"
    parts = [f"step {_ms(mean.span_ms)}", f"exposed communication {_ms(mean.exposed_comm_ms)}"]
    if mean.span_ms:
        parts[1] += f" ({percent(mean.exposed_comm_ms / mean.span_ms)} of the step)"
    if mean.overlap_frac is not None:
        parts.append(f"{percent(mean.overlap_frac)} of communication hidden")
    if report.measures.samples_per_s is not None:
        parts.append(_rate(report.measures.samples_per_s))
    return " · ".join(parts)


_COLUMNS = (
    ("span", "span_ns"),
    ("compute", "compute_ns"),
    ("comm", "comm_ns"),
    ("exposed comm", "exposed_comm_ns"),
    ("copies", "copy_ns"),
    ("exposed copies", "exposed_copy_ns"),
    ("idle", "idle_ns"),
)


def _breakdown(report: Report) -> Table:
    rows = []
    for row in report.rows[:_MAX_ROWS]:
        times = [f"{getattr(row, field) / NS_PER_MS:,.2f} ms" for _, field in _COLUMNS]
        hidden = UNKNOWN if row.overlap_frac is None else percent(row.overlap_frac)
        where = f"rank {row.rank}" if row.step is None else f"rank {row.rank}, step {row.step}"
        rows.append((where, *times, hidden))
    return Table(("", *(label for label, _ in _COLUMNS), "comm hidden"), tuple(rows))


def _measures(report: Report) -> Table:
    numbers = main_numbers(report)
    rows = tuple((one.label, one.show(numbers.get(one.key))) for one in MEASURES)
    return Table(("measure", "value"), rows)
