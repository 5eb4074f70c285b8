"""The glass box itself on two and four gloo ranks: modules of every kind, order, memory, jitter, errors.

The checks run in ``glassbox_worker.py`` and what it imports; here is what they must have found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

FP32 = 1e-6
RUNS = {2: 250, 4: 80}  # random schedules with random delays

# the worker's net, in elements: root 5·12 + 12 + 12·3 + 3, block 2 × (12·12 + 12); two ranks pad the root by one
ROOT, BLOCK, BLOCKS = 111, 312, 4
ROOT_SHARD, BLOCK_SHARD = 56, 156
SHARDS = 4 * (ROOT_SHARD + BLOCKS * BLOCK_SHARD)  # bytes


def run_checks(
    folder: Path, world: int, worker: str = "glassbox_worker", argument: str = "", *names: str
) -> dict[str, Any]:
    """What the checks of ``worker`` (those named, or all) found on rank 0 of ``world``; under "ranks" on each rank."""
    results, script = folder / "results.json", Path(__file__).with_name(f"{worker}.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*torchrun, f"--log-dir={os.devnull}", str(script), str(results), argument or str(RUNS[world]), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-8000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("four"), 4)


@pytest.fixture(params=["two", "four"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def values(result: Any) -> list[float]:
    assert not isinstance(result, dict), result
    return result if isinstance(result, list) else [result]


EQUAL = ["plain", "called_twice", "run_again", "unused", "unused_in_backward", "frozen", "by_size_and_rule"]
EQUAL += ["usable_after_errors"]


@pytest.mark.parametrize("name", EQUAL)
def test_modules_of_every_kind_equal_the_reference(found: dict[str, Any], name: str) -> None:
    assert max(values(found[name])) < FP32


def test_every_rank_starts_from_rank_zero(found: dict[str, Any]) -> None:
    assert found["starts_from_rank_zero"] == 0.0


def test_whole_parameters_go_back_into_shards_and_through_dcp(found: dict[str, Any]) -> None:
    assert found["loaded"] == [0.0, 0.0]


def test_meta_modules_are_made_real_and_equal_on_all_ranks(found: dict[str, Any]) -> None:
    assert found["meta"] is True


def test_frozen_parameters_are_gathered_and_not_reduced(two: dict[str, Any]) -> None:
    half = 144 + 12  # one linear of a block is frozen
    assert two["frozen_not_reduced"] == {
        "all_gather": 4 * (ROOT + 1 + 2 * BLOCKS * BLOCK),
        "reduce_scatter": 4 * (ROOT + 1 + BLOCKS * half),
    }


def test_the_norm_is_that_of_all_gradients(found: dict[str, Any]) -> None:
    norm, expected, clipped = found["clipped_norm"]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert clipped == pytest.approx(0.1, rel=1e-4)


def test_evaluation_uses_the_newest_parameters_and_frees_them(found: dict[str, Any]) -> None:
    evaluation = found["evaluation"]
    assert max(evaluation["before"], evaluation["after"]) < FP32
    assert set(evaluation["left"]) == {"sharded"}


def test_events_are_issued_in_exactly_the_order_of_the_schedule(found: dict[str, Any]) -> None:
    assert found["order"] and all(found["order"].values()), found["order"]


def test_memory_is_the_formula(two: dict[str, Any]) -> None:
    # naive order, at the first block's backward: its parameters and gradients, the root's, the reduction of the block
    # before it (full gradients, flat buffer, shard), and the landed gradient shards of the others
    full = 4 * (ROOT + 1 + BLOCK)
    gradients = 4 * (ROOT + BLOCK)
    reduction = 4 * (BLOCK + BLOCK + BLOCK_SHARD)
    landed = 4 * (BLOCKS - 2) * BLOCK_SHARD
    momentum = SHARDS
    assert two["memory"]["depth 0"][0] == SHARDS + momentum + full + gradients + reduction + landed
    assert two["memory"]["depth 0"][1] == SHARDS + momentum
    # offloaded, the same without all shards, which are on the host three times over
    assert two["memory"]["host"] == [full + gradients + reduction, 0, SHARDS + momentum + SHARDS]


def test_the_peak_in_each_tier_is_that_of_the_schedule_replayed(found: dict[str, Any]) -> None:
    assert len(found["budgets"]) >= 6
    for seed, (peaks, measured, _, _) in found["budgets"].items():
        assert measured == peaks, seed


def test_a_budget_of_the_peak_holds_and_a_byte_less_is_refused_beforehand(found: dict[str, Any]) -> None:
    for seed, (peaks, _, held, refused) in found["budgets"].items():
        assert held == "", seed
        needed = [peak for peak in peaks if peak]
        assert len(refused) == len(needed) > 0
        for peak, answer in zip(needed, refused, strict=True):
            assert f"needs {peak:,}. Raise the budget to that" in answer, seed


def test_a_closed_or_refused_model_leaves_no_thread(found: dict[str, Any]) -> None:
    before, after = found["threads_left"]
    assert after == before


def test_a_schedule_of_the_wrapped_optimizer_does_not_step_it_for_every_unit(found: dict[str, Any]) -> None:
    assert found["schedule_of_the_inner_optimizer"] < FP32


def test_parameters_gradients_and_state_each_lie_in_any_tier(two: dict[str, Any]) -> None:
    assert len(two["tiers"]) == 3 * 3 * 3 * 2
    for places, (difference, *left) in two["tiers"].items():
        parameters, gradients, state, when = places.split()
        assert difference < FP32, places
        sides = [tier == "device" for tier in (parameters, gradients)]
        if when == "backward" and sides[0] != sides[1]:  # stepped with at once, the gradient goes where the step is
            gradients = "device" if parameters == "device" else "host"
        held = {"device": 0, "host": 0, "disk": 0}
        for tier in (
            parameters,
            state,
            *([gradients] if gradients != "device" else []),
        ):  # zero_grad drops the device's
            held[tier] += SHARDS
        assert left == list(held.values()), places


def test_parameters_read_straight_to_the_device_equal_the_reference(found: dict[str, Any]) -> None:
    direct = found["direct_reads"]
    assert max(direct["step"], direct["backward"]) < FP32
    gathers = 3 * (1 + 2 * BLOCKS)  # three steps, the root once in each
    assert direct["step, reads"] == direct["backward, reads"] == gathers


def test_gradients_that_rest_elsewhere_are_clipped_accumulated_and_dropped(found: dict[str, Any]) -> None:
    assert all(max(differences) < FP32 for differences in found["resting_gradients"].values())


def test_no_delay_on_any_stream_changes_a_bit(found: dict[str, Any]) -> None:
    distinct = {degree: count for degree, count in found["jittered"].items() if degree != "runs"}
    assert found["jittered"]["runs"] >= 80
    assert set(distinct.values()) == {1}, distinct


def test_a_planted_race_is_caught(found: dict[str, Any]) -> None:
    caught = found["planted_race"]
    assert caught.pop("none") == 0
    assert all(count > 0 for count in caught.values()), caught


def test_compute_that_does_not_wait_for_its_gather_is_caught(found: dict[str, Any]) -> None:
    assert found["planted_race_at_gather"] == {"ran ahead": 3, "none": 0}


ERRORS = {
    "degree": "ranks don't divide by shard",
    "part": "must divide the shard group",
    "list as unit": "Make its children units",
    "foreign unit": "must be a module inside the model",
    "no parameters": "needs parameters",
    "two types": "must have one type",
    "dtype": "must be a floating-point type",
    "unsharded optimizer": "Make the optimizer from model.parameters()",
    "second backward": "backward through the graph a second time",
    "clip in backward": "use Policy(optimizer_when='step')",
    "lbfgs in backward": "LBFGS may not",
    "twice in backward": "use_reentrant=False",
    "disk not writable": "cannot be written",
    "budget": "Raise the budget",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_is_wrong_in_one_line(found: dict[str, Any], name: str) -> None:
    assert ERRORS[name] in found["errors"][name]
    assert "\n" not in found["errors"][name]
