"""The one table that every reader fills: a Trace is a table of spans, a table of lanes, and what the file said.

Times are integer nanoseconds on the recording's own clock; ``Trace.origin_ns`` is the earliest of them, so that
pictures may start at zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from ..base.kinds import Kind
from ..base.provenance import Provenance
from .meaning.dtypes import ITEM_BYTES_OF

if TYPE_CHECKING:
    import pandas

    from .validate import Validation

KIND = pl.Enum([kind.value for kind in Kind])
DTYPE = pl.Enum([*ITEM_BYTES_OF])

SPAN_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "lane": pl.Int32,  # row of Trace.lanes with the same rank
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "name": pl.String,
    "kind": KIND,
    "unit": pl.String,  # fully qualified name of the FSDP unit, null where unknown
    "phase": pl.String,  # base.labels.Phase, null where unknown
    "step": pl.Int32,  # the recording's own step number, null outside any step
    "bytes": pl.Int64,  # payload of a transfer, for a collective the full (gathered) size; null where unknown
    "group": pl.String,  # process group, null where unknown
    "launch": pl.Int64,  # correlation id that joins a device span to its launch, null where there is none
    "depth": pl.Int16,  # nesting inside the lane, 0 outermost
    "issued_lane": pl.Int32,  # host lane of the launch, of gloo's issuing operator; null where the file has none
    "issued_ns": pl.Int64,  # when it was issued; null where the file has no launch
    "dtype": DTYPE,  # element type of a collective; null where unknown
    "group_size": pl.Int32,  # ranks that take part in a collective; null where unknown
    "sequence": pl.Int64,  # number of a collective within its group, the same on all its ranks; null where unknown
}

GROUP_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "group": pl.String,  # as Trace.spans names it
    "description": pl.String,  # "default_pg", "mesh_shard"; null where unknown
    "size": pl.Int32,  # ranks in it; null where unknown
    "ranks": pl.List(pl.Int32),  # null where unknown
}

LANE_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "lane": pl.Int32,
    "name": pl.String,  # "main thread", "stream 7", "link intra-node"
    "is_device": pl.Boolean,  # a CUDA stream, or on CPU recordings nothing
    "process": pl.String,  # pid as the file writes it
    "thread": pl.String,  # tid as the file writes it
    "sort": pl.Int32,  # order in a picture, 0 on top
}

CLOCK_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "offset_ns": pl.Int64,  # what was added to the rank's times at the recording's origin
    "drift_ppm": pl.Float64,  # and what more per million ns since then; 0 where the recording is too short to tell
    "residual_ns": pl.Int64,  # median |difference| of matched ends to the reference rank, after; null if none matched
    "matched": pl.Int32,  # collectives whose ends were compared
    "method": pl.String,  # trace.align.Method
}

STEP_SCHEMA: dict[str, Any] = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}

# most recordings have none of these
NO_GROUPS = pl.DataFrame(schema=GROUP_SCHEMA)
NO_STEPS = pl.DataFrame(schema=STEP_SCHEMA)
NO_CLOCK = pl.DataFrame(schema=CLOCK_SCHEMA)


def frame_of(schema: Mapping[str, Any], columns: Mapping[str, Sequence[Any] | np.ndarray | pl.Series]) -> pl.DataFrame:
    """The columns in the order and with the types of the schema. A Series has its type already."""
    first, *others = (_series(name, columns[name], dtype) for name, dtype in schema.items())
    return first.to_frame().hstack(others)  # pl.DataFrame would look through names and types that are right already


def _series(name: str, values: Any, dtype: Any) -> pl.Series:
    if isinstance(values, pl.Series):
        return values.alias(name)
    if not isinstance(values, np.ndarray):
        return pl.Series(name, values, dtype=dtype)
    series = pl.Series(name, values)
    return series if series.dtype == dtype else series.cast(dtype)


def taken(values: pl.Series, codes: np.ndarray) -> pl.Series:
    """The value of each code, which counts from 0."""
    return values[pl.Series(codes.astype(np.uint32, copy=False))]  # an index of another type is looked through first


@dataclass(frozen=True)
class Note:
    """Something a reader dropped, repaired or guessed: what, how often, and one example."""

    what: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", for example {self.example}" if self.example else ""
        return f"{self.what} ({self.count}×{example})"


# notes that say that numbers would be wrong: ``validate`` looks for them
MIXED_RANKS = "processes that launch work, read as one rank: nothing tells which devices are whose"
UNREAD_DEVICE = "spans without a category on lanes that are named as a device's, not read: taken as host"
UNCATEGORISED = "spans without a category, taken as host"


class Tally:
    """Notes while they are being counted: equal ones become one, with the first example."""

    def __init__(self) -> None:
        self.notes: dict[str, Note] = {}

    def add(self, what: str, count: int, example: str = "") -> None:
        before = self.notes.get(what)
        self.notes[what] = Note(what, before.count + count, before.example) if before else Note(what, count, example)


def summed(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Equal notes become one, with their counts added."""
    tally = Tally()
    for note in notes:
        tally.add(note.what, note.count, note.example)
    return tuple(tally.notes.values())


@dataclass(frozen=True, eq=False)
class Context:
    """What a selection was taken from: the whole recording's steps, and its spans without most of the host's operators
    (``meaning.units.needed_spans``).
    """

    spans: pl.DataFrame
    steps: pl.DataFrame
    bounds_ns: tuple[int, int] | None = None  # of a selection by time: from, until
    asked: tuple[int, ...] | None = None  # of one by steps: their numbers


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded. Immutable; readers make it, analyses read it.

    One that was opened with ``steps`` or ``window`` has the spans of those; see ``whole``.

    ``about`` is what the files said of themselves; for a run folder it has ``experiment``, ``environment``,
    ``result`` (each a dict, empty when missing) and, per rank as text keys, ``metrics`` (a list of dicts) and
    ``memory`` (a dict).
    """

    spans: pl.DataFrame
    lanes: pl.DataFrame
    steps: pl.DataFrame
    provenance: Provenance
    notes: tuple[Note, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    groups: pl.DataFrame = field(default_factory=lambda: NO_GROUPS)
    clock: pl.DataFrame = field(default_factory=lambda: NO_CLOCK)
    context: Context | None = None  # of a selection

    @cached_property
    def whole(self) -> Trace:
        """What this was selected from, without most of the host's operators; itself where nothing was left out.

        When a step begins, and when FSDP needed what it gathered, depends on work and ranges beside those that were
        chosen: both are decided on the whole, so that a number does not change with what else is looked at.
        """
        if self.context is None:
            return self
        return replace(self, spans=self.context.spans, steps=self.context.steps, context=None)

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Every transfer between ranks: ``collectives.COLLECTIVE_SCHEMA``. Made when first asked for."""
        from .meaning.collectives import collective_table

        return collective_table(self)

    @cached_property
    def units(self) -> pl.DataFrame:
        """What FSDP moved for each unit, for whom, by whom and when: ``units.UNIT_SCHEMA``. Made when first
        asked for; empty for a recording without FSDP's ranges.
        """
        from .meaning.units import unit_table

        if self.context is None:
            return unit_table(self)
        kept = self.spans.select("rank", "lane", "start_ns", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
        chosen = self.whole.units.join(kept, on=["rank", "lane", "start_ns", "end_ns"], how="semi")
        return chosen.sort("rank", "start_ns", "lane")  # a join promises no order

    def validate(self) -> Validation:
        """Which analyses this recording supports, and for the others, in words, why not."""
        from .validate import validation

        return validation(self)

    def to_pandas(self) -> pandas.DataFrame:
        """The spans, with pandas' nullable types; ``export.pandas_frame`` does the same for the other tables."""
        from .export import pandas_frame

        return pandas_frame(self.spans)

    def write_parquet(self, folder: str | Path) -> Path:
        """Writes all tables and what the files said into a folder of its own, and returns it."""
        from .export import write_folder

        return write_folder(self, folder)

    @staticmethod
    def read_parquet(folder: str | Path) -> Trace:
        """The trace that ``write_parquet`` wrote, every column and type as it was."""
        from .export import read_folder

        return read_folder(folder)

    @cached_property
    def ranks(self) -> list[int]:
        ranks = self.spans["rank"]
        lowest = ranks.min()
        is_one = lowest == ranks.max()  # most often, and found without a hash of each row
        return [lowest] if is_one and isinstance(lowest, int) else sorted(ranks.unique())

    @cached_property
    def origin_ns(self) -> int:
        """The earliest time in the recording; 0 for an empty one."""
        earliest = self.spans["start_ns"].min()
        return earliest if isinstance(earliest, int) else 0
