"""Clocks of several hosts, with offsets and drifts that the test chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_trace import KINETO, launched, mark, write_trace

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.align import Method, fit, matches

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
MS = 1000  # µs


def collective(end: float, sequence: int | None, *, name: str = "allreduce", group: str = "0", size: int = 64) -> dict:
    numbered = {} if sequence is None else {"Seq": sequence}
    said = {"Collective name": name, "In msg nelems": size, "dtype": "Float", "Process Group Name": group}
    return {"end": end, "args": said | numbered}


def ranks_of(
    tmp_path: Path,
    hosts: Sequence[str | None],
    clock: Callable[[int, float], float],
    collectives: Callable[[int], list[dict]],
    extra: Callable[[int], list[Any]] = lambda rank: [],
) -> Trace:
    """Ranks whose collectives start at different times and end together; ``clock`` is what each writes for a time."""
    for rank, host in enumerate(hosts):
        events = list(extra(rank))
        for number, one in enumerate(collectives(rank)):
            end = clock(rank, one["end"])
            start = clock(rank, one["end"] - 10 - 3 * rank)
            events += launched("kernel", NCCL, start - 2, start, end - start, correlation=number + 1, **one["args"])
        header = {"host_name": host} if host else {}
        write_trace(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank}, **header)
    return open_trace(tmp_path)


def ten(rank: int) -> list[dict]:
    return [collective(100 * number + 100, number) for number in range(10)]


def clock_of(trace: Trace) -> list[tuple[Any, ...]]:
    return trace.clock.select("rank", "offset_ns", "residual_ns", "matched", "method").rows()


def ends(trace: Trace, rank: int) -> list[int]:
    rows = trace.collectives.filter(rank=rank)
    return (rows["start_ns"] + rows["duration_ns"]).to_list()


def test_an_offset_is_found_exactly_and_applied(tmp_path: Path) -> None:
    trace = ranks_of(tmp_path, ["a", "a", "b", "b"], lambda rank, time: time + (345.678 if rank >= 2 else 0), ten)
    assert clock_of(trace) == [
        (0, 0, None, 0, Method.REFERENCE),
        (1, 0, None, 0, Method.SAME_HOST),
        (2, -345_678, 0, 10, Method.ENDS),
        (3, -345_678, 0, 10, Method.ENDS),
    ]
    assert ends(trace, 0) == ends(trace, 2) == ends(trace, 3) == [100_000 * number for number in range(1, 11)]
    assert trace.collectives.filter(rank=2)["issued_ns"][0] == 82_000  # 100 − 10 − 6 − 2: moved with the rest
    assert trace.notes == ()


def test_one_host_is_believed_whatever_the_ends_say(tmp_path: Path) -> None:
    trace = ranks_of(tmp_path, ["a", "a"], lambda rank, time: time + 50 * rank, ten)
    assert clock_of(trace)[1] == (1, 0, None, 0, Method.SAME_HOST)
    assert ends(trace, 1)[0] == 150_000


@pytest.mark.parametrize("hosts", [[None, None], ["localhost", "localhost"]])
@pytest.mark.parametrize(("offset", "method"), [(3, Method.ENDS_AGREE), (30, Method.ENDS)])
def test_hosts_without_a_name_are_compared(tmp_path: Path, hosts: list, offset: float, method: Method) -> None:
    """Three µs are within what ends on one host differ by; thirty are not."""
    trace = ranks_of(tmp_path, hosts, lambda rank, time: time + offset * rank, ten)
    assert clock_of(trace)[1] == (1, 0 if offset == 3 else -30_000, 0, 10, method)


def test_an_offset_that_drowns_in_the_scatter_is_not_applied(tmp_path: Path) -> None:
    scatter = [-40, 35, -20, 25, 50, -10, 15, -30, 5, 45]
    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time,
        lambda rank: [collective(100 * n + 100 + rank * (8 + scatter[n]), n) for n in range(10)],
    )
    row = clock_of(trace)[1]
    assert (row[1], row[4]) == (0, Method.ENDS_AGREE)
    assert row[2] > 10_000  # and the residual says how little that is worth


SCATTER = [-320, 430, -120, 330, 580, -20, 230, -220, 130, 530]  # µs; lower median 130, and 250 the median from it


def test_ends_that_scatter_as_much_as_clocks_differ_tell_nothing(tmp_path: Path) -> None:
    trace = ranks_of(
        tmp_path,
        [None, None],
        lambda rank, time: time,
        lambda rank: [collective(1000 * n + 1000 + rank * SCATTER[n], n) for n in range(10)],
    )
    assert clock_of(trace)[1] == (1, 0, 250_000, 10, Method.SCATTERED)
    assert [(note.count, note.example) for note in trace.notes] == [(1, "rank 1, by 0.25 ms")]
    assert trace.validate()["waits"].reason.startswith("ranks [1] may be on clocks of their own")


@pytest.mark.parametrize(("offset", "method"), [(0, Method.AGREE_WITH_UNTOLD), (5000, Method.ENDS)])
def test_what_is_compared_with_a_rank_of_an_untold_clock(tmp_path: Path, offset: float, method: Method) -> None:
    """Rank 2 meets rank 1 only, whose clock is not told; that both end together says nothing of the first rank."""
    groups = {0: ["x"], 1: ["x", "y"], 2: ["y"]}
    trace = ranks_of(
        tmp_path,
        [None] * 3,
        lambda rank, time: time + offset * (rank == 2),
        lambda rank: [
            collective(1000 * n + (1000 + rank * SCATTER[n] if group == "x" else 1500), n, group=group)
            for n in range(10)
            for group in groups[rank]
        ],
    )
    assert [row[1:] for row in clock_of(trace)[1:]] == [
        (0, 250_000, 10, Method.SCATTERED),
        (-1000 * offset, 0, 10, method),
    ]
    assert [(note.count, note.example) for note in trace.notes] == [(1, "rank 1, by 0.25 ms")]
    untold = [1] if offset else [1, 2]
    assert trace.validate()["waits"].reason.startswith(f"ranks {untold} may be on clocks of their own")


def test_outliers_do_not_move_the_offset(tmp_path: Path) -> None:
    late = {3: 900, 7: 5000}
    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time + 200 * rank,
        lambda rank: [collective(100 * n + 100 + rank * late.get(n, 0), n) for n in range(10)],
    )
    assert clock_of(trace)[1] == (1, -200_000, 0, 10, Method.ENDS)


def test_a_drift_shows_in_a_long_recording(tmp_path: Path) -> None:
    """20 ppm over 30 s are 600 µs: a single offset would be wrong by half of it at either end."""
    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time + rank * (1000 + time * 20e-6),
        lambda rank: [collective(1e6 * n + 100, n) for n in range(30)],
    )
    row = trace.clock.row(1, named=True)
    assert row["drift_ppm"] == pytest.approx(-20, abs=0.01)
    assert row["offset_ns"] == pytest.approx(-1_000_000, abs=100)
    assert max(abs(np.array(ends(trace, 0)) - ends(trace, 1))) < 100


@pytest.mark.parametrize("ahead", [0, 30 * 86_400e6])
def test_a_drift_is_taken_off_exactly(tmp_path: Path, ahead: float) -> None:
    """A clock that gained 20 ppm of the reference's time shows 1.00002 of it. One may count from the host's start."""
    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time + (time * 20e-6 if rank else ahead),
        lambda rank: [collective(1e6 * n + 1000, n) for n in range(60)],
    )
    assert trace.clock["drift_ppm"][1] == pytest.approx(-20)
    assert max(abs(np.array(ends(trace, 0)) - ends(trace, 1))) <= 1


def test_outliers_do_not_tilt_the_drift() -> None:
    there = np.arange(40) * 10**9
    here = there + 1_000_000 + there // 50_000  # 20 ppm
    here[[3, 4, 38]] += 5_000_000  # a rank that left late
    found = fit(here, there, 0)
    assert found.drift_ppm == pytest.approx(20, abs=0.01)
    assert (found.offset_ns, found.residual_ns) == (pytest.approx(1_000_000, abs=10), pytest.approx(0, abs=10))


def test_no_drift_is_made_up_from_noise() -> None:
    there = np.arange(30) * 10**9
    noise = np.array([700, -300, 200, -900, 500, -100] * 5)
    found = fit(there + 50_000 + noise, there, 0)
    assert (found.drift_ppm, found.matched) == (0.0, 30)
    assert abs(found.offset_ns - 50_000) <= 300


def test_two_hosts_without_a_common_group_are_compared_through_a_third(tmp_path: Path) -> None:
    groups = {0: ["x"], 1: ["y"], 2: ["x", "y"]}
    trace = ranks_of(
        tmp_path,
        ["a", "b", "c"],
        lambda rank, time: time + 1000 * rank,
        lambda rank: [
            collective(100 * n + 50 * (group == "y"), n, group=group) for n in range(1, 9) for group in groups[rank]
        ],
    )
    assert [(row[0], row[1], row[4]) for row in clock_of(trace)] == [
        (0, 0, Method.REFERENCE),
        (1, -1_000_000, Method.ENDS),
        (2, -2_000_000, Method.ENDS),
    ]


def test_position_alone_never_matches(tmp_path: Path) -> None:
    """The second rank's recording began two collectives later: numbers tell, places would be off by 200 µs."""
    trace = ranks_of(tmp_path, ["a", "b"], lambda rank, time: time + 500 * rank, lambda rank: ten(rank)[2 * rank :])
    assert clock_of(trace)[1] == (1, -500_000, 0, 8, Method.ENDS)


def test_without_numbers_all_of_a_step_must_agree(tmp_path: Path) -> None:
    def sizes(rank: int) -> list[dict]:
        return [collective(100 * n + 100, None, size=64 + n) for n in range(4 + (odd and rank))]

    for odd, expected in ((False, (-500_000, 4, Method.ENDS)), (True, (0, 0, Method.NONE))):
        trace = ranks_of(tmp_path, ["a", "b"], lambda rank, time: time + 500 * rank, sizes)
        _, offset_ns, _, matched, method = clock_of(trace)[1]
        assert (offset_ns, matched, method) == expected
        assert any("side by side" in note.what for note in trace.notes) is odd


def test_steps_are_matched_one_by_one(tmp_path: Path) -> None:
    """The second rank lacks step 1, and its step 2 and 3 match those of the first by their numbers."""

    def steps(rank: int) -> list[Any]:
        return [mark(f"ProfilerStep#{step}", 500 * rank + 1000 * step, 900) for step in range(1 + rank, 4)]

    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time + 500 * rank,
        lambda rank: [collective(1000 * step + at, None) for step in range(1 + rank, 4) for at in (100, 300)],
        steps,
    )
    assert clock_of(trace)[1] == (1, -500_000, 0, 4, Method.ENDS)
    assert trace.steps.filter(rank=1)["start_ns"].to_list() == [2_000_000, 3_000_000]


def test_what_more_ranks_show_than_take_part_is_not_one_collective(tmp_path: Path) -> None:
    """Groups of two without a name, one on each host: they gather alike, the second host's 400 µs later."""

    def both(rank: int) -> list[dict]:
        later = 400 * (rank >= 2)
        gathers = [collective(1000 * n + 1000 + later, None, name="allgather", group="") for n in range(5)]
        for one in gathers:
            del one["args"]["Process Group Name"]
            one["args"]["Group size"] = 2
        return gathers + [collective(1000 * n + 6000, None, group="all") for n in range(4)]

    trace = ranks_of(tmp_path, ["a", "a", "b", "b"], lambda rank, time: time + 50 * (rank >= 2), both)
    assert [row[1:4] for row in clock_of(trace)[2:]] == [(-50_000, 0, 4)] * 2


def test_broadcasts_are_no_clock(tmp_path: Path) -> None:
    trace = ranks_of(
        tmp_path,
        ["a", "b"],
        lambda rank, time: time + 500 * rank,
        lambda rank: [collective(100 * n + 100, n, name="broadcast") for n in range(10)],
    )
    assert clock_of(trace)[1][-1] == Method.NONE


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_four_ranks_of_one_host() -> None:
    """The file has neither hosts nor numbers; each rank has the same eight collectives, whose ends differ by ≤ 7 µs."""
    trace = open_trace(sorted(KINETO.glob("dlrm_8xV100_rank*")))
    assert trace.clock["method"].to_list() == [Method.REFERENCE] + [Method.ENDS_AGREE] * 3
    assert trace.clock["matched"].to_list() == [0, 8, 8, 8]
    assert trace.clock["offset_ns"].to_list() == [0, 0, 0, 0]
    ends_ns = matches(trace).pivot("rank", index="key", values="end_ns").drop("key").to_numpy()
    assert ends_ns.shape == (8, 4)
    assert np.ptp(ends_ns, axis=1).max() == 7_000


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_four_gloo_ranks_of_one_host_that_is_not_named() -> None:
    """On two cores the ends of one collective are tens of ms apart: no clock shows in that."""
    trace = open_trace(sorted((KINETO / "gloo").glob("fsdp2_async_prefetch_rank*")))
    assert trace.clock["method"].to_list() == [Method.REFERENCE] + [Method.SCATTERED] * 3
    assert trace.clock["offset_ns"].to_list() == [0, 0, 0, 0]
    assert min(trace.clock["residual_ns"].to_list()[1:]) > 5_000_000
    assert [note.count for note in trace.notes if "clocks of their own" in note.what] == [3]


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
def test_a_shifted_copy_of_a_recording_is_brought_back(tmp_path: Path) -> None:
    """Ranks 1 and 3 of the recording with 1.5 s added to every time, as a host with a wrong clock would have."""
    import gzip
    import json

    for rank in range(4):
        content = json.loads(gzip.decompress((KINETO / f"dlrm_8xV100_rank{rank}.json.gz").read_bytes()))
        for event in content["traceEvents"]:
            if "ts" in event:
                event["ts"] += 1_500_000 * (rank % 2)
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    trace = open_trace(tmp_path)
    assert trace.clock["offset_ns"].to_list() == pytest.approx([0, -1_500_000_000, 0, -1_500_000_000], abs=2_000)
    assert max(trace.clock["residual_ns"].to_list()[1:]) <= 1_000
