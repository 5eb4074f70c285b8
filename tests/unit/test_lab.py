"""The lab on run folders made by hand (see made_run): numbers, exercises, page, command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import made_run
from make_trace import document, op, write
from typer.testing import CliRunner

import fsdpviz
from fsdpviz import cli
from fsdpviz.base.errors import ExperimentError, FsdpvizError, TraceError
from fsdpviz.experiment import Experiment
from fsdpviz.lab.demo import write_ab_page
from fsdpviz.lab.doctor import State, examine
from fsdpviz.lab.exercises import Exercise, Prediction, gathers_a_step, never_hidden
from fsdpviz.lab.run import new_folder
from fsdpviz.lab.summary import summaries

SUMMARY_KEYS = {
    "name",
    "engine",
    "world_size",
    "provenance",
    "step_ms",
    "compute_ms",
    "comm_ms",
    "exposed_comm_ms",
    "overlap_frac",
    "samples_per_s",
    "peak_device_bytes",
    "peak_host_bytes",
    "all_gather_ms",
    "h2d_ms",
    "d2h_ms",
}


@pytest.fixture
def off(tmp_path: Path) -> fsdpviz.Recording:
    return fsdpviz.open(made_run(tmp_path / "off", prefetch=False))


@pytest.fixture
def on(tmp_path: Path) -> fsdpviz.Recording:
    return fsdpviz.open(made_run(tmp_path / "on", prefetch=True))


def test_a_recording_has_its_run_at_hand(off: fsdpviz.Recording) -> None:
    assert off.name == "prefetch off"
    assert off.losses == [1.0]  # the mean of 0.5 and 1.5
    assert off.experiment.prefetch.forward == 0
    assert off.provenance == "cpu + emulated links"
    row = off.report().rows[0]
    assert (row.compute_ns, row.comm_ns, row.exposed_comm_ns, row.idle_ns) == (100_000, 80_000, 80_000, 20_000)


def test_a_summary_has_every_key_and_the_right_numbers(off: fsdpviz.Recording, on: fsdpviz.Recording) -> None:
    first, second = summaries([off, on])["runs"]
    assert first.keys() == SUMMARY_KEYS
    assert (first["name"], first["engine"], first["world_size"]) == ("prefetch off", "fsdp2", 2)
    assert (first["exposed_comm_ms"], second["exposed_comm_ms"]) == pytest.approx((0.08, 0.04))
    assert (first["overlap_frac"], second["overlap_frac"]) == (0.0, 0.5)
    assert (first["step_ms"], second["step_ms"]) == (0.2, 0.16)
    assert first["samples_per_s"] == pytest.approx(8 / 200e-6)
    assert (first["peak_device_bytes"], first["peak_host_bytes"]) == (1001, 5001)
    assert first["all_gather_ms"] == pytest.approx(0.08)
    json.dumps([first, second])


def test_an_ab_compares(off: fsdpviz.Recording, on: fsdpviz.Recording) -> None:
    ab = fsdpviz.compare(off, on)
    assert ab.comparison.ratios["exposed_comm_ms"] == pytest.approx(0.5)
    assert ab.comparison.losses_are_equal
    assert (ab.comparison.all_gathers_a.count_per_step, ab.comparison.all_gathers_b.count_per_step) == (2, 2)
    assert "prefetch off" in str(ab.report())


def test_an_ab_page_stands_alone(tmp_path: Path, off: fsdpviz.Recording, on: fsdpviz.Recording) -> None:
    page = write_ab_page(tmp_path / "page.html", fsdpviz.compare(off, on), title="<b>A & B</b>")
    text = page.read_text()
    assert "cpu + emulated links" in text
    assert "<b>A & B</b>" not in text
    assert "prefetch.forward" in text
    assert 'src="http' not in text
    with pytest.raises(FsdpvizError, match="is a folder"):
        write_ab_page(tmp_path, fsdpviz.compare(off, on), title="x")


def test_a_trace_without_a_run(tmp_path: Path) -> None:
    trace = fsdpviz.open(write(tmp_path / "trace.json", document([op("aten::mm", 0, 5)], rank=0)))
    assert trace.folder is None
    assert trace.log() == ""
    assert trace.losses == []
    with pytest.raises(ExperimentError):
        _ = trace.experiment


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = fsdpviz.open(made_run(tmp_path / "run", prefetch=True, finished=False))
    assert any("unfinished" in str(note) for note in run.notes)
    assert len(run.report().rows) == 2


def test_a_new_folder_never_takes_an_old_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = Experiment(name="A / B: ../x")
    first = new_folder(experiment)
    assert first.parent == Path("runs")
    assert first.name == f"a-b-x-{experiment.id}"
    first.mkdir(parents=True)
    assert new_folder(experiment).name == f"a-b-x-{experiment.id}-2"


# -- exercises


def test_gathers_a_step_is_counted_in_the_recording(on: fsdpviz.Recording) -> None:
    exercise = gathers_a_step(on)
    assert exercise.check(2).passed is True
    assert exercise.check("2").passed is True
    assert exercise.check(3).passed is False
    assert exercise.check("two").passed is False
    assert exercise.check(...).passed is None


def test_the_first_gather_is_never_hidden(on: fsdpviz.Recording) -> None:
    exercise = never_hidden(on)
    assert exercise.check(" Blocks.0 ").passed is True
    assert exercise.check("blocks.1").passed is False
    assert "100%" in exercise.check("blocks.0").text


def test_exercises_need_a_recording_with_steps(tmp_path: Path) -> None:
    trace = fsdpviz.open(write(tmp_path / "trace.json", document([op("aten::mm", 0, 5)], rank=0)))
    with pytest.raises(FsdpvizError, match="Capture"):
        never_hidden(trace)


def test_a_tolerance_is_a_fraction_of_the_answer() -> None:
    exercise = Exercise("?", expected=100.0, hint="", why="", tolerance_frac=0.05)
    assert [exercise.check(n).passed for n in (95, 105, 94.9, 106)] == [True, True, False, False]


def test_a_prediction_is_shown_beside_the_measurement() -> None:
    assert "off by 0.25" in Prediction("How much?", guess=0.75).reveal(0.5).text
    assert Prediction("How much?", guess=...).reveal(0.5).passed is None
    assert "<script>" not in Prediction("<script>", guess=1.0).reveal(0.5)._repr_html_()


# -- command line


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
    return done.exit_code, done.output


def test_open_json_has_the_promised_keys(tmp_path: Path) -> None:
    code, output = invoke("open", str(made_run(tmp_path / "run", prefetch=True)), "--json")
    said = json.loads(output)
    assert code == 0
    assert said.keys() == {
        "ranks",
        "spans",
        "steps",
        "provenance",
        "kinds",
        "notes",
        "load_s",
        "breakdown",
    }
    assert (said["ranks"], said["steps"], said["provenance"]) == ([0, 1], [1], "cpu + emulated links")
    assert said["kinds"]["all_gather"] == {"count": 4, "ns": 160_000}
    assert said["kinds"]["compute"] == {"count": 4, "ns": 200_000}
    assert said["breakdown"][1] == {
        "rank": 1,
        "step": 1,
        "span_ns": 160_000,
        "compute_ns": 100_000,
        "comm_ns": 80_000,
        "exposed_comm_ns": 40_000,
        "copy_ns": 0,
        "exposed_copy_ns": 0,
        "idle_ns": 20_000,
        "overlap_frac": 0.5,
    }


def test_open_and_compare_print_tables_and_write_pages(tmp_path: Path) -> None:
    off, on = (str(made_run(tmp_path / name, prefetch=name == "on")) for name in ("off", "on"))
    code, output = invoke("open", off, "--html", str(tmp_path / "one.html"))
    assert code == 0
    assert "exposed" in output
    assert (tmp_path / "one.html").stat().st_size > 1_000_000  # Plotly is inside
    code, output = invoke("compare", off, on, "--html", str(tmp_path / "two.html"))
    assert code == 0
    assert "0.50" in output
    assert (tmp_path / "two.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["open", "missing.json"], "missing.json"),
        (["run", "no-such-preset"], "there is no preset"),
        (["run", "missing.json"], "must be readable"),
        (["run", "tiny", "--set", "seed"], "key=value"),
        (["run", "tiny", "--set", "sed=1"], "did you mean 'seed'"),
        (["run", "tiny", "--set", "mesh.shard=3"], "must divide"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fsdpviz", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("fsdpviz: ")
    assert says in error
    assert error.count("\n") == 1


def test_a_trace_that_is_none_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "page.json"
    file.write_text("<!doctype html><title>404</title>")
    with pytest.raises(TraceError) as refused:
        fsdpviz.open(file)
    assert "\n" not in str(refused.value)
    assert "page.json" in str(refused.value)


def test_the_doctor_finds_what_this_test_needs() -> None:
    findings = {finding.subject: finding for finding in examine()}
    assert findings["backends"].state is State.OK
    assert findings["ports"].state is State.OK
    assert all(finding.mend for finding in findings.values() if finding.state is not State.OK)


def test_the_public_names_are_few_and_there() -> None:
    assert len(fsdpviz.__all__) <= 15
    assert all(getattr(fsdpviz, name) is not None for name in fsdpviz.__all__)
    with pytest.raises(AttributeError):
        _ = fsdpviz.nothing  # type: ignore[attr-defined]
