"""torchrun inside a process of its own: it also ends with its supervisor and says at once which rank failed.

python -m fsdpviz.launch.torchrun <failures.json> <torchrun's arguments…>
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing import api as elastic
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..base.errors import RunFolderError
from ..experiment.run_folder import write_json
from .processes import children_of, die_with_parent, is_alive
from .supervisor import SUPERVISOR_VARIABLE

WATCH_S = 0.2


class FailureLog:
    """What failures.json holds: ``{"<rank>": {"exit_code", "pid", "time", "is_first"}}``.

    ``exit_code`` is negative for a signal. ``is_first`` is False for ranks that torchrun itself may have
    ended, because another had failed before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failures: dict[str, dict[str, Any]] = {}

    def add(self, failures: Mapping[int, Any]) -> None:
        """Takes torchrun's failures by global rank, in the order in which it notices them."""
        new = {str(rank): failure for rank, failure in failures.items() if str(rank) not in self._failures}
        if not new:
            return
        is_first = not self._failures
        for rank, failure in new.items():
            self._failures[rank] = {
                "exit_code": failure.exitcode,
                "pid": failure.pid,
                "time": time.time(),
                "is_first": is_first,
            }
        with suppress(RunFolderError):  # a full disk: the ranks' own errors and the exit code remain
            write_json(self._path, self._failures)


def report_at_once(log: FailureLog) -> None:
    """Makes torchrun report a dead rank when it notices it.

    Its ChildFailedError comes after the other ranks ended, which takes 30 s where one of them is stuck and
    ignores SIGTERM. A torch that lacks the private method reports late, and nothing else changes.
    """
    capture = getattr(elastic.SubprocessContext, "_capture_process_failures", None)
    if capture is None:
        return

    def capture_and_report(self: Any, done_local_ranks: set[int]) -> None:
        capture(self, done_local_ranks)
        log.add({int(self.envs[local]["RANK"]): failure for local, failure in self._failures.items()})

    elastic.SubprocessContext._capture_process_failures = capture_and_report


def end_with_supervisor() -> None:
    """Starts a daemon thread that ends the ranks and this process when the supervisor is gone."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if not supervisor:
        return

    def watch() -> None:
        while is_alive(supervisor):
            time.sleep(WATCH_S)
        for process in children_of(os.getpid()):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.Error:
                continue
        os._exit(1)

    threading.Thread(target=watch, name="supervisor watch", daemon=True).start()


def main(arguments: list[str]) -> int:
    """torchrun's exit code: 0, or 1 when a rank failed. Its own faults are raised."""
    die_with_parent()
    end_with_supervisor()
    log = FailureLog(Path(arguments[0]))
    report_at_once(log)
    try:
        torch_run.main(arguments[1:])
    except ChildFailedError as error:
        log.add(error.failures)
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
