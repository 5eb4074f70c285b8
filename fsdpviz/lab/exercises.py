"""Predictions before a figure and exercises after it. The right answer is read from the learner's own recording.

A cell that is not answered yet (``...``) says so and passes, so that a notebook runs from top to bottom.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from types import EllipsisType

import polars as pl

from ..analysis.intervals import Intervals, intersection, total, union
from ..base.errors import FsdpvizError
from ..base.kinds import COMPUTATION, Kind
from .recording import Recording

Answer = str | float | EllipsisType | None


@dataclass(frozen=True)
class Verdict:
    """What came of an answer. ``passed`` is None while there is none."""

    passed: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "✓", False: "✗", None: "…"}[self.passed]
        return f"{mark} {self.text}"

    def _repr_html_(self) -> str:
        colour = {True: "#1a7f37", False: "#b42318", None: "#6b6b6b"}[self.passed]
        style = f"border-left:4px solid {colour};padding:.4em .8em;margin:.3em 0"
        return f'<div style="{style}">{html.escape(str(self))}</div>'


@dataclass(frozen=True)
class Prediction:
    """A guess that is made before the figure. ``guess`` may stay ``...`` for now."""

    question: str
    guess: float | EllipsisType
    unit: str = ""

    def reveal(self, measured: float) -> Verdict:
        """The guess beside what was measured; a prediction is never wrong, only far off."""
        unit = f" {self.unit}" if self.unit else ""
        if isinstance(self.guess, EllipsisType):
            return Verdict(None, f"{self.question} It was {measured:.2f}{unit}; you made no guess.")
        off = abs(self.guess - measured)
        return Verdict(
            True, f"{self.question} You said {self.guess:.2f}{unit}, it was {measured:.2f}{unit}: off by {off:.2f}."
        )


@dataclass(frozen=True)
class Exercise:
    """A question whose answer is a number (within ``tolerance_frac``) or a word. ``why`` is told once it is right."""

    question: str
    expected: str | float
    hint: str
    why: str
    tolerance_frac: float = 0.0

    def check(self, answer: Answer) -> Verdict:
        """Whether ``answer`` is right; a wrong one gets the hint."""
        if answer is None or isinstance(answer, EllipsisType):
            return Verdict(None, f"{self.question} Put your answer in place of the dots.")
        if self._is_right(answer):
            return Verdict(True, f"Right. {self.why}")
        return Verdict(False, f"Not {answer!r}. {self.hint}")

    def _is_right(self, answer: str | float) -> bool:
        if isinstance(self.expected, str):
            return str(answer).strip().lower() == self.expected.lower()
        try:
            number = float(answer)
        except ValueError:
            return False
        return abs(number - self.expected) <= self.tolerance_frac * abs(self.expected)

    def _repr_html_(self) -> str:
        return f"<p><b>{html.escape(self.question)}</b></p>"


def gathers_a_step(run: Recording) -> Exercise:
    """How many all-gathers one rank takes part in, in one step."""
    gathers = _one_step(run).filter(pl.col("kind") == Kind.ALL_GATHER.value)
    units = gathers["unit"].n_unique()
    return Exercise(
        question="How many all-gathers does one rank take part in, in one step?",
        expected=float(len(gathers)),
        hint=f"There are {units} units with parameters. When is each of them gathered, and when is it freed?",
        why=f"Each of the {units} units is gathered for forward, freed after it, and gathered again for backward.",
    )


def never_hidden(run: Recording) -> Exercise:
    """The unit whose forward all-gather no prefetch can hide: nothing runs before it."""
    step = _one_step(run)
    compute = _covered(step.filter(pl.col("kind").is_in([kind.value for kind in COMPUTATION])))
    gathers = step.filter((pl.col("kind") == Kind.ALL_GATHER.value) & (pl.col("phase") == "forward"))
    exposed = {
        unit: 1 - total(intersection(_covered(own), compute)) / max(total(_covered(own)), 1)
        for (unit,), own in gathers.group_by("unit", maintain_order=True)
    }
    if not exposed:
        raise FsdpvizError("this exercise needs all-gathers in forward; the recording has none. Use a sharding engine")
    first = gathers.sort("start_ns")["unit"][0]
    return Exercise(
        question="Which unit's all-gather in forward can no prefetch hide?",
        expected=str(first),
        hint="Look for a gather with no compute above it. What could have run at that time?",
        why=f"It is the first of the step: {exposed[first]:.0%} of it was exposed, with nothing to compute yet.",
    )


def _one_step(run: Recording) -> pl.DataFrame:
    """The first recorded step of the lowest rank. Raises FsdpvizError when nothing was recorded."""
    if not len(run.steps):
        raise FsdpvizError("this exercise needs a recording with steps; run it with Capture(trace=True)")
    row = run.steps.sort("rank", "step").row(0, named=True)
    return run.spans.filter((pl.col("rank") == row["rank"]) & (pl.col("step") == row["step"]))


def _covered(spans: pl.DataFrame) -> Intervals:
    starts_ns = spans["start_ns"].to_numpy()
    return union(starts_ns, starts_ns + spans["duration_ns"].to_numpy())
