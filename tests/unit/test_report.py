"""Where a step's time goes: by hand on six spans, and by an independent sweep over a real recording."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_trace import GPU, KINETO, WORKER, launched, mark, op, span, write, write_trace

from fsdpviz.analysis import Measures, StepBreakdown, compare, report
from fsdpviz.analysis.intervals import total
from fsdpviz.base.errors import TraceError
from fsdpviz.base.kinds import COMMUNICATION, COMPUTATION, COPIES, Kind
from fsdpviz.base.provenance import Provenance
from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.table import LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA

recordings = pytest.mark.skipif(not KINETO.is_dir(), reason="the shared recordings are not here")


def made(
    spans: Sequence[tuple[Kind, int, int]], steps: Sequence[tuple[int, int, int]] = (), about: Any = None, rank: int = 0
) -> Trace:
    """A trace of one rank from (kind, start, end) and (step, start, end), in ns."""
    rows = [
        {"rank": rank, "lane": 0, "start_ns": start, "duration_ns": end - start, "name": kind, "kind": kind.value}
        for kind, start, end in spans
    ]
    return Trace(
        spans=pl.DataFrame(rows, schema=SPAN_SCHEMA),
        lanes=pl.DataFrame([{"rank": rank, "lane": 0, "is_device": False}], schema=LANE_SCHEMA),
        steps=pl.DataFrame([(rank, *step) for step in steps], schema=STEP_SCHEMA, orient="row"),
        provenance=Provenance.SIMULATED,
        about=about or {},
    )


# 0         10        20        30        40        50
# compute   |=========|         |====|                      10–20, 30–35
# gather         |=========|                                15–25
# reduce                                  |====|            40–45
# copy                   |=========|           |====|       23–33, 45–50
# optimizer                                  |==|           43–46
# host and annotation cover everything and count for nothing
SIX = [
    (Kind.COMPUTE, 10, 20),
    (Kind.COMPUTE, 30, 35),
    (Kind.ALL_GATHER, 15, 25),
    (Kind.REDUCE_SCATTER, 40, 45),
    (Kind.H2D, 23, 33),
    (Kind.D2H, 45, 50),
    (Kind.OPTIMIZER, 43, 46),
    (Kind.HOST, 0, 100),
    (Kind.ANNOTATION, 0, 100),
    (Kind.WAIT, 0, 100),
]


def test_six_spans_by_hand() -> None:
    row = report(made(SIX)).rows[0]
    # compute 10 + 5 + 3; gather 15–25 is hidden in 15–20, reduce 40–45 in 43–45
    # copies: 23–33 is exposed in 25–30, 45–50 in 46–50; idle 35–40
    assert row == StepBreakdown(
        rank=0,
        step=None,
        span_ns=40,
        compute_ns=18,
        comm_ns=15,
        exposed_comm_ns=8,
        copy_ns=15,
        exposed_copy_ns=9,
        idle_ns=5,
        overlap_frac=7 / 15,
    )
    assert {name: intervals.tolist() for name, intervals in row.intervals.items()} == {
        "compute": [[10, 20], [30, 35], [43, 46]],
        "comm": [[15, 25], [40, 45]],
        "exposed_comm": [[20, 25], [40, 43]],
        "copy": [[23, 33], [45, 50]],
        "exposed_copy": [[25, 30], [46, 50]],
        "idle": [[35, 40]],
    }


def test_steps_on_the_host_clip_what_crosses_them() -> None:
    rows = report(made(SIX, steps=[(3, 0, 18), (4, 18, 32)])).rows
    assert [(row.step, row.span_ns, row.compute_ns, row.comm_ns, row.idle_ns) for row in rows] == [
        (3, 18, 8, 3, 10),  # the gather's 15–18 lies in compute
        (4, 14, 4, 7, 0),  # 18–20 compute, 20–25 gather, 25–30 copy, 30–32 compute
    ]


def test_steps_that_overlap_are_not_counted_twice() -> None:
    rows = report(made(SIX, steps=[(1, 10, 30), (2, 25, 50)])).rows
    assert [(row.start_ns, row.span_ns) for row in rows] == [(10, 20), (30, 20)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*COMPUTATION, *COMMUNICATION, *COPIES, Kind.WAIT]), st.integers(0, 60), st.integers(0, 20)
        ),
        max_size=15,
    ),
    st.integers(0, 70),
    st.integers(0, 70),
)
def test_the_parts_add_up_to_the_span(spans: list[tuple[Kind, int, int]], start: int, length: int) -> None:
    trace = made([(kind, at, at + duration) for kind, at, duration in spans], steps=[(1, start, start + length)])
    for row in report(trace).rows:
        assert row.span_ns == length
        check_parts(row)
        assert [total(row.intervals[name.removesuffix("_ns")]) for name in PARTS] == [getattr(row, n) for n in PARTS]


PARTS = ("compute_ns", "comm_ns", "exposed_comm_ns", "copy_ns", "exposed_copy_ns", "idle_ns")


def check_parts(row: StepBreakdown) -> None:
    assert row.span_ns == row.compute_ns + row.exposed_comm_ns + row.exposed_copy_ns + row.idle_ns
    assert 0 <= row.exposed_comm_ns <= row.comm_ns
    assert 0 <= row.exposed_copy_ns <= row.copy_ns
    assert (row.overlap_frac is None) == (row.comm_ns == 0)


def test_the_check_of_the_parts_can_fail() -> None:
    with pytest.raises(AssertionError):
        check_parts(replace(report(made(SIX)).rows[0], idle_ns=6))


def test_no_communication_has_no_overlap() -> None:
    assert report(made([(Kind.COMPUTE, 0, 5)])).rows[0].overlap_frac is None


def test_a_trace_without_work_has_no_rows() -> None:
    found = report(made([(Kind.HOST, 0, 5)]))
    assert found.rows == ()
    assert found.mean() is None
    assert found.measures == Measures(None, None, None, None, None, None, None)
    assert len(found.frame()) == 0


# -- devices


def test_a_device_step_begins_with_its_first_work_and_ends_with_the_next_ones(tmp_path: Path) -> None:
    """Step 1 is launched by 10 µs and runs 100–150; step 2 is launched by 20 and runs 160–200.

    The reduce of step 1 runs on until 170 on its own stream: to 160 it is step 1's, from there step 2's.
    """
    events = [
        mark("ProfilerStep#1", 0, 10),
        mark("ProfilerStep#2", 10, 10),
        *launched("kernel", "mm", 2, 100, 50, correlation=1),
        *launched("kernel", "ncclDevKernel_AllReduce()", 5, 140, 30, correlation=2, stream=20),
        *launched("kernel", "mm", 12, 160, 40, correlation=3),
        *launched("kernel", "before", 30, 300, 9, correlation=4),  # launched after the last step
    ]
    rows = report(open_trace(write_trace(tmp_path / "rank0.json", events))).rows
    assert [(row.step, row.span_ns, row.compute_ns, row.comm_ns, row.exposed_comm_ns) for row in rows] == [
        (1, 60_000, 50_000, 20_000, 10_000),
        (2, 40_000, 40_000, 10_000, 0),
    ]


def test_a_step_without_work_of_the_device_is_noted(tmp_path: Path) -> None:
    events = [mark("ProfilerStep#1", 0, 10), mark("ProfilerStep#2", 10, 10)]
    path = write_trace(tmp_path / "rank0.json", [*events, *launched("kernel", "mm", 2, 5, 9, correlation=1)], rank=0)
    found = report(open_trace(path))
    assert [row.step for row in found.rows] == [1]
    left_out = "steps that launched nothing on the device, not in the report (1×, for example step 2 of rank 0)"
    assert [str(note) for note in found.notes] == [left_out]
    chosen = report(open_trace(path, steps=[2]))
    assert chosen.rows == ()
    assert str(chosen.notes[-1]) == left_out


def test_steps_of_a_selection_end_where_the_whole_recording_s_do(tmp_path: Path) -> None:
    """Step 1 ends at 70, on the host; step 2 is what is left of 50–100."""
    events = [mark("ProfilerStep#1", 0, 70), mark("ProfilerStep#2", 50, 50), op("aten::mm", 60, 20)]
    path = write_trace(tmp_path / "rank0.json", events, rank=0)
    whole, chosen = report(open_trace(path)).rows, report(open_trace(path, steps=[2])).rows
    assert [(row.step, row.span_ns, row.compute_ns) for row in whole] == [(1, 70_000, 10_000), (2, 30_000, 10_000)]
    assert chosen == whole[1:]


def test_times_before_zero_are_times(tmp_path: Path) -> None:
    copy = launched("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", -99, -90, 5, correlation=1, stream=9)
    events = [mark("ProfilerStep#1", -100, 20), *copy, *launched("kernel", "mm", -95, -60, 10, correlation=2)]
    (row,) = report(open_trace(write_trace(tmp_path / "rank0.json", events))).rows
    assert (row.start_ns, row.span_ns, row.copy_ns) == (-90_000, 40_000, 5_000)


def three_steps_with_inputs_copied_ahead(tmp_path: Path) -> Path:
    """The host is done by 30 µs; products run 20–120, 120–220 and 230–330, inputs are copied 10–14, 15–19, 130–134, and
    a kernel of 1 µs begins with each copy.
    """
    events: list[Any] = []
    for step, (copied, multiplied) in enumerate(((10, 20), (15, 120), (130, 230))):
        at, first = 10 * step, 3 * step + 1
        copy = launched("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", at + 1, copied, 4, correlation=first, stream=9)
        prepare = launched("kernel", "prepare", at + 3, copied, 1, correlation=first + 1, stream=10)
        mm = launched("kernel", "mm", at + 5, multiplied, 100, correlation=first + 2)
        events += [mark(f"ProfilerStep#{step + 1}", at, 10), *copy, *prepare, *mm]
    return write_trace(tmp_path / "rank0.json", events)


def test_a_copy_ahead_does_not_begin_a_step(tmp_path: Path) -> None:
    rows = report(open_trace(three_steps_with_inputs_copied_ahead(tmp_path))).rows
    assert [(row.step, row.start_ns, row.span_ns, row.compute_ns) for row in rows] == [
        (1, 10_000, 110_000, 102_000),
        (2, 120_000, 100_000, 100_000),
        (3, 220_000, 110_000, 100_000),  # step 2 had computed by 220: what is exposed from then on is step 3's
    ]


def test_a_selection_has_the_whole_recording_s_numbers(tmp_path: Path) -> None:
    path = three_steps_with_inputs_copied_ahead(tmp_path)
    whole = report(open_trace(path)).rows
    chosen = open_trace(path, steps=[2])
    assert report(chosen).rows == whole[1:2]
    assert report(Trace.read_parquet(chosen.write_parquet(tmp_path / "out"))).rows == whole[1:2]
    window = open_trace(path, window=(0.1, 0.15))
    # step 3's copy lies in the window, and nothing of step 3's own
    assert [(row.step, row.span_ns, row.compute_ns, row.copy_ns) for row in report(window).rows] == [
        (1, 20_000, 20_000, 0),
        (2, 30_000, 30_000, 4_000),
    ]
    assert report(Trace.read_parquet(window.write_parquet(tmp_path / "out"))).rows == report(window).rows
    assert not (open_trace(path).write_parquet(tmp_path / "out") / "whole_spans.parquet").exists()


def test_windows_side_by_side_lose_nothing(tmp_path: Path) -> None:
    """Between its kernels of 10–20 and 80–90 µs the first rank idles, save for work that no step launched; the second
    rank has no steps, and works from 0 to 30 and at 95 µs. Windows without a span of a rank are idle, not absent.
    """
    first = [
        mark("ProfilerStep#1", 0, 30),
        *launched("kernel", "sgemm", 2, 10, 10, correlation=1),
        *launched("kernel", "sgemm", 20, 80, 10, correlation=2),
        *launched("kernel", "sgemm", 40, 45, 3, correlation=3),
    ]
    second = [
        *launched("kernel", "sgemm", 0, 0, 30, correlation=1),
        *launched("kernel", "sgemm", 31, 95, 5, correlation=2),
    ]
    for rank, events in enumerate((first, second)):
        write_trace(tmp_path / f"rank{rank}.json", events, rank=rank)
    whole = report(open_trace(tmp_path))
    assert [(row.rank, row.step, row.span_ns) for row in whole.rows] == [(0, 1, 80_000), (1, None, 100_000)]
    parts = [open_trace(tmp_path, window=(ms, ms + 0.02)) for ms in (0, 0.02, 0.04, 0.06, 0.08)]
    rows = [row for part in parts for row in report(part).rows]
    for whole_row in whole.rows:
        mine = [row for row in rows if (row.rank, row.step) == (whole_row.rank, whole_row.step)]
        assert len(mine) == 5
        for name in ("span_ns", "compute_ns", "idle_ns"):
            assert sum(getattr(row, name) for row in mine) == getattr(whole_row, name)
    step = open_trace(tmp_path, steps=[1])
    for chosen in (step, Trace.read_parquet(step.write_parquet(tmp_path / "step"))):
        assert report(chosen).rows == whole.rows[:1]  # the second rank has nothing in it


def test_a_device_without_launches_has_steps_by_time(tmp_path: Path) -> None:
    events = [mark("ProfilerStep#1", 0, 10), span("kernel", "mm", 5, 3, process=GPU, thread=7, correlation=1)]
    rows = report(open_trace(write_trace(tmp_path / "rank0.json", events))).rows
    assert [(row.step, row.span_ns, row.compute_ns) for row in rows] == [(1, 10_000, 3_000)]


# -- the report as a value


def test_frame_dict_and_rows() -> None:
    found = report(made(SIX, steps=[(3, 0, 18), (4, 18, 32)]))
    frame = found.frame()
    assert frame.columns == [
        "rank",
        "step",
        "span_ns",
        "compute_ns",
        "comm_ns",
        "exposed_comm_ns",
        "copy_ns",
        "exposed_copy_ns",
        "idle_ns",
        "overlap_frac",
    ]
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["provenance"] == "simulated"
    assert plain["breakdown"] == frame.to_dicts()
    mean = found.mean()
    assert mean is not None
    assert mean.span_ms == pytest.approx((18 + 14) / 2 / 1e6)
    assert mean.overlap_frac == pytest.approx((3 / 3 + 2 / 7) / 2)
    assert found.intervals(0, 4)["idle"].tolist() == []
    with pytest.raises(TraceError, match="no rank 1, step 4"):
        found.row(1, 4)


def metrics(step_ns: Sequence[int], losses: Sequence[float], samples: int = 8) -> list[dict[str, Any]]:
    return [
        {"step": step, "measured": step > 0, "step_ns": time, "loss": loss, "samples": samples}
        for step, (time, loss) in enumerate(zip(step_ns, losses, strict=True))
    ]


def test_the_five_measures() -> None:
    about = {
        # warm-up is step 0; the slowest rank takes 4, 6 and 2 ms
        "metrics": {
            "0": metrics([9_000_000, 4_000_000, 5_000_000, 2_000_000], [3, 2, 1, 0]),
            "1": metrics([9_000_000, 3_000_000, 6_000_000, 1_000_000], [3, 2, 1, 0]),
        },
        "memory": {"0": {"peak_device_bytes": 10, "peak_host_bytes": None}, "1": {"peak_device_bytes": 30}},
    }
    found = report(made(SIX, steps=[(3, 0, 18), (4, 18, 50)], about=about)).measures
    assert found == Measures(
        step_ms=4.0,
        samples_per_s=2000.0,  # 8 samples in 4 ms
        peak_device_bytes=30,
        peak_host_bytes=None,
        all_gather_ms=(3 + 7) / 2 / 1e6,
        h2d_ms=(0 + 10) / 2 / 1e6,
        d2h_ms=(0 + 5) / 2 / 1e6,
    )


def test_steps_stand_in_for_metrics() -> None:
    found = report(made(SIX, steps=[(3, 0, 18), (4, 18, 50)])).measures
    assert found.step_ms == pytest.approx((18 + 32) / 2 / 1e6)
    assert found.samples_per_s is None


# -- comparing


def test_compare_by_hand() -> None:
    about_a = {"metrics": {"0": metrics([4, 4, 4], [3.0, 2.0, 1.0])}}
    about_b = {"metrics": {"0": metrics([2, 2, 2], [3.0, 2.25, 1.0])}}
    hidden = [(kind, start, end) for kind, start, end in SIX if kind is not Kind.REDUCE_SCATTER]
    found = compare(made(SIX, about=about_a), made(hidden, about=about_b))
    assert found.ratios["step_ms"] == 0.5
    assert found.ratios["samples_per_s"] == 2.0
    assert found.ratios["exposed_comm_ms"] == pytest.approx(5 / 8)
    assert found.ratios["peak_device_bytes"] is None
    assert found.max_loss_difference == 0.25
    assert found.losses_are_equal is False
    assert (found.all_gathers_a.count_per_step, found.all_gathers_a.bytes_per_step) == (1.0, None)
    same = compare(made(SIX, about=about_a), made(SIX, about=about_a))
    assert same.losses_are_equal is True
    assert set(same.ratios.values()) <= {1.0, None}
    assert json.loads(json.dumps(same.to_dict()))["max_loss_difference"] == 0.0
    assert compare(made(SIX), made(SIX)).losses_are_equal is None


def test_gathers_a_step(tmp_path: Path) -> None:
    dims = {"Input Dims": [[20]], "Input type": ["float"]}
    events: list[dict[str, Any]] = [op("aten::mm", 0, 1), mark("ProfilerStep#1", 0, 50), mark("ProfilerStep#2", 50, 50)]
    for start in (1, 10, 60, 70):
        issuer = {"Input Dims": [[80], [20]], "Input type": ["float", "float"]}
        events.append(op("c10d::_allgather_base_", start, 1, **issuer))
        events.append(mark("gloo:all_gather", start + 1, 5, thread=WORKER, **dims))
    write_trace(tmp_path / "run/rank0/trace.json.gz", events)
    write(tmp_path / "run/experiment.json", {})
    trace = open_trace(tmp_path / "run")
    found = compare(trace, trace).all_gathers_b
    assert (found.count_per_step, found.bytes_per_step) == (2.0, 640.0)


# -- real recordings


@recordings
def test_the_parts_add_up_on_every_recording() -> None:
    seen = 0
    for path in sorted(KINETO.rglob("*.json.gz")):
        for row in report(open_trace(path)).rows:
            check_parts(row)
            seen += 1
    assert seen > 40


def sweep(events: list[tuple[int, int, str]], start: int, end: int) -> dict[str, int]:
    """ns of each state, by walking over all edges and counting what is open: nothing of ours is used."""
    edges = sorted({start, end, *(t for s, e, _ in events for t in (s, e) if start < t < end)})
    opened: dict[int, list[str]] = {}
    closed: dict[int, list[str]] = {}
    for first, last, kind in events:
        first, last = max(first, start), min(last, end)
        if last > first:
            opened.setdefault(first, []).append(kind)
            closed.setdefault(last, []).append(kind)
    depth = {"compute": 0, "comm": 0, "copy": 0}
    found: dict[str, int] = dict.fromkeys((*(name.removesuffix("_ns") for name in PARTS), "overlap"), 0)
    for here, there in pairwise(edges):
        for kind in opened.get(here, ()):
            depth[kind] += 1
        for kind in closed.get(here, ()):
            depth[kind] -= 1
        compute, comm, copy = (depth[kind] > 0 for kind in ("compute", "comm", "copy"))
        found["compute"] += (there - here) * compute
        found["comm"] += (there - here) * comm
        found["overlap"] += (there - here) * (comm and compute)
        found["exposed_comm"] += (there - here) * (comm and not compute)
        found["copy"] += (there - here) * copy
        found["exposed_copy"] += (there - here) * (copy and not comm and not compute)
        found["idle"] += (there - here) * (not (compute or comm or copy))
    return found


@recordings
@pytest.mark.parametrize("name", ["ddp_2xA100_rank0", "dlrm_8xV100_rank1"])
def test_a_real_recording_against_an_independent_sweep(name: str) -> None:
    path = KINETO / f"{name}.json.gz"
    raw = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base = raw.get("baseTimeNanoseconds", 0)

    def times(event: dict[str, Any]) -> tuple[int, int]:
        start = int(Decimal(event["ts"]) * 1000) + base
        return start, start + int(Decimal(event["dur"]) * 1000)

    spans = [event for event in raw["traceEvents"] if event.get("ph") == "X"]
    steps = {int(e["name"][13:]): times(e) for e in spans if e["name"].startswith("ProfilerStep#")}
    launches = {e["args"]["correlation"]: times(e)[0] for e in spans if e["cat"] == "cuda_runtime"}
    work: list[tuple[int, int, str]] = []
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for event in spans:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        kind = "copy" if event["cat"] != "kernel" else "comm" if "nccl" in event["name"] else "compute"
        start, end = times(event)
        work.append((start, end, kind))
        launch = launches.get(event["args"]["correlation"], -1)  # some launches lie before the recording
        step = next((n for n, (first, last) in steps.items() if first <= launch < last), None)
        if step is not None:
            begins[step] = min(begins.get(step, start), start)
            ends[step] = max(ends.get(step, end), end)
    order = sorted(begins)
    found = {row.step: row for row in report(open_trace(path)).rows}
    assert sorted(found) == order  # type: ignore[type-var]
    for step in order:
        start = begins[step]
        end = begins[step + 1] if step + 1 in begins else ends[step]
        expected = sweep(work, start, end)
        row = found[step]
        assert (row.start_ns, row.span_ns) == (start, end - start)
        assert {name: getattr(row, f"{name}_ns") for name in expected if name != "overlap"} == {
            name: value for name, value in expected.items() if name != "overlap"
        }
        assert row.overlap_frac == expected["overlap"] / expected["comm"]
