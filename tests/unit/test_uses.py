"""When units are used: several modules of one unit, hooks on one output, two models that call their units alike.

The ranges are as torch 2.13 records them (``_fsdp_state.py``, ``_fsdp_param_group.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_trace import WORKER, launched, mark, op, write_trace

from fsdpviz.trace import Trace, open_trace

GATHER = "ncclDevKernel_AllGather_RING_LL()"
FSDP1 = "FullyShardedDataParallel."


def opened(tmp_path: Path, events: Iterable[Any]) -> Trace:
    return open_trace(write_trace(tmp_path / "rank0.json", events, rank=0))


def units_of(trace: Trace, name: str = "aten::mm") -> list[str | None]:
    return trace.spans.filter(pl.col("name") == name).sort("start_ns")["unit"].to_list()


def forward(unit: str, start: float, end: float) -> list[dict[str, Any]]:
    return [mark(f"FSDP::pre_forward ({unit})", start, 2), mark(f"FSDP::post_forward ({unit})", end - 2, 2)]


def test_modules_of_one_unit_begin_one_by_one(tmp_path: Path) -> None:
    """A norm and an output layer are one unit: the hook before forward runs for each, the one after it once."""
    events = [
        mark("FSDP::pre_forward", 0, 2),
        op("aten::mm", 4, 1),
        mark("FSDP::pre_forward (norm, output)", 10, 2),
        op("aten::mm", 13, 2),  # the norm's
        mark("FSDP::pre_forward (norm, output)", 16, 1),
        op("aten::mm", 18, 2),
        mark("FSDP::post_forward (norm, output)", 22, 1),
        op("aten::mm", 24, 1),
        mark("FSDP::post_forward", 26, 1),
    ]
    assert units_of(opened(tmp_path, events)) == ["(root)", "norm, output", "norm, output", "(root)"]


@pytest.mark.parametrize(("again", "between"), [(True, "(root)"), (False, "embedding, output")])
def test_what_runs_between_the_modules_of_one_unit_is_not_its(tmp_path: Path, again: bool, between: str) -> None:
    """Weights that an embedding and an output layer share. Where the hook runs for the first module only, as in older
    versions of torch, nothing tells where the second begins.
    """
    events = [
        mark("FSDP::pre_forward", 0, 2),
        mark("FSDP::pre_forward (embedding, output)", 3, 2),
        op("aten::mm", 6, 1),
        *forward("block", 10, 20),
        op("aten::mm", 14, 1),
        op("aten::mm", 22, 1),
        *([mark("FSDP::pre_forward (embedding, output)", 24, 1)] if again else []),
        op("aten::mm", 26, 1),
        mark("FSDP::post_forward (embedding, output)", 28, 1),
        mark("FSDP::post_forward", 30, 1),
    ]
    shared = "embedding, output"
    assert units_of(opened(tmp_path, events)) == [shared, "block", between, shared]


def test_blocks_inside_a_module_of_a_unit_do_not_end_it(tmp_path: Path) -> None:
    events = [
        mark("FSDP::pre_forward (a, b)", 0, 2),
        *forward("a.block", 4, 10),
        op("aten::mm", 11, 1),
        mark("FSDP::pre_forward (a, b)", 13, 1),
        op("aten::mm", 15, 1),
        mark("FSDP::post_forward (a, b)", 17, 1),
    ]
    assert units_of(opened(tmp_path, events)) == ["a, b", "a, b"]


def test_a_forward_that_stopped_early_is_over_with_its_backward(tmp_path: Path) -> None:
    """A checkpoint that has what it needs leaves the unit's forward, whose hook then does not run."""
    events = [
        *forward("a, b", 0, 8),
        mark("FSDP::pre_forward (a, b)", 20, 2),
        op("aten::mm", 23, 1),
        mark("FSDP::pre_backward (a, b)", 25, 1),
        mark("FSDP::post_backward_accumulate (a, b)", 28, 1),
        op("aten::mm", 40, 1),
        mark("FSDP::pre_forward (a, b)", 50, 2),
        op("aten::mm", 53, 1),
        mark("FSDP::post_forward (a, b)", 55, 1),
    ]
    assert units_of(opened(tmp_path, events)) == [None, None, "a, b"]


@pytest.mark.parametrize("is_fsdp2", [True, False])
def test_what_a_child_computes_is_the_child_s_though_its_parent_s_hook_is_on_its_output(
    tmp_path: Path, is_fsdp2: bool
) -> None:
    """The root returns what its output layer returned: both hooks run, the layer's first, before the layer's backward.

    Another unit, whose input needs no gradient, goes on until the root's end; it is no parent of the root.
    """
    fsdp2 = [
        mark("FSDP::pre_forward", 0, 2),
        *forward("first", 4, 10),
        *forward("output", 12, 18),
        mark("FSDP::post_forward", 20, 2),
        mark("FSDP::pre_backward (output)", 30, 2),
        mark("FSDP::pre_backward", 33, 2),
        mark("FSDP::post_backward_accumulate (output)", 40, 2),
        mark("FSDP::pre_backward (first)", 50, 2),
        mark("FSDP::post_backward_accumulate", 60, 2),
        mark("FSDP::post_backward_accumulate (first)", 63, 2),
    ]

    def unit(start: float, end: float) -> list[dict[str, Any]]:
        ranges = [("forward", start, end - start), ("_pre_forward", start + 0.5, 2), ("_post_forward", end - 1, 0.5)]
        return [mark(FSDP1 + name, at, duration) for name, at, duration in ranges] + [
            mark(FSDP1 + "_pre_forward_prefetch", start + 1, 0.5)
        ]

    hooks = [("pre", 30), ("pre", 33), ("post", 40), ("pre", 48), ("post", 55), ("post", 63)]
    fsdp1 = [
        *unit(0, 22),
        mark(FSDP1 + "_root_pre_forward", 0.1, 0.3),
        mark(FSDP1 + "_to_kwargs", 0.2, 0.1),
        *unit(4, 10),
        *unit(12, 18),
        op("autograd::engine::evaluate_function: X", 29, 8),
        *(mark(f"{FSDP1}_{name}_backward_hook", at, 2) for name, at in hooks),
        *(mark(FSDP1 + "_pre_backward_prefetch", at + 1, 0.5) for name, at in hooks if name == "pre"),
    ]
    work = [op("aten::mm", at, 1) for at in (32.2, 36, 46, 53)]
    first, last = ("first", "output") if is_fsdp2 else ("#1", "#2")
    trace = opened(tmp_path, [*(fsdp2 if is_fsdp2 else fsdp1), *work])
    assert units_of(trace) == [last, last, "(root)", first]


def test_a_unit_without_a_hook_in_backward_needs_nothing(tmp_path: Path) -> None:
    """A frozen unit at the model's begin is prefetched in backward all the same; the root's callback reshards it."""
    events = [
        *forward("frozen", 0, 6),
        mark("FSDP::pre_backward (a)", 10, 9, thread=WORKER),
        mark("FSDP::backward_prefetch for frozen", 12, 6, thread=WORKER),
        mark("FSDP::all_gather (frozen)", 13, 4, thread=WORKER),
        *launched("kernel", GATHER, 14, 20, 10, correlation=1, stream=20, launch_thread=WORKER),
        mark("FSDP::post_backward_accumulate (frozen)", 40, 2, thread=WORKER),
        *launched("kernel", "add", 41, 50, 1, correlation=2, launch_thread=WORKER),
    ]
    found = opened(tmp_path, events).units
    assert found.select("unit", "phase", "needed_ns").rows() == [("frozen", "backward", None)]


def test_a_gather_is_for_the_use_in_which_it_was_issued(tmp_path: Path) -> None:
    """A model runs another inside its forward; both have a root, which FSDP2 does not name."""
    events = [
        mark("FSDP::pre_forward", 0, 8),
        mark("FSDP::all_gather", 1, 6),
        *launched("kernel", GATHER, 2, 10, 20, correlation=1, stream=20),
        *launched("kernel", "sgemm outer", 9, 30, 5, correlation=2),
        mark("FSDP::pre_forward", 40, 8),
        mark("FSDP::all_gather", 41, 6),
        *launched("kernel", GATHER, 42, 50, 20, correlation=3, stream=20),
        *launched("kernel", "sgemm inner", 49, 70, 5, correlation=4),
        mark("FSDP::post_forward", 52, 2),
        *launched("kernel", "sgemm outer again", 56, 80, 5, correlation=5),
        mark("FSDP::post_forward", 60, 2),
    ]
    trace = opened(tmp_path, events)
    assert trace.units["needed_ns"].to_list() == [9_000, 49_000]
    assert units_of(trace, "sgemm outer again") == ["(root)"]


def test_a_forward_that_autograd_runs_is_recomputed_before_any_hook_of_backward(tmp_path: Path) -> None:
    """``checkpoint(block, use_reentrant=True)`` without a root around it: the forward runs before the unit's hook."""

    def gathered(start: float, correlation: int) -> list[dict[str, Any]]:
        return [
            mark("FSDP::pre_forward (a)", start, 8),
            mark("FSDP::all_gather (a)", start + 1, 4),
            *launched("kernel", GATHER, start + 2, start + 3, 4, correlation=correlation, stream=20),
            mark("FSDP::post_forward (a)", start + 10, 2),
        ]

    events = [
        *gathered(0, 1),
        op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 20, 40),
        *gathered(22, 2),
        mark("FSDP::pre_backward (a)", 40, 4),
        mark("FSDP::post_backward_accumulate (a)", 50, 4),
    ]
    assert opened(tmp_path, events).units["phase"].to_list() == ["forward", "recompute"]


def test_what_another_unit_s_hook_gathers_is_prefetched(tmp_path: Path) -> None:
    """The glass box has no range around what it gathers ahead: the gather lies in the hook of the unit before."""
    gather = {"thread": 300}
    events = [
        mark("FSDP::pre_forward (a)", 0, 10),
        mark("FSDP::all_gather (a)", 1, 2),
        mark("fsdpviz::all_gather (a)", 2, 4, **gather),
        mark("FSDP::all_gather (b)", 4, 2),
        mark("fsdpviz::all_gather (b)", 7, 4, **gather),
        mark("FSDP::post_forward (a)", 12, 1),
        *forward("b", 14, 20),
        mark("FSDP::pre_backward (b)", 30, 10),
        mark("FSDP::all_gather (b)", 31, 2),
        mark("fsdpviz::all_gather (b)", 32, 2, **gather),
        mark("FSDP::all_gather (a)", 35, 2),
        mark("fsdpviz::all_gather (a)", 36, 4, **gather),
        mark("FSDP::post_backward_reduce (b)", 42, 1),
        mark("FSDP::pre_backward (a)", 44, 2),
        mark("FSDP::post_backward_reduce (a)", 48, 1),
    ]
    found = opened(tmp_path, events).units
    assert found.select("unit", "phase", pl.col("issuer").cast(pl.String)).rows() == [
        ("a", "forward", "self"),
        ("b", "forward", "forward_prefetch"),
        ("b", "backward", "self"),
        ("a", "backward", "backward_prefetch"),
    ]
