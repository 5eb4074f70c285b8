"""fsdpviz.run as a user calls it: models of one's own, what goes wrong, what is left on disk."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fsdpviz
from fsdpviz.base.errors import ExperimentError, RankFailed, RunFolderError
from fsdpviz.experiment import (
    Capture,
    Data,
    Experiment,
    Mesh,
    RunFolder,
    Steps,
    Transformer,
    UserModel,
)
from fsdpviz.experiment.run_folder import read_json

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("no_leftovers")]

SMALL: dict[str, Any] = {
    "device": "cpu",
    "data": Data(batch_size=4, sequence=8),
    "steps": Steps(warmup=1, measured=1),
    "mesh": Mesh(shard=2),
}


def small(**changes: Any) -> Experiment:
    """SMALL with ``changes``."""
    return Experiment(**(SMALL | changes))


MODEL_FILE = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self, width=8, fails_at=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.width, self.calls, self.fails_at = width, 0, fails_at

    def make_batch(self, samples, sequence, generator):
        inputs = torch.randn(samples, self.width, generator=generator)
        return inputs, inputs.flip(1)

    def forward(self, inputs):
        self.calls += 1
        if self.fails_at == self.calls and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("planted in forward")
        for block in self.blocks:
            inputs = block(inputs)
        return inputs

def broken(**arguments):
    raise KeyError("no such layer")
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_model.py"
    file.write_text(MODEL_FILE)
    return file


def test_a_run_leaves_a_whole_folder_and_a_recording(tmp_path: Path, model_file: Path) -> None:
    experiment = Experiment(model=UserModel(target=f"{model_file}:Small", arguments={"width": 4}), **SMALL)
    run = fsdpviz.run(experiment, out=tmp_path / "run", progress=False)
    folder = RunFolder(tmp_path / "run")
    assert folder.is_finished
    assert read_json(folder.result)["losses"] == run.losses
    assert len(run.losses) == 2
    assert Experiment.load(folder.experiment) == experiment == run.experiment
    assert run.provenance == "cpu"
    for rank in (0, 1):
        mine = folder.rank(rank)
        written = {file.name for file in mine.path.iterdir()}
        assert written >= {"trace.json.gz", "lanes.json", "flight.json", "memory.json", "metrics.jsonl", "log.txt"}
        assert json.loads(mine.flight.read_text())["entries"]
    report = run.report()
    assert [(row.rank, row.step) for row in report.rows] == [(0, 1), (1, 1)]
    assert report.measures.samples_per_s is not None
    assert fsdpviz.open(tmp_path / "run").losses == run.losses
    with pytest.raises(RunFolderError, match="overwrite=True"):
        fsdpviz.run(experiment, out=tmp_path / "run", progress=False)


def test_a_model_from_a_notebook_cell(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"  # run as __main__, as a cell is: pickle by reference cannot find its function
    script.write_text(
        MODEL_FILE
        + f"""
import fsdpviz
from fsdpviz.experiment import Data, Mesh, Steps, Wrap
run = fsdpviz.run(
    fsdpviz.Experiment(model=lambda: Small(width=6), device="cpu", mesh=Mesh(shard=2), wrap=Wrap(policy="root"),
                       data=Data(batch_size=4), steps=Steps(warmup=0, measured=1)),
    out={str(tmp_path / "run")!r}, progress=False)
print(len(run.losses), run.experiment.model.is_from_notebook)
"""
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1", "True"], done.stderr


def test_a_model_that_does_not_build_is_one_line(tmp_path: Path, model_file: Path) -> None:
    experiment = Experiment(model=UserModel(target=f"{model_file}:broken"), **SMALL)
    with pytest.raises(ExperimentError) as refused:
        fsdpviz.run(experiment, out=tmp_path / "run", progress=False)
    assert "KeyError: 'no such layer'" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not RunFolder(tmp_path / "run").is_finished


def test_a_rank_that_raises_in_a_step(tmp_path: Path, model_file: Path) -> None:
    model = UserModel(target=f"{model_file}:Small", arguments={"fails_at": 2})
    with pytest.raises(RankFailed) as failed:
        fsdpviz.run(Experiment(model=model, **SMALL), out=tmp_path / "run", progress=False)
    assert failed.value.rank == 1
    assert "planted in forward" in failed.value.traceback
    assert "my_model.py" in failed.value.traceback
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_finished
    kept = fsdpviz.open(folder.path)
    assert any("unfinished" in str(note) for note in kept.notes)
    assert len(kept.about["metrics"]["1"]) == 1  # the step before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 KiB: room to start, none for the traces."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root on Linux may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_keeps_what_fitted(small_disk: Path) -> None:
    with pytest.raises(ExperimentError, match=r"rank \d found the disk full; make room") as refused:
        fsdpviz.run(small(model=Transformer(layers=2, width=64, heads=2)), out=small_disk / "run", progress=False)
    assert "\n" not in str(refused.value)
    folder = RunFolder(small_disk / "run")
    assert not folder.is_finished
    assert folder.rank(0).metrics.read_text().count("\n") == 2


def test_cuda_where_there_is_none(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has the GPUs")
    with pytest.raises(ExperimentError, match="Use device='cpu'"):
        fsdpviz.run(small(device="cuda"), out=tmp_path / "run", progress=False)


def test_json_that_names_a_notebooks_model_does_not_run(tmp_path: Path) -> None:
    stated = Experiment(model=UserModel.of(lambda: None), **SMALL).to_dict()
    with pytest.raises(ExperimentError, match="Define it again"):
        fsdpviz.run(Experiment.from_dict(stated), out=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_trace_still_has_its_measures(tmp_path: Path) -> None:
    quiet = Capture(trace=False, flight_recorder=False)
    run = fsdpviz.run(Experiment(capture=quiet, **SMALL), out=tmp_path / "run", progress=False)
    assert len(run.spans) == 0
    assert run.report().measures.step_ms is not None
    assert not RunFolder(tmp_path / "run").rank(0).trace.exists()


def test_two_nodes_on_one_machine(tmp_path: Path) -> None:
    code = """
import sys, fsdpviz
from fsdpviz.experiment import Data, Experiment, Mesh, Steps
node, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
e = Experiment(device="cpu", mesh=Mesh(shard=2), data=Data(batch_size=4), steps=Steps(warmup=0, measured=1))
run = fsdpviz.run(e, out=out, nodes=2, node_rank=node, rendezvous=f"127.0.0.1:{port}", progress=False)
print(run.ranks)
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    nodes = [
        subprocess.Popen([sys.executable, "-c", code, str(n), port, tmp_path / f"n{n}"], stdout=-1, text=True)
        for n in (0, 1)
    ]
    assert [node.communicate(timeout=120)[0].strip() for node in nodes] == ["[0]", "[1]"]
