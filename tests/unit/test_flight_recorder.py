"""Flight-recorder dumps: a lane a group, a span a collective, and what never ended."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_trace import SHARED, op, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.dumps import flight_recorder
from fsdpviz.trace.dumps.flight_recorder import part_of

DUMPS = SHARED / "flight_recorder"
recordings = pytest.mark.skipif(not DUMPS.is_dir(), reason="the shared recordings are not here")


def entry(name: str = "nccl:all_reduce", created: int = 1000, **more: Any) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "process_group": ("0", "default_pg"),
        "pg_id": 0,
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "time_created_ns": created,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        **more,
    }


def dump(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    return {"version": "2.9", "pg_config": {"0": group}, "pg_status": {}, "entries": list(entries), **more}


NOTICED = {"time_discovered_started_ns": 1500, "time_discovered_completed_ns": 1900}


def spans(*entries: dict[str, Any], **more: Any) -> pl.DataFrame:
    return part_of(dump(*entries, **more), "t").tables.spans


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # the issue, and no end
        ({}, (1000, 0)),
        # started, and still running
        ({"time_discovered_started_ns": 1500}, (1500, 0)),
        # noticed at both ends
        (NOTICED, (1500, 400)),
        # no start was noticed
        ({"time_discovered_completed_ns": 1900}, (1000, 900)),
        # 0.0003 ms on the device, which ended when that was noticed, or before
        (
            {"time_discovered_started_ns": 1500, "time_discovered_completed_ns": 1900, "duration_ms": 0.0003},
            (1600, 300),
        ),
        # longer than since its issue: the issue comes first
        ({"time_discovered_completed_ns": 1200, "duration_ms": 0.0003}, (1000, 300)),
        # JSON writes 0 for a time that is not known
        ({"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}, (1000, 0)),
    ],
)
def test_when_a_collective_ran(times: dict[str, Any], expected: tuple[int, int]) -> None:
    found = spans(entry(**times))
    assert found.select("start_ns", "duration_ns").row(0) == expected
    assert found["issued_ns"].to_list() == [1000]


@pytest.mark.parametrize(
    ("name", "is_p2p", "kind"),
    [
        ("nccl:all_reduce", False, "all_reduce"),
        ("nccl:all_reduce_barrier", False, "all_reduce"),
        ("nccl:_all_gather_base", False, "all_gather"),
        ("nccl:_reduce_scatter_base", False, "reduce_scatter"),
        ("nccl:reduce_scatter_tensor_coalesced", False, "reduce_scatter"),
        ("nccl:all_to_all", False, "all_to_all"),
        ("nccl:broadcast", False, "broadcast"),
        ("nccl:reduce", False, "p2p"),
        ("nccl:_reduce_oop", False, "p2p"),
        ("nccl:send 0->3", True, "p2p"),
        ("nccl:recv 3<-0", True, "p2p"),
        ("nccl:coalesced", True, "p2p"),
        ("gloo:all_gather", False, "all_gather"),
        ("gloo:barrier", False, "wait"),
        ("nccl:something_new", False, "host"),
    ],
)
def test_kinds(name: str, is_p2p: bool, kind: str) -> None:
    assert spans(entry(name, is_p2p=is_p2p))["kind"].to_list() == [kind]


def test_bytes_are_the_larger_side_and_types_are_named() -> None:
    """All-gather of 8 to 16 floats: 64 bytes; a coalesced one of two inputs; and sizes that say nothing."""
    found = spans(
        entry(created=1, output_sizes=[[8, 2]]),
        entry(created=2, input_sizes=[[3], [5]], input_dtypes=["BFloat16"] * 2, output_sizes=[], output_dtypes=[]),
        entry(created=3, input_sizes=[], input_dtypes=[], output_sizes=[], output_dtypes=[]),
        entry(created=4, input_dtypes=["Mystery"], output_dtypes=["Mystery"]),
        entry(created=5, input_sizes=[[-1]], output_sizes="x"),
    )
    assert found.select("bytes", "dtype").rows() == [
        (64, "float32"),
        (16, "bfloat16"),
        (None, None),
        (None, None),
        (None, "float32"),
    ]


def test_an_all_to_all_is_as_large_as_what_it_sends() -> None:
    uneven = {"input_sizes": [[100]], "output_sizes": [[300]]}
    found = spans(
        entry("nccl:all_to_all", created=1, **uneven),
        entry("nccl:all_reduce", created=2, **uneven),
        entry("nccl:all_to_all", created=3, input_sizes=[], output_sizes=[[300]]),
    )
    assert found["bytes"].to_list() == [400, 1200, None]


def test_each_tensor_has_a_type_of_its_own() -> None:
    """40 floats and 80 bf16 numbers are 320 bytes; a type that is not known leaves their sum unknown."""
    coalesced = {"input_sizes": [[10], [20]], "output_sizes": [[40], [80]]}
    found = spans(
        *(
            entry("nccl:allgather_into_tensor_coalesced", number, input_dtypes=types, output_dtypes=types, **coalesced)
            for number, types in enumerate(
                (["Float", "BFloat16"], ["Float", "Float"], ["Float", "Mystery"], "Float", ["Float"]), start=1
            )
        )
    )
    assert found.select("bytes", "dtype").rows() == [
        (320, None),
        (480, "float32"),
        (None, None),
        (480, "float32"),  # as version 1 has it
        (480, "float32"),
    ]


def test_sizes_that_are_shared_keep_their_own_types() -> None:
    """In a pickle two entries may share a list."""
    sizes = [[8]]
    found = spans(
        *(
            entry(created=number, input_sizes=sizes, output_sizes=sizes, input_dtypes=[one], output_dtypes=[one])
            for number, one in enumerate(("Float", "Half"), start=1)
        )
    )
    assert found["bytes"].to_list() == [32, 16]


@pytest.mark.parametrize("is_one_list", [True, False])
def test_shapes_that_are_shared_are_counted_once(monkeypatch: pytest.MonkeyPatch, is_one_list: bool) -> None:
    """Entries of a pickle share one list of shapes, or lists of their own share one shape; types are each one's own."""
    counted: list[Any] = []
    product = flight_recorder.prod
    monkeypatch.setattr(flight_recorder, "prod", lambda shape: counted.append(shape) or product(shape))
    shape = [1] * 63 + [2]
    shapes = [shape] * 10
    entries = [
        entry(created=number, input_sizes=shapes if is_one_list else [shape] * 10, output_sizes=[], input_dtypes=types)
        for number, types in enumerate([*([] for _ in range(50)), ["Half"], ["Half"] * 10, ["Half"] * 9], start=1)
    ]
    assert spans(*entries)["bytes"].to_list() == [None] * 50 + [40, 40, None]
    assert len(counted) == 1


def test_groups_lanes_and_sequence_numbers() -> None:
    part = part_of(
        dump(
            entry(created=1),
            entry(created=2, process_group=["7", "mesh_shard"], collective_seq_id=5),
            entry("nccl:send 0->1", created=3, is_p2p=True, p2p_seq_id=9),
            entry(created=4, process_group=["8", "undefined"]),
        ),
        "t",
    )
    assert part.tables.spans.sort("start_ns").select("lane", "group", "sequence").rows() == [
        (0, "0", 1),
        (1, "7", 5),
        (0, "0", 9),
        (2, "8", 1),
    ]
    assert part.tables.lanes["name"].to_list() == ["default_pg", "mesh_shard", "group 8"]
    assert part.tables.groups.select("group", "description", "size", "ranks").rows() == [
        ("0", "default_pg", 2, [0, 1]),
        ("7", "mesh_shard", None, None),
        ("8", None, None, None),
    ]


def test_what_never_ended_is_told_apart() -> None:
    """Group 0 completed number 1: the first two ended unseen; the send says nothing; numbers 2 and 3 hang."""
    part = part_of(
        dump(
            entry(created=1),
            entry(created=2, state="completed", collective_seq_id=8),
            entry("nccl:send 0->1", created=3, is_p2p=True, p2p_seq_id=1),
            entry(created=4, collective_seq_id=2, state="started"),
            entry(created=5, collective_seq_id=3),
            pg_status={"0": {"last_completed_collective": "1", "last_enqueued_collective": 3}},
        ),
        "t",
    )
    assert [(note.what, note.count, note.example) for note in part.tables.notes] == [
        (
            "collectives that had not ended at the dump (never seen to start), shown without length",
            2,
            "nccl:send 0->1 1 of default_pg",
        ),
        (
            "collectives that had not ended at the dump (still running), shown without length",
            1,
            "nccl:all_reduce 2 of default_pg",
        ),
        ("collectives that ended at a time nobody recorded, shown without length", 2, ""),
    ]
    about = part.about["flight_recorder"]
    assert [one["sequence"] for one in about["unfinished"]] == [1, 2, 3]
    assert about["status"] == {"0": {"last_completed_collective": 1, "last_enqueued_collective": 3}}


def test_the_rank_is_the_one_that_is_in_all_groups(tmp_path: Path) -> None:
    groups = {name: {"desc": "", "ranks": ranks} for name, ranks in (("0", "[0, 1, 2, 3]"), ("1", "[2, 3]"))}
    assert part_of(dump(pg_config=groups), "t").rank is None  # 2 or 3
    groups["2"] = {"desc": "", "ranks": "[0, 2]"}
    assert part_of(dump(pg_config=groups), "t").rank == 2
    (tmp_path / "dump_7").write_bytes(pickle.dumps(dump(entry()), 2))
    assert open_trace(tmp_path / "dump_7").ranks == [7]  # by its name


def as_json(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "flight_rank3.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True))
    return path


def test_json_dumps_open_too(tmp_path: Path) -> None:
    trace = open_trace(as_json(tmp_path, dump(entry(process_group=["0", "default_pg"]))))
    assert trace.ranks == [3]
    assert trace.spans["kind"].to_list() == ["all_reduce"]
    assert trace.about["flight_recorder"]["3"]["version"] == "2.9"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"entries": [{"a": 1}', "cut short"),
        ('{"entries": ' + "[" * 100_000, "nested too deeply"),
        ('{"entries": []}', "no trace"),
    ],
)
def test_json_that_is_no_dump(tmp_path: Path, text: str, cause: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=cause) as caught:
        open_trace(tmp_path / "t.json")
    assert "\n" not in str(caught.value)


def test_dumps_beside_traces_are_left_out_and_noted(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [op("aten::mm", 1, 1)], rank=0)
    (tmp_path / "dump_0").write_bytes(pickle.dumps(dump(entry())))
    trace = open_trace(tmp_path)
    assert trace.spans["name"].to_list() == ["aten::mm"]
    assert [note.what for note in trace.notes] == [
        "flight-recorder dumps beside traces, left out; open them by themselves"
    ]


odd = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers() | st.text(max_size=2), max_size=3)
odd |= st.floats() | st.lists(st.lists(st.integers(-1, 5), max_size=2), max_size=2)


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(entry(), odd)), max_size=4), odd, odd)
def test_any_types_anywhere_do_no_harm(entries: list[dict[str, Any]], config: Any, status: Any) -> None:
    whole = [entry() | one for one in entries]
    part = part_of({"entries": whole, "pg_config": {"0": config}, "pg_status": {"0": status}}, "t")
    left_out = sum(note.count for note in part.tables.notes if "left out" in note.what)
    assert len(part.tables.spans) + left_out == len(whole)


# -- real dumps of a job with an injected fault


@recordings
@pytest.mark.parametrize("job", ["gpu_error_1st", "lock_gil_2nd"])
def test_sixteen_ranks_of_a_job_that_hung(job: str) -> None:
    trace = open_trace(DUMPS / job)
    entries = {rank: pickle.loads((DUMPS / job / f"dump_{rank}").read_bytes())["entries"] for rank in range(16)}
    # the log beside the dumps is no trace, and an empty ring has no span
    assert trace.ranks == [rank for rank, content in entries.items() if content]
    assert Counter(trace.spans["rank"].to_list()) == {rank: len(of) for rank, of in entries.items() if of}
    created = sorted((rank, one["time_created_ns"]) for rank, of in entries.items() for one in of)
    assert trace.spans.select("rank", "start_ns").sort("rank", "start_ns").rows() == created
    assert trace.spans["duration_ns"].unique().to_list() == [0]
    gathers = trace.spans.filter((pl.col("kind") == "all_gather") & (pl.col("dtype") == "bfloat16"))
    assert gathers["bytes"].unique().to_list() == [8192 * 5120 * 2]
    what = {note.what: note.count for note in trace.notes}
    assert what["files of the folder that are no traces, left out"] == 1
    assert (
        what["collectives that had not ended at the dump (never seen to start), shown without length"]
        == trace.spans.height
    )


@recordings
def test_ranks_are_told_without_their_names(tmp_path: Path) -> None:
    copied = tmp_path / "some file"
    copied.write_bytes((DUMPS / "gpu_error_1st" / "dump_14").read_bytes())
    trace: Trace = open_trace(copied)
    assert trace.ranks == [14]
    assert len(trace.about["flight_recorder"]["14"]["unfinished"]) == 43
