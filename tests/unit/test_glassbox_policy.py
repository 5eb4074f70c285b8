"""Knobs of the glass box into a Policy, and what is refused with a mend that works."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpviz.base.errors import ExperimentError
from fsdpviz.engine.glassbox.precision import Division
from fsdpviz.engine.glassbox_engine import policy_of
from fsdpviz.experiment import Accumulation, Experiment, GlassBox, Link, Links, Mesh, Mlp, Offload, Prefetch
from fsdpviz.schedule import Policy, Tier

FAST = Link(bandwidth_gbps=1.0)


def box(**changes: Any) -> Experiment:
    return Experiment(**({"engine": "glassbox", "model": Mlp(), "mesh": Mesh(shard=2), "device": "cpu"} | changes))


def test_without_knobs_it_is_the_default_policy() -> None:
    assert policy_of(box()) == Policy()


def test_offload_puts_all_three_on_the_host() -> None:
    policy = policy_of(box(offload=Offload(parameters=True), prefetch=Prefetch(forward=0, backward=2)))
    assert (policy.parameters_on, policy.gradients_on, policy.optimizer_on) == (Tier.HOST,) * 3
    assert (policy.forward_depth, policy.backward_depth) == (0, 2)


REFUSED = {
    "settings without the engine": ({"engine": "fsdp2", "glassbox": GlassBox(order="post")}, "belong to engine"),
    "host link without offload": ({"links": Links(host_device=FAST)}, "none are"),
    "steps after every microbatch": (
        {"glassbox": GlassBox(optimizer_when="backward"), "accumulation": Accumulation(microbatches=2)},
        "before the gradient is whole",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_mend_works(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ExperimentError, match=reason) as refused:
        box(**changes)
    box(**(changes | refused.value.nearest))


def test_links_of_the_glass_box_carry_copies() -> None:
    assert box(links=Links(host_device=FAST), offload=Offload(parameters=True)).links is not None


@pytest.mark.parametrize(("world", "before"), [(1, 1), (2, 2), (4, 2), (8, 4), (16, 4), (64, 8)])
def test_fp16_divides_about_the_root_before_the_sum(world: int, before: float) -> None:
    import torch

    division = Division.of(world, torch.float16)
    assert (division.before, division.before * division.after) == (before, world)
    assert Division.of(world, torch.float32).before == 1
