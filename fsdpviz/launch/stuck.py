"""Where each rank of a stuck run stands, from its status and its flight recorder.

A flight recorder entry is one collective of one rank. ``collective_seq_id`` counts the collectives of a
process group; every member must issue the same ones in one order, so it finds a rank that lags or differs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import RunFolderError
from ..experiment.run_folder import RunFolder, read_json
from .status import RankStatus

SHOWN = 3  # last collectives a rank


@dataclass(frozen=True)
class Collective:
    """One collective as one rank recorded it. ``number`` is its place in the order of its group, from 1."""

    group: str
    number: int
    name: str
    is_done: bool

    def __str__(self) -> str:
        return f"{self.name} #{self.number} of {self.group} {'completed' if self.is_done else 'not completed'}"


@dataclass(frozen=True)
class FlightRecord:
    """What one rank's recorder holds, in order of issue; ``members`` are the ranks of groups it knows."""

    collectives: tuple[Collective, ...] = ()
    members: Mapping[str, tuple[int, ...]] | None = None

    def newest(self, group: str) -> Collective | None:
        return max((c for c in self.collectives if c.group == group), key=lambda c: c.number, default=None)

    def get(self, group: str, number: int) -> Collective | None:
        return next((c for c in self.collectives if c.group == group and c.number == number), None)


def parse_flight_record(dump: Mapping[str, Any]) -> FlightRecord:
    """A record of the JSON that ``_dump_fr_trace_json`` gives. Point-to-point entries are left out."""
    collectives = []
    for entry in dump.get("entries", ()):
        if entry.get("is_p2p"):
            continue
        backend, colon, name = str(entry.get("profiling_name", "")).partition(":")
        collectives.append(
            Collective(
                group=_group_name(entry.get("process_group", ())),
                number=int(entry.get("collective_seq_id", 0)),
                name=name if colon else backend,
                # gloo's entries stay "scheduled" for good, and only "retired" tells
                is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
            )
        )
    members = {}
    for config in dump.get("pg_config", {}).values():
        if config.get("name"):
            members[_group_name((config["name"], config.get("desc", "")))] = _ranks(config.get("ranks", ""))
    return FlightRecord(tuple(collectives), members)


def _group_name(name_and_description: Iterable[str]) -> str:
    """``"default_pg"``, or ``"shard (3)"`` for the others: their descriptions repeat, their names do not."""
    name, description = (*map(str, name_and_description), "", "")[:2]
    if description == "default_pg":
        return description
    return f"{description} ({name})" if description not in ("", "undefined") else f"group {name}"


def _ranks(text: Any) -> tuple[int, ...]:
    try:
        ranks = ast.literal_eval(text) if isinstance(text, str) else text
        return tuple(int(rank) for rank in ranks)
    except (ValueError, SyntaxError, TypeError):
        return ()


def find_stragglers(records: Mapping[int, FlightRecord]) -> list[str]:
    """One line for each group whose ranks are not at the same collective, or where all wait inside one."""
    lines = []
    groups = dict.fromkeys(c.group for record in records.values() for c in record.collectives)
    for group in groups:
        newest = {
            rank: record.newest(group)
            for rank, record in records.items()
            if record.newest(group) or rank in _members(group, records)
        }
        if line := _describe_group(group, newest, records):
            lines.append(line)
    return lines


def _members(group: str, records: Mapping[int, FlightRecord]) -> set[int]:
    if group == "default_pg":
        return set(records)
    return {rank for record in records.values() for rank in (record.members or {}).get(group, ())}


def _describe_group(group: str, newest: Mapping[int, Collective | None], records: Mapping[int, FlightRecord]) -> str:
    reached = {rank: collective.number if collective else 0 for rank, collective in newest.items()}
    behind = min(reached.values())
    ahead = [rank for rank in reached if reached[rank] > behind]
    if ahead:
        lagging = [rank for rank in reached if reached[rank] == behind]
        entered = records[ahead[0]].get(group, behind + 1)
        name = entered.name if entered else "collective"
        last = newest[lagging[0]]
        did = f"{'it' if len(lagging) == 1 else 'they'} last did {last.name} #{behind}" if last else "it did none there"
        return f"{_name_ranks(ahead)} entered {name} #{behind + 1} of {group}; {_name_ranks(lagging)} did not ({did})"
    names = {collective.name for collective in newest.values() if collective}
    if len(names) > 1:
        each = ", ".join(f"rank {rank} {c.name}" for rank, c in newest.items() if c)
        return f"ranks differ at #{behind} of {group}: {each}; all must issue the same collectives in one order"
    waiting = [rank for rank, collective in newest.items() if collective and not collective.is_done]
    if waiting:
        return f"{_name_ranks(waiting)} entered {names.pop()} #{behind} of {group} and did not complete it"
    return ""


def _name_ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def describe_stuck(folder: RunFolder, statuses: Mapping[int, RankStatus]) -> str:
    """Several lines: each rank's stage and last collectives, then which rank keeps which waiting."""
    lines = []
    records: dict[int, FlightRecord] = {}
    for rank, status in statuses.items():
        record = _read_flight(folder, rank)
        if record is None:
            lines.append(f"rank {rank}: {status}; it left no flight record")
            continue
        records[rank] = record
        last = ", ".join(str(collective) for collective in record.collectives[-SHOWN:])
        lines.append(f"rank {rank}: {status}; last collectives: {last or 'none'}")
    found = find_stragglers(records) if len(records) > 1 else []
    if records and not found:
        found = ["no collective is pending; stacks.txt of each rank says where it was"]
    return "\n".join(lines + found)


def _read_flight(folder: RunFolder, rank: int) -> FlightRecord | None:
    try:
        dump = read_json(folder.rank(rank).flight)
        return parse_flight_record(dump) if dump else None
    except (RunFolderError, TypeError, ValueError, AttributeError):  # cut, or of a torch with another format
        return None
