"""Every transfer between ranks, one row each, with what the file knows or lets recover of it.

    bus bandwidth = S / t × f(n)      GB/s, 1 GB = 1e9 bytes

with S the full (gathered) size, t the span's own duration and n the ranks of the group; f is nccl-tests'
(doc/PERFORMANCE.md): 2(n − 1)/n for all-reduce, (n − 1)/n for all-gather, reduce-scatter and all-to-all, 1 for
broadcast and point-to-point. Each copy of a copy engine carries a part, all of which moves: S is its own size, and f is
1. A span of a rank that came early holds its wait for the others, so that its bandwidth is a lower bound; the shortest
span among the group's ranks is the transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from ...base.kinds import COMMUNICATION, Kind
from ..table import DTYPE, KIND
from .groups import role_of

if TYPE_CHECKING:
    from ..table import Trace

COLLECTIVE_SCHEMA: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "lane": pl.Int32,
    "name": pl.String,
    "kind": KIND,
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "issued_ns": pl.Int64,  # null where the file has no launch
    "bytes": pl.Int64,  # the full (gathered) size; what an all-to-all sends; of a copy its own; null where unknown
    "dtype": DTYPE,  # null where unknown, or where its tensors have several
    "group": pl.String,  # null where the file names none and more than one would fit
    "group_size": pl.Int32,
    "group_ranks": pl.List(pl.Int32),
    "sequence": pl.Int64,  # number within the group, the same on all its ranks
    "role": pl.String,  # "shard" or "replicate"; null where nothing tells
    "scope": pl.String,  # "intra-node" or "inter-node"; null where the ranks' hosts are not known
    "unit": pl.String,
    "phase": pl.String,
    "busbw_gbps": pl.Float64,  # null without bytes, group size or duration
}

IS_COPY = pl.col("name").str.contains("^(?i:memcpy|copy)")
"""Of a transfer: whether a copy engine made it."""

_KINDS = [kind.value for kind in COMMUNICATION]


def collective_table(trace: Trace) -> pl.DataFrame:
    """COLLECTIVE_SCHEMA's columns, by rank and start."""
    spans = trace.spans.filter(pl.col("kind").is_in(_KINDS)).with_columns(_role_by_use())
    groups = trace.groups.with_columns(
        pl.col("description").map_elements(role_of, return_dtype=pl.String, skip_nulls=True).alias("role_of_group")
    )
    spans = _with_groups(spans, groups)
    scope = pl.col("group_ranks").map_elements(_scopes(_hosts(trace)), return_dtype=pl.String, skip_nulls=True)
    return (
        spans.with_columns(scope=scope, role=pl.coalesce("role_of_group", "role_by_use"))
        .with_columns(busbw_gbps=_bus_bandwidth())
        .select(*COLLECTIVE_SCHEMA)
        .cast(pl.Schema(COLLECTIVE_SCHEMA))
        .sort("rank", "start_ns", "lane")
    )


def _role_by_use() -> pl.Expr:
    """What FSDP itself does: its units gather and scatter in the shard group, and all-reduce across replicas."""
    of_unit = pl.col("unit").is_not_null()
    shards = pl.col("kind").is_in([Kind.ALL_GATHER.value, Kind.REDUCE_SCATTER.value])
    return (
        pl.when(of_unit & shards)
        .then(pl.lit("shard"))
        .when(of_unit & (pl.col("kind") == Kind.ALL_REDUCE.value))
        .then(pl.lit("replicate"))
        .alias("role_by_use")
    )


def _with_groups(spans: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Adds group_size, group_ranks and role_of_group; a span that names no group gets the only one that fits."""
    with_ranks = groups.filter(pl.col("size").fill_null(2) > 1)
    only = with_ranks.group_by("rank").agg(pl.col("group").first().alias("only_group"), pl.len().alias("count"))
    by_role = (
        with_ranks.filter(pl.col("role_of_group").is_not_null())
        .group_by("rank", role_by_use="role_of_group")
        .agg(pl.col("group").first().alias("role_group"), pl.len().alias("role_count"))
    )
    spans = spans.join(only.filter(pl.col("count") == 1).drop("count"), on="rank", how="left")
    spans = spans.join(
        by_role.filter(pl.col("role_count") == 1).drop("role_count"), on=["rank", "role_by_use"], how="left"
    )
    known = groups.select("rank", "group", "role_of_group", size_of_group="size", group_ranks="ranks").unique(
        ["rank", "group"], keep="first"
    )
    guessed = spans.with_columns(
        group=pl.coalesce("group", "role_group", "only_group"), is_named=pl.col("group").is_not_null()
    ).join(known, on=["rank", "group"], how="left")
    fits = pl.col("is_named") | (pl.col("size_of_group") == pl.col("group_size")).fill_null(True)
    return guessed.with_columns(
        pl.when(fits).then(name).alias(name) for name in ("group", "group_ranks", "role_of_group", "size_of_group")
    ).with_columns(group_size=pl.coalesce("group_size", "size_of_group"))


def _hosts(trace: Trace) -> Mapping[int, str]:
    from ..align import hosts_of

    return hosts_of(trace)


def _scopes(hosts: Mapping[int, str]) -> Any:
    def scope(ranks: Any) -> str | None:
        found = {hosts.get(rank) for rank in ranks}
        if None in found and len(found - {None}) < 2:
            return None
        return "intra-node" if len(found) == 1 else "inter-node"

    return scope


def _bus_bandwidth() -> pl.Expr:
    size = pl.col("group_size").cast(pl.Float64)
    share = (size - 1) / size
    kind = pl.col("kind")
    factor = (
        pl.when(kind.is_in([Kind.BROADCAST.value, Kind.P2P.value]) | IS_COPY)
        .then(1.0)
        .when(kind == Kind.ALL_REDUCE.value)
        .then(2 * share)
        .otherwise(share)
    )
    return pl.when(pl.col("duration_ns") > 0).then(pl.col("bytes") / pl.col("duration_ns") * factor)
