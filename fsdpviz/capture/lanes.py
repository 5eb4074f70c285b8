"""Names for the lanes of a trace: thread ids as the profiler writes them, with what the threads are for."""

from __future__ import annotations

import threading
from pathlib import Path

_TASKS = Path("/proc/self/task")  # Linux; elsewhere only Python's own threads have names


def lane_names() -> dict[int, str]:
    """Native thread id → name, for every thread of this process that has a telling one."""
    names = {}
    if _TASKS.is_dir():
        for task in _TASKS.iterdir():
            name = _comm(task)
            if name.startswith("pt_gloo"):
                names[int(task.name)] = "gloo"
            elif name.startswith("pt_autograd"):
                names[int(task.name)] = "autograd"
    for thread in threading.enumerate():
        if thread.native_id is not None:
            is_main = thread is threading.main_thread()
            names[thread.native_id] = "main thread" if is_main else thread.name
    return names


def _comm(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # the thread has ended
        return ""
