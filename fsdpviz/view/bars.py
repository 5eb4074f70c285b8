"""From spans to at most so many bars, without a lie: what merges says how much of it was busy."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

# a browser redraws about this many bars within 100 ms, see FACTS
MAX_BARS = 2000

_STRETCH = 16  # a merged bar starts within so many pixels
_LEAST_SHARE = 0.06  # of a lane's height: what was hardly busy can still be seen
_LANE_KIND = ["rank", "lane", "kind"]


@dataclass(frozen=True, eq=False)
class Bars:
    """``table``: one row a bar, with every column of a span (those of its longest one) and

    ``end_ns``; ``spans``, how many stand in it; ``inside``, how many more lie nested within those;
    ``busy_ns``, the length of their union; ``units``, how many distinct units; ``share`` (0-1], how much of
    the lane's height it takes, and ``below``, how much is taken by bars under it.

    ``resolution_ns`` is 0 where nothing merged: narrower spans with gaps no wider than it became one bar.
    """

    table: pl.DataFrame
    resolution_ns: int

    @property
    def spans(self) -> int:
        """Spans that the bars stand for, nested ones included."""
        return int(self.table["spans"].sum()) + self.nested

    @property
    def nested(self) -> int:
        return int(self.table["inside"].sum())


def to_bars(spans: pl.DataFrame, view_ns: int, max_bars: int = MAX_BARS) -> Bars:
    """At most ``max_bars`` bars for ``spans``, given at least one for every kind of every lane.

    Spans nested in one of their own kind and lane stay with it. If that is too many, narrow neighbours of
    one kind, unit and phase merge at the width of a pixel; if still too many, coarser, whatever their unit.
    """
    outer = _outermost(spans)
    if outer.height <= max_bars:
        return Bars(_single(outer), 0)
    pixel_ns = max(view_ns // 2000, 1)
    attempts = [(pixel_ns * scale, True) for scale in (1, 2, 4)]
    attempts += [(pixel_ns * 2**power, False) for power in range(64)]
    for resolution_ns, keep_units in attempts:
        clustered = _clustered(outer, resolution_ns, keep_units)
        if clustered["cluster"].n_unique() <= max_bars:
            return Bars(_merged(clustered), resolution_ns)
    raise AssertionError(f"{max_bars} bars cannot hold {outer.select(_LANE_KIND).n_unique()} kinds in lanes")


def _outermost(spans: pl.DataFrame) -> pl.DataFrame:
    """Spans not wholly inside an earlier one of their lane and kind; ``inside`` counts those that were."""
    ordered = spans.with_columns((pl.col("start_ns") + pl.col("duration_ns")).alias("end_ns")).sort(
        *_LANE_KIND, "start_ns", "duration_ns", descending=[False] * 4 + [True]
    )
    reach = pl.col("end_ns").cum_max().shift(1).over(_LANE_KIND)
    # an empty span that touches the end of another is beside it, not in it
    contained = (pl.col("end_ns") <= reach) & (pl.col("start_ns") < reach)
    marked = ordered.with_columns((~contained.fill_null(False)).alias("outer")).with_columns(
        pl.col("outer").cum_sum().alias("holder")
    )
    counts = marked.group_by("holder").agg((pl.len().cast(pl.Int64) - 1).alias("inside"))
    outer = marked.filter("outer").join(counts, on="holder", how="left", maintain_order="left")
    return outer.drop("outer", "holder")


def _single(outer: pl.DataFrame) -> pl.DataFrame:
    return outer.with_columns(
        pl.lit(1, pl.Int64).alias("spans"),
        pl.col("duration_ns").alias("busy_ns"),
        pl.col("unit").is_not_null().cast(pl.Int64).alias("units"),
        pl.lit(1.0).alias("share"),
        pl.lit(0.0).alias("below"),
    )


def _clustered(outer: pl.DataFrame, resolution_ns: int, keep_units: bool) -> pl.DataFrame:
    """``outer`` with ``cluster``: equal for narrow neighbours that one bar may stand for."""
    wide = pl.col("duration_ns") >= resolution_ns
    reach = pl.col("end_ns").cum_max().shift(1).over(_LANE_KIND)
    # a stretch without gaps is cut all the same, so that a bar's numbers are those of its place
    stretch = (pl.col("start_ns") - pl.col("start_ns").min()) // (_STRETCH * resolution_ns)
    begins = (
        wide
        | (stretch != stretch.shift(1)).fill_null(True)
        | wide.shift(1, fill_value=True).over(_LANE_KIND)
        | (pl.col("start_ns") - reach > resolution_ns).fill_null(True)
    )
    if keep_units:
        same = pl.struct("unit", "phase", "step")
        begins = begins | (same != same.shift(1)).fill_null(True)
    lane_changes = pl.struct(_LANE_KIND).rle_id().diff().fill_null(1) > 0
    return outer.with_columns((begins | lane_changes).cum_sum().alias("cluster"), stretch.alias("stretch"))


def _merged(clustered: pl.DataFrame) -> pl.DataFrame:
    reach = pl.col("end_ns").cum_max().shift(1).over("cluster")
    fresh = pl.col("end_ns") - pl.max_horizontal("start_ns", reach)
    added = clustered.with_columns(pl.max_horizontal(fresh, pl.lit(0)).alias("busy_ns"))
    longest = ["name", "unit", "phase", "step", "group", "launch", "depth"]
    table = (
        added.sort("cluster", "duration_ns", descending=[False, True], maintain_order=True)
        .group_by("cluster", maintain_order=True)
        .agg(
            *(pl.col(column).first() for column in [*_LANE_KIND, *longest]),
            pl.col("stretch").first(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()).alias("bytes"),
            pl.len().cast(pl.Int64).alias("spans"),
            pl.col("inside").sum(),
            pl.col("busy_ns").sum(),
            pl.col("unit").drop_nulls().n_unique().cast(pl.Int64).alias("units"),
        )
        .drop("cluster")
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"))
    )
    return _stacked(table).drop("stretch")


def _stacked(table: pl.DataFrame) -> pl.DataFrame:
    """``share`` and ``below``: a merged bar is as tall as it was busy; kinds that alternate stand on another.

    Drawn over one another at full height, the kind painted last would seem to have filled the lane.
    """
    merged = pl.col("spans") > 1
    place = ["rank", "lane", "stretch"]
    busy = (pl.col("busy_ns") / pl.col("duration_ns").clip(1)).clip(_LEAST_SHARE, 1.0)
    # of several bars of one kind in one stretch the tallest makes the room
    kinds = (
        table.filter(merged)
        .with_columns(busy.alias("tallest"))
        .group_by(*place, "kind")
        .agg(pl.col("tallest").max())
        .sort(*place, "kind")
        .with_columns(
            (pl.col("tallest").cum_sum().over(place) - pl.col("tallest")).alias("under"),
            pl.col("tallest").sum().over(place).clip(1.0, None).alias("squeeze"),
        )
    )
    joined = table.join(kinds, on=[*place, "kind"], how="left", maintain_order="left")
    share = pl.when(merged).then(busy / pl.col("squeeze")).otherwise(1.0)
    below = pl.when(merged).then(pl.col("under") / pl.col("squeeze")).otherwise(0.0)
    return joined.with_columns(share.alias("share"), below.alias("below")).drop("tallest", "under", "squeeze")
