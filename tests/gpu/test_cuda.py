"""Every CUDA path of the run arm, on real GPUs: one prepared script, well under eight minutes.

    python -m pytest tests/gpu            with one GPU: the single engine; with two or four: all of it
    FSDPVIZ_KEEP=DIR python -m pytest …   keeps the recordings there

On a machine without CUDA each test skips and says why.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import fsdpviz
from fsdpviz.base.kinds import COPIES, Kind
from fsdpviz.experiment import (
    Capture,
    Data,
    Experiment,
    Mesh,
    Offload,
    Optimizer,
    Precision,
    Prefetch,
    RunFolder,
    Steps,
    Transformer,
)
from fsdpviz.lab.doctor import gpu_count

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu_count() < 1, reason="no CUDA device on this machine")]
two_gpus = pytest.mark.skipif(gpu_count() < 2, reason="needs two GPUs: NCCL takes one a rank")
four_gpus = pytest.mark.skipif(gpu_count() < 4, reason="needs four GPUs: NCCL takes one a rank")

BASE: dict[str, Any] = {
    "model": Transformer(layers=4, width=512, heads=8, vocabulary=1024),
    "data": Data(batch_size=16, sequence=256),
    "steps": Steps(warmup=2, measured=3),
    "optimizer": Optimizer(name="sgd", lr=0.05),
    "device": "cuda",
}


@pytest.fixture
def out(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    yield tmp_path / "run"
    keep = os.environ.get("FSDPVIZ_KEEP")
    if keep and (tmp_path / "run").is_dir():
        shutil.copytree(tmp_path / "run", Path(keep) / request.node.name, dirs_exist_ok=True)


def run(out: Path, **changes: Any) -> fsdpviz.Recording:
    return fsdpviz.run(Experiment(**(BASE | changes)), out=out, progress=False)


def kinds(recording: fsdpviz.Recording) -> dict[str, int]:
    counted = recording.spans.group_by("kind").agg(pl.len())
    return {str(kind): count for kind, count in counted.iter_rows()}


def test_one_gpu_records_kernels_memory_and_environment(out: Path) -> None:
    recording = run(out, engine="single", mesh=Mesh(), capture=Capture(memory_snapshot=True))
    assert recording.provenance == "cuda"
    assert kinds(recording)["compute"] > 100
    assert recording.about["environment"]["gpus"]
    memory = recording.about["memory"]["0"]
    assert memory["source"] == "cuda allocator"
    assert memory["peak_device_bytes"] > memory["parameter_bytes"] > 0
    assert RunFolder(out).rank(0).snapshot.stat().st_size > 0
    lanes = recording.lanes.filter(pl.col("is_device"))
    assert len(lanes) >= 1
    row = recording.report().rows[0]
    assert row.span_ns == row.compute_ns + row.exposed_comm_ns + row.exposed_copy_ns + row.idle_ns


@two_gpus
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_engines_equal_the_reference_on_cuda(out: Path, engine: str) -> None:
    reference = run(out.with_name("single"), engine="single", mesh=Mesh())
    mesh = Mesh(replicate=2) if engine == "ddp" else Mesh(shard=2)
    recording = run(out, engine=engine, mesh=mesh)
    assert recording.losses == pytest.approx(reference.losses, rel=1e-4)
    assert recording.about["environment"]["backend"] == "nccl"
    expected = Kind.ALL_REDUCE if engine == "ddp" else Kind.ALL_GATHER
    assert kinds(recording)[expected.value] > 0
    assert (RunFolder(out).rank(0).flight).stat().st_size > 100


@two_gpus
def test_prefetch_hides_gathers_on_cuda(out: Path) -> None:
    mesh = Mesh(shard=2)
    off = run(out.with_name("off"), mesh=mesh, prefetch=Prefetch(forward=0, backward=0))
    on = run(out, mesh=mesh, prefetch=Prefetch(forward=1, backward=1))
    assert off.losses == on.losses
    ab = fsdpviz.compare(off, on)
    assert ab.comparison.all_gathers_a == ab.comparison.all_gathers_b
    assert ab.comparison.b.mean().overlap_frac > ab.comparison.a.mean().overlap_frac  # type: ignore[union-attr]


@two_gpus
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_offload_copies_over_the_bus(out: Path, engine: str) -> None:
    recording = run(out, engine=engine, mesh=Mesh(shard=2), offload=Offload(parameters=True))
    found = kinds(recording)
    assert {Kind.H2D, Kind.D2H} <= {Kind(kind) for kind in found if Kind(kind) in COPIES}
    assert recording.report().measures.h2d_ms > 0  # type: ignore[operator]


@two_gpus
def test_bf16_gathers_half_the_bytes(out: Path) -> None:
    full = run(out.with_name("fp32"), mesh=Mesh(shard=2))
    half = run(out, mesh=Mesh(shard=2), precision=Precision(param="bf16", reduce="fp32"))
    ab = fsdpviz.compare(full, half).comparison
    assert ab.all_gathers_b.bytes_per_step == pytest.approx(ab.all_gathers_a.bytes_per_step / 2)  # type: ignore[operator]


@four_gpus
def test_hsdp_reduces_across_replicas(out: Path) -> None:
    recording = run(out, mesh=Mesh(replicate=2, shard=2))
    found = kinds(recording)
    assert min(found[k.value] for k in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)) > 0
    hashes = recording.about["result"]["weights_sha256"]
    assert (hashes["0"], hashes["1"]) == (hashes["2"], hashes["3"])
