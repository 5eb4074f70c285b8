"""Which rank failed first, and what is said of it: made run folders, no processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from fsdpviz.base.errors import ExperimentError, LaunchError, RankFailed
from fsdpviz.experiment.run_folder import RunFolder
from fsdpviz.launch.failures import describe_exit, explain, first_signs, last_lines
from fsdpviz.launch.request import LaunchRequest

LOST = "[pair.cc:553] Connection closed by peer [127.0.0.1]:31979"


class Made:
    """A run folder of ``ranks`` ranks, filled line by line."""

    def __init__(self, path: Path, ranks: int = 2) -> None:
        self.folder = RunFolder(path)
        self.request = LaunchRequest(processes_per_node=ranks)
        for rank in range(ranks):
            self.folder.rank(rank).path.mkdir()

    def raised(self, rank: int, message: str, time: float, **more: object) -> None:
        content = {"rank": rank, "type": "RuntimeError", "message": message, "traceback": "T\n", "time": time}
        self.folder.rank(rank).error.write_text(json.dumps(content | {"is_user_error": False} | more))

    def died(self, **deaths: tuple[int, float, bool]) -> None:
        """``rank1=(exit code, time, is first)``"""
        content = {
            name.removeprefix("rank"): {"exit_code": code, "pid": 1, "time": time, "is_first": first}
            for name, (code, time, first) in deaths.items()
        }
        (self.folder.path / "failures.json").write_text(json.dumps(content))

    def failed(self, exit_code: int | None = 1) -> RankFailed:
        error = explain(self.folder, self.request, exit_code)
        assert isinstance(error, RankFailed), error
        return error


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def test_killed_rank_beats_one_that_lost_its_connection_before_torchrun_noticed(made: Made) -> None:
    made.raised(0, LOST, time=100.02)
    made.died(rank1=(-9, 100.1, True))
    error = made.failed()
    assert error.rank == 1
    assert error.failure.reason == "it was killed by SIGKILL, signal 9, as the system does when memory runs out"
    assert [other.rank for other in error.others] == [0]


def test_killed_rank_beats_an_error_that_its_death_caused_whatever_its_words(made: Made) -> None:
    # torchrun noticed at 100.1 what may have been at 100.0; the other's error came in between
    made.raised(0, "something torch has no fixed words for", time=100.05)
    made.died(rank1=(-11, 100.1, True))
    assert made.failed().rank == 1


def test_error_long_before_a_death_stays_the_first_cause(made: Made) -> None:
    made.raised(0, "the loss is gone", time=100.0)
    made.died(rank1=(-6, 101.0, True))  # its watchdog aborted it
    assert made.failed().rank == 0


def test_earliest_of_two_errors_is_first(made: Made) -> None:
    made.raised(0, "late", time=100.2)
    made.raised(1, "early", time=100.1)
    error = made.failed()
    assert (error.rank, error.failure.reason, error.traceback) == (1, "RuntimeError: early", "T\n")


def test_lost_connection_is_never_first_when_there_is_another_error(made: Made) -> None:
    made.raised(0, LOST, time=100.0)
    made.raised(1, "the loss is gone", time=100.4)
    assert made.failed().rank == 1


def test_lost_connection_is_told_when_nothing_else_is_known(made: Made) -> None:
    made.raised(0, LOST, time=100.0)
    assert made.failed().rank == 0


def test_ranks_that_torchrun_ended_have_not_failed(made: Made) -> None:
    made.raised(1, "the loss is gone", time=100.0)
    made.died(rank1=(1, 100.1, True), rank0=(-15, 100.2, False))
    error = made.failed()
    assert (error.rank, error.others) == (1, ())
    assert error.failure.exit_code == 1


def test_sigterm_from_outside_is_a_failure(made: Made) -> None:
    made.died(rank1=(-15, 100.1, True), rank0=(-15, 100.2, False))
    assert made.failed().rank == 1


def test_refused_experiment_is_raised_as_such(made: Made) -> None:
    made.raised(0, "no GPU here. Use device='cpu'.", time=100.0, is_user_error=True)
    error = explain(made.folder, made.request, 1)
    assert isinstance(error, ExperimentError)
    assert str(error) == "no GPU here. Use device='cpu'."


def test_refusal_after_another_ranks_failure_does_not_hide_it(made: Made) -> None:
    made.raised(0, "the loss is gone", time=100.0)
    made.raised(1, "no GPU here", time=100.1, is_user_error=True)
    assert made.failed().rank == 0


def test_rank_that_ended_early_is_named_with_its_stage(made: Made) -> None:
    made.folder.rank(0).status.write_text('{"stage": "done"}\n')
    made.folder.rank(1).status.write_text('{"stage": "step", "step": 2, "steps": 5}\n')
    error = made.failed(exit_code=0)
    assert error.rank == 1
    assert "last stage was step 2 of 5" in error.failure.reason


def test_torchrun_that_names_no_rank_is_a_launch_error_with_its_last_line(made: Made) -> None:
    made.folder.launcher_log.write_text("Traceback\nRendezvousTimeout: nobody came\n=====\n")
    error = explain(made.folder, made.request, 1)
    assert type(error) is LaunchError
    assert "ended with code 1 and named no rank" in str(error)
    assert str(error).endswith("RendezvousTimeout: nobody came")


@pytest.mark.parametrize(("exit_code", "who"), [(137, "torchrun"), (-9, "the run's supervisor")])
def test_killed_launcher_process_is_named(made: Made, exit_code: int, who: str) -> None:
    message = str(explain(made.folder, made.request, exit_code))
    assert message.startswith(f"{who} was ended from outside: it was killed by SIGKILL")


def test_first_signs_come_from_error_files_and_from_torchrun(made: Made) -> None:
    assert first_signs(made.folder, made.request) == set()
    made.raised(0, "x", time=1.0)
    assert first_signs(made.folder, made.request) == {0}
    made.died(rank1=(-9, 1.0, True))
    assert first_signs(made.folder, made.request) == {0, 1}


def test_half_written_error_still_names_its_rank(made: Made) -> None:
    made.folder.rank(1).error.write_text('{"rank": 1, "mess')
    assert made.failed().rank == 1


def test_exits_in_words() -> None:
    assert describe_exit(3) == "it exited with code 3"
    assert describe_exit(-signal.SIGSEGV) == "it was killed by SIGSEGV, signal 11"
    assert describe_exit(None) == "it ended, nobody saw how"


def test_last_lines_of_a_long_log_with_odd_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_bytes(b"".join(b"line %d\xff\n\n" % number for number in range(5000)))
    assert last_lines(path, 2) == ("line 4998�", "line 4999�")
    assert last_lines(tmp_path / "none.txt") == ()
