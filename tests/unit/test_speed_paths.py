"""What is done for speed and for memory changes nothing: blocks, codes, processes, Parquet."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_trace import KINETO, document, launched, mark, op, span, write, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace import open_trace
from fsdpviz.trace.kineto import blocks, events, nanoseconds
from fsdpviz.trace.kineto.columns import Coded
from fsdpviz.trace.kineto.reader import Recording, read_recording
from fsdpviz.trace.kineto.scanner import is_compiled
from fsdpviz.trace.meaning import gloo, lanes, spans
from fsdpviz.trace.meaning.rows import MARKED, Rows
from fsdpviz.trace.meaning.windows import Windows

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def same(first: Recording, second: Recording) -> bool:
    return (
        first.events.equals(second.events)
        and (first.tensors, first.messages, first.thread_names, first.header)
        == (second.tensors, second.messages, second.thread_names, second.header)
        and {(note.what, note.count) for note in first.notes} == {(note.what, note.count) for note in second.notes}
    )


def test_the_scanner_was_compiled_where_there_is_a_compiler() -> None:
    assert is_compiled() or not shutil.which("cc")


# -- blocks

# strings and nested lists in which a block must not be cut, events of every shape
TRICKY: list[Any] = [
    op("a}, {b", 0, 1),
    op('quoted "}, {" and \\', 1, 1, deep=[{"x": [{"y": 1}, {"z": "},{"}]}, {}]),
    {**op("odd", 2, 1), "args": [{"a": 1}, {"b": 2}]},
    {"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    {"ph": "M", "name": "thread_name", "pid": 100, "tid": 7, "args": {"name": "worker"}},
    {"ph": "C", "name": "power", "args": {"a": 1}},
    {"args": {"correlation": 3}, "dur": 1, "ts": 3, "tid": 1, "pid": 1, "name": "phase last", "ph": "X"},
    5,
    mark("gloo:all_reduce", 4, 1, **{"Input Dims": [[2, 3]], "Input type": ["float"]}),
    op("ünïcödé ✓", 5, 1),
    {**op("lost", 0, 1), "ts": None},
]


@pytest.mark.parametrize("block", [4, 7, 64, 300, 1000])
@pytest.mark.parametrize("form", ["object", "list", "indented", "packed"])
def test_the_size_of_a_block_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, form: str
) -> None:
    content: Any = TRICKY if form == "list" else document(TRICKY * 3, rank=2, baseTimeNanoseconds=5, traceName="},{")
    text = json.dumps(content, indent=2 if form == "indented" else None, ensure_ascii=False)
    path = write(tmp_path / ("t.json.gz" if form == "packed" else "t.json"), text)
    whole = read_recording(path)
    assert len(whole.events) == (6 if form == "list" else 18)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    assert same(read_recording(path), whole)


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        ((b"aten::op7", b"aten\x01:op7"), "control characters, replaced by spaces"),
        ((b"aten::op7", b"aten:\xff:op7"), "bytes that are no UTF-8, replaced"),
        ((b'"ts": 7,', b'"ts": 7, "flops": NaN,'), "NaN or infinity where JSON has none, read as null"),
        ((b'"aten::op7", ', b'"aten::op7" '), "events that are no JSON, left out"),
    ],
)
def test_damage_in_the_middle_costs_what_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: tuple[bytes, bytes], note: str
) -> None:
    names = [f"aten::op{index}" for index in range(40)]
    text = json.dumps(document([op(name, index, 1) for index, name in enumerate(names)], rank=1)).encode()
    assert damage[0] in text
    path = write(tmp_path / "t.json", text.replace(*damage, 1))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    monkeypatch.setattr(events, "_DAMAGED_BYTES", 1500)
    recording = read_recording(path)
    found = recording.events["name"].to_list()
    assert recording.rank == 1
    assert [name for name in found if name in names] == [name for name in names if name != "aten::op7" or name in found]
    assert len(found) == (39 if note.startswith("events") else 40)
    assert [(item.what, item.count) for item in recording.notes] == [(note, 1)]


def test_a_file_cut_anywhere_gives_the_events_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(document([op(f"aten::op{index}", index, 1) for index in range(12)], rank=1))
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 150)
    start = text.index("aten::op1")
    for cut in range(start, len(text), 3):
        found = read_recording(write(tmp_path / "t.json", text[:cut])).events["name"].to_list()
        assert found == [f"aten::op{index}" for index in range(len(found))]
        assert len(found) >= text[:cut].count("}}") - 1


def test_what_follows_the_events_may_be_longer_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = {"deviceProperties": [{"id": index} for index in range(200)], "baseTimeNanoseconds": 1000}
    path = write(tmp_path / "t.json", {"traceEvents": [op("a", 1, 1), op("b", 2, 1)], **tail})
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    recording = read_recording(path)
    assert recording.events["start_ns"].to_list() == [2000, 3000]
    assert len(recording.header["deviceProperties"]) == 200
    assert recording.notes == ()


def test_what_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    monkeypatch.setattr(events, "LONGEST_EVENT_BYTES", 1000)
    for content, cause in (
        ('{"a": "' + "x" * 5000, "no traceEvents in its first"),
        ('{"traceEvents": [{"name": "' + "x" * 5000, "no event ends in"),
        ("[" * 5000, "no event ends in"),
    ):
        with pytest.raises(TraceError, match=cause):
            read_recording(write(tmp_path / "t.json", content))


text_values = st.text(max_size=8) | st.sampled_from(["}, {", "]}", '"', "\\", "traceEvents"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | text_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text_values, inner, max_size=3),
    max_leaves=6,
)
made_events = st.builds(
    lambda name, start, duration, more: {**op(name, start, duration), "args": more},
    st.text(max_size=12),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.dictionaries(text_values, json_values, max_size=3),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(made_events | json_values, max_size=12), st.integers(1, 400))
def test_reading_back_equals_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, written: list[Any], block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    path = tmp_path_factory.getbasetemp() / "written.json"
    spans = [event for event in written if isinstance(event, dict) and event.get("ph") == "X"]
    write(path, document([op("first", 0, 1), *written]))
    recording = read_recording(path)
    assert recording.events["name"].to_list() == ["first", *(event["name"] for event in spans)]
    assert recording.events["start_ns"].to_list() == [0, *(event["ts"] * 1000 for event in spans)]


# -- codes and order


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(-5, 5), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from((0, 500)),
)
def test_rows_are_sorted_as_promised(items: list[tuple[str, int, int, int]], few: int) -> None:
    columns: dict[str, Any] = {
        "category": ["cpu_op"] * len(items),
        "name": [str(index) for index in range(len(items))],
        "process": [item[0] for item in items],
        "thread": [str(item[1]) for item in items],
        "start_ns": [item[2] for item in items],
        "duration_ns": [item[3] for item in items],
        "correlation": [None] * len(items),
        "bytes": [None] * len(items),
    }
    frame = pl.DataFrame(columns, schema_overrides={"correlation": pl.Int64, "bytes": pl.Int64})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdpviz.trace.meaning.rows._FEW", few)  # fewer rows are sorted another way
        rows = Rows(Recording.of_frame(Path("t"), frame, {}, {}, {}, {}, ()))
    lanes = list(dict.fromkeys(item[:2] for item in items))  # in order of appearance
    expected = sorted(range(len(items)), key=lambda i: (lanes.index(items[i][:2]), items[i][2], -items[i][3], i))
    assert [int(rows.name_of(row)) for row in range(len(rows))] == expected
    assert list(zip(rows.processes, map(int, rows.threads), strict=True)) == lanes


def test_times_too_far_apart_for_one_number_are_sorted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpviz.trace.meaning.rows._FEW", 0)
    trace = [op("late", 2 * 10**15, 1), op("early", -(10**15), 1), op("early and long", -(10**15), 2)]
    rows = Rows(read_recording(write_trace(tmp_path / "t.json", trace)))
    assert [rows.name_of(row) for row in range(3)] == ["early and long", "early", "late"]


def test_a_launch_is_found_by_its_id(tmp_path: Path) -> None:
    trace = [
        *launched("kernel", "k1", 1, 5, 1, correlation=7),
        *launched("kernel", "k2", 2, 7, 1, correlation=8),
        span("kernel", "graph's", 9, 1, process=0, thread=7, correlation=8),
        span("kernel", "orphan", 11, 1, process=0, thread=7, correlation=9),
        span("kernel", "nameless", 12, 1, process=0, thread=7),
    ]
    rows = Rows(read_recording(write_trace(tmp_path / "t.json", trace)))
    issued = {rows.name_of(row): int(at) for row, at in enumerate(rows.launches()[0])}
    calls = [row for row in range(len(rows)) if rows.name_of(row) == "cudaLaunchKernel"]
    assert issued == {
        "cudaLaunchKernel": calls[1],
        "k1": calls[0],
        "k2": calls[1],
        "graph's": calls[1],
        "orphan": -1,
        "nameless": -1,
    }


def calls_and_kernels(tmp_path: Path, *spans: tuple[str, int, int, int]) -> dict[str, tuple[int, int] | None]:
    """By kernel, process and start (µs) of the call that launched it. ``spans``: name (of a call, ""), process or
    device, start in µs, correlation id.
    """
    trace = [
        span("kernel", name, start, 1, process=process, thread=7, correlation=correlation)
        if name
        else span(
            "cuda_runtime", "cudaLaunchKernel", start, 1, process=process, thread=process, correlation=correlation
        )
        for name, process, start, correlation in spans
    ]
    rows = Rows(read_recording(write_trace(tmp_path / "t.json", trace)))
    launched_by, contested = rows.launches()
    kernels = [row for row in range(len(rows)) if rows.is_device[row]]
    calls = {row: int(launched_by[row]) for row in kernels}
    assert len(contested) == sum(name.endswith("!") for name, *_ in spans)
    return {
        rows.name_of(row).rstrip("!"): (int(rows.processes[rows.lane[call]]), int(rows.start_ns[call]) // 1000)
        if call >= 0
        else None
        for row, call in calls.items()
    }


def test_ids_of_two_processes_that_run_one_after_the_other(tmp_path: Path) -> None:
    found = calls_and_kernels(tmp_path, ("", 100, 10, 1), ("", 200, 500, 1), ("k0!", 0, 20, 1), ("k1!", 1, 510, 1))
    assert found == {"k0": (100, 10), "k1": (200, 500)}


def test_ids_of_two_processes_in_lockstep_are_told_by_their_devices(tmp_path: Path) -> None:
    """Device 0's kernels all come after process 100's calls; its first comes before 200's, the second after both."""
    found = calls_and_kernels(
        tmp_path,
        *(("", 100, 10, 1), ("", 200, 25, 1), ("a!", 0, 20, 1), ("A!", 1, 27, 1)),
        *(("", 100, 30, 2), ("", 200, 35, 2), ("b!", 0, 40, 2), ("B!", 1, 50, 2)),
        *(("", 200, 60, 3), ("C", 1, 70, 3)),
    )
    assert found == {
        **{"a": (100, 10), "b": (100, 30)},
        **{"A": (200, 25), "B": (200, 35), "C": (200, 60)},
    }


def test_ids_of_two_processes_on_one_device_are_told_by_the_last_call_before(tmp_path: Path) -> None:
    found = calls_and_kernels(
        tmp_path,
        *(("", 100, 10, 1), ("a!", 0, 20, 1), ("b!", 0, 510, 1), ("", 200, 500, 1)),
        *(("", 100, 30, 2), ("c", 0, 40, 2), ("", 200, 600, 3), ("d", 0, 610, 3)),
    )
    assert found == {"a": (100, 10), "b": (200, 500), "c": (100, 30), "d": (200, 600)}


def test_a_graph_s_kernels_are_its_launch_s_in_files_of_two_processes(tmp_path: Path) -> None:
    found = calls_and_kernels(
        tmp_path,
        *(("", 100, 10, 1), ("", 200, 11, 2)),
        *(("a", 0, 20, 1), ("b", 0, 30, 1), ("c", 1, 30, 2), ("orphan", 1, 40, 9)),
    )
    assert found == {"a": (100, 10), "b": (100, 10), "c": (200, 11), "orphan": None}


def test_codes_made_afterwards_are_those_of_the_reader(tmp_path: Path) -> None:
    recording = read_recording(write_trace(tmp_path / "t.json", TRICKY))
    assert recording.codes is not None
    for name, coded in recording.codes.items():
        again = Coded.of(recording.events[name])
        assert (again.values, again.codes.tolist()) == (coded.values, coded.codes.tolist())
        assert coded.series().to_list() == recording.events[name].to_list()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=8),
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 20)), max_size=8),
)
def test_the_innermost_window_at_a_point(
    given_windows: list[tuple[int, int, int]], points: list[tuple[int, int]]
) -> None:
    windows = Windows(
        [(lane, start, start + length, (lane, start, start + length)) for lane, start, length in given_windows]
    )
    found = windows.names_at(np.array([p[0] for p in points], np.int64), np.array([p[1] for p in points], np.int64))
    for (lane, time), name in zip(points, found, strict=True):
        around = [w for w in windows.names if w[0] == lane and w[1] <= time < w[2]]
        assert name == (max(around, key=lambda w: (w[1], -w[2])) if around else None)


# -- times

# texts of one width, of one form, and of all kinds, up to what 63 bits hold and beyond
FORMS = {
    "whole": st.integers(0, 10**17).map(str),
    "equally wide": st.integers(10**15, 3 * 10**15).map(str),
    "equally wide, three decimals": st.integers(10**15, 10**16 - 1).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}"),
    "equally wide, one decimal": st.integers(10**16, 10**17 - 1).map(lambda tenths: f"{tenths // 10}.{tenths % 10}"),
    "three decimals": st.integers(0, 10**15).map(lambda ns: f"{ns // 1000}.{ns % 1000:03}"),
    "some decimals": st.decimals(0, 10**9, places=3).map(lambda us: f"{us:.4f}"[:-1].rstrip("0") + "5"),
}
ODD = st.sampled_from(["-1.5", "-3", "1.0005", "null", '"7"', "1e3", ".5", "5.", "1.2.3", "9" * 25, "0", "", "1 2"])


@given(st.one_of(*(st.lists(form, min_size=1, max_size=60) for form in FORMS.values())), st.lists(ODD, max_size=1))
def test_times_read_together_are_those_read_one_by_one(texts: list[str], odd: list[str]) -> None:
    texts = (texts * 16)[:60]  # enough of them to be worth trying
    texts[len(texts) // 2 : len(texts) // 2] = odd
    exact = [nanoseconds._exact(text) for text in texts]
    values, is_known = nanoseconds.microseconds_to_ns([text.encode() for text in texts])
    assert is_known.tolist() == [one is not None for one in exact]
    assert values.tolist() == [one or 0 for one in exact]


# -- the benchmark's own traces


def test_a_made_trace_is_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    maker = sys.modules.pop("make_trace")  # the tests' own has the same name
    try:
        import importlib

        bench = importlib.import_module("make_trace")
    finally:
        sys.modules["make_trace"] = maker
    for rank in (0, 1):
        bench.write_rank(tmp_path / f"rank{rank}.json.gz", rank, 2, 1_000_000)
    bench.write_rank(tmp_path / "again" / "rank0.json.gz", 0, 2, 1_000_000)
    first, again = (
        gzip.decompress((tmp_path / name).read_bytes()) for name in ("rank0.json.gz", "again/rank0.json.gz")
    )
    assert first == again
    assert len(first) >= 1_000_000
    (tmp_path / "again" / "rank0.json.gz").unlink()
    trace = open_trace(tmp_path)
    assert trace.notes == ()
    assert trace.ranks == [0, 1]
    of_step = trace.spans.filter((pl.col("rank") == 0) & (pl.col("step") == 0))
    kinds = dict(of_step.group_by(pl.col("kind").cast(pl.String)).len().rows())
    assert (kinds["all_gather"], kinds["reduce_scatter"]) == (2 * bench.UNITS, bench.UNITS)
    gathers = of_step.filter(pl.col("kind") == "all_gather")
    assert set(gathers["unit"]) == {f"layers.{unit}" for unit in range(bench.UNITS)}
    assert set(gathers["bytes"]) == {2 * bench.UNIT_ELEMENTS}
    device = trace.spans.filter(pl.col("launch").is_not_null() & pl.col("issued_ns").is_not_null())
    assert (device["issued_ns"] < device["start_ns"]).all()


@pytest.mark.skipif(not KINETO.is_dir(), reason="the shared recordings are not here")
def test_real_recordings_read_the_same_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = sorted(path for path in KINETO.rglob("*.json.gz") if path.stat().st_size < 60_000)
    assert len(small) > 6
    whole = [read_recording(path) for path in small]
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 10_000)
    for path, expected in zip(small, whole, strict=True):
        assert same(read_recording(path), expected), path.name


# -- names

ASKED = [
    *(spans._NAMES_A_RANGE, spans._ISSUES, spans._MARKS, gloo.RANGE, spans._C10D, spans._NCCL, spans._LINKS),
    *(lanes._STEP, lanes._BACKWARD),
]
NAMES = [
    *("FSDP::pre_forward (a)", "fsdpviz::forward", "Optimizer.step#AdamW.step", "ProfilerStep#3", "## forward ##"),
    *("Train_step 3", "iteration 3"),
    *("DistributedDataParallel.forward", "FullyShardedDataParallel.forward", "enumerate(DataLoader)#_SingleProcess"),
    *(
        "autograd::engine::evaluate_function: MmBackward0",
        "c10d::allreduce_",
        "_c10d_functional::all_gather_into_tensor",
    ),
    *(
        "c10d_functional::wait_tensor",
        "symm_mem::one_shot_all_reduce",
        "vllm::all_reduce",
        "gloo:all_gather",
        "nccl:send",
    ),
]


def test_each_name_that_a_pattern_matches_is_marked() -> None:
    """``Rows.named`` asks a pattern about marked names only."""
    recorded = [name for path in KINETO.glob("*.json.gz") for name in read_recording(path).codes["name"].values]
    for name in {*NAMES, *recorded}:
        assert MARKED.match(name) or not any(pattern.match(name) for pattern in ASKED), name
    assert all(any(pattern.match(name) for pattern in ASKED) for name in NAMES)
    assert not MARKED.match("aten::mm")
