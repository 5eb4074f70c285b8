"""Starts a run and follows it to its end. What torchrun and the ranks say is in the run folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from ..base.errors import LaunchError, RunTimeout
from ..experiment.run_folder import RunFolder, write_json
from .command import RUN_VARIABLE, failures_path, run_environment, supervisor_command, torchrun_command
from .failures import ended_well, explain, first_signs
from .processes import end_processes, marked_processes
from .progress import Progress
from .request import LaunchRequest
from .status import DONE, RankStatus, StatusFile, last_statuses
from .stuck import describe_stuck

__all__ = ["LaunchRequest", "launch"]

POLL_S = 0.05
OTHERS_S = 1.5  # after the first failure, for the other ranks' own errors
DUMP_S = 3.0  # after a timeout, for flight records and stacks
INTERRUPT_DUMP_S = 1.0
SUPERVISOR_S = 12.0  # the supervisor ends the tree in less than its own 8 s limit and then exits


def launch(
    experiment_json: Mapping[str, Any],
    folder: RunFolder,
    request: LaunchRequest,
    *,
    progress: Progress | None = None,
) -> RunFolder:
    """``folder``, once every rank of this node ended well; then no process of the run is left.

    Nor is any left when it raises: RankFailed with the first rank that failed, RunTimeout with where each
    rank stood, ExperimentError when the ranks refused the experiment, LaunchError when torchrun itself
    failed. It blocks, on any thread. It never writes ``result.json``, and ``experiment.json`` only where that
    is missing.
    """
    _prepare(experiment_json, folder, request)
    outcome = "failed"
    started = time.monotonic()
    try:
        with _supervised(folder, request) as supervisor:
            try:
                exit_code = _follow(supervisor, folder, request, progress, started)
                if exit_code == 0 and ended_well(folder, request):
                    outcome = "done"
                    return folder
                raise explain(folder, request, exit_code)
            except RunTimeout:
                outcome = "timed out"
                raise
            except KeyboardInterrupt:
                outcome = "stopped"
                _ask_for_dumps(supervisor, folder, request, INTERRUPT_DUMP_S)
                raise
    finally:
        if progress is not None:
            progress.close(outcome, time.monotonic() - started)


def _prepare(experiment_json: Mapping[str, Any], folder: RunFolder, request: LaunchRequest) -> None:
    """Removes what an earlier launch of this node left that would be read as this one's."""
    try:
        if not folder.experiment.exists():
            write_json(folder.experiment, experiment_json)
        if request.node_rank == 0:
            folder.stop_request.unlink(missing_ok=True)
        failures_path(folder, request).unlink(missing_ok=True)
        for rank in request.local_ranks:
            own = folder.rank(rank)
            own.path.mkdir(exist_ok=True)
            for path in (own.status, own.error, own.flight, own.stacks):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(f"a run needs a folder it can write: {folder.path}: {error.strerror}") from error


@contextmanager
def _supervised(folder: RunFolder, request: LaunchRequest) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun under its supervisor; on leaving, nothing of it is left."""
    command = supervisor_command(sys.executable, torchrun_command(sys.executable, folder, request))
    try:
        with folder.launcher_log.open("ab") as log:
            supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end of file, when we close it or die, ends the tree
                stdout=log,
                stderr=subprocess.STDOUT,
                env=run_environment(folder, request, os.environ),
                start_new_session=True,  # neither Ctrl-C in a terminal nor a killed process group reaches it
            )
    except OSError as error:
        raise LaunchError(f"torchrun could not be started with {sys.executable}: {error}") from error
    try:
        yield supervisor
    finally:
        _end(supervisor, folder)


def _end(supervisor: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Ends the tree and reaps the supervisor, however often the user interrupts."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    deadline = time.monotonic() + SUPERVISOR_S
    _uninterrupted(lambda: _wait(supervisor, deadline))
    if supervisor.returncode is None or supervisor.returncode < 0:  # stuck, or killed from outside
        _uninterrupted(lambda: _sweep(supervisor, folder))


def _sweep(supervisor: subprocess.Popen[bytes], folder: RunFolder) -> None:
    """Ends what a dead supervisor could not; the processes would also end by themselves, but later."""
    if supervisor.returncode is None:
        supervisor.kill()
        supervisor.wait()

    def marked() -> list[psutil.Process]:
        return marked_processes(RUN_VARIABLE, str(folder.path))

    end_processes(marked, grace_s=0.0, limit_s=5.0, reap=lambda: None)


def _wait(supervisor: subprocess.Popen[bytes], deadline: float) -> None:
    while supervisor.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


def _uninterrupted(finish: Callable[[], None]) -> None:
    """Runs ``finish`` to its end; an interrupt only starts it again: it does what the user asks for."""
    while True:
        try:
            return finish()
        except KeyboardInterrupt:
            continue


def _follow(
    supervisor: subprocess.Popen[bytes],
    folder: RunFolder,
    request: LaunchRequest,
    progress: Progress | None,
    started: float,
) -> int | None:
    """torchrun's exit code; None when a rank failed and torchrun waits for others. Raises RunTimeout."""
    status = StatusFile(folder.rank(request.local_ranks[0]).status)
    failed_at: float | None = None
    while supervisor.poll() is None:
        now = time.monotonic()
        failed = first_signs(folder, request)
        if failed:
            failed_at = now if failed_at is None else failed_at
            if now - failed_at > OTHERS_S or failed.issuperset(request.local_ranks):
                return None
        elif now - started > request.timeout_s:
            stood = last_statuses(folder, request.local_ranks)  # before the dumps, which take a while
            _ask_for_dumps(supervisor, folder, request, DUMP_S)
            raise RunTimeout(_timeout_message(folder, request, stood))
        if progress is not None:
            progress.update(status.read(), now - started)
        time.sleep(POLL_S)
    if progress is not None:
        progress.update(status.read(), time.monotonic() - started)
    return supervisor.returncode


def _ask_for_dumps(
    supervisor: subprocess.Popen[bytes], folder: RunFolder, request: LaunchRequest, limit_s: float
) -> None:
    """Makes every rank write its stacks and flight record; waits up to ``limit_s`` for those that are there."""
    try:
        folder.stop_request.touch()
    except OSError:  # the disk is full, or the folder went: the run is ended without
        return
    statuses = last_statuses(folder, request.local_ranks)
    there = [folder.rank(rank) for rank, status in statuses.items() if status.stage != DONE]
    dumps = [dump for rank in there if rank.status.exists() for dump in (rank.stacks, rank.flight)]
    deadline = time.monotonic() + limit_s
    while supervisor.poll() is None and time.monotonic() < deadline and not all(map(os.path.exists, dumps)):
        time.sleep(POLL_S)


def _timeout_message(folder: RunFolder, request: LaunchRequest, stood: Mapping[int, RankStatus]) -> str:
    return (
        f"a run must end within timeout_s; this one was still going after {request.timeout_s:g} s. "
        "If it was only slow, raise timeout_s; if it hangs, this is where the ranks stood:\n"
        f"{describe_stuck(folder, stood)}\n"
        f"What was recorded is kept in {folder.path}."
    )
