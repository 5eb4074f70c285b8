"""One file's events made into spans: kind, unit, phase, step, bytes and group of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from ..base.kinds import COMMUNICATION, Kind
from ..base.labels import Phase, parse_label
from . import gloo
from .attribute import Attribution, attribution
from .classify import (
    DEVICE_CATEGORIES,
    collective_in,
    device_kind,
    host_kind,
    is_collective_kernel,
    is_cpu_work,
    is_optimizer_kernel,
    link_kind,
)
from .kineto import Recording, Tensors
from .lanes import lane_table, main_lane
from .table import KIND, SPAN_SCHEMA, STEP_SCHEMA, Note
from .windows import Windows, depths, holds_any, outermost

_ON_DEVICE = DEVICE_CATEGORIES | {"gpu_user_annotation", "cuda_sync"}
_NAMES_A_RANGE = re.compile(
    r"^(?:FSDP::|fsdpviz::|Optimizer\.|ProfilerStep|##|DistributedDataParallel\.forward"
    r"|FullyShardedDataParallel\.|autograd::engine::evaluate_function|enumerate\(DataLoader\))"
)
_ISSUES = re.compile(r"^(?:c10d::|_?c10d_functional::|symm_mem::|vllm::all_)")
_MARKS = re.compile(r"^(?:c10d::|_?c10d_functional::|FSDP::|gloo:)")


@dataclass(frozen=True, eq=False)
class RankTables:
    """One rank's part of a Trace."""

    spans: pl.DataFrame
    lanes: pl.DataFrame
    steps: pl.DataFrame
    notes: tuple[Note, ...]


def rank_tables(recording: Recording, rank: int, lane_names: Mapping[str, str] | None = None) -> RankTables:
    """The spans, lanes and steps of one recording, as ``rank``. ``lane_names`` are by thread id."""
    return _Rank(recording, rank).tables(lane_names or {})


class _Rank:
    """Columns of one rank while they are being decided; rows are sorted by lane, start, −end."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self.recording = recording
        self.rank = rank
        self.notes: list[Note] = list(recording.notes)
        self.events = _with_lanes(recording.events)
        self.lane = self.events["lane"].to_numpy()
        self.start_ns = self.events["start_ns"].to_numpy()
        self.end_ns = self.start_ns + self.events["duration_ns"].to_numpy()
        self.names: list[str] = self.events["name"].to_list()
        self.main = main_lane(self.events)
        self.is_device = self.events["category"].is_in(list(_ON_DEVICE)).to_numpy()
        self.runs_on_device = self.events["category"].is_in(list(DEVICE_CATEGORIES)).to_numpy()
        row_of = np.argsort(self.events["row"].to_numpy())  # of the file's row, which is 0 … n − 1
        self.tensors = {int(row_of[old]): tensors for old, tensors in recording.tensors.items()}
        self.messages = {int(row_of[old]): message for old, message in recording.messages.items()}
        self.point_lane, self.point_ns = self._issue_points()
        self.windows = self._windows()

    # -- where and when a span was issued

    def _issue_points(self) -> tuple[np.ndarray, np.ndarray]:
        """Host lane and time at which each span was issued; lane −1 where the file has no launch."""
        lanes, times = self.lane.astype(np.int64), self.start_ns.copy()
        device = np.flatnonzero(self.is_device)
        if len(device):
            launches = (
                self.events.filter(
                    pl.col("correlation").is_not_null() & pl.col("category").str.contains(r"_(runtime|driver)$")
                )
                .unique("correlation", keep="first", maintain_order=True)
                .select("correlation", launch_lane="lane", launch_ns="start_ns")
            )
            joined = self.events[device].join(launches, on="correlation", how="left", maintain_order="left")
            lanes[device] = joined["launch_lane"].fill_null(-1).to_numpy()
            times[device] = joined["launch_ns"].fill_null(0).to_numpy()
            missing = np.flatnonzero(self.runs_on_device & (lanes < 0))
            if len(missing):
                self._note("device spans without a launch in the file: no unit, no phase", missing)
        return lanes, times

    def _windows(self) -> Attribution:
        distinct = self.events["name"].unique()
        wanted = distinct.filter(distinct.str.contains(_NAMES_A_RANGE.pattern))
        rows = self.events.with_row_index("at").filter(
            pl.col("name").is_in(wanted.implode()) & pl.col("category").is_in(["user_annotation", "cpu_op"])
        )["at"]
        return attribution(
            [
                (int(self.lane[row]), int(self.start_ns[row]), int(self.end_ns[row]), self.names[row])
                for row in rows.to_list()
            ]
        )

    def _note(self, what: str, rows: np.ndarray | list[int]) -> None:
        if len(rows):
            self.notes.append(Note(what, len(rows), self.names[int(rows[0])][:60]))

    # -- the columns

    def tables(self, lane_names: Mapping[str, str]) -> RankTables:
        self._decide_by_name()
        self.phase_window = self.windows.phases.at(self.point_lane, self.point_ns)
        phases = self.windows.phases.names
        self.phase = np.array([phases[index] if index >= 0 else None for index in self.phase_window], object)
        units = self.windows.units.names_at(self.point_lane, self.point_ns)
        self.unit = np.array([own or unit for own, unit in zip(self.own_unit, units, strict=True)], object)
        self.step = self._steps()
        self.bytes = self.events["bytes"].fill_null(-1).to_numpy().copy()
        self.is_link = np.zeros(len(self.names), bool)
        self._join_gloo_and_links()
        if self.runs_on_device.any():
            self._decide_collectives_of_device()
        else:
            self._decide_cpu_work()
        self._decide_optimizer_and_forward()
        self._decide_units_of_collectives()
        return self._assembled(lane_names)

    def _decide_by_name(self) -> None:
        distinct = self.events.select("category", "name").unique(maintain_order=True)
        kinds: list[str] = []
        units: list[str | None] = []
        unknown: dict[str, str] = {}
        for category, name in distinct.iter_rows():
            if category in DEVICE_CATEGORIES:
                kind = device_kind(category, name, "", "")
            else:
                known = host_kind(category, name)
                if known is None:
                    unknown.setdefault(category, name)
                kind = known or Kind.HOST
            kinds.append(kind.value)
            label = parse_label(name)
            units.append(label.unit if label else None)
        distinct = distinct.with_columns(
            kind=pl.Series(kinds, dtype=pl.String),
            own_unit=pl.Series(units, dtype=pl.String),
            is_work=pl.Series([is_cpu_work(*key) for key in distinct.iter_rows()], dtype=pl.Boolean),
        )
        joined = self.events.select("category", "name").join(
            distinct, on=["category", "name"], how="left", maintain_order="left"
        )
        self.kind = joined["kind"].to_numpy().astype(object)
        self.own_unit = joined["own_unit"].to_list()
        self.is_work = joined["is_work"].to_numpy()
        for category, name in unknown.items():
            count = int((self.events["category"] == category).sum())
            self.notes.append(Note(f"spans of unknown category {category[:40]!r}, taken as host", count, name[:60]))

    def _steps(self) -> np.ndarray:
        """Step by the time of issue; for device spans without a launch, by where they lie among those with
        one.
        """
        windows = self.windows.steps
        found = np.full(len(self.names), -1, np.int64)
        issued = self.point_lane >= 0
        at = windows.at(np.zeros(int(issued.sum()), np.int64), self.point_ns[issued])
        numbers = np.array([*windows.names, -1], np.int64)
        found[issued] = numbers[at]
        orphans = np.flatnonzero(self.runs_on_device & ~issued)
        known = np.flatnonzero(self.runs_on_device & (found >= 0))
        if len(orphans) and len(known):
            steps = np.unique(found[known])
            first_ns = np.array([self.start_ns[known[found[known] == step]].min() for step in steps])
            order = np.argsort(first_ns)
            place = np.searchsorted(first_ns[order], self.start_ns[orphans], "right") - 1
            inside = (place >= 0) & (self.start_ns[orphans] < self.end_ns[known].max())
            found[orphans[inside]] = steps[order][place[inside]]
        return found

    # -- gloo and emulated links

    def _rows_named(self, pattern: str) -> list[int]:
        return np.flatnonzero(self.events["name"].str.contains(pattern).to_numpy() & ~self.is_device).tolist()

    def _span(self, row: int, kind: Kind) -> gloo.Span:
        return gloo.Span(row, int(self.start_ns[row]), int(self.end_ns[row]), kind, self.tensors.get(row))

    def _named_spans(self, pattern: str) -> list[gloo.Span]:
        pairs = ((row, gloo.named_collective(self.names[row])) for row in self._rows_named(pattern))
        return [self._span(row, kind) for row, kind in pairs if kind is not None]

    def _join_gloo_and_links(self) -> None:
        ranges = self._named_spans(r"^gloo:")
        operators = {span.row: span for span in self._named_spans(r"^c10d::")} if ranges else {}
        issuer_of = gloo.issuers(ranges, list(operators.values()))
        kinds: dict[int, Kind] = {}
        for span in ranges:
            issuer = operators.get(issuer_of.get(span.row, -1))
            kind = kinds[span.row] = issuer.kind if issuer else span.kind
            self.kind[span.row] = kind.value
            self._set_bytes(span.row, self._payload_bytes(kind, issuer.tensors if issuer else None, span.tensors))
            if issuer:
                for column in (self.phase, self.step, self.point_lane, self.point_ns):
                    column[span.row] = column[issuer.row]
            self._take_phase_from_main(span.row)
        unmatched = [span.row for span in ranges if span.row not in issuer_of]
        self._note("gloo ranges whose issuing operator is not in the file", unmatched)
        self._join_links(ranges, kinds, issuer_of)

    def _join_links(self, ranges: list[gloo.Span], kinds: dict[int, Kind], issuer_of: dict[int, int]) -> None:
        """Each emulated transfer is the collective; gloo's real one inside it lends its bytes and becomes
        host.
        """
        rows = ((row, link_kind(self.names[row])) for row in self._rows_named(r"^fsdpviz::"))
        links = [self._span(row, kind) for row, kind in rows if kind is not None]
        if not links:
            return
        issuers = np.array(list(issuer_of.values()), np.int64)
        around = self._windows_of([link.row for link in links]).names_at(
            self.lane[issuers].astype(np.int64), self.start_ns[issuers]
        )
        issued_in = {row: link for row, link in zip(issuer_of, around, strict=True) if link is not None}
        lent = gloo.lenders(links, ranges, kinds, issued_in)
        for link in links:
            self.kind[link.row] = link.kind.value
            self.is_link[link.row] = True
            self._take_phase_from_main(link.row)
            sizes = [int(self.bytes[row]) for row in lent.get(link.row, []) if self.bytes[row] >= 0]
            self._set_bytes(link.row, sum(sizes) if sizes else None)
        real = sorted(row for rows in lent.values() for row in rows)
        self.kind[real] = Kind.HOST.value
        self.bytes[real] = -1
        self._note("gloo transfers inside an emulated one, which counts in their place", real)

    def _take_phase_from_main(self, row: int) -> None:
        """The phase of the main thread at that time, for spans of threads that only transfer."""
        if self.phase[row] is None and self.main >= 0:
            at = self.windows.phases.names_at(np.array([self.main]), self.start_ns[row : row + 1])
            self.phase[row] = at[0]

    def _payload_bytes(self, kind: Kind, issuer: Tensors | None, own: Tensors | None) -> int | None:
        return gloo.payload_bytes(kind, issuer, own, self.recording.group_size)

    def _set_bytes(self, row: int, size: int | None) -> None:
        if size is not None:
            self.bytes[row] = size

    # -- kinds that need more than a name

    def _decide_collectives_of_device(self) -> None:
        """Collectives by the range or operator that launched them, then their arguments, then their name."""
        collective = {name for name in set(self.names) if is_collective_kernel(name)}
        category = self.events["category"].to_list()
        rows = [
            row
            for row in np.flatnonzero(self.runs_on_device).tolist()
            if (self.names[row] in collective and category[row] == "kernel") or self.kind[row] == Kind.P2P.value
        ]
        if not rows:
            return
        nccl = self._windows_of(self._rows_named(r"^nccl:"))
        operators = self._windows_of(self._rows_named(_ISSUES.pattern))
        points = self.point_lane[rows], self.point_ns[rows]
        by_nccl, by_operator = nccl.names_at(*points), operators.names_at(*points)
        for row, range_row, operator_row in zip(rows, by_nccl, by_operator, strict=True):
            message = self.messages.get(row)
            parents = [self.names[parent] for parent in (range_row, operator_row) if parent is not None]
            parent = next((name for name in parents if collective_in(name)), "")
            kind = device_kind(category[row], self.names[row], message.collective if message else "", parent)
            self.kind[row] = kind.value
            if kind not in COMMUNICATION or category[row] != "kernel":
                continue
            if message and message.payload_bytes is not None:
                self._set_bytes(row, message.payload_bytes)
            else:
                issuer, own = (self.tensors.get(-1 if at is None else at) for at in (operator_row, range_row))
                self._set_bytes(row, self._payload_bytes(kind, issuer, own))

    def _windows_of(self, rows: list[int]) -> Windows[int]:
        return Windows((int(self.lane[row]), int(self.start_ns[row]), int(self.end_ns[row]), row) for row in rows)

    def _decide_cpu_work(self) -> None:
        """Without a device the outermost operators are the work, save on threads that only transfer."""
        moves = self.is_link | self.events["name"].str.starts_with("gloo:").to_numpy()
        trains = {self.main, *self.windows.phases.lane.tolist()}
        transfers = set(np.unique(self.lane[moves]).tolist()) - trains
        links = self._windows_of(np.flatnonzero(self.is_link).tolist())
        in_link = links.at(self.lane.astype(np.int64), self.start_ns) >= 0
        candidates = self.is_work & ~np.isin(self.lane, list(transfers)) & ~in_link
        marks = moves | (self.kind == Kind.WAIT.value) | self.events["name"].str.contains(_MARKS.pattern).to_numpy()
        span = (self.lane, self.start_ns, self.end_ns)
        # an operator around a collective lasts as long as the wait for it: what it holds is counted instead
        candidates &= ~holds_any(*span, candidates, marks)
        self.kind[outermost(*span, candidates)] = Kind.COMPUTE.value
        if nccl := self._rows_named(r"^nccl:"):
            self._note("ranges of NCCL, whose transfers the file does not have", nccl)

    def _decide_optimizer_and_forward(self) -> None:
        is_compute = self.kind == Kind.COMPUTE.value
        if len(self.windows.optimizer):
            stepping = self.windows.optimizer.at(self.point_lane, self.point_ns) >= 0
        else:
            steps = {name for name in set(self.names) if is_optimizer_kernel(name)}
            stepping = np.array([name in steps for name in self.names], bool) & self.runs_on_device
        stepping &= is_compute
        self.kind[stepping] = Kind.OPTIMIZER.value
        self.phase[stepping] = Phase.OPTIMIZER
        if self.windows.knows_backward and not self.windows.has_loop_ranges:
            plain = is_compute & ~stepping & (self.phase_window < 0) & (self.point_lane == self.main)
            if len(self.windows.steps):
                plain &= self.step >= 0
            self.phase[plain] = Phase.FORWARD

    def _decide_units_of_collectives(self) -> None:
        """A collective belongs to the unit that issued it, which is not the block around it."""
        communicates = np.isin(self.kind, [kind.value for kind in COMMUNICATION]) & ~self.is_link
        rows = np.flatnonzero(communicates)
        self.unit[rows] = self.windows.issuers.names_at(self.point_lane[rows], self.point_ns[rows])

    # -- the end

    def _groups(self) -> pl.Series:
        groups: list[str | None] = [None] * len(self.names)
        for row, message in self.messages.items():
            groups[row] = message.group
        return pl.Series(groups, dtype=pl.String)

    def _assembled(self, lane_names: Mapping[str, str]) -> RankTables:
        events = self.events.with_columns(
            kind=pl.Series(self.kind.tolist(), dtype=KIND),
            is_device=pl.Series(self.is_device, dtype=pl.Boolean),
            is_link=pl.Series(self.is_link, dtype=pl.Boolean),
        )
        spans = events.select(
            rank=pl.lit(self.rank, pl.Int32),
            lane=pl.col("lane").cast(pl.Int32),
            start_ns="start_ns",
            duration_ns="duration_ns",
            name="name",
            kind="kind",
            unit=pl.Series(self.unit.tolist(), dtype=pl.String),
            phase=pl.Series([None if phase is None else str(phase) for phase in self.phase], dtype=pl.String),
            step=_nulls_below_zero(self.step),
            bytes=_nulls_below_zero(self.bytes),
            group=self._groups(),
            launch=pl.when(pl.col("correlation") > 0).then("correlation"),
            depth=pl.Series(depths(self.lane, self.start_ns, self.end_ns), dtype=pl.Int16),
        )
        steps = self.windows.steps
        return RankTables(
            spans=spans.cast(pl.Schema(SPAN_SCHEMA)),
            lanes=lane_table(self.recording, self.rank, events, self.main, lane_names),
            steps=pl.DataFrame(
                {
                    "rank": [self.rank] * len(steps),
                    "step": steps.names,
                    "start_ns": steps.start_ns,
                    "end_ns": steps.end_ns,
                },
                schema=STEP_SCHEMA,
            ).sort("start_ns"),
            notes=tuple(self.notes),
        )


def _nulls_below_zero(values: np.ndarray) -> pl.Series:
    series = pl.Series(values, dtype=pl.Int64)
    return series.set(series < 0, None)


def _with_lanes(events: pl.DataFrame) -> pl.DataFrame:
    lanes = events.select("process", "thread").unique(maintain_order=True).with_row_index("lane")
    return (
        events.with_row_index("row")
        .join(lanes, on=["process", "thread"], how="left", maintain_order="left")
        .with_columns(pl.col("lane").cast(pl.Int32))
        .sort(
            pl.col("lane"),
            pl.col("start_ns"),
            pl.col("duration_ns"),
            pl.col("row"),
            descending=[False, False, True, False],
        )
    )
