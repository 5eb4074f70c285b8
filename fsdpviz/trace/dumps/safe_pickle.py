"""Reads pickles that strangers wrote: only plain values come out, nothing is imported and nothing is called.

A pickle is a program. Before it runs, its opcodes are walked: those that import, call or build anything are refused
by name, and so are those that make the unpickler take memory that the file does not pay for (a memo slot far beyond
the file's length, containers by the million). What is left can make dict, list, tuple, set, str, bytes, int, float,
bool and None only. The unpickler that then runs refuses every class once more.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

from ...base.errors import TraceError
from ..files.limits import MAX_PICKLE_BYTES
from ..table import Note
from .whole import read_whole

# opcode → bytes of its argument
_FIXED = {
    **dict.fromkeys(b"()012Nadelsu]}\x88\x89\x8f\x90\x91\x94", 0),
    **dict.fromkeys(b"Khq\x80", 1),
    ord("M"): 2,
    **dict.fromkeys(b"Jj", 4),
    ord("G"): 8,
    0x95: 8,  # FRAME
}
# opcode → width of the length that stands before its argument
_COUNTED = {
    **dict.fromkeys(b"UC\x8a\x8c", 1),
    **dict.fromkeys(b"TBX\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e", 8),
}
_TUPLES = frozenset(b"t\x85\x86\x87")
_LINES = frozenset(b"FILSVgp")  # protocol 0: the argument ends with the line
_IMPORTS = {
    ord("c"): "GLOBAL",
    ord("i"): "INST",
    ord("o"): "OBJ",
    ord("R"): "REDUCE",
    ord("b"): "BUILD",
    0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX",
    0x93: "STACK_GLOBAL",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    0x96: "BYTEARRAY8",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}
_STOP, _LONG_BINPUT, _PUT = ord("."), ord("r"), ord("p")
_CONTAINER_BYTES = 64  # an empty list or dict takes one byte of pickle and 56 or 64 of memory
_MAX_GROWTH = 16  # containers over the file's size; real snapshots stay below 6
_FREE_BYTES = 64 << 20
_MAX_TUPLES = 50_000  # a tuple of tuples of tuples … is hashed by recursion in C, which ends the process near 100,000
_WRONG_PICKLE = (
    pickle.UnpicklingError,
    ValueError,  # UnicodeDecodeError among them
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class _Refusing(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it would import {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside itself")


def load_pickle(path: Path, name: str = "") -> Any:
    """The plain values that the file holds, gzipped or not; ``name`` is what an error calls it.

    Raises TraceError, one line, for a pickle that imports or calls anything, is damaged, or is larger than
    MAX_PICKLE_BYTES. At most ``_MAX_GROWTH`` times the file's size goes into containers.
    """
    name = name or str(path)
    notes: list[Note] = []
    data = read_whole(path, name, MAX_PICKLE_BYTES, notes)
    if notes:
        raise TraceError(f"{name} is a gzip file that was cut short, and a pickle must be whole")
    return loads_plain(data, name)


def loads_plain(data: bytes, name: str) -> Any:
    """The plain values of a pickle's bytes. Raises TraceError as ``load_pickle`` does."""
    _check(data, name)
    try:
        return _Refusing(io.BytesIO(data)).load()
    except _WRONG_PICKLE as error:
        raise TraceError(f"{name} is a damaged pickle: {_short(error)}") from error
    except MemoryError as error:
        raise TraceError(f"{name} is a pickle that needs more memory than there is") from error


def _short(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:120]


def _check(data: bytes, name: str) -> None:
    """Raises TraceError unless every opcode up to STOP makes plain values and takes bounded memory."""
    containers = sum(data.count(opcode) for opcode in (b"]", b"}", b")", b"\x8f"))
    if containers * _CONTAINER_BYTES > _MAX_GROWTH * len(data) + _FREE_BYTES:
        raise TraceError(f"{name} is a pickle of little else than empty containers: no recording, and not loaded")
    cheap = _cheap_run(len(data))
    position, end, tuples = 0, len(data), 0
    while True:
        run = cheap.match(data, position)
        position = run.end() if run else position
        if position >= end:
            raise TraceError(f"{name} is a pickle that was cut short, and a pickle must be whole")
        opcode = data[position]
        if opcode == _STOP:
            return
        if opcode in _TUPLES:
            tuples += 1
            position += 1
            if tuples > _MAX_TUPLES:
                raise TraceError(f"a pickle may hold {_MAX_TUPLES:,} tuples; {name} holds more. Dump it as JSON")
        else:
            position = min(_after(data, position, opcode, name), end)


def _after(data: bytes, position: int, opcode: int, name: str) -> int:
    """Where the next opcode stands, for one that the fast run stopped at."""
    start = position + 1
    if opcode in _COUNTED:
        width = _COUNTED[opcode]
        return start + width + int.from_bytes(data[start : start + width], "little")
    if opcode in _FIXED:  # its argument is cut off
        return start + _FIXED[opcode]
    if opcode in _LINES:
        line_end = data.find(b"\n", start)
        if opcode == _PUT and not _is_slot(data[start:line_end], len(data)):
            raise TraceError(f"{name} is a damaged pickle: a memo slot beyond its own length")
        return line_end + 1 if line_end >= 0 else len(data)
    if opcode == _LONG_BINPUT:
        raise TraceError(f"{name} is a damaged pickle: a memo slot beyond its own length")
    if opcode in _IMPORTS:
        raise TraceError(
            f"a pickle is opened only if it holds plain values; {name} {_what_it_wants(data, start, opcode)} "
            f"({_IMPORTS[opcode]}), which was not done"
        )
    raise TraceError(f"{name} is not a pickle, or a damaged one: byte {opcode:#04x} at {position} is no opcode")


def _is_slot(text: bytes, size: int) -> bool:
    return text.strip().isdigit() and len(text) < 12 and int(text) <= size


def _what_it_wants(data: bytes, start: int, opcode: int) -> str:
    if _IMPORTS[opcode] in ("GLOBAL", "INST"):
        module, global_name = [*data[start : start + 200].split(b"\n"), b"", b""][:2]
        return f"would import {_plain(module)}.{_plain(global_name)}"
    if _IMPORTS[opcode] == "STACK_GLOBAL":
        names = re.findall(rb"\x8c.([\w.]{1,80})|X....([\w.]{1,80})", data[max(0, start - 250) : start], re.DOTALL)
        return f"would import {'.'.join(_plain(short or long) for short, long in names[-2:]) or 'a class'}"
    return "would make an object of a class"


def _plain(text: bytes) -> str:
    return re.sub(r"[^\w.]", "?", text.decode("ascii", "replace"))[:80]


def _cheap_run(size: int) -> re.Pattern[bytes]:
    """Matches the longest run of opcodes whose arguments have a fixed size. Memo slots must lie inside ``size``."""
    by_width: dict[int, list[int]] = {}
    for opcode, width in _FIXED.items():
        by_width.setdefault(width, []).append(opcode)
    parts = [
        b"[" + b"".join(re.escape(bytes([opcode])) for opcode in opcodes) + b"]" + b"." * width
        for width, opcodes in sorted(by_width.items())
    ]
    high = re.escape(bytes([min(size >> 16, 255)]))
    top = re.escape(bytes([min(size >> 24, 255)]))
    # two bytes of slack: the slot is at most size | 0xffff
    slot = rb"r..[\x00-" + high + rb"]\x00" if size < 1 << 24 else rb"r...[\x00-" + top + rb"]"
    return re.compile(b"(?:" + b"|".join([*parts, slot]) + b")*+", re.DOTALL)
