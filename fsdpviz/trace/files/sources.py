"""From what a user gives (a path, several, a glob, a folder, an archive, a run folder) to the files to read."""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ...base.errors import TraceError
from ...experiment.run_folder import RunFolder
from ..table import Note
from .archives import unpack
from .limits import MAX_FILES
from .sniff import Format, format_of

_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Source:
    """One file to read. ``name`` is what messages call it: its path, or ``job.tar.gz: rank0/trace.json``.

    ``is_named``: the user named this very file, so that it must be a trace; a file that was found in a folder or an
    archive is left out, with a note, when it is none. ``is_temporary``: it is gone when the trace is open.
    """

    path: Path
    name: str
    format: Format
    is_named: bool = True
    is_temporary: bool = False
    lane_names: Mapping[str, str] = field(default_factory=dict, compare=False)  # a run's own, by thread id


@dataclass
class Found:
    """What was given: files, or one run folder; what was refused on the way, and notes."""

    sources: list[Source] = field(default_factory=list)
    run: RunFolder | None = None
    run_name: str = ""
    refused: list[TraceError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


_Path = str | bytes | os.PathLike[str]
Paths = _Path | Sequence[_Path]


def find_sources(paths: Paths, stack: ExitStack) -> Found:
    """The files to read, in a settled order. Archives are unpacked into a folder that lives until ``stack`` closes.

    Raises TraceError, one line, where nothing was given, nothing is there, or a run folder has company.
    """
    given = list(_expanded(_texts(paths)))
    if not given:
        raise TraceError("no path was given; give a trace file, a folder of them or a run folder")
    found = Found()
    for path in given:
        if path.is_dir():
            _add_folder(found, path, _name(path), path, is_alone=len(given) == 1)
        else:
            _add_file(found, path, stack, is_alone=len(given) == 1)
    if not found.sources and found.run is None:
        raise found.refused[0] if found.refused else TraceError(f"{_name(given[0])} holds no file that is a trace")
    return found


def _texts(paths: Paths) -> list[str]:
    try:
        return [os.fsdecode(path) for path in ([paths] if isinstance(paths, str | bytes | os.PathLike) else paths)]
    except TypeError as error:
        raise TraceError(f"a path is text, or several are a list of texts; got {repr(paths)[:80]}") from error


def _expanded(texts: Iterable[str]) -> Iterator[Path]:
    for text in texts:
        if not text or "\0" in text:
            raise TraceError(f"a path names a file or a folder; got {text[:80]!r}")
        path = Path(text)
        with suppress(RuntimeError):  # no such user: then it is a name that begins so
            path = path.expanduser()
        try:
            exists = path.exists()
        except OSError as error:
            raise _unread(path, error) from error
        if exists:
            yield path
        elif _GLOB & set(text):
            matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207  # Path.glob takes no absolute pattern
            if not matches:
                raise TraceError(f"no file matches {_name(path)}")
            yield from map(Path, matches)
        else:
            raise TraceError(f"{_name(path)} does not exist")


def _unread(path: Path, error: OSError) -> TraceError:
    return TraceError(f"{_name(path)} cannot be read: {(error.strerror or str(error)).lower()}")


def _name(path: Path) -> str:
    """The path on one line, whatever its characters, and not longer than a screen."""
    text = str(path)
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= 400 else f"…{text[-400:]}"


def _add_file(found: Found, path: Path, stack: ExitStack, *, is_alone: bool) -> None:
    name = _name(path)
    if not path.is_file():
        raise TraceError(f"{name} is neither a file nor a folder")  # a pipe or a device would never end
    format_ = format_of(path, name)
    if not format_.is_archive:
        found.sources.append(Source(path, name, format_))
        return
    into = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fsdpviz-", ignore_cleanup_errors=True)))
    found.notes += unpack(path, format_, into, name)
    _add_folder(found, _without_shells(into), f"{name}: ", into, is_alone=is_alone, is_temporary=True)


def _without_shells(folder: Path) -> Path:
    """The folder itself, or the only folder in it: most archives hold one folder that holds everything."""
    while True:
        children = list(folder.iterdir())
        if len(children) != 1 or not children[0].is_dir():
            return folder
        if not any(child.is_dir() for child in children[0].iterdir()) and not RunFolder.looks_like_one(children[0]):
            return folder  # a folder of files: its name may tell the rank
        folder = children[0]


def _add_folder(
    found: Found, folder: Path, name: str, root: Path, *, is_alone: bool, is_temporary: bool = False
) -> None:
    if _is_run(folder):
        if not is_alone:
            shown = name.removesuffix(": ")
            raise TraceError(f"a run folder opens alone; {shown} was given with others. Open each, then compare them")
        found.run, found.run_name = RunFolder(folder), name.removesuffix(": ")
        return
    shown = name.removesuffix(": ")
    runs = sorted(child for child in _listed(folder) if _is_run(folder / child))
    if runs:
        raise TraceError(f"{shown} holds {len(runs)} run folders ({', '.join(runs[:4])}); open one at a time")
    files = _files_in(folder, shown, found)
    if not files and not found.refused:
        raise TraceError(f"{shown} holds no file, and is no run folder")
    for file in files:
        file_name = f"{name}{file.relative_to(root).as_posix()}" if is_temporary else _name(file)
        try:
            format_ = format_of(file, file_name)
            if format_.is_archive:
                raise TraceError(f"{file_name} is a {format_} inside a folder; open it by itself")
        except TraceError as error:
            found.refused.append(error)
            continue
        found.sources.append(Source(file, file_name, format_, is_named=False, is_temporary=is_temporary))


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  # names alone: what they are, whoever asks looks up
    except OSError as error:
        raise _unread(folder, error) from error


def _is_run(folder: Path) -> bool:
    """False too where that cannot be told; reading what is in it says why."""
    try:
        return folder.is_dir() and RunFolder.looks_like_one(folder)
    except OSError:
        return False


def _files_in(folder: Path, name: str, found: Found) -> list[Path]:
    """Regular files at any depth that are not hidden. Links that lead out of the folder are not followed; folders and
    files that cannot be read are refused.
    """

    def refuse(error: OSError) -> None:
        found.refused.append(_unread(Path(error.filename), error))

    files: list[Path] = []
    outside: list[Path] = []
    home = folder.resolve()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(child for child in folders if not child.startswith(".") and child != "__MACOSX")
        for child in names:
            file = Path(parent, child)
            try:
                if child.startswith(".") or not file.is_file():
                    continue
                (files if file.resolve().is_relative_to(home) else outside).append(file)
            except OSError as error:
                refuse(error)
        if len(files) > MAX_FILES:
            raise TraceError(f"a folder of traces may hold {MAX_FILES:,} files; {name} holds more. Give the files' own")
    if outside:
        found.notes.append(
            Note("links that lead out of the folder, not followed", len(outside), _name(outside[0].relative_to(folder)))
        )
    return sorted(files)
