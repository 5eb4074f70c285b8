"""A run folder: the traces of its ranks, and what the run says of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import RunFolderError, TraceError
from ...base.provenance import Provenance
from ...experiment.run_folder import RunFolder, read_json, read_json_lines
from ..dumps import allocator_snapshot
from ..dumps.safe_pickle import load_pickle
from ..table import Note
from .parts import Part
from .selection import chosen
from .sniff import Format, format_of
from .sources import Source


@dataclass(frozen=True, eq=False)
class Run:
    """What a run folder holds beside its traces. ``sources`` are by rank; ``refused`` are ranks whose trace is none."""

    about: dict[str, Any]
    provenance: Provenance
    notes: list[Note]
    sources: dict[int, Source]
    dumps: dict[int, dict[str, Any]]  # what each rank's flight recorder held at the end; empty where there was none


def read_run(folder: RunFolder, name: str, ranks: Collection[int] | None) -> Run:
    """Everything but the traces themselves. Raises TraceError for a rank that is not there and for damaged JSON.

    A run that was stopped while it wrote leaves damaged traces: what opens is opened, and the rest is noted.
    """
    about: dict[str, Any] = {
        "folder": name,
        "experiment": _json(folder.experiment),
        "environment": _json(folder.environment),
        "result": _json(folder.result),
        "metrics": {},
        "memory": {},
    }
    notes: list[Note] = []
    if not folder.is_finished:
        notes.append(Note("unfinished run: it has no result.json, and what is there may be incomplete", 1))
    sources: dict[int, Source] = {}
    dumps: dict[int, dict[str, Any]] = {}
    for rank in chosen(list(folder.ranks()), ranks, name):
        files = folder.rank(rank)
        about["metrics"][str(rank)] = _json_lines(files.metrics)
        about["memory"][str(rank)] = _json(files.memory)
        if error := _json(files.error):
            notes.append(Note(f"rank {rank} raised", 1, str(error.get("message", ""))[:200]))
        if files.snapshot.is_file() and (snapshot := _snapshot(files.snapshot, rank, notes)):
            about.setdefault("allocator", {})[str(rank)] = snapshot
        if files.trace.is_file() and (source := _source(files.trace, _json(files.lanes), rank, notes)):
            sources[rank] = source
            dumps[rank] = _json(files.flight)
    return Run(about, _provenance(about["environment"]), notes, sources, dumps)


def note_unread(rank: int, error: TraceError, notes: list[Note]) -> None:
    notes.append(Note(f"the trace of rank {rank} could not be read", 1, str(error)))


def part_of(rank: int, parts: Sequence[Part], notes: list[Note]) -> Part:
    """The rank's own part of its trace, or the first where none says that it is."""
    part = next((part for part in parts if part.rank == rank), parts[0])
    if part.rank not in (None, rank):
        what = f"the folder says rank {rank}, its trace another; the folder was believed"
        notes.append(Note(what, 1, str(part.rank)))
    if len(parts) > 1:
        notes.append(Note(f"further ranks in the trace of rank {rank}, left out", len(parts) - 1))
    return part


def _source(trace: Path, lanes: Mapping[str, Any], rank: int, notes: list[Note]) -> Source | None:
    try:
        format_ = format_of(trace)
        if format_ is not Format.KINETO:
            raise TraceError(f"{trace} is a {format_}; the trace of a rank is Kineto JSON")
    except TraceError as error:
        note_unread(rank, error, notes)
        return None
    return Source(trace, str(trace), format_, lane_names={str(thread): str(name) for thread, name in lanes.items()})


def _snapshot(path: Path, rank: int, notes: list[Note]) -> Any:
    try:
        content = load_pickle(path)
        if not allocator_snapshot.is_snapshot(content):
            raise TraceError(f"{path} is no allocator snapshot")
    except TraceError as error:
        notes.append(Note(f"the memory snapshot of rank {rank} could not be read", 1, str(error)))
        return None
    return allocator_snapshot.part_of(content, str(path)).about["allocator"]


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
