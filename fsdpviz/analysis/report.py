"""What a recording comes to: a breakdown of each rank's steps, and the lectures' five measures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import polars as pl

from ..base.errors import TraceError
from ..base.kinds import Kind
from ..base.provenance import Provenance
from ..base.units import NS_PER_MS
from ..trace.table import Note, Trace
from .breakdown import RankWork, StepBreakdown, breakdowns, windows
from .intervals import Intervals, clip, total

_COLUMNS = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "span_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "comm_ns": pl.Int64,
    "exposed_comm_ns": pl.Int64,
    "copy_ns": pl.Int64,
    "exposed_copy_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "overlap_frac": pl.Float64,
}


@dataclass(frozen=True)
class Measures:
    """The lectures' five: throughput, peak device and host memory, all-gather time, host↔device copy time.

    ``step_ms`` is the median over measured steps of the slowest rank's step, ``samples_per_s`` the samples
    of all ranks over that time. Peaks are the largest rank's, in bytes. ``all_gather_ms``, ``h2d_ms`` and
    ``d2h_ms`` are means over ranks and steps of the time in which at least one such transfer ran. None: not
    recorded.
    """

    step_ms: float | None
    samples_per_s: float | None
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    all_gather_ms: float | None
    h2d_ms: float | None
    d2h_ms: float | None


@dataclass(frozen=True)
class Mean:
    """Means over ranks and steps, in ms; ``overlap_frac`` over those that communicate."""

    span_ms: float
    compute_ms: float
    comm_ms: float
    exposed_comm_ms: float
    copy_ms: float
    exposed_copy_ms: float
    idle_ms: float
    overlap_frac: float | None


@dataclass(frozen=True)
class Report:
    """All numbers of one recording, with where they come from."""

    rows: tuple[StepBreakdown, ...]
    measures: Measures
    provenance: Provenance
    notes: tuple[Note, ...] = ()

    def mean(self) -> Mean | None:
        """The mean over all rows; None for a recording without work."""
        if not self.rows:
            return None
        overlaps = [row.overlap_frac for row in self.rows if row.overlap_frac is not None]
        names = [name for name in _COLUMNS if name.endswith("_ns")]
        means = {
            name.replace("_ns", "_ms"): fmean(getattr(row, name) for row in self.rows) / NS_PER_MS for name in names
        }
        return Mean(**means, overlap_frac=fmean(overlaps) if overlaps else None)

    def row(self, rank: int, step: int | None = None) -> StepBreakdown:
        """The breakdown of one rank's step. Raises TraceError if there is none."""
        found = next((row for row in self.rows if (row.rank, row.step) == (rank, step)), None)
        if found is None:
            known = ", ".join(f"({row.rank}, {row.step})" for row in self.rows[:20])
            raise TraceError(f"the report has no rank {rank}, step {step}; it has (rank, step) {known or 'none'}")
        return found

    def intervals(self, rank: int, step: int | None = None) -> Mapping[str, Intervals]:
        """The sets of time behind a row's numbers, by name: compute, comm, exposed_comm, copy,
        exposed_copy, idle.
        """
        return self.row(rank, step).intervals

    def frame(self) -> pl.DataFrame:
        """One row for each rank and step, times in ns."""
        return pl.DataFrame([self._plain(row) for row in self.rows], schema=_COLUMNS)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        mean = self.mean()
        return {
            "provenance": str(self.provenance),
            "measures": asdict(self.measures),
            "mean": asdict(mean) if mean else None,
            "breakdown": [self._plain(row) for row in self.rows],
            "notes": [str(note) for note in self.notes],
        }

    @staticmethod
    def _plain(row: StepBreakdown) -> dict[str, Any]:
        return {name: getattr(row, name) for name in _COLUMNS}


def report(trace: Trace) -> Report:
    """The report of a recording; one without spans has no rows and, where metrics are, measures."""
    # a rank that idles in all of a selection has no span in it, and a row
    rows = tuple(row for rank in trace.whole.ranks for row in breakdowns(trace, rank))
    return Report(rows, _measures(trace, rows), trace.provenance, (*trace.notes, *_steps_left_out(trace, rows)))


def _steps_left_out(trace: Trace, rows: Iterable[StepBreakdown]) -> Iterator[Note]:
    shown = {(row.rank, row.step) for row in rows}
    absent = [step for step in trace.steps.select("rank", "step").rows() if step not in shown]
    # as most often none is, the windows of the whole, of which a selection shows a part, are seldom asked for
    there = {rank: {window.step for window in windows(trace.whole, rank)} for rank in {rank for rank, _ in absent}}
    absent = [(rank, step) for rank, step in absent if there[rank] and step not in there[rank]]
    if absent:
        example = "step {1} of rank {0}".format(*absent[0])
        yield Note("steps that launched nothing on the device, not in the report", len(absent), example)


def _measures(trace: Trace, rows: Iterable[StepBreakdown]) -> Measures:
    rows = tuple(rows)
    step_ns, samples = measured_steps(trace)
    if not step_ns:
        by_step: defaultdict[int, list[int]] = defaultdict(list)
        for row in rows:
            if row.step is not None:
                by_step[row.step].append(row.span_ns)
        step_ns = {step: max(spans) for step, spans in by_step.items()}
    rates = [samples[step] / (step_ns[step] / 1e9) for step in samples if step_ns.get(step)]
    return Measures(
        step_ms=median(step_ns.values()) / NS_PER_MS if step_ns else None,
        samples_per_s=median(rates) if rates else None,
        peak_device_bytes=_peak(trace, "peak_device_bytes"),
        peak_host_bytes=_peak(trace, "peak_host_bytes"),
        all_gather_ms=_mean_ms(trace, rows, Kind.ALL_GATHER),
        h2d_ms=_mean_ms(trace, rows, Kind.H2D),
        d2h_ms=_mean_ms(trace, rows, Kind.D2H),
    )


def measured_steps(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """From the run's metrics: the slowest rank's time in ns, and the samples of all ranks, of each measured
    step.
    """
    step_ns: dict[int, int] = {}
    samples: dict[int, int] = {}
    for lines in trace.about.get("metrics", {}).values():
        for line in lines:
            step, time_ns, count = (line.get(key) for key in ("step", "step_ns", "samples"))
            if not line.get("measured") or not isinstance(step, int) or not isinstance(time_ns, int | float):
                continue
            step_ns[step] = max(step_ns.get(step, 0), int(time_ns))
            if isinstance(count, int | float):
                samples[step] = max(samples.get(step, 0), int(count))
    return step_ns, samples


def _peak(trace: Trace, key: str) -> int | None:
    peaks = [memory.get(key) for memory in trace.about.get("memory", {}).values()]
    known = [peak for peak in peaks if isinstance(peak, int | float)]
    return int(max(known)) if known else None


def _mean_ms(trace: Trace, rows: tuple[StepBreakdown, ...], kind: Kind) -> float | None:
    if not rows:
        return None
    covered = {rank: RankWork(trace, rank).of([kind]) for rank in {row.rank for row in rows}}
    times_ns = [total(clip(covered[row.rank], row.start_ns, row.start_ns + row.span_ns)) for row in rows]
    return fmean(times_ns) / NS_PER_MS
