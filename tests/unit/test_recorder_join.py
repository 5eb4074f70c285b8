"""Group and number of a run's collectives, from the flight recorder's dump beside its trace."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from make_trace import mark, op, write_trace

from fsdpviz.trace import Trace, open_trace

US = 1000
BASE_NS = 1_795_991_774_000_000_000
SHAPES = {"Input Dims": [[80], [40]], "Input type": ["float", "float"]}


def entry(time_us: float, sequence: Any, group: Any = ("3", "mesh_shard")) -> dict[str, Any]:
    return {
        "time_created_ns": BASE_NS + int(time_us * US),
        "collective_seq_id": sequence,
        "process_group": list(group) if isinstance(group, tuple) else group,
        "profiling_name": "gloo:all_gather",
    }


def run_of(folder: Path, events: Iterable[Any], entries: Any) -> Trace:
    write_trace(folder / "rank0" / "trace.json.gz", events, rank=0, baseTimeNanoseconds=BASE_NS)
    (folder / "rank0" / "flight.json").write_text(json.dumps({"entries": entries}))
    for name in ("experiment.json", "environment.json", "result.json"):
        (folder / name).write_text("{}")
    return open_trace(folder)


def gathers(count: int = 2) -> list[dict[str, Any]]:
    """Gathers issued at 0, 100, … for 20 µs, which run from 5 to 35 after."""
    found = []
    for at in range(0, 100 * count, 100):
        found += [
            op("c10d::_allgather_base_", at, 20, **SHAPES),
            mark("gloo:all_gather", at + 5, 30, thread=200, **{"Input Dims": [[40]], "Input type": ["float"]}),
        ]
    return found


def told(trace: Trace) -> list[tuple[Any, ...]]:
    return trace.collectives.select("group", "sequence").rows()


def test_an_entry_inside_the_operator_tells_its_group_and_number(tmp_path: Path) -> None:
    entries = [entry(-500, 6), entry(3, 7), entry(60, 99), entry(110, 8, ("4", "mesh_tp"))]  # 60: of no operator
    assert told(run_of(tmp_path, gathers(), entries)) == [("3", 7), ("4", 8)]


@pytest.mark.parametrize("numbers", [{"p2p_seq_id": 4, "collective_seq_id": 9, "seq_id": 1}, {"seq_id": 4}])
def test_point_to_point_has_numbers_of_its_own(tmp_path: Path, numbers: dict[str, int]) -> None:
    events = [op("c10d::send", 0, 20, **SHAPES), mark("gloo:send", 5, 30, thread=200)]
    sent = {key: value for key, value in entry(3, 0).items() if key != "collective_seq_id"}
    sent |= {"profiling_name": "gloo:send", "is_p2p": True} | numbers
    assert told(run_of(tmp_path, events, [sent])) == [("3", 4)]


def test_two_entries_in_an_operator_tell_nothing(tmp_path: Path) -> None:
    assert told(run_of(tmp_path, gathers(), [entry(3, 7), entry(4, 8), entry(110, 9)])) == [(None, None), ("3", 9)]


def test_an_entry_in_two_operators_is_neither_s(tmp_path: Path) -> None:
    other = op("c10d::broadcast_", 1, 15, thread=300)
    assert told(run_of(tmp_path, [*gathers(), other], [entry(3, 7), entry(110, 9)])) == [(None, None), ("3", 9)]


def test_an_emulated_transfer_takes_what_runs_inside_it(tmp_path: Path) -> None:
    events = [
        mark("FSDP::all_gather (a)", 0, 5),
        mark("fsdpviz::all_gather (a)", 2, 90, thread=300),
        op("c10d::_allgather_base_", 3, 20, thread=300, **SHAPES),
    ]
    assert told(run_of(tmp_path, events, [entry(4, 11)])) == [("3", 11)]


@pytest.mark.parametrize(
    "entries",
    [
        None,
        7,
        ["x", None, 3],
        [{}],
        [entry(3, "7")],
        [entry(3, True)],
        [entry(3, 2**63)],
        [entry(3, 7, group="3")],
        [entry(3, 7, group=[3])],
    ],
)
def test_a_dump_that_says_nonsense_says_nothing(tmp_path: Path, entries: Any) -> None:
    assert told(run_of(tmp_path, gathers(1), entries)) == [(None, None)]


def test_what_the_trace_says_itself_is_kept(tmp_path: Path) -> None:
    events = [
        op("c10d::_allgather_base_", 0, 20, **SHAPES),
        mark("gloo:all_gather", 5, 30, thread=200, **{"Input Dims": [[40]], "Process Group Name": "mine", "Seq": 5}),
    ]
    assert told(run_of(tmp_path, events, [entry(3, 7)])) == [("mine", 5)]
