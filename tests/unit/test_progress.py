from __future__ import annotations

import io
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdpviz.launch import progress as progress_module
from fsdpviz.launch.progress import (
    NotebookProgress,
    PlainProgress,
    TerminalProgress,
    describe,
    describe_end,
    in_notebook,
    live_progress,
)
from fsdpviz.launch.status import RankStatus, StatusFile

STEP_2 = RankStatus("step", step=2, steps=8, loss=1.23456)


def test_descriptions() -> None:
    assert describe(RankStatus("building"), 1.26) == "building · 1.3 s"
    assert describe(STEP_2, 4.0) == "step 2 of 8 · 4.0 s · loss 1.235"
    assert describe(RankStatus("done"), 4.0) == "ending · 4.0 s"
    assert describe_end(STEP_2, "done", 4.0) == "done in 4.0 s · loss 1.235"
    assert describe_end(STEP_2, "failed", 4.0) == "failed after 4.0 s at step 2 of 8"


def test_plain_progress_writes_one_line_a_stage() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.update(RankStatus(), 0.0)
    progress.update(RankStatus(), 0.5)
    for step in (1, 2):
        progress.update(RankStatus("step", step=step, steps=2), 1.0 + step)
    progress.update(RankStatus("done", loss=0.5), 4.0)
    progress.close("done", 5.0)
    assert stream.getvalue().splitlines() == [
        "fsdpviz: starting · 0.0 s",
        "fsdpviz: step 1 of 2 · 2.0 s",
        "fsdpviz: done in 5.0 s · loss 0.5",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_progress_shows_steps_and_leaves_no_thread() -> None:
    threads = threading.enumerate()
    stream = Terminal()
    progress = live_progress(stream)
    assert isinstance(progress, TerminalProgress)
    progress.update(RankStatus("building"), 1.0)
    progress.update(STEP_2, 2.0)
    assert threading.enumerate() == threads
    progress.close("done", 3.0)
    assert "step 2 of 8" in stream.getvalue()
    assert "done in 3.0 s" in stream.getvalue()


def test_terminal_progress_does_not_read_markup_in_what_a_rank_says() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream)
    progress.update(RankStatus("[/oops]"), 1.0)
    progress.close("done", 2.0)
    assert "[/oops]" in stream.getvalue()


def test_elsewhere_lines_are_plain() -> None:
    assert not in_notebook()
    assert isinstance(live_progress(io.StringIO()), PlainProgress)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An IPython that has a kernel, and keeps what is displayed: one display, then its updates."""
    pytest.importorskip("ipywidgets", reason="the notebook extra is not installed")
    import IPython.display

    shown = SimpleNamespace(first=None, updates=[])

    def display(what: object, display_id: bool) -> Any:
        shown.first = what
        return SimpleNamespace(update=shown.updates.append)

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=object()))
    return shown


def test_notebook_progress_moves_a_bar_and_ends_as_plain_html(kernel: Any) -> None:
    threads = threading.enumerate()
    progress = live_progress()
    assert isinstance(progress, NotebookProgress)
    bar, text = kernel.first.children
    progress.update(STEP_2, 1.0)
    assert (bar.value, bar.max) == (2, 8)
    assert text.value == "step 2 of 8 · 1.0 s · loss 1.235"
    progress.close("done", 2.0)
    assert [html.data for html in kernel.updates] == ["<div>fsdpviz: done in 2.0 s · loss 1.235</div>"]
    assert threading.enumerate() == threads


def test_notebook_progress_updates_at_most_five_times_a_second(kernel: Any) -> None:
    progress = NotebookProgress()
    text = kernel.first.children[1]
    changes = []
    text.observe(changes.append, names="value")
    for tick in range(100):  # one second of calls, 10 ms apart: at 0, 0.2, 0.4, 0.6 and 0.8 s
        progress.update(RankStatus("step", step=tick + 1, steps=100), tick / 100)
    assert len(changes) == 5
    progress.close("done", 1.0)


def test_notebook_progress_escapes_what_a_rank_says(kernel: Any) -> None:
    progress = NotebookProgress()
    progress.update(RankStatus("<script>"), 1.0)
    assert kernel.first.children[1].value.startswith("&lt;script&gt;")
    progress.close("failed", 1.0)
    assert "&lt;script&gt;" in kernel.updates[0].data


def test_notebook_without_ipywidgets_gets_plain_lines(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module.importlib.util, "find_spec", lambda name: None)
    assert isinstance(live_progress(io.StringIO()), PlainProgress)


def test_status_file_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "status.jsonl"
    status = StatusFile(path)
    assert status.read() == RankStatus("starting")
    path.write_text('{"stage": "building"}\n{"stage": "step", "step": 1, "st')
    assert status.read() == RankStatus("building")  # the second line is still being written
    with path.open("a") as file:
        file.write('eps": 2, "loss": 0.5}\n')
    assert status.read() == RankStatus("step", step=1, steps=2, loss=0.5)
    with path.open("a") as file:
        file.write('not JSON\n[1]\n{"stage": 3}\n')
    assert status.read() == RankStatus("step", step=1, steps=2, loss=0.5)
    with path.open("a") as file:
        file.write('{"stage": "done"}\n')
    assert status.read() == RankStatus("done", loss=0.5)  # the last loss stays known
