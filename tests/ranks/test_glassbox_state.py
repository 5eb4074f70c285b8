"""Checkpoints of the glass box at other world sizes, and its loss scaling, on real ranks.

Four launches share one folder: two ranks save; four ranks save and go on from the two; two from the four; one from
both. Every world trains on the same global batches, so each must end where an uninterrupted, unsharded run ends.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_glassbox_model import FP32, run_checks

pytestmark = pytest.mark.ranks

ALONE = ["refused", "fp16", "overflow_on_one_rank", "scaler_refused"]
CASES = ["padded", "adamw", "tied", "frozen", "unused", "host", "disk", "disk-in-backward", "hsdp"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def ranks(world: int, *checks: str) -> dict[str, Any]:
        return run_checks(tmp_path_factory.mktemp("found"), world, "glassbox_state_worker", str(folder), *checks)

    return {
        "2": ranks(2, "save", *ALONE),
        "4": ranks(4, "save", "load_from_2", "fp16", "overflow_on_one_rank"),
        "2 from 4": ranks(2, "load_from_4", "fsdp2", "without_its_optimizer"),
        "1": ranks(1, "load_from_2", "load_from_4", "plain_modules"),
    }


@pytest.mark.parametrize("world", ["2", "4"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_from_a_checkpoint_is_the_run_to_the_bit(found: dict[str, Any], world: str, case: str) -> None:
    for rank in found[world]["ranks"]:
        saved = rank["save"][case]
        assert saved["same"] and saved["changed"]  # the companion: the model that loaded was another one before
        assert saved["names"]
        assert saved["apart"] < FP32


@pytest.mark.parametrize(
    ("run", "check"),
    [("4", "load_from_2"), ("2 from 4", "load_from_4"), ("1", "load_from_2"), ("1", "load_from_4")],
)
@pytest.mark.parametrize("case", CASES)
def test_another_world_size_goes_on_where_the_first_left_off(
    found: dict[str, Any], run: str, check: str, case: str
) -> None:
    assert all(rank[check][case] < FP32 for rank in found[run]["ranks"])


def test_momentum_that_is_not_loaded_shows(found: dict[str, Any]) -> None:
    assert found["2 from 4"]["without_its_optimizer"] > 1000 * FP32


def test_fsdp2_takes_the_checkpoint_and_gives_one(found: dict[str, Any]) -> None:
    assert found["2 from 4"]["fsdp2"].keys() == {"taken", "given"}
    assert max(found["2 from 4"]["fsdp2"].values()) < FP32


def test_a_single_process_without_sharding_takes_the_checkpoint(found: dict[str, Any]) -> None:
    assert len(found["1"]["plain_modules"]) == 3
    assert max(found["1"]["plain_modules"].values()) < FP32


REFUSED = {
    "missing": "missing ['input.bias']",
    "unknown": "unknown ['other']",
    "shape": "parameter input.bias has shape (12,); the state dict's has (7,)",
    "groups": "Make its groups as they were",
}


def test_what_does_not_fit_is_refused_in_one_line(found: dict[str, Any]) -> None:
    errors = found["2"]["refused"]
    assert errors["not strict"] == ""
    for name, text in REFUSED.items():
        assert text in errors[name] and "\n" not in errors[name]


@pytest.mark.parametrize("world", ["2", "4"])
@pytest.mark.parametrize("case", ["fp32 sums", "fp16 sums", "clipped", "hybrid"])
def test_fp16_with_a_scaled_loss_equals_the_reference_with_pytorchs_scaler(
    found: dict[str, Any], world: str, case: str
) -> None:
    # with fp32 sums nothing differs but the order of a sum; fp16 sums round by 2⁻¹¹ of a gradient, times lr a step
    fp16 = found[world]["fp16"][case]
    losses, expected = fp16["losses"]
    assert losses == pytest.approx(expected, rel=1e-6 if case != "fp16 sums" else 1e-3)
    assert fp16["apart"] < (FP32 if case != "fp16 sums" else 1e-4)
    assert fp16["scales"][0] == fp16["scales"][1]
    assert fp16["scales"][0][0] == 2.0**19  # the first step overflowed and was left out


@pytest.mark.parametrize("world", ["2", "4"])
def test_one_infinite_element_on_one_rank_stops_every_rank(found: dict[str, Any], world: str) -> None:
    ranks = [rank["overflow_on_one_rank"] for rank in found[world]["ranks"]]
    for meshed in ("one shard group", "replicas"):
        assert {tuple(rank[f"{meshed}, asks"]) for rank in ranks} == {(False, False, 4.0)}
        without = [tuple(rank[f"{meshed}, does not ask"]) for rank in ranks]  # the companion
        assert without == [(True, True, 8.0)] * (len(ranks) - 1) + [(False, False, 4.0)]


def test_the_scaler_refuses_what_cannot_be_right(found: dict[str, Any]) -> None:
    errors = found["2"]["scaler_refused"]
    assert "use Policy(optimizer_when='step')" in errors["in backward"]
    assert "update() comes after step()" in errors["update first"]
    assert "unscaled once a step" in errors["unscaled twice"]
