"""State an experiment, run it on real ranks, get its recording."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

from ..analysis.compare import mean_losses
from ..base.errors import ExperimentError
from ..experiment import Experiment, RunFolder, UserModel, preset
from ..experiment.run_folder import read_json, read_json_lines, write_json
from ..launch.launcher import LaunchRequest, launch
from ..launch.progress import Progress, live_progress
from .recording import Recording
from .recording import open as open_recording

RUNS = Path("runs")


def run(
    experiment: Experiment | str,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    timeout_s: float = 600.0,
    progress: bool | Progress = True,
    nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str = "",
) -> Recording:
    """The recording of ``experiment`` (or of the preset of that name), run now on ``world_size`` ranks by torchrun.

    The run folder is ``out``, or a new one under ``runs/``. Over several nodes every node calls this with its own
    ``node_rank``, a folder of its own, and ``rendezvous="host:port"`` of node 0; each gets its own ranks.

    Raises RankFailed with the rank that failed first, its traceback and last lines; RunTimeout when the run is not
    done after ``timeout_s``; ExperimentError and RunFolderError in one line. Whatever it raises, and when
    it is interrupted, no process is left and what was recorded is kept.
    """
    if isinstance(experiment, str):
        experiment = preset(experiment)
    if experiment.world_size % nodes:
        raise ExperimentError(f"ranks must divide by nodes; got {experiment.world_size} ranks for {nodes} nodes")
    request = LaunchRequest(
        processes_per_node=experiment.world_size // nodes,
        timeout_s=timeout_s,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
    )
    model = _shipped_model(experiment)
    folder = RunFolder.create(Path(out) if out is not None else new_folder(experiment), overwrite=overwrite)
    write_json(folder.experiment, experiment.to_dict())
    if model:
        folder.model.write_bytes(model)
    shown = live_progress() if progress is True else progress or None
    started = time.monotonic()
    launch(experiment.to_dict(), folder, request, progress=shown)
    write_json(folder.result, result(experiment, folder, time.monotonic() - started))
    return open_recording(folder.path)


def new_folder(experiment: Experiment) -> Path:
    """``runs/<name>-<id>``, with a number behind when that one is taken."""
    slug = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-") or "run"
    stem = f"{slug}-{experiment.id}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(RUNS / name for name in names if not (RUNS / name).exists())


def _shipped_model(experiment: Experiment) -> bytes:
    model = experiment.model
    if not (isinstance(model, UserModel) and model.is_from_notebook):
        return b""
    if not model.pickled:
        raise ExperimentError(
            f"the model {model.target} was defined in a notebook and does not travel in JSON. "
            "Define it again and pass it to Experiment(model=…)"
        )
    return model.pickled


def result(experiment: Experiment, folder: RunFolder, elapsed_s: float) -> dict[str, Any]:
    """What a finished run came to, as ``result.json`` has it."""
    ranks = list(folder.ranks())
    metrics = {str(rank): read_json_lines(folder.rank(rank).metrics) for rank in ranks}
    return {
        "experiment_id": experiment.id,
        "world_size": experiment.world_size,
        "ranks": ranks,
        "elapsed_s": round(elapsed_s, 3),
        "losses": list(mean_losses(metrics).values()),
        "weights_sha256": {str(rank): read_json(folder.rank(rank).outcome).get("weights_sha256") for rank in ranks},
    }
