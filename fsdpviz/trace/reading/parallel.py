"""Files of several ranks read at once: decoding holds Python's lock, so that each core needs a process of its own.

A process takes a third of a second to start and hands its tables over as Parquet; both pay from some seconds of
reading on. This process reads too, so that one that does not start, or dies, costs nothing but its help.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ...base.errors import TraceError
from ..files.parts import Part
from ..files.sniff import GZIP, PACKED
from ..files.sources import Source
from .progress import Progress
from .stored import StoredError, read_parts

WORTH_BYTES = 48 << 20  # of JSON, in files other than the largest
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from fsdpviz.trace.reading.worker import main; main()"
)

Read = list[Part] | TraceError


def helpers_for(sources: Sequence[Source]) -> int:
    """How many more processes to read these files with; 0 where they would not pay."""
    if not sources:
        return 0
    sizes = sorted(_json_bytes(source.path) for source in sources)
    if sum(sizes[:-1]) < WORTH_BYTES or not sys.executable:
        return 0
    return min(len(sizes), _cores()) - 1


def read_together(
    sources: Sequence[Source], read: Callable[[Source], Read], helpers: int, *, cache: bool, on_read: Progress
) -> list[Read]:
    """What ``read`` gives for each source, in their order; ``helpers`` processes take some of them off this one's
    hands. ``on_read`` hears of the bytes that those have read; ``read`` reports its own.
    """
    found: dict[int, Read] = {}
    waiting = deque(range(len(sources)))
    with tempfile.TemporaryDirectory(prefix="fsdpviz-") as folder:
        team: list[_Helper] = []
        try:
            for _ in range(helpers):
                team.append(_Helper(sources, waiting, found, Path(folder), cache, on_read))
                team[-1].thread.start()
            while len(found) < len(sources):
                try:
                    number = waiting.popleft()
                except IndexError:
                    if not any(helper.thread.is_alive() for helper in team):
                        waiting.extend(number for number in range(len(sources)) if number not in found)
                        continue
                    for helper in team:
                        helper.thread.join()
                    continue
                found[number] = read(sources[number])
        finally:
            for helper in team:
                helper.stop()
    return [found[number] for number in range(len(sources))]


def job_of(source: Source, out: Path, cache: bool) -> str:
    """One line for ``worker``: read ``source`` and put its parts into the folder ``out``."""
    told = {
        "path": str(source.path),
        "name": source.name,
        "format": source.format.value,
        "is_temporary": source.is_temporary,
        "lane_names": dict(source.lane_names),
        "out": str(out),
        "cache": cache,
    }
    return json.dumps(told) + "\n"


class _Helper:
    """A process and the thread that starts it and keeps it busy. In the main thread an interrupt could come between
    the process' start and the moment in which somebody knows of it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        waiting: deque[int],
        found: dict[int, Read],
        folder: Path,
        cache: bool,
        on_read: Progress,
    ) -> None:
        self._sources, self._waiting, self._found = sources, waiting, found
        self._folder, self._cache, self._on_read = folder, cache, on_read
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._starting = threading.Lock()
        self.thread = threading.Thread(target=self._work, name="fsdpviz-helper", daemon=True)

    def _start(self) -> None:
        with self._starting, suppress(OSError):  # no process to be had
            if not self._is_stopped:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )

    def _work(self) -> None:
        self._start()
        while self._process:
            try:
                number = self._waiting.pop()
            except IndexError:
                return
            try:
                answer = self._ask(number)
            except (OSError, ValueError, StoredError):  # it died or was stopped: this process reads the file
                answer = None
            if answer is None:
                self._waiting.append(number)
                return
            self._found[number] = answer

    def _ask(self, number: int) -> Read | None:
        source, out = self._sources[number], self._folder / str(number)
        out.mkdir(exist_ok=True)
        assert self._process and self._process.stdin and self._process.stdout  # opened as pipes
        self._process.stdin.write(job_of(source, out, self._cache))
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "other" in answer:
            return None
        if "error" in answer:
            return TraceError(answer["error"])
        parts = read_parts(out, source.name)
        self._on_read(source.path.stat().st_size)
        return parts

    def stop(self) -> None:
        with self._starting:
            self._is_stopped = True
        if self._process:
            self._process.kill()
        if self.thread.is_alive():
            self.thread.join()
        if self._process is None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


def _json_bytes(path: Path) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return size * PACKED if file.read(2) == GZIP else size
    except OSError:
        return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
