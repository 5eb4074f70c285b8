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
    window = at_issue(windows.optimizer)
    stepping = is_compute & (window >= 0)
    return stepping | _on_host(rows, windows.optimizer, window) if rows.runs_on_device.any() else stepping


def _on_host(rows: Rows, optimizer: Windows[str], window: np.ndarray) -> np.ndarray:
    """The outermost operators of those ranges that launch nothing: offloaded parameters are updated on the CPU. Without
    any launch in the file nothing tells which those are. ``window`` is by row the index of the range around it.
    """
    found = np.zeros(len(rows), bool)
    launches = rows.decided(is_launch)
    is_busy = optimizer.hold(rows.lane[launches], rows.start_ns[launches])
    idle = (~is_busy).nonzero()[0]
    if not len(idle) or not launches.any():
        return found
    is_busy[idle] = optimizer.only(is_busy).at(optimizer.lane[idle], optimizer.start_ns[idle]) >= 0  # inside a busy one
    host = (~rows.is_device & (window >= 0)).nonzero()[0]
    found[host] = ~is_busy[window[host]]
    if not found.any():
        return found
    return outermost(rows.lane, rows.start_ns, rows.end_ns, found & rows.decided(is_cpu_work))
