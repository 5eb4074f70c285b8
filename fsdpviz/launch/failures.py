"""Why a run failed: what ranks wrote, what torchrun saw of them and their logs, put into one error."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ExperimentError, FsdpvizError, LaunchError, RankFailed, RankFailure, RunFolderError
from ..experiment.run_folder import RunFolder, read_json
from .command import failures_path
from .request import LaunchRequest
from .status import DONE, last_statuses

LAST_LINES = 20
_TAIL_BYTES = 16_384

# torchrun looks every 0.1 s, so it dates a death later than a neighbour dates its lost connection
_NOTICE_DELAY_S = 0.2

_CONSEQUENCE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused)|broken pipe|socket (?:closed|error)|remote process exited"
    r"|recvvalue failed|failed to (?:recv|connect)|end of file|store .*(?:closed|shut)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Found:
    """One failed rank with what decides which was first."""

    failure: RankFailure
    time_s: float  # epoch
    is_consequence: bool  # it only noticed that another was gone
    was_ended: bool = False  # by torchrun, for another's sake: no failure of its own
    user_message: str = ""  # set when the worker refused the experiment


def first_signs(folder: RunFolder, request: LaunchRequest) -> set[int]:
    """The ranks of which an error file or torchrun says that they failed; cheap enough to ask often."""
    failed = {rank for rank in request.local_ranks if folder.rank(rank).error.exists()}
    path = failures_path(folder, request)
    return failed | ({int(rank) for rank in _read(path)} if path.exists() else set())


def explain(folder: RunFolder, request: LaunchRequest, exit_code: int | None) -> FsdpvizError:
    """The error of a run that did not end well.

    RankFailed with the first cause, ExperimentError where that rank refused the experiment, LaunchError
    where no rank is to blame. ``exit_code`` is torchrun's as the supervisor gives it, None while it ran.
    """
    found = [one for one in _collect(folder, request) if not one.was_ended]
    found.sort(key=lambda one: (one.is_consequence, one.time_s))
    if not found and exit_code == 0:
        found = _not_done(folder, request)
    if not found:
        return LaunchError(_torchrun_failed(folder, exit_code))
    if found[0].user_message:
        return ExperimentError(found[0].user_message)
    return RankFailed(found[0].failure, tuple(one.failure for one in found[1:]), str(folder.path))


def ended_well(folder: RunFolder, request: LaunchRequest) -> bool:
    """True when each rank of this node said that it is done."""
    return all(status.stage == DONE for status in last_statuses(folder, request.local_ranks).values())


# [Note: which rank failed first]
# The first cause is the earliest failure that is not a consequence, an error which says that a connection was
# lost. A death by SIGTERM or SIGKILL after torchrun had begun to end the others is no failure at all.


def _collect(folder: RunFolder, request: LaunchRequest) -> list[_Found]:
    seen_dead = _read(failures_path(folder, request))
    with_error = {rank for rank in folder.ranks() if folder.rank(rank).error.exists()}
    found = []
    for rank in sorted(with_error | {int(rank) for rank in seen_dead}):
        death = seen_dead.get(str(rank), {})
        raised = _read(folder.rank(rank).error)
        found.append(_raised(folder, rank, raised, death) if raised else _died(folder, rank, death))
    return found


def _raised(folder: RunFolder, rank: int, raised: Mapping[str, Any], death: Mapping[str, Any]) -> _Found:
    message = str(raised.get("message", ""))
    kind = str(raised.get("type", "error"))
    reason = f"{kind}: {message.splitlines()[0]}" if message else kind
    failure = RankFailure(
        rank=rank,
        reason=reason,
        exit_code=death.get("exit_code", 1),
        traceback=str(raised.get("traceback", "")),
        last_lines=last_lines(folder.rank(rank).log),
    )
    return _Found(
        failure,
        time_s=float(raised.get("time", 0.0)),
        is_consequence=bool(_CONSEQUENCE.search(message)),
        user_message=message if raised.get("is_user_error") else "",
    )


def _died(folder: RunFolder, rank: int, death: Mapping[str, Any]) -> _Found:
    exit_code = death.get("exit_code")
    was_first = bool(death.get("is_first", True))
    failure = RankFailure(
        rank=rank,
        reason=describe_exit(exit_code),
        exit_code=exit_code,
        last_lines=last_lines(folder.rank(rank).log),
    )
    return _Found(
        failure,
        time_s=float(death.get("time", 0.0)) - _NOTICE_DELAY_S,
        is_consequence=False,
        was_ended=exit_code in (-signal.SIGTERM, -signal.SIGKILL) and not was_first,
    )


def _not_done(folder: RunFolder, request: LaunchRequest) -> list[_Found]:
    return [
        _Found(
            RankFailure(
                rank=rank,
                reason=f"it ended without an error before it was done; its last stage was {status}",
                exit_code=0,
                last_lines=last_lines(folder.rank(rank).log),
            ),
            time_s=0.0,
            is_consequence=False,
        )
        for rank, status in last_statuses(folder, request.local_ranks).items()
        if status.stage != DONE
    ]


def describe_exit(exit_code: int | None) -> str:
    """One line on how a process ended; negative codes are signals."""
    if exit_code is None:
        return "it ended, nobody saw how"
    if exit_code >= 0:
        return f"it exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = "a signal"
    hint = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"it was killed by {name}, signal {-exit_code}{hint}"


FULL_DISK_BYTES = 64 << 10  # less is too little for a rank to write why it failed


def _torchrun_failed(folder: RunFolder, exit_code: int | None) -> str:
    where = f"{folder.launcher_log} has what it said"
    if shutil.disk_usage(folder.path).free < FULL_DISK_BYTES:
        return f"the disk of {folder.path} is full, and no rank could say more. Make room or choose another folder"
    if exit_code is not None and exit_code < 0:
        return f"the run's supervisor was ended from outside: {describe_exit(exit_code)}; {where}"
    if exit_code is not None and exit_code > 128:
        return f"torchrun was ended from outside: {describe_exit(128 - exit_code)}; {where}"
    last = next((line for line in reversed(last_lines(folder.launcher_log)) if line.strip(" =-")), "nothing")
    return f"torchrun ended with code {exit_code} and named no rank; {where}; its last line: {last.strip()}"


def last_lines(path: Path, count: int = LAST_LINES) -> tuple[str, ...]:
    """The last lines of a log, without blank ones; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple([line.rstrip() for line in text.splitlines() if line.strip()][-count:])


def _read(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty where there is none, or where a rank died while it wrote it."""
    try:
        return read_json(path)
    except RunFolderError:
        return {}
