"""Which rank a file is: by what it says, then by its name, then by its folder; else numbered, with a note."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from ...base.errors import TraceError
from ..meaning.spans import RankTables
from ..table import Note
from .parts import Part

_NAMED = re.compile(r"(?P<what>[a-z]*?)[_-]?(?P<is_rank>rank|worker)[_-]?(?P<rank>\d{1,6})(?!\d)", re.IGNORECASE)
_AT_END = re.compile(r"(?:^|(?P<what>[a-z]*)[_-])(?P<rank>\d{1,4})$", re.IGNORECASE)
_ENDINGS = re.compile(
    r"(?:\.(?:pt|trace|json|gz|pickle|pkl|sqlite|sqlite3|db|bin))+$",
    re.IGNORECASE,
)
_COUNTS_SOMETHING_ELSE = frozenset({"step", "steps", "iter", "iteration", "epoch", "cycle", "world", "try", "attempt"})
_COUNTS_SOMETHING_ELSE |= {"node", "rank", "worker"}  # "rank_3" was looked at before, and is a local one
# a rank in a part of the run: of one host, among the hosts, along one axis of the mesh
_OF_A_PART = frozenset({"local", "node", "group", "intra", "inter", "shard", "replicate"})
_OF_A_PART |= {"pp", "tp", "dp", "cp", "ep", "sp", "mp", "etp", "dcp"}
_OF_ALL = frozenset({"global", "world"})
_LONGEST = 255  # characters of a file's name on disk; an archive's may have any


def rank_in_name(file_name: str, folder_name: str = "") -> int | None:
    """The rank that a file's name tells, else its folder's name; None where neither does.

    ``rank3.json``, ``worker7_step_12.….pt.trace.json``, ``trace_2.json.gz``, ``dump_15``, ``rank5/trace.json``; of
    ``local_rank1_rank9.json`` it is 9, and ``tp_rank1.json`` and ``tp_1.json`` tell none.
    """
    file_name, folder_name = file_name[-_LONGEST:], folder_name[-_LONGEST:]
    if (rank := rank_said(file_name)) is not None:
        return rank
    stem = _ENDINGS.sub("", file_name)
    match = _AT_END.search(stem)
    if match and (match["what"] or "").lower() not in _COUNTS_SOMETHING_ELSE | _OF_A_PART:
        return int(match["rank"])
    return rank_said(folder_name)


def rank_said(name: str) -> int | None:
    """What follows ``global_rank``, else ``rank``, else ``worker``, whichever is first."""
    found = [match for match in _NAMED.finditer(name) if match["what"].lower() not in _OF_A_PART]
    found.sort(key=lambda match: (match["what"].lower() not in _OF_ALL, match["is_rank"].lower() != "rank"))
    return int(found[0]["rank"]) if found else None


def ranked(parts: Sequence[Part], notes: list[Note]) -> dict[int, Part]:
    """The parts by rank, in rising order, and notes on what was numbered.

    Raises TraceError, with both names and the mend, where two claim one rank.
    """
    known: dict[int, Part] = {}
    unknown: list[Part] = []
    for part in parts:
        rank = part.rank if part.rank is not None else part.rank_by_name
        if rank is None:
            unknown.append(part)
        elif rank in known:
            raise TraceError(_both(known[rank], part, rank))
        else:
            known[rank] = part
    return dict(sorted((known | _numbered(unknown, known, notes)).items()))


def _numbered(unknown: Sequence[Part], known: Collection[int], notes: list[Note]) -> dict[int, Part]:
    """By their GPUs' numbers where those differ, as on one host; else in order."""
    by_gpu = {part.rank_by_gpu: part for part in unknown if part.rank_by_gpu is not None}
    if unknown and len(by_gpu) == len(unknown) and not by_gpu.keys() & set(known):
        notes.append(Note("ranks taken from the GPUs' numbers; the export does not tell them", len(unknown)))
        return {gpu: part for gpu, part in by_gpu.items() if gpu is not None}
    free = (number for number in range(len(known) + len(unknown)) if number not in known)
    if unknown:
        what = "ranks that no file tells, numbered in the order of files, GPUs and processes"
        notes.append(Note(what, len(unknown), unknown[0].short_name))
    return dict(zip(free, unknown, strict=False))


def _both(first: Part, second: Part, rank: int) -> str:
    if first.name == second.name:
        return f"each rank has one file; {first.name} holds rank {rank} twice. Export one process at a time"
    return (
        f"each rank has one file; {first.name} and {second.name} both are rank {rank}. "
        "Open the files of one run at a time"
    )


def as_rank(tables: RankTables, rank: int) -> RankTables:
    """The same tables with this rank in every row."""
    if len(tables.lanes) and tables.lanes.item(0, "rank") == rank:
        return tables
    frames: dict[str, Any] = {}
    for name, value in vars(tables).items():
        if isinstance(value, pl.DataFrame) and len(value):
            ranks = pl.Series("rank", np.full(len(value), rank, np.int32))
            frames[name] = value.clone().replace_column(value.get_column_index("rank"), ranks)
    return replace(tables, **frames)
