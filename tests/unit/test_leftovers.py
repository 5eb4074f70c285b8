"""The fixture no_leftovers can fail: each thing that it looks for is left on purpose, and found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from leftovers import RUN_VARIABLE, Snapshot


def test_finds_nothing_where_nothing_is_left(tmp_path: Path) -> None:
    assert Snapshot.take().leftovers(tmp_path, limit_s=0) == []


def test_finds_a_process_of_a_run(tmp_path: Path) -> None:
    before = Snapshot.take()
    environment = os.environ | {RUN_VARIABLE: str(tmp_path / "run")}
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()  # it has its own environment now
    try:
        left = before.leftovers(tmp_path, limit_s=0)
        assert any("process" in line and str(child.pid) in line for line in left)
        assert f"child {child.pid}" in left
        assert any(line.startswith("descriptor pipe") for line in left)
    finally:
        child.kill()
        child.communicate()
    assert before.leftovers(tmp_path, limit_s=0) == []


def test_finds_a_thread(tmp_path: Path) -> None:
    before = Snapshot.take()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    try:
        assert before.leftovers(tmp_path, limit_s=0) == ["thread forgotten"]
    finally:
        stop.set()
        thread.join()


def test_finds_a_port(tmp_path: Path) -> None:
    before = Snapshot.take()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"port {server.getsockname()[1]}" in before.leftovers(tmp_path, limit_s=0)


def test_finds_an_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Snapshot.take()
    monkeypatch.setenv("FSDPVIZ_FORGOTTEN", "1")
    assert before.leftovers(tmp_path, limit_s=0) == ["environment FSDPVIZ_FORGOTTEN"]
