"""What is given, and which files and ranks it comes to."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from make_trace import document, op, write, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace import open_trace
from fsdpviz.trace.files import sources
from fsdpviz.trace.files.ranks import rank_in_name
from fsdpviz.trace.files.sniff import Format, format_of, top_level_keys
from fsdpviz.trace.kineto.reader import read_recording
from fsdpviz.trace.reading import readers as reading


def trace_of(rank: int | None, start: int = 1) -> bytes:
    return json.dumps(document([op("aten::mm", start, 1)], rank=rank, host_name="node0")).encode()


def make_tar(path: Path, members: dict[str, bytes], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def make_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


# -- what a file is


@pytest.mark.parametrize(
    ("content", "format_"),
    [
        (b'{"traceEvents": []}', Format.KINETO),
        (b"\xef\xbb\xbf \n[{}]", Format.KINETO),
        (gzip.compress(b'{"traceEvents": []}'), Format.KINETO),
        # a trace's own pg_config is not at the top
        (b'{"schemaVersion": 1, "distributedInfo": {"pg_config": []}, "deviceProp', Format.KINETO),
        (b'{"name": "entries", "x": {"pg_config": 1}', Format.KINETO),
        (b'{"comm_lib_version": "", "entries": [{"a": "traceEvents"', Format.FLIGHT_RECORDER),
        (b"SQLite format 3\0", Format.NSYS),
        (b"\x80\x02}q\0.", Format.PICKLE),
        (b"(dp0\n.", Format.PICKLE),
    ],
)
@pytest.mark.parametrize("name", ["t.json", "t.sqlite", "t"])
def test_the_content_decides_and_not_the_name(tmp_path: Path, content: bytes, format_: Format, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert format_of(tmp_path / name) is format_


def test_archives_are_known_by_content(tmp_path: Path) -> None:
    for mode in ("w", "w:gz"):
        assert format_of(make_tar(tmp_path / "a.json", {"x": b"1"}, mode)) is Format.TAR
    assert format_of(make_zip(tmp_path / "b.json", {"x": b"1"})) is Format.ZIP


def test_top_level_keys() -> None:
    assert top_level_keys(rb'{"a\"b": {"c": 1}, "d": ["e", {"f": 2}], "g": "h:", "i') == {rb"a\"b", b"d", b"g"}


# -- which rank


@pytest.mark.parametrize(
    ("file", "folder", "rank"),
    [
        ("dump_15", "", 15),
        ("nccl_trace_rank_12", "", 12),
        ("3", "", 3),
        ("7.pt.trace.json.gz", "", 7),
        ("t_4.sqlite", "", 4),
        ("rank-5.pickle", "rank3", 5),
        ("trace.json", "rank3", 3),
        ("trace.json", "run_3", None),
        ("step_100.json", "", None),
        ("epoch-2.pt.trace.json", "worker1", 1),
        ("host_4711.1694128201545.pt.trace.json", "", None),
        ("trace12.json", "", None),
        ("local_rank1_rank9.json", "", 9),
        ("local_rank_3.json", "", None),
        ("LocalRank3.json", "rank7", 7),
        ("node0_local_rank1.json", "", None),
        ("node_rank2_local_rank1.json", "node_2", None),
        ("trace.json", "local_rank1", None),
        ("rank3_global_rank12.json", "", 12),
        ("node1-local-rank0-global-rank8.pt.trace.json.gz", "", 8),
        ("pp_rank0_tp_rank1_rank5.json", "", 5),
        ("dp0_pp0_tp1_dcp0_ep1_rank1.1790.pt.trace.json.gz", "", 1),
        ("worker0_rank4.json", "", 4),
        ("tp_1.json", "", None),
        ("dp_0_tp_1.json", "", None),
        ("local_1.json", "rank7", 7),
        ("fsdp_plain_rank2.json", "", 2),
        ("ddp_rank2.json", "", 2),
    ],
)
def test_ranks_in_names(file: str, folder: str, rank: int | None) -> None:
    assert rank_in_name(file, folder) == rank


@pytest.mark.parametrize(
    ("stated", "rank"),
    [(3, 3), ("3", 3), ("12", 12), ("", None), ("-1", None), ("x3", None), ("3.0", None), (True, None)],
)
def test_a_rank_is_stated_as_a_number_or_as_its_digits(tmp_path: Path, stated: Any, rank: int | None) -> None:
    path = write_trace(tmp_path / "t.json", [op("aten::mm", 1, 1)], distributedInfo={"rank": stated})
    assert reading.stated_rank(sources.Source(path, "t.json", Format.KINETO)) == rank
    assert read_recording(path).rank == rank


def test_a_rank_stated_in_another_value_is_not_the_file_s(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"copied":{"distributedInfo":{"rank":5}},"distributedInfo":{"rank":1},"traceEvents":[]}')
    assert reading.stated_rank(sources.Source(path, "t.json", Format.KINETO)) == 1


def test_ranks_not_asked_for_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1, 2):
        (tmp_path / f"{rank}.json").write_bytes(trace_of(rank))
    read: list[str] = []
    whole = reading.read_source
    monkeypatch.setattr(
        reading, "read_source", lambda source, **more: read.append(source.path.name) or whole(source, **more)
    )
    assert open_trace(tmp_path, ranks=[1]).ranks == [1]
    assert read == ["1.json"]
    with pytest.raises(TraceError, match=r"has ranks \[0, 1, 2\]; asked for \[9\]"):
        open_trace(tmp_path, ranks=[9])


# -- where the files are


def test_globs(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path / "deep" / f"trace_{rank}.json", trace_of(rank))
    write(tmp_path / "deep" / "other.txt", "no trace")
    assert open_trace(str(tmp_path / "deep" / "trace_*.json")).ranks == [0, 1]
    assert open_trace([str(tmp_path / "**" / "trace_?.json")]).ranks == [0, 1]
    with pytest.raises(TraceError, match="no file matches"):
        open_trace(str(tmp_path / "*.nothing"))
    odd = write(tmp_path / "trace[1].json", trace_of(1))  # a file of that very name is meant
    assert open_trace(str(odd)).about["files"] == {"1": str(odd)}


def test_names_of_any_kind_and_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "0", trace_of(None))
    write(tmp_path / "more" / "worker1", gzip.compress(trace_of(None)))
    write(tmp_path / ".cache" / "rank7.json", trace_of(7))
    write(tmp_path / "._rank8.json", trace_of(8))
    write(tmp_path / "notes.log", "hello")
    trace = open_trace(tmp_path)
    assert trace.ranks == [0, 1]
    assert [(note.what, note.count) for note in trace.notes if "files" in note.what] == [
        ("files of the folder that are no traces, left out", 1)
    ]


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside.json", trace_of(5))
    write(tmp_path / "job" / "rank0.json", trace_of(0))
    (tmp_path / "job" / "rank5.json").symlink_to(tmp_path / "outside.json")
    (tmp_path / "job" / "more").symlink_to(tmp_path)
    (tmp_path / "job" / "rank0_again.json").symlink_to(tmp_path / "job" / "absent.json")
    trace = open_trace(tmp_path / "job")
    assert trace.ranks == [0]
    assert [(note.what, note.count, note.example) for note in trace.notes] == [
        ("links that lead out of the folder, not followed", 1, "rank5.json")
    ]


def test_several_run_folders_are_not_mixed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name / "experiment.json", {})
    with pytest.raises(TraceError, match=r"holds 2 run folders \(a, b\); open one at a time"):
        open_trace(tmp_path)


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    for index in range(3):
        write(tmp_path / str(index), trace_of(index))
    with pytest.raises(TraceError, match="may hold 2 files"):
        open_trace(tmp_path)


# -- archives


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_an_archive_of_ranks(tmp_path: Path, make: Any) -> None:
    members = {
        "job/rank0/trace.json": trace_of(None),
        "job/rank1/trace.json.gz": gzip.compress(trace_of(None, 2)),
        "job/readme.txt": b"no trace",
        "job/._rank2.json": trace_of(2),
    }
    path = make(tmp_path / "archive", members)
    trace = open_trace(path)
    assert trace.ranks == [0, 1]
    assert trace.spans["start_ns"].to_list() == [1000, 2000]
    assert trace.about["files"] == {"0": f"{path}: job/rank0/trace.json", "1": f"{path}: job/rank1/trace.json.gz"}
    (note,) = [note for note in trace.notes if "no traces" in note.what]
    assert note.example == f"{path}: job/readme.txt is not JSON; a trace is a JSON file with traceEvents"
    assert list(tmp_path.iterdir()) == [path]
    # two archives and a file at once
    more = write(tmp_path / "rank7.json", trace_of(7))
    other = make(tmp_path / "other", {"rank3.json": trace_of(3)})
    assert open_trace([path, more, other]).ranks == [0, 1, 3, 7]
    again = make(tmp_path / "again", {"a.json": trace_of(7)})
    with pytest.raises(TraceError, match=f"{more} and {again}: a.json both are rank 7"):
        open_trace([more, again])


@pytest.mark.parametrize("make", [make_tar, make_zip])
def test_a_run_folder_in_an_archive(tmp_path: Path, make: Any) -> None:
    members = {
        "runs/prefetch-on/experiment.json": b'{"engine": "fsdp2"}',
        "runs/prefetch-on/environment.json": b'{"provenance": "cpu"}',
        "runs/prefetch-on/rank0/trace.json.gz": gzip.compress(trace_of(0)),
        "runs/prefetch-on/rank0/metrics.jsonl": b'{"step": 0, "loss": 1.5}\n',
    }
    path = make(tmp_path / "archive", members)
    trace = open_trace(path)
    assert trace.ranks == [0]
    assert trace.about["folder"] == str(path)
    assert trace.about["experiment"] == {"engine": "fsdp2"}
    assert trace.about["metrics"]["0"][0]["loss"] == 1.5
    assert trace.provenance.value == "cpu"


def test_archives_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    open_trace(make_tar(tmp_path / "a.tar", {"rank0.json": trace_of(0)}))
    with pytest.raises(TraceError):
        open_trace(make_tar(tmp_path / "b.tar", {"x": b"no trace"}))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_an_archive_in_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", trace_of(0))
    make_zip(tmp_path / "more.zip", {"rank1.json": trace_of(1)})
    (note,) = open_trace(tmp_path).notes
    assert note.example.endswith("more.zip is a zip archive inside a folder; open it by itself")


# -- a part of it


def test_steps_and_windows(tmp_path: Path) -> None:
    """Steps 1 and 2 are 10 µs each, an operator in each, one after both."""
    events = [op(f"aten::op{number}", start, 2) for number, start in enumerate((101, 111, 130))]
    events += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{step}",
            "pid": 100,
            "tid": 100,
            "ts": ts,
            "dur": 9,
        }
        for step, ts in ((1, 100), (2, 110))
    ]
    path = write_trace(tmp_path / "rank0.json", events)

    def names(**options: Any) -> list[str]:
        return open_trace(path, **options).spans.filter(pl.col("kind") != "annotation")["name"].to_list()

    assert names() == ["aten::op0", "aten::op1", "aten::op2"]
    assert names(steps=[2]) == ["aten::op1"]
    assert names(window=(0.011, 0.03)) == ["aten::op1"]  # from 111 µs to 130 µs, its end not included
    assert names(window=(0.012, 0.031)) == ["aten::op1", "aten::op2"]  # a span that is cut by the window is kept whole
    (note,) = open_trace(path, steps=[1]).notes
    assert (note.what, note.count) == ("spans outside the steps or the window asked for", 3)
    assert open_trace(path, steps=[1]).steps["step"].to_list() == [1]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"steps": [3]}, r"has steps \[1, 2\]; asked for \[3\]"),
        ({"window": (2, 1)}, "ends after it starts"),
        ({"window": 5}, "a window is"),
        ({"window": (0, float("nan"))}, "a window is"),
    ]
    for options, cause in wrong:
        with pytest.raises(TraceError, match=cause):
            open_trace(path, **options)
