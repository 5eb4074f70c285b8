"""Which unit, phase, step and kind spans get, on recordings small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_trace import GPU, WORKER, launched, mark, op, span, write_trace

from fsdpviz.base.kinds import WORK
from fsdpviz.trace import Trace, open_trace


def opened(tmp_path: Path, events: Iterable[Any]) -> Trace:
    return open_trace(write_trace(tmp_path / "rank0.json", events, rank=0))


def work(trace: Trace) -> list[tuple[Any, ...]]:
    """Name, kind, unit, phase and step of what counts as work, in order of time."""
    spans = trace.spans.filter(pl.col("kind").is_in([kind.value for kind in WORK])).sort("start_ns")
    return spans.select("name", pl.col("kind").cast(pl.String), "unit", "phase", "step").rows()


def kinds(trace: Trace) -> dict[str, str]:
    return dict(trace.spans.select("name", pl.col("kind").cast(pl.String)).rows())


def whats(trace: Trace) -> list[str]:
    return [note.what for note in trace.notes]


# -- devices


GATHER = "ncclDevKernel_SendRecv(ncclDevKernelArgs)"  # its name does not say that it gathers
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter(ncclDevKernelArgs)"


def fsdp_step_on_a_device() -> list[dict[str, Any]]:
    """One unit's step: launched by 70 µs, while the device is busy until 190 µs.

    host   |pre_forward 0–10 [all_gather 2–6]| mm 12 |post_forward 15–16|      Optimizer.step 60–70
    thread                                      |pre_backward 30–32| 41 |post_backward_reduce 45–50|
    device  all-gather 20–40, mm 50–80, mm 90–120, reduce-scatter 130–160, adam 170–190
    """
    dims = {"Input Dims": [[800], [100]], "Input type": ["float", "float"]}
    grads = {"Input Dims": [[100], [800]], "Input type": ["float", "float"]}
    backward = {"launch_thread": WORKER}
    return [
        mark("ProfilerStep#7", 0, 75),
        mark("FSDP::pre_forward (layers.0)", 0, 10),
        mark("FSDP::all_gather (layers.0)", 2, 4),
        op("c10d::_allgather_base_", 3, 2, **dims),
        *launched("kernel", GATHER, 4, 20, 20, correlation=1, stream=20),
        *launched("kernel", "sgemm_forward", 12, 50, 30, correlation=2),
        mark("FSDP::post_forward (layers.0)", 15, 1),
        mark("FSDP::pre_backward (layers.0)", 30, 2, thread=WORKER),
        op("autograd::engine::evaluate_function: AddmmBackward0", 40, 3, thread=WORKER),
        *launched("kernel", "sgemm_backward", 41, 90, 30, correlation=3, **backward),
        mark("FSDP::post_backward_reduce (layers.0)", 45, 5, thread=WORKER),
        op("c10d::_reduce_scatter_base_", 46, 2, thread=WORKER, **grads),
        *launched("kernel", REDUCE_SCATTER, 47, 130, 30, correlation=4, **backward),
        mark("Optimizer.step#AdamW.step", 60, 10),
        *launched("kernel", "adam_kernel", 65, 170, 20, correlation=5),
    ]


def test_device_spans_get_unit_phase_and_step_through_their_launch(tmp_path: Path) -> None:
    trace = opened(tmp_path, fsdp_step_on_a_device())
    assert work(trace) == [
        (GATHER, "all_gather", "layers.0", "forward", 7),
        ("sgemm_forward", "compute", "layers.0", "forward", 7),
        ("sgemm_backward", "compute", "layers.0", "backward", 7),
        (REDUCE_SCATTER, "reduce_scatter", "layers.0", "backward", 7),
        ("adam_kernel", "optimizer", None, "optimizer", 7),
    ]
    assert trace.notes == ()


def test_a_collective_takes_its_payload_from_the_operator_that_issued_it(tmp_path: Path) -> None:
    trace = opened(tmp_path, fsdp_step_on_a_device())
    sizes = dict(trace.spans.filter(pl.col("bytes").is_not_null()).select("name", "bytes").rows())
    # 800 floats gathered, and 800 floats to be scattered
    assert sizes == {
        GATHER: 3200,
        REDUCE_SCATTER: 3200,
    }


def test_one_id_for_many_kernels_and_kernels_without_a_launch(tmp_path: Path) -> None:
    events = [
        mark("ProfilerStep#1", 0, 10),
        mark("ProfilerStep#2", 10, 10),
        *launched("kernel", "graph_a", 5, 100, 10, correlation=9),
        span("kernel", "graph_b", 110, 10, process=GPU, thread=7, correlation=9),  # the same graph launch
        *launched("kernel", "next", 15, 200, 10, correlation=10),
        span("kernel", "early", 90, 5, process=GPU, thread=7, correlation=77),
        span("kernel", "orphan", 150, 10, process=GPU, thread=7, correlation=78),
        span("kernel", "late", 230, 10, process=GPU, thread=7, correlation=79),
    ]
    trace = opened(tmp_path, events)
    steps = {name: step for name, _, _, _, step in work(trace)}
    # an orphan belongs where it lies between what is known; before and after that nothing is known
    assert steps == {"early": None, "graph_a": 1, "graph_b": 1, "orphan": 1, "next": 2, "late": None}
    note = trace.notes[0]
    assert (note.what, note.count) == ("device spans without a launch in the file: no unit, no phase", 3)


def test_optimizer_kernels_by_name_only_where_no_range_tells(tmp_path: Path) -> None:
    name = "void at::native::multi_tensor_apply_kernel<FusedAdam>()"
    kernel = launched("kernel", name, 5, 100, 10, correlation=1)
    assert kinds(opened(tmp_path, kernel))[name] == "optimizer"
    # a copy of many tensors has that name too: with a range at hand, what lies outside of it is compute
    assert kinds(opened(tmp_path, [*kernel, mark("Optimizer.step#SGD.step", 20, 5)]))[name] == "compute"


def test_fsdp_s_own_foreach_copies_are_no_optimizer(tmp_path: Path) -> None:
    """Copy-ins are multi_tensor_apply kernels, and many recordings have no range of the optimizer."""
    copy_in, adam = (f"void at::native::multi_tensor_apply_kernel<{name}>()" for name in ("CopyFunctor", "AdamFunctor"))
    events = [
        mark("FSDP::pre_forward (a)", 0, 10),
        mark("FSDP::all_gather (a)", 1, 5),
        *launched("kernel", copy_in, 2, 20, 5, correlation=1),
        mark("FSDP::post_forward (a)", 15, 1),
        mark("FSDP::backward_prefetch for b", 17, 5),  # in no unit's window
        mark("FSDP::all_gather (b)", 18, 3),
        *launched("kernel", copy_in + " of b", 19, 30, 5, correlation=2),
        *launched("kernel", adam, 40, 50, 5, correlation=3),
    ]
    assert [row[:4] for row in work(opened(tmp_path, events))] == [
        (copy_in, "compute", "a", "forward"),
        (copy_in + " of b", "compute", "b", None),
        (adam, "optimizer", None, "optimizer"),
    ]


def test_an_optimizer_that_launches_nothing_runs_on_the_host(tmp_path: Path) -> None:
    """Offloaded parameters are updated on the CPU; one that launches its kernels is work of the device alone."""
    events = [
        mark("ProfilerStep#1", 0, 100),
        mark("FSDP::post_backward_reduce (a)", 1, 6),
        *launched("kernel", REDUCE_SCATTER, 2, 5, 10, correlation=1, stream=24),
        *launched("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4, 15, 3, correlation=2, stream=24),
        mark("Optimizer.step#Adam.step", 20, 60),
        op("aten::_foreach_add_", 22, 30),
        op("aten::add_", 23, 5),
        op("aten::sqrt", 60, 10),
        mark("ProfilerStep#2", 100, 100),
        *launched("kernel", "sgemm", 101, 110, 10, correlation=3),
        mark("Optimizer.step#Adam.step", 120, 60),
        op("aten::add_ of the step count", 121, 2),
        op("aten::_foreach_addcdiv_", 125, 9),
        *launched("kernel", "adam", 126, 130, 10, correlation=4),
    ]
    trace = opened(tmp_path, events)
    assert [row for row in work(trace) if row[1] == "optimizer"] == [
        ("aten::_foreach_add_", "optimizer", None, "optimizer", 1),
        ("aten::sqrt", "optimizer", None, "optimizer", 1),
        ("adam", "optimizer", None, "optimizer", 2),
    ]
    # the gradients are needed when the first of them is used
    assert trace.units.select("event", "needed_ns").rows() == [("reduce_scatter", 22_000), ("d2h", 22_000)]


def test_an_optimizer_s_range_around_another_launches_what_that_does(tmp_path: Path) -> None:
    events = [
        mark("Optimizer.step#Zero.step", 0, 60),
        op("aten::item", 1, 5),
        mark("Optimizer.step#Adam.step", 10, 40),
        *launched("kernel", "adam", 12, 20, 10, correlation=1),
    ]
    assert [row[:2] for row in work(opened(tmp_path, events))] == [("adam", "optimizer")]


def test_without_any_launch_nothing_says_which_optimizer_runs_on_the_host(tmp_path: Path) -> None:
    events = [
        mark("Optimizer.step#Adam.step", 0, 60),
        op("aten::_foreach_add_", 1, 50),
        span("kernel", "adam", 20, 10, process=GPU, thread=7, correlation=1),
    ]
    assert [row[:2] for row in work(opened(tmp_path, events))] == [("adam", "compute")]


@pytest.mark.parametrize("name", ["iteration {}", "step_{}", "Train Step: {}", "iter#{}"])
def test_steps_that_a_program_counts(tmp_path: Path, name: str) -> None:
    """Nsight has no steps of a profiler; people push ranges of their own."""
    events = [mark(name.format(7), 0, 50), mark(name.format(8), 50, 50)]
    events += launched("kernel", "sgemm", 60, 110, 10, correlation=1)
    trace = opened(tmp_path, events)
    assert trace.steps["step"].to_list() == [7, 8]
    assert work(trace) == [("sgemm", "compute", None, None, 8)]
    assert whats(trace) == ["steps taken from the program's own ranges; the profiler's are not there"]
    # the profiler's own say it better
    assert opened(tmp_path, [mark("ProfilerStep#3", 0, 100), *events]).steps["step"].to_list() == [3]


@pytest.mark.parametrize(
    "ranges",
    [[("step 1", 0, 40), ("step 2", 10, 20)], [("iter 1", 0, 10), ("iter 1", 20, 10)], [("steps", 0, 9)]],
    ids=["nested", "twice", "without a number"],
)
def test_ranges_that_do_not_count_steps(tmp_path: Path, ranges: list[tuple[str, int, int]]) -> None:
    trace = opened(tmp_path, [mark(*given) for given in ranges])
    assert trace.steps.is_empty()
    assert trace.notes == ()


def test_of_two_steps_with_one_number_the_later_is_taken(tmp_path: Path) -> None:
    events = [mark("ProfilerStep#1", 1000, 50), mark("ProfilerStep#1", 0, 50, thread=WORKER)]
    assert opened(tmp_path, events).steps.select("step", "start_ns").rows() == [(1, 1_000_000)]


def test_a_step_that_two_threads_record_is_one(tmp_path: Path) -> None:
    events = [
        mark("ProfilerStep#1", 0, 50),
        mark("ProfilerStep#1", 10, 20, thread=WORKER),
        *launched("kernel", "sgemm", 40, 60, 10, correlation=1),
    ]
    trace = opened(tmp_path, events)
    assert trace.steps.select("step", "start_ns", "end_ns").rows() == [(1, 0, 50_000)]
    assert work(trace) == [("sgemm", "compute", None, None, 1)]


def test_what_lies_between_backward_and_the_optimizer_is_no_forward(tmp_path: Path) -> None:
    """Two micro-batches, then gradients are clipped; the second step only evaluates."""

    def backward(start: float) -> dict[str, Any]:
        return op("autograd::engine::evaluate_function: MmBackward0", start, 8)

    events = [
        mark("ProfilerStep#1", 0, 100),
        recorded("aten::mm", 1, 5),
        backward(10),
        op("aten::detach", 19, 1),  # between two nodes: autograd recorded nothing since the first
        backward(21),
        recorded("aten::bmm", 30, 5),
        op("aten::argmax", 36, 2),
        backward(40),
        op("aten::linalg_vector_norm", 50, 5),
        mark("Optimizer.step#SGD.step", 60, 10),
        op("aten::add_", 61, 5),
        op("aten::mean", 75, 2),  # behind the optimizer a new round begins
        mark("ProfilerStep#2", 100, 50),
        op("aten::addmm", 101, 5),
    ]
    assert {row[0]: row[3] for row in work(opened(tmp_path, events))} == {
        "aten::mm": "forward",
        "aten::detach": None,
        "aten::bmm": "forward",
        "aten::argmax": "forward",
        "aten::linalg_vector_norm": None,
        "aten::add_": "optimizer",
        "aten::mean": "forward",
        "aten::addmm": "forward",
    }


def test_waits_and_annotations_on_a_stream_are_no_work(tmp_path: Path) -> None:
    events = [
        *launched("kernel", "sgemm", 1, 10, 10, correlation=1),
        span("gpu_user_annotation", "nccl:all_reduce", 10, 10, process=GPU, thread=7),
        span("cuda_sync", "Stream Wait Event", 20, 5, process=GPU, thread=7, correlation=2),
        *launched("kernel", "batch_norm_SyncBatchNorm", 2, 30, 10, correlation=3),
    ]
    assert [row[0] for row in work(opened(tmp_path, events))] == ["sgemm", "batch_norm_SyncBatchNorm"]


# -- CPU and gloo

GLOO = 200


def gloo(name: str, start: float, duration: float, elements: int, thread: int = GLOO) -> dict[str, Any]:
    return mark(name, start, duration, thread=thread, **{"Input Dims": [[elements]], "Input type": ["float"]})


def issue(name: str, start: float, shapes: list[Any], **more: Any) -> dict[str, Any]:
    kind = "TensorList" if isinstance(shapes[0][0], list) else "float"
    return op(name, start, 1, **more, **{"Input Dims": shapes, "Input type": [kind] * len(shapes)})


def test_gloo_reduce_scatter_is_told_from_all_reduce_by_its_issuer(tmp_path: Path) -> None:
    events = [
        mark("FSDP::all_gather (a)", 0, 4),
        issue("c10d::_allgather_base_", 1, [[80], [20]]),
        gloo("gloo:all_gather", 2, 5, 20),
        mark("FSDP::post_backward_reduce (a)", 10, 30),
        issue("c10d::_reduce_scatter_base_", 11, [[20], [80]]),
        gloo("gloo:all_reduce", 12, 5, 80),
        issue("c10d::allreduce_", 18, [[[20]]]),
        gloo("gloo:all_reduce", 19, 5, 20),
        # two gloo threads: the second unit's reduce-scatter begins before the first one's all-reduce ends
        mark("FSDP::post_backward_reduce (b)", 20, 10),
        issue("c10d::_reduce_scatter_base_", 21, [[20], [80]]),
        gloo("gloo:all_reduce", 22, 5, 80, thread=GLOO + 1),
        gloo("gloo:all_reduce", 50, 5, 33),  # nobody in the file issued this one
    ]
    trace = opened(tmp_path, events)
    spans = trace.spans.filter(pl.col("name").str.starts_with("gloo:")).sort("start_ns")
    assert spans.select(pl.col("kind").cast(pl.String), "unit", "phase", "bytes").rows() == [
        ("all_gather", "a", None, 320),
        ("reduce_scatter", "a", "backward", 320),
        ("all_reduce", "a", "backward", 80),
        ("reduce_scatter", "b", "backward", 320),
        ("all_reduce", None, None, 132),
    ]
    assert whats(trace) == ["gloo ranges whose issuing operator is not in the file"]


def sending(name: str, start: float, *shapes: list[int]) -> dict[str, Any]:
    return mark(name, start, 5, thread=GLOO, **{"Input Dims": shapes, "Input type": ["float"] * len(shapes)})


def listing(name: str, start: float, *shapes: list[int]) -> dict[str, Any]:
    return op(name, start, 1, **{"Input Dims": [shapes, []], "Input type": ["TensorList", ""]})


def joined(tmp_path: Path, events: list[dict[str, Any]]) -> list[tuple[str, int | None, int | None]]:
    """Kind, bytes and time of issue of gloo's ranges, in the order of their starts."""
    spans = opened(tmp_path, events).spans.filter(pl.col("name").str.starts_with("gloo:")).sort("start_ns")
    return spans.select(pl.col("kind").cast(pl.String), "bytes", "issued_ns").rows()


def test_gloo_moves_all_tensors_of_a_list_and_a_number_is_one_element(tmp_path: Path) -> None:
    events = [
        listing("c10d::allreduce_coalesced_", 10, [3], [4]),
        sending("gloo:all_reduce", 15, [3], [4]),  # 7 floats
        listing("c10d::allreduce_", 110, []),
        sending("gloo:all_reduce", 115, []),
        listing("c10d::reduce_", 210, [9]),
        sending("gloo:reduce", 215, [9]),
        issue("c10d::alltoall_base_", 310, [[300], [100]]),
        sending("gloo:all_to_all", 315, [100]),
        listing("c10d::scatter_", 410, [4]),
        sending("gloo:scatter", 415, [4], [4]),  # the root's: a tensor for each rank
    ]
    assert joined(tmp_path, events) == [
        ("all_reduce", 28, 10_000),
        ("all_reduce", 4, 110_000),
        ("p2p", 36, 210_000),
        ("all_to_all", 400, 310_000),
        ("p2p", 32, 410_000),
    ]


def test_a_reduce_scatter_of_several_tensors_is_several_ranges(tmp_path: Path) -> None:
    lists = {"Input Dims": [[[8], [10]], [[16], [20]], []], "Input type": ["TensorList", "TensorList", ""]}
    events = [
        op("c10d::reduce_scatter_tensor_coalesced_", 10, 1, **lists),
        sending("gloo:all_reduce", 15, [16]),
        sending("gloo:all_reduce", 16, [20]),
        *(
            event
            for start in (100, 200)  # from a list of 7 floats for each of two ranks, which is not shown
            for event in (
                listing("c10d::reduce_scatter_", start, [7]),
                sending("gloo:all_reduce", start + 2, [7]),
                sending("gloo:all_reduce", start + 3, [7]),
            )
        ),
        listing("c10d::allreduce_", 300, [7]),
        sending("gloo:all_reduce", 302, [7]),
    ]
    assert joined(tmp_path, events) == [
        ("reduce_scatter", 64, 10_000),
        ("reduce_scatter", 80, 10_000),
        *[("reduce_scatter", 28, 100_000)] * 2,
        *[("reduce_scatter", 28, 200_000)] * 2,
        ("all_reduce", 28, 300_000),
    ]


def test_an_operator_without_a_range_is_left_over(tmp_path: Path) -> None:
    """Those at 10 and 120 ran elsewhere, and gloo's queue is long at 200: what is issued first runs first."""
    events = [
        listing("c10d::allreduce_", 10, [7]),
        listing("c10d::allreduce_", 110, [7]),
        sending("gloo:all_reduce", 115, [7]),
        listing("c10d::allreduce_coalesced_", 120, [8]),
        mark("gloo:all_reduce", 130, 5, thread=GLOO),  # of a size that nobody knows
        *(listing("c10d::allreduce_", start, [7]) for start in (200, 202, 204)),
        *(sending("gloo:all_reduce", start, [7]) for start in (210, 220, 230)),
    ]
    issued = [issued_ns for _, _, issued_ns in joined(tmp_path, events)]
    assert issued == [110_000, 120_000, 200_000, 202_000, 204_000]


def test_a_gather_into_a_list_is_as_large_as_its_group(tmp_path: Path) -> None:
    """FSDP1 on CPU gathers into a list of tensors: the operator then shows the shard, 20 floats, and no output."""
    listed = op("c10d::allgather_", 0, 1, **{"Input Dims": [[], [[20]]], "Input type": ["", "TensorList"]})
    events = [listed, gloo("gloo:all_gather", 1, 5, 20)]
    for sizes, payload in (((4,), 320), ((4, 1, 4), 320), ((4, 2), None), ((), None)):
        info = {"rank": 0, "pg_config": [{"pg_size": size} for size in sizes]}
        trace = open_trace(write_trace(tmp_path / "t.json", events, distributedInfo=info))
        assert trace.spans.filter(pl.col("kind") == "all_gather")["bytes"].to_list() == [payload]


def test_a_collective_does_not_belong_to_the_block_around_it(tmp_path: Path) -> None:
    """DDP reduces a bucket while some block's backward runs: the bucket is no unit."""
    events = [
        mark("fsdpviz::backward", 0, 50),
        mark("fsdpviz::backward (blocks.0)", 1, 40),
        op("aten::mm", 2, 5),
        issue("c10d::allreduce_", 10, [[[20]]]),
        gloo("gloo:all_reduce", 11, 5, 20),
    ]
    assert [row[1:4] for row in work(opened(tmp_path, events))] == [
        ("compute", "blocks.0", "backward"),
        ("all_reduce", None, "backward"),
    ]


def test_the_outermost_operator_is_the_work(tmp_path: Path) -> None:
    events = [
        op("aten::linear", 0, 10),
        op("aten::addmm", 1, 8),
        op("autograd::engine::evaluate_function: AddmmBackward0", 20, 10),
        op("AddmmBackward0", 21, 8),
        op("aten::mm", 22, 6),
        op("fsdp::all_gather_copy_in", 40, 5),
        op("aten::copy_", 41, 3),
    ]
    trace = opened(tmp_path, events)
    assert [row[0] for row in work(trace)] == ["aten::linear", "aten::mm", "fsdp::all_gather_copy_in"]
    assert [row[3] for row in work(trace)] == ["forward", "backward", None]  # no backward follows the last


def test_an_operator_around_a_collective_is_not_compute(tmp_path: Path) -> None:
    events = [
        op("aten::norm_of_everything", 0, 100),
        op("aten::mul", 1, 2),
        issue("c10d::allreduce_", 5, [[[20]]]),
        op("_c10d_functional::wait_tensor", 7, 90),
        gloo("gloo:all_reduce", 6, 90, 20),
    ]
    trace = opened(tmp_path, events)
    assert [row[:2] for row in work(trace)] == [("aten::mul", "compute"), ("gloo:all_reduce", "all_reduce")]
    assert kinds(trace)["_c10d_functional::wait_tensor"] == "wait"


def test_what_gloo_does_on_its_own_threads_is_not_compute(tmp_path: Path) -> None:
    events = [op("aten::mm", 0, 10), gloo("gloo:all_gather", 2, 5, 20), op("aten::copy_", 8, 2, thread=GLOO)]
    assert kinds(opened(tmp_path, events))["aten::copy_"] == "host"


LINK = 300


def linked(name: str, start: float, duration: float) -> dict[str, Any]:
    return mark(name, start, duration, thread=LINK)


def test_an_emulated_transfer_counts_once_and_takes_the_real_ones_bytes(tmp_path: Path) -> None:
    events = [
        mark("fsdpviz::forward", 0, 50),
        op("aten::mm", 0, 40),
        linked("fsdpviz::all_gather (a)", 1, 30),
        issue("c10d::_allgather_base_", 2, [[80], [20]], thread=LINK),
        gloo("gloo:all_gather", 3, 5, 20),
        op("aten::copy_", 9, 1, thread=LINK),
        linked("fsdpviz::all_gather (b)", 31, 30),
        issue("c10d::_allgather_base_", 32, [[160], [40]], thread=LINK),
        gloo("gloo:all_gather", 33, 5, 40),
        gloo("gloo:all_reduce", 70, 5, 40),  # outside every link: it stays what it is
        linked("fsdpviz::all_gather (root_only)", 80, 5),  # a link with nothing inside
    ]
    trace = opened(tmp_path, events)
    assert work(trace) == [
        ("aten::mm", "compute", None, "forward", None),
        ("fsdpviz::all_gather (a)", "all_gather", "a", "forward", None),
        ("fsdpviz::all_gather (b)", "all_gather", "b", "forward", None),
        ("gloo:all_reduce", "all_reduce", None, None, None),
        ("fsdpviz::all_gather (root_only)", "all_gather", "root_only", None, None),
    ]
    gathers = trace.spans.filter(pl.col("kind") == "all_gather").sort("start_ns")
    assert gathers["bytes"].to_list() == [320, 640, None]
    assert kinds(trace)["gloo:all_gather"] == "host"
    note = next(note for note in trace.notes if "emulated" in note.what)
    assert note.count == 2


def test_an_emulated_copy_carries_the_bytes_that_its_label_says(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 40),
        linked("fsdpviz::h2d (a), bytes = 4096", 1, 10),
        op("aten::copy_", 2, 3, thread=LINK),
        linked("fsdpviz::d2h (b), bytes = 2048", 20, 10),
        linked("fsdpviz::h2d (c)", 31, 5),  # one that says nothing
    ]
    trace = opened(tmp_path, events)
    copies = trace.spans.filter(pl.col("kind").cast(pl.String).is_in(["h2d", "d2h"])).sort("start_ns")
    assert copies.select("kind", "unit", "bytes").rows() == [("h2d", "a", 4096), ("d2h", "b", 2048), ("h2d", "c", None)]


def test_a_blocking_link_on_the_main_thread(tmp_path: Path) -> None:
    # the range is on the training thread, and what runs inside it is no compute of its own
    events = [
        op("aten::mm", 0, 10),
        mark("fsdpviz::all_reduce (a)", 10, 30),
        issue("c10d::allreduce_", 11, [[[20]]]),
        gloo("gloo:all_reduce", 12, 5, 20),
        op("aten::div_", 20, 2),
        op("aten::add", 45, 5),
    ]
    assert [row[:3] for row in work(opened(tmp_path, events))] == [
        ("aten::mm", "compute", None),
        ("fsdpviz::all_reduce (a)", "all_reduce", "a"),
        ("aten::add", "compute", None),
    ]


def test_a_link_whose_issuer_was_not_recorded_goes_by_time_and_kind(tmp_path: Path) -> None:
    events = [
        op("aten::mm", 0, 5),
        linked("fsdpviz::reduce_scatter (a)", 0, 30),
        linked("fsdpviz::all_gather (b)", 10, 30),
        gloo("gloo:all_gather", 12, 5, 20),
    ]
    trace = opened(tmp_path, events)
    assert kinds(trace)["gloo:all_gather"] == "host"
    assert [row[0] for row in work(trace)][1:] == ["fsdpviz::reduce_scatter (a)", "fsdpviz::all_gather (b)"]


# -- windows


def test_nested_units_and_the_root(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward", 0, 1),
        op("aten::embedding", 2, 1),
        mark("FSDP::pre_forward (layers.0)", 4, 4),
        mark("FSDP::forward_prefetch for layers.1", 5, 2),
        op("aten::copy_", 6, 1),
        op("aten::mm", 9, 1),
        mark("FSDP::post_forward (layers.0)", 11, 1),
        op("aten::norm", 13, 1),
        mark("FSDP::post_forward", 15, 1),
        op("aten::nll_loss", 17, 1),
    ]
    units = {name: (unit, phase) for name, _, unit, phase, _ in work(opened(tmp_path, events))}
    assert units == {
        "aten::embedding": ("(root)", "forward"),
        "aten::copy_": ("layers.1", "forward"),  # issued by layers.0, done for layers.1
        "aten::mm": ("layers.0", "forward"),
        "aten::norm": ("(root)", "forward"),
        "aten::nll_loss": (None, None),  # nothing in the file says that it is not backward
    }


def test_a_forward_inside_backward_is_recompute(tmp_path: Path) -> None:
    events = [
        mark("fsdpviz::forward", 0, 10),
        mark("fsdpviz::forward (a)", 1, 8),
        op("aten::mm", 2, 1),
        mark("fsdpviz::backward", 10, 30),
        mark("fsdpviz::backward (a)", 11, 28),
        mark("fsdpviz::forward (a)", 12, 8),
        op("aten::mm", 13, 1),
        op("aten::mul", 25, 1),
        mark("fsdpviz::optimizer", 40, 10),
        op("aten::add_", 41, 1),
        op("aten::item", 60, 1),
    ]
    assert work(opened(tmp_path, events)) == [
        ("aten::mm", "compute", "a", "forward", None),
        ("aten::mm", "compute", "a", "recompute", None),
        ("aten::mul", "compute", "a", "backward", None),
        ("aten::add_", "optimizer", None, "optimizer", None),
        ("aten::item", "compute", None, None, None),
    ]


def recorded(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    """An operator that autograd recorded: in forward, or when a checkpointed block runs again."""
    return op(name, start, duration, **{"Sequence number": 9, "Fwd thread id": 0, **more})


def backward_of_a_checkpointed_block() -> list[dict[str, Any]]:
    node = {"Sequence number": 3, "Fwd thread id": 1, "thread": WORKER}
    return [
        recorded("aten::linear", 0, 5),
        mark("FSDP::pre_backward (a)", 10, 1, thread=WORKER),
        op("autograd::engine::evaluate_function: GeluBackward0", 20, 40, **node),
        op("GeluBackward0", 21, 38, **node),
        recorded("aten::linear", 22, 10, thread=WORKER),
        op("aten::addmm", 23, 8, thread=WORKER),
        *launched("kernel", "sgemm_again", 25, 100, 10, correlation=1, launch_thread=WORKER),
        op("aten::gelu_backward", 40, 10, thread=WORKER),
        *launched("kernel", "gelu_backward", 42, 120, 10, correlation=2, launch_thread=WORKER),
        mark("FSDP::post_backward_reduce (a)", 70, 1, thread=WORKER),
    ]


def test_operators_that_autograd_records_inside_backward_are_recompute(tmp_path: Path) -> None:
    assert work(opened(tmp_path, backward_of_a_checkpointed_block())) == [
        ("sgemm_again", "compute", "a", "recompute", None),
        ("gelu_backward", "compute", "a", "backward", None),
    ]


def test_recompute_on_the_cpu(tmp_path: Path) -> None:
    events = [event for event in backward_of_a_checkpointed_block() if event["cat"] not in ("kernel", "cuda_runtime")]
    assert [(row[0], row[3]) for row in work(opened(tmp_path, events))] == [
        ("aten::linear", "forward"),
        ("aten::linear", "recompute"),
        ("aten::gelu_backward", "backward"),
    ]


def test_a_backward_that_is_differentiated_is_no_recompute(tmp_path: Path) -> None:
    """With create_graph backward's own operators are recorded too: nothing tells which ones run again."""
    events = [*backward_of_a_checkpointed_block(), recorded("aten::tanh_backward", 52, 5, thread=WORKER)]
    assert {row[3] for row in work(opened(tmp_path, events))} == {"backward"}


def test_ranges_that_the_recording_cut(tmp_path: Path) -> None:
    events = [
        mark("FSDP::post_forward (a)", 0, 2),  # its pre_forward was before the window
        op("aten::mm", 1, 0.5),
        mark("FSDP::pre_forward (b)", 10, 5),  # its post_forward never came
        op("aten::copy_", 11, 1),
        op("aten::add", 20, 1),
    ]
    assert [(row[0], row[2]) for row in work(opened(tmp_path, events))] == [
        ("aten::mm", "a"),
        ("aten::copy_", "b"),
        ("aten::add", None),
    ]


# -- lanes


def test_lanes_are_named_and_in_reading_order(tmp_path: Path) -> None:
    events = [
        *launched("kernel", "sgemm", 1, 10, 10, correlation=1),
        *launched("kernel", "ncclDevKernel_AllReduce()", 2, 10, 30, correlation=2, stream=40),
        op("autograd::engine::evaluate_function: X", 5, 1, thread=WORKER),
        mark("ProfilerStep#1", 0, 10),
        op("aten::zeros", 6, 1, thread=77),
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 77, "args": {"name": "thread 77 (pin_memory)"}},
        span("Trace", "PyTorch Profiler (0)", 0, 50, process="Spans", thread="PyTorch Profiler"),
    ]
    lanes = opened(tmp_path, events).lanes.sort("sort")
    assert lanes.select("name", "is_device").rows() == [
        ("stream 7", True),
        ("stream 40", True),
        ("main thread", False),
        ("pin_memory", False),
        ("backward thread", False),
        ("profiler", False),
    ]


@pytest.mark.parametrize("unit_us", [1, 1000])
def test_depth_is_the_nesting_in_a_lane(tmp_path: Path, unit_us: int) -> None:
    events = [op("outer", 0, 10 * unit_us), op("inner", 2 * unit_us, 0), op("deep", 4 * unit_us, 2 * unit_us)]
    events += [
        op("deepest", 4 * unit_us, unit_us),
        op("next", 10 * unit_us, 1),
        op("else", 1, 1, thread=WORKER),
    ]
    depth = dict(opened(tmp_path, events).spans.select("name", "depth").rows())
    assert depth == {"outer": 0, "inner": 1, "deep": 1, "deepest": 2, "next": 0, "else": 0}
