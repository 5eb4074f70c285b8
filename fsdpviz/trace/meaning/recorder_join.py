"""A run's flight recorder joined to its trace: each collective's group and sequence number.

The recorder notes a collective while the operator that issues it runs (``c10d::_allgather_base_``), on the same
host's clock. An entry that lies inside one such operator, alone, is that operator's; the collective it issued, or the
emulated transfer around it, takes the entry's group and number. Nothing that the trace itself says is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from ...base.kinds import COMMUNICATION
from .spans import RankTables
from .windows import Windows

_KINDS = [kind.value for kind in COMMUNICATION]
_NUMBERED = {"group": pl.String, "sequence": pl.Int64}


def with_recorder(tables: RankTables, dump: Mapping[str, Any]) -> RankTables:
    """The tables with ``group`` and ``sequence`` filled in where they were unknown and the dump tells."""
    entries = list(_entries(dump))
    rows = tables.spans.with_row_index("row").with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    operators = rows.filter(pl.col("name").str.starts_with("c10d::"))
    found = _inside_one(operators, entries)
    if not found:
        return tables
    issued = rows.filter(pl.col("kind").is_in(_KINDS) & pl.col("sequence").is_null())
    filled = {row: entries[entry] for row, entry in _issuers(issued, operators, found)}
    told = pl.DataFrame(
        [(row, group, sequence) for row, (_, group, sequence) in filled.items()],
        schema={"row": pl.UInt32} | {f"told_{name}": dtype for name, dtype in _NUMBERED.items()},
        orient="row",
    )
    joined = rows.join(told, on="row", how="left", maintain_order="left")
    spans = joined.with_columns(pl.coalesce(name, f"told_{name}").alias(name) for name in _NUMBERED)
    return replace(tables, spans=spans.select(tables.spans.columns))


def _entries(dump: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """When each collective was noted (ns), its group and its number in it; odd entries are left out."""
    listed = dump.get("entries")
    for entry in listed if isinstance(listed, list) else ():
        if not isinstance(entry, dict):
            continue
        time_ns, number, group = _count(entry.get("time_created_ns")), sequence_of(entry), entry.get("process_group")
        if isinstance(group, list) and group and isinstance(group[0], str) and None not in (time_ns, number):
            yield time_ns, group[0], number  # type: ignore[misc]


def sequence_of(entry: Mapping[Any, Any]) -> int | None:
    """The number of an entry among those of its group: point-to-point is counted apart; older dumps have one
    number for both.
    """
    key = "p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id"
    return _count(entry.get(key, entry.get("seq_id")))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**62 else None


def _inside_one(operators: pl.DataFrame, entries: list[tuple[int, str, int]]) -> dict[int, int]:
    """Entry by operator (places in both), where each is the other's only one."""
    times_ns = np.array([entry[0] for entry in entries], np.int64)
    order = np.argsort(times_ns, kind="stable")
    first = np.searchsorted(times_ns[order], operators["start_ns"].to_numpy(), "left")
    last = np.searchsorted(times_ns[order], operators["end_ns"].to_numpy(), "right")
    alone = (last - first == 1).nonzero()[0]
    found = {int(place): int(order[first[place]]) for place in alone}
    claims = Counter(found.values())
    return {place: entry for place, entry in found.items() if claims[entry] == 1}


def _issuers(issued: pl.DataFrame, operators: pl.DataFrame, found: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Row of each transfer and the entry of the operator that issued it, or that runs inside it (a link)."""
    times = operators.select("lane", "start_ns", "end_ns").rows()
    windows = Windows((*times[place], place) for place in found)
    lanes, starts = issued["issued_lane"].fill_null(-1).to_numpy(), issued["issued_ns"].fill_null(-1).to_numpy()
    for row, place in zip(issued["row"], windows.names_at(lanes.astype(np.int64), starts), strict=True):
        if place is not None:
            yield row, found[place]
    links = issued.filter(pl.col("name").str.starts_with("fsdpviz::")).select("lane", "start_ns", "end_ns", "row")
    around = Windows(links.iter_rows())
    places = list(found)
    at = around.names_at(
        np.array([times[place][0] for place in places], np.int64),
        np.array([times[place][1] for place in places], np.int64),
    )
    carried = Counter(row for row in at if row is not None)
    for place, row in zip(places, at, strict=True):
        if row is not None and carried[row] == 1:
            yield row, found[place]
