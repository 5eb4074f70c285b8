"""Which rank keeps the others waiting: made flight records in the form that torch writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdpviz.experiment.run_folder import RunFolder
from fsdpviz.launch.status import RankStatus
from fsdpviz.launch.stuck import describe_stuck, find_stragglers, parse_flight_record


def entry(number: int, name: str = "gloo:all_reduce", group: tuple[str, str] = ("0", "default_pg"), **more: Any) -> Any:
    made = {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": list(group),
        "is_p2p": False,
    }
    return made | {"state": "scheduled", "retired": True} | more


def dump(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"entries": list(entries), "pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}} | more


def stragglers(*dumps: dict[str, Any]) -> list[str]:
    return find_stragglers({rank: parse_flight_record(one) for rank, one in enumerate(dumps)})


def test_gloo_entry_is_done_when_retired_and_ncclss_when_completed() -> None:
    record = parse_flight_record(
        dump(
            entry(1),
            entry(2, retired=False),
            entry(3, "nccl:_all_gather_base", retired=False, state="completed"),
            entry(4, is_p2p=True),
        )
    )
    assert [str(collective) for collective in record.collectives] == [
        "all_reduce #1 of default_pg completed",
        "all_reduce #2 of default_pg not completed",
        "_all_gather_base #3 of default_pg completed",
    ]


def test_rank_that_did_not_enter_is_named() -> None:
    found = stragglers(dump(entry(1), entry(2, "gloo:all_gather", retired=False)), dump(entry(1)))
    assert found == ["rank 0 entered all_gather #2 of default_pg; rank 1 did not (it last did all_reduce #1)"]


def test_rank_that_did_nothing_yet_is_named() -> None:
    found = stragglers(dump(entry(1, retired=False)), dump(), dump(entry(1, retired=False)))
    assert found == ["ranks 0, 2 entered all_reduce #1 of default_pg; rank 1 did not (it did none there)"]


def test_different_collectives_at_one_place_are_told() -> None:
    found = stragglers(dump(entry(1, retired=False)), dump(entry(1, "gloo:broadcast", retired=False)))
    assert found == [
        "ranks differ at #1 of default_pg: rank 0 all_reduce, rank 1 broadcast; "
        "all must issue the same collectives in one order"
    ]


def test_all_inside_one_collective_is_told() -> None:
    found = stragglers(dump(entry(1, retired=False)), dump(entry(1, retired=False)))
    assert found == ["ranks 0, 1 entered all_reduce #1 of default_pg and did not complete it"]


def test_each_group_counts_for_itself() -> None:
    # rank 1 lags in the shard group only; rank 2 is in no shard group and lags nowhere
    shard = ("3", "mesh_shard")
    config = {"3": {"name": "3", "desc": "mesh_shard", "ranks": "[0, 1]"}}
    found = stragglers(
        dump(entry(1), entry(1, group=shard, retired=False), pg_config=config),
        dump(entry(1), pg_config=config),
        dump(entry(1)),
    )
    assert found == ["rank 0 entered all_reduce #1 of mesh_shard (3); rank 1 did not (it did none there)"]


def test_ranks_in_step_have_no_straggler() -> None:
    assert stragglers(dump(entry(1)), dump(entry(1))) == []


def test_stuck_run_is_described_rank_by_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in (0, 1):
        folder.rank(rank).path.mkdir()
    folder.rank(0).flight.write_text(json.dumps(dump(entry(1))))
    folder.rank(1).flight.write_text('{"entries": [')  # killed while it wrote
    assert describe_stuck(folder, {0: RankStatus("step", step=1, steps=3), 1: RankStatus()}).splitlines() == [
        "rank 0: step 1 of 3; last collectives: all_reduce #1 of default_pg completed",
        "rank 1: starting; it left no flight record",
        "no collective is pending; stacks.txt of each rank says where it was",
    ]
