"""What a run ran on: versions, devices, topology."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import psutil
import torch

from ..engine.protocol import RankContext
from ..experiment import Experiment


def environment(experiment: Experiment, context: RankContext) -> dict[str, Any]:
    """JSON values that say where the numbers come from. Nothing in it names the machine or its user."""
    device = "cuda" if context.is_cuda else "cpu"
    content: dict[str, Any] = {
        "provenance": experiment.provenance_on(device).value,
        "device": device,
        "backend": "nccl" if context.is_cuda else "gloo",
        "world_size": context.world_size,
        "nodes": context.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", context.world_size)),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "fsdpviz": metadata.version("fsdpviz"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads_per_rank": torch.get_num_threads(),
    }
    if context.is_cuda:
        from torch.cuda import nccl  # not in every build

        content |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in nccl.version()),
            "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        }
    return content


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }
