"""What makes a rank end or speak from outside, in single processes without torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fsdpviz.experiment.run_folder import RunFolder
from fsdpviz.launch.processes import identity_of, is_alive
from fsdpviz.launch.watch import ORPHAN_EXIT_CODE


def test_identity_is_of_one_process_and_ends_with_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identity_of(child.pid)
    try:
        assert is_alive(identity)
        assert is_alive(identity_of(os.getpid()))
        assert not is_alive(f"{child.pid}:1")  # another process that had this pid
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(identity)  # a zombie
    finally:
        child.kill()
        child.communicate()
    assert not is_alive(identity)


def test_rank_ends_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    """Its parent, this test, lives on: the watch ends it, not the kernel."""
    code = (
        "import sys, time; from pathlib import Path; from fsdpviz.experiment.run_folder import RunFolder; "
        "from fsdpviz.launch.watch import start_watch; "
        f"start_watch(RunFolder(Path({str(tmp_path)!r})), 0, lambda: None); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    environment = os.environ | {"FSDPVIZ_SUPERVISOR": identity_of(supervisor.pid)}
    rank = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        assert rank.poll() is None
        supervisor.kill()
        assert rank.wait(timeout=30) == ORPHAN_EXIT_CODE
    finally:
        for process in (supervisor, rank):
            process.kill()
            process.communicate()


def test_stop_request_writes_stacks_and_calls_once(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from fsdpviz.experiment.run_folder import RunFolder; "
        "from fsdpviz.launch.watch import start_watch\n"
        "def wait_here(): print('ready', flush=True); input()\n"
        f"start_watch(RunFolder(Path({str(tmp_path)!r})), 3, lambda: print('asked', flush=True))\n"
        "wait_here()"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder = RunFolder(tmp_path)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        folder.stop_request.touch()
        assert rank.stdout.readline() == "asked\n"
        assert "in wait_here" in folder.rank(3).stacks.read_text(encoding="utf-8")
        said, _ = rank.communicate("\n", timeout=30)
        assert said == ""  # not asked again
    finally:
        rank.kill()
        rank.communicate()
