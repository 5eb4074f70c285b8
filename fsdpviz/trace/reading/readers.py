"""The readers behind one door: from a file, whatever its format, to what it says of each rank in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...base.errors import TraceError
from ..dumps import allocator_snapshot, flight_recorder
from ..dumps.safe_pickle import load_pickle
from ..files.parts import Part, tables_of
from ..files.ranks import rank_in_name, rank_said
from ..files.sniff import Format, head_of
from ..files.sources import Source
from ..kineto.reader import read_recording
from ..kineto.repair import nesting
from ..meaning.spans import rank_tables
from ..meaning.uncategorised import with_categories
from ..nsight.export import read_export
from ..table import Note
from .cache import cached, is_cached
from .merged import taken_apart
from .parallel import helpers_for, read_together
from .progress import Progress, progress_bar

_STATED = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"rank"\s*:\s*("?)(\d{1,9})\1\s*[,}]')
_NO_SPANS: dict[str, list] = {name: [] for name in ("lane", "start_ns", "duration_ns", "name", "kind")}


def read_all(
    sources: Sequence[Source], ranks: Collection[int] | None = None, *, cache: bool = True
) -> list[list[Part] | TraceError]:
    """What each source holds, or the error that says why nothing, in the order of ``sources``.

    Of several files those whose first lines state a rank that is not among ``ranks`` are not read: their parts are
    empty. Large files are read at once, as many as there are cores. A bar shows how far it is, once that has taken a
    second.
    """
    ranks = ranks if len(sources) > 1 else None  # a file alone may be one that a script merged: it states the first
    with progress_bar("reading", sum(_size(source) for source in sources)) as on_read:
        read = partial(_read_or_error, ranks=ranks, cache=cache, on_read=on_read)
        slow = [source for source in sources if _is_slow(source, ranks, cache)] if len(sources) > 1 else []
        if not (helpers := helpers_for(slow)):
            return [read(source) for source in sources]
        together = iter(read_together(slow, read, helpers, cache=cache, on_read=on_read))
        is_slow = set(map(id, slow))
        return [next(together) if id(source) in is_slow else read(source) for source in sources]


def _read_or_error(
    source: Source, ranks: Collection[int] | None, cache: bool, on_read: Progress
) -> list[Part] | TraceError:
    try:
        if not _is_wanted(source, ranks):
            return [Part(source.name, tables_of(_NO_SPANS, [], []), stated_rank(source))]
        return read_source(source, cache=cache, on_read=on_read)
    except TraceError as error:
        return error


def _size(source: Source) -> int:
    state = _state(source.path)
    return state[0] if state else 0


def _is_wanted(source: Source, ranks: Collection[int] | None) -> bool:
    return ranks is None or (stated := stated_rank(source)) is None or stated in ranks


def _is_slow(source: Source, ranks: Collection[int] | None, cache: bool) -> bool:
    try:
        return _is_wanted(source, ranks) and not (cache and is_cached(source))
    except TraceError:  # reading it says so
        return False


def stated_rank(source: Source) -> int | None:
    """The rank in the first 64 KiB of a Kineto file; None where it does not stand there."""
    if source.format is not Format.KINETO:
        return None
    head = head_of(source.path, source.name)
    depth = counted = 0
    for match in _STATED.finditer(head):
        depth, counted = depth + nesting(head[counted : match.start()]), match.start()
        if depth == 1:
            return int(match[2])
    return None


def read_source(source: Source, *, cache: bool = True, on_read: Progress = lambda read_bytes: None) -> list[Part]:
    """The ranks in one file; more than one only for an Nsight Systems export of several GPUs and for ranks that a
    script merged into one Kineto file.

    Depends on the file alone, so that sources may be read in any order, thread or process, and from the ``cache``.
    Raises TraceError, one line that calls the file by ``source.name``. A file that changed while it was read says so
    in its notes.
    """
    path = source.path
    before = _state(path)
    try:
        parts = cached(source, lambda: _read(source, on_read)) if cache else _read(source, on_read)
    except TraceError as error:
        raise TraceError(str(error).replace(str(path), source.name)) from error
    except OSError as error:
        raise TraceError(f"{source.name} cannot be read: {(error.strerror or str(error)).lower()}") from error
    except MemoryError as error:
        raise TraceError(f"{source.name} needs more memory than there is to be read") from error
    if before != _state(path):
        change = Note("file that changed while it was read; open it again when it is written", 1, source.name[-80:])
        parts = [replace(part, tables=_noted(part, change)) for part in parts]
    if source.format is Format.NSYS and len(parts) == 1:
        parts = [_unless_named(parts[0], path)]
    is_untold = len(parts) == 1 and parts[0].rank is None
    by_name = rank_in_name(path.name, path.absolute().parent.name) if is_untold else None
    return [replace(part, rank_by_name=by_name, short_name=path.name[-80:]) for part in parts]


def _noted(part: Part, note: Note):
    return replace(part.tables, notes=(*part.tables.notes, note))


def _unless_named(part: Part, path: Path) -> Part:
    """What NCCL says in an export of one process, unless the file's name says another rank: a recording may hold only
    communicators of a part of the job, whose ranks count from 0 too.
    """
    named = rank_said(path.name)
    if part.rank is None or named is None or named == part.rank:
        return part
    note = Note("ranks taken from the file's name; NCCL's largest communicator says another", 1, f"rank {part.rank}")
    return replace(part, rank=None, tables=_noted(part, note))


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _read(source: Source, on_read: Progress) -> Sequence[Part]:
    match source.format:
        case Format.KINETO:
            return _kineto(source, on_read)
        case Format.NSYS:
            return read_export(source.path, source.name)
        case Format.FLIGHT_RECORDER:
            return flight_recorder.read_json_dump(source.path, source.name)
        case Format.PICKLE:
            return [_pickle(source)]
    raise TraceError(f"{source.name} is a {source.format} inside another; unpack it and open what comes out")


def _kineto(source: Source, on_read: Progress) -> list[Part]:
    parts = []
    for rank, recording in taken_apart(read_recording(source.path, on_read)):
        tables = rank_tables(with_categories(recording), rank or 0, source.lane_names)
        parts.append(Part(source.name, tables, rank, about={"headers": recording.header}))
    return parts


def _pickle(source: Source) -> Part:
    content = load_pickle(source.path, source.name)
    if flight_recorder.is_dump(content):
        return flight_recorder.part_of(content, source.name)
    if allocator_snapshot.is_snapshot(content):
        return allocator_snapshot.part_of(content, source.name)
    raise TraceError(
        f"{source.name} is a pickle of something else; those that open are flight-recorder dumps (with entries) "
        "and allocator snapshots (with segments)"
    )
