"""What FSDP moved for each unit: whose, by whom, when issued, run, needed, and how much of it was exposed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_trace import KINETO, WORKER, launched, mark, op, span, write_trace

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.meaning.units import UNIT_SCHEMA

GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL()", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL()"
US = 1000


def opened(tmp_path: Path, events: Iterable[Any]) -> Trace:
    return open_trace(write_trace(tmp_path / "rank0.json", events, rank=0))


def events_of(trace: Trace, *columns: str) -> list[tuple[Any, ...]]:
    """Unit, phase, event, issuer and the chosen columns, times in µs."""
    times = [pl.col(name) // US if name.endswith("_ns") else pl.col(name) for name in columns]
    units = trace.units.select(
        "unit", "phase", pl.col("event").cast(pl.String), pl.col("issuer").cast(pl.String), *times
    )
    return units.rows()


def two_units_on_a_device() -> list[dict[str, Any]]:
    """Unit a gathers for itself, and b ahead while a computes; then a reduces.

    host     |pre_forward a 0–9 [all_gather 1–4 | copy_out 5–8]|9 prefetch b 9–12| mm a 13 |post a 15|
             |pre_forward b 20–24 [copy_out 21–23]| mm b 25 |post b 27|  backward thread: |pre_backward a 30–31|
             mm 33 |post_backward_reduce a 35–40|   Optimizer.step 50–60
    gathers  a 10–30, b 31–61                         reduce-scatter 120–150
    compute  copy-out a 30–34, mm a 34–54, copy-out b 61–65, mm b 65–100, backward a 100–130, adam 160–170
    """
    backward = {"launch_thread": WORKER}
    return [
        mark("FSDP::pre_forward (a)", 0, 9),
        mark("FSDP::all_gather (a)", 1, 3),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, stream=20),
        mark("FSDP::all_gather_copy_out (a)", 5, 3),
        op("fsdp::split_with_sizes_copy", 5, 3),
        *launched("kernel", "split_copy", 6, 30, 4, correlation=2),
        mark("FSDP::forward_prefetch for b", 9, 3),
        mark("FSDP::all_gather (b)", 9.5, 2),
        *launched("kernel", GATHER, 10, 31, 30, correlation=3, stream=20),
        *launched("kernel", "sgemm_a", 13, 34, 20, correlation=4),
        mark("FSDP::post_forward (a)", 15, 1),
        mark("FSDP::pre_forward (b)", 20, 4),
        mark("FSDP::all_gather_copy_out (b)", 21, 2),
        op("fsdp::split_with_sizes_copy", 21, 2),
        *launched("kernel", "split_copy", 21.5, 61, 4, correlation=5),
        *launched("kernel", "sgemm_b", 25, 65, 35, correlation=6),
        mark("FSDP::post_forward (b)", 27, 1),
        mark("FSDP::pre_backward (a)", 30, 1, thread=WORKER),
        *launched("kernel", "sgemm_backward", 33, 100, 30, correlation=7, **backward),
        mark("FSDP::post_backward_reduce (a)", 35, 5, thread=WORKER),
        *launched("kernel", SCATTER, 36, 120, 30, correlation=8, stream=24, **backward),
        mark("Optimizer.step#AdamW.step", 50, 10),
        *launched("kernel", "adam_kernel", 52, 160, 10, correlation=9),
    ]


def test_who_issued_what_and_when_it_was_needed(tmp_path: Path) -> None:
    trace = opened(tmp_path, two_units_on_a_device())
    assert events_of(trace, "issued_ns", "start_ns", "end_ns", "needed_ns", "exposed_ns") == [
        # nothing ran before a's copy-out: it was needed once it was launched, at 6; all 20 µs are exposed
        ("a", "forward", "all_gather", "self", 2, 10, 30, 6, 20),
        ("a", "forward", "copy_out", "self", 6, 30, 34, 6, None),
        # a's matrix product ended at 54, and b's copy-out had been launched: needed then; 54–61 are exposed,
        # and the moments 31–54 lie under a's copy-out and product
        ("b", "forward", "all_gather", "forward_prefetch", 10, 31, 61, 54, 7),
        ("b", "forward", "copy_out", "self", 21, 61, 65, 54, None),
        # 120–130 lie under backward
        ("a", "backward", "reduce_scatter", "self", 36, 120, 150, 160, 20),
    ]
    assert dict(trace.units.schema) == UNIT_SCHEMA


def test_units_of_a_selection_are_the_whole_recording_s(tmp_path: Path) -> None:
    """From 30 to 62 µs a's copy-out and product run, and b's gather and copy-out; their ranges ended by 27."""
    path = write_trace(tmp_path / "rank0.json", two_units_on_a_device(), rank=0)
    whole, part = open_trace(path), open_trace(path, window=(0.030, 0.062))
    assert len(whole.units) == 5
    assert part.units.equals(whole.units[1:4])
    assert part.validate()["fsdp"].is_supported
    assert Trace.read_parquet(part.write_parquet(tmp_path / "out")).units.equals(part.units)


def test_a_gather_that_is_there_in_time_is_needed_when_its_unit_begins(tmp_path: Path) -> None:
    events = [
        mark("FSDP::backward_prefetch for a", 0, 5),
        mark("FSDP::all_gather (a)", 1, 3),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, stream=20),
        *launched("kernel", "sgemm_other", 6, 8, 42, correlation=2),
        mark("FSDP::pre_backward (a)", 10, 1),
        *launched("kernel", "sgemm_a", 12, 55, 10, correlation=3),
        mark("FSDP::post_backward_reduce (a)", 20, 1),
    ]
    # the other product ended at 50: the 5 µs until 55 are the device's own
    assert events_of(opened(tmp_path, events), "needed_ns", "exposed_ns") == [
        ("a", "backward", "all_gather", "backward_prefetch", 50, 0)
    ]


def test_a_copy_in_does_not_say_when_the_unit_is_needed(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward (a)", 0, 20),
        mark("FSDP::all_gather (a)", 1, 8),
        op("fsdp::all_gather_copy_in", 2, 3),
        *launched("kernel", "copy_in", 3, 10, 5, correlation=1, stream=24),
        *launched("kernel", GATHER, 6, 20, 20, correlation=2, stream=20),
        op("fsdp::split_with_sizes_copy", 11, 3),
        *launched("kernel", "split_copy", 12, 40, 4, correlation=3),
        mark("FSDP::post_forward (a)", 30, 1),
    ]
    with_ranges = [*events, mark("FSDP::all_gather_copy_out (a)", 10, 5)]
    assert events_of(opened(tmp_path, with_ranges), "needed_ns", "exposed_ns") == [
        ("a", "forward", "copy_in", "self", 12, None),
        ("a", "forward", "all_gather", "self", 12, 20),
        ("a", "forward", "copy_out", "self", 12, None),
    ]


def test_a_cast_before_the_gather_does_not_say_when_the_unit_is_needed(tmp_path: Path) -> None:
    """Mixed precision: FSDP2 casts on the copy-in's stream, FSDP1 before it unshards."""
    fsdp2 = [
        mark("FSDP::pre_forward (a)", 0, 20),
        mark("FSDP::all_gather (a)", 1, 8),
        op("aten::_foreach_copy_", 2, 2),
        *launched("kernel", "cast", 3, 5, 4, correlation=1, stream=24),
        *launched("kernel", GATHER, 6, 20, 20, correlation=2, stream=20),
        mark("FSDP::all_gather_copy_out (a)", 10, 5),
        op("fsdp::split_with_sizes_copy", 11, 3),
        *launched("kernel", "split_copy", 12, 40, 4, correlation=3),
        mark("FSDP::post_forward (a)", 30, 1),
    ]
    assert events_of(opened(tmp_path, fsdp2), "needed_ns") == [
        ("a", "forward", "all_gather", "self", 12),
        ("a", "forward", "copy_out", "self", 12),
    ]
    fsdp1 = [
        mark("FullyShardedDataParallel.forward", 0, 50),
        mark("FullyShardedDataParallel._pre_forward", 1, 12),
        *launched("kernel", "cast", 3, 5, 4, correlation=1, stream=24),
        *launched("kernel", GATHER, 6, 20, 20, correlation=2, stream=20),
        *launched("kernel", "cast of the inputs", 8, 40, 4, correlation=3),  # after the wait for the gather
        *launched("kernel", "sgemm", 20, 44, 9, correlation=4),
        mark("FullyShardedDataParallel._post_forward", 40, 3),
    ]
    assert events_of(opened(tmp_path, fsdp1), "needed_ns") == [("(root)", "forward", "all_gather", "self", 8)]


def test_a_unit_s_first_kernel_waits_for_whatever_ran_on_its_stream(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward (a)", 0, 9),
        mark("FSDP::all_gather (a)", 1, 3),
        *launched("kernel", GATHER, 2, 10, 50, correlation=1, stream=20),
        *launched(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 10, 12, 26, correlation=2
        ),  # tensor parallelism
        *launched("kernel", "sgemm", 12, 60, 5, correlation=3),
        mark("FSDP::post_forward (a)", 30, 1),
    ]
    assert events_of(opened(tmp_path, events), "needed_ns") == [("a", "forward", "all_gather", "self", 38)]


def test_ranges_that_a_device_repeats_are_no_hooks(tmp_path: Path) -> None:
    """Kineto shows each range again on the stream of what was launched in it, while that ran."""
    events = two_units_on_a_device()
    again = [
        span("gpu_user_annotation", name, start, duration, process=0, thread=stream)
        for name, start, duration, stream in (
            ("FSDP::pre_forward (a)", 10, 24, 7),
            ("FSDP::all_gather (a)", 10, 20, 20),
            ("FSDP::all_gather (b)", 31, 30, 20),
            ("FSDP::pre_forward (b)", 61, 4, 7),
            ("FSDP::post_backward_reduce (b)", 5, 7, 24),  # of the step before, while the host gathers b again
        )
    ]
    plain, repeated = opened(tmp_path / "plain", events), opened(tmp_path / "again", [*events, *again])
    assert len(plain.units) == 5
    assert repeated.units.drop("lane").equals(plain.units.drop("lane"))


def test_parameter_groups_of_one_module_are_told_apart(tmp_path: Path) -> None:
    """Experts sharded over 4 ranks in a block sharded over 2: each group has hooks of its own, one after the other."""
    events = [
        mark("FSDP::pre_forward (a) [pg=2]", 0, 9),
        mark("FSDP::all_gather (a) [pg=2]", 1, 3),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, stream=20),
        mark("FSDP::pre_forward (a) [pg=4]", 10, 9),
        mark("FSDP::all_gather (a) [pg=4]", 11, 3),
        *launched("kernel", GATHER, 12, 31, 10, correlation=2, stream=20),
        *launched("kernel", "sgemm", 21, 50, 9, correlation=3),
        mark("FSDP::post_forward (a) [pg=2]", 30, 1),
        mark("FSDP::post_forward (a) [pg=4]", 32, 1),
        mark("FSDP::post_backward_reduce (a) [pg=4]", 40, 4),
        *launched("kernel", SCATTER, 41, 70, 5, correlation=4, stream=24),
    ]
    assert events_of(opened(tmp_path, events), "needed_ns") == [
        ("a", "forward", "all_gather", "self", 21),
        ("a", "forward", "all_gather", "self", 21),
        ("a", "backward", "reduce_scatter", "self", None),
    ]


def test_on_the_cpu_a_hook_needs_its_unit_when_it_begins(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[80], [20]], "Input type": ["float", "float"]}
    events = [
        mark("FSDP::pre_forward (a)", 0, 40),
        mark("FSDP::all_gather (a)", 1, 8),
        op("fsdp::all_gather_copy_in", 2, 2),
        op("c10d::_allgather_base_", 5, 2, **shapes),
        mark("gloo:all_gather", 6, 20, thread=200, **{"Input Dims": [[20]], "Input type": ["float"]}),
        mark("FSDP::all_gather_copy_out (a)", 10, 25),
        op("aten::as_strided", 27, 1),
        op("fsdp::split_with_sizes_copy", 28, 5),
        op("aten::mm", 41, 5),
        mark("FSDP::post_forward (a)", 50, 1),
    ]
    assert events_of(opened(tmp_path, events), "issued_ns", "needed_ns", "exposed_ns", "bytes") == [
        ("a", "forward", "copy_in", "self", 2, 0, None, None),
        ("a", "forward", "all_gather", "self", 5, 0, 20, 320),
        ("a", "forward", "copy_out", "self", 28, 0, None, None),
    ]


def test_copies_of_offloaded_parameters_and_gradients(tmp_path: Path) -> None:
    copy = {"bytes": 64}
    events = [
        mark("FSDP::pre_forward (a), op_id = 12", 0, 5),  # as Nsight has it
        *launched("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1, 10, 10, correlation=1, **copy),
        *launched("kernel", "sgemm", 6, 20, 5, correlation=2),
        *launched("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 7, 30, 2, correlation=3, **copy),  # the block's own
        mark("FSDP::post_forward (a), op_id = 13", 9, 1),
        mark("FSDP::inputs_to_device", 11, 3),
        *launched("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 12, 40, 2, correlation=4, **copy),
        mark("FSDP::post_backward_reduce (a), op_id = 20", 20, 5),
        *launched("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 21, 50, 4, correlation=5, **copy),
    ]
    assert events_of(opened(tmp_path, events), "start_ns", "exposed_ns", "bytes") == [
        ("a", "forward", "h2d", "self", 10, 10, 64),
        ("a", "backward", "d2h", "self", 50, 4, 64),
    ]


def test_an_emulated_transfer_was_issued_by_the_last_range_of_its_unit(tmp_path: Path) -> None:
    link = {"thread": 300}
    events = [
        mark("FSDP::pre_forward (a)", 0, 40),
        mark("FSDP::all_gather (a)", 1, 4),
        mark("fsdpviz::all_gather (a)", 3, 30, **link),
        mark("FSDP::forward_prefetch for b", 34, 5),
        mark("FSDP::all_gather (b)", 35, 3),
        mark("fsdpviz::all_gather (b)", 36, 30, **link),
        op("aten::mm", 41, 20),
        mark("FSDP::post_forward (a)", 62, 1),
        mark("FSDP::pre_forward (b)", 64, 4),
        op("aten::mm", 69, 1),
        mark("FSDP::post_forward (b)", 71, 1),
    ]
    assert events_of(opened(tmp_path, events), "issued_ns", "start_ns", "needed_ns", "exposed_ns") == [
        ("a", "forward", "all_gather", "self", 1, 3, 0, 30),
        ("b", "forward", "all_gather", "forward_prefetch", 35, 36, 64, 10),
    ]


def test_a_transfer_without_a_launch_has_no_unit(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward (a)", 0, 9),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, stream=20)[1:],
    ]
    assert opened(tmp_path, events).units.is_empty()


def test_without_fsdp_there_are_no_units(tmp_path: Path) -> None:
    events = [mark("fsdpviz::forward (a)", 0, 9), *launched("kernel", GATHER, 2, 10, 20, correlation=1)]
    units = opened(tmp_path, events).units
    assert units.is_empty() and dict(units.schema) == UNIT_SCHEMA


def test_other_parallelism_inside_a_unit_is_not_fsdp(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward (a)", 0, 2),
        mark("nccl:all_reduce", 4, 3),  # tensor parallelism
        *launched("kernel", "ncclDevKernel_AllReduce()", 5, 10, 5, correlation=1),
        mark("nccl:all_to_all", 7, 2),  # experts
        *launched("kernel", "ncclDevKernel_SendRecv()", 7.5, 20, 5, correlation=2),
        mark("FSDP::post_forward (a)", 12, 1),
    ]
    trace = opened(tmp_path, events)
    assert trace.units.is_empty()
    assert trace.collectives.select(pl.col("kind").cast(pl.String), "unit", "role").rows() == [
        ("all_reduce", None, None),
        ("all_to_all", "a", None),
    ]


# -- FSDP1


FSDP1 = "FullyShardedDataParallel."
FSDP1_SHAPES = {"Input Dims": [[80], [20]], "Input type": ["float", "float"]}


def fsdp1_gather(start: float) -> list[dict[str, Any]]:
    own = {"Input Dims": [[20]], "Input type": ["float"]}
    return [
        op("c10d::_allgather_base_", start, 1, **FSDP1_SHAPES),
        mark("gloo:all_gather", start + 1, 5, thread=200, **own),
    ]


def fsdp1_reduce(start: float) -> list[dict[str, Any]]:
    own = {"Input Dims": [[80]], "Input type": ["float"]}
    return [
        op("c10d::_reduce_scatter_base_", start, 1, **FSDP1_SHAPES),
        mark("gloo:all_reduce", start + 1, 2, thread=200, **own),
    ]


def fsdp1_step(at: float, *, named: bool) -> list[dict[str, Any]]:
    """A root without parameters and two units; forward gathers each, backward gathers ahead; 200 µs long."""

    def forward(start: float, name: str) -> list[dict[str, Any]]:
        events = [
            mark(FSDP1 + "forward", start, 30),
            mark(FSDP1 + "_pre_forward", start + 1, 8),
            *fsdp1_gather(start + 2),
            mark(FSDP1 + "_post_forward", start + 25, 3),
        ]
        return [*events, mark(f"fsdpviz::forward ({name})", start + 10, 14)] if named else events

    return [
        mark(FSDP1 + "forward", at, 70),
        *forward(at + 2, "x"),
        *forward(at + 35, "y"),
        # the root's hook has nothing to prefetch for; y's gathers y, and x ahead
        mark(FSDP1 + "_pre_backward_hook", at + 80, 1),
        mark(FSDP1 + "_pre_backward_hook", at + 82, 20),
        *fsdp1_gather(at + 83),
        mark(FSDP1 + "_pre_backward_prefetch", at + 91, 8),
        *fsdp1_gather(at + 92),
        mark(FSDP1 + "_post_backward_hook", at + 110, 8),
        *fsdp1_reduce(at + 111),
        mark(FSDP1 + "_pre_backward_hook", at + 130, 5),
        mark(FSDP1 + "_pre_backward_prefetch", at + 131, 2),
        mark(FSDP1 + "_post_backward_hook", at + 150, 8),
        *fsdp1_reduce(at + 151),
    ]


@pytest.mark.parametrize(("named", "x", "y"), [(True, "x", "y"), (False, "#1", "#2")])
def test_fsdp1_by_order_and_nesting(tmp_path: Path, named: bool, x: str, y: str) -> None:
    trace = opened(tmp_path, [*fsdp1_step(0, named=named), *fsdp1_step(200, named=named)])
    step = [
        (x, "forward", "all_gather", "self"),
        (y, "forward", "all_gather", "self"),
        (y, "backward", "all_gather", "self"),
        (x, "backward", "all_gather", "backward_prefetch"),
        (y, "backward", "reduce_scatter", "self"),
        (x, "backward", "reduce_scatter", "self"),
    ]
    assert events_of(trace) == [*step, *step]
    assert trace.units["issued_ns"].to_list()[:2] == [4 * US, 37 * US]


def test_fsdp1_s_units_stay_unknown_where_the_counts_do_not_fit(tmp_path: Path) -> None:
    cut = [event for event in fsdp1_step(0, named=False) if event["ts"] < 140]  # x's post-backward is not in it
    found = events_of(opened(tmp_path, cut))
    assert [row[:3] for row in found] == [
        ("#1", "forward", "all_gather"),
        ("#2", "forward", "all_gather"),
        ("#2", "backward", "all_gather"),
        ("#1", "backward", "all_gather"),
    ]


def fsdp1_forward(start: float, *, gathers: bool = True) -> list[dict[str, Any]]:
    """A unit's forward, 12 µs long; without a gather it is one that FSDP1 does nothing for."""
    events = [
        mark(FSDP1 + "forward", start, 12),
        mark(FSDP1 + "_pre_forward", start + 1, 4),
        op("aten::mm", start + 6, 2),
        mark(FSDP1 + "_post_forward", start + 9, 2),
    ]
    return (
        [*events, *fsdp1_gather(start + 2), mark(FSDP1 + "_pre_forward_prefetch", start + 4, 0.5)]
        if gathers
        else events
    )


def fsdp1_backward(start: float, *, ahead: bool, own: bool) -> list[dict[str, Any]]:
    """A unit's hook before backward, 8 µs long: it gathers its own at 1 µs, and ahead at 4 µs."""
    return [
        mark(FSDP1 + "_pre_backward_hook", start, 8),
        *(fsdp1_gather(start + 1) if own else ()),
        mark(FSDP1 + "_pre_backward_prefetch", start + 3, 4),
        *(fsdp1_gather(start + 4) if ahead else ()),
    ]


def fsdp1_root(at: float, *units: float, is_marked: bool = True) -> list[dict[str, Any]]:
    """The root's forward, without parameters and 60 µs long, with units' forwards in it."""
    marks = [mark(FSDP1 + "_root_pre_forward", at + 1, 2), mark(FSDP1 + "_to_kwargs", at + 1.5, 1)]
    forwards = [event for unit in units for event in fsdp1_forward(at + unit)]
    return [mark(FSDP1 + "forward", at, 60), *(marks if is_marked else ()), *forwards]


def fsdp1_checkpointed(at: float, *, is_reentrant: bool, is_marked: bool = True) -> list[dict[str, Any]]:
    """Two units, ``checkpoint(FSDP(block))`` each: backward runs their forwards again, with no other around them.

    If it is reentrant they run before the unit's hook and gather themselves, else after it and do nothing.
    """
    events = fsdp1_root(at, 10, 30, is_marked=is_marked)
    for start, is_first in ((at + 80, True), (at + 130, False)):
        again = fsdp1_forward(start + (1 if is_reentrant else 15), gathers=is_reentrant)
        hook = (
            fsdp1_backward(start + 15, ahead=False, own=True)
            if is_reentrant
            else fsdp1_backward(start + 1, ahead=is_first, own=is_first)
        )
        reduce = [mark(FSDP1 + "_post_backward_hook", start + 32, 4), *fsdp1_reduce(start + 33)]
        events += [op("autograd::engine::evaluate_function: X", start, 40), *again, *hook, *reduce]
    return events


@pytest.mark.parametrize("is_marked", [True, False])  # torch before 2.1 does not mark its root
def test_fsdp1_s_checkpointed_forwards_are_no_roots(tmp_path: Path, is_marked: bool) -> None:
    events = [event for at in (0, 200) for event in fsdp1_checkpointed(at, is_reentrant=False, is_marked=is_marked)]
    trace = opened(tmp_path, events)
    step = [
        ("#1", "forward", "all_gather", "self", 10 + 1),
        ("#2", "forward", "all_gather", "self", 30 + 1),
        ("#2", "backward", "all_gather", "self", 81),  # when its hook begins; the forward that runs again needs none
        ("#1", "backward", "all_gather", "backward_prefetch", 131),
        ("#2", "backward", "reduce_scatter", "self", None),
        ("#1", "backward", "reduce_scatter", "self", None),
    ]
    later = [(*row[:4], row[4] and row[4] + 200) for row in step]
    assert events_of(trace, "needed_ns") == [*step, *later]
    blocks = trace.spans.filter(pl.col("name") == "aten::mm").select("unit", "phase").rows()
    assert blocks == [("#1", "forward"), ("#2", "forward"), ("#2", "recompute"), ("#1", "recompute")] * 2


@pytest.mark.parametrize("is_marked", [True, False])
def test_fsdp1_s_reentrant_checkpoints_gather_twice(tmp_path: Path, is_marked: bool) -> None:
    trace = opened(tmp_path, fsdp1_checkpointed(0, is_reentrant=True, is_marked=is_marked))
    assert events_of(trace, "needed_ns") == [
        ("#1", "forward", "all_gather", "self", 11),
        ("#2", "forward", "all_gather", "self", 31),
        ("#2", "recompute", "all_gather", "self", 82),
        ("#2", "backward", "all_gather", "self", 95),
        ("#2", "backward", "reduce_scatter", "self", None),
        ("#1", "recompute", "all_gather", "self", 132),
        ("#1", "backward", "all_gather", "self", 145),
        ("#1", "backward", "reduce_scatter", "self", None),
    ]


def test_fsdp1_s_units_of_one_checkpoint_run_again_side_by_side(tmp_path: Path) -> None:
    """Both gather again, #1 before #2; only the second's hook comes next."""
    backward = [
        *fsdp1_forward(81),
        *fsdp1_forward(94),
        *fsdp1_backward(110, ahead=False, own=False),
        mark(FSDP1 + "_post_backward_hook", 120, 4),
        *fsdp1_backward(130, ahead=False, own=False),
        mark(FSDP1 + "_post_backward_hook", 140, 4),
    ]
    node = op("autograd::engine::evaluate_function: X", 80, 70)
    found = events_of(opened(tmp_path, [*fsdp1_root(0, 10, 30), node, *backward]))
    assert [row[:2] for row in found[2:]] == [("#1", "recompute"), ("#2", "recompute")]


def test_fsdp1_s_forwards_that_ran_otherwise_the_first_time_stay_unknown(tmp_path: Path) -> None:
    """Three forwards in a row, of a root with two units, repeat nothing."""
    again = [event for start in (81, 94, 107) for event in fsdp1_forward(start)]
    hooks = [*fsdp1_backward(130, ahead=False, own=False), *fsdp1_backward(140, ahead=False, own=False)]
    found = events_of(opened(tmp_path, [*fsdp1_root(0, 10, 30), *again, *hooks]))
    assert [row[0] for row in found] == ["#1", "#2"]


def test_fsdp1_s_units_are_unknown_where_the_root_began_before_the_recording(tmp_path: Path) -> None:
    cut = [event for event in fsdp1_checkpointed(0, is_reentrant=False) if event["ts"] >= 10]
    whole = fsdp1_checkpointed(200, is_reentrant=False)
    found = events_of(opened(tmp_path, [*cut, *whole]))
    assert found == events_of(opened(tmp_path, whole))
    assert len(found) == 6


def test_a_recording_that_has_no_forward_of_fsdp1_is_of_no_unit(tmp_path: Path) -> None:
    cut = [event for event in fsdp1_checkpointed(0, is_reentrant=False) if event["name"] != FSDP1 + "forward"]
    assert events_of(opened(tmp_path, cut)) == []


@pytest.mark.parametrize(("nodes", "units"), [(1, ["#2", "#1"]), (2, ["#1", "#2"])])
def test_fsdp1_s_hooks_on_one_output_run_inner_first(tmp_path: Path, nodes: int, units: list[str]) -> None:
    """#1 holds #2. If #1 returns what #2 made, both hooks are on it; else an operator is between them."""
    hooks = [*fsdp1_backward(81, ahead=False, own=True), *fsdp1_backward(101, ahead=False, own=True)]
    ranges = [(80, 40)] if nodes == 1 else [(80, 15), (100, 15)]
    events = [
        *fsdp1_root(0),
        mark(FSDP1 + "forward", 5, 50),
        mark(FSDP1 + "_pre_forward", 6, 4),
        mark(FSDP1 + "_pre_forward_prefetch", 7, 1),
        *fsdp1_forward(20),
        *(op("autograd::engine::evaluate_function: X", start, duration) for start, duration in ranges),
        *hooks,
    ]
    trace = opened(tmp_path, events)
    assert [row[0] for row in events_of(trace)] == ["#2", *units]
    # a selection has lost autograd's nodes, and tells the same
    assert open_trace(tmp_path / "rank0.json", window=(0, 1)).units.equals(trace.units)


# -- recordings


@pytest.mark.skipif(not KINETO.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize(
    ("name", "forward"),
    [("plain", "self"), ("async_prefetch", "forward_prefetch"), ("hsdp", "self"), ("offload", "self")],
)
def test_fsdp2_on_four_gloo_ranks(name: str, forward: str) -> None:
    """Six units: the first gathers for itself; backward gathers the last itself and the others ahead."""
    trace = open_trace(sorted((KINETO / "gloo").glob(f"fsdp2_{name}_rank*")))
    counts = trace.units.group_by("rank", "event", "issuer", "phase").agg(
        pl.len(), pl.col("unit").n_unique().alias("n")
    )
    counts = counts.with_columns(pl.col("event").cast(pl.String), pl.col("issuer").cast(pl.String))
    for rank in range(4):
        found = {row[1:4]: row[4:] for row in counts.filter(pl.col("rank") == rank).iter_rows()}
        assert found["all_gather", "self", "backward"] == (1, 1)
        assert found["all_gather", "backward_prefetch", "backward"] == (5, 5)
        own = found["all_gather", "self", "forward"][0]
        assert (own, found.get(("all_gather", "forward_prefetch", "forward"), (0,))[0]) == (
            (1, 5) if forward == "forward_prefetch" else (6, 0)
        )
        assert found["reduce_scatter", "self", "backward"] == (6, 6)
        assert found.get(("all_reduce", "self", "backward")) == ((6, 6) if name == "hsdp" else None)
        assert found["copy_out", "self", "forward"] == (6, 6)
    assert trace.units["needed_ns"].null_count() == 0
    assert (trace.units["issued_ns"] <= trace.units["start_ns"]).all()
