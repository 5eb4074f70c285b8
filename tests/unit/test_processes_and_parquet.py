"""What is done on the way in and out changes nothing: processes, the bar, Parquet, pandas."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from make_trace import document, launched, mark, op, write, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace import Note, Trace, open_trace
from fsdpviz.trace.export import pandas_frame
from fsdpviz.trace.files.sniff import Format
from fsdpviz.trace.files.sources import Source
from fsdpviz.trace.kineto.reader import read_recording
from fsdpviz.trace.reading import parallel, progress
from fsdpviz.trace.reading import readers as reading
from fsdpviz.trace.reading.parallel import read_together
from fsdpviz.trace.reading.stored import read_parts

# -- processes


def sources(*paths: Path) -> list[Source]:
    return [Source(path, str(path), Format.KINETO) for path in paths]


def make(path: Path, count: int) -> Path:
    return write_trace(path, [op(f"aten::op{index}", index, 1) for index in range(count)], rank=count)


def read_here(source: Source) -> Any:
    return reading.read_source(source, cache=False)


def test_helpers_give_what_reading_gives(tmp_path: Path, no_leftovers: None) -> None:
    paths = [make(tmp_path / f"{count}.json", count) for count in (3, 1, 2)]
    paths.append(write(tmp_path / "bad.json", '{"traceEvents": []}'))

    def read_or_error(source: Source) -> Any:
        try:
            return read_here(source)
        except TraceError as error:
            return error

    heard: list[int] = []
    found = read_together(sources(*paths), read_or_error, 1, cache=False, on_read=heard.append)
    alone = read_together(sources(*paths), read_or_error, 0, cache=False, on_read=heard.append)
    for one, other in zip(found[:3], alone[:3], strict=True):
        assert isinstance(one, list)
        assert isinstance(other, list)
        assert one[0].tables.spans.equals(other[0].tables.spans)
        assert (one[0].rank, one[0].about, one[0].short_name) == (other[0].rank, other[0].about, other[0].short_name)
    assert isinstance(found[3], TraceError)
    assert str(found[3]) == str(alone[3])


def test_a_helper_reads_what_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of a helper works: without it everything would be read here, and no test would tell."""
    path, out = make(tmp_path / "t.json", 4), tmp_path / "out"
    out.mkdir()
    bad = write(tmp_path / "bad.json", "<html>")
    jobs = "".join(parallel.job_of(source, out, False) for source in sources(path, bad))
    monkeypatch.setattr(sys, "argv", ["", json.dumps(sys.path)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(jobs))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    exec(parallel._START)
    answers = [json.loads(line) for line in sys.stdout.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert answers[0] == {}
    assert "HTML" in answers[1]["error"]
    assert read_parts(out, "t")[0].rank == 4


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_an_interrupt_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while somebody holds the error with its frames, as a notebook does."""
    from fsdpviz.trace.kineto import reader

    path = make(tmp_path / "t.json", 9)
    monkeypatch.setattr(reader, "_SMALL_BYTES", 0)
    monkeypatch.setattr(reader.ColumnBuilder, "add", interrupt)
    with pytest.raises(KeyboardInterrupt) as held:
        read_recording(path)
    assert held.value.__traceback__ is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdpviz-read")]


def test_an_interrupt_while_a_helper_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: None
) -> None:
    """It comes in the main thread alone."""
    started: list[Any] = []
    start = parallel.subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        time.sleep(0.2)
        return started[-1]

    monkeypatch.setattr(parallel.subprocess, "Popen", interrupted)
    paths = [make(tmp_path / f"{count}.json", count) for count in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        read_together(sources(*paths), interrupt, 1, cache=False, on_read=lambda read_bytes: None)
    assert all(process.poll() is not None for process in started)


def test_a_helper_that_dies_costs_only_its_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_leftovers: None
) -> None:
    paths = [make(tmp_path / f"{count}.json", count) for count in (1, 2, 3)]
    monkeypatch.setattr(parallel, "_START", "raise SystemExit(1)")
    found = read_together(sources(*paths), read_here, 1, cache=False, on_read=lambda read_bytes: None)
    assert [len(parts[0].tables.spans) for parts in found if isinstance(parts, list)] == [1, 2, 3]


def test_helpers_are_asked_only_where_they_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make(tmp_path / f"{count}.json", 9) for count in range(3)]
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    assert parallel.helpers_for(sources(*paths)) == 0
    monkeypatch.setattr(parallel, "WORTH_BYTES", 1)
    assert parallel.helpers_for(sources(*paths)) == 1
    assert parallel.helpers_for(sources(paths[0])) == 0
    monkeypatch.setattr(parallel, "_cores", lambda: 1)
    assert parallel.helpers_for(sources(*paths)) == 0


def test_a_folder_opens_the_same_with_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "job"
    for rank in range(3):
        write_trace(folder / f"rank{rank}.json.gz", [op(f"aten::op{rank}", 1, 1)], rank=rank)
    alone = open_trace(folder, cache=False)
    monkeypatch.setattr(reading, "is_cached", lambda source: False)
    monkeypatch.setattr(parallel, "WORTH_BYTES", 1)
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    assert open_trace(folder).spans.equals(alone.spans)
    assert open_trace(folder, ranks=[1]).ranks == [1]


# -- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_only_after_a_second_and_where_one_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience, terminal, is_shown in (
        (0.0, Terminal(), True),
        (60.0, Terminal(), False),
        (0.0, io.StringIO(), False),
    ):
        monkeypatch.setattr(progress, "_PATIENCE_S", patience)
        monkeypatch.setattr(sys, "stdout", terminal)
        with progress.progress_bar("reading", 100) as read:
            read(10)
            read(90)
        assert ("reading" in terminal.getvalue()) is is_shown


def test_the_bytes_of_the_file_are_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", document([op(f"aten::{index * 7919}", index, 1) for index in range(5000)]))
    heard: list[int] = []
    read_recording(path, heard.append)
    assert sum(heard) == path.stat().st_size


# -- out and in


def traced(path: Path) -> Trace:
    events = [
        mark("FSDP::pre_forward (layers.0)", 0, 5),
        *launched(
            "kernel",
            "ncclDevKernel_AllGather_RING_LL",
            1,
            5,
            1,
            correlation=7,
            **{"dtype": "BFloat16", "Group size": 2, "Process Group Name": "1", "Process Group Ranks": "[0, 1]"},
        ),
        {**op("lost", 0, 1), "ts": None},
    ]
    return open_trace(write_trace(path, events, rank=1))


def test_parquet_gives_back_every_column_and_type(tmp_path: Path) -> None:
    trace = traced(tmp_path / "t.json")
    folder = trace.write_parquet(tmp_path / "out")
    again = Trace.read_parquet(folder)
    for name in ("spans", "lanes", "steps", "groups", "clock"):
        assert getattr(again, name).equals(getattr(trace, name))
        assert getattr(again, name).schema == getattr(trace, name).schema
    assert (again.notes, again.about, again.provenance) == (trace.notes, trace.about, trace.provenance)
    assert isinstance(again.notes[0], Note)
    trace.write_parquet(folder)  # over itself
    (folder / "other.txt").write_text("")
    with pytest.raises(TraceError, match=r"a folder of its own; .* holds other\.txt"):
        trace.write_parquet(folder)


@pytest.mark.parametrize("damage", ["absent", "cut", "columns", "text"])
def test_a_damaged_folder_is_named(tmp_path: Path, damage: str) -> None:
    folder = traced(tmp_path / "t.json").write_parquet(tmp_path / "out")
    match damage:
        case "absent":
            (folder / "trace.json").unlink()
        case "cut":
            (folder / "spans.parquet").write_bytes((folder / "spans.parquet").read_bytes()[:-9])
        case "columns":
            (folder / "spans.parquet").write_bytes((folder / "lanes.parquet").read_bytes())
        case "text":
            (folder / "trace.json").write_text("[1]")
    with pytest.raises(TraceError) as caught:
        Trace.read_parquet(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pandas_has_the_same_values_and_types_of_its_own(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    trace = traced(tmp_path / "t.json")
    frame = trace.to_pandas()
    assert list(frame.columns) == trace.spans.columns
    types = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert (types["start_ns"], types["step"], types["depth"]) == ("Int64", "Int32", "Int16")
    assert (types["name"], types["kind"], types["dtype"]) == ("string", "category", "category")
    for name in trace.spans.columns:
        assert [None if pandas.isna(value) else value for value in frame[name]] == trace.spans[name].to_list(), name
    groups = pandas_frame(trace.groups)
    assert groups["ranks"].tolist() == [[0, 1]]
