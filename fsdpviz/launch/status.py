"""What the ranks say of themselves while they run, read as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..experiment.run_folder import RunFolder

DONE = "done"


@dataclass(frozen=True)
class RankStatus:
    """The last thing a rank said, and its last loss. ``step`` is None where the stage has no steps."""

    stage: str = "starting"
    step: int | None = None
    steps: int | None = None
    loss: float | None = None

    def __str__(self) -> str:
        if self.step is None:
            return self.stage
        return f"{self.stage} {self.step}" + (f" of {self.steps}" if self.steps is not None else "")


class StatusFile:
    """Follows one rank's status.jsonl; reads only what was added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.last = RankStatus()

    def read(self) -> RankStatus:
        """The newest status. A line that is still being written waits for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError:  # not there yet
            return self.last
        whole, newline, _ = added.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            said = _parse(line) or self.last
            self.last = said if said.loss is not None else replace(said, loss=self.last.loss)
        return self.last


def last_statuses(folder: RunFolder, ranks: Iterable[int]) -> dict[int, RankStatus]:
    return {rank: StatusFile(folder.rank(rank).status).read() for rank in ranks}


def _parse(line: bytes) -> RankStatus | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("stage"), str):
        return None
    loss = said.get("loss")
    return RankStatus(
        stage=said["stage"],
        step=_whole(said.get("step")),
        steps=_whole(said.get("steps")),
        loss=float(loss) if isinstance(loss, int | float) else None,
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None
