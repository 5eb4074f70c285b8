"""A small process between caller and torchrun: when the caller is gone, however it went, so is the tree.

    python -m fsdpviz.launch.supervisor <command…>

The caller holds the write end of this process's stdin; the kernel closes it whichever way the caller ends. At
its end of file, at a signal, or when the parent changed, everything below is ended. Without any of these the
exit code is the command's own, 128 + n for one that signal n ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import psutil

from .processes import become_subreaper, children_of, end_processes, identity_of

SUPERVISOR_VARIABLE = "FSDPVIZ_SUPERVISOR"  # tells torchrun and the ranks whose death ends them
POLL_S = 0.05
GRACE_S = 0.6  # from SIGTERM to SIGKILL
LIMIT_S = 8.0  # a process in uninterruptible sleep outlives SIGKILL; waiting for it longer helps nobody
STOPPED = 0  # exit code of a stop that the caller asked for


class Supervisor:
    def __init__(self, command: list[str]) -> None:
        self._parent = os.getppid()
        self._signal = 0
        self._is_subreaper = become_subreaper()
        self._seen: set[psutil.Process] = set()  # only where orphans cannot be found as our children
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        environment = os.environ | {SUPERVISOR_VARIABLE: identity_of(os.getpid())}
        self._command = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        self._status: int | None = None

    def run(self) -> int:
        """The exit code, once nothing is left below."""
        while self._status is None and not self._must_stop():
            self._reap()
            if not self._is_subreaper:
                self._seen.update(children_of(os.getpid()))
        if self._status is not None:
            code = os.waitstatus_to_exitcode(self._status)
            exit_code = code if code >= 0 else 128 - code
        else:
            exit_code = 128 + self._signal if self._signal else STOPPED
        end_processes(self._survivors, grace_s=GRACE_S, limit_s=LIMIT_S, reap=self._reap)
        self._command.returncode = exit_code  # reaped here, so Popen must not wait for it
        return exit_code

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signal = number

    def _must_stop(self) -> bool:
        """Waits for up to POLL_S. True at the pipe's end of file, after a signal, or under another parent."""
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 64):
            return True
        return bool(self._signal) or os.getppid() != self._parent

    def _survivors(self) -> set[psutil.Process]:
        return self._seen | set(children_of(os.getpid()))

    def _reap(self) -> None:
        """Collects every child that ended, adopted orphans too.

        Not Popen.poll: once an unlucky waitpid(-1) took its child, Popen reports success.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._command.pid:
                self._status = status


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[1:]).run())
