"""Which work is the optimizer's: on the device, or on the host where parameters are offloaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .attribute import Attribution
from .classify import is_cpu_work, is_launch, is_optimizer_kernel
from .rows import Rows
from .windows import Windows, outermost


def is_optimizer(
    rows: Rows,
    windows: Attribution,
    is_compute: np.ndarray,
    has_no_phase: np.ndarray,
    at_issue: Callable[[Windows], np.ndarray],
) -> np.ndarray:
    """By row (bool): what the optimizer's ranges issued; without ranges kernels of its names, save what a range says to
    be of another phase or FSDP's own (its copies are foreach kernels too).

    ``at_issue`` gives by row the index of the window around its issue, −1 outside all.
    """
    if not len(windows.optimizer):
        is_free = is_compute & rows.runs_on_device & has_no_phase & (at_issue(windows.issuers) < 0)
        return rows.named_among(is_optimizer_kernel, is_free)
    stepping = is_compute & (at_issue(windows.optimizer) >= 0)
    return stepping | _on_host(rows, windows.optimizer) if rows.runs_on_device.any() else stepping


def _on_host(rows: Rows, optimizer: Windows[str]) -> np.ndarray:
    """The outermost operators of those ranges that launch nothing: offloaded parameters are updated on the CPU. Without
    any launch in the file nothing tells which those are.
    """
    launches = rows.decided(is_launch)
    idle, busy = optimizer.split(rows.lane[launches], rows.start_ns[launches])
    inside = np.zeros(len(rows), bool)
    if launches.any() and len(idle):
        host = (~rows.is_device & rows.decided(is_cpu_work)).nonzero()[0]
        points = rows.lane[host].astype(np.int64), rows.start_ns[host]
        inside[host] = (idle.at(*points) >= 0) & (busy.at(*points) < 0)
    return outermost(rows.lane, rows.start_ns, rows.end_ns, inside) if inside.any() else inside
