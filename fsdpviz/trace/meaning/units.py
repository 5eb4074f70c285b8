"""What FSDP moved, unit by unit: each gather, reduction and copy with who issued it, when it ran, when it was needed.

    exposed = |[start, end) \\ ∪ compute of the rank|       transfers only; a copy-in or copy-out computes itself
    late    = max(0, end − needed)                          how long the unit waited for it

[Note: when a gather is needed] On the CPU: when the unit's pre-forward or pre-backward hook begins, which waits for
it. On a device the host runs ahead, so that its hooks say nothing; there the unit's first kernel K after the hook
(the copy-out, else its first compute) could have started once the work before it on its stream had ended and it
had been launched: needed = min(start of K, max(end before K, launch of K)). What prepares a gather is no K: the
copy-in and the casts (mixed precision, fp8) that are issued in the gather's own range before it. A frozen unit whose
input needs no gradient has no such hook in backward, and needs nothing: what was prefetched for it was for naught.

[Note: which use a gather is for] A unit is used in forward, from pre-forward to post-forward, and in backward, from
pre-backward to post-backward. A gather serves the use in which it was issued, else the first of its unit that ends
after that; one issued before that use began was prefetched, and the range around it says by which pass.

A reduction, and a gradient's copy to the host, is needed when the optimizer first steps after it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from ...base.kinds import COMPUTATION, WORK, Kind
from ...base.labels import Phase, RangeLabel
from .attribute import labelled_ranges
from .fsdp1 import NODE, PREFIX
from .uses import POST_BACKWARD, Range, unit_windows
from .windows import Windows, covered_ns, union

if TYPE_CHECKING:
    from ..table import Trace

EVENTS = ("all_gather", "copy_in", "copy_out", "reduce_scatter", "all_reduce", "h2d", "d2h")
UNIT_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "unit": pl.String,
    "phase": pl.String,  # of the use it is for: base.labels.Phase
    "event": pl.Enum(EVENTS),
    "issuer": pl.Enum(["self", "forward_prefetch", "backward_prefetch"]),  # null where the file has no launch
    "lane": pl.Int32,
    "issued_ns": pl.Int64,  # null where the file has no launch
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "needed_ns": pl.Int64,  # see the notes above; null where the recording ends before
    "exposed_ns": pl.Int64,  # null for copies that compute themselves
    "bytes": pl.Int64,
}

_RANGES = r"^(?:FSDP::|fsdpviz::|FullyShardedDataParallel\.)"
_COPY_OPERATORS = {"fsdp::all_gather_copy_in": "copy_in", "fsdp::chunk_cat": "copy_in"} | {
    "fsdp::split_with_sizes_copy": "copy_out"
}
_TRANSFERS = {kind.value for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.H2D, Kind.D2H)}
_COPIES = {Kind.COMPUTE.value, Kind.D2D.value}
_COMPUTATION = [kind.value for kind in COMPUTATION]
_WORK = [kind.value for kind in WORK]
_PREFETCHES = ("forward_prefetch", "backward_prefetch")
_HOOKS = {"pre_forward", "post_forward", "pre_backward", *POST_BACKWARD, *_PREFETCHES}
# which range of FSDP's issues a transfer over an emulated link, which runs on a thread of its own
_LINK_ISSUERS = {
    Kind.ALL_GATHER.value: "all_gather",
    Kind.REDUCE_SCATTER.value: "post_backward_reduce",
    Kind.ALL_REDUCE.value: "post_backward_reduce",
}
_REDUCTIONS = [Kind.REDUCE_SCATTER.value, Kind.ALL_REDUCE.value, Kind.D2H.value]


def unit_table(trace: Trace) -> pl.DataFrame:
    """UNIT_SCHEMA's columns, by rank and start; empty for a recording without FSDP's ranges."""
    frames = [_OfRank(trace, rank).frame() for rank in trace.ranks]
    return pl.concat([pl.DataFrame(schema=UNIT_SCHEMA), *frames]).sort("rank", "start_ns", "lane")


def needed_spans(spans: pl.DataFrame) -> pl.DataFrame:
    """Those that the table depends on, and steps' windows: work, ranges, and few of the host's operators."""
    name = pl.col("name")
    is_needed = name.is_in(list(_COPY_OPERATORS)) | name.str.starts_with(NODE)
    return spans.filter((pl.col("kind") != Kind.HOST.value) | is_needed)


class _OfRank:
    """One rank's events while they are being decided; arrays are by event."""

    def __init__(self, trace: Trace, rank: int) -> None:
        self.spans = trace.spans.filter(pl.col("rank") == rank)
        self.is_device = trace.lanes.filter((pl.col("rank") == rank) & pl.col("is_device"))["lane"].to_numpy()
        # a device's lanes repeat the host's ranges, as long as what was launched in them ran
        on_host = self.spans.filter(~pl.col("lane").is_in(self.is_device.tolist()))
        self.labelled = _labelled(on_host, _nodes(on_host))
        compute = self.spans.filter(pl.col("kind").is_in(_COMPUTATION))
        self.compute = compute.filter(pl.col("lane").is_in(self.is_device.tolist())) if len(self.is_device) else compute

    def frame(self) -> pl.DataFrame:
        if not self.labelled:
            return pl.DataFrame(schema=UNIT_SCHEMA)
        own = [(item, label) for item, label in self.labelled if label.family == "FSDP"]
        events = self._events(own)
        if events.is_empty():
            return pl.DataFrame(schema=UNIT_SCHEMA)
        lanes = events["issued_lane"].fill_null(-1).to_numpy().astype(np.int64)
        times = events["issued_ns"].fill_null(-1).to_numpy()
        prefetches = Windows(self._prefetches(own))
        prefetched = prefetches.names_at(lanes, times)
        serves = events["gathers"].to_list()
        issuers = [(found or "self") if lane >= 0 else None for found, lane in zip(prefetched, lanes, strict=True)]
        issuers = [
            "self" if issuer and not gathers else issuer for issuer, gathers in zip(issuers, serves, strict=True)
        ]
        phases, needed = self._uses(events, lanes, times, np.array(serves))
        return events.with_columns(
            issuer=pl.Series(issuers, dtype=pl.String),
            phase=pl.coalesce(pl.Series(phases, dtype=pl.String), "phase"),
            end_ns=pl.col("start_ns") + pl.col("duration_ns"),
            needed_ns=pl.Series(needed, dtype=pl.Int64),
            exposed_ns=self._exposed(events),
        ).select(pl.col(name).cast(kind) for name, kind in UNIT_SCHEMA.items())

    @cached_property
    def _again(self) -> set[tuple[int, int]]:
        """Lane and start of the ranges that are recorded while a forward is run again."""
        recomputed = (pl.col("phase") == Phase.RECOMPUTE.value) & pl.col("name").str.contains(_RANGES)
        return set(self.spans.filter(recomputed).select("lane", "start_ns").iter_rows())

    def _prefetches(self, own: Sequence[tuple[Range, RangeLabel]]) -> Iterator[tuple[int, int, int, str]]:
        """The ranges in which a unit is gathered ahead: FSDP's own, and gathers that lie in a hook of another unit,
        as the glass box issues them.
        """
        yield from ((*item[:3], label.phase) for item, label in own if label.phase in _PREFETCHES)
        gathers = [(item, label.unit) for item, label in own if label.phase == "all_gather"]
        hooks = Windows((*item[:3], (item, label)) for item, label in own if label.phase in _HOOKS)
        lanes, starts = (np.array([item[place] for item, _ in gathers], np.int64) for place in (0, 1))
        for (item, unit), hook in zip(gathers, hooks.names_at(lanes, starts), strict=True):
            if hook is not None and hook[1].unit not in (unit, None):
                in_backward = "backward" in hook[1].phase or hook[0][:2] in self._again
                yield *item[:3], _PREFETCHES[in_backward]

    # -- which spans are events, and whose

    def _events(self, own: Sequence[tuple[Range, RangeLabel]]) -> pl.DataFrame:
        spans = self.spans.filter(pl.col("kind").is_in([*_TRANSFERS, *_COPIES])).with_columns(
            is_link=pl.col("name").str.starts_with("fsdpviz::"), kind=pl.col("kind").cast(pl.String)
        )
        # what runs on the host is issued when it runs
        on_host = pl.col("issued_ns").is_null() & ~pl.col("lane").is_in(self.is_device.tolist())
        spans = spans.with_columns(
            issued_lane=pl.when(on_host).then("lane").otherwise("issued_lane"),
            issued_ns=pl.when(on_host).then("start_ns").otherwise("issued_ns"),
        )
        spans = self._links_issued(spans, own)
        lanes = spans["issued_lane"].fill_null(-1).to_numpy().astype(np.int64)
        times = spans["issued_ns"].fill_null(-1).to_numpy()
        ranges = Windows((*item[:3], label) for item, label in own if label.unit is not None)
        labels = ranges.names_at(lanes, times)
        copies = self._copy_windows(own).names_at(lanes, times)
        rows = zip(spans["kind"], spans["is_link"], spans["unit"], labels, copies, strict=True)
        decided = [_event(*row) for row in rows]
        reduces = [label is not None and label.phase.startswith("post_backward") for label in labels]
        return spans.with_columns(
            event=pl.Series([event for event, _ in decided], dtype=pl.String),
            unit=pl.Series([unit for _, unit in decided], dtype=pl.String),
            gathers=pl.Series(reduces, dtype=pl.Boolean).not_() & ~pl.col("kind").is_in(_REDUCTIONS),
        ).filter(pl.col("event").is_not_null())

    def _copy_windows(self, own: Sequence[tuple[Range, RangeLabel]]) -> Windows[str]:
        operators = self.spans.filter(pl.col("name").is_in(list(_COPY_OPERATORS)))
        windows = [
            (lane, start, start + duration, _COPY_OPERATORS[name])
            for lane, start, duration, name in operators.select("lane", "start_ns", "duration_ns", "name").iter_rows()
        ]
        if not any(name == "copy_out" for *_, name in windows):  # before torch 2.4 the operator was no one's own
            windows += [(*item[:3], "copy_out") for item, label in own if label.phase == "all_gather_copy_out"]
        return Windows(windows)

    def _links_issued(self, spans: pl.DataFrame, own: Sequence[tuple[Range, RangeLabel]]) -> pl.DataFrame:
        """A link carries a unit's transfers in the order in which its ranges began: the last before it issued it."""
        if not spans["is_link"].any():
            return spans
        ranges = pl.DataFrame(
            [(label.unit, label.phase, item[0], item[1]) for item, label in own],
            schema={"unit": pl.String, "by": pl.String, "by_lane": pl.Int32, "by_ns": pl.Int64},
            orient="row",
        ).sort("by_ns")
        joined = (
            spans.with_columns(by=pl.col("kind").replace_strict(_LINK_ISSUERS, default=None, return_dtype=pl.String))
            .sort("start_ns")
            .join_asof(
                ranges, left_on="start_ns", right_on="by_ns", by=["unit", "by"], coalesce=False, check_sortedness=False
            )
        )
        return joined.with_columns(
            issued_lane=pl.when("is_link").then("by_lane").otherwise("issued_lane"),
            issued_ns=pl.when("is_link").then("by_ns").otherwise("issued_ns"),
        )

    # -- what they are for, and when that is

    def _uses(
        self, events: pl.DataFrame, issued_lane: np.ndarray, issued_ns: np.ndarray, serves: np.ndarray
    ) -> tuple[list[str | None], list[int | None]]:
        """Phase and needed_ns of each event."""
        forward, backward = unit_windows([pair for pair in self.labelled if pair[1].family == "FSDP"])
        if not forward and not backward:
            forward, backward = unit_windows(self.labelled)  # an engine that names only its blocks
        uses = [(*use, Phase.RECOMPUTE if use[:2] in self._again else Phase.FORWARD) for use in forward]
        of_unit: dict[str, list[tuple[int, int, int, str, Phase]]] = {}
        for use in sorted([*uses, *((*use, Phase.BACKWARD) for use in backward)], key=lambda use: use[2]):
            of_unit.setdefault(use[3], []).append(use)
        phases: list[str | None] = [None] * len(events)
        needed: list[int | None] = [None] * len(events)
        units = events["unit"].to_list()
        rows_of: dict[str, list[int]] = {}
        for row in (serves & (issued_ns >= 0)).nonzero()[0].tolist():
            rows_of.setdefault(units[row], []).append(row)
        is_after = {item[:2] for item, label in self.labelled if label.phase in POST_BACKWARD}
        for unit, mine in of_unit.items():
            rows = rows_of.get(unit, [])
            first_ns = self._first_compute(unit, mine)
            first_ns = [None if use[:2] in is_after else ns for use, ns in zip(mine, first_ns, strict=True)]
            places = _served(mine, issued_lane[rows], issued_ns[rows])
            for row, at in zip(rows, places, strict=True):
                if at < len(mine):
                    phases[row], needed[row] = mine[at][4].value, first_ns[at]
        self._need_by_optimizer(events, ~serves, needed)
        return phases, needed

    def _first_compute(self, unit: str, uses: Sequence[tuple[int, int, int, str, Phase]]) -> list[int | None]:
        """When each use of the unit needed its parameters. See [Note: when a gather is needed]."""
        if not len(self.is_device):
            return [use[1] for use in uses]
        issued_ns, ready_ns = self._kernels.get((unit,), (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        first = np.searchsorted(issued_ns, [use[1] for use in uses], "left").tolist()
        return [
            int(ready_ns[at]) if at < len(issued_ns) and issued_ns[at] < use[2] else None
            for use, at in zip(uses, first, strict=True)
        ]

    @cached_property
    def _kernels(self) -> dict[tuple[str], tuple[np.ndarray, np.ndarray]]:
        """Of each unit's kernels, save those that prepare a gather, by issue: when they were issued, and when they
        could have started.
        """
        issued, before = pl.col("issued_ns"), pl.col("before_ns")
        work = self.spans.filter(pl.col("kind").is_in(_WORK) & pl.col("lane").is_in(self.is_device.tolist()))
        kernels = work.sort("lane", "start_ns").with_columns(
            before_ns=(pl.col("start_ns") + pl.col("duration_ns")).cum_max().shift(1).over("lane")
        )
        kernels = kernels.filter(
            pl.col("kind").is_in(_COMPUTATION) & pl.col("unit").is_not_null() & issued.is_not_null()
        )
        points = kernels["issued_lane"].to_numpy().astype(np.int64), kernels["issued_ns"].to_numpy()
        kernels = kernels.filter(pl.Series(self._preparations.at(*points) < 0, dtype=pl.Boolean)).select(
            "unit", issued, pl.min_horizontal("start_ns", pl.max_horizontal(before, issued)).alias("ready_ns")
        )
        by_unit = kernels.sort("issued_ns").partition_by("unit", as_dict=True)
        return {unit: (rows["issued_ns"].to_numpy(), rows["ready_ns"].to_numpy()) for unit, rows in by_unit.items()}

    @property
    def _preparations(self) -> Windows[str]:
        """FSDP2's ranges of gathers; of other ranges that issue one, as FSDP1's hooks do, the part before it."""
        own = [item for item, label in self.labelled if label.family == "FSDP"]
        windows = [item for item, label in self.labelled if label.phase == "all_gather"]
        gathers = self.spans.filter((pl.col("kind") == Kind.ALL_GATHER.value) & pl.col("issued_ns").is_not_null())
        lanes, times = gathers["issued_lane"].to_numpy().astype(np.int64), gathers["issued_ns"].to_numpy()
        ranges = Windows((*item[:3], item) for item in own).names_at(lanes, times)
        return Windows(
            [*windows, *((*item[:2], int(time), item[3]) for item, time in zip(ranges, times, strict=True) if item)]
        )

    def _need_by_optimizer(self, events: pl.DataFrame, chosen: np.ndarray, needed: list[int | None]) -> None:
        steps = self.spans.filter(pl.col("kind") == Kind.OPTIMIZER.value)["start_ns"].sort().to_numpy()
        starts = events["start_ns"].to_numpy()
        for row in chosen.nonzero()[0].tolist():
            at = int(np.searchsorted(steps, starts[row], "left"))
            if at < len(steps):
                needed[row] = int(steps[at])

    def _exposed(self, events: pl.DataFrame) -> pl.Expr:
        compute = union(
            self.compute["start_ns"].to_numpy(), (self.compute["start_ns"] + self.compute["duration_ns"]).to_numpy()
        )
        starts = events["start_ns"].to_numpy()
        ends = starts + events["duration_ns"].to_numpy()
        exposed = pl.Series((ends - starts) - covered_ns(compute, starts, ends))
        return pl.when(~pl.col("kind").is_in(_COMPUTATION)).then(exposed)


def _served(uses: Sequence[tuple[int, int, int, str, Phase]], lanes: np.ndarray, times_ns: np.ndarray) -> list[int]:
    """Of each gather the place of its use among its unit's, which are by their ends."""
    places = np.searchsorted([use[2] for use in uses], times_ns, "right")
    if any(later[1] < earlier[2] for earlier, later in pairwise(uses)):  # two models call units alike, one in the other
        inside = Windows((*use[:3], place) for place, use in enumerate(uses)).names_at(lanes, times_ns)
        return [at if around is None else around for at, around in zip(places.tolist(), inside, strict=True)]
    return places.tolist()


def _nodes(spans: pl.DataFrame) -> list[Range]:
    """The nodes of autograd that ran, which tell more about FSDP1's hooks; none for a recording of another engine."""
    if not spans["name"].str.starts_with(PREFIX).any():
        return []
    return _ranges(spans.filter(pl.col("name").str.starts_with(NODE)))


def _labelled(spans: pl.DataFrame, nodes: Sequence[Range]) -> list[tuple[Range, RangeLabel]]:
    """The rank's ranges with their labels; none where only our own loop's are there, which move nothing."""
    rows = spans.filter(pl.col("name").str.contains(_RANGES) & pl.col("kind").is_in(["annotation", *_TRANSFERS]))
    if not rows["name"].str.contains(r"^(?:FSDP::|FullyShardedDataParallel\.)").any():
        return []
    return labelled_ranges([*_ranges(rows), *nodes])


def _ranges(rows: pl.DataFrame) -> list[Range]:
    table = rows.select("lane", "start_ns", (pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns"), "name")
    return list(table.iter_rows())


def _event(
    kind: str, is_link: bool, unit: str | None, label: RangeLabel | None, copy: str | None
) -> tuple[str | None, str | None]:
    """The event that a span is, and its unit; (None, None) for what FSDP did not issue."""
    if is_link:
        return (kind, unit) if kind in _TRANSFERS and unit else (None, None)
    if label is None or label.unit is None:
        return None, None
    if kind in _TRANSFERS:
        return kind, label.unit
    return (copy, label.unit) if copy else (None, None)
