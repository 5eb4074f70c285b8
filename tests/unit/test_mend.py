"""Text that profilers wrote and that is nearly JSON: what was meant is read and counted, nothing else is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from growth import LINEAR, growth
from hypothesis import given, settings
from hypothesis import strategies as st
from make_trace import write

from fsdpviz.trace import open_trace
from fsdpviz.trace.kineto import blocks
from fsdpviz.trace.kineto.mend import Mender, filled
from fsdpviz.trace.kineto.reader import Recording, read_recording
from fsdpviz.trace.kineto.repair import clean

EVENT = '{"ph": "X", "cat": "cpu_op", "name": %s, "pid": 1, "tid": 2, "ts": %s, "dur": 3, "args": {"External id": 1%s}}'
MISSING, NOT_FINITE = "values that are missing, read as null", "NaN or infinity where JSON has none, read as null"
UNQUOTED, QUOTES = "texts without quotes, read as they are", "quotes inside a text, read as a part of it"
BACKSLASHES, COMMAS = "backslashes that escape nothing, read as they are", "commas that separate nothing, left out"
HALF_QUOTED, LEFT_OUT = "keys without their first quote", "events that are no JSON, left out"
AROUND = "damage around the events; some of what it says was read"


def event(name: str = '"b"', start: str = "5", more: str = "") -> str:
    return EVENT % (name, start, more)


def file(*events: str, before: str = "", after: str = "") -> str:
    """A file's text; ``before`` and ``after`` stand around the list of events."""
    return "{" + before + '"traceEvents": [' + ",\n".join(events) + "]" + after + "}"


def counts(recording: Recording) -> dict[str, int]:
    return {note.what: note.count for note in recording.notes}


@pytest.fixture(params=["list", "object", "indented", "in small blocks", "last"])
def reads(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads an event that is damaged, twice, among others that are not."""

    def read(damaged: str) -> Recording:
        if request.param == "in small blocks":
            monkeypatch.setattr(blocks, "BLOCK_BYTES", 250)
        events = [event('"a"', "1"), damaged, event('"c"', "9"), damaged]
        events += [] if request.param == "last" else [event('"e"', "11")] * 5
        between = ",\n    " if request.param == "indented" else ","
        text = "[%s]" if request.param == "list" else '{"traceEvents": [\n%s\n], "baseTimeNanoseconds": 0}'
        return read_recording(write(tmp_path / "t.json", text % between.join(events)))

    return read


# -- an event that is mended

MENDED = [
    (event(more=', "Process Group Description": , "dtype": "float"'), "b", {MISSING: 1}),
    (event(more=', "memory bandwidth (GB/s)":  '), "b", {MISSING: 1}),
    (event(more=', "Input Dims": [[1], , [2]]'), "b", {MISSING: 1}),
    (event(more=', "a": nan, "b": -NaN, "c": Inf, "d": -infinity, "e": -nan(ind)'), "b", {NOT_FINITE: 5}),
    (event(more=', "a": -1.#IND, "b": 1.#INF, "c": 1.#QNAN'), "b", {NOT_FINITE: 3}),
    (event(more=', "a": [NaN, 1], "b": [[2, inf]]'), "b", {NOT_FINITE: 2}),
    (event(more=', "memory bandwidth (GB/s)": N/A, "b": mesh_fsdp, "c": 0:tp, "d": 0x7f'), "b", {UNQUOTED: 4}),
    (event("aten::mm"), "aten::mm", {UNQUOTED: 1}),
    (event('"{"device": "cpu", "dtype": "x"}(12): run"'), '{"device": "cpu", "dtype": "x"}(12): run', {QUOTES: 1}),
    (event('"<x> {"a": {"b"}, {"c"}}(5): f"'), '<x> {"a": {"b"}, {"c"}}(5): f', {QUOTES: 1}),
    (event('"L("_ind", "IMPL")(1): <module>"'), 'L("_ind", "IMPL")(1): <module>', {QUOTES: 1}),
    (event('""""One quote is left(1): f"'), '"""One quote is left(1): f', {QUOTES: 1}),
    (event('"a"b", "id": "5"'), 'a"b', {QUOTES: 1}),
    (event('"a"b", "cname": "good", "bp": "e"'), 'a"b', {QUOTES: 1}),
    (event('"a \\" and " b"'), 'a " and " b', {QUOTES: 1}),
    (event(more=', "Call stack": "f("a", b); g", "x": "c"'), "b", {QUOTES: 1}),
    (event(r'"C:\Users\x\torch\nn(1): f"'), r"C:\Users\x\torch\nn(1): f", {BACKSLASHES: 1}),
    (event(r'"C:\x\"'), "C:\\x\\", {BACKSLASHES: 1}),
    (event(r'"\x \\ \" \u0041"'), r"\x \ " + '" A', {BACKSLASHES: 1}),
    (event(more=", "), "b", {COMMAS: 1}),
    (event(more=', , "a": [1, 2,]'), "b", {COMMAS: 2}),
    (event().replace('"tid"', 'tid"'), "b", {HALF_QUOTED: 1}),
    (event().replace('"ph"', 'ph"'), "b", {HALF_QUOTED: 1}),
    (event('"f(x: nan, y:, z)"', more=', "a": '), "f(x: nan, y:, z)", {MISSING: 1}),
    (event('"a\nb "c""', more=', "a": NaN'), 'a b "c"', {QUOTES: 1, NOT_FINITE: 1}),
]


@pytest.mark.parametrize(("damaged", "name", "found"), MENDED)
def test_what_was_meant_is_read(reads: Any, damaged: str, name: str, found: dict[str, int]) -> None:
    recording = reads(damaged)
    rows = recording.events.select("name", "thread", "start_ns", "duration_ns").rows()
    assert rows[:4] == [
        ("a", "2", 1000, 3000),
        (name, "2", 5000, 3000),
        ("c", "2", 9000, 3000),
        (name, "2", 5000, 3000),
    ]
    assert counts(recording) == {what: 2 * count for what, count in found.items()}


def test_only_a_mended_event_has_a_note(reads: Any) -> None:
    assert counts(reads(event('"f(x: nan, y:, z) }, {"', more=', "a": [{"ph": 1}, {"ph": ",]"}]'))) == {}


def collective(description: str) -> str:
    arguments = (
        f', "Collective name": "_allgather_base", "In msg nelems": 4, "Out msg nelems": 8, "Group size": 2, '
        f'"dtype": "Float", "Process Group Name": "3", "Process Group Description": {description}, '
        f'"Process Group Ranks": "[0, 1]"'
    )
    return event('"ncclDevKernel_AllGather_RING_LL"', more=arguments).replace("cpu_op", "kernel")


@pytest.mark.parametrize(("description", "read"), [("", None), ("mesh_shard", "mesh_shard"), ('"tp"', "tp")])
def test_a_collective_keeps_what_is_beside_a_damaged_description(
    tmp_path: Path, description: str, read: str | None
) -> None:
    path = write(tmp_path / "rank0.json", file(event('"a"'), collective(description)))
    trace = open_trace(path, cache=False)
    assert trace.collectives.select("kind", "bytes", "group_size", "group").rows() == [("all_gather", 32, 2, "3")]
    assert trace.groups["description"].to_list() == [read]
    notes = {note.what: note.example for note in trace.notes}
    assert notes.get(MISSING if read is None else UNQUOTED, "").startswith("" if read == "tp" else '"Process Group De')


# -- what is not guessed


@pytest.mark.parametrize(
    "damaged",
    [
        event().replace('"b",', '"b"'),  # a comma is missing, or the quotes are the name's
        event('"b'),  # where the name ends is not known
        event().replace('"cpu_op"', '"cpu"op"'),  # no category has quotes
        event(start="1?0"),
        event(start="soon"),
        event().replace('"tid": 2', '"tid": two'),
        event(more=', "a": "say "b", "c": "d"'),
        event(more=', "a": "the "b", "c": 1, "d": "my "e"'),  # one text or three arguments
        event(more=', "a": ["the "b"], "c": "my "e"'),
        event(more=r', "a": "the b\", "c": "d"e"'),
        event(more=', "a": [1'),
        event(more=', "a": 007x:"'),
    ],
)
def test_what_may_be_read_in_two_ways_is_left_out(reads: Any, damaged: str) -> None:
    recording = reads(damaged)
    assert [name for name in recording.events["name"] if name != "e"] == ["a", "c"]
    assert counts(recording) == {LEFT_OUT: 2}


def test_an_event_is_kept_where_only_what_follows_it_is_damaged(reads: Any) -> None:
    recording = reads(event() + "}")
    assert [name for name in recording.events["name"] if name != "e"] == ["a", "b", "c", "b"]
    assert counts(recording) == {LEFT_OUT: 2}


def test_events_that_are_left_out_are_counted_as_events(tmp_path: Path) -> None:
    """The names hold what stands between events, and a list of objects follows."""
    damaged = event('"{"a"}, {"b"}" c', more=', "a": [{"x": 1}, {"x": 2}, {"x": 3}]')
    events = [event('"a"'), damaged, damaged, event('"c"'), damaged, event('"d"')]
    recording = read_recording(write(tmp_path / "t.json", file(*events)))
    assert recording.events["name"].to_list() == ["a", "c", "d"]
    assert counts(recording) == {LEFT_OUT: 3}


def test_a_damaged_last_event_does_not_cost_what_follows_the_list(tmp_path: Path) -> None:
    text = file(event('"a"'), event('"b" c'), after=', "baseTimeNanoseconds": 7')
    recording = read_recording(write(tmp_path / "t.json", text))
    assert recording.events.select("name", "start_ns").rows() == [("a", 5007)]
    assert counts(recording) == {LEFT_OUT: 1}


# -- around the events

INFO = '"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}, "baseTimeNanoseconds": 1000'
LOG = '"INFO": ["handleCuda "event_id": 5, "stream": 7"]'


@pytest.mark.parametrize(
    "text",
    [
        file(event(), before=f"{LOG}, {INFO}, "),
        file(event(), after=f", {INFO}, {LOG}"),
        file(event(), before='"host_name": , ', after=f", {INFO}"),
    ],
)
def test_a_header_that_is_mended(tmp_path: Path, text: str) -> None:
    recording = read_recording(write(tmp_path / "t.json", text))
    assert recording.events["start_ns"].to_list() == [6000]
    assert recording.rank == 3
    assert [note.count for note in recording.notes] == [1]
    assert recording.notes[0].what in (QUOTES, MISSING)


ODD = '"INFO": ["one " quote", 5 6]'  # so that all brackets behind it seem to stand in strings, or the reverse


@pytest.mark.parametrize(
    "text",
    [
        file(event(), before=f"{ODD}, {INFO}, "),
        file(event(), before=f"{INFO}, {ODD}, ", after=', "traceName": "t"'),
        file(event(), after=f", {ODD}, {INFO}"),
        file(event(), after=f", {INFO}, {ODD}"),
        file(event(), after=", " + INFO.replace("8}", '8, "pg_config": [{]}')),
        file(event(), after=f', {INFO}, "traceName": "cu')[:-1],
    ],
)
def test_a_header_beyond_mending_is_read_key_by_key(tmp_path: Path, text: str) -> None:
    recording = read_recording(write(tmp_path / "t.json", text))
    assert recording.events["start_ns"].to_list() == [6000]
    assert recording.rank == 3
    assert recording.header["distributedInfo"]["world_size"] == 8
    assert AROUND in counts(recording)


def test_damage_around_the_events_is_not_silent(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "t.json", file(event(), after=", 5")))
    assert [(note.what, note.example) for note in recording.notes] == [(AROUND, "nothing")]


def test_a_whole_header_has_no_note(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "t.json", file(event(), before=f"{INFO}, ")))
    assert (recording.rank, recording.notes) == (3, ())


# -- any text

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(deadline=None)
@given(made=st.lists(json_values, max_size=4), indent=st.sampled_from([None, 0, 2]), ascii=st.booleans())
def test_json_is_not_mended(made: list[Any], indent: int | None, ascii: bool) -> None:
    text = clean(json.dumps({"a": made}, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace"))[0]
    mender = Mender(text)
    assert mender.value(0) == (text, len(text))
    assert mender.notes == []
    assert filled(text) == (text, [])


PIECES = [*'{}[]",:\\ -.0123eE+nau', '{"ph": ', '"name": ', "null", '"a"', "}, {", "]}", '\\"', "NaN", "-nan(ind)"]


@settings(deadline=None, max_examples=500)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40), is_last=st.booleans())
def test_what_is_mended_is_json(pieces: list[str], is_last: bool) -> None:
    text = "".join(pieces).encode()
    for text_of_event in Mender(text).events(0, is_last=is_last).texts:
        msgspec.json.decode(text_of_event)
    if found := Mender(text).value(0):
        msgspec.json.decode(found[0])


# -- how long it takes

ALL_ALIKE = [
    event(more=', "a": '),
    event(more=', "a": [NaN]'),
    event('"{"device": "cpu"}(1): f"'),
    event(r'"C:\x"'),
    event('"a" b'),
    event('"b').replace(": 2", ": "),
    event('"a" b').replace(', "args"', ""),
    '{"name": "a"b", "x": 1}',
    '{"args": {"name": "a"b", "x": 1}}',
]


@pytest.mark.parametrize("damaged", ALL_ALIKE)
def test_a_file_in_which_each_event_is_damaged(tmp_path: Path, damaged: str) -> None:
    def file_of(times: int) -> Path:
        return write(tmp_path / f"{times}.json", file(event(), *[damaged] * times))

    assert growth(read_recording, file_of, 200) < LINEAR


@pytest.mark.parametrize(
    "part", [rb"\"", b'"', b"\\", b'"a":', b":", b":,", b"[", b'{"args":[{},', b'{"ph":"', rb'\},{"name":[["x ', b"},{"]
)
def test_texts_made_to_take_long(part: bytes) -> None:
    def mended(text: bytes) -> None:
        filled(text)
        Mender(text).events(0, is_last=True)
        Mender(text).value(0)

    for begin in (b'{"a', b'{"a":', b""):
        assert growth(mended, lambda times, begin=begin: begin + part * times, 500) < LINEAR
