"""The Kineto reader: exact times, every shape of file, and one-line errors."""

from __future__ import annotations

import gzip
import json
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_trace import KINETO, document, mark, op, span, write, write_trace

from fsdpviz.base.errors import TraceError
from fsdpviz.trace.kineto.nanoseconds import microseconds_to_ns
from fsdpviz.trace.kineto.reader import Recording, read_recording


def times(recording: Recording) -> list[tuple[int, int]]:
    return recording.events.select("start_ns", "duration_ns").rows()


def whats(recording: Recording) -> list[str]:
    return [note.what for note in recording.notes]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("5126329712198.680", 5126329712198680),
        ("1661203462598738", 1661203462598738000),
        ("4458676522690.6555", 4458676522690656),  # …655.5 ns: the even neighbour is …656
        ("4458676522690.6545", 4458676522690654),
        ("298152.52500000002", 298152525),
        ("0", 0),
        ("-1.5", -1500),
        ("-0.25", -250),
        ("1.5e3", 1500000),
        ("1E-3", 1),
        ('"12.5"', 12500),  # some tools quote their numbers
    ],
)
def test_ns_come_from_the_decimal_text(text: str, ns: int) -> None:
    values, valid = microseconds_to_ns([text.encode()])
    assert valid.all()
    assert values.tolist() == [ns]


@pytest.mark.parametrize("text", ["", "null", "abc", "{}", "1e99", "1e9999999", '{\n"a": 1}', "NaN"])
def test_what_is_no_time_is_told_apart(text: str) -> None:
    values, valid = microseconds_to_ns([b"1.001", text.encode(), b"2"])
    assert valid.tolist() == [True, False, True]
    assert values.tolist() == [1001, 0, 2000]


@given(st.lists(st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=5), min_size=1))
def test_ns_equal_decimal_arithmetic(numbers: list[Decimal]) -> None:
    values, valid = microseconds_to_ns([str(number).encode() for number in numbers])
    assert valid.all()
    assert values.tolist() == [int((number * 1000).to_integral_value(ROUND_HALF_EVEN)) for number in numbers]


def test_a_double_would_have_lost_what_is_kept(tmp_path: Path) -> None:
    text = '{"traceEvents": [{"ph": "X", "name": "k", "pid": 0, "ts": 1790862152712198.681, "dur": 0.001}]}'
    assert times(read_recording(write(tmp_path / "t.json", text))) == [(1790862152712198681, 1)]
    assert round(float("1790862152712198.681") * 1000) != 1790862152712198681


@pytest.mark.parametrize("position", ["before", "after"])
def test_base_time_is_added_wherever_it_stands(tmp_path: Path, position: str) -> None:
    content = document([op("aten::mm", 1.5, 2)])
    base = {"baseTimeNanoseconds": 1790857026000000000}
    content = base | content if position == "before" else content | base
    assert times(read_recording(write(tmp_path / "t.json.gz", content))) == [(1790857026000001500, 2000)]


def test_a_bare_list_without_metadata_opens(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "t.json", [op("aten::mm", 1, 2)]))
    assert times(recording) == [(1000, 2000)]
    assert recording.rank is None
    assert recording.notes == ()


def test_the_schema_of_2020_opens(tmp_path: Path) -> None:
    events = [
        span("Operator", "aten::mm", 1, 2, thread="334"),
        span("Kernel", "sgemm", 3, 1, process=0, thread="stream 7", correlation=5),
    ]
    recording = read_recording(write(tmp_path / "t.json", events))
    assert recording.events["category"].to_list() == ["cpu_op", "kernel"]
    assert recording.events["thread"].to_list() == ["334", "stream 7"]
    assert recording.events["correlation"].to_list() == [None, 5]


def test_only_spans_are_kept_and_the_rest_is_counted(tmp_path: Path) -> None:
    others = [
        {"ph": "M", "name": "thread_name", "pid": 100, "tid": 7, "args": {"name": "thread 7 (worker)"}},
        {"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": 1, "cat": "ac2g", "name": "ac2g"},
        {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 1},
        {"ph": "C", "name": "Power", "pid": 0, "ts": 1, "args": {"watts": 3}},
    ]
    recording = read_recording(write_trace(tmp_path / "t.json", [op("aten::mm", 1, 2), *others]))
    assert len(recording.events) == 1
    assert recording.thread_names == {("100", "7"): "thread 7 (worker)"}
    assert [(note.count, note.example) for note in recording.notes] == [(1, "1 of phase 'C'")]


def test_control_characters_and_bad_utf8_are_repaired(tmp_path: Path) -> None:
    text = json.dumps(document([op("aten::mm", 1, 2)])).encode().replace(b"aten::mm", b"a\x01b\nc\xff")
    recording = read_recording(write(tmp_path / "t.json", text))
    assert recording.events["name"].to_list() == ["a b c\ufffd"]
    assert whats(recording) == ["bytes that are no UTF-8, replaced", "control characters, replaced by spaces"]


EVENT = '{"ph":"X","cat":"kernel","name":"%s","pid":0,"tid":7,"ts":1,"dur":2%s}'


@pytest.mark.parametrize(
    "form", ["[%s]", '{"schemaVersion":1,"traceEvents":[%s]}', '[%s,{"ph":3}]', '[%s,{"ph":"X"},{,}]']
)
@pytest.mark.parametrize(
    ("spelled", "read", "halves"),
    [
        (r"b\ud800c", "b\ufffdc", 1),
        (r"b\uDC00", "b\ufffd", 1),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600", 1),  # a half, and then a pair
        (r"\ude00\ud83d", "\ufffd\ufffd", 2),
        (r"b\\ud800c", r"b\ud800c", 0),  # a backslash, and then letters
        (r"b\\\ud800", "b\\\ufffd", 1),
        (r"\ud83d\ude00", "\U0001f600", 0),
    ],
)
def test_half_a_character_does_not_cost_its_event(
    tmp_path: Path, form: str, spelled: str, read: str, halves: int
) -> None:
    path = tmp_path / "t.json"
    path.write_text(form % ",".join((EVENT % ("a", ""), EVENT % (spelled, ""), EVENT % ("d", ""))))
    recording = read_recording(path)
    assert recording.events["name"].to_list()[:3] == ["a", read, "d"]
    assert [note.count for note in recording.notes if "halves" in note.what] == ([halves] if halves else [])


def test_half_a_character_in_arguments_and_in_the_header(tmp_path: Path) -> None:
    arguments = r',"args":{"\ud800":"\udfff","correlation":5}'
    path = tmp_path / "t.json"
    path.write_text('{"host_name":"\\ud800","traceEvents":[%s]}' % (EVENT % ("a", arguments)))
    recording = read_recording(path)
    assert recording.events.select("name", "correlation").rows() == [("a", 5)]
    assert recording.header["host_name"] == "\ufffd"


def test_a_damaged_block_keeps_events_that_can_be_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between the events is no JSON, so that each event is looked at alone."""
    monkeypatch.setattr("fsdpviz.trace.kineto.events._DAMAGED_BYTES", 1000)
    monkeypatch.setattr("fsdpviz.trace.kineto.blocks.BLOCK_BYTES", 2000)
    path = tmp_path / "t.json"
    half, many = r"b\ud800", ",".join(EVENT % (f"n{number}", "") for number in range(100))
    path.write_text(f"[{EVENT % (half, '')},{{,}},{EVENT % ('c' + chr(1), '')},{many}]")
    assert read_recording(path).events["name"].to_list()[:3] == ["b\ufffd", "c ", "n0"]


@pytest.mark.parametrize(
    "before",
    [
        '"extra":{"traceEvents":[%s]}',
        '"extra":[[{"a":1,"traceEvents" : [%s]}]]',
        '"extra":{"traceEvents":[%s]},"more":{"note":"}]{","traceEvents":[%s]}',
        '"bad":"\x01","extra":{"traceEvents":[%s]}',
    ],
)
def test_a_list_of_that_name_in_another_value_is_not_the_file_s(tmp_path: Path, before: str) -> None:
    path = tmp_path / "t.json"
    nested = before.replace("%s", EVENT % ("wrong", ""))
    own = '"host_name":"h","traceEvents":[' + EVENT % ("right", "") + '],"baseTimeNanoseconds":7'
    path.write_text("{" + nested + "," + own + "}")
    recording = read_recording(path)
    assert recording.events.select("name", "start_ns").rows() == [("right", 1007)]
    assert recording.header["host_name"] == "h"
    assert recording.notes == ()


def test_a_list_that_is_in_another_value_only_is_read_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"extra":{"traceEvents":[%s]}}' % (EVENT % ("a", "")))
    recording = read_recording(path)
    assert recording.events["name"].to_list() == ["a"]
    assert "traceEvents inside another value, read as the file's own" in [note.what for note in recording.notes]


def test_nan_in_arguments_is_read_past(tmp_path: Path) -> None:
    text = json.dumps(document([op("aten::mm", 1, 2, flops=float("nan"), bandwidth=float("-inf"))]))
    assert "NaN" in text
    recording = read_recording(write(tmp_path / "t.json", text))
    assert times(recording) == [(1000, 2000)]
    assert recording.notes[0].count == 2


@pytest.mark.parametrize("as_list", [True, False])
def test_a_file_cut_short_gives_its_whole_events(tmp_path: Path, as_list: bool) -> None:
    events = [op(f"aten::op{index}", index, 1) for index in range(3)]
    text = json.dumps(events if as_list else document(events, rank=3))
    for cut in range(text.index("aten::op2"), len(text)):
        recording = read_recording(write(tmp_path / "t.json", text[:cut]))
        names = recording.events["name"].to_list()
        assert names[:2] == ["aten::op0", "aten::op1"]
        assert recording.rank == (None if as_list else 3)
        assert "file cut short; what is whole was read" in whats(recording) or len(names) == 3


def test_gzip_cut_in_the_middle_gives_its_whole_events(tmp_path: Path) -> None:
    # random names, so that the packed file is long enough to be cut
    events = [op(f"aten::{hash(str(index)) & 0xFFFFFFFF:x}", index, 1) for index in range(2000)]
    packed = gzip.compress(json.dumps(document(events)).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    recording = read_recording(path)
    assert 100 < len(recording.events) < 2000
    assert times(recording) == [(index * 1000, 1000) for index in range(len(recording.events))]
    assert whats(recording)[0] == "gzip stream that ends too early; what is whole was read"


def test_gzip_in_several_members_is_one_file(tmp_path: Path) -> None:
    text = json.dumps(document([op("aten::mm", 1, 2)])).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:40]) + gzip.compress(text[40:]))
    assert times(read_recording(path)) == [(1000, 2000)]
    assert read_recording(path).notes == ()


def test_odd_entries_are_left_out_and_counted(tmp_path: Path) -> None:
    events = [op("aten::mm", 1, 2), 5, None, {**op("aten::odd", 3, 1), "args": "text"}, ["x"]]
    recording = read_recording(write_trace(tmp_path / "t.json", events))
    assert recording.events["name"].to_list() == ["aten::mm", "aten::odd"]
    assert [(note.what, note.count) for note in recording.notes] == [
        ("entries of traceEvents that are no events, left out", 3)
    ]


def test_missing_and_negative_times_are_noted(tmp_path: Path) -> None:
    lost, endless = op("lost", 0, 1), op("endless", 5, 1)
    del lost["ts"], endless["dur"]
    recording = read_recording(write_trace(tmp_path / "t.json", [lost, endless, op("backwards", 6, -2)]))
    assert times(recording) == [(5000, 0), (6000, 0)]
    assert {note.what: note.example for note in recording.notes} == {
        "spans without a start time, left out": "lost",
        "spans without a duration, taken as 0": "endless",
        "negative durations, taken as 0": "backwards",
    }


@pytest.mark.parametrize("more", [{}, {"odd": True}])  # read by the scanner, and past it
def test_a_range_that_was_open_when_the_profiler_stopped_is_noted(tmp_path: Path, more: dict) -> None:
    left = mark("gloo:all_gather", 1, 9, finished=False) | ({"tid": 1.5} if more else {})
    recording = read_recording(write_trace(tmp_path / "t.json", [op("a", 0, 1, finished=True), left], rank=0))
    noted = [note for note in recording.notes if note.what.startswith("ranges still open")]
    assert [(note.count, note.example) for note in noted] == [(1, "gloo:all_gather")]


def test_names_and_ids_of_any_type_become_text(tmp_path: Path) -> None:
    events = [
        {**op("x", 1, 1), "name": 5, "pid": None, "tid": 1.5, "cat": None},
        op("y", 2, 1, correlation="no"),
    ]
    frame = read_recording(write_trace(tmp_path / "t.json", events)).events
    assert frame.select("category", "name", "process", "thread").row(0) == ("", "5", "", "1.5")
    assert frame["correlation"].to_list() == [None, None]


def test_a_collective_kernel_tells_its_payload(tmp_path: Path) -> None:
    args = {
        "Collective name": "_allgather_base",
        "In msg nelems": 25136,
        "Out msg nelems": 201088,
        "dtype": "BFloat16",
        "Process Group Name": "3",
    }
    kernel = span("kernel", "ncclDevKernel_AllGather", 1, 1, process=0, thread=7, **args)
    message = read_recording(write_trace(tmp_path / "t.json", [kernel])).messages[0]
    assert (message.collective, message.payload_bytes, message.group) == ("_allgather_base", 402176, "3")


def test_tensor_sizes_of_communicating_operators(tmp_path: Path) -> None:
    dims: dict[str, Any] = {
        "Input Dims": [[8, 4], [[2, 3], [5]], []],
        "Input type": ["c10::Half", "TensorList", ""],
    }
    events = [mark("gloo:all_reduce", 1, 1, **dims), op("aten::mm", 1, 1, **dims)]
    tensors = read_recording(write_trace(tmp_path / "t.json", events)).tensors
    assert list(tensors) == [0]
    assert (tensors[0].elements, tensors[0].dtypes) == ((32, 11), ("float16", None))


@pytest.mark.parametrize(
    ("dims", "types", "elements", "total_bytes"),
    [
        # a tensor without sizes is one number; without a type it is no tensor
        ([[], []], ["float", ""], (1,), 4),
        ([[], [], []], ["Scalar", "Int", "Bool"], (), None),  # numbers; 2020's have tags like types
        ([[[], [3]], []], ["TensorList", ""], (4,), None),
        ([[], [[5]]], ["", "TensorList"], (5,), None),
        ([[0], [7]], ["float", "float"], (0, 7), 28),
        ([[3], [4]], ["float", "c10::BFloat16"], (3, 4), 20),
        ([[3], [4]], ["float"], (3, 4), None),  # one type of two
        ([[], [2, 3]], [], (6,), None),
        # more than any tensor has
        ([[2] * 65, [3]], ["float", "float"], (3,), 12),
        ([[2**61, 2**61], [-1], [10**30], [3]], ["float"] * 4, (3,), 12),
        ([[1] * 64], ["float"], (1,), 4),
    ],
)
def test_elements_of_tensors(tmp_path: Path, dims: Any, types: Any, elements: Any, total_bytes: int | None) -> None:
    event = mark("gloo:all_reduce", 1, 1, **{"Input Dims": dims, "Input type": types})
    (tensors,) = read_recording(write_trace(tmp_path / "t.json", [event])).tensors.values()
    assert (tensors.elements, tensors.total_bytes) == (elements, total_bytes)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"hello", "is not JSON"),
        (b"{}", "no list traceEvents"),
        (b'{"traceEvents": 5}', "no list traceEvents"),
        (b"[1, 2]", "nothing in it is an event"),
        (b'{"traceEvents": []}', "nothing in it is an event"),
        (b"[]", "nothing in it is an event"),
        (b'{"a": ', "no whole event"),
        (b'{"traceEvents": [{"ph": "X"', "no whole event"),
        (b"[" * 100_000, "no"),
        (b"SQLite format 3\0...", "SQLite"),
        (b"\x80\x04pickle", "pickle"),
        (b"PK\x03\x04", "zip"),
        (gzip.compress(b'{"traceEvents": []}')[:12], "damaged gzip"),
        (b"\x1f\x8bnonsense", "damaged gzip"),
    ],
)
def test_what_is_no_trace_says_so_in_one_line(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_recording(path)
    message = str(caught.value)
    assert str(path) in message
    assert cause in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("is_packed", "cause"), [(False, r"\(JSON is malformed"), (True, r"\(damaged gzip, cut short\)")]
)
def test_only_a_damaged_gzip_is_called_one(tmp_path: Path, is_packed: bool, cause: str) -> None:
    """Where no event is whole, and more of them than are read at once."""
    damaged = b"[" + b",".join(b'{"ph": "X", "name": "a", "ts": %dx}' % ts for ts in range(50_000))
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(damaged)[:-20] if is_packed else damaged + b"]")
    with pytest.raises(TraceError, match=cause):
        read_recording(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_recording(tmp_path / "absent.json")


WHOLE = json.dumps(document([op(f"aten::op{index}", index, 1) for index in range(4)], rank=1)).encode()
PIECES = (b"null", b'"', b"}", b"[", b"1e999", b"\x00", b"\xff", b"NaN", b"9" * 30, b"\n", b'"\\ud800"')


@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 30), st.sampled_from(PIECES) | st.binary(max_size=4)),
        max_size=4,
    )
)
def test_mutated_bytes_end_in_a_trace_or_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int, bytes]]
) -> None:
    data = bytearray(WHOLE)
    for position, length, piece in changes:
        data[position : position + length] = piece
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(bytes(data))
    try:
        read_recording(path)
    except TraceError as error:
        assert "\n" not in str(error).replace(str(path), "")


@pytest.mark.skipif(not KINETO.is_dir(), reason="the shared recordings are not here")
def test_every_span_of_real_recordings_is_kept_to_the_ns() -> None:
    small = [path for path in KINETO.rglob("*.json.gz") if path.stat().st_size < 800_000]
    assert len(small) > 20
    for path in sorted(small):
        raw = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal, strict=False)
        events = raw if isinstance(raw, list) else raw["traceEvents"]
        base = 0 if isinstance(raw, list) else raw.get("baseTimeNanoseconds", 0)
        spans = [event for event in events if event.get("ph") == "X"]
        expected = [(int(Decimal(e["ts"]) * 1000) + base, int(Decimal(e["dur"]) * 1000)) for e in spans]
        recording = read_recording(path)
        assert times(recording) == expected, path.name
        assert recording.events["name"].to_list() == [event["name"] for event in spans], path.name
