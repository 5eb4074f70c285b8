"""What a file is not, and its bytes without those that JSON forbids anywhere; ``mend`` and ``salvage`` do the rest.

Recorded files hold control characters inside strings, bytes that are no UTF-8, halves of characters. Each repair is
noted.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...base.errors import TraceError
from ..files.sniff import BLANK
from ..table import Note

_CONTROL = bytes(range(0x20)).translate(None, b"\t\n\r")
_TO_SPACE = bytes(0x20 if byte < 0x20 else byte for byte in range(256))
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# every escape in turn, so that what follows an escaped backslash is none
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
# a string that is cut runs to the end, or each quote in it would be tried as the first
_NESTING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{\[]|([}\]])', re.DOTALL)
_OTHER_FORMATS = (
    (b"SQLite format 3", "an SQLite database (an Nsight Systems export?)"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x80", "a pickle (a flight-recorder dump or a memory snapshot?)"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
)


def refuse_other_formats(path: Path, data: bytes) -> None:
    """Raises TraceError for what begins as a file of another kind, or as none."""
    head = data[:512].lstrip(BLANK)
    if not head:
        raise TraceError(f"{path} is empty; a trace is a JSON file with traceEvents")
    if head[:1] == b"<":
        raise TraceError(f"{path} is an HTML or XML page, not a trace; download the file itself")
    for magic, what in _OTHER_FORMATS:
        if head.startswith(magic):
            raise TraceError(f"{path} is {what}; only Kineto JSON and run folders open so far")
    if data[257:262] == b"ustar":
        raise TraceError(f"{path} is a tar archive; unpack it and open its folder")
    if head[:1] not in (b"{", b"["):
        raise TraceError(f"{path} is not JSON; a trace is a JSON file with traceEvents")


def clean(data: bytes) -> tuple[bytes, list[Note]]:
    """``data`` with what JSON forbids anywhere replaced: bad UTF-8, halves of characters, control characters."""
    notes: list[Note] = []
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "replace")
        notes.append(
            Note("bytes that are no UTF-8, replaced", text.count("\ufffd"), repr(data[error.start : error.end]))
        )
        data = text.encode("utf-8")
    if _HALF.search(data):
        data, halves = _without_halves(data)
        if halves:
            notes.append(Note("halves of characters (lone surrogates), replaced", len(halves), halves[0]))
    controls = len(data) - len(data.translate(None, _CONTROL))
    # a line break is blank between values and forbidden inside a string; a space does for both
    data = data.translate(_TO_SPACE)
    if controls:
        notes.append(Note("control characters, replaced by spaces", controls))
    return data, notes


def _without_halves(data: bytes) -> tuple[bytes, list[str]]:
    """An escape of UTF-16 that has no partner stands for no character."""
    halves: list[str] = []

    def whole(escape: re.Match[bytes]) -> bytes:
        if not escape[1]:
            return escape[0]
        halves.append(escape[1].decode())
        return b"\\ufffd"

    return _ESCAPE.sub(whole, data), halves


def nesting(text: bytes) -> int:
    """How many more objects and lists are open where the text ends than where it begins, which is outside strings."""
    found = 0
    for token in _NESTING.finditer(text):
        found += -1 if token[1] else token[0][:1] != b'"'
    return found
