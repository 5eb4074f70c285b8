"""One file's events made into spans: kind, unit, phase, step, bytes and group of each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from ...base.kinds import COMMUNICATION, Kind
from ...base.labels import Phase, parse_label
from ..kineto.columns import Codes
from ..kineto.reader import Recording, Tensors
from ..table import UNREAD_DEVICE, Note
from . import gloo
from .assemble import Decided, RankTables, assembled
from .attribute import Attribution, attribution, differentiates_backward, with_recompute
from .classify import (
    DEVICE_CATEGORIES,
    collective_in,
    device_kind,
    host_kind,
    is_cpu_work,
    is_nameless_collective,
    is_peer_copy,
    is_wait_argument,
    link_bytes,
    link_kind,
)
from .codes import KIND_CODE, PHASE_CODE, is_among
from .lanes import main_lane
from .optimizer import is_optimizer
from .rounds import is_forward
from .rows import Rows
from .windows import Windows, holds_any, outermost

__all__ = ["RankTables", "rank_tables"]

_NAMES_A_RANGE = re.compile(
    r"^(?:FSDP::|fsdpviz::|Optimizer\.|ProfilerStep|##|DistributedDataParallel\.forward"
    r"|FullyShardedDataParallel\.|autograd::engine::evaluate_function|enumerate\(DataLoader\)|(?i:train|step|iter))"
)
# by code of a kind
_COMMUNICATES = is_among(COMMUNICATION)
_IS_FSDPS = is_among((Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE))
_ISSUES = re.compile(r"^(?:c10d::|_?c10d_functional::|symm_mem::|vllm::all_)")
_MARKS = re.compile(r"^(?:c10d::|_?c10d_functional::|FSDP::|gloo:)")
_C10D = re.compile(r"^c10d::")
_NCCL = re.compile(r"^nccl:")
_LINKS = re.compile(r"^fsdpviz::")


def rank_tables(recording: Recording, rank: int, lane_names: Mapping[str, str] | None = None) -> RankTables:
    """The spans, lanes and steps of one recording, as ``rank``. ``lane_names`` are by thread id."""
    return _Rank(recording, rank).tables(lane_names or {})


class _Rank:
    """Columns of one rank while they are being decided, by row of ``Rows``; kinds, phases and units as codes."""

    def __init__(self, recording: Recording, rank: int) -> None:
        self.recording = recording
        self.rank = rank
        self.notes: list[Note] = list(recording.notes)
        self.rows = rows = Rows(recording)
        self.lane, self.start_ns, self.end_ns = rows.lane, rows.start_ns, rows.end_ns
        self.tensors, self.messages = rows.tensors, rows.messages
        self.main = main_lane(rows)
        # host lane and time at which each span was issued; lane −1 where the file has no launch
        self.issue_row, contested = rows.launches()
        has_issue = self.issue_row >= 0
        self.point_lane = np.where(has_issue, self.lane[self.issue_row], -1).astype(np.int64)
        self.point_ns = np.where(has_issue, self.start_ns[self.issue_row], 0)
        self.is_issued = rows.is_device & has_issue  # elsewhere, when it ran
        self._note(
            "device spans without a launch in the file: no unit, no phase",
            (rows.runs_on_device & ~has_issue).nonzero()[0],
        )
        self._note("device spans with one id for calls of several processes: whose they are is told by time", contested)
        self.dtype: dict[int, str] = {}  # of collectives, by row
        self.group_size: dict[int, int] = {}
        self.units = Codes()
        self.windows = self._windows()
        if counted := self.windows.counted:
            what = "steps taken from the program's own ranges; the profiler's are not there"
            self.notes.append(Note(what, len(counted), counted[0]))

    def _windows(self) -> Attribution:
        rows = (self.rows.named(_NAMES_A_RANGE) & self.rows.in_categories(("user_annotation", "cpu_op"))).nonzero()[0]
        names = self.rows.name.values
        return attribution(
            [
                (lane, start, end, names[code])
                for lane, start, end, code in zip(
                    self.lane[rows].tolist(),
                    self.start_ns[rows].tolist(),
                    self.end_ns[rows].tolist(),
                    self.rows.name.codes[rows].tolist(),
                    strict=True,
                )
            ]
        )

    def _note(self, what: str, rows: np.ndarray | list[int]) -> None:
        if len(rows):
            self.notes.append(Note(what, len(rows), self.rows.name_of(int(rows[0]))[:60]))

    # -- the columns

    def tables(self, lane_names: Mapping[str, str]) -> RankTables:
        self._decide_by_name()
        self._find_recompute()
        self.phase_window = self._at_issue(self.windows.phases)
        self.phase = self._phase_codes()[self.phase_window]
        unit_codes = np.array([*map(self.units.__getitem__, self.windows.units.names), -1], np.int32)
        self.unit = np.where(self.own_unit >= 0, self.own_unit, unit_codes[self._at_issue(self.windows.units)])
        self.step = self._steps()
        self.bytes = self.rows.bytes.copy()
        self.is_link = np.zeros(len(self.rows), bool)
        self._join_gloo_and_links()
        if self.rows.runs_on_device.any():
            self._decide_collectives_of_device()
        elif all(note.what != UNREAD_DEVICE for note in self.notes):
            self._decide_cpu_work()
        self._decide_optimizer_and_forward()
        self._decide_units_of_collectives()
        waits = [row for row, message in self.messages.items() if is_wait_argument(message.collective)]
        self.kind[[row for row in waits if not self.rows.is_device[row]]] = KIND_CODE[Kind.WAIT]
        decided = Decided(
            kind=self.kind,
            phase=self.phase,
            unit=self.unit,
            units=self.units.texts,
            step=self.step,
            bytes=self.bytes,
            is_link=self.is_link,
            issued_lane=np.where(self.is_issued, self.point_lane, -1),
            issued_ns=self.point_ns,
            dtype=self.dtype,
            group_size=self.group_size,
            steps=self.windows.steps,
            main=self.main,
            notes=self.notes,
        )
        return assembled(self.recording, self.rows, decided, self.rank, lane_names)

    def _find_recompute(self) -> None:
        """See attribute's [Note: recompute]."""
        rows = self.rows.differentiated.nonzero()[0]
        if not len(rows) or not self.windows.knows_backward:
            return
        at = self.windows.phases.at(self.lane[rows].astype(np.int64), self.start_ns[rows])
        in_backward = np.array([*(name is Phase.BACKWARD for name in self.windows.phases.names), False])[at]
        rows = rows[in_backward]
        names = {self.rows.name.values[code] for code in np.unique(self.rows.name.codes[rows]).tolist()}
        if not len(rows) or differentiates_backward(names):
            return
        chosen = np.zeros(len(self.rows), bool)
        chosen[rows] = True
        rows = outermost(self.lane, self.start_ns, self.end_ns, chosen).nonzero()[0]
        self.windows = with_recompute(
            self.windows,
            list(zip(*(times[rows].tolist() for times in (self.lane, self.start_ns, self.end_ns)), strict=True)),
        )

    def _at_issue(self, windows: Windows) -> np.ndarray:
        """For each row, the index of the innermost window around its issue; −1 outside all.

        A device span is issued where its launch started, so that only host rows need be looked up.
        """
        if not len(windows):
            return np.full(len(self.rows), -1, np.int64)
        found = np.full(len(self.rows) + 1, -1, np.int64)  # the last stands for a launch that is not in the file
        host = (~self.rows.is_device).nonzero()[0]
        found[host] = windows.at(self.lane[host].astype(np.int64), self.start_ns[host])
        return found[self.issue_row]

    def _phase_codes(self) -> np.ndarray:
        """By index of a phase window; the last, also found at −1, stands for no window."""
        names = self.windows.phases.names
        return np.array([*(-1 if name is None else PHASE_CODE[name] for name in names), -1], np.int8)

    def _decide_by_name(self) -> None:
        pairs, which = self.rows.pairs
        kinds = np.empty(len(pairs), np.int8)
        own_unit = np.full(len(pairs), -1, np.int32)
        unknown: dict[str, str] = {}
        for index, (category, name) in enumerate(pairs):
            if category in DEVICE_CATEGORIES:
                kind = device_kind(category, name, "", "")
            else:
                known = host_kind(category, name)
                if known is None:
                    unknown.setdefault(category, name)
                kind = known or Kind.HOST
            kinds[index] = KIND_CODE[kind]
            label = parse_label(name)
            if label and label.unit:
                own_unit[index] = self.units[label.unit]
        self.kind, self.own_unit = kinds[which], own_unit[which]
        for category, name in unknown.items():
            count = int(self.rows.in_categories((category,)).sum())
            self.notes.append(Note(f"spans of unknown category {category[:40]!r}, taken as host", count, name[:60]))

    def _steps(self) -> np.ndarray:
        """Step by the time of issue; for device spans without a launch, by where they lie among those with
        one.
        """
        windows = self.windows.steps
        found = np.full(len(self.rows), -1, np.int64)
        if not len(windows):
            return found
        issued = self.point_lane >= 0
        at = windows.at(np.zeros(int(issued.sum()), np.int64), self.point_ns[issued])
        numbers = np.array([*windows.names, -1], np.int64)
        found[issued] = numbers[at]
        orphans = (self.rows.runs_on_device & ~issued).nonzero()[0]
        known = (self.rows.runs_on_device & (found >= 0)).nonzero()[0]
        if len(orphans) and len(known):
            known = known[np.argsort(self.start_ns[known], kind="stable")]
            steps, first = np.unique(found[known], return_index=True)
            first_ns = self.start_ns[known[first]]
            order = np.argsort(first_ns)
            place = np.searchsorted(first_ns[order], self.start_ns[orphans], "right") - 1
            inside = (place >= 0) & (self.start_ns[orphans] < self.end_ns[known].max())
            found[orphans[inside]] = steps[order][place[inside]]
        return found

    # -- gloo and emulated links

    def _rows_named(self, pattern: re.Pattern[str]) -> list[int]:
        return (self.rows.named(pattern) & ~self.rows.is_device).nonzero()[0].tolist()

    def _span(self, row: int, kind: Kind) -> gloo.Span:
        return gloo.Span(row, int(self.start_ns[row]), int(self.end_ns[row]), kind, self.tensors.get(row))

    def _named_spans(self, pattern: re.Pattern[str]) -> list[gloo.Span]:
        pairs = ((row, gloo.named_collective(self.rows.name_of(row))) for row in self._rows_named(pattern))
        return [self._span(row, kind) for row, kind in pairs if kind is not None]

    def _join_gloo_and_links(self) -> None:
        ranges = self._named_spans(gloo.RANGE)
        operators = {span.row: span for span in self._named_spans(_C10D)} if ranges else {}
        issuer_of = gloo.issuers(ranges, list(operators.values()))
        kinds: dict[int, Kind] = {}
        for span in ranges:
            issuer = operators.get(issuer_of.get(span.row, -1))
            kind = kinds[span.row] = issuer.kind if issuer else span.kind
            self.kind[span.row] = KIND_CODE[kind]
            self._set_bytes(span.row, self._payload_bytes(kind, issuer.tensors if issuer else None, span.tensors))
            self._set_of_tensors(span.row, kind, issuer.tensors if issuer else None, span.tensors)
            if issuer:
                for column in (self.phase, self.step, self.point_lane, self.point_ns):
                    column[span.row] = column[issuer.row]
                self.is_issued[span.row] = True
        self._take_phase_from_main([span.row for span in ranges])
        unmatched = [span.row for span in ranges if span.row not in issuer_of]
        self._note("gloo ranges whose issuing operator is not in the file", unmatched)
        self._join_links(ranges, kinds, issuer_of)

    def _join_links(self, ranges: list[gloo.Span], kinds: dict[int, Kind], issuer_of: dict[int, int]) -> None:
        """Each emulated transfer is the collective; gloo's real one inside it lends its bytes and becomes
        host. A copy has none inside it, and its label says its bytes.
        """
        rows = ((row, link_kind(self.rows.name_of(row))) for row in self._rows_named(_LINKS))
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
            self.kind[link.row] = KIND_CODE[link.kind]
            self.is_link[link.row] = True
            sizes = [int(self.bytes[row]) for row in lent.get(link.row, []) if self.bytes[row] >= 0]
            stated = link_bytes(self.rows.name_of(link.row))
            self._set_bytes(link.row, sum(sizes) if sizes else stated)
        self._take_phase_from_main([link.row for link in links])
        real = sorted(row for rows in lent.values() for row in rows)
        self.kind[real] = KIND_CODE[Kind.HOST]
        self.bytes[real] = -1
        self._note("gloo transfers inside an emulated one, which counts in their place", real)

    def _take_phase_from_main(self, rows: Sequence[int]) -> None:
        """The phase of the main thread at that time, for spans of threads that only transfer."""
        unknown = np.array([row for row in rows if self.phase[row] < 0], np.int64)
        if len(unknown) and self.main >= 0:
            at = self.windows.phases.at(np.full(len(unknown), self.main), self.start_ns[unknown])
            self.phase[unknown] = self._phase_codes()[at]

    def _payload_bytes(self, kind: Kind, issuer: Tensors | None, own: Tensors | None) -> int | None:
        return gloo.payload_bytes(kind, issuer, own, self.recording.group_size)

    def _set_of_tensors(self, row: int, kind: Kind, issuer: Tensors | None, own: Tensors | None) -> None:
        """Element type and size of the group, by the tensors of the operator that issued it or of its own range."""
        if dtype := gloo.element_type(issuer, own):
            self.dtype[row] = dtype
        if size := gloo.group_size(kind, issuer):
            self.group_size[row] = size

    def _set_bytes(self, row: int, size: int | None) -> None:
        if size is not None and 0 <= size < 2**62:  # a damaged file may state anything
            self.bytes[row] = size

    # -- kinds that need more than a name

    def _decide_collectives_of_device(self) -> None:
        """Collectives by the range or operator that launched them, then their arguments, then their name."""
        asked = self.rows.runs_on_device & (_COMMUNICATES[self.kind] | self.rows.decided(is_peer_copy))
        rows = asked.nonzero()[0].tolist()
        if not rows:
            return
        nccl = self._windows_of(self._rows_named(_NCCL))
        operators = self._windows_of(self._rows_named(_ISSUES))
        stated = self._windows_of([row for row in self.messages if not self.rows.is_device[row]])
        points = self.point_lane[rows], self.point_ns[rows]
        by_nccl, by_operator, by_stated = (windows.names_at(*points) for windows in (nccl, operators, stated))
        # once a distinct name
        kind_of, names_one, is_nameless = cache(device_kind), cache(collective_in), cache(is_nameless_collective)
        nameless: list[int] = []
        for row, range_row, operator_row, stated_row in zip(rows, by_nccl, by_operator, by_stated, strict=True):
            message = self.messages.get(row) or self.messages.get(-1 if stated_row is None else stated_row)
            parents = [self.rows.name_of(parent) for parent in (range_row, operator_row) if parent is not None]
            parent = next((name for name in parents if names_one(name)), "")
            category, name = self.rows.category_of(row), self.rows.name_of(row)
            collective = message.collective if message else ""
            kind = kind_of(category, name, collective, parent)
            self.kind[row] = KIND_CODE[kind]
            if kind not in COMMUNICATION:
                continue
            issuer, own = (self.tensors.get(-1 if at is None else at) for at in (operator_row, range_row))
            if message:
                self.messages[row] = message  # the kernel's own, or that of the call that launched it
            self._set_of_tensors(row, kind, issuer, own)
            if category == "gpu_memcpy":  # carries a part of the whole, and says itself how much
                continue
            if kind is Kind.P2P and is_nameless(name, collective, parent):
                nameless.append(row)
                self.bytes[row] = -1  # a size tells nothing while it is not known of what
                continue
            size = message.payload_bytes if message else None
            if size is None and collective != "barrier":  # whose tensor is a mere token
                size = self._payload_bytes(kind, issuer, own)
            self._set_bytes(row, size)
        what = "transfers of which nothing tells the collective (in replayed graphs, say), taken as p2p without a size"
        self._note(what, nameless)

    def _windows_of(self, rows: list[int]) -> Windows[int]:
        return Windows((int(self.lane[row]), int(self.start_ns[row]), int(self.end_ns[row]), row) for row in rows)

    def _decide_cpu_work(self) -> None:
        """Without a device the outermost operators are the work, save on threads that only transfer."""
        moves = self.is_link | self.rows.named(gloo.RANGE)
        trains = {self.main, *self.windows.phases.lane.tolist()}
        transfers = set(np.unique(self.lane[moves]).tolist()) - trains
        links = self._windows_of(self.is_link.nonzero()[0].tolist())
        in_link = links.at(self.lane.astype(np.int64), self.start_ns) >= 0
        candidates = self.rows.decided(is_cpu_work) & ~np.isin(self.lane, list(transfers)) & ~in_link
        marks = moves | (self.kind == KIND_CODE[Kind.WAIT]) | self.rows.named(_MARKS)
        span = (self.lane, self.start_ns, self.end_ns)
        # an operator around a collective lasts as long as the wait for it: what it holds is counted instead
        candidates &= ~holds_any(*span, candidates, marks)
        self.kind[outermost(*span, candidates)] = KIND_CODE[Kind.COMPUTE]
        if nccl := self._rows_named(_NCCL):
            self._note("ranges of NCCL, whose transfers the file does not have", nccl)

    def _decide_optimizer_and_forward(self) -> None:
        is_compute = self.kind == KIND_CODE[Kind.COMPUTE]
        stepping = is_optimizer(self.rows, self.windows, is_compute, self.phase_window < 0, self._at_issue)
        self.kind[stepping] = KIND_CODE[Kind.OPTIMIZER]
        self.phase[stepping] = PHASE_CODE[Phase.OPTIMIZER]
        if self.windows.knows_backward and not self.windows.has_loop_ranges:
            plain = is_compute & ~stepping & (self.phase_window < 0) & (self.point_lane == self.main)
            if len(self.windows.steps):
                plain &= self.step >= 0
            rows = plain.nonzero()[0]
            recorded = self.rows.differentiated
            recorded_ns = np.sort(self.start_ns[recorded]) if recorded.any() else None
            rows = rows[is_forward(self.point_ns[rows], self.windows, recorded_ns)]
            self.phase[rows] = PHASE_CODE[Phase.FORWARD]

    def _decide_units_of_collectives(self) -> None:
        """A gather or reduction belongs to the unit that issued it, which is not the block around it. FSDP issues
        no other transfers: those are the block's own.
        """
        rows = (_IS_FSDPS[self.kind] & ~self.is_link).nonzero()[0]
        at = self.windows.issuers.at(self.point_lane[rows], self.point_ns[rows])
        self.unit[rows] = np.array([*map(self.units.__getitem__, self.windows.issuers.names), -1], np.int32)[at]
