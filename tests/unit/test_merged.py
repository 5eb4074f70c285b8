"""Files of several ranks that a script made into one, and files that only look like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import made_run
from make_trace import mark, op, span, write, write_trace

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.table import MIXED_RANKS

Event = dict[str, Any]
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank_of(number: int, *, late: int = 3, ids: int = 0) -> list[Event]:
    """Three steps of a rank on its device: a product and a reduction, 300 µs each, of which 100 µs lie in the product.

    Processes number their launches alike, so that ids are those of every rank unless ``ids`` are added.
    """
    host, events = 100 + number, []
    for step in range(3):
        at = 1000 * step + late * number
        calls = {"process": host, "thread": host}
        events += [
            mark(f"ProfilerStep#{step}", at, 1000, **calls),
            span("cuda_runtime", "cudaLaunchKernel", at + 10, 5, **calls, correlation=ids + 2 * step),
            span("kernel", "gemm", at + 30, 300, process=number, thread=7, correlation=ids + 2 * step),
            op("c10d::allreduce_", at + 20, 20, **calls),
            span("cuda_runtime", "cudaLaunchKernelExC", at + 25, 5, **calls, correlation=ids + 2 * step + 1),
            span("kernel", REDUCE, at + 230, 300, process=number, thread=20, correlation=ids + 2 * step + 1),
        ]
    trace = span("Trace", "PyTorch Profiler (0)", 0, 3000, process="Spans", thread="PyTorch Profiler")
    return [*named(host, "python3", "CPU"), *named(number, "python3", f"GPU {number}"), *events, trace]


def named(process: Any, name: str, labels: str | None = None) -> list[Event]:
    one = {"ph": "M", "pid": process, "tid": 0, "ts": 0}
    labelled = {**one, "name": "process_labels", "args": {"labels": labels}}
    return [{**one, "name": "process_name", "args": {"name": name}}, *([labelled] if labels else [])]


def renamed(rank: int, events: list[Event], name: Callable[[int, Any], Any]) -> list[Event]:
    return [{**event, "pid": name(rank, event["pid"])} for event in events]


def merged(name: Callable[[int, Any], Any], *, count: int = 2) -> list[Event]:
    return [event for rank in range(count) for event in renamed(rank, rank_of(rank), name)]


def opened(tmp_path: Path, events: list[Event], **header: Any) -> Trace:
    return open_trace(write_trace(tmp_path / "merged.json", events, **{"rank": 0, "host_name": "node7", **header}))


def notes(trace: Trace) -> dict[str, tuple[int, str]]:
    return {note.what: (note.count, note.example) for note in trace.notes}


def table(trace: Trace, rank: int) -> list[tuple]:
    """A rank's spans as they would be in a file of their own, but for what the processes are called."""
    spans = trace.spans.filter(rank=rank).sort("start_ns", "name")
    return spans.drop("rank", "lane", "issued_lane").rows()


def offset(rank: int, pid: Any) -> Any:
    return pid + 10_000 * rank if isinstance(pid, int) else f"rank_{rank}_{pid}"


def in_one(rank: int, pid: Any) -> Any:
    """Host and device of a rank under one number."""
    return f"rank_{rank}"


@pytest.mark.parametrize(
    "name",
    [
        lambda rank, pid: f"[TP{rank:02d}] {pid}",
        lambda rank, pid: f"rank{rank}_{pid}",
        lambda rank, pid: f"rank{rank}_pid{pid}",
        lambda rank, pid: f"[rank {rank}] {pid}",
        lambda rank, pid: f"{pid}_{rank}",
        in_one,
    ],
)
def test_ranks_that_the_processes_names_tell(tmp_path: Path, name: Callable[[int, Any], Any]) -> None:
    """The later rank stands first in the file, and ids are those of every rank."""
    events = [*renamed(3, rank_of(3), name), *renamed(1, rank_of(1), name)]
    trace = opened(tmp_path, events, rank=3)
    assert trace.ranks == [1, 3]
    for rank in trace.ranks:
        assert table(trace, rank) == table(open_trace(write_trace(tmp_path / "one.json", rank_of(rank))), 0)
    said = notes(trace)
    assert said.pop("ranks of a merged file, taken apart by their processes")[0] == 2
    assert not said
    validation = trace.validate()
    assert validation["breakdown"].is_supported and validation["waits"].is_supported


def test_ranks_that_the_processes_are_given_names_for(tmp_path: Path) -> None:
    """As TraceLens writes it: numbers with an offset, ids too, and names at the end."""
    events: list[Event] = []
    for rank in (2, 5):
        events += [
            {**event, "pid": event["pid"] + 10_000 * rank}
            for event in rank_of(rank, ids=100 * rank)
            if event["pid"] != "Spans"
        ]
    for rank in (2, 5):
        events += named(10_000 * rank + 100 + rank, f"RANK {rank} - CPU")
        events += named(10_000 * rank + rank, f"RANK {rank} - GPU")
    trace = opened(tmp_path, events, distributedInfo={})
    assert trace.ranks == [2, 5]
    assert len(trace.spans.filter(rank=5)) == len(rank_of(5)) - 5


def test_ranks_without_a_number_are_numbered_in_the_order_of_devices(tmp_path: Path) -> None:
    events = [*renamed(1, rank_of(1, ids=50), offset), *renamed(0, rank_of(0), offset)]
    events = [event for event in events if "rank_" not in str(event["pid"])]  # nothing has a name
    trace = opened(tmp_path, events)
    assert trace.lanes.filter(is_device=True).select("rank", "process").unique().sort("rank").rows() == [
        (0, "0"),
        (1, "10001"),
    ]
    assert notes(trace)["ranks that no file tells, numbered in the order of files, GPUs and processes"][0] == 2


def test_places_along_several_axes_are_no_ranks(tmp_path: Path) -> None:
    labels = ("[TP00-DP00]", "[TP01-DP00]", "[TP00-DP01]")
    trace = opened(tmp_path, merged(lambda rank, pid: f"{labels[rank]} {pid}", count=3))
    assert trace.ranks == [0, 1, 2]
    hosts = trace.lanes.filter(is_device=True).sort("rank")["process"].unique(maintain_order=True)
    assert hosts.to_list() == ["[TP00-DP00] 0", "[TP01-DP00] 1", "[TP00-DP01] 2"]
    assert notes(trace)["ranks that no file tells, numbered in the order of files, GPUs and processes"][0] == 3


def test_what_a_file_says_around_its_events_is_of_one_rank(tmp_path: Path) -> None:
    """Of another are the groups that name it, so that its collectives are those of the first rank."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    groups.append({"pg_name": "1", "pg_desc": "mine", "pg_size": 1, "ranks": [0]})
    info = {"rank": 0, "world_size": 2, "pg_config": groups}
    events = merged(lambda rank, pid: f"[TP{rank:02d}] {pid}")
    trace = opened(tmp_path, events, distributedInfo=info)
    assert trace.groups.select("rank", "group").rows() == [(0, "0"), (0, "1"), (1, "0")]
    assert trace.collectives["group"].to_list() == ["0"] * 6
    assert all("host_name" not in header for header in trace.about["headers"].values())
    # both ranks end at once but for 3 µs: they are compared, since two hosts' files may have been merged
    assert "agree" in trace.clock["method"][1]


def test_files_of_two_hosts_are_brought_to_one_clock(tmp_path: Path) -> None:
    events = [*renamed(0, rank_of(0, late=0), in_one), *renamed(1, rank_of(1, late=0), in_one)]
    for event in events:
        event["ts"] += 500 if event["pid"] == "rank_1" else 0
    assert opened(tmp_path, events).clock["offset_ns"].to_list() == [0, -500_000]


def test_one_rank_of_a_merged_file(tmp_path: Path) -> None:
    """What it states is the first rank's, which is not the one asked for."""
    path = write_trace(tmp_path / "merged.json", merged(in_one), rank=0)
    assert open_trace(path, ranks=[1]).ranks == [1]


def test_gloo_ranks_in_one_file(tmp_path: Path) -> None:
    """Without a device a rank is a process that takes part in collectives; a worker that loads data is none."""
    events: list[Event] = []
    for host in (100, 200):
        more = {"process": host, "thread": host}
        events += [op("aten::mm", 10, 50, **more), op("c10d::allreduce_", 60, 10, **more)]
        events.append(mark("gloo:all_reduce", 62, 90, process=host, thread=host + 1))
    events.append(op("aten::stack", 0, 300, process=300, thread=300))
    trace = opened(tmp_path, events)
    assert trace.ranks == [0, 1]
    assert notes(trace)["spans of processes that nothing joins to a rank, shown with the first"] == (1, "300")
    assert trace.lanes.select("rank", "process").unique().sort("process").rows() == [(0, "100"), (1, "200"), (0, "300")]


def test_one_process_with_several_devices_is_one_rank(tmp_path: Path) -> None:
    """Beside it a worker that works and launches nothing, and the devices that each file lists."""
    calls = [span("cuda_runtime", "cudaLaunchKernel", 10 * n, 2, correlation=n) for n in range(3)]
    kernels = [span("kernel", "gemm", 10 * n + 5, 9, process=n, thread=7, correlation=n) for n in range(3)]
    worker = op("aten::stack", 0, 30, process=555, thread=555)
    listed = [event for n in range(8) for event in named(n, "python", f"GPU {n}")]
    overhead = span("overhead", "Activity Buffer Request", 0, 1, process=-1, thread=0)
    trace = opened(tmp_path, [*listed, *calls, *kernels, worker, overhead])
    assert trace.ranks == [0] and not trace.notes
    assert trace.validate()["breakdown"].is_supported


@pytest.mark.parametrize("ids", [0, 100])
def test_two_processes_on_one_device_stay_together_and_it_is_said(tmp_path: Path, ids: int) -> None:
    events = [*rank_of(0), *rank_of(1, ids=ids)]
    for event in events:
        event["pid"] = 0 if event["pid"] == 1 else event["pid"]
    trace = opened(tmp_path, events)
    assert trace.ranks == [0]
    assert notes(trace)[MIXED_RANKS] == (2, "100, 101, 0")
    validation = trace.validate()
    for analysis in ("breakdown", "overlap"):
        assert not validation[analysis].is_supported
        assert "2 processes launched its work (100, 101, 0)" in validation[analysis].reason


def test_names_that_contradict_what_was_launched_are_not_believed(tmp_path: Path) -> None:
    """Each host launched on the other's device by name: it is theirs by launch, and nothing tells the numbers."""
    events = [*rank_of(0), *rank_of(1, ids=50)]
    events = [event for event in events if event["ph"] == "X" and event["pid"] != "Spans"]
    events += [*named(100, "rank 4"), *named(1, "rank 4"), *named(101, "rank 6"), *named(0, "rank 6")]
    trace = opened(tmp_path, events)
    assert trace.ranks == [0, 1]
    assert trace.lanes.filter(rank=1)["process"].unique().sort().to_list() == ["1", "101"]


def test_a_rank_s_trace_in_a_run_folder_is_its_own(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", prefetch=False)
    path = next(folder.glob("rank1/trace.json*"))
    write(path, json.dumps({"traceEvents": merged(in_one)}))
    trace = open_trace(folder, ranks=[1])
    assert trace.ranks == [1]
    assert notes(trace)["further ranks in the trace of rank 1, left out"] == (1, "")
    assert set(trace.lanes["process"]) == {"rank_1"}


@pytest.mark.parametrize("name", [lambda rank, pid: f"[TP{rank:02d}] {pid}", offset])
def test_work_from_before_the_recording_has_the_id_of_another_s_call(
    tmp_path: Path, name: Callable[[int, Any], Any]
) -> None:
    """Rank 1's first kernel was launched before its recording began; only rank 0 has a call with its id."""
    call = span("cuda_runtime", "cudaLaunchKernel", 1, 1, process=100, thread=100, correlation=77)
    early = span("kernel", "early", 5, 2, process=1, thread=7, correlation=77)
    events = [*renamed(0, [*rank_of(0), call], name), *renamed(1, [early, *rank_of(1, ids=1000)], name)]
    trace = opened(tmp_path, events)
    assert trace.ranks == [0, 1]
    assert trace.spans.filter(name="early")["rank"].to_list() == [1]
    assert trace.spans.filter(name="early")["issued_ns"].to_list() == [None]


def test_hosts_that_are_called_as_ranks_on_one_device_stay_together(tmp_path: Path) -> None:
    """Only the hosts' names tell ranks, and not whose the device's work is."""
    events = [event for event in [*rank_of(0), *rank_of(1)] if event["ph"] == "X" and event["pid"] != "Spans"]
    for event in events:
        event["pid"] = 0 if event["pid"] == 1 else event["pid"]
    trace = opened(tmp_path, [*events, *named(100, "rank 0"), *named(101, "rank 1")])
    assert trace.ranks == [0] and MIXED_RANKS in notes(trace)


def test_numbers_behind_the_names_of_devices_are_no_ranks(tmp_path: Path) -> None:
    """The file has no calls, and states its rank."""
    kernels = [span("kernel", "gemm", 10 * n, 9, process=f"cuda_{n}", thread=7) for n in (0, 1)]
    trace = opened(tmp_path, [*kernels, op("aten::mm", 0, 9, process="main", thread=1)], rank=3)
    assert trace.ranks == [3]


def test_ids_of_processes_behind_names_are_no_ranks(tmp_path: Path) -> None:
    events = [*rank_of(0), *rank_of(1, ids=50)]
    for event in events:
        event["pid"] = {100: "python_4711", 101: "python_4712"}.get(event["pid"], event["pid"])
    trace = opened(tmp_path, events)
    assert trace.ranks == [0, 1]
    assert trace.lanes.filter(process="1")["rank"].unique().to_list() == [1]


def test_loaders_are_no_ranks(tmp_path: Path) -> None:
    events = [event for event in rank_of(0) if event["pid"] != "Spans"]
    for event in events:
        event["pid"] = "main_2" if event["pid"] == 100 else event["pid"]
    events += [op("aten::stack", 0, 9, process=f"worker{n}", thread=n) for n in (0, 1)]
    trace = opened(tmp_path, events, rank=3)
    assert trace.ranks == [3] and MIXED_RANKS not in notes(trace)


def test_a_rank_without_calls_is_one_by_its_name(tmp_path: Path) -> None:
    events = merged(lambda rank, pid: f"[TP{rank:02d}] {pid}")
    trace = opened(tmp_path, [e for e in events if e.get("cat") != "cuda_runtime" or "TP00" in e["pid"]])
    assert trace.ranks == [0, 1]
    assert trace.spans.filter(rank=1, kind="compute")["name"].to_list() == ["gemm"] * 3


def test_a_process_that_once_launched_on_another_s_device_keeps_the_file_together(tmp_path: Path) -> None:
    call = span("cuda_runtime", "cudaLaunchKernel", 1500, 2, process=101, thread=101, correlation=99)
    stray = span("kernel", "stray", 1600, 100, process=0, thread=7, correlation=99)
    events = [*rank_of(0), *rank_of(1, ids=50), call, stray]
    for number in range(40):  # one in forty-seven
        more = {"process": 100, "thread": 100, "correlation": 200 + number}
        events.append(span("cuda_runtime", "cudaLaunchKernel", 3000 + 10 * number, 2, **more))
        events.append(span("kernel", "gemm", 3004 + 10 * number, 5, process=0, thread=7, correlation=200 + number))
    trace = opened(tmp_path, events)
    assert trace.ranks == [0] and MIXED_RANKS in notes(trace)
