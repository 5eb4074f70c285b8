"""The one table that every reader fills: a Trace is a table of spans, a table of lanes, and what the file said.

Times are integer nanoseconds on the recording's own clock; ``Trace.origin_ns`` is the earliest of them, so that
pictures may start at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from ..base.kinds import Kind
from ..base.provenance import Provenance

KIND = pl.Enum([kind.value for kind in Kind])

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

STEP_SCHEMA: dict[str, Any] = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}


@dataclass(frozen=True)
class Note:
    """Something a reader dropped, repaired or guessed: what, how often, and one example."""

    what: str
    count: int
    example: str = ""

    def __str__(self) -> str:
        example = f", for example {self.example}" if self.example else ""
        return f"{self.what} ({self.count}×{example})"


@dataclass(frozen=True, eq=False)
class Trace:
    """What was recorded. Immutable; readers make it, analyses read it.

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

    @cached_property
    def ranks(self) -> list[int]:
        return self.spans["rank"].unique().sort().to_list()

    @cached_property
    def origin_ns(self) -> int:
        """The earliest time in the recording; 0 for an empty one."""
        earliest = self.spans["start_ns"].min()
        return earliest if isinstance(earliest, int) else 0
