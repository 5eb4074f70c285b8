"""What a test may leave behind: processes, threads, environment variables, open ports, descriptors."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

PROCESS_LIMIT_S = 10.0  # the promise to users: nothing of a run is left 10 s after its end
RUN_VARIABLE = "FSDPVIZ_RUN"


@dataclass(frozen=True)
class Snapshot:
    """The state of this process before a test."""

    threads: frozenset[threading.Thread]
    environment: Mapping[str, str]
    ports: frozenset[int]
    descriptors: frozenset[str]
    children: frozenset[int]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            threads=frozenset(threading.enumerate()),
            environment=_environment(),
            ports=listening_ports(),
            descriptors=_descriptors(),
            children=frozenset(child.pid for child in psutil.Process().children()),
        )

    def leftovers(self, folder: Path, limit_s: float = PROCESS_LIMIT_S) -> list[str]:
        """One line a new thing; runs below ``folder`` get up to ``limit_s`` to end."""
        found = [f"process {process}" for process in wait_for_end(folder, limit_s)]
        now = Snapshot.take()
        found += [f"child {pid}" for pid in now.children - self.children]
        found += [f"thread {thread.name}" for thread in now.threads - self.threads]
        found += [f"port {port}" for port in now.ports - self.ports]
        found += [f"descriptor {target}" for target in now.descriptors - self.descriptors]
        names = self.environment.keys() | now.environment.keys()
        changed = [name for name in names if self.environment.get(name) != now.environment.get(name)]
        return found + [f"environment {name}" for name in changed]


def wait_for_end(folder: Path, limit_s: float = PROCESS_LIMIT_S) -> list[str]:
    """Processes of runs below ``folder`` that are still there after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [str(process) for process in left]


def processes_of(folder: Path, part: str = "") -> list[psutil.Process]:
    """Live processes whose run folder is ``folder`` or below it and whose command line holds ``part``."""
    found = []
    for process in psutil.process_iter():
        try:
            run = process.environ().get(RUN_VARIABLE)
            ours = run is not None and Path(run).is_relative_to(folder) and process.pid != os.getpid()
            if ours and part in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def listening_ports() -> frozenset[int]:
    connections = psutil.Process().net_connections(kind="inet")
    return frozenset(c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _descriptors() -> frozenset[str]:
    """Pipes and sockets that are open, as Linux names them; empty elsewhere."""
    if sys.platform != "linux":
        return frozenset()
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.add(str(entry.readlink()))
        except OSError:  # the one that iterdir itself had open
            continue
    return frozenset(target for target in targets if target.startswith(("pipe:", "socket:")))
