"""The compiled scanner and msgspec read the same from whatever bytes there are."""

from __future__ import annotations

import ctypes
import json
import mmap
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from make_trace import KINETO, document, launched, mark, op, span, write

from fsdpviz.base.errors import TraceError
from fsdpviz.trace.kineto import blocks, events, scanner
from fsdpviz.trace.kineto.columns import ColumnBuilder
from fsdpviz.trace.kineto.reader import read_recording
from fsdpviz.trace.table import Tally

scan: Any = scanner._scan
pytestmark = pytest.mark.skipif(scan is None, reason="there was no compiler when fsdpviz was installed")
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
RECORDINGS = sorted(KINETO.glob("**/*.json.gz"))


def outcome(path: Path, compiled: Any) -> Any:
    """All that is read from a file, or the error, as values that can be compared."""
    kept, scanner._scan = scanner._scan, compiled
    try:
        found = read_recording(path)
    except TraceError as error:
        return str(error)
    finally:
        scanner._scan = kept
    assert found.differentiated is not None
    return (
        found.events.to_dict(as_series=False),
        found.tensors,
        found.messages,
        found.thread_names,
        found.header,
        {(note.what, note.count) for note in found.notes},
        sorted(found.differentiated.tolist()),
    )


def scan_of(text: bytes) -> tuple[int, int, bool]:
    """Spans, bytes that they take, and whether something odd follows."""
    found = scan.Scanner(ColumnBuilder(Tally()).text_codes).scan(text, 0, False)
    return found.codes.shape[1], found.end, found.is_odd


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_read_the_same(path: Path) -> None:
    assert outcome(path, scan) == outcome(path, None)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_all_of_a_recording_is_scanned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = []
    monkeypatch.setattr(events.EventReader, "_next_events", lambda self: odd.append(self._pending[:200]) or ())
    read_recording(path)
    assert not odd


def test_a_difference_would_be_noticed(tmp_path: Path) -> None:
    one, other = (write(tmp_path / f"{end}.json", document([op("a", 1, end)])) for end in (2, 3))
    assert outcome(one, scan) != outcome(other, None)


# -- made texts

COLLECTIVE: Any = {"Collective name": "allgather"}
ORDINARY = [
    *launched("kernel", "ncclDevKernel_AllGather_RING_LL", 0, 5, 2.5, correlation=7, **COLLECTIVE),
    *launched("gpu_memcpy", "Memcpy HtoD", 0.001, 5, 2, correlation=8, bytes=4096),
    op("aten::mm", 1, 2, **{"Fwd thread id": 0, "Sequence number": 3, "Input Dims": [[2, 3], []]}),
    mark("gloo:all_reduce", 4, 1, **{"Input Dims": [[2, 3]], "Input type": ["float"]}),
    {"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": 1, "cat": "ac2g", "name": "ac2g"},
    {"ph": "M", "name": "thread_name", "pid": 100, "tid": 7, "args": {"name": "worker"}},
    {"ph": "C", "name": "power", "ts": 3, "args": {"a": 1}},
    op('quoted "}, {" and \\', 1, 1, deep=[{"x": [{"y": 1}, {"z": "},{"}]}, {}]),
    op("ünïcödé ✓ \U0001f600", 5, 1),
]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -0.0, -1, 7, 1.5, 2.0005, 1e300, 10**15, 1790862152712198.680, 2**53, 10**19, -(2**63)])
    | st.sampled_from(["", "7", "aten::mm", "c10d::_allgather_base_", 'a"b', "a\nb", "\x7f", "ü", "default_pg"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
KEYS = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"]
ARGS = [
    "correlation",
    "bytes",
    "Fwd thread id",
    "Collective name",
    "Process Group Name",
    "Input Dims",
    "dtype",
    "Seq",
    "finished",
]
args = st.dictionaries(st.sampled_from(ARGS), values, max_size=4)
event = st.builds(
    lambda base, changes, gone, more: {
        key: value for key, value in ({**base, **changes} | ({"args": more} if more else {})).items() if key not in gone
    },
    st.sampled_from(ORDINARY),
    st.dictionaries(st.sampled_from(KEYS), values, max_size=2),
    st.lists(st.sampled_from(KEYS), max_size=1),
    st.none() | args,
)


@quick
@given(
    made=st.lists(event, max_size=6),
    indent=st.sampled_from([None, 0, 4]),
    ascii=st.booleans(),
    block=st.integers(7, 900),
)
def test_events_of_every_shape_read_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Any], indent: int | None, ascii: bool, block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    path = write(tmp_path / "t.json", json.dumps(document(made), indent=indent, ensure_ascii=ascii))
    assert outcome(path, scan) == outcome(path, None)


PIECES = [
    *(bytes([character]) for character in b'{}[]",:\\ \n\t\x00\x1f-.0123eE+u/'),
    *(
        b"null",
        b"true",
        b"NaN",
        b'"ph":"X"',
        b'"ts":1',
        b'"dur":2e1',
        b"\\u0041",
        b"\\ud800",
        b"\xff",
        b"\xc3\xbc",
        b", {",
    ),
]


@quick
@example(changes=[(60, 3, b"")], block=50)
@example(changes=[(157, 9, b"{"), (517, 0, b"\xff")], block=7)  # in a key that nobody asks for
@given(
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 9), st.sampled_from(PIECES)), max_size=4),
    block=st.integers(7, 5000),
)
def test_damaged_text_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[int, int, bytes]], block: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block)
    text = json.dumps(document(ORDINARY * 2, rank=1, traceName="t"), ensure_ascii=False).encode()
    for at, length, piece in changes:
        text = text[:at] + piece + text[at + length :]
    path = write(tmp_path / "t.json", text)
    assert outcome(path, scan) == outcome(path, None)


@pytest.mark.parametrize(
    ("change", "is_odd"),
    [
        ({}, False),
        ({"ts": 1790862152712198.5}, False),
        ({"ts": 2305843009213692.5}, False),
        ({"ts": 2305843009213694.5}, True),  # above 2**61 ns
        ({"ts": -1.5}, True),
        ({"ts": 1e20}, True),
        ({"ts": 0.0001}, True),
        ({"ts": "1"}, True),
        ({"dur": None}, True),
        ({"pid": "GPU 0", "tid": -1}, False),
        ({"tid": 1.5}, True),
        ({"name": ["a"]}, True),
        ({"args": {"correlation": "7"}}, True),
        ({"args": {"Fwd thread id": -0.0}}, True),
        ({"args": None}, False),
        ({"args": []}, True),
        ({"ph": "XX"}, True),
        ({"more": {"deep": [[[{"a": [True, False, None, -1.5e-3]}]]]}}, False),
    ],
)
def test_what_no_profiler_writes_is_left_to_the_other_reader(change: dict[str, Any], is_odd: bool) -> None:
    first = json.dumps(span("cpu_op", "first", 0, 1)).encode()
    text = first + b", " + json.dumps(span("cpu_op", "a", 1, 2) | change).encode() + b"]"
    expected = (1, len(first), True) if is_odd else (2, len(text) - 1, False)
    assert scan_of(text) == expected


def test_an_event_that_is_cut_waits_for_its_end() -> None:
    text = json.dumps(ORDINARY, ensure_ascii=False).encode()[1:]
    whole, end, _ = scan_of(text)
    assert (whole, end) == (8, len(text) - 1)
    ends = {scan_of(text[:length])[1] for length in range(len(text))}
    assert len(ends) == len(ORDINARY) + 1  # nothing, then one event after the other
    assert not any(scan_of(text[:length])[2] for length in range(len(text)))


def guarded(text: bytes) -> memoryview:
    """The text, at the end of a page behind which no byte may be read: doing so ends the process."""
    page = mmap.PAGESIZE
    room = (len(text) // page + 1) * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + room), page, 0) == 0
    memory[room - len(text) : room] = text
    return memoryview(memory)[room - len(text) :]


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page by libc's mprotect")
def test_no_byte_is_read_past_the_end() -> None:
    text = json.dumps([*ORDINARY, {"a": [True, False, None, "\u00e4", -1.5e-3]}]).encode()[1:]
    codes = ColumnBuilder(Tally()).text_codes
    for length in range(len(text) + 1):
        scan.Scanner(codes).scan(guarded(text[:length])[:length], 0, False)
    for start in range(0, len(text), 7):
        scan.Scanner(codes).scan(guarded(text[start:])[: len(text) - start], 0, False)


@pytest.mark.skipif(sys.platform != "linux", reason="protects a page by libc's mprotect")
def test_a_byte_read_past_the_end_would_be_noticed() -> None:
    code = "from test_scan import guarded; print(guarded(b'abc')[2], flush=True); guarded(b'abc')[3]"
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert (ran.stdout.split(), ran.returncode) == (["99"], -signal.SIGSEGV)
