"""How much a file may take of this machine. Recordings come from strangers: a small file must not become a large one.

Each limit is far above what a real recording needs, and is stated in the error of whoever goes past it.
"""

from __future__ import annotations

from ...base.errors import TraceError
from ...base.units import format_memory

MIB = 1 << 20
GIB = 1 << 30

MAX_UNPACKED_BYTES = 32 * GIB  # of one archive, or of one gzip file
MAX_UNPACKED_RATIO = 200  # unpacked over packed: Kineto JSON reaches 40, deflate itself 1032
FREE_UNPACKED_BYTES = 256 * MIB  # whatever the ratio
MAX_MEMBERS = 10_000  # of an archive
MAX_FILES = 10_000  # of a folder
MAX_PICKLE_BYTES = 1 * GIB
MAX_JSON_DUMP_BYTES = 1 * GIB  # of a flight recorder's JSON: a few kilobytes a collective


def unpacked_limit(packed_bytes: int) -> int:
    """The most that ``packed_bytes`` of gzip, tar or zip may unpack to, in bytes."""
    return min(MAX_UNPACKED_BYTES, max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * packed_bytes))


def check_unpacked(unpacked_bytes: int, packed_bytes: int, name: str) -> None:
    """Raises TraceError, naming the file, once more has been unpacked than ``unpacked_limit`` allows."""
    limit = unpacked_limit(packed_bytes)
    if unpacked_bytes > limit:
        raise TraceError(
            f"{name} unpacks to more than {format_memory(limit)}, the limit for a file of "
            f"{format_memory(packed_bytes)}; if it is a recording, unpack it yourself and open what comes out"
        )
