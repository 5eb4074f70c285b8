"""Nsight Systems' SQLite exports: through the same tables as Kineto, one rank a process."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_nsys import call, global_tid, push_pop, work, write_export
from make_trace import SHARED

from fsdpviz.base.errors import TraceError
from fsdpviz.base.provenance import Provenance
from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.nsight.names import copy_name, range_category, range_name

NSYS = SHARED / "nsys"
recordings = pytest.mark.skipif(not NSYS.is_dir(), reason="the shared recordings are not here")

KERNEL, LAUNCH, COPY, SHORT = 1, 2, 3, 4
STRINGS = {KERNEL: "gemm<float>", LAUNCH: "cudaLaunchKernel_v7000", COPY: "cudaMemcpyAsync_v3020", SHORT: "gemm"}


def tables(*, processes: tuple[int, ...] = (100, 200), gpus: tuple[int, ...] = (0, 1)) -> dict[str, list[dict]]:
    """Each process, on its own GPU, gathers unit ``blocks.0`` from pinned memory and runs one kernel:

    host   pre_forward 0…100, calls at 10 and 60 (the second after it)
    GPU    copy 20…50 (1000 bytes, launched at 10), kernel 70…90 (launched at 110), a wait 50…70
    """
    made: dict[str, list[dict]] = {name: [] for name in ("KERNEL", "MEMCPY", "SYNCHRONIZATION", "RUNTIME")}
    ranges = []
    for process, gpu in zip(processes, gpus, strict=True):
        ranges += [
            push_pop(0, 100, "FSDP::pre_forward (blocks.0), op_id = 7", process=process),
            push_pop(105, 130, "aten::mm, seq = 3, op_id = 8", process=process),
        ]
        made["MEMCPY"].append(
            work(20, 50, process=process, gpu=gpu, correlation=1, copyKind=1, srcKind=1, dstKind=2, bytes=1000)
        )
        made["KERNEL"].append(
            work(120, 150, process=process, gpu=gpu, correlation=2, demangledName=KERNEL, shortName=SHORT)
        )
        # the GPU that CUPTI states for a wait is 0 for all; its context tells
        made["SYNCHRONIZATION"].append(work(50, 70, process=process, gpu=0, correlation=3, syncType=2))
        made["RUNTIME"] += [
            call(10, 12, process=process, correlation=1, name=COPY),
            call(110, 112, process=process, correlation=2, name=LAUNCH),
        ]
    return {f"CUPTI_ACTIVITY_KIND_{name}": rows for name, rows in made.items()} | {"NVTX_EVENTS": ranges}


def made(path: Path, content: dict[str, list[dict]] | None = None, strings: dict[int, str] | None = None) -> Trace:
    return open_trace(write_export(path, tables() if content is None else content, strings or STRINGS))


def row(trace: Trace, rank: int, **where: Any) -> dict[str, Any]:
    return trace.spans.filter(pl.col("rank") == rank).row(by_predicate=pl.col("name") == where["name"], named=True)


def test_two_gpus_in_one_file_are_two_ranks(tmp_path: Path) -> None:
    trace = made(tmp_path / "no_ending_that_tells")
    assert trace.ranks == [0, 1]
    assert trace.provenance is Provenance.RECORDED_ELSEWHERE
    for rank in (0, 1):
        copy = row(trace, rank, name="Memcpy HtoD (Pinned -> Device)")
        assert (copy["start_ns"], copy["duration_ns"], copy["bytes"]) == (20, 30, 1000)
        assert (copy["kind"], copy["unit"], copy["phase"], copy["launch"]) == ("h2d", "blocks.0", "forward", 1)
        kernel = row(trace, rank, name="gemm<float>")
        assert (kernel["kind"], kernel["unit"], kernel["start_ns"], kernel["duration_ns"]) == ("compute", None, 120, 30)
        assert row(trace, rank, name="FSDP::pre_forward (blocks.0)")["kind"] == "annotation"
        assert row(trace, rank, name="aten::mm")["kind"] == "host"
        assert row(trace, rank, name="cudaLaunchKernel")["kind"] == "host"
        assert row(trace, rank, name="Stream Wait Event")["kind"] == "wait"
        # the wait lies on this rank's own GPU, whatever the file states
        assert trace.lanes.filter(pl.col("rank") == rank)["name"].to_list() == ["stream 7", "main thread"]
    assert [note.what for note in trace.notes] == ["ranks taken from the GPUs' numbers; the export does not tell them"]
    assert open_trace(tmp_path / "no_ending_that_tells", ranks=[1]).ranks == [1]


@pytest.mark.parametrize(
    ("gpus", "ranks", "note"),
    [
        ((2, 5), [2, 5], "ranks taken from the GPUs' numbers"),
        ((0, 0), [0, 1], "ranks that no file tells"),  # each process sees its own GPU only
    ],
)
def test_ranks_from_gpus(tmp_path: Path, gpus: tuple[int, int], ranks: list[int], note: str) -> None:
    trace = made(tmp_path / "t.sqlite", tables(gpus=gpus))
    assert trace.ranks == ranks
    assert trace.notes[0].what.startswith(note)


def test_two_hosts_that_each_number_their_gpus_from_0(tmp_path: Path) -> None:
    for host in ("a", "b"):
        write_export(tmp_path / f"host_{host}.sqlite", tables(), STRINGS)
    trace = open_trace(tmp_path)
    assert trace.ranks == [0, 1, 2, 3]
    assert [Path(file).name for file in trace.about["files"].values()] == [f"host_{host}.sqlite" for host in "aabb"]
    assert [(note.what[:24], note.count) for note in trace.notes] == [("ranks that no file tells", 4)]


def test_nccl_says_the_rank_where_its_payloads_were_exported(tmp_path: Path) -> None:
    content = tables()
    for process, rank in ((100, 9), (200, 8)):
        for world, number in ((2, 1), (16, rank)):  # the larger communicator is the job's
            payload = f'{{"No. of ranks": {world}, "Rank": {number}}}'
            content["NVTX_EVENTS"].append(push_pop(1, 2, "ncclCommInitRank", process=process, jsonText=payload))
    assert made(tmp_path / "t.sqlite", content).ranks == [8, 9]


@pytest.mark.parametrize(("name", "rank"), [("report_rank3.sqlite", 3), ("report.sqlite", 0)])
def test_one_process_is_the_rank_that_the_name_tells(tmp_path: Path, name: str, rank: int) -> None:
    assert made(tmp_path / name, tables(processes=(100,), gpus=(4,))).ranks == [rank]


def said(*ranks: tuple[int, int]) -> dict[str, list[dict]]:
    """One process, and what NCCL says of its communicators: (rank, number of ranks)."""
    content = tables(processes=(100,), gpus=(4,))
    for rank, world in ranks:
        payload = f'{{"No. of ranks": {world}, "Rank": {rank}}}'
        content["NVTX_EVENTS"].append(push_pop(1, 2, "ncclAllReduce", process=100, jsonText=payload))
    return content


@pytest.mark.parametrize(
    ("name", "rank", "is_noted"),
    [
        ("rank5.sqlite", 5, True),  # rank 1 of a part of the job
        ("rank1.sqlite", 1, False),
        ("report.sqlite", 1, False),
        ("report_7.sqlite", 1, False),  # a number that may count anything
        ("local_rank5.sqlite", 1, False),
    ],
)
def test_a_name_that_says_rank_outdoes_the_ranks_of_a_communicator(
    tmp_path: Path, name: str, rank: int, *, is_noted: bool
) -> None:
    trace = made(tmp_path / name, said((1, 2)))
    assert trace.ranks == [rank]
    assert any(note.what.startswith("ranks taken from the file's name") for note in trace.notes) == is_noted


def test_equally_large_communicators_that_say_two_ranks_tell_none(tmp_path: Path) -> None:
    trace = made(tmp_path / "t.sqlite", said((1, 2), (0, 2)))
    assert trace.ranks == [0]
    assert trace.notes[0].what.startswith("ranks that no file tells")
    assert made(tmp_path / "t.sqlite", said((1, 2), (0, 2), (3, 4))).ranks == [3]


def test_one_process_with_two_gpus(tmp_path: Path) -> None:
    """Thread 1 launches on GPU 0, thread 2 on GPU 1, thread 3 on none: it is shown with the first GPU."""
    content: dict[str, list[dict]] = {
        "CUPTI_ACTIVITY_KIND_KERNEL": [
            work(10 * gpu, 10 * gpu + 5, process=100, gpu=gpu, correlation=gpu + 1, demangledName=KERNEL)
            for gpu in (0, 1)
        ],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [
            call(1, 2, process=100, thread=gpu + 1, correlation=gpu + 1, name=LAUNCH) for gpu in (0, 1)
        ],
        "NVTX_EVENTS": [push_pop(0, 9, f"work {thread}", process=100, thread=thread) for thread in (1, 2, 3)],
    }
    trace = made(tmp_path / "t.sqlite", content)
    names = trace.spans.filter(pl.col("kind") == "annotation").group_by("rank").agg(pl.col("name").sort()).sort("rank")
    assert names.rows() == [(0, ["work 1", "work 3"]), (1, ["work 2"])]
    assert trace.spans.filter(pl.col("kind") == "compute")["launch"].to_list() == [1, 2]


PEER_COPY = {"copyKind": 10, "srcKind": 2, "dstKind": 2, "bytes": 100}


@pytest.mark.parametrize(
    ("table", "stray"),
    [
        ("MEMCPY", work(210, 220, process=200, gpu=0, correlation=9, **PEER_COPY)),
        ("MEMSET", work(210, 220, process=200, gpu=0, correlation=9, bytes=4)),
        ("SYNCHRONIZATION", work(210, 220, process=200, gpu=0, syncType=4) | {"contextId": 77}),
        ("SYNCHRONIZATION", work(210, 220, process=200, gpu=0, syncType=4) | {"contextId": None}),
    ],
)
@pytest.mark.parametrize("is_stated", [False, True])
def test_what_a_process_leaves_on_anothers_gpu_makes_no_rank(
    tmp_path: Path, table: str, stray: dict[str, Any], *, is_stated: bool
) -> None:
    content = tables()
    content.setdefault(f"CUPTI_ACTIVITY_KIND_{table}", []).append(stray)
    if is_stated:
        for process, rank in ((100, 5), (200, 4)):
            payload = f'{{"No. of ranks": 8, "Rank": {rank}}}'
            content["NVTX_EVENTS"].append(push_pop(1, 2, "ncclCommInitRank", process=process, jsonText=payload))
    trace = made(tmp_path / "t.sqlite", content)
    assert trace.ranks == ([4, 5] if is_stated else [0, 1])
    rank = 4 if is_stated else 1
    strays = trace.spans.filter((pl.col("start_ns") == 210) & (pl.col("duration_ns") == 10))
    assert strays["rank"].to_list() == [rank]
    assert len(trace.spans.filter(pl.col("rank") == rank)) == 8 + is_stated
    if table == "SYNCHRONIZATION":  # on the GPU of its process, though the file says 0
        lanes = trace.lanes.filter((pl.col("rank") == rank) & pl.col("is_device"))
        assert lanes["name"].to_list() == ["stream 7"]


def test_a_process_that_only_waits_is_no_rank(tmp_path: Path) -> None:
    content = tables()
    content["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].append(work(210, 220, process=300, gpu=0, syncType=4))
    trace = made(tmp_path / "t.sqlite", content)
    assert trace.ranks == [0, 1]
    assert ("calls, waits and ranges of processes that used no GPU, left out", 1) in [
        (note.what, note.count) for note in trace.notes
    ]
    alone = {"CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [work(1, 3, process=300, gpu=0, syncType=4)]}
    alone["NVTX_EVENTS"] = [{"start": 5, "eventType": 34, "text": "a mark"}]
    assert made(tmp_path / "t.sqlite", alone).spans["name"].to_list() == ["Context Sync"]


def test_a_process_with_kernels_on_two_gpus_and_one_that_copies_only(tmp_path: Path) -> None:
    content = {
        "CUPTI_ACTIVITY_KIND_KERNEL": [work(1, 5, process=100, gpu=gpu, demangledName=KERNEL) for gpu in (0, 1)],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [
            work(6, 9, process=100, gpu=1, **PEER_COPY),
            work(6, 9, process=200, gpu=2, **PEER_COPY),
        ],
    }
    trace = made(tmp_path / "t.sqlite", content)
    assert trace.spans.sort("rank", "start_ns").select("rank", "start_ns").rows() == [(0, 1), (1, 1), (1, 6), (2, 6)]


def test_what_is_left_out_or_mended_is_counted(tmp_path: Path) -> None:
    content = tables(processes=(100,), gpus=(0,))
    content["NVTX_EVENTS"] += [
        push_pop(140, None, "cut by the end", process=100),
        {"start": 5, "eventType": 34, "text": "a mark", "globalTid": global_tid(100, 100)},
        push_pop(1, 2, "elsewhere", process=300),  # a process without a GPU
        {"start": 0, "eventType": 75, "text": "NCCL", "globalTid": global_tid(100, 100)},  # names a domain
    ]
    content["CUPTI_ACTIVITY_KIND_KERNEL"] += [
        work(200, 190, process=100, gpu=0, demangledName=KERNEL),
        work(None, 190, process=100, gpu=0, demangledName=KERNEL),  # type: ignore[arg-type]
        work(300, 310, process=100, gpu=0, demangledName=99),  # a string that is not there
    ]
    trace = made(tmp_path / "t.sqlite", content)
    assert {note.what: note.count for note in trace.notes} == {
        "NVTX marks and other events without a duration, left out": 1,
        "NVTX ranges that the recording's end cut, ended there": 1,
        "GPU rows without a start or a process, left out": 1,
        "GPU rows that do not end after they start, taken as 0 long": 1,
        "calls, waits and ranges of processes that used no GPU, left out": 1,
        "device spans without a launch in the file: no unit, no phase": 2,
        "ranks that no file tells, numbered in the order of files, GPUs and processes": 1,
    }
    assert row(trace, 0, name="cut by the end")["duration_ns"] == 170  # until the last kernel's end, 310
    assert row(trace, 0, name="kernel without a name")["duration_ns"] == 10


def test_tables_may_be_missing_and_cells_of_any_type(tmp_path: Path) -> None:
    content = {"CUPTI_ACTIVITY_KIND_KERNEL": [work(1, 3, process=100, gpu=0, correlation="x")]}  # type: ignore[arg-type]
    trace = made(tmp_path / "t.sqlite", content)
    assert trace.spans.select("name", "duration_ns", "launch").rows() == [("kernel without a name", 2, None)]
    trace = made(tmp_path / "t.sqlite", {"NVTX_EVENTS": [push_pop(1, 3, "alone", process=100)]})
    assert trace.spans["name"].to_list() == ["alone"]


@pytest.mark.parametrize(("table", "end"), [("KERNEL", 400), ("RUNTIME", 500), ("NVTX", 600)])
def test_a_range_without_an_end_lasts_until_the_recordings(tmp_path: Path, table: str, end: int) -> None:
    content = tables(processes=(100,), gpus=(0,))
    content["NVTX_EVENTS"].append(push_pop(140, None, "step 2", process=100))
    if table == "NVTX":
        content["NVTX_EVENTS"].append(push_pop(end - 10, end, "the last", process=100))
    elif table == "RUNTIME":
        content["CUPTI_ACTIVITY_KIND_RUNTIME"].append(call(end - 10, end, process=100, correlation=9, name=LAUNCH))
    else:
        content["CUPTI_ACTIVITY_KIND_KERNEL"].append(work(end - 10, end, process=100, gpu=0, demangledName=KERNEL))
    span = row(made(tmp_path / "t.sqlite", content), 0, name="step 2")
    assert (span["start_ns"], span["duration_ns"]) == (140, end - 140)


def test_times_that_no_clock_tells_are_left_out(tmp_path: Path) -> None:
    most = 2**63 - 1
    content = tables(processes=(100,), gpus=(0,))
    content["CUPTI_ACTIVITY_KIND_KERNEL"] += [
        work(start, end, process=100, gpu=0, demangledName=99)
        for start, end in ((most - 10, most - 1), (-most, most), (-(2**61) - 1, 9), (9, 2**61 + 1), (2**62, -most))
    ]
    content["CUPTI_ACTIVITY_KIND_RUNTIME"].append(call(most - 9, most, process=100, correlation=9, name=LAUNCH))
    content["NVTX_EVENTS"] += [
        push_pop(-most, -most + 1, "long ago", process=100),
        push_pop(most - 1, most, "late", process=100),
        push_pop(140, None, "step 2", process=100),
    ]
    trace = made(tmp_path / "t.sqlite", content)
    left_out = {note.what: note.count for note in trace.notes if "no clock" in note.what}
    assert left_out == {
        "GPU rows with a time that no clock tells, left out": 5,
        "CUDA calls with a time that no clock tells, left out": 1,
        "NVTX ranges with a time that no clock tells, left out": 2,
    }
    assert len(trace.spans) == 8  # seven of the process, and the step, which ends with the kernel
    assert row(trace, 0, name="step 2")["duration_ns"] == 10


def test_names_that_are_no_utf8(tmp_path: Path) -> None:
    path = write_export(tmp_path / "t.sqlite", tables(processes=(100,), gpus=(0,)), STRINGS)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE StringIds SET value = CAST(x'67ff6d' AS TEXT) WHERE id = ?", (KERNEL,))
    trace = open_trace(path)
    assert row(trace, 0, name="g\ufffdm")["kind"] == "compute"
    assert ("names with bytes that are no UTF-8, replaced", 1) in [(note.what, note.count) for note in trace.notes]


def test_graphs_recorded_as_a_whole_are_work(tmp_path: Path) -> None:
    content = tables(processes=(100,), gpus=(0,))
    content["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = [work(200, 260, process=100, gpu=0, graphId=5)]
    assert row(made(tmp_path / "t.sqlite", content), 0, name="CUDA graph 5")["kind"] == "compute"


def test_names() -> None:
    assert copy_name(1, 1, 2, {}) == "Memcpy HtoD (Pinned -> Device)"
    assert copy_name(2, 2, 0, {}) == "Memcpy DtoH (Device -> Pageable)"
    assert copy_name(8, 2, 2, {}) == "Memcpy DtoD (Device -> Device)"
    assert copy_name(10, 2, 2, {}) == "Memcpy PtoP (Device -> Device)"
    assert copy_name(5, 0, 2, {5: "HTOD"}) == "Memcpy HtoD (Pageable -> Device)"  # the file's own enumeration
    assert copy_name(None, None, 77, {}) == "Memcpy of unknown kind (Unknown -> Unknown)"
    assert range_name("aten::mm, op_id = 3, sizes = [[1, 2], []]") == "aten::mm"
    assert range_name("FSDP::pre_forward (a), op_id = 5") == "FSDP::pre_forward (a)"
    assert range_name("step 3, fast") == "step 3, fast"
    assert range_category("AddmmBackward0, seq = 12") == "cpu_op"
    assert range_category("FSDP::pre_forward (a), op_id = 5") == "user_annotation"
    assert range_category("my range") == "user_annotation"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("aten::mm, op_id = 7", "aten::mm"),
        ("aten::mm, seq = 3, op_id = 7, sizes = [[1, 2]], input_op_ids = [(6,0)]", "aten::mm"),
        ("aten::mm, seq = 3", "aten::mm"),
        ("aten::mm, seq = 3, sizes = [[1, 2], []]", "aten::mm"),
        ("mul, op_id = 7", "mul"),
        ("AddmmBackward0, seq = 12", "AddmmBackward0"),
        ("AddmmBackward, seq = 12, sizes = [[1]]", "AddmmBackward"),
        ("RegisterPostBackwardFunction, seq = 12, op_id = 9", "RegisterPostBackwardFunction"),
        (
            "autograd::engine::evaluate_function: M, seq = 1",
            "autograd::engine::evaluate_function: M",
        ),
    ],
)
def test_names_of_operators_lose_the_tail(text: str, name: str) -> None:
    assert (range_name(text), range_category(text)) == (name, "cpu_op")


@pytest.mark.parametrize(
    "text",
    [
        "prefill, seq = 4096, bs = 2",
        "attention, seq = 4096",
        "train, seq = 5",
        "aten::mm, seq = 3, bs = 2",
        "Backward, seq = 4096, bs = 2",
        "step 3, op_id = many",
    ],
)
def test_names_of_a_persons_ranges_stay_whole(text: str) -> None:
    assert (range_name(text), range_category(text)) == (text, "user_annotation")


@pytest.mark.parametrize(
    ("statements", "cause"),
    [
        (["CREATE TABLE t (a)"], "no export of Nsight Systems"),
        (["CREATE TABLE StringIds (id, value)"], "no export of Nsight Systems"),
        (["CREATE TABLE StringIds (id, value)", "CREATE TABLE NVTX_EVENTS (start)"], "no CUDA call and no NVTX range"),
        (
            # a view could compute for ever: it is not looked at
            [
                "CREATE TABLE StringIds (id, value)",
                "CREATE TABLE META_DATA_EXPORT (name, value)",
                "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS "
                "(SELECT 1 UNION ALL SELECT start + 1 FROM n) SELECT * FROM n",
            ],
            "no CUDA call and no NVTX range",
        ),
        (
            # a column that is computed by a function when it is read
            [
                "CREATE TABLE StringIds (id, value)",
                "CREATE TABLE NVTX_EVENTS (start, text GENERATED ALWAYS AS (hex(zeroblob(9))))",
                "INSERT INTO NVTX_EVENTS VALUES (1)",
            ],
            "no CUDA call and no NVTX range",
        ),
    ],
)
def test_databases_that_are_no_export(tmp_path: Path, statements: list[str], cause: str) -> None:
    path = tmp_path / "t.sqlite"
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    with pytest.raises(TraceError, match=cause) as caught:
        open_trace(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_is_read_as_it_lies(tmp_path: Path) -> None:
    path = write_export(tmp_path / "t.sqlite", tables(), STRINGS)
    before = path.read_bytes(), path.stat().st_mtime_ns
    open_trace(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert [child.name for child in tmp_path.iterdir()] == ["t.sqlite"]  # no journal, no lock


# -- real recordings: counted here with SQL of its own


@recordings
def test_fsdp2_cpu_offload_on_two_h100() -> None:
    path = NSYS / "fsdp2_cpu_offload_2xH100.sqlite"
    trace = open_trace(path)
    with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as connection:
        expected = connection.execute(
            "SELECT m.deviceId, substr(n.text, 20, instr(n.text, ')') - 20), count(*), sum(m.bytes), min(m.start) "
            "FROM CUPTI_ACTIVITY_KIND_MEMCPY m JOIN CUPTI_ACTIVITY_KIND_RUNTIME r "
            "ON r.correlationId = m.correlationId AND r.globalTid >> 24 = m.globalPid >> 24 JOIN NVTX_EVENTS n "
            "ON n.globalTid = r.globalTid AND n.start <= r.start AND n.end > r.start "
            "WHERE n.text LIKE 'FSDP::pre_forward (%' AND m.copyKind = 1 GROUP BY 1, 2"
        ).fetchall()
    copies = trace.spans.filter((pl.col("kind") == "h2d") & (pl.col("phase") == "forward"))
    found = copies.group_by("rank", "unit").agg(pl.len(), pl.col("bytes").sum(), pl.col("start_ns").min())
    assert sorted(found.rows()) == sorted(expected)
    assert sum(count for _, _, count, _, _ in expected) == 34
    h2d = trace.spans.filter(pl.col("kind") == "h2d")
    assert h2d.group_by("rank").agg(pl.len(), pl.col("bytes").sum()).sort("rank").rows() == [
        (0, 133, 12784918528),
        (1, 133, 12784918528),
    ]
    assert trace.spans.filter(pl.col("kind") == "compute").group_by("rank").len().sort("rank").rows() == [
        (0, 1033),
        (1, 1033),
    ]


@recordings
def test_fsdp2_checkpointing_on_two_h100() -> None:
    trace = open_trace(NSYS / "fsdp2_checkpointing_2xH100.sqlite")
    assert trace.ranks == [0, 1]
    found = trace.spans.group_by("rank", pl.col("kind").cast(pl.String)).len()
    of = {(rank, kind): count for rank, kind, count in found.rows()}
    # 66 kernels of NCCL's, all SendRecv; one on each rank has its launch outside the window
    assert [of[rank, kind] for rank in (0, 1) for kind in ("all_to_all", "p2p")] == [32, 1, 32, 1]
    assert [of[0, "compute"] + 33, of[1, "compute"] + 33] == [1993, 2017]
    assert [of[0, "memset"], of[1, "memset"]] == [133, 136]
    units = trace.spans.filter(pl.col("unit").is_not_null())["unit"].unique()
    assert units.str.starts_with("blocks.").all()


def test_rows_that_lie_in_a_journal_beside_the_export_are_not_read_and_noted(tmp_path):
    path = write_export(tmp_path / "job.sqlite", tables(), STRINGS)
    before = {note.what for note in open_trace(path).notes}
    with sqlite3.connect(path) as writer:
        assert writer.execute("PRAGMA journal_mode = WAL").fetchone() == ("wal",)
        writer.execute("PRAGMA wal_autocheckpoint = 0")
    writer.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    writer.commit()
    beside = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    trace = open_trace(path)
    assert len(trace.spans.filter(pl.col("kind") == "compute")) == 2
    assert [note.example for note in trace.notes if note.what not in before] == ["job.sqlite-wal"]
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == beside
    writer.close()  # which moves them into the file
    assert not len(open_trace(path).spans.filter(pl.col("kind") == "compute"))


def test_a_kernel_without_a_device_is_of_the_first(tmp_path: Path) -> None:
    rows = [work(10, 20, process=7, gpu=0, correlation=1), work(30, 40, process=7, gpu=0, correlation=2)]
    rows[1]["deviceId"] = None
    path = write_export(tmp_path / "t.sqlite", {"CUPTI_ACTIVITY_KIND_KERNEL": rows}, {1: "gemm"})
    trace = open_trace(path)
    assert trace.spans["start_ns"].to_list() == [10, 30]
    assert trace.lanes["process"].to_list() == ["0"]
