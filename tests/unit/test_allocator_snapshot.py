"""Allocator snapshots: the memory timeline, walked back from the state at the end."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_trace import SHARED, op, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace import open_trace
from fsdpviz.trace.dumps.allocator_snapshot import is_snapshot, part_of

SNAPSHOT = SHARED / "memory/allocator_snapshot.pickle"
recordings = pytest.mark.skipif(not SNAPSHOT.is_file(), reason="the shared recordings are not here")


def event(action: str, time_us: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": 0, "size": size, "stream": 0, "time_us": time_us, "frames": []}


def segment(device: int = 0, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {
        "device": device,
        "total_size": 1000,
        "requested_size": sum(size for size, _ in blocks),
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


# At the end 100 + 30 bytes are in use; before the events 50 were, of which 40 are freed here
EVENTS = [
    event("segment_alloc", 1, 1000),
    event("alloc", 2, 200),
    event("free_requested", 3, 200),
    event("free_completed", 4, 200),
    event("alloc", 5, 120),
    event("free_completed", 6, 40),
]
CONTENT = {
    "segments": [segment(0, (100, "active_allocated"), (30, "active_pending_free"), (870, "inactive"))],
    "device_traces": [EVENTS, []],
}


def test_the_timeline_by_hand() -> None:
    part = part_of(CONTENT, "t")
    (device,) = part.about["allocator"]
    assert device == {
        "device": 0,
        "times_ns": [2000, 2000, 4000, 5000, 6000],
        "active_bytes": [50, 250, 50, 170, 130],
        "peak_active_bytes": 250,
        "peak_ns": 2000,
        "reserved_bytes": 1000,
        "active_bytes_at_end": 130,
        "requested_bytes_at_end": 1000,
        "segments": 1,
    }
    assert part.tables.spans.is_empty()
    assert [note.what for note in part.tables.notes] == [
        "memory snapshot: its timeline is in about['allocator'], and no work is in it"
    ]


def test_blocks_count_as_events_do_by_what_was_asked_for() -> None:
    """Four of 4 bytes each, in blocks of 512: one from before the events, one whose free has completed."""
    blocks = [
        {"size": 512, "requested_size": 4, "state": "active_allocated"},
        {"size": 512, "requested_size": 4, "state": "active_allocated"},
        {"size": 512, "requested_size": 4, "state": "active_pending_free"},
        {"size": 512, "requested_size": 4, "state": "inactive"},
    ]
    events = [event("alloc", 1, 4), event("alloc", 2, 4), event("alloc", 3, 4), event("free_completed", 4, 4)]
    content = {"segments": [segment() | {"blocks": blocks}], "device_traces": [events]}
    (device,) = part_of(content, "t").about["allocator"]
    assert (device["active_bytes"], device["active_bytes_at_end"]) == ([4, 8, 12, 16, 12], 3 * 512)


def test_devices_and_older_snapshots() -> None:
    """A bare list of segments is what torch.cuda.memory_snapshot() gives: no events, and the peak is the end."""
    content = [segment(0, (10, "active_allocated")), segment(3, (7, "active_awaiting_free"), (5, "inactive"))]
    found = part_of(content, "t").about["allocator"]
    assert [(one["device"], one["peak_active_bytes"], one["peak_ns"], one["times_ns"]) for one in found] == [
        (0, 10, None, []),
        (3, 7, None, []),
    ]
    assert not is_snapshot([])
    assert not is_snapshot({"segments": 1})
    assert not is_snapshot([{"device": 0}])


def test_marked_ranges_and_running_out_are_spans() -> None:
    marks = [("START", "a", 1), ("START", "a", 2), ("END", "a", 5), ("END", "a", 9), ("START", "b", 4), ("END", "c", 4)]
    annotations = [{"stage": stage, "name": name, "device": 0, "time_us": time} for stage, name, time in marks]
    trace = [event("oom", 7, 512)]
    part = part_of({"segments": [], "device_traces": [trace], "external_annotations": annotations}, "t")
    assert part.tables.spans.select("name", "start_ns", "duration_ns", "depth").rows() == [
        ("a", 1000, 8000, 0),
        ("a", 2000, 3000, 1),
        ("b", 4000, 0, 1 + 1),
        ("out of memory: 512 bytes were asked for", 7000, 0, 1),
    ]
    assert part.tables.spans["kind"].unique().to_list() == ["annotation"]
    assert part.tables.lanes["name"].to_list() == ["memory of device 0"]
    assert {note.what: note.count for note in part.tables.notes if "memory snapshot" not in note.what} == {
        "annotations that never end, shown without length": 1,
        "annotations without a beginning or a time, left out": 1,
    }


def test_a_snapshot_beside_a_trace_adds_to_its_rank(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace_1.json", [op("aten::mm", 1, 1)], rank=1)
    (tmp_path / "memory_rank1.pickle").write_bytes(pickle.dumps(CONTENT))
    trace = open_trace(tmp_path)
    assert trace.spans["name"].to_list() == ["aten::mm"]
    assert trace.about["allocator"]["1"][0]["peak_active_bytes"] == 250


def test_a_run_folder_tells_its_snapshots(tmp_path: Path) -> None:
    (tmp_path / "experiment.json").write_text("{}")
    (tmp_path / "result.json").write_text("{}")
    for rank, content in ((0, CONTENT), (1, {"weights": 1})):
        write_trace(tmp_path / f"rank{rank}/trace.json.gz", [op("aten::mm", 1, 1)], rank=rank)
        (tmp_path / f"rank{rank}/memory_snapshot.pickle").write_bytes(pickle.dumps(content))
    trace = open_trace(tmp_path)
    assert {rank: found[0]["peak_active_bytes"] for rank, found in trace.about["allocator"].items()} == {"0": 250}
    assert [note.what for note in trace.notes] == ["the memory snapshot of rank 1 could not be read"]


odd = st.none() | st.integers() | st.text(max_size=3) | st.floats() | st.lists(st.integers(), max_size=2)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["action", "size", "time_us", "device", "stage", "name"]), odd), max_size=5
    ),
    st.lists(st.dictionaries(st.sampled_from(["device", "total_size", "blocks", "active_size"]), odd), max_size=5),
)
def test_any_types_anywhere_do_no_harm(events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> None:
    content = {
        "segments": [segment() | one for one in segments],
        "device_traces": [[event("alloc", 1, 1) | one for one in events], odd],
        "external_annotations": events,
    }
    assert is_snapshot(content)
    for device in part_of(content, "t").about["allocator"]:
        assert len(device["times_ns"]) == len(device["active_bytes"])


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "t.pickle").write_bytes(pickle.dumps({"weights": [1.0]}))
    with pytest.raises(TraceError, match="a pickle of something else"):
        open_trace(tmp_path / "t.pickle")


@recordings
def test_a_real_snapshot() -> None:
    trace = open_trace(SNAPSHOT)
    content = pickle.loads(SNAPSHOT.read_bytes())
    (device,) = trace.about["allocator"]["0"]
    events = [one for one in content["device_traces"][0] if one["action"] in ("alloc", "free_completed")]
    deltas = [
        one["size"] * (1 if one["action"] == "alloc" else -1) for one in sorted(events, key=lambda e: e["time_us"])
    ]
    held = [block for one in content["segments"] for block in one["blocks"] if "active" in block["state"][:6]]
    assert not {block["address"] for block in held} & {one["addr"] for one in events}  # all are older
    older = sum(block["requested_size"] for block in held)
    assert device["active_bytes"][0] == older
    active = older - sum(deltas) + np.concatenate(([0], np.cumsum(deltas)))
    assert device["active_bytes"] == active.tolist()
    assert device["peak_active_bytes"] == active.max()
    assert len(device["times_ns"]) == 1040 + 1
    assert device["active_bytes_at_end"] == sum(block["size"] for block in held)
    assert trace.spans.filter(pl.col("kind") == "annotation").height == 3
