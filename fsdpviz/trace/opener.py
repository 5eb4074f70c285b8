"""Opens what people have on disk, whatever it is: ``sources`` finds the files, ``reading`` reads them, this joins.

[Note: first use] The first frame that polars makes costs 5 ms and 4 MB, most of it code paged in from its 200 MB of
binary: more than a small trace does. The compiled scanner, numpy and the interpreter have first times too. They are
part of loading those libraries and not of any trace, so that importing this opens files of a few events, one of each
kind that a profiler writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import polars as pl

from ..base.errors import TraceError
from ..base.provenance import Provenance
from .align import aligned
from .files.parts import Part, Role
from .files.ranks import as_rank, ranked
from .files.runs import note_unread, part_of, read_run
from .files.selection import Window, chosen, selected
from .files.sources import Found, Paths, find_sources
from .meaning.recorder_join import with_recorder
from .meaning.spans import RankTables
from .reading.collector import without_collector
from .reading.readers import read_all
from .table import GROUP_SCHEMA, LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Note, Trace, summed

_FEW_PIECES = 16


def open_trace(
    paths: Paths,
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | None = None,
    window: Window | None = None,
    cache: bool = True,
) -> Trace:
    """What was recorded, of all ranks, steps and times or of the chosen ones.

    ``paths`` is a path or several, a glob, a folder, a tar or zip, or a run folder, which also tells its experiment,
    its environment and each rank's metrics and memory in ``Trace.about``. What a file is, its content decides: Kineto
    JSON (gzipped or not), an Nsight Systems SQLite export, a flight recorder's dump (pickle or JSON), an allocator
    snapshot. A rank comes from the file itself, else from its name, else from its folder's; a file that tells none is
    numbered, with a note. ``window`` is (start_ms, end_ms) from the recording's earliest time. Files of more than 4 MB
    are kept as tables in ``.fsdpviz_cache`` beside them, or in the user's cache folder, and open from there the next
    time; ``cache=False`` neither looks nor writes there.

    Raises TraceError, one line with the file and the cause.
    """
    with without_collector(), ExitStack() as stack:
        found = find_sources(paths, stack)
        trace = _open_run(found, ranks, cache) if found.run else _open_files(found, ranks, cache)
        return selected(trace, steps, window)


def _open_run(found: Found, ranks: Collection[int] | None, cache: bool) -> Trace:
    assert found.run is not None
    run = read_run(found.run, found.run_name, ranks)
    notes = [*found.notes, *run.notes]
    tables: list[RankTables] = []
    for rank, parts in zip(run.sources, read_all(list(run.sources.values()), cache=cache), strict=True):
        if isinstance(parts, TraceError):
            note_unread(rank, parts, notes)
            continue
        part = part_of(rank, parts, notes)
        tables.append(with_recorder(as_rank(part.tables, rank), run.dumps[rank]))
    return aligned(_joined(tables, run.provenance, notes, run.about))


def _open_files(found: Found, ranks: Collection[int] | None, cache: bool) -> Trace:
    notes = [*found.notes]
    parts = _read_files(found, ranks, cache, notes)
    traces = [part for part in parts if part.role is Role.TRACE]
    dumps = [part for part in parts if part.role is Role.DUMP]
    snapshots = [part for part in parts if part.role is Role.SNAPSHOT]
    if traces and dumps:
        what = "flight-recorder dumps beside traces, left out; open them by themselves"
        notes.append(Note(what, len(dumps), dumps[0].short_name))
    by_rank = ranked(traces or dumps or snapshots, notes)
    added = ranked(snapshots, notes) if traces or dumps else {}
    present = sorted(by_rank)
    name = found.sources[0].name
    kept = chosen(present, ranks, name)
    about = _about({rank: by_rank[rank] for rank in kept}, {rank: added[rank] for rank in added if rank in kept})
    tables = [as_rank(by_rank[rank].tables, rank) for rank in kept]
    trace = _joined(tables, Provenance.RECORDED_ELSEWHERE, notes, about)
    # a dump's times are those of the host's clock and of the issue: its ends are not when a collective ended
    return aligned(trace) if traces else trace


def _read_files(found: Found, ranks: Collection[int] | None, cache: bool, notes: list[Note]) -> list[Part]:
    """Files that were named must be traces; those of a folder or an archive that are none are noted and left out."""
    parts: list[Part] = []
    refused = [*found.refused]
    for source, read in zip(found.sources, read_all(found.sources, ranks, cache=cache), strict=True):
        if not isinstance(read, TraceError):
            parts += read
        elif source.is_named:
            raise read
        else:
            refused.append(read)
    if not parts:
        raise refused[0]
    if refused:
        notes.append(Note("files of the folder that are no traces, left out", len(refused), str(refused[0])))
    return parts


def _about(by_rank: Mapping[int, Part], added: Mapping[int, Part]) -> dict[str, Any]:
    """``files`` by rank, and whatever the parts say, by section and rank."""
    about: dict[str, Any] = {"files": {str(rank): part.name for rank, part in by_rank.items()}, "headers": {}}
    for parts in (by_rank, added):
        for rank, part in parts.items():
            for section, value in part.about.items():
                about.setdefault(section, {})[str(rank)] = value
    return about


def _joined(
    tables: Sequence[RankTables], provenance: Provenance, notes: Sequence[Note], about: Mapping[str, Any]
) -> Trace:
    return Trace(
        spans=_concat([table.spans for table in tables], SPAN_SCHEMA),
        lanes=_concat([table.lanes for table in tables], LANE_SCHEMA),
        steps=_concat([table.steps for table in tables], STEP_SCHEMA),
        groups=_concat([table.groups for table in tables], GROUP_SCHEMA),
        provenance=provenance,
        notes=summed([*notes, *(note for table in tables for note in table.notes)]),
        about=about,
    )


def _concat(frames: Sequence[pl.DataFrame], schema: Mapping[str, Any]) -> pl.DataFrame:
    """The frames, all of ``schema``, below each other."""
    if len(frames) == 1:
        return frames[0]
    # each rank is looked for in every piece: of few it costs less than a copy of them, of many their square
    return pl.concat([pl.DataFrame(schema=schema), *frames], rechunk=len(frames) > _FEW_PIECES)


def _open_one_of_each_kind() -> None:
    """See [Note: first use]."""
    for name in ("cuda", "nccl", "gloo"):
        with suppress(TraceError):  # an installation without them works, and its first trace opens later
            open_trace(Path(__file__).parent / "reading" / "first_use" / f"{name}.json", cache=False)


_open_one_of_each_kind()
