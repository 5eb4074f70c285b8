"""The cache: the same tables without reading again, and never another file's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_trace import mark, op, write, write_trace

from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.kineto import reader as kineto
from fsdpviz.trace.reading import cache
from fsdpviz.trace.reading import readers as reading


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were really read, as they are read."""
    found: list[Path] = []

    def read(path: Path, on_read=lambda read_bytes: None) -> kineto.Recording:
        found.append(path)
        return kineto.read_recording(path, on_read)

    monkeypatch.setattr(reading, "read_recording", read)
    return found


def make(path: Path, *names: str, rank: int | None = 3) -> Path:
    events = [
        mark("FSDP::pre_forward (layers.0)", 0, 50),
        *(op(f"aten::{name}", 1 + 2 * i, 1) for i, name in enumerate(names)),
    ]
    return write_trace(path, [*events, {**op("lost", 0, 1), "ts": None}], rank=rank, baseTimeNanoseconds=7)


def entries(folder: Path) -> list[Path]:
    return sorted(child for child in (folder / cache.FOLDER).iterdir() if child.is_dir())


def same(first: Trace, second: Trace) -> bool:
    frames = ("spans", "lanes", "steps", "groups", "clock")
    return (
        all(getattr(first, name).equals(getattr(second, name)) for name in frames)
        and all(getattr(first, name).schema == getattr(second, name).schema for name in frames)
        and first.notes == second.notes
        and first.about == second.about
    )


def test_the_second_time_nothing_is_read_and_all_is_the_same(tmp_path: Path, reads: list[Path]) -> None:
    path = make(tmp_path / "t.json", "mm", "add")
    first, second = open_trace(path), open_trace(path)
    assert reads == [path]
    assert same(first, second)
    assert first.ranks == [3]
    assert [note.what for note in second.notes] == ["spans without a start time, left out"]


def test_off_means_neither_looked_up_nor_written(tmp_path: Path, reads: list[Path]) -> None:
    path = make(tmp_path / "t.json", "mm")
    open_trace(path, cache=False)
    assert not (tmp_path / cache.FOLDER).exists()
    open_trace(path)
    open_trace(path, cache=False)
    assert reads == [path] * 3


def test_small_files_are_not_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 4 << 20)
    open_trace(make(tmp_path / "t.json", "mm"))
    assert not (tmp_path / cache.FOLDER).exists()


def test_another_content_under_the_same_name_is_read(tmp_path: Path, reads: list[Path]) -> None:
    path = make(tmp_path / "t.json", "mm")
    open_trace(path)
    make(path, "bm")  # as long as before
    assert open_trace(path).spans["name"].to_list()[1] == "aten::bm"
    assert len(reads) == 2


def test_the_same_content_under_another_name_is_not(tmp_path: Path, reads: list[Path]) -> None:
    path = make(tmp_path / "rank1.json", "mm", rank=None)
    assert open_trace(path).ranks == [1]
    moved = path.rename(tmp_path / "rank2.json")
    trace = open_trace(moved)
    assert reads == [path]
    assert trace.ranks == [2]  # the name is looked at each time
    assert trace.about["files"] == {"2": str(moved)}


def test_a_remembered_hash_counts_only_while_the_file_is_the_same(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    content = cache._content
    monkeypatch.setattr(cache, "_content", lambda path: (hashed.append(path), content(path))[1])
    monkeypatch.setattr(cache, "_TICK_NS", 0)
    path = make(tmp_path / "t.json", "mm")
    open_trace(path)
    open_trace(path)
    assert len(hashed) == 1
    stamp = path.stat()
    make(path, "bm")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # its time of change tells all the same
    assert open_trace(path).spans["name"].to_list()[1] == "aten::bm"
    assert (len(hashed), len(reads)) == (2, 2)


def test_newer_readers_read_anew(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "t.json", "mm")
    open_trace(path)
    monkeypatch.setattr(cache, "reader_version", lambda: "0" * 16)
    open_trace(path)
    assert len(reads) == 2
    assert len(entries(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "gone", "text", "json", "rows", "columns", "bit", "rank", "pipe"])
def test_a_damaged_entry_is_noted_and_made_anew(tmp_path: Path, reads: list[Path], damage: str) -> None:
    path = make(tmp_path / "t.json", "mm")
    whole = open_trace(path)
    (entry,) = entries(tmp_path)
    spans = entry / "0.spans.parquet"
    match damage:
        case "cut":
            spans.write_bytes(spans.read_bytes()[:-20])
        case "gone":
            spans.unlink()
        case "text":
            spans.write_text("no Parquet")
        case "json":
            (entry / "parts.json").write_text('{"parts": 5}')
        case "rows":
            listed = json.loads((entry / "parts.json").read_text())
            listed["parts"][0]["rows"]["spans"] += 1
            (entry / "parts.json").write_text(json.dumps(listed))
        case "bit":  # of a start, which Parquet itself would not miss
            content = bytearray(spans.read_bytes())
            at = content.index((7 + 1000).to_bytes(8, "little"))
            content[at] ^= 1
            spans.write_bytes(content)
        case "rank":
            text = (entry / "parts.json").read_text()
            (entry / "parts.json").write_text(text.replace('"rank": 3', '"rank": 5'))
        case "pipe":
            spans.unlink()
            os.mkfifo(spans)
        case "columns":
            spans.write_bytes((entry / "0.lanes.parquet").read_bytes())
    again = open_trace(path)
    assert len(reads) == 2
    assert again.spans.equals(whole.spans)
    assert again.notes[-1].what == "damaged cache entry, read again and rewritten"
    assert same(open_trace(path), whole)
    assert len(reads) == 2


def test_a_folder_that_is_read_only_stays_as_it_is(tmp_path: Path, reads: list[Path]) -> None:
    folder = tmp_path / "theirs"
    path = make(folder / "t.json", "mm")
    folder.chmod(0o555)
    try:
        open_trace(path)
        open_trace(path)
    finally:
        folder.chmod(0o755)
    assert [child.name for child in folder.iterdir()] == ["t.json"]
    assert len(reads) == 1
    assert cache.user_folder().is_relative_to(tmp_path)
    assert any(child.is_dir() for child in cache.user_folder().iterdir())


def once_read(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """What happens each time when a recording has been read, and before it is kept."""
    read = reading.read_recording

    def read_and_more(path: Path, *more) -> kineto.Recording:
        recording = read(path, *more)
        happens()
        return recording

    monkeypatch.setattr(reading, "read_recording", read_and_more)


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "t.json", "mm")
    once_read(monkeypatch, lambda: make(path, "bm", "later"))
    open_trace(path)
    assert not (tmp_path / cache.FOLDER).exists()


def test_many_readers_at_once(tmp_path: Path) -> None:
    path = make(tmp_path / "t.json", *map(str, range(200)))
    whole = open_trace(path, cache=False)
    code = f"""
from fsdpviz.trace.reading import cache
from fsdpviz.trace import open_trace
cache.WORTH_BYTES = 1
for _ in range(5):
    trace = open_trace({str(path)!r})
    assert len(trace.spans) == {len(whole.spans)} and len(trace.notes) == {len(whole.notes)}, trace.notes
"""
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: subprocess.run([sys.executable, "-c", code], capture_output=True), range(3)))
    assert [run.stderr for run in runs] == [b""] * 3
    assert len(entries(tmp_path)) == 1
    assert not [child for child in (tmp_path / cache.FOLDER).iterdir() if child.name.startswith(".")]


def test_the_oldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = make(tmp_path / "old.json", "mm")
    open_trace(old)
    (first,) = entries(tmp_path)
    os.utime(first, (1, 1))
    monkeypatch.setattr(cache, "MOST_BYTES", 1 + sum(file.stat().st_size for file in first.iterdir()) * 3 // 2)
    open_trace(make(tmp_path / "new.json", "mm", "add", "add"))
    assert first not in entries(tmp_path)
    assert len(entries(tmp_path)) == 1


def test_errors_are_not_kept(tmp_path: Path) -> None:
    from fsdpviz.base.errors import TraceError

    path = write(tmp_path / "t.json", '{"traceEvents": []}')
    for _ in range(2):
        with pytest.raises(TraceError, match="nothing in it is an event"):
            open_trace(path)
    assert not (tmp_path / cache.FOLDER).exists()


def test_a_link_beside_the_trace_is_not_followed(tmp_path: Path) -> None:
    """It may lead to any folder, in which entries would be written and what is old would be removed."""
    elsewhere = tmp_path / "elsewhere"
    for name in (".git", "work", ".new-idea"):
        (elsewhere / name).mkdir(parents=True)
        os.utime(elsewhere / name, (1, 1))
    path = make(tmp_path / "theirs" / "t.json", "mm")
    (path.parent / cache.FOLDER).symlink_to(elsewhere)
    open_trace(path)
    assert sorted(child.name for child in elsewhere.iterdir()) == [".git", ".new-idea", "work"]


def test_what_the_cache_did_not_make_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "t.json", "mm")
    for name in (".git", "work", ".new-half"):
        (tmp_path / cache.FOLDER / name).mkdir(parents=True)
        os.utime(tmp_path / cache.FOLDER / name, (1, 1))
    half = write(tmp_path / cache.FOLDER / ".new-file", "{")
    os.utime(half, (1, 1))
    monkeypatch.setattr(cache, "MOST_BYTES", 0)
    open_trace(path)
    left = {child.name for child in (tmp_path / cache.FOLDER).iterdir() if not child.name.startswith("seen-")}
    assert left == {".git", "work"}


def test_a_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """polars has an error of its own for it."""
    import polars as pl

    path = make(tmp_path / "t.json", "mm")

    def full(*_: object, **__: object) -> None:
        raise pl.exceptions.ComputeError("parquet: underlying IO error: No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    assert open_trace(path).ranks == [3]
    assert not any((tmp_path / cache.FOLDER).iterdir())


def test_a_hash_that_cannot_be_remembered_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_TICK_NS", 0)
    monkeypatch.setattr(cache.json, "dump", full)
    open_trace(make(tmp_path / "t.json", "mm"))
    assert [child.name for child in (tmp_path / cache.FOLDER).iterdir() if not child.is_dir()] == []


def test_a_memory_that_is_a_pipe(tmp_path: Path, reads: list[Path]) -> None:
    path = make(tmp_path / "t.json", "mm")
    (tmp_path / cache.FOLDER).mkdir()
    os.mkfifo(cache._memory(tmp_path / cache.FOLDER, path))
    open_trace(path)
    open_trace(path)
    assert reads == [path]


def test_a_file_that_is_gone_once_it_was_read(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "t.json", "mm")
    once_read(monkeypatch, path.unlink)
    trace = open_trace(path)
    assert trace.ranks == [3]
    assert "file that changed while it was read; open it again when it is written" in {n.what for n in trace.notes}


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    open_trace(make(tmp_path / "t.json", "mm"))
    assert len(entries(tmp_path)) == 1
