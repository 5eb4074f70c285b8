"""Reads flight-recorder dumps of NCCL and gloo: the last collectives of a rank, and which of them never ended.

Torch keeps a ring of collectives on every rank and writes it out when one times out, as a pickle
(``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``) or as JSON (``_dump_fr_trace_json``; 0 stands there for a time that is not known).
The fields are those of torch's FlightRecorder.hpp, versions 1 and 2.

[Note: when a recorded collective ran] ``time_created_ns`` is when the host issued it. The two discovered times are
when the watchdog *noticed* a start and an end: later than these, never earlier. ``duration_ms`` is measured on the
device, and exact, where timing was on (TORCH_NCCL_ENABLE_TIMING). A span here ends at its discovered end, and lasts
``duration_ms`` where known, else from its discovered start (failing that, from its issue). What has no discovered end
has no length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from ...base.errors import TraceError
from ...base.kinds import Kind
from ..files.limits import MAX_JSON_DUMP_BYTES
from ..files.parts import Part, Role, tables_of
from ..meaning.classify import collective_in
from ..meaning.dtypes import ITEM_BYTES_OF, dtype_named
from ..meaning.groups import ranks_in
from ..meaning.recorder_join import sequence_of
from ..table import GROUP_SCHEMA, Note
from .whole import read_whole

_KEYS = frozenset({"entries", "pg_config", "pg_status", "nccl_comm_state"})
_MAX_TENSORS = 4096  # of one coalesced collective

Size = tuple[int | None, str | None]  # bytes, element type
Types = tuple[str | None, ...]


@dataclass(frozen=True)
class Collective:
    """One entry of the ring. Times in ns since 1970, None where not recorded; ``group`` is the group's name."""

    name: str
    kind: Kind
    group: str
    group_id: str  # as ``pg_status`` counts groups
    sequence: int | None
    is_p2p: bool
    created_ns: int
    started_ns: int | None
    completed_ns: int | None
    duration_ns: int | None
    state: str
    payload_bytes: int | None
    dtype: str | None

    @property
    def span_ns(self) -> tuple[int, int]:
        """Start and length. See [Note: when a recorded collective ran]."""
        if self.completed_ns is None:
            return (self.started_ns or self.created_ns), 0
        begun_ns = self.started_ns or self.created_ns
        if self.duration_ns is not None:
            begun_ns = max(self.created_ns, self.completed_ns - self.duration_ns)
            return begun_ns, self.duration_ns
        return begun_ns, max(0, self.completed_ns - begun_ns)


def is_dump(content: Any) -> bool:
    """True for what a flight recorder writes."""
    return isinstance(content, dict) and len(_KEYS & content.keys()) >= 2


def read_json_dump(path: Path, name: str = "") -> list[Part]:
    """The rank in a JSON dump. Raises TraceError, one line, for a file that holds no dump."""
    name = name or str(path)
    notes: list[Note] = []
    data = read_whole(path, name, MAX_JSON_DUMP_BYTES, notes).removeprefix(b"\xef\xbb\xbf")
    try:
        content = msgspec.json.decode(data)
    except RecursionError:
        raise TraceError(f"{name} is nested too deeply to be a flight recorder's dump") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{name} is a flight recorder's dump that is damaged or cut short: {error}") from error
    if not is_dump(content):
        raise TraceError(f"{name} is JSON but no trace: neither traceEvents nor a flight recorder's entries are in it")
    return [part_of(content, name, notes)]


def part_of(content: Mapping[Any, Any], name: str, notes: Sequence[Note] = ()) -> Part:
    """One rank: a lane for each process group, a span for each collective. ``content`` is a dump.

    ``about["flight_recorder"]`` holds version, groups, each group's status and the collectives that never ended.
    """
    notes = [*notes]
    entries = content.get("entries")
    rows = entries if isinstance(entries, list) else []
    sides = _Sides()
    found = [one for entry in rows if (one := _collective(entry, sides)) is not None]
    if len(found) < len(rows):
        notes.append(Note("entries of the flight recorder without a time or a name, left out", len(rows) - len(found)))
    groups = _groups(content, rows)
    status = _status(content)
    unfinished = _note_states(found, groups, status, notes)
    lanes = {group: lane for lane, group in enumerate(dict.fromkeys(one.group for one in found))}
    tables = tables_of(
        _columns(found, lanes), _lane_rows(lanes, groups), notes, groups=pl.DataFrame(groups, schema=GROUP_SCHEMA)
    )
    about = {
        "version": _text(content.get("version")),
        "groups": {row["group"]: row["description"] for row in groups},
        "status": status,
        "unfinished": unfinished,
    }
    return Part(name, tables, _own_rank(groups), about={"flight_recorder": about}, role=Role.DUMP)


# -- one entry


def _collective(entry: Any, sides: _Sides) -> Collective | None:
    if not isinstance(entry, dict):
        return None
    name, created_ns = entry.get("profiling_name"), _time(entry.get("time_created_ns"))
    if not isinstance(name, str) or created_ns is None:
        return None
    is_p2p = entry.get("is_p2p") is True
    duration_ms = entry.get("duration_ms")
    duration_ns = round(duration_ms * 1e6) if isinstance(duration_ms, int | float) and 0 <= duration_ms < 1e12 else None
    kind = _kind(name, is_p2p)
    payload_bytes, dtype = _payload(kind, entry, sides)
    return Collective(
        name=name,
        kind=kind,
        group=_group_name(entry),
        group_id=_text(entry.get("pg_id")),
        sequence=sequence_of(entry),
        is_p2p=is_p2p,
        created_ns=created_ns,
        started_ns=_time(entry.get("time_discovered_started_ns")),
        completed_ns=_time(entry.get("time_discovered_completed_ns")),
        duration_ns=duration_ns,
        state=_text(entry.get("state")),
        payload_bytes=payload_bytes,
        dtype=dtype,
    )


def _kind(name: str, is_p2p: bool) -> Kind:
    """``nccl:all_reduce_barrier`` is carried out as an all-reduce; gloo's barrier moves nothing."""
    return collective_in(name) or (Kind.P2P if is_p2p else Kind.WAIT if "barrier" in name else Kind.HOST)


def _payload(kind: Kind, entry: Mapping[Any, Any], known: _Sides) -> Size:
    """The full size in bytes (all inputs or all outputs, whichever is more; of an all-to-all its inputs), and the
    type.
    """
    sides = [known.size(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    dtype = sides[0][1] or sides[1][1]
    counted = sides[:1] if kind is Kind.ALL_TO_ALL else sides
    return max((total for total, _ in counted if total is not None), default=None), dtype


class _Sides:
    """Sizes of the inputs or the outputs of collectives, by the identity of the lists that tell them: in a pickle a
    million entries may share one, and one list a million shapes.
    """

    def __init__(self) -> None:
        self._elements: dict[int, int | None] = {}  # by shape
        self._lists: dict[int, list[int] | None] = {}  # by list of shapes
        self._types: dict[int, Types] = {}  # by list of types
        self._same: dict[Types, Types] = {}  # equal types are one value
        self._sizes: dict[tuple[int, int], Size] = {}  # by list of shapes and types

    def size(self, shapes: Any, dtypes: Any) -> Size:
        """Of all tensors of one side together; no element type where they differ."""
        if not isinstance(shapes, list | tuple) or not shapes:
            return None, None
        if id(dtypes) not in self._types:
            types = _types(dtypes)
            self._types[id(dtypes)] = self._same.setdefault(types, types)
        types = self._types[id(dtypes)]
        key = id(shapes), id(types)
        if key not in self._sizes:
            self._sizes[key] = _total(self._list(shapes), types), types[0] if len(set(types)) == 1 else None
        return self._sizes[key]

    def _list(self, shapes: Sequence[Any]) -> list[int] | None:
        """Elements of each tensor; None where one is not known."""
        if id(shapes) not in self._lists:
            found = [self._elements_of(shape) for shape in shapes] if len(shapes) <= _MAX_TENSORS else [None]
            known = [elements for elements in found if elements is not None]
            self._lists[id(shapes)] = known if len(known) == len(found) else None
        return self._lists[id(shapes)]

    def _elements_of(self, shape: Any) -> int | None:
        if id(shape) not in self._elements:
            self._elements[id(shape)] = prod(shape) if _is_shape(shape) else None
        return self._elements[id(shape)]


def _types(dtypes: Any) -> Types:
    """Of each tensor; version 1 has one for all, no list."""
    listed = dtypes[:_MAX_TENSORS] if isinstance(dtypes, list | tuple) else [dtypes]
    return tuple(dtype_named(text) if isinstance(text, str) else None for text in listed)


def _total(elements: list[int] | None, types: Types) -> int | None:
    types = types * len(elements or ()) if len(types) == 1 else types
    totals = [count * ITEM_BYTES_OF[one] for count, one in zip(elements or (), types, strict=False) if one]
    is_known = elements is not None and len(totals) == len(elements) and sum(totals) < 2**62
    return sum(totals) if is_known else None


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and len(shape) <= 64 and all(_integer(size) is not None for size in shape)


def _group_name(entry: Mapping[Any, Any]) -> str:
    group = entry.get("process_group")
    if isinstance(group, list | tuple):
        return _text(next(iter(group), ""))
    return _text(entry.get("pg_name", entry.get("pg_id", "")))


# -- groups and their status


def _groups(content: Mapping[Any, Any], rows: Iterable[Any]) -> list[dict[str, Any]]:
    """GROUP_SCHEMA's rows: what ``pg_config`` states, and what only the entries name."""
    found: dict[str, dict[str, Any]] = {}
    config = content.get("pg_config")
    for name, stated in config.items() if isinstance(config, dict) else ():
        if isinstance(stated, dict) and (ranks := ranks_in(stated.get("ranks"))):
            found[_text(name)] = _group(_text(name), _text(stated.get("desc")), ranks)
    for entry in rows:
        stated = entry.get("process_group") if isinstance(entry, dict) else None
        name, description = [*stated[:2], "", ""][:2] if isinstance(stated, list | tuple) else ("", "")
        if stated and _text(name) not in found:
            found[_text(name)] = _group(_text(name), _text(description), None)
    return list(found.values())


def _group(name: str, description: str, ranks: tuple[int, ...] | None) -> dict[str, Any]:
    return {
        "rank": 0,
        "group": name,
        "description": description if description not in ("", "undefined") else None,
        "size": len(ranks) if ranks else None,
        "ranks": list(ranks) if ranks else None,
    }


def _own_rank(groups: Sequence[Mapping[str, Any]]) -> int | None:
    """A rank's dump lists the groups it is in: where only one rank is in all of them, it is that rank."""
    sets = [set(group["ranks"]) for group in groups if group["ranks"]]
    common = set.intersection(*sets) if sets else set()
    return common.pop() if len(common) == 1 else None


def _status(content: Mapping[Any, Any]) -> dict[str, dict[str, int]]:
    """By group id: the last collective that was enqueued, started and completed; −1 for none."""
    status = content.get("pg_status")
    return {
        _text(group): {_text(key): _integer_of_text(value) for key, value in known.items()}
        for group, known in (status.items() if isinstance(status, dict) else ())
        if isinstance(known, dict)
    }


def _note_states(
    found: Sequence[Collective],
    groups: Sequence[Mapping[str, Any]],
    status: Mapping[str, Mapping[str, int]],
    notes: list[Note],
) -> list[dict[str, Any]]:
    """Notes on what has no end, and the collectives that never ended, in the order of issue.

    Gloo records no ends at all: there, what a group's status counts as completed is.
    """
    description = {group["group"]: group["description"] or f"group {group['group']}" for group in groups}
    untimed = [one for one in found if one.completed_ns is None]
    left = [one for one in untimed if not _is_done(one, status)]
    unfinished = [
        {
            "name": one.name,
            "group": description.get(one.group, one.group),
            "sequence": one.sequence,
            "state": one.state,
            "created_ns": one.created_ns,
        }
        for one in sorted(left, key=lambda one: one.created_ns)
    ]
    for state, count in sorted(Counter(one["state"] for one in unfinished).items()):
        first = next(one for one in unfinished if one["state"] == state)
        what = "still running" if state == "started" else "never seen to start"
        example = f"{first['name']} {first['sequence']} of {first['group']}"
        notes.append(Note(f"collectives that had not ended at the dump ({what}), shown without length", count, example))
    if ended := len(untimed) - len(left):
        notes.append(Note("collectives that ended at a time nobody recorded, shown without length", ended))
    return unfinished[:1000]


def _is_done(one: Collective, status: Mapping[str, Mapping[str, int]]) -> bool:
    if one.state == "completed":
        return True
    # point-to-point calls to different peers end in any order, so that a later one's end says nothing of this
    last = status.get(one.group_id, {}).get("last_completed_collective", -1)
    return not one.is_p2p and one.sequence is not None and one.sequence <= last


# -- tables


def _columns(found: Sequence[Collective], lanes: Mapping[str, int]) -> dict[str, list[Any]]:
    spans = [one.span_ns for one in found]
    return {
        "lane": [lanes[one.group] for one in found],
        "start_ns": [start_ns for start_ns, _ in spans],
        "duration_ns": [duration_ns for _, duration_ns in spans],
        "name": [one.name for one in found],
        "kind": [one.kind.value for one in found],
        "bytes": [one.payload_bytes for one in found],
        "group": [one.group for one in found],
        "issued_ns": [one.created_ns for one in found],
        "dtype": [one.dtype for one in found],
        "sequence": [one.sequence for one in found],
    }


def _lane_rows(lanes: Mapping[str, int], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    description = {group["group"]: group["description"] for group in groups}
    called = {group: description.get(group) or f"group {group}" for group in lanes}
    often = Counter(called.values())
    return [
        {
            "rank": 0,
            "lane": lane,
            "name": called[group] if often[called[group]] == 1 else f"{called[group]} {group}",
            "is_device": False,
            "process": "flight recorder",
            "thread": group,
            "sort": lane,
        }
        for group, lane in lanes.items()
    ]


# -- values that may be of any type


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:200]


def _integer(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**62 else None


def _time(value: Any) -> int | None:
    return _integer(value) or None  # JSON writes 0 for what pickles leave out


def _integer_of_text(value: Any) -> int:
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdecimal():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**62 else -1
