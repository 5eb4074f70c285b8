"""The command lines and the environment of a run. Pure: values in, values out."""

from __future__ import annotations

import os
import sys
import sysconfig
import uuid
from collections.abc import Mapping
from pathlib import Path

from ..experiment.run_folder import RunFolder
from .request import LaunchRequest

RUN_VARIABLE = "FSDPVIZ_RUN"  # marks every process of a run with its folder

# torch takes both names and warns of the second
_FLIGHT_RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FLIGHT_RECORDER_ENTRIES = "2000"  # collectives kept a rank; without it some versions record none

# left by a torchrun around the caller, or the user's defaults for another: each would change ours
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_", "ROLE_", "GROUP_")
_FOREIGN_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHON_EXEC"}
)


def supervisor_command(python: str, command: list[str]) -> list[str]:
    """Runs ``command`` under the supervisor."""
    return [python, "-m", "fsdpviz.launch.supervisor", *command]


def torchrun_command(python: str, folder: RunFolder, request: LaunchRequest) -> list[str]:
    """Runs the workers under torchrun, on this node."""
    worker = request.worker_module
    return [
        python,
        "-m",
        "fsdpviz.launch.torchrun",
        str(failures_path(folder, request)),
        f"--nnodes={request.nodes}",
        f"--nproc-per-node={request.processes_per_node}",
        "--max-restarts=0",
        f"--log-dir={os.devnull}",  # otherwise each run leaves a folder in /tmp; workers keep their own logs
        *_rendezvous(request),
        *([worker] if worker.endswith(".py") else ["-m", worker]),
        str(folder.path),
    ]


def failures_path(folder: RunFolder, request: LaunchRequest) -> Path:
    """Where this node's torchrun writes which of its ranks failed; nodes may share one folder."""
    return folder.path / ("failures.json" if request.node_rank == 0 else f"failures.node{request.node_rank}.json")


def _rendezvous(request: LaunchRequest) -> list[str]:
    if request.nodes == 1:
        # port 0 is a free one each time, so runs never collide; a laptop's own name may not resolve
        return [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            f"--rdzv-id={uuid.uuid4().hex}",
            "--local-addr=127.0.0.1",
        ]
    host, port = request.rendezvous_address()
    # static: node_rank decides the ranks, where c10d would deal them out by who comes first
    return [
        "--rdzv-backend=static",
        f"--rdzv-endpoint={f'[{host}]' if ':' in host else host}:{port}",
        "--rdzv-id=fsdpviz",
        f"--node-rank={request.node_rank}",
        *(["--local-addr=127.0.0.1"] if request.is_on_one_machine else []),
    ]


def run_environment(folder: RunFolder, request: LaunchRequest, caller: Mapping[str, str]) -> dict[str, str]:
    """The environment of each process of the run: the caller's, cleaned, with defaults where it has none."""
    environment = {
        name: value
        for name, value in caller.items()
        if name not in _FOREIGN_NAMES and not name.startswith(_FOREIGN_PREFIXES)
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
    if request.is_on_one_machine:
        # gloo otherwise looks up the machine's own name, which is slow or fails on a laptop off the network
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if not any(name in environment for name in _FLIGHT_RECORDER_VARIABLES):
        environment[_FLIGHT_RECORDER_VARIABLES[0]] = _FLIGHT_RECORDER_ENTRIES
    if python_path := _python_path(caller.get("PYTHONPATH", "")):
        environment["PYTHONPATH"] = python_path
    environment.update(request.extra_env)
    environment[RUN_VARIABLE] = str(folder.path)
    return environment


def _python_path(inherited: str) -> str:
    """``inherited``, and last this package's place where no Python finds it by itself (a source tree).

    Never a site-packages: PYTHONPATH comes before the standard library, and backports there would hide it.
    """
    here = str(Path(__file__).resolve().parents[2])
    entries = [entry for entry in inherited.split(os.pathsep) if entry]
    is_installed = here in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return os.pathsep.join(entries if is_installed or here in entries else [*entries, here])
