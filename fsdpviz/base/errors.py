"""Every error that fsdpviz raises for a user. The message states the rule, what was given and the mend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class FsdpvizError(ValueError):
    """Root of all errors for users; its message fits one line unless it carries a remote traceback."""


class ExperimentError(FsdpvizError):
    """An experiment that cannot be, or that its engine cannot do.

    ``nearest`` has the fields to change, and their values, for the nearest experiment that works.
    """

    def __init__(self, message: str, nearest: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.nearest = dict(nearest or {})


class RunFolderError(FsdpvizError):
    """A run folder that exists already, cannot be written, or does not hold a run."""


class TraceError(FsdpvizError):
    """A recording that cannot be read, or that does not hold what was asked."""


class LaunchError(FsdpvizError):
    """The ranks could not be started, or torchrun ended without saying which rank failed."""


class RunTimeout(LaunchError):
    """A run that was still going at its timeout; the message says where each rank stood."""


@dataclass(frozen=True)
class RankFailure:
    """What is known of one rank that failed.

    ``exit_code`` is negative for a signal (−9 is SIGKILL) and None when the rank never started.
    ``traceback`` is the remote rank's own, empty when it was killed. ``last_lines`` ends its log.
    """

    rank: int
    reason: str  # one line
    exit_code: int | None = None
    traceback: str = ""
    last_lines: tuple[str, ...] = ()


class RankFailed(LaunchError):
    """A rank raised or was killed. ``failure`` is the first one; ``others`` are most often its consequences."""

    def __init__(self, failure: RankFailure, others: tuple[RankFailure, ...] = (), folder: str = "") -> None:
        self.failure = failure
        self.others = others
        self.folder = folder
        super().__init__(_describe(failure, others, folder))

    @property
    def rank(self) -> int:
        return self.failure.rank

    @property
    def traceback(self) -> str:
        return self.failure.traceback


def _describe(failure: RankFailure, others: tuple[RankFailure, ...], folder: str) -> str:
    parts = [f"rank {failure.rank} failed: {failure.reason}"]
    if others:
        parts[0] += f" (then rank {', '.join(str(other.rank) for other in others)})"
    if failure.traceback:
        parts.append(f"--- traceback of rank {failure.rank}\n{failure.traceback.rstrip()}")
    if failure.last_lines:
        parts.append(f"--- last lines of rank {failure.rank}\n" + "\n".join(failure.last_lines))
    if folder:
        parts.append(f"What was recorded is kept in {folder}.")
    return "\n".join(parts)
