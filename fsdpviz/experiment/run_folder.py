"""The run folder: the one place where the run arm and the read arm meet.

<run>/experiment.json     the experiment, exactly as it was stated
      environment.json    versions, devices, topology, provenance (written by rank 0)
      launcher.log        what torchrun said
      rank<r>/trace.json.gz, lanes.json, flight.json, memory.json, metrics.jsonl, status.jsonl, log.txt
              outcome.json  last of the rank: a hash of its weights; error.json instead when it raised
      result.json         last, and atomically: a folder without it is an unfinished run
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.atomic import write_atomically
from ..base.errors import RunFolderError

# what a run leaves beside its ranks' folders; the last holds which of a node's ranks failed
_OWN_FILES = (
    "result.json",
    "experiment.json",
    "environment.json",
    "model.cloudpickle",
    "launcher.log",
    "stop_request",
    "failures*.json",
)
_RANK = re.compile(r"rank(\d{1,6})")


@dataclass(frozen=True)
class RankFolder:
    """Where one rank writes."""

    path: Path

    @property
    def trace(self) -> Path:  # Kineto JSON of the captured steps
        return self.path / "trace.json.gz"

    @property
    def lanes(self) -> Path:  # {"<thread id>": "<lane name>"}
        return self.path / "lanes.json"

    @property
    def flight(self) -> Path:  # the flight recorder's dump
        return self.path / "flight.json"

    @property
    def memory(self) -> Path:
        return self.path / "memory.json"

    @property
    def snapshot(self) -> Path:  # CUDA allocator snapshot, on request only
        return self.path / "memory_snapshot.pickle"

    @property
    def metrics(self) -> Path:  # one JSON line a step
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:  # one JSON line a stage: what the live progress follows
        return self.path / "status.jsonl"

    @property
    def stacks(self) -> Path:  # every thread's Python stack, written when a run is stopped from outside
        return self.path / "stacks.txt"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def outcome(self) -> Path:  # last of a rank's files: what it ended with
        return self.path / "outcome.json"

    @property
    def reserve(self) -> Path:  # room on the disk, given up when an error has to be written
        return self.path / ".reserve"

    @property
    def error(self) -> Path:
        return self.path / "error.json"


@dataclass(frozen=True)
class RunFolder:
    """A run on disk; nothing is read until asked."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def experiment(self) -> Path:
        return self.path / "experiment.json"

    @property
    def model(self) -> Path:  # a model defined in a notebook, pickled; only the ranks of that launch load it
        return self.path / "model.cloudpickle"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    @property
    def stop_request(self) -> Path:  # its existence asks every rank to write what it knows, now
        return self.path / "stop_request"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def is_finished(self) -> bool:
        return self.result.is_file()

    def rank(self, rank: int) -> RankFolder:
        return RankFolder(self.path / f"rank{rank}")

    def ranks(self) -> Iterator[int]:
        """The ranks that have a folder here, in order."""
        if self.path.is_dir():
            found = (_RANK.fullmatch(child.name) for child in self.path.iterdir() if child.is_dir())
            yield from sorted(int(match[1]) for match in found if match)

    @staticmethod
    def looks_like_one(path: Path) -> bool:
        return (path / "experiment.json").is_file()

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False) -> RunFolder:
        """An empty, writable run folder at ``path``.

        ``overwrite`` replaces an earlier run, and nothing else: a folder that holds no run is never emptied.
        """
        try:
            if path.exists():
                _clear_for_reuse(path, overwrite)
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            raise RunFolderError(
                f"a run needs a folder it can write: {path}: {_cause(error)}. Choose another with out=…"
            ) from error
        return cls(path)


def _clear_for_reuse(path: Path, overwrite: bool) -> None:
    if not path.is_dir():
        raise RunFolderError(f"a run folder must be a folder; {path} is a file. Choose another with out=…")
    if not any(path.iterdir()):
        return
    if not RunFolder.looks_like_one(path):
        raise RunFolderError(f"a run folder must be new or empty; {path} holds other files. Choose another with out=…")
    if not overwrite:
        raise RunFolderError(
            f"a run folder must be new; {path} holds an earlier run. Choose another with out=…, or pass overwrite=True"
        )
    folder = RunFolder(path)
    for rank in list(folder.ranks()):
        shutil.rmtree(folder.rank(rank).path)
    for pattern in _OWN_FILES:
        for file in path.glob(pattern):
            file.unlink()


def _cause(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return (error.strerror or str(error)).lower()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes ``content`` so that ``path`` is either absent, the old file or the whole new one.

    Raises RunFolderError when it cannot be written, as on a full disk.
    """
    try:
        write_atomically(path, json.dumps(content, indent=1, ensure_ascii=False))
    except OSError as error:
        raise RunFolderError(
            f"a run needs a folder it can write: {path}: {_cause(error)}. Choose another with out=…"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, or ``{}`` where the file is absent. Raises RunFolderError when it is not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{path} should hold JSON and does not: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} should hold a JSON object and holds a {type(content).__name__}")
    return content


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in ``path``, one a line; a last line that was cut while being written is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror}") from error
    objects = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise RunFolderError(f"line {number} of {path} is not JSON: {error}") from error
        if isinstance(content, dict):
            objects.append(content)
    return objects
