"""What runs inside a rank: ``torchrun … -m fsdpviz.launch.worker <run folder>``. The only file here that imports torch.

The order matters: the log is this process's output before anything can print, the watch runs before anything can
hang, and whatever goes wrong after that ends in ``error.json``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..base.errors import ExperimentError, FsdpvizError, RunFolderError
from ..experiment import Experiment, UserModel
from ..experiment.run_folder import RankFolder, RunFolder, read_json, write_json
from .watch import start_watch

RESERVE_BYTES = 64 << 10


def main(arguments: list[str]) -> int:
    """Runs this rank of the run in ``arguments[0]``; returns the process's exit code. Collective over all ranks."""
    folder, rank = RunFolder(Path(arguments[0])), int(os.environ["RANK"])
    mine = folder.rank(rank)
    mine.path.mkdir(parents=True, exist_ok=True)
    _redirect_output(mine.log)
    start_watch(folder, rank, lambda: _dump_flight_recorder(mine))
    try:
        mine.reserve.write_bytes(bytes(RESERVE_BYTES))
        _run(folder, mine)
        mine.reserve.unlink(missing_ok=True)
    except BaseException as error:  # noqa: BLE001  # the process boundary: the caller gets the traceback
        _report(error, mine, rank)
        return 1
    return 0


def _redirect_output(log: Path) -> None:
    """Everything this process prints, C++ included, goes to its log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _dump_flight_recorder(mine: RankFolder) -> None:
    if "torch.distributed" in sys.modules:  # a rank that is stopped while it imports has nothing to tell
        from ..capture.flight import dump_flight_recorder

        dump_flight_recorder(mine)


def _report(error: BaseException, mine: RankFolder, rank: int) -> None:
    text = traceback.format_exc()
    mine.reserve.unlink(missing_ok=True)  # on a full disk this is what makes room for the error
    sys.stderr.write(text)
    is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    message = f"rank {rank} found the disk full; make room or choose another folder" if is_full else str(error)
    content = {
        "rank": rank,
        "type": type(error).__name__,
        "message": message,
        "traceback": text,
        "time": time.time(),
        "is_user_error": is_full or isinstance(error, FsdpvizError),
    }
    try:
        write_json(mine.error, content)
    except RunFolderError as failure:  # a full disk has no room for this either; the exit code and the log remain
        sys.stderr.write(f"error.json could not be written: {failure}\n")


def _run(folder: RunFolder, mine: RankFolder) -> None:
    import torch

    from ..capture.metrics import JsonLines

    status = JsonLines(mine.status)
    status.write(time=time.time(), stage="starting")
    experiment = Experiment.from_dict(read_json(folder.experiment))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    context = _join(experiment)
    _train(folder, mine, experiment, context, status)
    torch.distributed.destroy_process_group()  # not after a failure: it would wait for the other ranks
    status.write(time=time.time(), stage="done")


def _join(experiment: Experiment) -> Any:
    """Joins the other ranks on the experiment's device and makes the mesh. Collective over all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ..engine import RankContext

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != experiment.world_size:
        raise ExperimentError(f"the mesh needs {experiment.world_size} ranks and torchrun started {world_size}")
    device = _device(experiment, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (experiment.mesh.replicate, experiment.mesh.shard)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    control: Any = dist.new_group(backend="gloo") if world_size > 1 else None
    return RankContext(rank, world_size, device, mesh, control)


def _device(experiment: Experiment, local_rank: int, local_world_size: int) -> Any:
    """This rank's device: a GPU of its own, or the CPU. "auto" takes GPUs when there is one for every local rank."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if experiment.device == "cuda" and gpus < local_world_size:
        raise ExperimentError(
            f"device='cuda' needs a GPU for each of {local_world_size} ranks; this node has {gpus}. Use device='cpu'"
        )
    if experiment.device != "cpu" and gpus >= local_world_size:
        return torch.device("cuda", local_rank)
    if experiment.offload.pin_memory:
        raise ExperimentError("pinned memory needs a CUDA device to copy to; there is none. Use pin_memory=None")
    if experiment.capture.memory_snapshot:
        raise ExperimentError("a memory snapshot is CUDA's allocator history; there is no CUDA device here")
    return torch.device("cpu")


def _train(folder: RunFolder, mine: RankFolder, experiment: Experiment, context: Any, status: Any) -> None:
    from ..capture.environment import environment
    from ..capture.memory import MemoryWatch
    from ..capture.metrics import StepMetrics
    from ..capture.profiler import StepProfiler
    from ..capture.units import add_unit_ranges
    from ..engine.models import build
    from ..engine.train import prepare_training

    if context.rank == 0:
        write_json(folder.environment, environment(experiment, context))
    status.write(time=time.time(), stage="building")
    training = prepare_training(experiment, context, build(experiment, _pickled_model(folder, experiment)))
    with ExitStack() as stack:
        stack.callback(training.engine.close)
        if experiment.capture.trace:
            add_unit_ranges(training)
        profiler = StepProfiler(experiment, context)
        stack.callback(profiler.write, mine)
        stack.callback(profiler.stop)
        memory = MemoryWatch(training)
        metrics = StepMetrics(mine, context)
        stack.callback(metrics.close)
        watched = (profiler.around, memory.around) if experiment.capture.memory else (profiler.around,)
        for result in training.steps(watched):
            metrics.write(result)
            status.write(time=time.time(), loss=result.loss, **_stage_after(result.step, experiment))
        status.write(time=time.time(), stage="writing")
        if experiment.capture.memory:
            memory.write(mine)
        if experiment.capture.flight_recorder:
            _dump_flight_recorder(mine)
    write_json(mine.outcome, {"rank": context.rank, "weights_sha256": weights_sha256(training.model)})


def _stage_after(step: int, experiment: Experiment) -> dict[str, Any]:
    """The step that was just done, counted from 1 within its stage."""
    steps = experiment.steps
    if step < steps.warmup:
        return {"stage": "warm-up", "step": step + 1, "steps": steps.warmup}
    return {"stage": "step", "step": step - steps.warmup + 1, "steps": steps.measured}


def _pickled_model(folder: RunFolder, experiment: Experiment) -> bytes:
    """The notebook's model that was launched with this run, and no other; empty when the model is not a notebook's."""
    if not (isinstance(experiment.model, UserModel) and experiment.model.is_from_notebook):
        return b""
    pickled = folder.model.read_bytes() if folder.model.is_file() else b""
    if pickled and hashlib.sha256(pickled).hexdigest() != experiment.model.digest:
        raise ExperimentError(
            f"{folder.model.name} is not the model that this experiment was stated with. Launch it again"
        )
    return pickled


def weights_sha256(model: Any) -> str:
    """A hash of the parameters as this rank stores them: equal on ranks that hold the same shard."""
    from ..engine.prepare import local_tensors

    digest = hashlib.sha256()
    for name, tensor in local_tensors(model):
        digest.update(name.encode())
        digest.update(tensor.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code:
        os._exit(exit_code)  # at once: an orderly exit would wait for collectives that never end
    sys.exit(0)
