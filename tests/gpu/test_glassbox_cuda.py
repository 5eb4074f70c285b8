"""The glass box on CUDA: two ranks on one card, in one launch, under eight minutes; also the same script on CPUs.

    python -m pytest tests/gpu/test_glassbox_cuda.py            without CUDA: the script itself, on CPUs
    FSDPVIZ_KEEP=DIR python -m pytest …                         keeps results and recordings there

What needs a card skips without one and says why. The run on CPUs proves that the script runs, and its checks of order
and of equality; it says nothing of CUDA streams.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import fsdpviz
from fsdpviz.analysis.intervals import intersection, total, union
from fsdpviz.lab.doctor import gpu_count

pytestmark = pytest.mark.gpu
NO_CARD = "no CUDA device on this machine"


def launched(folder: Path, kind: str, world: int, *checks: str, timeout_s: int = 420) -> dict[str, Any]:
    worker = Path(__file__).with_name("glassbox_cuda_worker.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [*torchrun, f"--log-dir={os.devnull}", str(worker), str(folder), kind, *checks]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    if "Duplicate GPU detected" in done.stderr:
        pytest.skip("this NCCL refuses several ranks on one card, whatever it is told")
    assert done.returncode == 0, done.stderr[-8000:]
    results = json.loads((folder / "results.json").read_text())
    if keep := os.environ.get("FSDPVIZ_KEEP"):
        shutil.copytree(folder, Path(keep) / f"glassbox-{kind}-{world}", dirs_exist_ok=True)
    return results


@pytest.fixture(scope="module", params=["cuda", "cpu"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    if request.param == "cuda" and gpu_count() < 1:
        pytest.skip(NO_CARD)
    folder = tmp_path_factory.mktemp(request.param)
    return folder, launched(folder, request.param, 2)


def result(run: tuple[Path, dict[str, Any]], name: str) -> dict[str, Any]:
    found = run[1][name]
    assert "traceback" not in found, found["traceback"]
    return found


def test_every_placement_equals_the_unsharded_reference_as_fsdp2_does(run: tuple[Path, dict[str, Any]]) -> None:
    apart = result(run, "parity")
    assert len(apart) >= 13
    assert max(apart.values()) < 1e-4, apart  # Adam moves noise by a whole step, so losses are compared


def test_no_delay_on_any_stream_changes_a_bit(run: tuple[Path, dict[str, Any]]) -> None:
    distinct = dict(result(run, "shaken"))
    assert distinct.pop("planted") > 0  # the companion: a stream that waits for nothing is found out
    assert set(distinct.values()) == {1}, distinct


def test_copies_overlap_compute_in_the_recording(run: tuple[Path, dict[str, Any]]) -> None:
    known = result(run, "recorded")
    trace = fsdpviz.open(run[0] / "trace")
    for rank in (0, 1):
        spans = trace.spans.filter(pl.col("rank") == rank).with_columns(kind=pl.col("kind").cast(pl.String))
        compute = spans.filter(pl.col("kind") == "compute")
        busy = union(*_times(compute))
        for kind in ("h2d", "d2h"):
            copies = spans.filter((pl.col("kind") == kind) & (pl.col("bytes") >= known["shard_bytes"]))
            assert len(copies) >= known["blocks"], kind
            assert total(intersection(union(*_times(copies)), busy)) > 0, kind


def _times(spans: pl.DataFrame) -> tuple[Any, Any]:
    starts = spans["start_ns"].to_numpy()
    return starts, starts + spans["duration_ns"].to_numpy()


def test_step_times_are_measured_beside_fsdp2(run: tuple[Path, dict[str, Any]]) -> None:
    assert set(result(run, "speed")) == {"glassbox device", "fsdp2 device", "glassbox offloaded", "fsdp2 offloaded"}


@pytest.mark.skipif(gpu_count() < 1, reason=NO_CARD)
def test_four_ranks_on_one_card_make_two_replicas(tmp_path: Path) -> None:
    apart = launched(tmp_path, "cuda", 4, "parity")["parity"]
    assert "traceback" not in apart, apart
    assert apart["hybrid"] < 1e-4


@pytest.mark.skipif(gpu_count() < 1, reason=NO_CARD)
def test_storage_straight_to_the_device(tmp_path: Path) -> None:
    import torch

    from fsdpviz.base.errors import FsdpvizError
    from fsdpviz.engine.glassbox import CudaAccelerator

    device = torch.device("cuda", 0)
    file = tmp_path / "shard"
    wanted = torch.randn(4096)
    file.write_bytes(wanted.numpy().tobytes())
    try:
        direct = CudaAccelerator(device, direct_storage=True).open_direct(file)
    except FsdpvizError as error:
        pytest.skip(str(error))
    assert direct is not None
    got = torch.empty(4096, device=device)
    direct.load(got)
    assert torch.equal(got.cpu(), wanted)
