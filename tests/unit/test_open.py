"""Opening what is on disk: files, folders, run folders; and real recordings, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_trace import KINETO, op, write, write_trace

import fsdpviz
from fsdpviz.base.errors import TraceError
from fsdpviz.base.provenance import Provenance
from fsdpviz.experiment import RunFolder
from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.table import LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA

recordings = pytest.mark.skipif(not KINETO.is_dir(), reason="the shared recordings are not here")

NUMBERED = "ranks that no file tells, numbered in the order of files, GPUs and processes"


def counts(trace: Trace) -> Counter[str]:
    return Counter(trace.spans["kind"].cast(pl.String).to_list())


# -- ranks


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.json", 3),
        ("ddp_rank-12.pt.trace.json.gz", 12),
        ("worker7_step_12.1694128201545.pt.trace.json", 7),
        ("tr_plain_2.json", 2),
        ("rank5/trace.json.gz", 5),
        ("host_4711.1694128201545.pt.trace.json", 0),  # a process id is no rank: numbered
        ("trace.json", 0),
    ],
)
def test_the_rank_comes_from_the_names_when_the_file_is_silent(tmp_path: Path, name: str, rank: int) -> None:
    trace = open_trace(write_trace(tmp_path / "job" / name, [op("aten::mm", 1, 1)]))
    assert trace.ranks == [rank]
    assert [note.what for note in trace.notes] == ([NUMBERED] if rank == 0 else [])


def test_what_the_file_says_beats_its_name(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "rank3.json", [op("aten::mm", 1, 1)], rank=1)
    assert open_trace(str(path)).ranks == [1]


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        write_trace(tmp_path / f"rank{rank}.json.gz", [op("aten::mm", rank, 1)], rank=rank, host_name="node0")
    write(tmp_path / "config.json", {"lr": 0.1})
    trace = open_trace(tmp_path)
    assert trace.ranks == [0, 1, 2]
    assert trace.spans["start_ns"].to_list() == [0, 1000, 2000]  # one clock for all
    assert trace.provenance is Provenance.RECORDED_ELSEWHERE
    assert [(note.what, note.count) for note in trace.notes] == [
        ("files of the folder that are no traces, left out", 1)
    ]
    assert open_trace(tmp_path, ranks=[2, 0]).ranks == [0, 2]
    with pytest.raises(TraceError, match=r"has ranks \[0, 1, 2\]; asked for \[7\]"):
        open_trace(tmp_path, ranks=[1, 7])


def test_two_files_of_one_rank_are_refused_by_name(tmp_path: Path) -> None:
    first = write_trace(tmp_path / "a.json", [op("aten::mm", 1, 1)], rank=1)
    second = write_trace(tmp_path / "b.json", [op("aten::mm", 1, 1)], rank=1)
    with pytest.raises(TraceError) as caught:
        open_trace([first, second])
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for paths, cause in (
        ([], "no path was given"),
        (tmp_path / "absent.json", "does not exist"),
        (tmp_path / "empty", "holds no file"),
    ):
        with pytest.raises(TraceError, match=cause):
            open_trace(paths)
    write(tmp_path / "empty" / "page.json", "<html>")
    with pytest.raises(TraceError, match="HTML"):
        open_trace(tmp_path / "empty")


# -- run folders


def make_run(folder: Path, *, is_finished: bool = True) -> Path:
    write(folder / "experiment.json", {"engine": "fsdp2"})
    write(folder / "environment.json", {"provenance": "cpu + emulated links"})
    for rank in (0, 1):
        here = folder / f"rank{rank}"
        write_trace(here / "trace.json.gz", [op("aten::mm", 1, 1), op("aten::mm", 2, 1, thread=102)])
        write(here / "lanes.json", {"102": "link intra-node"})
        write(here / "memory.json", {"peak_device_bytes": 1000 + rank})
        lines = [{"step": step, "loss": 2.0 - step, "step_ns": 5} for step in (0, 1)]
        write(here / "metrics.jsonl", "\n".join(map(json.dumps, lines)) + '\n{"step": 2, "lo')
    if is_finished:
        write(folder / "result.json", {"ok": True})
    return folder


def test_a_run_folder_tells_all_of_itself(tmp_path: Path) -> None:
    trace = open_trace(make_run(tmp_path / "run"))
    assert trace.ranks == [0, 1]
    assert trace.provenance is Provenance.CPU_EMULATED_LINKS
    assert trace.notes == ()
    assert trace.about["experiment"] == {"engine": "fsdp2"}
    assert trace.about["result"] == {"ok": True}
    assert trace.about["memory"]["1"] == {"peak_device_bytes": 1001}
    assert [line["loss"] for line in trace.about["metrics"]["0"]] == [2.0, 1.0]  # the cut line is left out
    names = trace.lanes.filter(pl.col("rank") == 1).sort("sort")["name"].to_list()
    assert names == ["main thread", "link intra-node"]
    assert open_trace(tmp_path / "run", ranks={1}).ranks == [1]


def test_what_names_a_folder_opens_it(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    assert open_trace(folder).spans.equals(open_trace(folder.path).spans)
    assert fsdpviz.open(folder).folder == folder


def test_an_unfinished_run_opens_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", is_finished=False)
    whole = (run / "rank1" / "trace.json.gz").read_bytes()
    (run / "rank1" / "trace.json.gz").write_bytes(whole[:20])
    write(run / "rank1" / "error.json", {"rank": 1, "message": "boom"})
    trace = open_trace(run)
    assert trace.ranks == [0]
    assert [note.what for note in trace.notes] == [
        "unfinished run: it has no result.json, and what is there may be incomplete",
        "rank 1 raised",
        "the trace of rank 1 could not be read",
    ]


def test_a_run_without_traces_is_an_empty_table(tmp_path: Path) -> None:
    write(tmp_path / "experiment.json", {})
    trace = open_trace(tmp_path)
    assert trace.ranks == []
    assert trace.origin_ns == 0
    assert trace.provenance is Provenance.RECORDED_ELSEWHERE
    for frame, schema in ((trace.spans, SPAN_SCHEMA), (trace.lanes, LANE_SCHEMA), (trace.steps, STEP_SCHEMA)):
        assert dict(frame.schema) == schema


def test_a_run_folder_opens_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(TraceError, match="opens alone"):
        open_trace([run, run / "rank0"])


def test_a_broken_file_of_a_run_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write(run / "environment.json", "{")
    with pytest.raises(TraceError, match=r"environment\.json should hold JSON"):
        open_trace(run)


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", [op("aten::mm", 1, 1)])
    code = (
        "import sys; from fsdpviz.trace import open_trace; from fsdpviz.analysis import report;"
        f"report(open_trace({str(path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- real recordings


@recordings
def test_ddp_on_two_a100() -> None:
    trace = open_trace(KINETO / "ddp_2xA100_rank0.json.gz")
    found = counts(trace)
    assert (found["all_reduce"], found["broadcast"]) == (15, 6)
    # 2,700 kernels: 21 of NCCL, and what Optimizer.step# launched is optimizer
    assert found["compute"] + found["optimizer"] == 2700 - 21
    assert (found["d2d"], found["memset"]) == (960, 114)
    assert trace.steps["step"].to_list() == [4, 5, 6]
    collectives = trace.spans.filter(pl.col("kind").is_in(["all_reduce", "broadcast"]))
    assert collectives["bytes"].null_count() == 0
    assert collectives["group"].unique().to_list() == ["0"]
    assert trace.spans.filter(pl.col("kind") == "all_reduce")["phase"].unique().to_list() == ["backward"]
    assert trace.spans.filter(pl.col("kind") == "all_reduce")["step"].value_counts().sort("step")[
        "count"
    ].to_list() == [5, 5, 5]


@recordings
def test_all_to_all_recorded_as_send_receive() -> None:
    trace = open_trace([KINETO / f"dlrm_8xV100_rank{rank}.json.gz" for rank in (2, 0, 1, 3)])
    assert trace.ranks == [0, 1, 2, 3]
    found = trace.spans.group_by("rank", "kind").len()
    for rank in trace.ranks:
        of = dict(found.filter(pl.col("rank") == rank).select(pl.col("kind").cast(pl.String), "len").rows())
        assert (of["all_to_all"], of["all_reduce"]) == (5, 3)
        assert "p2p" not in of


@recordings
def test_annotations_on_the_kernels_lane_are_not_counted_again() -> None:
    found = counts(open_trace(KINETO / "gp100_user_annotations.json.gz"))
    assert found["compute"] + found["optimizer"] == 130
    assert found["h2d"] == 10


@recordings
def test_waits_across_streams() -> None:
    found = counts(open_trace(KINETO / "cross_stream_waits.json.gz"))
    assert (found["wait"], found["compute"], found["memset"]) == (5, 3, 3)


@recordings
def test_a_collective_without_nccl() -> None:
    found = counts(open_trace(KINETO / "vllm_tp8_B200_rank0.json.gz"))
    assert (found["all_reduce"], found["all_gather"]) == (73, 1)


# six linear units of 1024 → 4096 → 1024: 8,393,728 parameters each, fp32
UNIT_BYTES = 8_393_728 * 4


@recordings
@pytest.mark.parametrize("name", ["plain", "async_prefetch", "offload", "hsdp"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_fsdp2_on_gloo_does_what_fsdp2_implies(name: str, rank: int) -> None:
    """Each unit is gathered for forward and for backward and reduced once; HSDP then reduces its shard, half."""
    trace = open_trace(KINETO / f"gloo/fsdp2_{name}_rank{rank}.json.gz")
    units = [str(index) for index in range(6)]
    is_hsdp = name == "hsdp"
    expected: list[tuple[Any, ...]] = [("all_gather", "forward", unit, 1, UNIT_BYTES) for unit in units]
    expected += [("all_gather", "backward", unit, 1, UNIT_BYTES) for unit in units]
    expected += [("reduce_scatter", "backward", unit, 1, UNIT_BYTES) for unit in units]
    expected += [("all_reduce", "backward", unit, 1, UNIT_BYTES // 2) for unit in units if is_hsdp]
    collectives = trace.spans.filter(pl.col("kind").is_in(["all_gather", "reduce_scatter", "all_reduce"]))
    found = collectives.group_by(pl.col("kind").cast(pl.String), "phase", "unit").agg(pl.len(), pl.col("bytes").sum())
    assert sorted(found.rows()) == sorted(expected)
    assert trace.notes == ()


@recordings
def test_backward_gathers_run_from_the_last_unit_to_the_first() -> None:
    trace = open_trace(KINETO / "gloo/fsdp2_async_prefetch_rank0.json.gz")
    gathers = trace.spans.filter(pl.col("kind") == "all_gather").sort("start_ns")
    assert gathers["unit"].to_list() == list("012345543210")


@recordings
def test_every_recording_opens() -> None:
    for path in sorted(KINETO.rglob("*.json.gz")):
        trace = open_trace(path)
        assert dict(trace.spans.schema) == SPAN_SCHEMA, path.name
        assert dict(trace.lanes.schema) == LANE_SCHEMA, path.name
        joined = trace.spans.join(trace.lanes, on=["rank", "lane"], how="anti")
        assert joined.is_empty(), path.name
        assert trace.lanes["sort"].sort().to_list() == list(range(len(trace.lanes))), path.name
        assert trace.lanes["name"].is_unique().all(), path.name
