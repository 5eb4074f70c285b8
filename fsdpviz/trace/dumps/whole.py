"""The bytes of a file that can only be read as a whole: a pickle, a dump in JSON."""

from __future__ import annotations

from pathlib import Path

from ...base.errors import TraceError
from ...base.units import format_memory
from ..kineto.blocks import blocks
from ..table import Note


def read_whole(path: Path, name: str, most_bytes: int, notes: list[Note]) -> bytes:
    """All bytes of a file, unpacked where it is gzip; a note where a gzip stream ends before its end.

    Raises TraceError for a file that cannot be read, or has more than ``most_bytes``.
    """
    pieces: list[bytes] = []
    size = 0
    for block in blocks(path, notes):
        pieces.append(block)
        size += len(block)
        if size > most_bytes:
            raise TraceError(f"{name} is larger than {format_memory(most_bytes)}, the limit for a dump of its kind")
    return b"".join(pieces)
