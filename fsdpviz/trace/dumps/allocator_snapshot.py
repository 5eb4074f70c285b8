"""Reads the snapshots of PyTorch's CUDA allocator (``torch.cuda.memory._dump_snapshot``): memory over time.

A snapshot has the segments as they were when it was taken, and a ring of the last events: alloc, free_requested,
free_completed, segment_alloc, oom and so on. What was allocated before the ring begins is known from its end alone:
the timeline is the state in the segments, walked back through the events. So

    active bytes before event i = active bytes in the segments − Σ (alloc − free_completed) over events i …

Events tell what was asked for, not the block that was given for it, which is larger; so what was asked for is counted
in the segments too, where blocks tell it (those of older snapshots do not).

"Active" is what torch's memory viewer draws: memory from its allocation until its free has *completed*, which is later
than the request where another stream still used it. Lifetimes of blocks are no spans: they overlap anyhow, by the
ten thousand. The spans are the ranges that a user marked (``external_annotations``) and the moments of running out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...base.kinds import Kind
from ..files.parts import Part, Role, tables_of
from ..table import Note

_HELD = ("active_allocated", "active_awaiting_free", "active_pending_free")  # torch's names for memory in use
_LANE = "memory"
_MAX_TIME_US = 2**62 // 1000
_MAX_BYTES = 2**53  # 8 PiB


def is_snapshot(content: Any) -> bool:
    """True for what ``_dump_snapshot`` writes, and for the older bare list of segments."""
    if isinstance(content, dict):
        return isinstance(content.get("segments"), list) and isinstance(content.get("device_traces", []), list)
    return isinstance(content, list) and bool(content) and all(_is_segment(item) for item in content[:10])


def part_of(content: Any, name: str) -> Part:
    """One rank. ``about["allocator"]`` is a list, an item for each device that was used, of

    ``device``, ``times_ns`` and ``active_bytes`` (from each time on; the state before the first event stands at the
    first time), ``peak_active_bytes``, ``peak_ns`` (None where there are no events), and of the segments at the end
    ``reserved_bytes``, ``active_bytes_at_end`` (whole blocks), ``requested_bytes_at_end`` and ``segments``.
    """
    notes: list[Note] = []
    content = content if isinstance(content, dict) else {"segments": content}
    segments = [item for item in content["segments"] if _is_segment(item)]
    _note_odd("segments that are none, left out", len(content["segments"]) - len(segments), notes)
    traces = [trace if isinstance(trace, list) else [] for trace in content.get("device_traces", [])]
    used = {item["device"] for item in segments} | {device for device, trace in enumerate(traces) if trace}
    devices = [
        _device(device, [item for item in segments if item["device"] == device], _trace(traces, device), notes)
        for device in sorted(used)
    ]
    spans = _annotations(content.get("external_annotations"), notes)
    for device, trace in enumerate(traces):
        _add_moments_without_memory(spans, device, trace)
    notes.append(Note("memory snapshot: its timeline is in about['allocator'], and no work is in it", 1, name[-80:]))
    lanes = [
        {
            "rank": 0,
            "lane": lane,
            "name": f"memory of device {device}",
            "is_device": False,
            "process": _LANE,
            "thread": str(device),
            "sort": lane,
        }
        for lane, device in enumerate(sorted(set(spans["lane"])))
    ]
    place = {int(row["thread"]): row["lane"] for row in lanes}
    spans["lane"] = [place[device] for device in spans["lane"]]
    return Part(name, tables_of(spans, lanes, notes), about={"allocator": devices}, role=Role.SNAPSHOT)


# -- the timeline


def _device(
    device: int, segments: Sequence[Mapping[str, Any]], trace: Sequence[Any], notes: list[Note]
) -> dict[str, Any]:
    at_end = sum(_active_bytes(segment, "requested_size") for segment in segments)
    times_ns, changes = _changes(trace, notes)
    after = at_end - (changes[::-1].cumsum()[::-1] - changes)  # of each event
    before = at_end - int(changes.sum())
    active = np.concatenate(([before], after)) if len(after) else after
    if len(active) and active.min() < 0:
        notes.append(Note("events that free more than the segments account for; the timeline starts below 0", 1))
    times = np.concatenate((times_ns[:1], times_ns))
    return {
        "device": device,
        "times_ns": times.tolist(),
        "active_bytes": active.tolist(),
        "peak_active_bytes": int(active.max()) if len(active) else at_end,
        "peak_ns": int(times[active.argmax()]) if len(active) else None,
        "reserved_bytes": sum(_bytes(segment.get("total_size")) for segment in segments),
        "active_bytes_at_end": sum(_active_bytes(segment, "size") for segment in segments),
        "requested_bytes_at_end": sum(_bytes(segment.get("requested_size")) for segment in segments),
        "segments": len(segments),
    }


def _changes(trace: Sequence[Any], notes: list[Note]) -> tuple[np.ndarray, np.ndarray]:
    """Times (ns) and signed bytes of the events that change what is active, by time."""
    times: list[int] = []
    changes: list[int] = []
    odd = 0
    for event in trace:
        action = event.get("action") if isinstance(event, dict) else None
        if action is None:
            odd += 1
            continue
        if action not in ("alloc", "free_completed"):
            continue
        time_us, size = _time_us(event), event.get("size")
        if time_us is None or not isinstance(size, int) or not _is_count(size, _MAX_BYTES):
            odd += 1
            continue
        times.append(time_us * 1000)
        changes.append(size if action == "alloc" else -size)
    _note_odd("allocator events without a time or a size, left out", odd, notes)
    order = np.argsort(np.array(times, np.int64), kind="stable")
    return np.array(times, np.int64)[order], np.array(changes, np.int64)[order]


def _active_bytes(segment: Mapping[str, Any], measure: str) -> int:
    """Of the blocks in use; ``measure`` is the blocks' key for it, and their size stands in where it is missing."""
    blocks = segment.get("blocks")
    if not isinstance(blocks, list):
        return _bytes(segment.get("active_size"))
    held = (block for block in blocks if isinstance(block, dict) and block.get("state") in _HELD)
    return sum(_bytes(block.get(measure, block.get("size"))) for block in held)


# -- spans


def _annotations(events: Any, notes: list[Note]) -> dict[str, list[Any]]:
    """A span for each START and the END that closes it: the last open one of that name and device."""
    spans: dict[str, list[Any]] = {name: [] for name in ("lane", "start_ns", "duration_ns", "name", "kind")}
    open_: dict[tuple[str, int], list[int]] = {}
    odd = 0
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or (time_us := _time_us(event)) is None or not _is_count(event.get("device")):
            odd += 1
            continue
        key = str(event.get("name")), event["device"]
        if event.get("stage") == "START":
            open_.setdefault(key, []).append(time_us)
        elif open_.get(key):
            start_us = open_[key].pop()
            _add_span(spans, key[1], start_us * 1000, (time_us - start_us) * 1000, key[0])
        else:
            odd += 1
    left = [(key, time_us) for key, times in open_.items() for time_us in times]
    for (name, device), time_us in left:
        _add_span(spans, device, time_us * 1000, 0, name)
    _note_odd("annotations that never end, shown without length", len(left), notes)
    _note_odd("annotations without a beginning or a time, left out", odd, notes)
    return spans


def _add_moments_without_memory(spans: dict[str, list[Any]], device: int, trace: Sequence[Any]) -> None:
    for event in trace:
        if isinstance(event, dict) and event.get("action") == "oom" and (time_us := _time_us(event)) is not None:
            asked = event["size"] if _is_count(event.get("size"), _MAX_BYTES) else None
            _add_span(spans, device, time_us * 1000, 0, f"out of memory: {asked or 'some'} bytes were asked for")


def _add_span(spans: dict[str, list[Any]], device: int, start_ns: int, duration_ns: int, name: str) -> None:
    values = (device, start_ns, max(0, duration_ns), name, Kind.ANNOTATION.value)
    for column, value in zip(spans.values(), values, strict=True):
        column.append(value)


# -- values that may be of any type


def _trace(traces: Sequence[list[Any]], device: int) -> list[Any]:
    return traces[device] if device < len(traces) else []


def _is_segment(item: Any) -> bool:
    return isinstance(item, dict) and "total_size" in item and _is_count(item.get("device"))


def _time_us(event: Mapping[str, Any]) -> int | None:
    time_us = event.get("time_us")
    return time_us if isinstance(time_us, int) and _is_count(time_us, _MAX_TIME_US) else None


def _is_count(value: Any, limit: int = 2**20) -> bool:
    return type(value) is int and 0 <= value < limit


def _bytes(value: Any) -> int:
    return value if _is_count(value, _MAX_BYTES) else 0


def _note_odd(what: str, count: int, notes: list[Note]) -> None:
    if count:
        notes.append(Note(what, count))
