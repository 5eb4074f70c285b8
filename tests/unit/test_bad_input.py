"""What may be wrong with a file: one line that names it and the cause, or a trace with notes. Never a traceback."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import sqlite3
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_nsys import push_pop, work, write_export
from make_trace import document, op, write_trace

from fsdpviz import cli
from fsdpviz.base.errors import TraceError
from fsdpviz.trace import Trace, open_trace
from fsdpviz.trace.files import archives, limits
from fsdpviz.trace.files.sniff import Format
from fsdpviz.trace.reading import readers as reading

WHOLE = json.dumps(document([op(f"aten::op{number}", number, 1) for number in range(1000)], rank=0)).encode()
quick = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def refused(path: Path | str, cause: str) -> None:
    with pytest.raises(TraceError, match=cause) as caught:
        open_trace(path, cache=False)
    text = str(caught.value)
    assert "\n" not in text
    assert Path(path).name.split("\n")[0][:20] in text
    assert len(text) < 1000


def make_database(path: Path) -> bytes:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE weights (a)")
    connection.commit()
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("empty.json", b"", "is empty"),
        ("blank.json", b" \n\t ", "is empty"),
        ("empty.json.gz", gzip.compress(b""), "nothing in it is whole"),
        ("note.json", b"hello", "is not JSON"),
        ("other.json", b'{"lr": 0.1}', "no list traceEvents|no trace"),
        ("number.json", b"[1, 2, 3]", "nothing in it is an event|no trace"),
        ("page.json", b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        ("page.json.gz", gzip.compress(b"\n<html>"), "HTML"),
        ("cut.json.gz", gzip.compress(b"x" * 64, mtime=0)[:10], "damaged gzip"),
        ("cut.json", b'{"schemaVersion": 1, "traceEv', "not a trace"),
        ("deep.json", b"[" * 1_000_000, "nested too deeply"),
        ("deep2.json", b'{"traceEvents":' + b'[{"args":' * 100_000, "nested too deeply|not a trace"),
        (
            "deep3.json",
            b'{"traceEvents":[{"ph":"X","ts":1,"dur":1,"args":' + b"[" * 1_000_000,
            "nested too deeply|not a",
        ),
        ("wide.json", '{"traceEvents":[]}'.encode("utf-16"), "UTF-16"),
        ("packed.zst", b"\x28\xb5\x2f\xfd" + b"x" * 99, "zstd"),
        ("run.nsys-rep", b"QDREP" + bytes(99), "nsys export"),
        ("model.pickle", pickle.dumps(os.system), "would import"),
        ("cut.pickle", pickle.dumps({"segments": [], "device_traces": []})[:-9], "cut short"),
        ("weights.zip", b"PK\x03\x04" + bytes(99), "damaged zip"),
        ("cut.sqlite", b"SQLite format 3\0" + bytes(50), "SQLite"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, name: str, content: bytes, cause: str) -> None:
    refused(_put(tmp_path / name, content), cause)


def _put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_numbers_that_no_value_can_be(tmp_path: Path) -> None:
    """Around the events, where the rank then comes from the file's name."""
    huge, event = "9" * 5000, json.dumps(op("aten::mm", 1, 1))
    header = f'{{"baseTimeNanoseconds":{huge},"distributedInfo":{{"rank":{huge}}},'
    trace = open_trace(_put(tmp_path / "rank3.json", f'{header}"traceEvents":[{event}]}}'.encode()))
    assert (len(trace.spans), trace.ranks) == (1, [3])
    assert any("damage around the events" in note.what for note in trace.notes)


@pytest.mark.parametrize("damage", [b"\xff", b"\\ud800"])
def test_a_type_that_is_damaged(tmp_path: Path, damage: bytes) -> None:
    """Reading past a text looks for its end alone."""
    shapes = b'"Input Dims":[[4]],"Input type":["float%s"]' % damage
    event = json.dumps(op("c10d::allreduce_", 1, 1)).encode().replace(b"{}", b"{%s}" % shapes)
    assert len(open_trace(_put(tmp_path / "rank0.json", b'{"traceEvents":[' + event + b"]}"), cache=False).spans) == 1


@pytest.mark.parametrize("content", [WHOLE + b"\n" + WHOLE, b"[" + WHOLE[WHOLE.index(b"[") + 1 : -1] + b"[]"])
def test_files_one_behind_the_other(tmp_path: Path, content: bytes) -> None:
    """As ``cat`` makes of two: the second is left out, and a note says so."""
    trace = open_trace(_put(tmp_path / "rank0.json", content), cache=False)
    assert len(trace.spans) == 1000
    assert [note.count for note in trace.notes if note.what == "text behind the end of the trace, left out"] == [1]
    assert not open_trace(_put(tmp_path / "rank0.json", WHOLE + b" \n\n"), cache=False).notes


def test_zips_of_other_packers(tmp_path: Path) -> None:
    """LZMA has an error of its own, and a name may be missing."""
    path = tmp_path / "run.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as packed:
        packed.writestr("rank0.json", WHOLE)
    assert len(open_trace(path).spans) == 1000
    content = bytearray(path.read_bytes())
    content[100:110] = b"\xff" * 10
    refused(_put(tmp_path / "bad.zip", bytes(content)), "damaged zip|is empty")
    with zipfile.ZipFile(tmp_path / "nameless.zip", "w") as packed:
        member = zipfile.ZipInfo("x")
        member.filename = ""
        packed.writestr(member, WHOLE)
    refused(tmp_path / "nameless.zip", "member without a name")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    whole = make_database(tmp_path / "weights.sqlite")
    refused(tmp_path / "weights.sqlite", "no export of Nsight Systems")
    refused(_put(tmp_path / "cut.sqlite", whole[: len(whole) // 2]), "damaged SQLite|no export")


def test_nesting_that_packs_to_little(tmp_path: Path) -> None:
    """A hundred million brackets are 100 kB of gzip; what is held of them is bounded."""
    path = _put(tmp_path / "deep.json.gz", gzip.compress(b"[" * 100_000_000, 9))
    tracemalloc.start()
    refused(path, "nested too deeply|not a trace")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 400 << 20


# -- what is whole is read


def test_a_cut_file_gives_what_is_whole(tmp_path: Path) -> None:
    trace = open_trace(_put(tmp_path / "rank0.json", WHOLE[: len(WHOLE) // 2]))
    assert 400 < len(trace.spans) < 600
    assert any("cut short" in note.what for note in trace.notes)
    packed = gzip.compress(WHOLE)
    trace = open_trace(_put(tmp_path / "rank0.json.gz", packed[: len(packed) // 2]))
    assert 0 < len(trace.spans) < 1000
    assert any("gzip stream that ends too early" in note.what for note in trace.notes)


def test_values_of_the_wrong_type(tmp_path: Path) -> None:
    odd = {"ph": "X", "cat": 1, "name": 2, "pid": {"a": 1}, "tid": [1], "ts": "soon", "dur": None, "args": 3}
    named = {"ph": "X", "cat": "cpu_op", "name": 7, "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {"correlation": "x"}}
    trace = open_trace(write_trace(tmp_path / "rank0.json", [odd, named]))
    assert trace.spans["name"].to_list() == ["7"]
    assert [note.count for note in trace.notes if "without a start time" in note.what] == [1]


def test_names_with_markup_or_a_megabyte_long(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>" + "a" * 1_000_000
    trace = open_trace(write_trace(tmp_path / "rank0.json", [op(name, 1, 1), op(name, 3, -1)]))
    assert trace.spans["name"].unique().to_list() == [name]  # kept as it is; views escape and cut
    assert all(len(str(note)) < 500 for note in trace.notes)
    assert trace.notes


def test_file_names_of_any_kind(tmp_path: Path) -> None:
    refused(_put(tmp_path / "two\nlines \x1b[31mred.json", b"x"), "not JSON")
    refused(tmp_path / ("a" * 5000), "cannot be read|does not exist")
    with pytest.raises(TraceError, match="names a file or a folder"):
        open_trace("a\0b")


# -- the file system


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _put(tmp_path / "rank0.json", WHOLE)

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)  # root may read everything, so that a mode bit proves nothing
    refused(path, r"rank0\.json cannot be read: permission denied")


def test_folders_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    is_file = Path.is_file

    def denying(ask: Any) -> Any:
        def denied(path: Any, *more: Any) -> Any:
            if "locked" in str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return ask(path, *more)

        return denied

    monkeypatch.setattr(Path, "is_file", denying(is_file))
    monkeypatch.setattr(os, "listdir", denying(os.listdir))
    monkeypatch.setattr(os, "scandir", denying(os.scandir))
    refused(locked, "locked cannot be read: permission denied")
    _put(tmp_path / "rank0.json", WHOLE)
    trace = open_trace(tmp_path, cache=False)
    assert len(trace.spans) == 1000
    assert any("locked cannot be read" in note.example for note in trace.notes)


def test_what_is_no_path(tmp_path: Path) -> None:
    assert open_trace(os.fsencode(_put(tmp_path / "rank0.json", WHOLE))).ranks == [0]
    for what in (5, None, [str(tmp_path), 7]):
        with pytest.raises(TraceError, match="a path is text"):
            open_trace(what)  # type: ignore[arg-type]
    refused("~nobody-of-this-name/rank0.json", "does not exist")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_would_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    refused(tmp_path / "pipe.json", "neither a file nor a folder")
    refused("/dev/zero", "neither a file nor a folder")
    _put(tmp_path / "rank0.json", WHOLE)
    assert open_trace(tmp_path).ranks == [0]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _put(tmp_path / "rank0.json", WHOLE)
    whole = reading._read

    def meanwhile(source: Any, *more: Any) -> Any:
        parts = whole(source, *more)
        path.write_bytes(WHOLE + b" ")
        return parts

    monkeypatch.setattr(reading, "_read", meanwhile)
    trace = open_trace(path, cache=False)
    assert len(trace.spans) == 1000
    assert [note.what for note in trace.notes] == [
        "file that changed while it was read; open it again when it is written"
    ]


# -- archives


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    "name", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..\\evil.json", "C:/evil.json"]
)
def test_members_that_lead_outside(tmp_path: Path, name: str) -> None:
    home = tmp_path / "deep" / "er"
    home.mkdir(parents=True)
    refused(tar_of(home / "a.tar", (tarfile.TarInfo(name), WHOLE)), "leads outside")
    with zipfile.ZipFile(home / "a.zip", "w") as packed:
        info = zipfile.ZipInfo("x")
        info.filename = name
        packed.writestr(info, WHOLE)
    refused(home / "a.zip", "leads outside")
    assert not list(tmp_path.rglob("evil*"))


def test_links_and_devices_of_an_archive_are_left_out(tmp_path: Path) -> None:
    link, device = tarfile.TarInfo("rank1.json"), tarfile.TarInfo("rank2.json")
    link.type, link.linkname, device.type = tarfile.SYMTYPE, "/etc/passwd", tarfile.CHRTYPE
    path = tar_of(tmp_path / "a.tar", (link, b""), (device, b""), (tarfile.TarInfo("rank0.json"), WHOLE))
    trace = open_trace(path)
    assert trace.ranks == [0]
    assert [(note.what, note.count) for note in trace.notes] == [("links and devices of the archive, left out", 2)]


@pytest.mark.parametrize("kind", ["zip", "tar.gz", "json.gz"])
def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The limit is lowered, so that a test need not fill the disk; 4 MB of spaces pack to 4 kB."""
    monkeypatch.setattr(limits, "FREE_UNPACKED_BYTES", 1 << 20)
    path, content = tmp_path / f"bomb.{kind}", b"[" + b" " * (4 << 20) + b"{}]"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("rank0.json", content)
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(content))
    else:
        with tarfile.open(path, "w:gz") as tar:
            info = tarfile.TarInfo("rank0.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    refused(path, "unpacks to more than 1 MiB")


def test_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    path = tar_of(tmp_path / "a.tar", *((tarfile.TarInfo(f"rank{number}.json"), WHOLE) for number in range(3)))
    refused(path, "may hold 2 files")


def test_headers_of_a_tar_are_bounded(tmp_path: Path) -> None:
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type = tarfile.GNUTYPE_LONGNAME
    path = tar_of(tmp_path / "a.tar", (long_name, b"a" * (2 << 20)), (tarfile.TarInfo("rank0.json"), WHOLE))
    refused(path, "a header of 2097152 bytes")


def test_a_cut_archive_gives_what_is_whole(tmp_path: Path) -> None:
    whole = tar_of(tmp_path / "a.tar", *((tarfile.TarInfo(f"rank{rank}.json"), WHOLE) for rank in (0, 1))).read_bytes()
    trace = open_trace(_put(tmp_path / "cut.tar", whole[: len(whole) // 2 - 4000]))
    assert trace.ranks == [0]
    assert any("damaged or cut short" in note.what for note in trace.notes)


def test_an_encrypted_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr("rank0.json", WHOLE)
    data = bytearray((tmp_path / "a.zip").read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1  # the bit that says so, in the central directory
    refused(_put(tmp_path / "b.zip", bytes(data)), "is encrypted")


# -- the command line


@pytest.mark.parametrize("content", [b"", b"<html>", pickle.dumps(os.system), b"[" * 100_000])
def test_the_command_line_prints_one_line(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fsdpviz", "open", str(_put(tmp_path / "rank0.json", content))])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("fsdpviz: ")
    assert "rank0.json" in printed.err


# -- any bytes


def opened_or_refused(path: Path) -> Trace | None:
    try:
        return open_trace(path, cache=False)
    except TraceError as error:
        assert "\n" not in str(error)
        return None


def mutated(whole: bytes, seed: int) -> bytes:
    """A few bytes changed, a piece cut out, or the end lost."""
    chance = random.Random(seed)
    data = bytearray(whole)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(max(1, len(data) - 1))
        match chance.randrange(3):
            case 0:
                data[at : at + 1] = chance.randbytes(1)
            case 1:
                del data[at : at + chance.randrange(1, 200)]
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
    return bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.2 else data)


@pytest.mark.parametrize("kind", ["json", "json.gz", "pickle", "dump", "tar", "zip", "sqlite"])
@given(seed=st.integers(0, 2**32))
@quick
def test_mutated_files_never_crash(tmp_path: Path, kind: str, seed: int) -> None:
    path = tmp_path / f"rank0.{kind}"
    whole = tmp_path / "whole"
    if not whole.exists():
        whole.write_bytes(_whole(kind, tmp_path))
    path.write_bytes(mutated(whole.read_bytes(), seed))
    opened_or_refused(path)


def _whole(kind: str, tmp_path: Path) -> bytes:
    small = json.dumps(document([op(f"aten::op{number}", number, 1) for number in range(20)], rank=0)).encode()
    dump = {
        "version": "2",
        "pg_config": {},
        "pg_status": {},
        "entries": [{"profiling_name": "a", "time_created_ns": 1}] * 9,
    }
    blocks = [{"size": 1, "state": "active_allocated"}]
    events = [{"action": "alloc", "size": 1, "time_us": 1}] * 9
    snapshot = {"segments": [{"device": 0, "total_size": 9, "blocks": blocks}], "device_traces": [events]}
    if kind == "sqlite":
        content = {
            "CUPTI_ACTIVITY_KIND_KERNEL": [work(at, at + 1, process=1, gpu=0, correlation=at) for at in range(50)],
            "NVTX_EVENTS": [push_pop(at, at + 1, f"range {at}", process=1) for at in range(50)],
        }
        return write_export(tmp_path / "made.sqlite", content, {1: "a"}).read_bytes()
    if kind == "tar":
        return tar_of(tmp_path / "made.tar", (tarfile.TarInfo("rank0.json"), small)).read_bytes()
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "made.zip", "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("rank0.json", small)
        return (tmp_path / "made.zip").read_bytes()
    return {
        "json": small,
        "json.gz": gzip.compress(small),
        "pickle": pickle.dumps(snapshot),
        "dump": json.dumps(dump).encode(),
    }[kind]


@given(content=st.binary(max_size=400))
@quick
def test_any_bytes_are_refused_or_read(tmp_path: Path, content: bytes) -> None:
    for head in (b"", b"{", b"SQLite format 3\0", b"\x80\x04", b"PK\x03\x04", b"\x1f\x8b\x08"):
        opened_or_refused(_put(tmp_path / "t", head + content))


def test_no_reader_is_left_out_of_the_fuzz() -> None:
    assert {*Format} == {
        Format.KINETO,
        Format.NSYS,
        Format.FLIGHT_RECORDER,
        Format.PICKLE,
        Format.TAR,
        Format.ZIP,
    }
