"""Which spans and lanes a picture shows, and the sentences that say what it leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from ..analysis.breakdown import windows
from ..base.errors import TraceError
from ..base.kinds import COMMUNICATION, COMPUTATION, COPIES, WORK, Kind
from ..trace.table import STEP_SCHEMA, Trace

SHOWN_KINDS = WORK | {Kind.WAIT}
MAX_RANKS = 8  # shown unless ranks are asked for
MAX_LANES = 100  # drawn at most, whatever is asked for: with every kind in each they stay within the bars allowed

Steps: TypeAlias = int | Iterable[int] | str | None
Lanes: TypeAlias = str | Iterable[str] | None


@dataclass(frozen=True)
class LaneRow:
    """One row of a picture."""

    rank: int
    lane: int
    name: str


@dataclass(frozen=True, eq=False)
class Selection:
    """``spans`` lie in the view and are of a shown kind; ``phases`` and ``steps`` have start_ns and end_ns.

    ``start_ns`` and ``end_ns`` bound the view on the recording's clock. ``notes`` are for the reader.
    """

    spans: pl.DataFrame
    lanes: tuple[LaneRow, ...]
    phases: pl.DataFrame
    steps: pl.DataFrame
    start_ns: int
    end_ns: int
    notes: tuple[str, ...]

    @property
    def view_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def step_numbers(self) -> list[int]:
        return self.steps["step"].unique().sort().to_list()

    @property
    def ranks(self) -> list[int]:
        return sorted({row.rank for row in self.lanes})


def select(
    trace: Trace,
    *,
    ranks: Iterable[int] | int | None = None,
    steps: Steps = None,
    lanes: Lanes = None,
    kinds: Collection[Kind] | None = None,
    max_lanes: int = MAX_LANES,
) -> Selection:
    """The part of ``trace`` to draw: by default work and waits in the first recorded step of the first ranks.

    Raises TraceError for a rank, step or lane that the trace does not have.
    """
    notes: list[str] = []
    chosen_ranks = _choose_ranks(trace, ranks, notes)
    recorded = _recorded_steps(trace, chosen_ranks)
    shown_steps = _choose_steps(recorded, chosen_ranks, steps, notes)
    shown_lanes = _choose_lanes(trace, chosen_ranks, lanes)
    shown_kinds = [kind.value for kind in (SHOWN_KINDS if kinds is None else kinds)]

    view = _inside(trace.spans.filter(pl.col("rank").is_in(chosen_ranks)), shown_steps)
    spans = view.filter(pl.col("kind").is_in(shown_kinds)).join(
        shown_lanes.select("rank", "lane"), on=["rank", "lane"], how="semi"
    )
    rows = _order_lanes(spans, shown_lanes, max_lanes, notes)
    kept = pl.DataFrame(
        {"rank": [row.rank for row in rows], "lane": [row.lane for row in rows]},
        schema={"rank": pl.Int32, "lane": pl.Int32},
    )
    spans = spans.join(kept, on=["rank", "lane"], how="semi")
    start_ns, end_ns = _bounds(spans, shown_steps)
    return Selection(
        spans=spans,
        lanes=rows,
        phases=phase_runs(view.filter(pl.col("rank").is_in({row.rank for row in rows}))),
        steps=recorded if shown_steps is None else shown_steps,
        start_ns=start_ns,
        end_ns=end_ns,
        notes=tuple(notes),
    )


def _choose_ranks(trace: Trace, ranks: Iterable[int] | int | None, notes: list[str]) -> list[int]:
    if ranks is None:
        chosen = trace.ranks[:MAX_RANKS]
        if len(chosen) < len(trace.ranks):
            notes.append(f"{len(chosen)} of {len(trace.ranks)} ranks shown; others by ranks=…")
        return chosen
    asked = [ranks] if isinstance(ranks, int) else list(ranks)
    if missing := [rank for rank in asked if rank not in trace.ranks]:
        raise TraceError(
            f"ranks= must name ranks of the trace; it has {_numbers(trace.ranks)}, not {_numbers(missing)}"
        )
    return sorted(set(asked))


def _recorded_steps(trace: Trace, ranks: list[int]) -> pl.DataFrame:
    """The steps as the report sees them: on a device they end with their work, not with the host's range."""
    found = [window for rank in ranks for window in windows(trace, rank) if window.step is not None]
    rows = [(window.rank, window.step, window.start_ns, window.end_ns) for window in found]
    return pl.DataFrame(rows, schema=STEP_SCHEMA, orient="row")


def _choose_steps(table: pl.DataFrame, ranks: list[int], steps: Steps, notes: list[str]) -> pl.DataFrame | None:
    """The chosen steps' rows, or None for the whole recording."""
    if steps == "all" or (steps is None and table.is_empty()):
        return None
    recorded = table["step"].unique().sort().to_list()
    if steps is None:
        per_step = table.group_by("step").agg(pl.col("rank").n_unique().alias("ranks")).sort("step")
        on_every_rank = per_step.filter(pl.col("ranks") == pl.col("ranks").max())["step"].to_list()
        asked = on_every_rank[:1]
        if len(recorded) > 1:
            notes.append(f"step {asked[0]} of {_numbers(recorded)} shown; steps='all' shows every one")
    elif isinstance(steps, str):
        raise TraceError(f"steps= must be numbers or 'all'; got {steps!r}. The trace has {_numbers(recorded)}")
    else:
        asked = [steps] if isinstance(steps, int) else sorted(set(steps))
    if missing := [step for step in asked if step not in recorded]:
        has = _numbers(recorded) or "none"
        raise TraceError(f"steps= must name recorded steps; the trace has {has}, not {_numbers(missing)}")
    chosen = table.filter(pl.col("step").is_in(asked))
    if absent := sorted(set(ranks) - set(chosen["rank"].to_list())):
        notes.append(f"no such step on rank {_numbers(absent)}")
    return chosen


def _choose_lanes(trace: Trace, ranks: list[int], lanes: Lanes) -> pl.DataFrame:
    table = trace.lanes.filter(pl.col("rank").is_in(ranks))
    if lanes is None:
        return table
    asked = [lanes] if isinstance(lanes, str) else list(lanes)
    matches = pl.lit(False)
    for text in asked:
        matches = matches | pl.col("name").str.to_lowercase().str.contains(text.lower(), literal=True)
    chosen = table.filter(matches)
    if chosen.is_empty():
        names = ", ".join(table["name"].unique().sort().to_list()[:12])
        raise TraceError(f"lanes= must be part of a lane's name; got {', '.join(asked)}. The lanes are {names}")
    return chosen


def _inside(spans: pl.DataFrame, steps: pl.DataFrame | None) -> pl.DataFrame:
    """Spans that overlap their own rank's window; one that ends where the window starts is outside."""
    if steps is None:
        return spans
    bounds = steps.group_by("rank").agg(pl.col("start_ns").min().alias("_from"), pl.col("end_ns").max().alias("_to"))
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    overlaps = (pl.col("start_ns") < pl.col("_to")) & (
        (end_ns > pl.col("_from")) | ((pl.col("duration_ns") == 0) & (pl.col("start_ns") == pl.col("_from")))
    )
    return spans.join(bounds, on="rank").filter(overlaps).drop("_from", "_to")


_OTHER_ROLE = 3


def _order_lanes(spans: pl.DataFrame, lanes: pl.DataFrame, max_lanes: int, notes: list[str]) -> tuple[LaneRow, ...]:
    """Lanes with something to draw: of each rank first what computes, then what communicates, then copies.

    A gather is so seen right under the compute that hides it.
    """
    roles = spans.group_by("rank", "lane").agg(
        *(
            pl.col("duration_ns").filter(pl.col("kind").is_in([kind.value for kind in group])).sum().alias(name)
            for name, group in (("compute", COMPUTATION), ("comm", COMMUNICATION), ("copy", COPIES))
        )
    )
    # a lane with a trace of compute (a reduction's own arithmetic) is not where the model computes
    computes = pl.col("compute") > 0.05 * pl.col("compute").sum().over("rank")
    role = pl.when(computes).then(0).when(pl.col("comm") > 0).then(1).when(pl.col("copy") > 0).then(2)
    table = lanes.join(roles.with_columns(role.otherwise(_OTHER_ROLE).alias("role")), on=["rank", "lane"])
    table = table.sort("rank", "role", "sort", "lane")
    if hidden := lanes.height - table.height:
        notes.append(f"{hidden} lane{'s' if hidden > 1 else ''} without work in view left out")
    if table.height > max_lanes:
        notes.append(f"{max_lanes} of {table.height} lanes shown; others by ranks=… or lanes=…")
        table = table.head(max_lanes)
    rows = table.select("rank", "lane", "name").iter_rows()
    return tuple(LaneRow(rank, lane, name or f"lane {lane}") for rank, lane, name in rows)


def phase_runs(spans: pl.DataFrame) -> pl.DataFrame:
    """``rank, phase, start_ns, end_ns``: stretches of one phase, read where the rank computes."""
    work = [Kind.COMPUTE.value, Kind.OPTIMIZER.value]
    busy = spans.filter(pl.col("kind").is_in(work)).group_by("rank", "lane").agg(pl.col("duration_ns").sum())
    main = busy.filter(pl.col("duration_ns") > 0.05 * pl.col("duration_ns").sum().over("rank"))
    phased = (
        spans.filter(pl.col("phase").is_not_null() & pl.col("kind").is_in([*work, Kind.ANNOTATION.value]))
        .join(main, on=["rank", "lane"], how="semi")
        .sort("rank", "start_ns", maintain_order=True)
        .with_columns(pl.struct("rank", "phase").rle_id().alias("run"))
    )
    runs = phased.group_by("run", maintain_order=True).agg(
        pl.col("rank").first(),
        pl.col("phase").first(),
        pl.col("start_ns").min(),
        (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"),
    )
    next_start = pl.col("start_ns").shift(-1).over("rank")
    return runs.drop("run").with_columns(pl.min_horizontal("end_ns", next_start).alias("end_ns"))


def _bounds(spans: pl.DataFrame, steps: pl.DataFrame | None) -> tuple[int, int]:
    if steps is not None and not steps.is_empty():
        start, end = steps["start_ns"].min(), steps["end_ns"].max()
    else:
        start, end = spans["start_ns"].min(), (spans["start_ns"] + spans["duration_ns"]).max()
    if not isinstance(start, int) or not isinstance(end, int):
        return 0, 1
    return start, max(end, start + 1)


def _numbers(values: Iterable[int]) -> str:
    listed = list(values)
    shown = ", ".join(str(value) for value in listed[:8])
    return f"{shown}, … {listed[-1]}" if len(listed) > 8 else shown
