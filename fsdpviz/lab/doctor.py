"""What this machine can do: each finding with what it means and the mend."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil

from ..base.units import format_memory
from ..trace.kineto.scanner import is_compiled

SHARED_MEMORY_NEED_BYTES = 256 << 20  # what NCCL and data loaders take on a small node
DISK_NEED_BYTES = 1 << 30
RANK_MEMORY_BYTES = 600 << 20  # a rank that has imported torch and trains a small model


class State(StrEnum):
    OK = "ok"
    LIMITED = "limited"  # works, with less
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ``mend`` is empty where there is nothing to mend."""

    subject: str
    state: State
    detail: str
    mend: str = ""


def examine() -> list[Finding]:
    """All findings, versions first. Imports torch, so it takes some seconds; starts no process."""
    return [*_versions(), *_torch(), _reader(), _memory(), _shared_memory(), _ports(), _disk(), *_notebook()]


def gpu_count() -> int:
    """NVIDIA GPUs that this machine shows, without a CUDA context and without torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def _versions() -> list[Finding]:
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    packages = ("fsdpviz", "torch", "polars", "plotly", "msgspec")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return [Finding("versions", State.OK, f"{python}; {versions}")]


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Finding("torch", State.BROKEN, str(error), "pip install 'torch>=2.9'")]
    return [
        *_devices(torch.cuda.is_available(), gpu_count()),
        _backends(dist),
        _prefetch_on_cpu(),
        *_custom_gather(),
    ]


def _reader() -> Finding:
    if is_compiled():
        return Finding("trace reader", State.OK, "compiled")
    mend = "install a C compiler, then fsdpviz again with pip's --force-reinstall --no-deps"
    return Finding("trace reader", State.LIMITED, "not compiled: large traces open about half as fast", mend)


def _devices(has_cuda: bool, gpus: int) -> list[Finding]:
    if has_cuda:
        return [Finding("devices", State.OK, f"{gpus} GPU(s); up to {gpus} ranks run on CUDA, more on CPU")]
    if gpus:
        mend = "install a torch build for this driver's CUDA, see pytorch.org"
        return [
            Finding(
                "devices",
                State.LIMITED,
                f"{gpus} GPU(s), which this torch cannot use; ranks run on CPU",
                mend,
            )
        ]
    detail = f"no GPU: ranks run on CPU with gloo ({psutil.cpu_count()} cores); CUDA streams are not recorded"
    return [Finding("devices", State.OK, detail)]


def _backends(dist: object) -> Finding:
    available = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available", lambda: False)()]
    if "gloo" in available:
        return Finding("backends", State.OK, ", ".join(available))
    return Finding("backends", State.BROKEN, "this torch has no gloo", "install a torch built with distributed support")


def _prefetch_on_cpu() -> Finding:
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, "_set_unshard_async_op"):
        return Finding("prefetch on CPU", State.OK, "explicit prefetch overlaps on gloo")
    mend = "use torch 2.9 to 2.13, or leave prefetch at its default"
    return Finding("prefetch on CPU", State.LIMITED, "this torch lacks _set_unshard_async_op", mend)


def _custom_gather() -> list[Finding]:
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, "set_custom_all_gather"):
        return [Finding("emulated links", State.OK, "FSDP2 takes custom collectives")]
    return [
        Finding(
            "emulated links",
            State.LIMITED,
            "this torch takes no custom all-gather",
            "pip install 'torch>=2.9'",
        )
    ]


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    ranks = free // RANK_MEMORY_BYTES
    detail = f"{format_memory(free)} free, enough for about {ranks} small CPU ranks"
    if ranks >= 2:
        return Finding("memory", State.OK, detail)
    return Finding("memory", State.LIMITED, detail, "close other programs; each rank takes about 600 MiB")


def _shared_memory() -> Finding:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("shared memory", State.OK, "not a file system here; gloo needs none")
    free = shutil.disk_usage(shared).free
    if free >= SHARED_MEMORY_NEED_BYTES:
        return Finding("shared memory", State.OK, f"{format_memory(free)} free")
    mend = "in a container: start it with --shm-size=1g, or --ipc=host"
    return Finding("shared memory", State.LIMITED, f"{format_memory(free)} free; NCCL wants more", mend)


def _ports() -> Finding:
    """Ranks meet on a free port of the loopback interface."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Finding("ports", State.OK, "free ports on the loopback interface")
    except OSError as error:
        mend = "allow local TCP connections for Python"
        return Finding("ports", State.BROKEN, f"no port can be opened on 127.0.0.1: {error.strerror}", mend)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free >= DISK_NEED_BYTES:
        return Finding("disk", State.OK, f"{format_memory(free)} free here")
    return Finding(
        "disk",
        State.LIMITED,
        f"{format_memory(free)} free here",
        "run elsewhere, or pass --out on a larger disk",
    )


def _notebook() -> list[Finding]:
    missing = [name for name in ("ipywidgets", "anywidget", "jupyterlab") if importlib.util.find_spec(name) is None]
    if not missing:
        return [Finding("notebooks", State.OK, "live progress and figures in JupyterLab")]
    mend = f"{Path(sys.executable).name} -m pip install 'fsdpviz[notebook]'"
    return [Finding("notebooks", State.LIMITED, f"without {', '.join(missing)}; progress is plain lines", mend)]
