"""What a recording supports, and what is said where it does not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from make_trace import KINETO, SHARED, launched, mark, op, span, write_trace

from fsdpviz.trace import Trace, open_trace

GATHER = "ncclDevKernel_AllGather_RING_LL()"
SAID = {
    "Collective name": "_allgather_base",
    "Out msg nelems": 64,
    "dtype": "Float",
    "Group size": 2,
    "Process Group Name": "0",
}


def opened(tmp_path: Path, events: Iterable[Any], **header: Any) -> Trace:
    return open_trace(write_trace(tmp_path / "rank0.json", events, **header))


def full() -> list[dict[str, Any]]:
    return [
        mark("ProfilerStep#1", 0, 50),
        mark("FSDP::pre_forward (a)", 0, 5),
        mark("FSDP::all_gather (a)", 1, 3),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, Seq=1, **SAID),
        *launched("kernel", "sgemm", 6, 30, 10, correlation=2),
        mark("FSDP::post_forward (a)", 8, 1),
    ]


def test_one_complete_rank(tmp_path: Path) -> None:
    validation = opened(tmp_path, full()).validate()
    assert validation.supported == ("breakdown", "overlap", "bandwidth", "fsdp")
    assert str(validation["waits"]) == "waits: no (it has one rank. Open the files of all ranks together)"
    assert "allocator snapshot" in validation["memory"].reason
    assert [one.reason for one in validation if one.is_supported] == ["", "", "", ""]


@pytest.mark.parametrize(
    ("without", "analysis", "reason"),
    [
        ("ProfilerStep", None, "taken whole"),
        ("nccl", "overlap", "no transfer between ranks"),
        ("nccl", "bandwidth", "no transfer between ranks"),
        ("nccl", "fsdp", "issue no transfer"),
        ("sgemm", "overlap", "nothing in it computes"),
        ("FSDP", "fsdp", "no FSDP ranges"),
        ("cudaLaunchKernel", "fsdp", "no launch in it lies inside one"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, without: str, analysis: str | None, reason: str) -> None:
    validation = opened(tmp_path, [event for event in full() if without not in event["name"]]).validate()
    support = validation[analysis or "breakdown"]
    assert support.is_supported is (analysis is None)
    assert reason in support.reason


def test_a_collective_without_a_size_has_no_bandwidth(tmp_path: Path) -> None:
    events = launched("kernel", GATHER, 2, 10, 20, correlation=1)
    support = opened(tmp_path, events).validate()["bandwidth"]
    assert not support.is_supported and "record_shapes" in support.reason
    events += launched("kernel", GATHER, 40, 50, 20, correlation=2, **SAID)
    support = opened(tmp_path, events).validate()["bandwidth"]
    assert support.is_supported and support.reason.startswith("1 of 2 collectives lack")


def test_device_spans_without_a_launch_are_counted(tmp_path: Path) -> None:
    events = [*full(), span("kernel", "orphan", 60, 5, process=0, thread=7, correlation=77)]
    support = opened(tmp_path, events).validate()["fsdp"]
    assert support.is_supported and support.reason.startswith("1 of 3 device spans have no launch")


def test_nothing_at_all(tmp_path: Path) -> None:
    validation = opened(tmp_path, [mark("ProfilerStep#1", 0, 5)]).validate()
    assert validation.supported == ()
    assert "ProfilerActivity" in validation["breakdown"].reason


def test_waits_need_ranks_on_one_clock_that_meet(tmp_path: Path) -> None:
    def ranks(count: int, host: str, *, sequence: int = 0) -> Trace:
        for rank in range(2):
            events = [op("aten::mm", 0, 5)]
            for number in range(count):
                at = 100 * number
                more = {"Seq": number + sequence * rank, **SAID}
                events += launched("kernel", GATHER, at + 10, at + 20, 30, correlation=number + 1, **more)
            name = host.format(rank)
            write_trace(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank}, host_name=name)
        return open_trace(tmp_path)

    assert ranks(3, "one").validate()["waits"].is_supported
    assert ranks(3, "host{}").validate()["waits"].is_supported
    assert "not on the others' clock" in ranks(2, "host{}").validate()["waits"].reason
    assert "no collective is the same one" in ranks(2, "one", sequence=10).validate()["waits"].reason


def test_an_unknown_analysis_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="breakdown, overlap, bandwidth, fsdp, waits, memory"):
        opened(tmp_path, full()).validate()["happiness"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize(
    ("files", "supported"),
    [
        (["cpu_only_no_rank.json.gz"], ("breakdown",)),
        (["ddp_2xA100_rank0.json.gz"], ("breakdown", "overlap", "bandwidth")),
        (["dlrm_8xA100_rank3.json.gz"], ("breakdown", "overlap")),
        ([f"dlrm_8xV100_rank{rank}.json.gz" for rank in range(4)], ("breakdown", "overlap", "waits")),
        (
            [f"gloo/fsdp2_plain_rank{rank}.json.gz" for rank in range(4)],
            ("breakdown", "overlap", "bandwidth", "fsdp", "waits"),
        ),
    ],
)
def test_real_recordings(files: list[str], supported: tuple[str, ...]) -> None:
    assert open_trace([KINETO / file for file in files]).validate().supported == supported
