"""The glass box in experiments: equal to the unsharded reference and to FSDP2, with collectives known by hand.

Model and bytes are those of ``test_engines``: three blocks of BLOCK bytes and a root of ROOT; nothing is padded.
"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
import torch
from test_engines import (
    ADAMW,
    ALL,
    BF16,
    BLOCK,
    FAST,
    KEEPING,
    REFERENCES,
    ROOT,
    TWICE,
    TWO_BY_TWO,
    Case,
    Trained,
    resharding,
    single,
    train_all,
)

from fsdpviz.experiment import (
    Accumulation,
    Checkpointing,
    GlassBox,
    Gradient,
    Links,
    Mesh,
    Offload,
    Optimizer,
    Prefetch,
    RunFolder,
    Transformer,
    Wrap,
)
from fsdpviz.experiment.run_folder import read_json

pytestmark = pytest.mark.ranks

IN_BACKWARD = GlassBox(optimizer_when="backward")
ON_DISK = GlassBox(parameters_on="disk", gradients_on="disk", optimizer_on="disk")
TIED = {"model": Transformer(layers=3, width=32, heads=2, vocabulary=64, tied=True)}
TIED_ROOT = ROOT - 4 * 32 * 64


def ahead(depth: int) -> dict[str, Any]:
    return {"prefetch": Prefetch(forward=depth, backward=depth)}


ANY_WORLD = {
    "naive": Case(ahead(0) | {"glassbox": GlassBox(streams="one", reduces_in_flight=1)}, resharding()),
    "depth-0": Case(ahead(0), resharding()),
    "depth-1": Case(ahead(1), resharding()),
    "depth-3": Case(ahead(3), resharding()),
    "limit": Case(ahead(3) | {"glassbox": GlassBox(gathered_limit=2)}, resharding()),
    "post": Case({"glassbox": GlassBox(order="post")}, resharding()),
    "late-reduce": Case({"glassbox": GlassBox(reduce_when="end")}, resharding()),
    "keep": Case({"reshard_after_forward": False}, KEEPING),
    "keep-last": Case(
        {"glassbox": GlassBox(keep_last=1)}, {"all_gather": (6, ROOT + 5 * BLOCK), "reduce_scatter": (4, ALL)}
    ),
    "root-only": Case({"wrap": Wrap(policy="root")}, {"all_gather": (2, 2 * ALL), "reduce_scatter": (1, ALL)}),
    "group": Case(
        {"wrap": Wrap(policy="group", group_size=2)},
        {"all_gather": (5, ROOT + 6 * BLOCK), "reduce_scatter": (3, ALL)},
    ),
    "accumulate": Case({"accumulation": TWICE}, resharding(gather=2)),
    "accumulate-reduced": Case({"accumulation": Accumulation(microbatches=2)}, resharding(reduce=2, gather=2)),
    "accumulate-keep": Case(
        {"accumulation": TWICE, "reshard_after_forward": False},
        {"all_gather": (8, 2 * ALL), "reduce_scatter": (4, ALL)},
    ),
    "checkpoint": Case({"checkpointing": Checkpointing(every=1)}, resharding()),
    "checkpoint-2": Case({"checkpointing": Checkpointing(every=2)} | ahead(2), resharding()),
    "predivide": Case({"gradient": Gradient(predivide_factor=2.0)}, resharding()),
    "in-backward": Case({"glassbox": IN_BACKWARD}, resharding()),
    "in-backward-accumulate": Case({"glassbox": IN_BACKWARD, "accumulation": TWICE}, resharding(gather=2)),
    "in-backward-checkpoint": Case({"glassbox": IN_BACKWARD, "checkpointing": Checkpointing(every=1)}, resharding()),
    "host": Case({"offload": Offload(parameters=True)}, resharding()),
    "host-accumulate-reduced": Case(
        {"offload": Offload(parameters=True), "accumulation": Accumulation(microbatches=2)},
        resharding(reduce=2, gather=2),
    ),
    "host-in-backward": Case({"offload": Offload(parameters=True), "glassbox": IN_BACKWARD}, resharding()),
    "host-state-on-disk": Case(
        {"offload": Offload(parameters=True), "glassbox": GlassBox(optimizer_on="disk")}, resharding()
    ),
    "disk": Case({"glassbox": ON_DISK}, resharding()),
    "apart": Case({"glassbox": GlassBox(gradients_on="host", optimizer_on="disk")}, resharding()),
    "disk-in-backward": Case({"glassbox": ON_DISK.replace(optimizer_when="backward")} | ahead(2), resharding()),
    "links": Case(
        {"links": Links(intra_node=FAST, host_device=FAST), "offload": Offload(parameters=True)}, resharding()
    ),
}

HYBRID = {"all_reduce": (4, ALL // 2)}
FOUR_RANKS = {
    "hsdp": Case({"mesh": TWO_BY_TWO}, resharding() | HYBRID),
    "hsdp-depth-0": Case({"mesh": TWO_BY_TWO} | ahead(0), resharding() | HYBRID),
    "hsdp-keep": Case({"mesh": TWO_BY_TWO, "reshard_after_forward": False}, KEEPING | HYBRID),
    "hsdp-accumulate": Case({"mesh": TWO_BY_TWO, "accumulation": TWICE}, resharding(gather=2) | HYBRID),
    "hsdp-in-backward": Case({"mesh": TWO_BY_TWO, "glassbox": IN_BACKWARD}, resharding() | HYBRID),
    "hsdp-host": Case({"mesh": TWO_BY_TWO, "offload": Offload(parameters=True)}, resharding() | HYBRID),
    "hsdp-disk": Case(
        {"mesh": TWO_BY_TWO, "glassbox": ON_DISK.replace(optimizer_when="backward")}, resharding() | HYBRID
    ),
    "hsdp-links": Case({"mesh": TWO_BY_TWO, "links": Links(intra_node=FAST, inter_node=FAST)}, resharding() | HYBRID),
    "replicas-only": Case({"mesh": Mesh(replicate=4)}, {"all_reduce": (4, ALL)}),
    "reshard-2": Case({"reshard_after_forward": 2}, resharding()),
    "reshard-2-host": Case({"reshard_after_forward": 2, "offload": Offload(parameters=True)}, resharding()),
}

# held against runs of other engines with the same changes, and not against "single"
EXTRA: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fsdp2-bf16": BF16 | {"engine": "fsdp2"},
    "adamw": ADAMW,
    "adamw-in-backward": ADAMW | {"glassbox": IN_BACKWARD},
    "adamw-disk": ADAMW | {"glassbox": ON_DISK.replace(optimizer_when="backward")},
    "fsdp2-adamw": ADAMW | {"engine": "fsdp2"},
    "adam": {"optimizer": Optimizer(name="adam", lr=1e-3)},
    "single-adam": single({"optimizer": Optimizer(name="adam", lr=1e-3)}),
    "tied": TIED,
    "single-tied": single(TIED),
    "fsdp2": {"engine": "fsdp2"},
}


def glassbox(changes: dict[str, Any]) -> dict[str, Any]:
    return {"engine": "glassbox"} | changes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    cases = {name: glassbox(case.changes) for name, case in ANY_WORLD.items()}
    extra = {name: glassbox(changes) for name, changes in EXTRA.items()}
    return train_all(tmp_path_factory.mktemp("two"), 2, REFERENCES | cases | extra)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    cases = {name: glassbox(case.changes) for name, case in (ANY_WORLD | FOUR_RANKS).items()}
    return train_all(tmp_path_factory.mktemp("four"), 4, REFERENCES | cases)


ON_TWO = [("two", name) for name in ANY_WORLD]
ON_FOUR = [("four", name) for name in ANY_WORLD | FOUR_RANKS]


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Trained:
    return request.getfixturevalue(request.param)


def assert_weights_equal(trained: Trained, name: str, reference: str) -> None:
    expected, got = trained.weights(reference), trained.weights(name)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("trained", "name"), ON_TWO + ON_FOUR, indirect=["trained"])
def test_equals_the_unsharded_reference(trained: Trained, name: str) -> None:
    assert trained.losses(name) == pytest.approx(trained.losses("single"), rel=1e-5)
    assert_weights_equal(trained, name, "single")


@pytest.mark.parametrize(("trained", "name"), ON_TWO + ON_FOUR, indirect=["trained"])
def test_collectives_are_what_the_experiment_implies(trained: Trained, name: str) -> None:
    expected = (ANY_WORLD | FOUR_RANKS)[name].collectives
    found = trained.collectives(name)
    for rank in range(trained.world):
        rows = found.filter((pl.col("rank") == rank) & (pl.col("step") == 2)).to_dicts()
        assert {row["kind"]: (row["count"], row["bytes"]) for row in rows} == expected, rank


def test_equals_fsdp2_on_the_same_data(two: Trained) -> None:
    assert two.losses("depth-1") == pytest.approx(two.losses("fsdp2"), rel=1e-6)
    assert_weights_equal(two, "depth-1", "fsdp2")
    assert two.losses("bf16") == pytest.approx(two.losses("fsdp2-bf16"), rel=1e-4)


def test_bf16_gathers_half_the_bytes_and_reduces_in_fp32(two: Trained) -> None:
    rows = two.collectives("bf16").filter((pl.col("rank") == 0) & (pl.col("step") == 2)).to_dicts()
    assert {row["kind"]: row["bytes"] for row in rows} == {"all_gather": (ROOT + 6 * BLOCK) // 2, "reduce_scatter": ALL}


@pytest.mark.parametrize("name", ["adamw", "adamw-in-backward", "adamw-disk"])
def test_adamw_equals_the_reference_and_fsdp2_in_loss(two: Trained, name: str) -> None:
    # a parameter whose gradient is rounding noise moves by ±lr under Adam, so weights are not compared
    assert two.losses(name) == pytest.approx(two.losses("single-adamw"), rel=1e-4)
    assert two.losses(name) == pytest.approx(two.losses("fsdp2-adamw"), rel=1e-4)


def test_adam_equals_the_reference_in_loss(two: Trained) -> None:
    assert two.losses("adam") == pytest.approx(two.losses("single-adam"), rel=1e-4)


def test_tied_weights_are_gathered_and_reduced_once(two: Trained) -> None:
    assert two.losses("tied") == pytest.approx(two.losses("single-tied"), rel=1e-5)
    assert_weights_equal(two, "tied", "single-tied")
    rows = two.collectives("tied").filter((pl.col("rank") == 0) & (pl.col("step") == 2)).to_dicts()
    assert {row["kind"]: row["bytes"] for row in rows} == {
        "all_gather": TIED_ROOT + 6 * BLOCK,
        "reduce_scatter": TIED_ROOT + 3 * BLOCK,
    }


def test_the_schedule_never_changes_a_bit(two: Trained) -> None:
    same = [
        "naive",
        "depth-0",
        "depth-1",
        "depth-3",
        "limit",
        "post",
        "late-reduce",
        "keep",
        "keep-last",
        "in-backward",
        "disk",
    ]
    assert len({tuple(two.hashes(name)) for name in same}) == 1
    assert two.hashes("naive") != two.hashes("adamw")  # the companion: hashes can differ


@pytest.mark.parametrize("name", [name for name in FOUR_RANKS if name.startswith("hsdp")])
def test_hybrid_replicas_are_equal_to_the_bit_and_shards_differ(four: Trained, name: str) -> None:
    a, b, c, d = four.hashes(name)  # replica 0: ranks 0 1, replica 1: ranks 2 3
    assert (a, b) == (c, d)
    assert a != b


def test_lanes_are_named_for_the_streams(two: Trained) -> None:
    lanes = read_json(RunFolder(two.folder / "disk-in-backward").rank(0).lanes).values()
    assert {"gather stream", "reduce stream", "H2D stream", "D2H stream", "optimizer stream"} <= set(lanes)
