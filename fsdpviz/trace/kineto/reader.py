"""Reads Kineto JSON, from 2020's schema to today's, into columns of events.

Nothing is interpreted here: kinds are decided in ``classify``, units and phases in ``attribute``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ...base.errors import TraceError
from ..reading.progress import Progress
from ..table import Note, Tally, summed
from .arguments import NO_NUMBER, Message, Tensors, integer_of, rank_of
from .blocks import ahead, blocks
from .columns import Coded, ColumnBuilder
from .events import EventReader
from .scanner import scanner_of

__all__ = ["EVENT_SCHEMA", "Message", "Recording", "Tensors", "read_recording"]

EVENT_SCHEMA: dict[str, Any] = {
    "category": pl.String,  # today's spelling: "cpu_op", not 2020's "Operator"
    "name": pl.String,
    "process": pl.String,
    "thread": pl.String,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "correlation": pl.Int64,
    "bytes": pl.Int64,  # of a copy or a memset
}
_SMALL_BYTES = 2_000_000  # a smaller file is unpacked in less time than two threads lose to each other


@dataclass(frozen=True, eq=False)
class Recording:
    """One file's events, as EVENT_SCHEMA's columns, with absolute times where the file knows them."""

    path: Path
    codes: Mapping[str, Coded]  # category, name, process and thread
    numbers: Mapping[str, np.ndarray]  # the others of EVENT_SCHEMA, NO_NUMBER for null
    tensors: dict[int, Tensors]  # by row of ``events``; only of operators that communicate
    messages: dict[int, Message]  # by row; only of collectives whose arguments were recorded
    thread_names: dict[tuple[str, str], str]
    header: dict[str, Any]
    notes: tuple[Note, ...]
    differentiated: np.ndarray | None = None  # rows of operators that autograd recorded; None where unknown
    process_names: dict[str, str] = field(default_factory=dict)
    process_labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_frame(cls, path: Path, events: pl.DataFrame, *more: Any) -> Recording:
        """The same of events in EVENT_SCHEMA's columns; ``more`` is the rest in order."""
        codes = {
            name: Coded.of(events[name].fill_null("")) for name, dtype in EVENT_SCHEMA.items() if dtype == pl.String
        }
        numbers = {name: events[name].fill_null(NO_NUMBER).to_numpy() for name in EVENT_SCHEMA if name not in codes}
        return cls(path, codes, numbers, *more)

    @cached_property
    def events(self) -> pl.DataFrame:
        """EVENT_SCHEMA's columns. Made when first asked for: the table of spans is made of the arrays."""
        numbers = {name: pl.Series(values, dtype=pl.Int64) for name, values in self.numbers.items()}
        for name in ("correlation", "bytes"):
            numbers[name] = numbers[name].set(numbers[name] == NO_NUMBER, None)
        return pl.DataFrame({name: column.series() for name, column in self.codes.items()} | numbers)

    def only(self, rows: np.ndarray, header: dict[str, Any], notes: tuple[Note, ...]) -> Recording:
        """The same with these rows alone, which rise."""
        at = list(enumerate(rows.tolist()))
        kept = {
            name: {place: by_row[row] for place, row in at if row in by_row}
            for name, by_row in (("tensors", self.tensors), ("messages", self.messages))
        }
        differentiated = self.differentiated
        if differentiated is not None and len(differentiated):
            found = differentiated[np.minimum(np.searchsorted(differentiated, rows), len(differentiated) - 1)]
            differentiated = (found == rows).nonzero()[0]
        return replace(
            self,
            codes={name: column.only(rows) for name, column in self.codes.items()},
            numbers={name: values[rows] for name, values in self.numbers.items()},
            header=header,
            notes=notes,
            differentiated=differentiated,
            **kept,
        )

    def names_of(self, process: str) -> tuple[str, str, str]:
        """What a process is called: by its id, its name and its label, "" where it has none."""
        return process, self.process_names.get(process, ""), self.process_labels.get(process, "")

    @property
    def rank(self) -> int | None:
        """The rank that the file itself states."""
        info = self.header.get("distributedInfo")
        return rank_of(info.get("rank")) if isinstance(info, dict) else None

    @property
    def group_size(self) -> int | None:
        """Ranks in each process group that communicates, where the file knows one such size."""
        info = self.header.get("distributedInfo")
        groups = info.get("pg_config") if isinstance(info, dict) else None
        if not isinstance(groups, list):
            return None
        sizes = {integer_of(group.get("pg_size")) for group in groups if isinstance(group, dict)} - {None, 1}
        return sizes.pop() if len(sizes) == 1 else None


def read_recording(path: Path, on_read: Progress = lambda read_bytes: None) -> Recording:
    """The events of one Kineto JSON file, gzipped or not, whatever its size. ``on_read`` hears of the file's bytes as
    they are read.

    Control characters, missing keys and files cut short are repaired and noted. Raises TraceError, one line
    with the file and the cause, when nothing of it is a trace.
    """
    notes: list[Note] = []
    pieces = blocks(path, notes, on_read)
    if _size(path) <= _SMALL_BYTES:
        return recording_of(path, pieces, notes)
    with closing(ahead(pieces)) as read_ahead:  # a notebook keeps the frames of an error, and so would keep the thread
        return recording_of(path, read_ahead, notes)


def recording_of(path: Path, pieces: Iterator[bytes], notes: list[Note]) -> Recording:
    """The same of the file's bytes; ``notes`` may grow while they are taken, and ``path`` is what errors call it."""
    tally = Tally()
    columns = ColumnBuilder(tally)
    reader = EventReader(path, pieces, notes, scanner_of(columns.text_codes))
    try:
        for events in reader:
            columns.add(events)
    except RecursionError:
        raise TraceError(f"{path} is nested too deeply to be a trace") from None
    if not columns.has_any_event:
        raise TraceError(f"{path} is JSON but no trace: nothing in it is an event")
    columns.note_what_is_left_out()
    notes += tally.notes.values()
    return _recording(path, columns, reader.header, notes)


def _recording(path: Path, columns: ColumnBuilder, header: dict[str, Any], notes: list[Note]) -> Recording:
    base_ns = _base_time_ns(header, notes)
    integers = columns.integers()
    integers["start_ns"] += base_ns
    return Recording(
        path,
        columns.coded(),
        integers,
        columns.tensors,
        columns.messages,
        columns.thread_names,
        header,
        summed(notes),
        differentiated=columns.differentiated(),
        process_names=columns.process_names,
        process_labels=columns.process_labels,
    )


def _size(path: Path) -> int:
    """0 where there is no such file, which reading then reports."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _base_time_ns(header: dict[str, Any], notes: list[Note]) -> int:
    base = header.get("baseTimeNanoseconds", 0)
    if isinstance(base, str) and re.fullmatch(r"-?[0-9]{1,19}", base):
        base = int(base)
    if isinstance(base, int) and not isinstance(base, bool) and abs(base) < 2**61:
        return base
    notes.append(Note("baseTimeNanoseconds that is no time, taken as 0", 1, str(base)[:40]))
    return 0
