"""What a file is, found from its first bytes and never from its name."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from zlib import error as ZlibError

from isal import igzip_lib, isal_zlib

from ...base.errors import TraceError

GZIP_ERROR: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # isal's stub says an instance
_HEAD_BYTES, _GLANCE_BYTES = 64 << 10, 8 << 10
GZIP = b"\x1f\x8b"
BLANK = b"\xef\xbb\xbf \t\r\n"
PACKED = 12  # gzip makes a trace about so much smaller
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_TOKEN = re.compile(rb'"((?:[^"\\]|\\.){0,100})"(\s*:)?|[{}\[\]]|"', re.DOTALL)
_OF_DUMP = frozenset({b"entries", b"pg_config", b"pg_status", b"nccl_comm_state", b"comm_lib_version", b"nccl_version"})
_OF_KINETO = frozenset({b"traceEvents", b"schemaVersion", b"deviceProperties", b"distributedInfo", b"traceName"})
_REFUSED = (
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it (zstd -d) and open what comes out"),
    (b"\xff\xfe", "text in UTF-16 or UTF-32; save it as UTF-8"),
    (b"\xfe\xff", "text in UTF-16; save it as UTF-8"),
    (b"BZh", "bzip2; unpack it (bunzip2) and open what comes out"),
    (b"\xfd7zXZ", "xz; unpack it (unxz) and open what comes out"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive; unpack it and open what comes out"),
    (b"PAR1", "a Parquet file; Trace.read_parquet opens the folder that write_parquet made"),
    (b"\x89HDF", "an HDF5 file; for Nsight Systems export SQLite instead: nsys export --type sqlite FILE"),
    (b"%PDF", "a PDF, not a trace"),
    (b"\x89PNG", "a picture, not a trace"),
    (b"\x7fELF", "a program, not a trace"),
)


class Format(StrEnum):
    """What a reader is chosen by. A pickle's content decides between the two kinds of dump that are pickles."""

    KINETO = "Kineto JSON"
    NSYS = "Nsight Systems SQLite export"
    FLIGHT_RECORDER = "flight-recorder dump, JSON"
    PICKLE = "pickle"
    TAR = "tar archive"
    ZIP = "zip archive"

    @property
    def is_archive(self) -> bool:
        return self in (Format.TAR, Format.ZIP)


def format_of(path: Path, name: str = "") -> Format:
    """The format of the file, gzipped or not. ``name`` is what an error calls it.

    Raises TraceError, one line with the file and the cause, when it can be read by no reader. A file that is found
    to be of a format may still hold nothing of use: its reader says so.
    """
    name = name or str(path)
    glance = head_of(path, name, _GLANCE_BYTES).lstrip(BLANK)  # most traces show by then what they are
    if glance[:1] == b"{" and EVENTS.search(glance):
        return Format.KINETO
    head = head_of(path, name)
    text = head.lstrip(BLANK)
    if not text:
        raise TraceError(f"{name} is empty; a trace is a JSON file with traceEvents")
    if head.startswith(b"SQLite format 3\0"):
        return Format.NSYS
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return Format.ZIP
    if _is_tar(head):
        return Format.TAR
    if text[:1] == b"<":
        raise TraceError(f"{name} is an HTML or XML page, not a trace; download the file itself")
    if text[:1] in (b"{", b"["):
        return _json_format(text)
    if _is_pickle(head):
        return Format.PICKLE
    for magic, what in _REFUSED:
        if head.startswith(magic):
            raise TraceError(f"{name} is {what}")
    if name.lower().endswith((".nsys-rep", ".qdrep")):
        raise TraceError(f"{name} is a report of Nsight Systems; open its export: nsys export --type sqlite {name}")
    raise TraceError(f"{name} is not JSON; a trace is a JSON file with traceEvents")


def head_of(path: Path, name: str = "", most: int = _HEAD_BYTES) -> bytes:
    """The first bytes, unpacked where the file is gzip. Raises TraceError for a file that cannot be read."""
    name = name or str(path)
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(most)
    except OSError as error:
        raise TraceError(f"{name} cannot be read: {(error.strerror or str(error)).lower()}") from error
    if not head.startswith(GZIP):
        return head
    try:
        unpacked = isal_zlib.decompressobj(wbits=31).decompress(head, most)
    except (GZIP_ERROR, ZlibError) as error:
        raise TraceError(f"{name} is a damaged gzip file, and nothing in it is whole: {error}") from error
    if not unpacked and len(head) < most:
        raise TraceError(f"{name} is a damaged gzip file, and nothing in it is whole: cut short, or nothing packed")
    return unpacked


def top_level_keys(head: bytes) -> set[bytes]:
    """The keys of the outermost JSON object that stand in ``head``."""
    keys: set[bytes] = set()
    depth = 0
    for token in _TOKEN.finditer(head):
        text = token[0]
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token[2]:
            keys.add(token[1])
    return keys


def _json_format(text: bytes) -> Format:
    # inside a string the quotes would be escaped
    if text[:1] == b"[" or EVENTS.search(text):
        return Format.KINETO
    keys = top_level_keys(text)
    # a trace has pg_config too, inside its distributedInfo; a dump may have one key in sight before its long entries
    is_dump = bool(keys & _OF_DUMP) and not keys & _OF_KINETO
    return Format.FLIGHT_RECORDER if is_dump else Format.KINETO


def _is_pickle(head: bytes) -> bool:
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        return True
    return head[:2] in (b"(d", b"(l", b"}q", b"]q")  # protocols 0 and 1 of a dict or a list


def _is_tar(head: bytes) -> bool:
    """By the magic of every tar since 1988, and by what its header must hold: a checksum over itself."""
    if head[257:262] != b"ustar" or len(head) < 512:
        return False
    stated = head[148:156].strip(b" \0")
    checksum = sum(head[:148]) + 8 * 0x20 + sum(head[156:512])
    return stated.isdigit() and int(stated, 8) == checksum if all(48 <= digit < 56 for digit in stated) else False
