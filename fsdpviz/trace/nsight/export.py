"""Reads Nsight Systems' SQLite exports: each process that used a GPU becomes a rank, through the same tables as Kineto.

Kernels, copies, memsets and synchronizations become spans of their streams; CUDA calls and NVTX ranges become spans of
their threads, joined by correlation id. Times are nanoseconds of the session's own clock, as they are.

``torch.autograd.profiler.emit_nvtx`` writes operators as ``aten::mm, op_id = 7``, with ``seq`` and ``sizes`` where
asked. That tail is cut, so that one operator has one name; it is the only thing that is not kept. A range of a person's
keeps its name whole (``prefill, seq = 4096``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from ...base.errors import TraceError
from ..files.parts import Part
from ..kineto.reader import EVENT_SCHEMA, Recording
from ..meaning.spans import rank_tables
from ..table import Note
from . import names as names
from .database import NsysDatabase
from .process_ranks import stated_ranks

_I, _S = pl.Int64, pl.String
_TIMES: dict[str, Any] = {"start": _I, "end": _I}
_WORK: dict[str, Any] = {
    **_TIMES,
    "deviceId": _I,
    "contextId": _I,
    "streamId": _I,
    "correlationId": _I,
    "globalPid": _I,
    "bytes": _I,
}
# what is kept of every row: EVENT_SCHEMA, the process (the upper bits of its global id) and the GPU
_ROW: dict[str, Any] = {**EVENT_SCHEMA, "owner": _I, "device": _I}
_NO_STREAM = 2**32 - 1  # CUPTI's word for a wait that is of no stream
_RANGES = (59, 60, 70, 71)  # push/pop and start/end, of ENUM_NSYS_EVENT_TYPE; 70 and 71 with wide characters
_MARKS = (34, 65)
_LATEST = 2**61  # ns, 73 years, as in Kineto's files: the span of two such times still fits
_NAMES_SOMETHING = (33, 39, 64, 72, 73, 74, 75, 76, 97, 98, 99)

Owner = tuple[int, int]  # process, GPU; GPU −1 for a recording without any


@dataclass(frozen=True)
class _Rows:
    work: pl.DataFrame
    calls: pl.DataFrame
    ranges: pl.DataFrame
    thread_names: dict[tuple[str, str], str]


def read_export(path: Path, name: str = "") -> list[Part]:
    """A part for each process that used a GPU (each GPU, where one process used several), in the GPUs' order.

    A part's rank is what NCCL's NVTX ranges say where the export has their payloads, else None; of several GPUs, the
    number of each stands beside it. Raises TraceError for a file that is no export, is damaged, or holds nothing.
    """
    name = name or str(path)
    notes: list[Note] = [*_unread_journals(path)]
    with NsysDatabase(path, name) as database:
        rows = _rows(database, notes)
        owners = _owners(rows)
        if not owners:
            raise TraceError(f"{name} is an export of Nsight Systems with no CUDA call and no NVTX range in it")
        stated = stated_ranks(database)
        header = _header(database)
    _note_other_processes(rows, owners, notes)
    ranks = _stated_ranks(owners, stated)
    gpus = _gpus(owners) if set(ranks.values()) == {None} else {}
    parts = []
    for owner in owners:
        recording = _recording(path, rows, owner, owners, header, notes if owner == owners[0] else [])
        tables = rank_tables(recording, 0)
        parts.append(Part(name, tables, ranks[owner], rank_by_gpu=gpus.get(owner), about={"headers": header}))
    return parts


def _unread_journals(path: Path) -> Iterator[Note]:
    """What SQLite has not moved into the file yet lies beside it. To read it would be to write there."""
    for ending in ("-wal", "-journal"):
        journal = path.with_name(path.name + ending)
        if journal.is_file() and journal.stat().st_size:
            what = "changes that lie beside the export, not read; export again, or open it with sqlite3 once"
            yield Note(what, 1, journal.name[-80:])


# -- rows of all processes


def _rows(database: NsysDatabase, notes: list[Note]) -> _Rows:
    strings = database.read("StringIds", {"id": _I, "value": _S}).unique("id", keep="first")
    broken = strings["value"].str.contains("\ufffd", literal=True).sum()
    if broken:
        notes.append(Note("names with bytes that are no UTF-8, replaced", int(broken)))
    work = _checked(_work(database, strings), "GPU rows", notes)
    calls = _checked(_calls(database, strings), "CUDA calls", notes)
    ends = [frame.select(pl.col("start_ns") + pl.col("duration_ns")).to_series().max() for frame in (work, calls)]
    ranges = _checked(_ranges(database, strings, ends, notes), "NVTX ranges", notes)
    return _Rows(work, calls, ranges, _thread_names(database, strings))


def _work(database: NsysDatabase, strings: pl.DataFrame) -> pl.DataFrame:
    kernels = database.read("CUPTI_ACTIVITY_KIND_KERNEL", {**_WORK, "demangledName": _I, "shortName": _I})
    kernels = _named(_named(kernels, "demangledName", strings), "shortName", strings)
    copies = database.read("CUPTI_ACTIVITY_KIND_MEMCPY", {**_WORK, "copyKind": _I, "srcKind": _I, "dstKind": _I})
    codes = names.copy_codes(database.read("ENUM_CUDA_MEMCPY_OPER", {"id": _I, "name": _S}).rows())
    memsets = database.read("CUPTI_ACTIVITY_KIND_MEMSET", _WORK)
    syncs = database.read("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", {**_WORK, "syncType": _I})
    graphs = database.read("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", {**_WORK, "graphId": _I})
    kernel_name = pl.coalesce("demangledName_text", "shortName_text", pl.lit("kernel without a name"))
    copy_name = _spelled(copies, ["copyKind", "srcKind", "dstKind"], names.copy_name, codes)
    work = pl.concat(
        [
            _of_device(kernels, "kernel", kernel_name),
            _of_device(graphs, "kernel", pl.format("CUDA graph {}", pl.col("graphId").fill_null(0))),
            _of_device(copies, "gpu_memcpy", copy_name),
            _of_device(memsets, "gpu_memset", pl.lit("Memset (Device)")),
        ]
    )
    waits = _of_device(syncs, "cuda_sync", _spelled(syncs, ["syncType"], names.sync_name))
    work = _with_its_kernels(work)
    return pl.concat([work, _on_own_device(waits, work)]).drop("context")


def _with_its_kernels(work: pl.DataFrame) -> pl.DataFrame:
    """A process that runs kernels on one GPU only is that GPU's: what it copies to or from a peer, or does in a context
    that it opened elsewhere by the way, is its own too. The lane stays that of the GPU on which it ran.
    """
    is_kernel = pl.col("category") == "kernel"
    kernels_on = work.filter(is_kernel).group_by("owner").agg(of=pl.col("device").min(), to=pl.col("device").max())
    one = kernels_on.filter(pl.col("of") == pl.col("to")).drop("to")
    joined = work.join(one, on="owner", how="left", maintain_order="left")
    return joined.with_columns(device=pl.coalesce("of", "device")).drop("of")


def _of_device(frame: pl.DataFrame, category: str, name: pl.Expr) -> pl.DataFrame:
    stream = pl.col("streamId").fill_null(_NO_STREAM)
    return frame.select(
        category=pl.lit(category, _S),
        name=name.cast(_S),
        process=pl.col("deviceId").fill_null(0).cast(_S),
        thread=pl.when(stream == _NO_STREAM).then(pl.lit("-1")).otherwise(stream.cast(_S)),
        start_ns="start",
        duration_ns=pl.col("end") - pl.col("start"),
        correlation="correlationId",
        bytes="bytes",
        owner=_upper(pl.col("globalPid")),
        device=pl.col("deviceId").fill_null(0),
        context="contextId",
    )


def _on_own_device(waits: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """A synchronization's deviceId is 0 whatever the GPU: its context tells, else its process's first GPU."""
    of_context = work.select("owner", "context", of="device").unique(["owner", "context"], keep="first")
    first = work.group_by("owner").agg(first=pl.col("device").min())
    joined = waits.join(of_context, on=["owner", "context"], how="left", maintain_order="left")
    joined = joined.join(first, on="owner", how="left", maintain_order="left")
    device = pl.coalesce("of", "first", "device")
    return joined.with_columns(device=device, process=device.cast(_S)).drop("of", "first")


def _calls(database: NsysDatabase, strings: pl.DataFrame) -> pl.DataFrame:
    calls = database.read("CUPTI_ACTIVITY_KIND_RUNTIME", {**_TIMES, "globalTid": _I, "correlationId": _I, "nameId": _I})
    calls = _named(calls, "nameId", strings).rename({"nameId_text": "text"})
    return _of_thread(calls, names.call_name, names.call_category, pl.col("correlationId"))


def _ranges(database: NsysDatabase, strings: pl.DataFrame, ends: list[Any], notes: list[Note]) -> pl.DataFrame:
    """``ends``: of all that the other tables hold. A range without an end lasts as long as the recording."""
    columns = {**_TIMES, "eventType": _I, "globalTid": _I, "textId": _I, "text": _S}
    events = _named(database.read("NVTX_EVENTS", columns), "textId", strings)
    kind = pl.col("eventType")
    left_out = events.filter(~kind.is_in([*_RANGES, *_NAMES_SOMETHING]) | kind.is_null())
    if len(left_out):
        marks = len(left_out.filter(kind.is_in(_MARKS)))
        notes.append(Note("NVTX marks and other events without a duration, left out", len(left_out), f"{marks} marks"))
    ranges = events.filter(kind.is_in(_RANGES)).with_columns(text=pl.coalesce("text", "textId_text"))
    times = pl.concat([pl.Series(ends, dtype=_I), ranges["start"], ranges["end"]])
    latest = times.filter(times.is_between(-_LATEST, _LATEST)).max()
    is_open = ranges["end"].is_null() & ranges["start"].is_not_null()
    if is_open.any():
        notes.append(Note("NVTX ranges that the recording's end cut, ended there", int(is_open.sum())))
    ranges = ranges.with_columns(end=pl.coalesce("end", pl.lit(latest, _I)))
    return _of_thread(ranges, names.range_name, names.range_category, pl.lit(None, _I))


def _of_thread(frame: pl.DataFrame, named: Any, categorised: Any, correlation: pl.Expr) -> pl.DataFrame:
    """Rows of host threads. Names are decided once a distinct text."""
    texts = frame["text"].fill_null("").unique()
    decided = pl.DataFrame(
        {
            "text": texts,
            "name": pl.Series([named(text) for text in texts], dtype=_S),
            "category": pl.Series([categorised(text) for text in texts], dtype=_S),
        }
    )
    frame = frame.with_columns(pl.col("text").fill_null("")).join(decided, on="text", how="left", maintain_order="left")
    return frame.select(
        category="category",
        name="name",
        process=_pid(_upper(pl.col("globalTid"))).cast(_S),
        thread=(pl.col("globalTid") % 2**24).cast(_S),
        start_ns="start",
        duration_ns=pl.col("end") - pl.col("start"),
        correlation=correlation,
        bytes=pl.lit(None, _I),
        owner=_upper(pl.col("globalTid")),
        device=pl.lit(None, _I),
    )


def _upper(identifier: pl.Expr) -> pl.Expr:
    """The process of a global id, machine included. The lowest 24 bits are the thread, the next 24 the process."""
    return identifier // 2**24


def _pid(owner: pl.Expr) -> pl.Expr:
    return owner % 2**24


def _named(frame: pl.DataFrame, column: str, strings: pl.DataFrame) -> pl.DataFrame:
    texts = strings.rename({"id": column, "value": f"{column}_text"})
    return frame.join(texts, on=column, how="left", maintain_order="left")


def _spelled(frame: pl.DataFrame, columns: list[str], spell: Any, *more: Any) -> pl.Expr:
    """``spell`` of the columns' values, once for each distinct set of them."""
    known = {codes: spell(*codes, *more) for codes in frame.select(columns).unique().iter_rows()}
    return pl.lit(pl.Series([known[codes] for codes in frame.select(columns).iter_rows()], dtype=_S))


def _checked(frame: pl.DataFrame, what: str, notes: list[Note]) -> pl.DataFrame:
    """Rows with a time within bounds, a process and a length that is not negative; the rest is noted."""
    lost = frame.filter(pl.col("start_ns").is_null() | pl.col("owner").is_null())
    frame = frame.filter(pl.col("start_ns").is_not_null() & pl.col("owner").is_not_null())
    # where end − start wrapped around 64 bits, adding the start wraps back: this is the end as it was written
    end = pl.col("start_ns") + pl.col("duration_ns").fill_null(0)
    is_in = pl.col("start_ns").is_between(-_LATEST, _LATEST) & end.is_between(-_LATEST, _LATEST)
    beyond, frame = frame.filter(~is_in), frame.filter(is_in)
    odd = frame.filter((pl.col("duration_ns") < 0) | pl.col("duration_ns").is_null())
    for text, rows in (
        ("without a start or a process, left out", lost),
        ("with a time that no clock tells, left out", beyond),
        ("that do not end after they start, taken as 0 long", odd),
    ):
        if len(rows):
            notes.append(Note(f"{what} {text}", len(rows), str(rows["name"][0])[:60]))
    return frame.with_columns(pl.col("duration_ns").fill_null(0).clip(lower_bound=0), pl.col("thread").fill_null("-1"))


# -- processes, GPUs and ranks


def _owners(rows: _Rows) -> list[Owner]:
    """Whoever worked on a GPU: a wait is no work. Without any work, each process."""
    work = rows.work.filter(pl.col("category") != "cuda_sync").select("owner", "device").unique()
    found = sorted(((owner, device) for owner, device in work.iter_rows()), key=lambda pair: (pair[1], pair[0]))
    hosts = pl.concat([rows.work["owner"], rows.calls["owner"], rows.ranges["owner"]]).unique().sort()
    return found or [(owner, -1) for owner in hosts]


def _note_other_processes(rows: _Rows, owners: Iterable[Owner], notes: list[Note]) -> None:
    used = [owner for owner, _ in owners]
    others = pl.concat([rows.work["owner"], rows.calls["owner"], rows.ranges["owner"]])
    count = len(others.filter(~others.is_in(used)))
    if count:
        notes.append(Note("calls, waits and ranges of processes that used no GPU, left out", count))


def _stated_ranks(owners: list[Owner], stated: dict[int, int]) -> dict[Owner, int | None]:
    """What NCCL said, where it said one for each."""
    said = {owner: stated.get(owner[0]) for owner in owners}
    is_told = len(set(said.values())) == len(owners) and None not in said.values()
    return said if is_told else dict.fromkeys(owners)


def _gpus(owners: list[Owner]) -> dict[Owner, int]:
    """Each owner's GPU, where there are several and all differ: otherwise each process may see its own GPU only."""
    devices = [device for _, device in owners]
    is_one_each = len(set(devices)) == len(devices) > 1 and -1 not in devices
    return dict(zip(owners, devices, strict=True)) if is_one_each else {}


def _recording(
    path: Path, rows: _Rows, owner: Owner, owners: list[Owner], header: dict[str, Any], notes: list[Note]
) -> Recording:
    process, device = owner
    mine = [frame.filter(pl.col("owner") == process) for frame in (rows.work, rows.calls, rows.ranges)]
    if sum(other == process for other, _ in owners) > 1:
        mine = _of_one_device(mine, device, is_first=next(one for one in owners if one[0] == process) == owner)
    events = pl.concat(mine).select(*EVENT_SCHEMA)
    return Recording.of_frame(path, events, {}, {}, rows.thread_names, header, tuple(notes))


def _of_one_device(frames: list[pl.DataFrame], device: int, *, is_first: bool) -> list[pl.DataFrame]:
    """Of a process with several GPUs: one GPU's work, and the threads that launched it.

    A thread that launches on several GPUs is shown with each; one that launches on none, with the first.
    """
    work, calls, ranges = frames
    launched = calls.join(work.select("correlation", of="device"), on="correlation").select("thread", "of").unique()
    threads = launched.filter(pl.col("of") == device)["thread"]
    idle = pl.concat([calls["thread"], ranges["thread"]]).unique()
    idle = idle.filter(~idle.is_in(launched["thread"].implode())) if is_first else idle.clear()
    shown = pl.concat([threads, idle]).implode()
    return [
        work.filter(pl.col("device") == device),
        *(frame.filter(pl.col("thread").is_in(shown)) for frame in (calls, ranges)),
    ]


# -- what the file says of itself


def _thread_names(database: NsysDatabase, strings: pl.DataFrame) -> dict[tuple[str, str], str]:
    """As Kineto writes them, by process and thread."""
    rows = _named(database.read("ThreadNames", {"globalTid": _I, "nameId": _I}), "nameId", strings)
    found = {}
    for thread, name in rows.select("globalTid", "nameId_text").drop_nulls().iter_rows():
        tid = thread % 2**24
        found[str(thread // 2**24 % 2**24), str(tid)] = f"thread {tid} ({name})"
    return found


def _header(database: NsysDatabase) -> dict[str, Any]:
    """Which Nsight wrote it, on which host, and when the session's clock began (ns since 1970, UTC)."""
    exported = dict(database.read("META_DATA_EXPORT", {"name": _S, "value": _S}).rows())
    environment = dict(database.read("TARGET_INFO_SYSTEM_ENV", {"name": _S, "value": _S}).rows())
    started = database.read("TARGET_INFO_SESSION_START_TIME", {"utcEpochNs": _I})["utcEpochNs"].drop_nulls().to_list()
    header = {
        "nsight": exported.get("EXPORT_PRODUCT_VERSION"),
        "host_name": environment.get("Hostname"),
        "session_start_utc_ns": started[0] if started else None,
    }
    return {key: value for key, value in header.items() if value is not None}
