"""Every engine equals the unsharded reference, replicas agree, and collectives are what the experiment implies.

The model has three blocks and a root (embeddings, norm, output). In fp32 bytes, by hand:

    block  4 × (2·64 norms + 32·96 + 96 qkv + 32·32 + 32 projection + 32·128 + 128 + 128·32 + 32 MLP) = 50 816
    root   4 × (64·32 tokens + 8·32 positions + 64 norm + 32·64 output)                               = 17 664

Every first dimension divides by four, so no shard is padded.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fsdpviz.base.kinds import COMMUNICATION
from fsdpviz.experiment import (
    Accumulation,
    Checkpointing,
    Data,
    Experiment,
    Gradient,
    Link,
    Links,
    Mesh,
    Offload,
    Optimizer,
    Precision,
    Prefetch,
    RunFolder,
    Steps,
    Transformer,
    Wrap,
)
from fsdpviz.experiment.run_folder import read_json
from fsdpviz.trace import open_trace

pytestmark = pytest.mark.ranks

BLOCK, ROOT = 50_816, 17_664
ALL = ROOT + 3 * BLOCK  # every parameter once

BASE: dict[str, Any] = {
    "model": Transformer(layers=3, width=32, heads=2, vocabulary=64),
    "data": Data(batch_size=16, sequence=8),
    "steps": Steps(warmup=2, measured=1),  # DDP still arranges its buckets in the second step
    "optimizer": Optimizer(name="sgd", lr=0.1, momentum=0.9),
    "device": "cpu",
}
FAST = Link(bandwidth_gbps=1.0)
TWICE = Accumulation(microbatches=2, reduce_each=False)


@dataclass(frozen=True)
class Case:
    """Changes to BASE, and the collectives of one step of one rank: kind → (how many, bytes together)."""

    changes: dict[str, Any]
    collectives: Mapping[str, tuple[int, int | None]]


def resharding(reduce: int = 1, gather: int = 1) -> dict[str, tuple[int, int]]:
    """The root is gathered once and each block twice, ``gather`` times a step; all is reduced ``reduce`` times."""
    return {
        "all_gather": (7 * gather, (ROOT + 6 * BLOCK) * gather),
        "reduce_scatter": (4 * reduce, ALL * reduce),
    }


KEEPING = {"all_gather": (4, ALL), "reduce_scatter": (4, ALL)}  # every unit gathered once
ONE_BUCKET = {"all_reduce": (1, ALL)}
EACH_UNIT = {"all_reduce": (4, ALL)}

ANY_WORLD = {
    "ddp": Case({"engine": "ddp"}, ONE_BUCKET),
    "ddp-accumulate": Case({"engine": "ddp", "accumulation": TWICE}, ONE_BUCKET),
    "ddp-accumulate-reduced": Case(
        {"engine": "ddp", "accumulation": Accumulation(microbatches=2)}, {"all_reduce": (2, 2 * ALL)}
    ),
    "ddp-checkpoint": Case({"engine": "ddp", "checkpointing": Checkpointing(every=2)}, ONE_BUCKET),
    "ddp-predivide": Case({"engine": "ddp", "gradient": Gradient(predivide_factor=2.0)}, ONE_BUCKET),
    "fsdp1": Case({"engine": "fsdp1"}, resharding()),
    "fsdp1-keep": Case({"engine": "fsdp1", "reshard_after_forward": False}, KEEPING),
    "fsdp1-prefetch": Case({"engine": "fsdp1", "prefetch": Prefetch(forward=1, backward=0)}, resharding()),
    "fsdp1-predivide": Case({"engine": "fsdp1", "gradient": Gradient(predivide_factor=2.0)}, resharding()),
    "fsdp1-no-shard": Case({"engine": "fsdp1", "strategy": "NO_SHARD"}, EACH_UNIT),
    "fsdp1-checkpoint": Case({"engine": "fsdp1", "checkpointing": Checkpointing(every=1)}, resharding()),
    "fsdp1-accumulate": Case({"engine": "fsdp1", "accumulation": TWICE}, resharding(gather=2)),
    "fsdp2": Case({}, resharding()),
    "fsdp2-keep": Case({"reshard_after_forward": False}, KEEPING),
    "fsdp2-root": Case({"wrap": Wrap(policy="root")}, {"all_gather": (2, 2 * ALL), "reduce_scatter": (1, ALL)}),
    "fsdp2-group": Case(
        {"wrap": Wrap(policy="group", group_size=2)},
        {"all_gather": (5, ROOT + 6 * BLOCK), "reduce_scatter": (3, ALL)},
    ),
    "fsdp2-prefetch-0": Case({"prefetch": Prefetch(forward=0, backward=0)}, resharding()),
    "fsdp2-prefetch-1": Case({"prefetch": Prefetch(forward=1, backward=1)}, resharding()),
    "fsdp2-prefetch-2": Case({"prefetch": Prefetch(forward=2, backward=2)}, resharding()),
    "fsdp2-offload": Case({"offload": Offload(parameters=True)}, resharding()),
    "fsdp2-divide": Case({"gradient": Gradient(divide_factor=4.0), "mesh": Mesh(shard=4)}, resharding()),
    "fsdp2-accumulate": Case({"accumulation": TWICE}, resharding(gather=2)),
    "fsdp2-accumulate-reduced": Case({"accumulation": Accumulation(microbatches=2)}, resharding(reduce=2, gather=2)),
    "fsdp2-checkpoint": Case({"checkpointing": Checkpointing(every=1)}, resharding()),
    "fsdp2-checkpoint-2": Case({"checkpointing": Checkpointing(every=2)}, resharding()),
    "fsdp2-replicas-only": Case({"strategy": "NO_SHARD"}, EACH_UNIT),
    "fsdp2-links": Case({"links": Links(intra_node=FAST), "prefetch": Prefetch(forward=1, backward=1)}, resharding()),
}

TWO_BY_TWO = Mesh(replicate=2, shard=2)
# the shard, half of every parameter, is reduced across replicas
HYBRID = resharding() | {"all_reduce": (4, ALL // 2)}

FOUR_RANKS = {
    # FSDP1 gathers into a list on gloo, of which the profiler records the input alone: with groups of two and of
    # four in the job, nothing in the trace says how many such inputs made the whole
    "fsdp1-hybrid": Case({"engine": "fsdp1", "mesh": TWO_BY_TWO}, HYBRID | {"all_gather": (7, None)}),
    "fsdp2-hsdp": Case({"mesh": TWO_BY_TWO}, HYBRID),
    "fsdp2-hsdp-keep": Case(
        {"mesh": TWO_BY_TWO, "reshard_after_forward": False}, KEEPING | {"all_reduce": (4, ALL // 2)}
    ),
    "fsdp2-hsdp-offload": Case({"mesh": TWO_BY_TWO, "offload": Offload(parameters=True)}, HYBRID),
    "fsdp2-hsdp-accumulate": Case(
        {"mesh": TWO_BY_TWO, "accumulation": TWICE}, resharding(gather=2) | {"all_reduce": (4, ALL // 2)}
    ),
    "fsdp2-hsdp-links": Case({"mesh": TWO_BY_TWO, "links": Links(intra_node=FAST, inter_node=FAST)}, HYBRID),
    "fsdp2-reshard-2": Case({"reshard_after_forward": 2}, resharding()),
}

# not equal to the reference to fp32 tolerance, so judged by themselves
BF16 = {"precision": Precision(param="bf16", reduce="fp32")}
ADAMW = {"optimizer": Optimizer(name="adamw", lr=1e-3)}


def experiment(changes: dict[str, Any], world: int) -> Experiment:
    """BASE with ``changes``, on all of ``world`` ranks unless the mesh says otherwise."""
    mesh = Mesh(replicate=world) if changes.get("engine") == "ddp" else Mesh(shard=world)
    fields: dict[str, Any] = BASE | {"mesh": mesh} | changes
    return Experiment(**fields)


@dataclass(frozen=True)
class Trained:
    """What a folder of runs left, by the name of the case."""

    folder: Path
    world: int

    def losses(self, name: str) -> list[float]:
        return json.loads((self.folder / name / "losses.json").read_text())

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / name / "weights.pt", weights_only=True)

    def hashes(self, name: str) -> list[str]:
        run = RunFolder(self.folder / name)
        return [read_json(run.rank(rank).outcome)["weights_sha256"] for rank in run.ranks()]

    def collectives(self, name: str) -> pl.DataFrame:
        """rank, step, kind, count, bytes of what was recorded."""
        spans = open_trace(self.folder / name).spans
        kinds = [kind.value for kind in COMMUNICATION]
        chosen = spans.filter(pl.col("kind").cast(pl.String).is_in(kinds) & pl.col("step").is_not_null())
        known = pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum())
        return chosen.group_by("rank", "step", pl.col("kind").cast(pl.String)).agg(count=pl.len(), bytes=known)

    def gathered_bytes(self, name: str, rank: int) -> list[int]:
        """The output of each all-gather of step 2, as the flight recorder has it."""
        folder = self.folder / name
        step = open_trace(folder).steps.filter((pl.col("rank") == rank) & (pl.col("step") == 2)).row(0, named=True)
        entries = read_json(RunFolder(folder).rank(rank).flight)["entries"]
        return [
            4 * sum(math.prod(size) for size in entry["output_sizes"])
            for entry in entries
            if entry["profiling_name"] == "gloo:all_gather"
            and step["start_ns"] <= entry["time_created_ns"] < step["end_ns"]
        ]


def train_all(folder: Path, world: int, cases: dict[str, dict[str, Any]]) -> Trained:
    for name, changes in cases.items():
        (folder / name).mkdir(parents=True)
        experiment(changes, 1 if changes.get("engine") == "single" else world).save(folder / name / "experiment.json")
    (folder / "order.json").write_text(json.dumps(list(cases)))
    worker = Path(__file__).with_name("many.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*torchrun, f"--log-dir={os.devnull}"]  # otherwise it leaves a folder behind
    done = subprocess.run(
        [*command, worker, folder], capture_output=True, text=True, timeout=400, check=False, env=_environment()
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return Trained(folder, world)


def _environment() -> dict[str, str]:
    return os.environ | {"TORCH_FR_BUFFER_SIZE": "20000", "OMP_NUM_THREADS": "1"}


def single(changes: dict[str, Any]) -> dict[str, Any]:
    return {"engine": "single", "mesh": Mesh()} | changes


REFERENCES = {"single": single({}), "single-adamw": single(ADAMW), "single-seed": single({"seed": 1})}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    cases = {name: case.changes for name, case in ANY_WORLD.items() if case.changes.get("mesh") is None}
    extra = {
        "fsdp2-bf16": BF16,
        "fsdp2-adamw": ADAMW,
        "fsdp2-divide-2": {"gradient": Gradient(divide_factor=2.0)},
        "fsdp2-sum": {"gradient": Gradient(divide_factor=1.0)},
    }
    return train_all(tmp_path_factory.mktemp("two"), 2, REFERENCES | cases | extra)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    cases = {name: case.changes for name, case in (ANY_WORLD | FOUR_RANKS).items()}
    return train_all(tmp_path_factory.mktemp("four"), 4, REFERENCES | cases)


def names(world: int) -> list[str]:
    return [n for n, case in ANY_WORLD.items() if world == 4 or case.changes.get("mesh") is None] + (
        list(FOUR_RANKS) if world == 4 else []
    )


ON_TWO = [("two", name) for name in names(2)]
ON_FOUR = [("four", name) for name in names(4)]


@pytest.fixture
def trained(request: pytest.FixtureRequest) -> Trained:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("trained", "name"), ON_TWO + ON_FOUR, indirect=["trained"])
def test_equals_the_unsharded_reference(trained: Trained, name: str) -> None:
    assert trained.losses(name) == pytest.approx(trained.losses("single"), rel=1e-5)
    expected, got = trained.weights("single"), trained.weights(name)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("trained", "name"), ON_TWO + ON_FOUR, indirect=["trained"])
def test_collectives_are_what_the_experiment_implies(trained: Trained, name: str) -> None:
    expected = (ANY_WORLD | FOUR_RANKS)[name].collectives
    found = trained.collectives(name)
    for rank in range(trained.world):
        rows = found.filter((pl.col("rank") == rank) & (pl.col("step") == 2)).to_dicts()
        assert {row["kind"]: (row["count"], row["bytes"]) for row in rows} == expected, rank


def test_hybrid_fsdp1_gathers_each_unit_within_its_shard_group(four: Trained) -> None:
    for rank in range(4):
        assert sorted(four.gathered_bytes("fsdp1-hybrid", rank)) == [ROOT] + [BLOCK] * 6


def test_the_comparison_can_fail(two: Trained) -> None:
    other, reference = two.weights("single-seed"), two.weights("single")
    assert any(not torch.allclose(other[key], reference[key], rtol=1e-5, atol=2e-6) for key in reference)
    assert two.losses("single-seed") != pytest.approx(two.losses("single"), rel=1e-5)


def test_training_learns(two: Trained) -> None:
    losses = two.losses("single")
    assert losses[-1] < losses[0]


def test_adamw_equals_the_reference_in_loss(two: Trained) -> None:
    # a parameter whose gradient is rounding noise (the key bias) moves by ±lr under Adam, so weights are not compared
    assert two.losses("fsdp2-adamw") == pytest.approx(two.losses("single-adamw"), rel=1e-4)


def test_bf16_gathers_half_the_bytes_and_reduces_in_fp32(two: Trained) -> None:
    assert two.losses("fsdp2-bf16") == pytest.approx(two.losses("single"), rel=2e-2)
    rows = two.collectives("fsdp2-bf16").filter((pl.col("rank") == 0) & (pl.col("step") == 2)).to_dicts()
    bytes_of = {row["kind"]: row["bytes"] for row in rows}
    assert bytes_of == {"all_gather": (ROOT + 6 * BLOCK) // 2, "reduce_scatter": ALL}


def test_a_divide_factor_other_than_the_world_size_scales_gradients(four: Trained, two: Trained) -> None:
    assert two.losses("fsdp2-divide-2") == pytest.approx(two.losses("single"), rel=1e-5)
    assert four.losses("fsdp2-divide") == pytest.approx(four.losses("single"), rel=1e-5)


def test_a_divide_factor_of_one_sums_over_ranks_and_changes_the_step(two: Trained) -> None:
    mean, total = two.losses("single"), two.losses("fsdp2-sum")
    assert total[0] == pytest.approx(mean[0], rel=1e-5)
    assert total[1] != pytest.approx(mean[1], rel=1e-3)


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp1"])
def test_units_are_found_in_engines_without_ranges_of_their_own(two: Trained, engine: str) -> None:
    spans = open_trace(two.folder / engine).spans
    for phase in ("forward", "backward"):
        compute = spans.filter((pl.col("kind") == "compute") & (pl.col("phase") == phase))
        assert {"blocks.0", "blocks.1", "blocks.2"} <= set(compute["unit"].drop_nulls()), phase


@pytest.mark.parametrize("name", ["ddp", "fsdp1-no-shard", "fsdp2-replicas-only"])
def test_replicas_are_equal_to_the_bit(four: Trained, name: str) -> None:
    assert len(set(four.hashes(name))) == 1


@pytest.mark.parametrize("name", ["fsdp1-hybrid", "fsdp2-hsdp", "fsdp2-hsdp-offload", "fsdp2-hsdp-links"])
def test_hybrid_replicas_are_equal_to_the_bit_and_shards_differ(four: Trained, name: str) -> None:
    a, b, c, d = four.hashes(name)  # replica 0: ranks 0 1, replica 1: ranks 2 3
    assert (a, b) == (c, d)
    assert a != b


def test_accounted_memory_is_the_formula(two: Trained) -> None:
    # sgd with momentum: shards, as much momentum; at the optimizer's step as many gradients and nothing gathered,
    # while the last block's backward has the root and two blocks gathered (prefetched) and two blocks' gradients
    memory = read_json(RunFolder(two.folder / "fsdp2-keep").rank(0).memory)
    assert memory["parameter_bytes"] == ALL // 2
    assert memory["optimizer_bytes"] == ALL // 2
    assert memory["gathered_peak_bytes"] == ALL
    assert memory["gradient_peak_bytes"] == ALL // 2
    resharded = read_json(RunFolder(two.folder / "fsdp2-prefetch-0").rank(0).memory)
    assert resharded["gathered_peak_bytes"] == ROOT + BLOCK
    offloaded = read_json(RunFolder(two.folder / "fsdp2-offload").rank(0).memory)
    assert offloaded["parameters_on"] == "host"
    assert offloaded["peak_device_bytes"] == offloaded["gathered_peak_bytes"]
