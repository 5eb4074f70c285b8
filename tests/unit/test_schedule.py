"""Orders of issue, written out by hand. R is the root, a and b are blocks in forward order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdpviz.schedule import Op, Policy, Scheduler, Tier, step_events

UNITS = ("R", "a", "b")
NAIVE = Policy.naive()
EAGER = Policy()


def order(policy: Policy, **options: object) -> str:
    return " ".join(str(event) for event in step_events(UNITS, policy, **options))  # type: ignore[arg-type]


def test_the_naive_engine_gathers_waits_computes_frees_and_reduces_in_turn() -> None:
    assert order(NAIVE) == (
        "gather(R) wait(R) forward(R) "
        "gather(a) wait(a) forward(a) free(a) gather(b) wait(b) forward(b) free(b) "
        "wait(R) backward(R) "
        "gather(b) wait(b) backward(b) free(b) reduce(b) "
        "gather(a) wait(a) backward(a) free(a) wait_reduced(b) reduce(a) "
        "free(R) wait_reduced(a) reduce(R) wait_reduced(R) "
        "optimizer(R) optimizer(a) optimizer(b)"
    )


def test_depth_one_issues_the_next_gather_before_it_waits_for_its_own() -> None:
    assert order(EAGER) == (
        "gather(R) gather(a) wait(R) forward(R) "
        "gather(b) wait(a) forward(a) free(a) wait(b) forward(b) free(b) "
        "gather(b) wait(R) backward(R) "
        "gather(a) wait(b) backward(b) free(b) reduce(b) "
        "wait(a) backward(a) free(a) reduce(a) "
        "free(R) wait_reduced(b) reduce(R) wait_reduced(a) wait_reduced(R) "
        "optimizer(R) optimizer(a) optimizer(b)"
    )


def test_post_order_frees_before_it_prefetches() -> None:
    assert order(replace(EAGER, order="post")) == (
        "gather(R) wait(R) forward(R) gather(a) "
        "wait(a) forward(a) free(a) gather(b) wait(b) forward(b) free(b) "
        "wait(R) backward(R) gather(b) "
        "wait(b) backward(b) free(b) reduce(b) gather(a) "
        "wait(a) backward(a) free(a) reduce(a) "
        "free(R) wait_reduced(b) reduce(R) wait_reduced(a) wait_reduced(R) "
        "optimizer(R) optimizer(a) optimizer(b)"
    )


def test_what_is_kept_after_forward_is_not_gathered_again() -> None:
    events = step_events(UNITS, replace(EAGER, reshard_after_forward=False))
    assert [str(e) for e in events if e.op is Op.GATHER] == ["gather(R)", "gather(a)", "gather(b)"]
    assert [str(e) for e in events if e.op is Op.FREE] == ["free(b)", "free(a)", "free(R)"]


def test_the_last_units_are_kept_for_backward_and_cost_no_memory() -> None:
    many = ["R", *(f"b{i}" for i in range(6))]

    def gathers_and_peak(keep: int) -> tuple[int, int]:
        gathered, peak, gathers = set[str](), 0, 0
        for event in step_events(many, Policy(keep_last=keep)):
            if event.op is Op.GATHER:
                gathered.add(event.unit)
                gathers += 1
            elif event.op is Op.FREE:
                gathered.remove(event.unit)
            peak = max(peak, len(gathered))
        assert not gathered
        return gathers, peak

    assert gathers_and_peak(0) == (13, 3)  # the root once, blocks twice; the root, the block that runs, one ahead
    assert gathers_and_peak(1) == (12, 3)
    assert gathers_and_peak(2) == (11, 3)
    assert gathers_and_peak(4) == (9, 5)  # the companion: beyond the depth it costs
    assert gathers_and_peak(9) == (7, 7)


def test_evaluation_keeps_nothing() -> None:
    scheduler = Scheduler(UNITS, Policy(keep_last=1))
    scheduler.before_forward("b")
    assert [str(e) for e in scheduler.after_forward("b", will_backward=False)] == ["free(b)"]
    scheduler.before_forward("b")
    assert scheduler.after_forward("b") == []


def test_an_integer_keeps_a_part_and_gathers_from_it() -> None:
    events = [str(e) for e in step_events(UNITS, replace(NAIVE, reshard_after_forward=2, parameters_on=Tier.HOST))]
    assert events.count("reshard(a)") == 1
    assert events.count("copy_in(a)") == 1  # the part is on the device: backward copies nothing in
    assert events.count("gather(a)") == 2


def test_replicas_add_an_all_reduce_after_each_reduce_scatter() -> None:
    events = step_events(UNITS, EAGER, replicas=2)
    reductions = [str(e) for e in events if e.op in (Op.REDUCE, Op.ALL_REDUCE)]
    assert reductions == [
        *("reduce(b)", "all_reduce(b)"),
        *("reduce(a)", "all_reduce(a)"),
        *("reduce(R)", "all_reduce(R)"),
    ]


def test_late_reductions_come_after_the_last_gradient() -> None:
    backward = order(replace(EAGER, reduce_when="end", reduces_in_flight=9)).split("backward(a)")[1]
    assert backward == (
        " free(a) free(R) reduce(b) reduce(a) reduce(R) wait_reduced(b) wait_reduced(a) wait_reduced(R)"
        " optimizer(R) optimizer(a) optimizer(b)"
    )


def test_a_unit_that_waits_for_the_end_is_told_of_once() -> None:
    scheduler = Scheduler(UNITS, replace(EAGER, reduce_when="end", order="post"))
    scheduler.before_backward("b")
    assert [str(e) for e in scheduler.after_backward("b")] == ["free(b)", "gather(a)"]
    assert scheduler.after_backward("b") == []
    assert "reduce(b)" in [str(e) for e in scheduler.end_backward()]


def test_accumulation_gathers_again_and_reduces_once() -> None:
    events = step_events(UNITS, NAIVE, reduces=(False, True))
    counts = {op: sum(e.op is op for e in events) for op in Op}
    assert (counts[Op.GATHER], counts[Op.REDUCE], counts[Op.OPTIMIZER]) == (10, 3, 3)
    first_half = events[: events.index(events[0], 1)]
    assert not any(e.op is Op.REDUCE for e in first_half)


def test_offload_brings_in_before_the_gather_and_steps_in_backward() -> None:
    policy = Policy(
        forward_depth=0,
        backward_depth=0,
        optimizer_when="backward",
        parameters_on=Tier.DISK,
        gradients_on=Tier.HOST,
        optimizer_on=Tier.DISK,
    )
    text = order(policy)
    assert text.startswith("read(R) copy_in(R) gather(R) wait(R) forward(R) read(a) copy_in(a) gather(a) wait(a)")
    assert "backward(b) free(b) reduce(b) copy_out(b) optimizer(b) write(b) read(a) copy_in(a) gather(a)" in text
    assert text.endswith("wait_reduced(a) wait_reduced(R)")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_bounds_what_is_gathered_when_prefetching(limit: int) -> None:
    many = ["R", *(f"b{i}" for i in range(6))]
    gathered: set[str] = set()
    peak = 0
    for event in step_events(many, Policy(forward_depth=5, backward_depth=5, gathered_limit=limit)):
        if event.op is Op.GATHER:
            gathered.add(event.unit)
        elif event.op is Op.FREE:
            gathered.remove(event.unit)
        peak = max(peak, len(gathered))
    assert peak == max(limit, 2)  # the root and the block that runs are there whatever the limit
    assert not gathered


def test_without_the_limit_the_peak_is_the_depth() -> None:
    # the companion of the test above: the root, the running block and five ahead
    many = ["R", *(f"b{i}" for i in range(6))]
    events = step_events(many, Policy(forward_depth=5, backward_depth=5))
    assert [e.op for e in events[:6]] == [Op.GATHER] * 6


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("order_", ["pre", "post"])
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_every_policy_waits_for_what_it_computes_with_and_frees_what_it_gathers(
    depth: int, order_: str, reshard: bool | int
) -> None:
    policy = Policy(forward_depth=depth, backward_depth=depth, order=order_, reshard_after_forward=reshard)  # type: ignore[arg-type]
    state: dict[str, str] = {}
    for op, unit in step_events(UNITS, policy):
        if op is Op.GATHER:
            assert state.get(unit, "sharded") in ("sharded", "part")
            state[unit] = "gathering"
        elif op is Op.WAIT:
            assert state[unit] in ("gathering", "ready")
            state[unit] = "ready"
        elif op in (Op.FORWARD, Op.BACKWARD):
            assert state[unit] == "ready"
        elif op in (Op.FREE, Op.RESHARD):
            state[unit] = "sharded" if op is Op.FREE else "part"
        elif op is Op.OPTIMIZER:
            assert state[unit] == "sharded"


def test_without_a_backward_the_root_is_freed_too() -> None:
    scheduler = Scheduler(UNITS, NAIVE)
    scheduler.before_forward("R")
    assert [str(e) for e in scheduler.after_forward("R", will_backward=False)] == ["free(R)"]


def test_a_unit_that_runs_twice_is_gathered_once_in_backward() -> None:
    scheduler = Scheduler(UNITS, NAIVE)
    assert [str(e) for e in scheduler.before_backward("a")] == ["gather(a)", "wait(a)", "backward(a)"]
    assert [str(e) for e in scheduler.before_backward("a")] == ["wait(a)", "backward(a)"]


def test_an_abandoned_step_leaves_nothing_gathered() -> None:
    scheduler = Scheduler(UNITS, EAGER)
    scheduler.before_forward("R")
    assert [str(e) for e in scheduler.abandon()] == ["free(R)", "free(a)"]
    assert next(str(e) for e in scheduler.before_forward("R")) == "gather(R)"


def test_a_part_that_backward_never_asks_for_is_freed() -> None:
    scheduler = Scheduler(UNITS, replace(NAIVE, reshard_after_forward=2))
    scheduler.before_forward("a")
    scheduler.after_forward("a")
    assert [str(e) for e in scheduler.end_backward()] == ["free(a)"]
    assert not scheduler.end_backward()


@pytest.mark.parametrize(
    "wrong", [{"forward_depth": -1}, {"keep_last": -1}, {"reduces_in_flight": 0}, {"gathered_limit": 0}]
)
def test_a_policy_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)  # type: ignore[arg-type]
