"""A run's progress where the user looks: a widget in a notebook, a bar in a terminal, plain lines elsewhere.

No renderer has a thread of its own: the launcher calls ``update`` from its loop.
"""

from __future__ import annotations

import html
import importlib.util
import io
import sys
from typing import Any, Protocol, TextIO

from .status import DONE, RankStatus

REFRESH_S = 0.2  # a notebook's front end falls behind when it gets more


class Progress(Protocol):
    def update(self, status: RankStatus, elapsed_s: float) -> None:
        """Shows the newest status; called many times a second."""
        ...

    def close(self, outcome: str, elapsed_s: float) -> None:
        """Leaves a last state behind; ``outcome`` is done, failed, timed out or stopped."""
        ...


def live_progress(stream: TextIO | None = None) -> Progress:
    """The renderer that fits where the program runs; ``stream`` defaults to stderr."""
    if in_notebook() and importlib.util.find_spec("ipywidgets"):
        return NotebookProgress()
    shown_on: TextIO = stream or sys.stderr or io.StringIO()  # a program without a console has no stderr
    return TerminalProgress(shown_on) if shown_on.isatty() else PlainProgress(shown_on)


def in_notebook() -> bool:
    """True inside an IPython kernel, the only one whose front end shows widgets."""
    ipython = sys.modules.get("IPython")  # where it was never imported there is no kernel
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def describe(status: RankStatus, elapsed_s: float) -> str:
    """``"step 3 of 8 · 4.2 s · loss 1.234"``"""
    stage = "ending" if status.stage == DONE else str(status)  # the processes still have to go
    parts = [stage, f"{elapsed_s:.1f} s"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4g}")
    return " · ".join(parts)


def describe_end(status: RankStatus, outcome: str, elapsed_s: float) -> str:
    """``"done in 4.2 s · loss 1.234"``, or ``"failed after 4.2 s at step 3 of 8"``."""
    if outcome != "done":
        return f"{outcome} after {elapsed_s:.1f} s at {status}"
    return f"done in {elapsed_s:.1f} s" + (f" · loss {status.loss:.4g}" if status.loss is not None else "")


class PlainProgress:
    """One line a stage."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._status: RankStatus | None = None

    def update(self, status: RankStatus, elapsed_s: float) -> None:
        changed = self._status is None or status.stage != self._status.stage
        self._status = status
        if changed and status.stage != DONE:  # close() says so
            self._write(describe(status, elapsed_s))

    def close(self, outcome: str, elapsed_s: float) -> None:
        self._write(describe_end(self._status or RankStatus(), outcome, elapsed_s))

    def _write(self, line: str) -> None:
        self._stream.write(f"fsdpviz: {line}\n")
        self._stream.flush()


class TerminalProgress:
    """One line that rewrites itself."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._rich = RichProgress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
            auto_refresh=False,  # with it, rich starts a thread
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._rich.add_task("starting", total=None)
        self._status = RankStatus()
        self._rich.start()

    def update(self, status: RankStatus, elapsed_s: float) -> None:
        self._status = status
        self._rich.update(
            self._task,
            description=describe(status, elapsed_s),
            completed=status.step or 0,
            total=status.steps,  # None draws a pulse
        )
        self._rich.refresh()

    def close(self, outcome: str, elapsed_s: float) -> None:
        total = self._status.steps or 1
        completed = total if outcome == "done" else self._status.step or 0
        text = describe_end(self._status, outcome, elapsed_s)
        self._rich.update(self._task, description=text, completed=completed, total=total)
        self._rich.refresh()
        self._rich.stop()


class NotebookProgress:
    """A bar and a line of text under the cell; its end is plain HTML, which stays in a saved notebook."""

    def __init__(self) -> None:
        import ipywidgets
        from IPython.display import display

        self._bar = ipywidgets.IntProgress(min=0, max=1, layout=ipywidgets.Layout(width="180px"))
        self._text = ipywidgets.HTML("starting")
        self._box = ipywidgets.HBox([self._bar, self._text])
        self._status = RankStatus()
        self._shown_at = -REFRESH_S
        self._handle: Any = display(self._box, display_id=True)

    def update(self, status: RankStatus, elapsed_s: float) -> None:
        changed = status.stage != self._status.stage
        self._status = status
        if not changed and elapsed_s - self._shown_at < REFRESH_S:
            return
        self._shown_at = elapsed_s
        self._bar.max = status.steps or 1
        self._bar.value = status.step or 0
        self._text.value = html.escape(describe(status, elapsed_s))

    def close(self, outcome: str, elapsed_s: float) -> None:
        from IPython.core.display import HTML

        text = html.escape(describe_end(self._status, outcome, elapsed_s))
        if self._handle is not None:
            self._handle.update(HTML(f"<div>fsdpviz: {text}</div>"))
        for widget in (self._box, self._bar, self._text):
            widget.close()
