"""Who a process is, whether it lives, and how a whole tree of them ends. Standard library and psutil only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

IS_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DEAD_STATES = ("Z", "X", "x")


def identity_of(pid: int) -> str:
    """``"pid:start"``: it names one process for good, as a pid alone does not. Raises ProcessLookupError."""
    start = _start_of(pid)
    if start is None:
        raise ProcessLookupError(pid)
    return f"{pid}:{start}"


def is_alive(identity: str) -> bool:
    """True while that very process runs; a zombie, or another process with its pid, is not alive."""
    pid, _, start = identity.partition(":")
    return _start_of(int(pid)) == start


def _start_of(pid: int) -> str | None:
    """When the process started, None for one that is gone or a zombie.

    On Linux in clock ticks since boot: psutil's create_time moves when the clock is set.
    """
    if not IS_LINUX:
        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
        except psutil.Error:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before may itself hold blanks and brackets
    return None if state in _DEAD_STATES else fields[18]


def die_with_parent() -> None:
    """Asks Linux to SIGKILL this process when its parent ends; elsewhere does nothing.

    A thread that polls does the same everywhere, but not in a process that is stuck while holding the GIL.
    """
    parent = os.getppid()
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the kernel was asked


def become_subreaper() -> bool:
    """True when orphans of this process's tree become its own children (Linux)."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> bool:
    if not IS_LINUX:
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) == 0


def children_of(pid: int) -> list[psutil.Process]:
    """Every process below ``pid``, without itself; empty when there is none such."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def marked_processes(variable: str, value: str) -> list[psutil.Process]:
    """Every process of this user, but for the caller, that was started with ``variable=value``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(variable) == value:
                found.append(process)
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return found


def end_processes(
    survivors: Callable[[], Iterable[psutil.Process]],
    *,
    grace_s: float,
    limit_s: float,
    reap: Callable[[], object],
) -> bool:
    """True when no survivor is left: SIGTERM once, SIGKILL after ``grace_s``, repeated up to ``limit_s``.

    ``survivors`` is asked again each time, so a process that was born meanwhile is ended too. ``reap``
    collects those that are the caller's own children.
    """
    started = time.monotonic()
    warned: set[int] = set()
    while left := [process for process in survivors() if _runs(process)]:
        elapsed_s = time.monotonic() - started
        if elapsed_s > limit_s:
            return False
        for process in left:
            if elapsed_s >= grace_s:
                _send(process, signal.SIGKILL)
            elif process.pid not in warned:
                warned.add(process.pid)
                _send(process, signal.SIGTERM)
        time.sleep(0.03)
        reap()
    reap()
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:  # it ended by itself
        return
