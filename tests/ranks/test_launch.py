"""Real torchrun, two ranks that do nothing of use: how a run ends, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from leftovers import processes_of, wait_for_end

from fsdpviz.base.errors import ExperimentError, LaunchError, RankFailed, RunTimeout
from fsdpviz.experiment.run_folder import RunFolder, read_json
from fsdpviz.launch import launcher as launcher_module
from fsdpviz.launch.launcher import LaunchRequest, launch
from fsdpviz.launch.status import RankStatus, last_statuses

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("no_leftovers")]

HERE = Path(__file__).parent
LONG_S = 90.0  # a limit for what must happen, never a measure


def make_folder(path: Path) -> RunFolder:
    folder = RunFolder.create(path)
    folder.experiment.write_text("{}", encoding="utf-8")
    return folder


def make_request(mode: str, **changes: object) -> LaunchRequest:
    settings = {
        "processes_per_node": 2,
        "timeout_s": LONG_S,
        "worker_module": str(HERE / "stand_in_worker.py"),
        "extra_env": {"STAND_IN": mode},
    }
    return LaunchRequest(**(settings | changes))  # type: ignore[arg-type]


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline, "what the test waits for never happened"
        time.sleep(0.05)


def all_at_a_step(folder: RunFolder) -> bool:
    return all(status.stage == "step" for status in last_statuses(folder, (0, 1)).values())


def wait_for_steps(folder: RunFolder) -> None:
    wait_until(lambda: all_at_a_step(folder))


class Clock:
    """The launcher's clock, which jumps past every timeout once both ranks are at a step."""

    sleep = staticmethod(time.sleep)

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._shift_s = 0.0

    def monotonic(self) -> float:
        if not self._shift_s and all_at_a_step(self._folder):
            self._shift_s = 1e6
        return time.monotonic() + self._shift_s


class Recorder:
    """A Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.seen: list[RankStatus] = []
        self.outcome = ""

    def update(self, status: RankStatus, elapsed_s: float) -> None:
        self.seen.append(status)

    def close(self, outcome: str, elapsed_s: float) -> None:
        self.outcome = outcome


def test_good_run_returns_its_folder(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    progress = Recorder()
    assert launch({}, folder, make_request("ok"), progress=progress) == folder
    assert progress.outcome == "done"
    assert progress.seen[-1] == RankStatus("done", loss=1 / 3)
    assert list(folder.ranks()) == [0, 1]
    assert not folder.is_finished  # the result is the caller's to write


def test_rank_that_raises_is_named_with_traceback_and_last_lines(tmp_path: Path) -> None:
    progress = Recorder()
    with pytest.raises(RankFailed) as caught:
        launch({}, make_folder(tmp_path / "run"), make_request("raise_on_1"), progress=progress)
    assert caught.value.rank == 1
    assert caught.value.failure.reason == "ZeroDivisionError: the loss is gone"
    assert "in raise_on_1" in caught.value.traceback
    assert caught.value.failure.last_lines == ("the last words of rank 1",)
    assert caught.value.others == ()  # rank 0 was only stopped
    assert progress.outcome == "failed"


def test_rank_that_lingers_after_its_error_does_not_delay_it(tmp_path: Path) -> None:
    """torchrun never sees a failure here: the error file alone ends the run."""
    environment = {"STAND_IN": "raise_on_1", "STAND_IN_LINGER": "1"}
    with pytest.raises(RankFailed) as caught:
        launch({}, make_folder(tmp_path / "run"), make_request("", extra_env=environment))
    assert caught.value.rank == 1


def test_killed_rank_is_named_while_another_ignores_sigterm(tmp_path: Path) -> None:
    """Rank 0 neither prints nor heeds SIGTERM, so torchrun's own report would come after 30 s."""
    folder = make_folder(tmp_path / "run")
    with pytest.raises(RankFailed) as caught:
        launch({}, folder, make_request("killed_on_1"))
    assert caught.value.rank == 1
    assert caught.value.failure.exit_code == -signal.SIGKILL
    assert "SIGKILL" in caught.value.failure.reason
    died_at = read_json(folder.path / "failures.json")["1"]["time"]
    assert time.time() - died_at < 10  # the promise to users


def test_rank_that_lost_its_peer_is_not_blamed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        launch({}, make_folder(tmp_path / "run"), make_request("killed_in_all_reduce"))
    assert caught.value.rank == 1
    assert caught.value.failure.exit_code == -signal.SIGKILL


def test_exit_code_of_a_silent_rank_is_told(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed: it exited with code 3"):
        launch({}, make_folder(tmp_path / "run"), make_request("exit_on_1"))


def test_rank_that_ends_before_it_is_done_has_failed(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed: .* before it was done; its last stage was building"):
        launch({}, make_folder(tmp_path / "run"), make_request("quit_early"))


def test_refused_experiment_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        launch({}, make_folder(tmp_path / "run"), make_request("refuse"))
    assert str(caught.value) == "device='cuda' needs a GPU; this machine has none. Use device='cpu'."


def test_missing_worker_is_a_rank_failure_that_shows_why(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with pytest.raises(RankFailed, match="exited with code 1"):
        launch({}, folder, make_request("ok", worker_module="fsdpviz.launch.no_such_worker"))
    assert "No module named fsdpviz.launch.no_such_worker" in folder.launcher_log.read_text(encoding="utf-8")


def test_timeout_ends_silent_ranks_that_ignore_sigterm_and_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Recorder()
    folder = make_folder(tmp_path / "run")
    monkeypatch.setattr(launcher_module, "time", Clock(folder))
    with pytest.raises(RunTimeout, match="after 90 s") as caught:
        launch({}, folder, make_request("hang_with_children"), progress=progress)
    assert "rank 1: step 1 of 3" in str(caught.value)
    assert "hang_with_children" in folder.rank(0).stacks.read_text(encoding="utf-8")
    assert progress.outcome == "timed out"


def test_timeout_in_a_collective_says_who_did_not_enter_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "run")
    monkeypatch.setattr(launcher_module, "time", Clock(folder))
    with pytest.raises(RunTimeout) as caught:
        launch({}, folder, make_request("hang_in_all_reduce"))
    assert "rank 0 entered all_reduce #2 of default_pg; rank 1 did not (it last did all_reduce #1)" in str(caught.value)


@pytest.mark.parametrize("part", ["fsdpviz.launch.torchrun", "fsdpviz.launch.supervisor"])
def test_killed_launcher_processes_take_the_ranks_along(tmp_path: Path, part: str) -> None:
    folder = make_folder(tmp_path / "run")
    with ThreadPoolExecutor(1) as pool:  # also: launch works outside the main thread
        running = pool.submit(launch, {}, folder, make_request("hang_with_children"))
        wait_for_steps(folder)
        # the supervisor's command line holds torchrun's
        victims = processes_of(folder.path, part)
        next(p for p in victims if part in p.cmdline()[:3]).send_signal(signal.SIGKILL)
        with pytest.raises(LaunchError, match="ended from outside: it was killed by SIGKILL"):
            running.result(timeout=LONG_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ended_caller_takes_the_ranks_along(tmp_path: Path, number: signal.Signals) -> None:
    folder = make_folder(tmp_path / "run")
    caller = subprocess.Popen(
        [sys.executable, str(HERE / "caller.py"), str(folder.path), "hang_with_children"],
        stderr=subprocess.PIPE,
    )
    try:
        wait_for_steps(folder)
        assert len(processes_of(folder.path)) == 6  # supervisor, torchrun, two ranks, a child of each
        caller.send_signal(number)
        _, said = caller.communicate(timeout=LONG_S)
    finally:
        caller.kill()
    assert wait_for_end(folder.path) == []
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in said
        assert folder.rank(0).stacks.exists()
    else:
        assert caller.returncode == -number


def test_ranks_end_by_themselves_when_nobody_is_left_to_end_them(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    caller = subprocess.Popen([sys.executable, str(HERE / "caller.py"), str(folder.path), "ignore_term"])
    try:
        wait_for_steps(folder)
        supervisor = next(p for p in processes_of(folder.path) if "fsdpviz.launch.supervisor" in p.cmdline()[:3])
    finally:
        caller.send_signal(signal.SIGSTOP)  # or it would still clean up
    supervisor.send_signal(signal.SIGKILL)
    left = wait_for_end(folder.path)
    caller.kill()
    caller.wait()
    assert left == []


def test_two_runs_at_once_do_not_collide(tmp_path: Path) -> None:
    folders = [make_folder(tmp_path / name) for name in "ab"]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(launch, {}, folder, make_request("collective")) for folder in folders]
        assert [run.result(timeout=LONG_S) for run in runs] == folders


def test_two_nodes_meet(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = f"localhost:{server.getsockname()[1]}"
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(
                launch,
                {},
                folder,
                make_request("collective", processes_per_node=1, nodes=2, node_rank=node, rendezvous=rendezvous),
            )
            for node in range(2)
        ]
        assert [run.result(timeout=LONG_S) for run in runs] == [folder, folder]
    assert [status.stage for status in last_statuses(folder, (0, 1)).values()] == ["done", "done"]


def test_folder_can_be_launched_again(tmp_path: Path) -> None:
    """The first run's error and stop request are not taken for the second's."""
    folder = make_folder(tmp_path / "run")
    with pytest.raises(RankFailed):
        launch({}, folder, make_request("raise_on_1"))
    folder.stop_request.touch()
    launch({}, folder, make_request("ok"))
    assert not folder.rank(0).stacks.exists()


def test_launching_imports_no_torch() -> None:
    code = "import sys, fsdpviz.launch.launcher, fsdpviz.launch.progress; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_short_timeout_ends_a_run_that_is_still_starting(tmp_path: Path) -> None:
    with pytest.raises(RunTimeout, match="rank 0: starting; it left no flight record"):
        launch({}, make_folder(tmp_path / "run"), make_request("hang", timeout_s=0.2))


def test_interrupt_during_a_run_on_the_main_thread(tmp_path: Path) -> None:
    """As a notebook does it: SIGINT while the cell runs. A second one does not stop the clean-up."""
    folder = make_folder(tmp_path / "run")

    def interrupt_twice() -> None:
        wait_for_steps(folder)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    thread = threading.Thread(target=interrupt_twice)
    progress = Recorder()
    # pytest in the background of a shell inherits that SIGINT is ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch({}, folder, make_request("ignore_term"), progress=progress)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert progress.outcome == "stopped"
    assert processes_of(folder.path) == []


def test_status_lines_are_json(tmp_path: Path) -> None:
    """The stand-in keeps the worker's contract, or the tests above would prove nothing."""
    folder = make_folder(tmp_path / "run")
    launch({}, folder, make_request("ok"))
    lines = folder.rank(1).status.read_text(encoding="utf-8").splitlines()
    stages = [json.loads(line)["stage"] for line in lines]
    assert stages == ["starting", "building", "step", "step", "step", "done"]
