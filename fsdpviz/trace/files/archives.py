"""Unpacks a tar or zip of recordings into a private folder, and nothing else onto this machine.

Only regular members are taken, each under its own checked name; a member whose name leads outside refuses the whole
archive. Links and devices are left out, with a note. What is unpacked is bounded by ``limits.unpacked_limit``, and by
MAX_MEMBERS members.
"""

from __future__ import annotations

import errno
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO

from ...base.errors import TraceError
from ..table import Note
from .limits import MAX_MEMBERS, check_unpacked
from .sniff import Format

_BLOCK_BYTES = 16 << 10  # what is lost at most where an archive is cut
_MAX_NAME = 200  # characters of one part of a member's name; file systems take 255 bytes
_MAX_HEADER_BYTES = 1 << 20
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)
with suppress(ImportError):  # Python may be built without it
    from lzma import LZMAError

    _DAMAGED += (LZMAError,)


def unpack(archive: Path, format_: Format, into: Path, name: str) -> list[Note]:
    """Writes the archive's files below ``into``, an empty folder, and says what was left out or lost.

    An archive that is damaged or cut short gives what is whole before the damage. Raises TraceError, one line, for a
    member that leads outside, for one past the limits, and for a full disk.
    """
    notes: list[Note] = []
    written = _Budget(archive.stat().st_size, name)
    members = _of_tar if format_ is Format.TAR else _of_zip
    try:
        for member, content in members(archive, name, notes):
            with content:
                target = _inside(into, member, name)
                if target.exists():
                    notes.append(
                        Note("members of the archive that a later one of the same name replaces", 1, member[:80])
                    )
                _write(content, target, written)
    except TraceError:  # a ValueError too, and about more than damage
        raise
    except _DAMAGED as error:
        if not written.files:
            raise TraceError(f"{name} is a damaged {format_}, and nothing in it is whole: {_short(error)}") from error
        notes.append(Note("archive that is damaged or cut short; what is whole was read", 1, _short(error)))
    except OSError as error:
        cause = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error)).lower()
        raise TraceError(f"{name} cannot be unpacked: {cause}") from error
    return notes


class _SmallHeaders(tarfile.TarInfo):
    """Long names and extended headers are read into memory as a whole: a recording's are short."""

    def _proc_member(self, tarfile_: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tarfile_)  # type: ignore[misc]  # the hook that TarInfo's own text names


class _Budget:
    """What was unpacked so far, held against the limits."""

    def __init__(self, packed_bytes: int, name: str) -> None:
        self.packed_bytes = packed_bytes
        self.name = name
        self.bytes = 0
        self.files = 0

    def add_file(self) -> None:
        self.files += 1
        if self.files > MAX_MEMBERS:
            raise TraceError(f"an archive may hold {MAX_MEMBERS:,} files; {self.name} holds more. Unpack what you need")

    def add_bytes(self, count: int) -> None:
        self.bytes += count
        check_unpacked(self.bytes, self.packed_bytes, self.name)


def _of_tar(archive: Path, name: str, notes: list[Note]) -> Iterator[tuple[str, IO[bytes]]]:
    others: list[str] = []
    # a stream, so that no member is reached by seeking back into what was checked already
    with tarfile.open(archive, "r|*", tarinfo=_SmallHeaders) as tar:
        for number, member in enumerate(tar):
            if number > 10 * MAX_MEMBERS:
                raise TraceError(f"an archive may hold {MAX_MEMBERS:,} files; {name} has ten times as many entries")
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None:
                others.append(member.name)
            else:
                yield member.name, content
    _note_left_out(others, notes)


def _of_zip(archive: Path, name: str, notes: list[Note]) -> Iterator[tuple[str, IO[bytes]]]:
    others: list[str] = []
    with zipfile.ZipFile(archive) as packed:
        if len(packed.infolist()) > 10 * MAX_MEMBERS:
            raise TraceError(f"an archive may hold {MAX_MEMBERS:,} files; {name} has ten times as many entries")
        for member in packed.infolist():
            if not member.filename:
                raise TraceError(f"{name} has a member without a name")
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                raise TraceError(f"{name} is encrypted; unpack it yourself and open what comes out")
            if (member.external_attr >> 28) not in (0, 8):  # Unix: neither unknown nor a regular file
                others.append(member.filename)
                continue
            yield member.filename, packed.open(member)
    _note_left_out(others, notes)


def _note_left_out(others: list[str], notes: list[Note]) -> None:
    if others:
        notes.append(Note("links and devices of the archive, left out", len(others), others[0][:80]))


def _inside(into: Path, member: str, name: str) -> Path:
    """Where the member goes. Raises TraceError where its name leads out of the archive."""
    path = PurePosixPath(member.replace("\\", "/"))
    parts = [part for part in path.parts if part != "."]
    if path.is_absolute() or ".." in parts or any(":" in part or "\0" in part for part in parts[:1]):
        raise TraceError(f"{name} has a member that leads outside: {member[:80]!r}; nothing of it was opened")
    if not parts:
        raise TraceError(f"{name} has a member without a name")
    return into.joinpath(*(_short_part(part) for part in parts))


def _short_part(part: str) -> str:
    plain = "".join(letter if letter.isprintable() and letter not in '<>:"|?*' else "_" for letter in part)
    return plain if len(plain.encode("utf-8", "replace")) <= _MAX_NAME else plain[-_MAX_NAME // 4 :]


def _write(content: IO[bytes], target: Path, written: _Budget) -> None:
    written.add_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while block := content.read(_BLOCK_BYTES):
            written.add_bytes(len(block))
            file.write(block)


def _short(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:120]
