"""Two runs side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import polars as pl

from ..base.kinds import Kind
from ..trace.table import Trace
from .report import Report, report


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective did in a step: means over ranks and steps. Bytes are full (gathered)
    sizes.
    """

    count_per_step: float
    bytes_per_step: float | None  # None where a payload is unknown


@dataclass(frozen=True)
class Comparison:
    """``a`` and ``b``, and b's numbers over a's.

    A ratio is None where a number is missing or a's is zero. ``max_loss_difference`` is the largest over
    the steps that both have, of the losses' mean over ranks; None where one has no metrics.
    """

    a: Report
    b: Report
    ratios: Mapping[str, float | None]
    max_loss_difference: float | None
    all_gathers_a: Traffic
    all_gathers_b: Traffic

    @property
    def losses_are_equal(self) -> bool | None:
        """Bit for bit; None where one has no metrics."""
        return None if self.max_loss_difference is None else self.max_loss_difference == 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "a": self.a.to_dict(),
            "b": self.b.to_dict(),
            "ratios": dict(self.ratios),
            "max_loss_difference": self.max_loss_difference,
            "all_gathers_a": asdict(self.all_gathers_a),
            "all_gathers_b": asdict(self.all_gathers_b),
        }


def compare(a: Trace, b: Trace) -> Comparison:
    """What changed from ``a`` to ``b``. They need not have the same ranks or steps."""
    report_a, report_b = report(a), report(b)
    return Comparison(
        a=report_a,
        b=report_b,
        ratios=_ratios(main_numbers(report_a), main_numbers(report_b)),
        max_loss_difference=_max_loss_difference(losses(a), losses(b)),
        all_gathers_a=traffic(a, Kind.ALL_GATHER),
        all_gathers_b=traffic(b, Kind.ALL_GATHER),
    )


def main_numbers(of: Report) -> dict[str, float | None]:
    """The measures and the means of a report under one roof, by name."""
    mean = of.mean()
    return asdict(of.measures) | (asdict(mean) if mean else {})


def losses(trace: Trace) -> dict[int, float]:
    """The mean over ranks of each step's loss, from the run's metrics, warm-up included."""
    return mean_losses(trace.about.get("metrics", {}))


def mean_losses(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[int, float]:
    """Step → loss, averaged over the ranks whose ``metrics.jsonl`` lines are given."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for lines in metrics.values():
        for line in lines:
            step, loss = line.get("step"), line.get("loss")
            if isinstance(step, int) and isinstance(loss, int | float):
                found[step].append(float(loss))
    return {step: fmean(values) for step, values in sorted(found.items())}


def traffic(trace: Trace, kind: Kind) -> Traffic:
    """Count and bytes of the collectives of one kind, a rank and step; a recording without steps is one
    step.
    """
    spans = trace.spans.filter(pl.col("kind") == kind.value)
    steps = max(len(trace.steps), 1) if len(trace.steps) else max(len(trace.ranks), 1)
    if len(trace.steps):
        spans = spans.filter(pl.col("step").is_not_null())
    known = spans["bytes"].null_count() == 0
    return Traffic(len(spans) / steps, float(spans["bytes"].sum()) / steps if known else None)


def _ratios(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: ratio(a.get(name), b.get(name)) for name in {**a, **b}}


def ratio(a: float | None, b: float | None) -> float | None:
    """b over a; None where either is missing or a is zero."""
    return b / a if a and b is not None else None


def _max_loss_difference(a: Mapping[int, float], b: Mapping[int, float]) -> float | None:
    common = a.keys() & b.keys()
    return max(abs(a[step] - b[step]) for step in common) if common else None
