"""A bar for whatever takes over a second, in a terminal or a notebook; nothing elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_PATIENCE_S = 1.0


class Progress(Protocol):
    """Takes what has been read since the last call, in bytes of the file."""

    def __call__(self, read_bytes: int, /) -> None: ...


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Progress]:
    """Shows how much of ``total_bytes`` is read, once a second has passed, and nothing of it is left afterwards.

    Silent where nobody looks: neither a terminal nor a notebook.
    """
    if not _is_watched():
        yield lambda read_bytes: None
        return
    bar = _Bar(what, total_bytes)
    try:
        yield bar
    finally:
        bar.close()


class _Bar:
    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total = what, total_bytes
        self._read = 0
        self._begun = time.monotonic()
        self._shown = None

    def __call__(self, read_bytes: int) -> None:
        self._read += read_bytes
        if self._shown is None and time.monotonic() - self._begun > _PATIENCE_S:
            self._show()
        if self._shown is not None:
            self._shown.update(self._task, completed=self._read)

    def _show(self) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._shown = Progress(*columns, transient=True)
        self._task = self._shown.add_task(self._what, total=self._total)
        self._shown.start()

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _is_watched() -> bool:
    if sys.stdout is not None and sys.stdout.isatty():
        return True
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"
