"""The bytes of a file in blocks of half a megabyte, unpacked where it is gzip, so that a file of any size is read in
little memory.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from isal import isal_zlib

from ...base.errors import TraceError
from ..files.limits import check_unpacked
from ..files.sniff import GZIP, GZIP_ERROR
from ..reading.progress import Progress
from ..table import Note

BLOCK_BYTES = 512 << 10  # its events take about three times as much, and are gone before the next are made
CUT_GZIP = "gzip stream that ends too early; what is whole was read"

Item = TypeVar("Item")


def blocks(path: Path, notes: list[Note], on_read: Progress = lambda read_bytes: None) -> Iterator[bytes]:
    """The file's bytes in order, none of them empty; a note if a gzip stream ends before its end. ``on_read`` hears
    of the bytes on disk as they are read.

    Raises TraceError for a file that cannot be read, or is gzip of which nothing is whole.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(len(GZIP))
            file.seek(0)
            position = 0
            for block in _unpacked(path, file, size, notes) if head == GZIP else _plain(file):
                before, position = position, file.tell()
                on_read(position - before)
                yield block
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _unpacked(path: Path, file: BinaryIO, packed_bytes: int, notes: list[Note]) -> Iterator[bytes]:
    unpacked_bytes = 0
    try:
        for block in _members(file, min(BLOCK_BYTES // 2, packed_bytes)):
            unpacked_bytes += len(block)
            check_unpacked(unpacked_bytes, packed_bytes, str(path))
            yield block
    except (EOFError, GZIP_ERROR) as error:
        if not unpacked_bytes:
            raise TraceError(f"{path} is a damaged gzip file, and nothing in it is whole: {error}") from error
        notes.append(Note(CUT_GZIP, 1, str(error)))


def _members(file: BinaryIO, step_bytes: int) -> Iterator[bytes]:
    """What is packed in the file's gzip members, of which ``step_bytes`` are read at a time. Raises EOFError where the
    last one is cut short.
    """
    unpacker, packed = isal_zlib.decompressobj(wbits=31), b""
    while True:
        packed = packed or file.read(step_bytes)
        # bounded, or a block of zeros would unpack to a thousand times its size
        block = unpacker.decompress(packed, BLOCK_BYTES)
        if block:
            yield block
        elif not packed:
            raise EOFError("cut short")
        packed = unpacker.unconsumed_tail
        if unpacker.eof:
            packed = unpacker.unused_data
            packed += file.read(step_bytes) if len(packed) < len(GZIP) else b""
            if not packed.startswith(GZIP):  # a further member, or padding
                return
            unpacker = isal_zlib.decompressobj(wbits=31)


def ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """The same items, each made in another thread while the one before is used (isal unpacks without the GIL)."""
    with ThreadPoolExecutor(1, thread_name_prefix="fsdpviz-read") as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item
