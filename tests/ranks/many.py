"""A worker for tests: trains many experiments, one after the other, in ranks that join once.

    torchrun … many.py <folder>

``<folder>/order.json`` lists names, ``<folder>/<name>/experiment.json`` states each. Each leaves, besides a
run's own files, ``weights.pt`` and ``losses.json`` (rank 0: whole weights, losses averaged over ranks).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from glassbox_parts import groups_handed_on
from torch.distributed.device_mesh import init_device_mesh

from fsdpviz.capture.environment import environment
from fsdpviz.capture.flight import dump_flight_recorder
from fsdpviz.capture.memory import MemoryWatch
from fsdpviz.capture.metrics import StepMetrics
from fsdpviz.capture.profiler import StepProfiler
from fsdpviz.capture.units import add_unit_ranges
from fsdpviz.engine import RankContext
from fsdpviz.engine.models import build
from fsdpviz.engine.train import prepare_training
from fsdpviz.experiment import Experiment, RunFolder
from fsdpviz.experiment.run_folder import write_json
from fsdpviz.launch.worker import weights_sha256


def train(folder: RunFolder) -> None:
    """Runs one experiment in this rank; ranks beyond its world size sit it out. Collective over all ranks."""
    experiment = Experiment.load(folder.experiment)
    shape = (experiment.mesh.replicate, experiment.mesh.shard)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if experiment.world_size not in (1, world_size):
        raise ValueError(f"{folder.path.name} needs {experiment.world_size} ranks; there are {world_size}")
    is_alone = experiment.world_size == 1
    mesh = None if is_alone else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if is_alone and rank > 0:
        return
    context = RankContext(rank, experiment.world_size, torch.device("cpu"), mesh)
    mine = folder.rank(rank)
    mine.path.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        write_json(folder.environment, environment(experiment, context))
    training = prepare_training(experiment, context, build(experiment))
    if experiment.capture.trace:
        add_unit_ranges(training)
    profiler, memory, metrics = (
        StepProfiler(experiment, context),
        MemoryWatch(training),
        StepMetrics(mine, context),
    )
    losses = []
    for result in training.steps((profiler.around, memory.around)):
        metrics.write(result)
        losses.append(result.loss)
    profiler.write(mine)
    if experiment.engine == "fsdp1":  # of the others the trace says all
        dump_flight_recorder(mine)
    memory.write(mine)
    metrics.close()
    write_json(mine.outcome, {"rank": rank, "weights_sha256": weights_sha256(training.model)})
    weights = training.engine.full_weights(training.model)
    mean = torch.tensor(losses, dtype=torch.float64)
    if not is_alone:
        dist.all_reduce(mean)
        mean /= world_size
    if rank == 0:
        torch.save(weights, folder.path / "weights.pt")
        (folder.path / "losses.json").write_text(json.dumps(mean.tolist()))
        write_json(folder.result, {"experiment_id": experiment.id})
    training.engine.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    with groups_handed_on():
        for name in json.loads((folder / "order.json").read_text()):
            sys.stderr.write(f"rank {os.environ['RANK']}: {name}\n")
            train(RunFolder(folder / name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
