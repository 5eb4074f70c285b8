"""Peaks of a step, worked out by hand. Two blocks of 40 bytes a shard on two ranks, no root."""

from __future__ import annotations

import pytest

from fsdpviz.engine.glassbox import Policy, Pools, Tier
from fsdpviz.engine.glassbox.layout import Region
from fsdpviz.engine.glassbox.memory import Replay, UnitBytes, check_budgets
from fsdpviz.engine.glassbox.precision import Precision

NOTHING = Region.of({}, 2)
BLOCK = UnitBytes.of(Region.of({"weight": (4, 5)}, 2), NOTHING, Precision())  # 20 elements, 10 a rank
BLOCKS = {"a": BLOCK, "b": BLOCK}


def peaks(policy: Policy, units: dict[str, UnitBytes] = BLOCKS) -> tuple[int, int, int]:
    found = Replay(units, policy).peaks()
    return found[Tier.DEVICE], found[Tier.HOST], found[Tier.DISK]


def test_sizes_of_a_block() -> None:
    assert (BLOCK.shard, BLOCK.full, BLOCK.gradients) == (40, 80, 80)
    assert (BLOCK.reduction, BLOCK.gradient_shard) == (120, 40)


def test_the_naive_order() -> None:
    # both shards 80; b's reduction under way: its gradients 80, buffers 120; then a: gathered 80, its gradients 80
    assert peaks(Policy.naive()) == (80 + 80 + 120 + 80 + 80, 0, 0)


def test_two_reductions_under_way_are_the_peak_of_the_default_order() -> None:
    # both shards 80, both blocks' gradients 80 and buffers 120; b's shard of the gradient lands, 40, before those go
    assert peaks(Policy()) == (80 + 2 * (80 + 120) + 40, 0, 0)
    assert peaks(Policy(reshard_after_forward=False)) == peaks(Policy())  # what was kept has gone by then
    # one at a time: gradients of both, one's buffers and landing
    assert peaks(Policy(reduces_in_flight=1, reduce_when="end"))[0] == 80 + 2 * 80 + 120 + 40


def test_offloaded_shards_are_on_the_device_only_while_they_are_gathered() -> None:
    host = Policy(parameters_on=Tier.HOST, gradients_on=Tier.HOST, optimizer_on=Tier.HOST)
    assert peaks(host) == (2 * (80 + 120), 80 + 80, 0)  # as above, but shards and landed gradients are on the host


def test_state_on_the_other_side_visits_for_its_step() -> None:
    units = {name: UnitBytes.of(Region.of({"w": (4, 5)}, 2), NOTHING, Precision(), 400) for name in "ab"}
    policy = Policy(parameters_on=Tier.HOST, gradients_on=Tier.HOST, optimizer_on=Tier.DEVICE)
    # two shards, two gradients, and both states' copies: one steps, one comes
    assert peaks(policy, units)[1] == 80 + 80 + 2 * 400
    disk = Policy(optimizer_on=Tier.DISK)
    assert peaks(disk, units) == (80 + 2 * 40 + 2 * 400, 2 * 400, 2 * 400)  # read into the host, then to the device


def test_a_budget_is_refused_with_the_smallest_that_would_do() -> None:
    found = Replay(BLOCKS, Policy.naive()).peaks()
    check_budgets(found, Pools(device_bytes=440), rank=1)
    with pytest.raises(ValueError, match=r"rank 1: device memory has a budget of 439 bytes, .* needs 440\."):
        check_budgets(found, Pools(device_bytes=439), rank=1)
