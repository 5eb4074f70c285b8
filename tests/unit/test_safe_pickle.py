"""Pickles of strangers: plain values come out, and nothing else happens."""

from __future__ import annotations

import gzip
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpviz.base.errors import TraceError
from fsdpviz.trace.dumps import safe_pickle
from fsdpviz.trace.dumps.safe_pickle import load_pickle, loads_plain

PLAIN = {"a": [1, -2, 2**70, 2.5, True, None, "é" * 300, ("x", ())], "b": {"c": []}}
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


class Harmful:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Harmful, "ran", True)


@given(plain_values, st.integers(0, 5))
def test_reading_back_equals_what_was_written(value: Any, protocol: int) -> None:
    assert loads_plain(pickle.dumps(value, protocol), "t") == value


def test_bytes_and_sets_come_out_of_newer_protocols() -> None:
    assert loads_plain(pickle.dumps((b"x", {1, 2}, frozenset({3})), 4), "t") == (b"x", {1, 2}, frozenset({3}))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("value", "called"),
    [(os.system, "posix.system|nt.system"), (Path("x"), "pathlib"), (Harmful(), "setattr"), (1j, "complex")],
)
def test_whatever_imports_is_refused_by_name(value: Any, called: str, protocol: int) -> None:
    with pytest.raises(TraceError, match=f"job.pickle would import .*(?:{called}).*not done") as caught:
        loads_plain(pickle.dumps([value], protocol), "job.pickle")
    assert "\n" not in str(caught.value)
    assert not Harmful.ran


def test_the_unpickler_refuses_by_itself_too() -> None:
    """The walk over the opcodes is the first lock; this is the second."""
    harmful = pickle.dumps(Harmful())
    with pytest.raises(pickle.UnpicklingError, match=r"would import builtins\.setattr"):
        safe_pickle._Refusing(__import__("io").BytesIO(harmful)).load()
    assert not Harmful.ran
    assert pickle.loads(harmful) is None  # and it would have
    assert Harmful.ran
    Harmful.ran = False


def test_every_opcode_of_python_is_known() -> None:
    known = {*safe_pickle._FIXED, *safe_pickle._COUNTED, *safe_pickle._LINES, *safe_pickle._IMPORTS}
    known |= safe_pickle._TUPLES | {safe_pickle._STOP, safe_pickle._LONG_BINPUT}
    assert {ord(opcode.code) for opcode in pickletools.opcodes} == known


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "cut short"),
        (b"\x80\x04]", "cut short"),
        (pickle.dumps(PLAIN)[:40], "cut short"),
        (b"\x80\x04\xff.", "is no opcode"),
        (b"\x80\x04a.", "damaged pickle"),
        (b"\x80\x02]r\xff\xff\xff\x7f.", "memo slot"),  # 32 GiB of memo for 9 bytes
        (b"]p9999999999\n.", "memo slot"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "cut short"),
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.", "BYTEARRAY8"),
        (b"I" + b"9" * 10_000 + b"\n.", "damaged pickle"),
        (b"]" * 2_000_000 + b".", "empty containers"),
        (b"\x80\x04)" + b"\x85" * 50_001 + b".", "50,000 tuples"),
        (b"\x80\x04}]K\x01s.", "damaged pickle"),  # a list as a key
    ],
)
def test_damaged_and_hostile_pickles(data: bytes, cause: str) -> None:
    with pytest.raises(TraceError, match=cause) as caught:
        loads_plain(data, "job.pickle")
    assert "\n" not in str(caught.value)
    assert "job.pickle" in str(caught.value)


def test_deep_nesting_does_no_harm() -> None:
    depth = 100_000
    value = loads_plain(b"\x80\x04" + b"]" * depth + b"a" * (depth - 1) + b".", "t")
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


@given(st.binary(max_size=300), st.data())
def test_mutated_bytes_never_crash(noise: bytes, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps(PLAIN, data.draw(st.integers(0, 5))))
    at = data.draw(st.integers(0, len(whole)))
    whole[at : at + data.draw(st.integers(0, 20))] = noise[: data.draw(st.integers(0, 20))]
    for mutated in (bytes(whole), noise):
        try:
            loads_plain(mutated, "t")
        except TraceError as error:
            assert "\n" not in str(error)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed, cut = (tmp_path / name for name in ("a", "b", "c"))
    plain.write_bytes(pickle.dumps(PLAIN))
    packed.write_bytes(gzip.compress(pickle.dumps(PLAIN)))
    cut.write_bytes(gzip.compress(os.urandom(100) + pickle.dumps(PLAIN))[:60])
    assert load_pickle(plain) == load_pickle(packed) == PLAIN
    with pytest.raises(TraceError, match="cut short"):
        load_pickle(cut)
    with pytest.raises(TraceError, match="cannot be read"):
        load_pickle(tmp_path / "absent")
    monkeypatch.setattr(safe_pickle, "MAX_PICKLE_BYTES", 10)
    for path in (plain, packed):
        with pytest.raises(TraceError, match=f"{path} is larger than 10 B"):
            load_pickle(path)
