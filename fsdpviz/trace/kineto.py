"""Reads Kineto JSON, from 2020's schema to today's, into columns of events.

Nothing is interpreted here: kinds are decided in ``classify``, units and phases in ``attribute``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from ..base.errors import TraceError
from .nanoseconds import microseconds_to_ns
from .repair import clean, read_bytes, salvage
from .table import Note

EVENT_SCHEMA: dict[str, Any] = {
    "category": pl.String,  # today's spelling: "cpu_op", not 2020's "Operator"
    "name": pl.String,
    "process": pl.String,
    "thread": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "correlation": pl.Int64,
    "bytes": pl.Int64,  # of a copy or a memset
}

_CATEGORIES_OF_2020 = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
# operators whose tensor sizes are needed: they say what a collective carries
_CARRIES_TENSORS = re.compile(r"^(?:c10d|gloo|nccl|fsdpviz|_c10d_functional|symm_mem|vllm)::?")
_PROFILER_MARKS = ("Iteration Start", "Record Window End")  # two instants that every file has
_ABSENT = msgspec.Raw(b"")


class _Args(msgspec.Struct, gc=False):
    name: Any = None  # of a metadata event
    correlation: Any = None
    nbytes: Any = msgspec.field(default=None, name="bytes")
    dims: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=_ABSENT, name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")


class _Event(msgspec.Struct, gc=False):
    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: _Args | None = None


class _EventWithOddArgs(msgspec.Struct, gc=False):
    """An event whose ``args`` is not an object: they are not looked at."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = _ABSENT
    dur: msgspec.Raw = _ABSENT
    args: Any = None


class _File(msgspec.Struct, rename="camel"):
    trace_events: list[_Event]
    distributed_info: Any = None
    device_properties: Any = None
    trace_name: Any = None
    base_time_nanoseconds: Any = None


class _FileOfRaw(_File, rename="camel"):
    trace_events: list[msgspec.Raw]  # type: ignore[assignment]


@dataclass(frozen=True)
class Tensors:
    """Sizes of an operator's tensor arguments: elements of each (a list of tensors counts as one), bytes an
    element.
    """

    elements: tuple[int, ...]
    item_bytes: int | None


@dataclass(frozen=True)
class Message:
    """What a collective's own arguments say; ``payload_bytes`` is the larger of its two messages."""

    collective: str
    payload_bytes: int | None
    group: str | None


@dataclass(frozen=True, eq=False)
class Recording:
    """One file's events, as EVENT_SCHEMA's columns, with absolute times where the file knows them."""

    path: Path
    events: pl.DataFrame
    tensors: dict[int, Tensors]  # by row of ``events``; only of operators that communicate
    messages: dict[int, Message]  # by row; only of collectives whose arguments were recorded
    thread_names: dict[tuple[str, str], str]
    header: dict[str, Any]
    notes: tuple[Note, ...]

    @property
    def rank(self) -> int | None:
        """The rank that the file itself states."""
        info = self.header.get("distributedInfo")
        rank = info.get("rank") if isinstance(info, dict) else None
        return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**31 else None

    @property
    def group_size(self) -> int | None:
        """Ranks in each process group that communicates, where the file knows one such size."""
        info = self.header.get("distributedInfo")
        groups = info.get("pg_config") if isinstance(info, dict) else None
        if not isinstance(groups, list):
            return None
        sizes = {_integer(group.get("pg_size")) for group in groups if isinstance(group, dict)} - {None, 1}
        return sizes.pop() if len(sizes) == 1 else None


def read_recording(path: Path) -> Recording:
    """The events of one Kineto JSON file, gzipped or not.

    Control characters, missing keys and files cut short are repaired and noted. Raises TraceError, one line
    with the file and the cause, when nothing of it is a trace.
    """
    data, notes = read_bytes(path)
    try:
        events, header = _decode_somehow(path, data, notes)
    except RecursionError:
        raise TraceError(f"{path} is nested too deeply to be a trace") from None
    return _columns(path, events, header, notes)


def _decode_somehow(path: Path, data: bytes, notes: list[Note]) -> tuple[Sequence[Any], dict[str, Any]]:
    try:
        return _decode_whole(path, data, notes)
    except msgspec.DecodeError:
        return _decode_damaged(path, data, notes)


def _decode_whole(path: Path, data: bytes, notes: list[Note]) -> tuple[Sequence[Any], dict[str, Any]]:
    try:
        return _decode(data)
    except msgspec.ValidationError:
        return _decode_one_by_one(path, data, notes)


def _decode(data: bytes) -> tuple[Sequence[Any], dict[str, Any]]:
    if data.lstrip()[:1] == b"[":
        return msgspec.json.decode(data, type=list[_Event]), {}
    file = msgspec.json.decode(data, type=_File)
    return file.trace_events, _header(file)


def _header(file: _File) -> dict[str, Any]:
    header = {
        "distributedInfo": file.distributed_info,
        "deviceProperties": file.device_properties,
        "traceName": file.trace_name,
        "baseTimeNanoseconds": file.base_time_nanoseconds,
    }
    return {key: value for key, value in header.items() if value is not None}


def _decode_one_by_one(path: Path, data: bytes, notes: list[Note]) -> tuple[Sequence[Any], dict[str, Any]]:
    """For JSON that is whole and has an event of another shape among its events."""
    header: dict[str, Any] = {}
    try:
        if data.lstrip()[:1] == b"[":
            texts = msgspec.json.decode(data, type=list[msgspec.Raw])
        else:
            file = msgspec.json.decode(data, type=_FileOfRaw)
            texts, header = file.trace_events, _header(file)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path} is JSON but no trace: it has no list traceEvents") from error
    return _each(texts, notes), header


def _decode_damaged(path: Path, data: bytes, notes: list[Note]) -> tuple[Sequence[Any], dict[str, Any]]:
    data, repairs = clean(data)
    try:
        events, header = _decode_whole(path, data, notes)
    except msgspec.DecodeError as error:
        salvaged = salvage(data)
        if salvaged is None or not salvaged[0]:
            cause = "damaged gzip, cut short" if notes else str(error)[:80]
            raise TraceError(f"{path} is not a trace: no whole event is in it ({cause})") from error
        texts, header, more = salvaged
        repairs += more
        events = _each(texts, notes)
    notes += repairs
    return events, header


def _each(texts: Sequence[bytes | msgspec.Raw], notes: list[Note]) -> list[Any]:
    events: list[Any] = []
    odd: list[str] = []
    for text in texts:
        for shape in (_Event, _EventWithOddArgs):
            try:
                event = msgspec.json.decode(text, type=shape)
            except (msgspec.DecodeError, RecursionError):
                continue
            if isinstance(event, _EventWithOddArgs):
                event = _Event(event.ph, event.cat, event.name, event.pid, event.tid, event.ts, event.dur)
            events.append(event)
            break
        else:
            odd.append(bytes(text)[:60].decode("utf-8", "replace"))
    if odd:
        notes.append(Note("entries of traceEvents that are no events, left out", len(odd), odd[0]))
    return events


def _columns(path: Path, events: Sequence[Any], header: dict[str, Any], notes: list[Note]) -> Recording:
    spans = [event for event in events if event.ph == "X"]
    if not spans and not any(isinstance(event.ph, str) for event in events):
        raise TraceError(f"{path} is JSON but no trace: nothing in it is an event")
    _note_what_is_left_out(events, notes)
    start_ns, has_start = microseconds_to_ns([event.ts for event in spans])
    duration_ns, has_duration = microseconds_to_ns([event.dur for event in spans])
    start_ns = start_ns + _base_time_ns(header, notes)
    if not has_start.all():
        dropped = [spans[index].name for index in np.flatnonzero(~has_start)]
        notes.append(Note("spans without a start time, left out", len(dropped), str(dropped[0])[:60]))
    duration_ns = _checked_durations(spans, duration_ns, has_duration, notes)
    kept = np.flatnonzero(has_start)
    if len(kept) < len(spans):
        spans = [spans[index] for index in kept]
    args = [event.args or _NO_ARGS for event in spans]
    category = _texts([event.cat for event in spans])
    frame = pl.DataFrame(
        {
            "category": category.replace(_CATEGORIES_OF_2020),
            "name": _texts([event.name for event in spans]),
            "process": _texts([event.pid for event in spans]),
            "thread": _texts([event.tid for event in spans]),
            "start_ns": start_ns[kept],
            "duration_ns": duration_ns[kept],
            "correlation": _integers([arg.correlation for arg in args]),
            "bytes": _integers([arg.nbytes for arg in args]),
        },
        schema=EVENT_SCHEMA,
    )
    return Recording(path, frame, _tensors(spans, args), _messages(args), _thread_names(events), header, tuple(notes))


_NO_ARGS = _Args()


def _note_what_is_left_out(events: Sequence[Any], notes: list[Note]) -> None:
    # flows ("s", "f", "t") repeat what correlation ids say, and "M" names lanes: both are used or redundant
    left_out = [event for event in events if event.ph not in ("X", "M", "s", "f", "t")]
    phases = Counter(str(event.ph) for event in left_out if not str(event.name).startswith(_PROFILER_MARKS))
    if phases:
        example = ", ".join(f"{count} of phase {phase!r}" for phase, count in phases.most_common(3))
        notes.append(Note("instants, counters and other events without a duration, left out", phases.total(), example))


def _base_time_ns(header: dict[str, Any], notes: list[Note]) -> int:
    base = header.get("baseTimeNanoseconds", 0)
    if isinstance(base, str) and base.lstrip("-").isdecimal():
        base = int(base)
    if isinstance(base, int) and not isinstance(base, bool) and abs(base) < 2**62:
        return base
    notes.append(Note("baseTimeNanoseconds that is no time, taken as 0", 1, str(base)[:40]))
    return 0


def _checked_durations(
    spans: Sequence[Any], duration_ns: np.ndarray, is_known: np.ndarray, notes: list[Note]
) -> np.ndarray:
    for what, wrong in (
        ("spans without a duration, taken as 0", ~is_known),
        ("negative durations, taken as 0", duration_ns < 0),
    ):
        if wrong.any():
            notes.append(Note(what, int(wrong.sum()), str(spans[int(np.argmax(wrong))].name)[:60]))
    return np.maximum(duration_ns, 0)


def _texts(values: Sequence[Any]) -> pl.Series:
    """Names and ids as text, "" where absent; an odd file has numbers among them."""
    if type(None) in set(map(type, values)):
        values = ["" if value is None else value for value in values]
    return pl.Series(list(map(str, values)), dtype=pl.String)


def _integers(values: Sequence[Any]) -> pl.Series:
    """Numbers of 64 bits, null for whatever is none."""
    if set(map(type, values)) <= {int, type(None)}:
        try:
            return pl.Series(values, dtype=pl.Int64)
        except (OverflowError, TypeError):
            pass
    return pl.Series([_integer(value) for value in values], dtype=pl.Int64)


def _text(value: Any) -> str | None:
    return value if value is None or type(value) is str else str(value)


def _integer(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def _messages(args: Sequence[_Args]) -> dict[int, Message]:
    found: dict[int, Message] = {}
    for row, arg in enumerate(args):
        if arg.collective is None and arg.group is None:
            continue
        sizes = [size for size in (_integer(arg.elements_in), _integer(arg.elements_out)) if size is not None]
        item_bytes = ITEM_BYTES.get((_text(arg.dtype) or "").lower())
        payload = max(sizes) * item_bytes if sizes and item_bytes else None
        found[row] = Message(_text(arg.collective) or "", payload, _text(arg.group) or None)
    return found


def _tensors(spans: Sequence[Any], args: Sequence[_Args]) -> dict[int, Tensors]:
    carries: dict[str, bool] = {}
    found: dict[int, Tensors] = {}
    for row, (event, arg) in enumerate(zip(spans, args, strict=True)):
        name = event.name
        if type(name) is not str:
            continue
        wanted = carries.get(name)
        if wanted is None:
            wanted = carries[name] = _CARRIES_TENSORS.match(name) is not None
        if wanted and len(memoryview(arg.dims)) and (tensors := _sizes(arg)):
            found[row] = tensors
    return found


def _sizes(arg: _Args) -> Tensors | None:
    dims = msgspec.json.decode(arg.dims)
    types = msgspec.json.decode(arg.types) if len(memoryview(arg.types)) else []
    if not isinstance(dims, list):
        return None
    elements = tuple(size for shape in dims if (size := _elements(shape)))
    named = [ITEM_BYTES[kind.lower()] for kind in types if isinstance(kind, str) and kind.lower() in ITEM_BYTES]
    return Tensors(elements, named[0] if named else None)


def _elements(shape: Any) -> int:
    """Elements of one tensor, or of a list of tensors together; 0 for whatever has no shape."""
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return prod(shape)
    return sum(_elements(inner) for inner in shape if isinstance(inner, list))


# how operators ("c10::Half") and NCCL's own arguments ("Half") spell the types, in small letters
ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "c10::complex<float>", "unsigned long"), 8),
    **dict.fromkeys(("float", "int", "unsigned int", "c10::complex<c10::half>"), 4),
    **dict.fromkeys(("half", "c10::half", "bfloat16", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "char", "unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("c10::float8_e4m3fn", "c10::float8_e5m2", "float8_e4m3fn", "float8_e5m2"), 1),
}


def _thread_names(events: Sequence[Any]) -> dict[tuple[str, str], str]:
    names: dict[tuple[str, str], str] = {}
    for event in events:
        if event.ph == "M" and event.name == "thread_name" and event.args and isinstance(event.args.name, str):
            # a thread is named twice when it was renamed; the first name is the one it works under
            names.setdefault((_text(event.pid) or "", _text(event.tid) or ""), event.args.name.strip())
    return names
