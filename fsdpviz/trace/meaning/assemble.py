"""What was decided of each row, put together as the tables of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.ma  # polars asks whether an array is masked, and would import it while a trace is read
import polars as pl

from ..kineto.reader import Recording
from ..table import DTYPE, KIND, NO_GROUPS, NO_STEPS, SPAN_SCHEMA, STEP_SCHEMA, Note, frame_of, taken
from .codes import KIND_CODE, PHASE_CODE
from .groups import group_table
from .lanes import lane_table
from .rows import Rows
from .windows import Windows, depths

_KINDS = pl.Series(list(KIND_CODE), dtype=KIND)
_NUMPY = {pl.Int32: np.int32, pl.Int64: np.int64}
_NULL = {dtype: pl.Series([None], dtype=dtype) for dtype in (pl.Int32, pl.Int64, pl.String, DTYPE)}


@dataclass(frozen=True, eq=False)
class RankTables:
    """One rank's part of a Trace."""

    spans: pl.DataFrame
    lanes: pl.DataFrame
    steps: pl.DataFrame
    notes: tuple[Note, ...]
    groups: pl.DataFrame = field(default_factory=lambda: NO_GROUPS)


@dataclass(frozen=True, eq=False)
class Decided:
    """By row: codes of KIND_CODE, PHASE_CODE and into ``units``; −1 where there is none."""

    kind: np.ndarray
    phase: np.ndarray
    unit: np.ndarray
    units: list[str]
    step: np.ndarray
    bytes: np.ndarray
    is_link: np.ndarray
    issued_lane: np.ndarray
    issued_ns: np.ndarray  # counts where there is an issuing lane
    dtype: dict[int, str]  # of some rows
    group_size: dict[int, int]  # of some rows
    steps: Windows[int]
    main: int  # lane of the training loop
    notes: list[Note]


def assembled(
    recording: Recording, rows: Rows, decided: Decided, rank: int, lane_names: Mapping[str, str]
) -> RankTables:
    """The tables of ``rank``, with SPAN_SCHEMA's columns and its like."""
    step, size, launch, issue = _Known.each(
        decided.step >= 0, decided.bytes >= 0, rows.correlation > 0, decided.issued_lane >= 0
    )
    columns: dict[str, Any] = {
        "rank": np.full(len(rows), rank, np.int32),
        "lane": rows.lane,
        "start_ns": rows.start_ns,
        "duration_ns": rows.duration_ns,
        "name": rows.name.series(),
        "kind": taken(_KINDS, decided.kind),
        "unit": _coded(decided.units, decided.unit),
        "phase": _coded([*PHASE_CODE], decided.phase),
        "step": step.column(decided.step, pl.Int32),
        "bytes": size.column(decided.bytes, pl.Int64),
        **_said(rows, decided),
        "launch": launch.column(rows.correlation, pl.Int64),
        "depth": depths(rows.lane, rows.start_ns, rows.end_ns),
        "issued_lane": issue.column(decided.issued_lane, pl.Int32),
        "issued_ns": issue.column(decided.issued_ns, pl.Int64),
    }
    return RankTables(
        spans=frame_of(SPAN_SCHEMA, columns),
        lanes=lane_table(recording, rank, rows, decided.kind, decided.is_link, decided.main, lane_names),
        steps=_step_table(rank, decided.steps),
        notes=tuple(decided.notes),
        groups=group_table(rank, recording.header, rows.messages.values()),
    )


def _step_table(rank: int, steps: Windows[int]) -> pl.DataFrame:
    if not len(steps):
        return NO_STEPS
    columns = {"step": steps.names, "start_ns": steps.start_ns, "end_ns": steps.end_ns}
    return frame_of(STEP_SCHEMA, {"rank": [rank] * len(steps), **columns})


def _said(rows: Rows, decided: Decided) -> dict[str, pl.Series]:
    """Group, its size, element type and sequence number, where a collective's own arguments or its issuer's tell."""
    groups: dict[int, str | None] = {}
    sequences: dict[int, int | None] = {}
    types: dict[int, str | None] = {**decided.dtype}
    sizes: dict[int, int | None] = {**decided.group_size}
    for row, message in rows.messages.items():
        groups[row] = message.group
        sequences[row] = message.sequence
        types[row] = message.dtype or types.get(row)
        sizes[row] = message.group_size or sizes.get(row)
    return {
        "group": _sparse(groups, len(rows), pl.String),
        "dtype": _sparse(types, len(rows), DTYPE),
        "group_size": _sparse(sizes, len(rows), pl.Int32),
        "sequence": _sparse(sequences, len(rows), pl.Int64),
    }


def _sparse(values: dict[int, Any], count: int, dtype: Any) -> pl.Series:
    """A column that has values in some rows only."""
    if not values:
        return _nulls(count, dtype)
    at = np.full(count, len(values), np.uint32)
    at[list(values)] = np.arange(len(values), dtype=np.uint32)
    return taken(pl.Series([*values.values(), None], dtype=dtype), at)


def _coded(texts: list[str], codes: np.ndarray) -> pl.Series:
    """The text of each code, null at −1."""
    is_null = codes < 0
    if is_null.all():
        return _nulls(len(codes), pl.String)
    return taken(pl.Series([*texts, None], dtype=pl.String), np.where(is_null, len(texts), codes))


@dataclass(frozen=True)
class _Known:
    """Makes columns that are null outside some rows; ``mask`` is None where they are all rows, or none."""

    count: int
    mask: pl.Series | None

    @classmethod
    def each(cls, *masks: np.ndarray) -> list[_Known]:
        """One for each mask, all of one length. They become one Series: making it costs more than what is in it."""
        rows, counts = len(masks[0]), [int(np.count_nonzero(mask)) for mask in masks]
        together = pl.Series(np.concatenate(masks))
        return [
            cls(count, together.slice(number * rows, rows) if 0 < count < rows else None)
            for number, count in enumerate(counts)
        ]

    def column(self, values: np.ndarray, dtype: Any) -> pl.Series:
        if not self.count:
            return _nulls(len(values), dtype)
        known = pl.Series(values.astype(_NUMPY[dtype], copy=False))
        return known if self.mask is None else known.zip_with(self.mask, _NULL[dtype])


def _nulls(count: int, dtype: Any) -> pl.Series:
    return _NULL[dtype].new_from_index(0, count)
