"""What a reader hands over: one file's part of a Trace for one rank, before that rank is known for sure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import polars as pl

from ..meaning.spans import RankTables
from ..meaning.windows import depths
from ..table import LANE_SCHEMA, NO_STEPS, SPAN_SCHEMA, Note


class Role(StrEnum):
    """What a file tells of its rank. A rank may have one of each."""

    TRACE = "trace"  # what ran, and when
    DUMP = "flight-recorder dump"  # the last collectives and their state
    SNAPSHOT = "memory snapshot"  # what was allocated


@dataclass(frozen=True, eq=False)
class Part:
    """One rank of one file. The ``rank`` column of ``tables`` means nothing yet; ``ranks.as_rank`` sets it.

    ``about`` goes to ``Trace.about`` by section, as ``{section: {"<rank>": value}}``.
    """

    name: str  # of the file, as messages call it
    tables: RankTables
    rank: int | None = None  # that the file itself states
    rank_by_name: int | None = None
    rank_by_gpu: int | None = None  # its GPU's number, where a file of several GPUs states no rank
    about: Mapping[str, Any] = field(default_factory=dict)
    short_name: str = ""
    role: Role = Role.TRACE


def tables_of(
    spans: Mapping[str, Sequence[Any]], lanes: Sequence[Mapping[str, Any]], notes: Sequence[Note], **more: Any
) -> RankTables:
    """The tables of a reader that makes its spans itself; columns that it does not know are null.

    ``spans`` must have lane, start_ns, duration_ns, name and kind; ``lanes`` are LANE_SCHEMA's rows. Depths are found.
    """
    count = len(spans["start_ns"])
    columns = {
        name: pl.Series(name, spans[name], dtype=dtype, strict=False)
        if name in spans
        else pl.Series(name, [None] * count, dtype=dtype)
        for name, dtype in SPAN_SCHEMA.items()
    }
    columns["rank"] = pl.Series("rank", [0] * count, dtype=pl.Int32)
    frame = pl.DataFrame(columns).sort("lane", "start_ns", pl.col("duration_ns"), descending=[False, False, True])
    start_ns = frame["start_ns"].to_numpy()
    depth = depths(frame["lane"].to_numpy(), start_ns, start_ns + frame["duration_ns"].to_numpy())
    return RankTables(
        spans=frame.with_columns(pl.Series("depth", depth, dtype=pl.Int16)),
        lanes=pl.DataFrame(list(lanes), schema=LANE_SCHEMA),
        steps=NO_STEPS,
        notes=tuple(notes),
        **more,
    )
