"""The glass box under every combination of three knobs on two ranks, and of two on four: a covering array of policies.

Each configuration trains three steps of a small net in ``glassbox_grid_worker.py``, which says what it found; here is
what that must be.
"""

from __future__ import annotations

from typing import Any

import pytest
from covering import covering_array, is_covered
from test_glassbox_model import run_checks

pytestmark = pytest.mark.ranks

STRENGTH = {2: 3, 4: 2}
STEPS, ADAMW_LR = 3, 3e-3
EXACT = 1e-6  # what the order of a sum changes in fp32


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("two"), 2, "glassbox_grid_worker", str(STRENGTH[2]))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("four"), 4, "glassbox_grid_worker", str(STRENGTH[4]))


@pytest.fixture(params=["two", "four"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(request.param)


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each configuration on each rank."""
    assert "traceback" not in found["grid"], found["grid"]
    return [row for rank in found["ranks"] for row in rank["grid"]]


def tolerances(row: dict[str, str], *, of_fsdp2: bool) -> tuple[float, float]:
    """Of a loss, relative, and of a weight.

    fp32, AdamW included, since no gradient of this net is rounding noise: the order of sums. bf16 is as exact where
    both sides round alike: gradients are summed in fp32, and accumulated neither in bf16 (as the glass box does on the
    rank, and the reference does not) nor at all where FSDP2 runs the batch in one. Elsewhere a gradient is rounded
    once more, to 2⁻⁸: SGD moves a weight by that part of lr · gradient, which is below 1e-3 in three steps; AdamW takes
    steps of lr whatever a gradient's size, so one that rounds to another sign moves its weight by 2 · lr a step.
    """
    sums_in_bf16 = row["precision"].endswith("bfloat16)")
    is_alike = row["accumulation"] == "none" if of_fsdp2 else row["accumulation"] != "local"
    if "bfloat16" not in row["precision"] or (is_alike and not sums_in_bf16):
        return EXACT, EXACT
    return 2**-8, 1e-3 if row["optimizer"] == "sgd" else 2 * ADAMW_LR * STEPS


def test_losses_and_weights_are_the_unsharded_references(found: dict[str, Any]) -> None:
    for each in rows(found):
        loss, weight = tolerances(each["row"], of_fsdp2=False)
        assert each["reference"][0] < loss and each["reference"][1] < weight, each


def test_losses_and_weights_are_fsdp2s(found: dict[str, Any]) -> None:
    for each in rows(found):
        loss, weight = tolerances(each["row"], of_fsdp2=True)
        assert each["fsdp2"][0] < loss and each["fsdp2"][1] < weight, each


def test_collectives_are_counted_by_hand(found: dict[str, Any]) -> None:
    for each in rows(found):
        counted, expected = each["traffic"]
        assert counted == expected, each["row"]


def test_the_order_is_the_schedules(found: dict[str, Any]) -> None:
    for each in rows(found):
        assert each["issued"] == each["expected"] != [], each["row"]


def test_replicas_are_equal_to_the_bit(found: dict[str, Any]) -> None:
    for each in rows(found):
        assert set(each["replicas"]) == {1}, each["row"]


def test_peaks_of_memory_are_the_formulas(found: dict[str, Any]) -> None:
    for each in rows(found):
        measured, formula = each["peaks"]
        assert measured == pytest.approx(formula, rel=0.05), each["row"]


def test_every_comparison_notices_what_is_wrong(found: dict[str, Any]) -> None:
    misled = found["misled"]
    for other in ("reference", "fsdp2"):
        right, wrong = misled[other]
        assert right < EXACT < 10 * EXACT < wrong  # a learning rate of 0.0501 for 0.05
    assert misled["traffic"] is misled["order"] is misled["peaks"] is True


KNOBS = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (0, 1)}


def is_possible(partial: dict[str, Any]) -> bool:
    return not (partial.get("a") == 3 and partial.get("b") == "y")


@pytest.mark.parametrize("strength", [2, 3])
def test_a_covering_array_covers_and_each_of_its_rows_may_be(strength: int) -> None:
    array = covering_array(KNOBS, strength, is_possible)
    assert is_covered(array, KNOBS, strength, is_possible)
    assert all(is_possible(row) for row in array)
    assert len(array) < 20  # of the 20 that are possible
    assert not is_covered(array[1:], KNOBS, strength, is_possible)  # the first brought something of its own


def test_the_grid_is_large_enough_to_mean_something(two: dict[str, Any], four: dict[str, Any]) -> None:
    assert len(two["grid"]) >= 60 and len(four["grid"]) >= 18
    for found in (two, four):
        for knob in found["grid"][0]["row"]:
            assert len({each["row"][knob] for each in found["grid"]}) > 1, knob
