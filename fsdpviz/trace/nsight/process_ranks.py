"""Which rank a process is, from the payloads of NCCL's own NVTX ranges."""

from __future__ import annotations

import json

import polars as pl

from .database import NsysDatabase


def stated_ranks(database: NsysDatabase) -> dict[int, int]:
    """The rank by process (the upper bits of its global id); empty unless the payloads were exported as JSON.

    NCCL says ``"Rank"`` and ``"No. of ranks"`` for each communicator: the largest one's is the rank in the job. A
    process that says two ranks of equally large ones is not told.
    """
    columns = {"globalTid": pl.Int64, "jsonText": pl.String, "jsonTextId": pl.Int64}
    events = database.read("NVTX_EVENTS", columns)
    strings = database.read("StringIds", {"id": pl.Int64, "value": pl.String}).unique("id", keep="first")
    events = events.join(strings, left_on="jsonTextId", right_on="id", how="left")
    texts = events.select(owner=pl.col("globalTid") // 2**24, text=pl.coalesce("jsonText", "value")).drop_nulls()
    largest: dict[int, tuple[int, set[int]]] = {}
    for owner, text in texts.filter(pl.col("text").str.contains('"Rank"', literal=True)).unique().iter_rows():
        said = _said(text)
        if said is None:
            continue
        if said[0] > largest.get(owner, (0, set()))[0]:
            largest[owner] = said[0], set()
        if said[0] == largest.get(owner, (0, set()))[0]:
            largest[owner][1].add(said[1])
    return {owner: min(ranks) for owner, (_, ranks) in largest.items() if len(ranks) == 1}


def _said(text: str) -> tuple[int, int] | None:
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        return None
    values = [payload.get(key) for key in ("No. of ranks", "Rank")] if isinstance(payload, dict) else []
    texts = [str(value) for value in values]
    numbers = [int(text) for text in texts if text.isdecimal() and len(text) < 10]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None
