"""Opens what people have on disk: Kineto files, a folder of them, or a run folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from ..base.errors import RunFolderError, TraceError
from ..base.provenance import Provenance
from ..experiment.run_folder import RankFolder, RunFolder, read_json, read_json_lines
from .kineto import Recording, read_recording
from .spans import RankTables, rank_tables
from .table import LANE_SCHEMA, SPAN_SCHEMA, STEP_SCHEMA, Note, Trace

_NAMES_OF_TRACES = re.compile(r"\.json(?:\.gz)?$", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_RANK_AT_END = re.compile(r"[_-](\d{1,4})\.(?:pt\.trace\.)?json(?:\.gz)?$", re.IGNORECASE)

Paths = str | Path | Sequence[str | Path]


def open_trace(paths: Paths, *, ranks: Collection[int] | None = None) -> Trace:
    """What was recorded, of all ranks or of the chosen ones.

    ``paths`` is one path or several: Kineto JSON (gzipped or not), a folder of such files, or a run folder,
    which also tells its experiment, its environment and each rank's metrics and memory in ``Trace.about``.
    A rank comes from the file itself, else from its name, else from its folder's; a file that tells none is
    numbered, with a note. Raises TraceError, one line with the file and the cause.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not given:
        raise TraceError("no path was given; give a trace file, a folder of them or a run folder")
    for path in given:
        if not path.exists():
            raise TraceError(f"{path} does not exist")
    runs = [path for path in given if path.is_dir() and RunFolder.looks_like_one(path)]
    if runs and len(given) > 1:
        raise TraceError(f"a run folder opens alone; {runs[0]} was given with others. Open each, then compare them")
    return _open_run(RunFolder(runs[0]), ranks) if runs else _open_files(given, ranks)


# -- a run folder


def _open_run(folder: RunFolder, ranks: Collection[int] | None) -> Trace:
    about: dict[str, Any] = {
        "folder": str(folder.path),
        "experiment": _json(folder.experiment),
        "environment": _json(folder.environment),
        "result": _json(folder.result),
        "metrics": {},
        "memory": {},
    }
    notes: list[Note] = []
    tables: list[RankTables] = []
    present = list(folder.ranks())
    for rank in _chosen(present, ranks, folder.path):
        files = folder.rank(rank)
        about["metrics"][str(rank)] = _json_lines(files.metrics)
        about["memory"][str(rank)] = _json(files.memory)
        if error := _json(files.error):
            notes.append(Note(f"rank {rank} raised", 1, str(error.get("message", ""))[:200]))
        if table := _rank_of_run(files, rank, notes):
            tables.append(table)
    if not folder.is_finished:
        notes.insert(0, Note("unfinished run: it has no result.json, and what is there may be incomplete", 1))
    return _joined(tables, _provenance(about["environment"]), notes, about)


def _rank_of_run(files: RankFolder, rank: int, notes: list[Note]) -> RankTables | None:
    """A run that was stopped while it wrote leaves damaged files: what opens is opened, and the rest is
    noted.
    """
    if not files.trace.is_file():
        return None
    try:
        recording = read_recording(files.trace)
    except TraceError as error:
        notes.append(Note(f"the trace of rank {rank} could not be read", 1, str(error)))
        return None
    if recording.rank not in (None, rank):
        notes.append(
            Note(
                f"the folder says rank {rank}, its trace another; the folder was believed",
                1,
                str(recording.rank),
            )
        )
    names = {str(thread): str(name) for thread, name in _json(files.lanes).items()}
    return rank_tables(recording, rank, names)


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except RunFolderError as error:
        raise TraceError(str(error)) from error


def _json_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return read_json_lines(path)
    except RunFolderError as error:
        raise TraceError(str(error)) from error


def _provenance(environment: Mapping[str, Any]) -> Provenance:
    try:
        return Provenance(environment.get("provenance"))
    except ValueError:
        return Provenance.RECORDED_ELSEWHERE


# -- loose files


def _open_files(given: Sequence[Path], ranks: Collection[int] | None) -> Trace:
    recordings, notes = _recordings(given)
    ranked = _ranked(recordings, notes)
    chosen = _chosen(sorted(ranked), ranks, given[0])
    about = {
        "files": {str(rank): str(ranked[rank].path) for rank in chosen},
        "headers": {str(rank): ranked[rank].header for rank in chosen},
    }
    tables = [rank_tables(ranked[rank], rank) for rank in chosen]
    return _joined(tables, Provenance.RECORDED_ELSEWHERE, notes, about)


def _recordings(given: Sequence[Path]) -> tuple[list[Recording], list[Note]]:
    """Files that were named must be traces; a folder's files that are none are noted and left out."""
    recordings: list[Recording] = []
    refused: list[TraceError] = []
    for path in given:
        if not path.is_dir():
            recordings.append(read_recording(path))
            continue
        files = sorted(file for file in path.rglob("*") if _NAMES_OF_TRACES.search(file.name) and file.is_file())
        if not files:
            raise TraceError(f"{path} holds no file that ends in .json or .json.gz, and is no run folder")
        for file in files:
            try:
                recordings.append(read_recording(file))
            except TraceError as error:
                refused.append(error)
    if not recordings:
        raise refused[0]
    notes = [Note("files of the folder that are no traces, left out", len(refused), str(refused[0]))] if refused else []
    return recordings, notes


def _ranked(recordings: Sequence[Recording], notes: list[Note]) -> dict[int, Recording]:
    ranked: dict[int, Recording] = {}
    unknown: list[Recording] = []
    for recording in recordings:
        rank = _rank(recording)
        if rank is None:
            unknown.append(recording)
        elif rank in ranked:
            raise TraceError(
                f"each rank has one file; {ranked[rank].path} and {recording.path} both are rank {rank}. "
                "Open the files of one run at a time"
            )
        else:
            ranked[rank] = recording
    free = (number for number in range(len(recordings)) if number not in set(ranked))
    for recording in unknown:
        ranked[next(free)] = recording
    if unknown:
        notes.append(Note("files that tell no rank, numbered in order", len(unknown), unknown[0].path.name))
    return ranked


def _rank(recording: Recording) -> int | None:
    if recording.rank is not None:
        return recording.rank
    path = recording.path.absolute()
    for pattern, text in (
        (_RANK_IN_NAME, path.name),
        (_RANK_AT_END, path.name),
        (_RANK_IN_NAME, path.parent.name),
    ):
        if match := pattern.search(text):
            return int(match[1])
    return None


# -- both


def _chosen(present: Sequence[int], wanted: Collection[int] | None, path: Path) -> list[int]:
    if wanted is None:
        return list(present)
    missing = sorted(set(wanted) - set(present))
    if missing:
        raise TraceError(f"{path} has ranks {list(present)}; asked for {missing}")
    return [rank for rank in present if rank in wanted]


def _joined(
    tables: Sequence[RankTables], provenance: Provenance, notes: Sequence[Note], about: Mapping[str, Any]
) -> Trace:
    return Trace(
        spans=pl.concat([pl.DataFrame(schema=SPAN_SCHEMA), *(table.spans for table in tables)]),
        lanes=pl.concat([pl.DataFrame(schema=LANE_SCHEMA), *(table.lanes for table in tables)]),
        steps=pl.concat([pl.DataFrame(schema=STEP_SCHEMA), *(table.steps for table in tables)]),
        provenance=provenance,
        notes=_summed([*notes, *(note for table in tables for note in table.notes)]),
        about=about,
    )


def _summed(notes: Sequence[Note]) -> tuple[Note, ...]:
    """Equal notes of several ranks become one with their counts added."""
    summed: dict[str, Note] = {}
    for note in notes:
        before = summed.get(note.what)
        summed[note.what] = Note(note.what, before.count + note.count, before.example) if before else note
    return tuple(summed.values())
