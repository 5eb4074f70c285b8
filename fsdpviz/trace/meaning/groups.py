"""Process groups: what a file says of them, and what they are for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from ..table import GROUP_SCHEMA, NO_GROUPS

if TYPE_CHECKING:
    from ..kineto.reader import Message

_SHARD = re.compile(r"shard|fsdp", re.IGNORECASE)
_REPLICATE = re.compile(r"replicate|ddp", re.IGNORECASE)
_MOST_COUNTED = 1 << 20  # ranks that a file may state by strides, all its groups together


def group_table(rank: int, header: Mapping[str, Any], messages: Iterable[Message]) -> pl.DataFrame:
    """GROUP_SCHEMA's rows of one rank: the groups of ``distributedInfo.pg_config`` and those that collectives name.

    Where both know a group, the header's ranks are taken: a collective's list is cut after 30.
    """
    found: dict[str, dict[str, Any]] = {}
    counted = 0
    for message in messages:
        if message.group is not None and message.group not in found:
            ranks = message.group_ranks
            if isinstance(ranks, range):  # of a few characters in the file
                counted += len(ranks)
                ranks = tuple(ranks) if counted <= _MOST_COUNTED else None
            found[message.group] = {
                "description": _telling(message.group_description),
                "size": message.group_size,
                "ranks": ranks,
            }
    for name, stated in _stated(header):
        before = found.get(name, {})
        found[name] = {key: stated[key] if stated[key] is not None else before.get(key) for key in stated}
    rows = [{"rank": rank, "group": name, **known} for name, known in found.items()]
    return pl.DataFrame(rows, schema=GROUP_SCHEMA) if rows else NO_GROUPS


def role_of(description: str | None) -> str | None:
    """``"shard"`` or ``"replicate"`` by a group's description, which torch's device meshes write
    (``mesh_shard``, ``mesh_dp_replicate``); None where it says neither, or both.
    """
    if description is None:
        return None
    is_shard, is_replicate = _SHARD.search(description) is not None, _REPLICATE.search(description) is not None
    if is_shard is is_replicate:
        return None
    return "shard" if is_shard else "replicate"


def ranks_in(value: Any) -> tuple[int, ...] | None:
    """The ranks of ``"[0, 1]"`` or ``[0, 1]``; None for anything else, a list that was cut short included."""
    if isinstance(value, str):
        if len(value) > 100_000 or not value.startswith("["):
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value or not all(_is_rank(rank) for rank in value):
        return None
    return tuple(value)


def _stated(header: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    info = header.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if not isinstance(group, dict) or not isinstance(group.get("pg_name"), str):
            continue
        size, description = group.get("pg_size"), group.get("pg_desc")
        yield (
            group["pg_name"],
            {
                "description": _telling(description),
                "size": size if _is_rank(size) else None,
                "ranks": ranks_in(group.get("ranks")),
            },
        )


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _telling(description: Any) -> str | None:
    return description if isinstance(description, str) and description not in ("", "undefined") else None
