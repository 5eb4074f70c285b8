"""Ranks on one clock.

Ranks of one host share a clock. Those of another host are compared by when matched collectives end: all ranks of a
synchronising collective end together, whenever each of them began. With d = end here − end on the reference,

    offset   = −median(d)                                  (a recording too short to show drift)
    d(t)     ≈ a + b·(t − t₀), by least squares            (a long one; drift = −b; outliers are left out)
    residual = median |d + offset|                         what is left; times between hosts are no better than it

An offset beyond six residuals is taken off. One below tells that the clocks are one only where the residual is small:
clocks of two hosts differ by hundreds of µs, and ends that scatter as much neither confirm nor refute it (gloo's do on
busy cores, by milliseconds, on one host too). Then nothing is moved, and a note says so; nor does such a rank tell that
a third is on the reference's clock: whose ends agree with its alone is not told either.

A collective is the same one on two ranks if its group and its sequence number are. Where a file has no sequence
numbers, the collectives of a group in a step are compared in order, and taken for the same ones only if all of them
agree in kind, type and size; position alone never matches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np
import polars as pl

from ..base.kinds import Kind
from .meaning.collectives import IS_COPY
from .table import CLOCK_SCHEMA, Note, Trace, frame_of

# these end together on all ranks; a broadcast's root, a sender and a copy engine may leave early
_SYNCHRONISING = [kind.value for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL)]
_FEWEST = 3  # matched collectives; a median of fewer can be one outlier
_FEWEST_FOR_DRIFT, _LONG_NS = 20, 10_000_000_000  # clocks drift by some ppm: 10 µs/s, so that 10 s show it
_TRIMS = 4  # rounds in which what lies far from the line so far is left out
_TELLING = 6  # an offset below so many residuals is not told from none: about four standard deviations
_NOISE_NS = 10_000  # ends on GPUs of one host differ by almost as much
_SCATTERED_NS = 100_000  # a residual of as much hides what clocks of two hosts differ by
_NAMELESS = {"", "localhost"}  # host names that say nothing
MERGED = "merged"  # in the header of ranks whose files a script made into one: they may be of several hosts


class Method(StrEnum):
    """Why a rank's times may be compared with the reference rank's, the first."""

    REFERENCE = "reference"
    SAME_HOST = "same host"
    ENDS_AGREE = "ends of matched collectives agree: one clock"
    ENDS = "shifted by the ends of matched collectives"
    SCATTERED = "not told: ends of matched collectives scatter as much as clocks of two hosts differ"
    AGREE_WITH_UNTOLD = "not told: ends of matched collectives agree with those of a rank that is itself not told"
    NONE = "not aligned: too few collectives are matched"


UNTOLD = frozenset({Method.SCATTERED, Method.AGREE_WITH_UNTOLD})


@dataclass(frozen=True)
class Fit:
    """What a clock shows above the reference's: ``offset_ns + drift_ppm · 1e-6 · (t − origin)``."""

    offset_ns: int
    drift_ppm: float
    residual_ns: int
    matched: int


def hosts_of(trace: Trace) -> dict[int, str]:
    """The host of each rank for which something tells it: its name, or that a run folder or a file with several
    ranks, if it was recorded as one, is of one host.
    """
    if trace.about.get("folder"):
        return dict.fromkeys(trace.ranks, "host of the run")
    files, headers = (trace.about.get(key) or {} for key in ("files", "headers"))
    shared = Counter(files.values())  # one file of several ranks was recorded on one host
    found: dict[int, str] = {}
    for rank in trace.ranks:
        file, header = files.get(str(rank)), headers.get(str(rank)) or {}
        name = header.get("host_name")
        if isinstance(name, str) and name not in _NAMELESS:
            found[rank] = name
        elif shared[file] > 1 and not header.get(MERGED):
            found[rank] = f"host of {file}"
    return found


def aligned(trace: Trace) -> Trace:
    """The trace with all ranks on the first rank's clock where that can be told, ``Trace.clock`` filled in, and a
    note for ranks that stay on their own.
    """
    clocks = _clocks(trace)
    if not clocks:
        return trace
    reference, *others = clocks
    rows = [_row(rank, Method.SAME_HOST if index else Method.REFERENCE) for index, rank in enumerate(reference)]
    fits = _fits(trace, reference, others) if others else []
    rows += [_row(rank, method, fit) for ranks, method, fit in fits for rank in ranks]
    shifts = {rank: fit for ranks, method, fit in fits if fit and method is Method.ENDS for rank in ranks}
    unaligned = [rank for ranks, method, _ in fits if method is Method.NONE for rank in ranks]
    notes = list(trace.notes)
    if unaligned and len(trace.collectives):  # ranks that never meet are not compared
        what = "ranks on clocks of their own, side by side and not merged: too few collectives match"
        notes.append(Note(what, len(unaligned), f"rank {unaligned[0]}"))
    notes += _scatter_notes(fits)
    moved = _shifted(trace, shifts) if shifts else trace
    return replace(moved, clock=_clock_table(tuple(sorted(rows, key=lambda row: row[0]))), notes=tuple(notes))


def _fits(trace: Trace, reference: list[int], others: list[list[int]]) -> list[tuple[list[int], Method, Fit | None]]:
    """Each other clock against those that are known by then, the one with most matches first: two hosts that share
    no group are compared through a third.
    """
    matched, waiting = matches(trace), list(others)
    sure, unsure = list(reference), []  # ranks known by then, on the reference's clock or perhaps on their own
    found: list[tuple[list[int], Method, Fit | None]] = []
    while waiting:
        best, ends = _most_matched(matched, sure, waiting)
        is_sure = len(ends) >= _FEWEST
        if not is_sure and unsure:
            best, ends = _most_matched(matched, sure + unsure, waiting)
        if len(ends) < _FEWEST:
            break
        ranks = waiting.pop(best)
        one = fit(ends["here"].to_numpy(), ends["there"].to_numpy(), trace.origin_ns)
        method = _method(one, is_sure)
        if method is Method.ENDS:
            matched = _moved(matched, dict.fromkeys(ranks, one), trace.origin_ns, "end_ns")
        (sure if is_sure and method not in UNTOLD else unsure).extend(ranks)
        found.append((ranks, method, one))
    return found + [(ranks, Method.NONE, None) for ranks in waiting]


def _most_matched(matched: pl.DataFrame, known: list[int], waiting: list[list[int]]) -> tuple[int, pl.DataFrame]:
    """Which of the waiting clocks has most matches with ranks that are known, and their ends."""
    clock = {rank: index for index, ranks in enumerate(waiting) for rank in ranks}
    known_keys = matched.filter(pl.col("rank").is_in(known)).select("key").unique()
    shared = matched.filter(pl.col("rank").is_in(list(clock))).join(known_keys, on="key", how="semi")
    pairs = shared.select("key", clock=pl.col("rank").replace_strict(clock, return_dtype=pl.Int64)).unique()
    counts = dict(pairs.group_by("clock").len().rows())
    best = max(range(len(waiting)), key=lambda index: counts.get(index, 0))
    return best, _common_ends(matched, known, waiting[best])


def _scatter_notes(fits: list[tuple[list[int], Method, Fit | None]]) -> Iterator[Note]:
    unsure = [(rank, one) for ranks, method, one in fits if one and method is Method.SCATTERED for rank in ranks]
    if unsure:
        rank, one = unsure[0]
        what = "ranks that may be on clocks of their own: ends of matched collectives scatter too much to tell"
        yield Note(what, len(unsure), f"rank {rank}, by {one.residual_ns / 1e6:.3g} ms")


def matches(trace: Trace) -> pl.DataFrame:
    """The ends of synchronising collectives that are the same on several ranks: ``key``, ``rank``, ``end_ns``."""
    found = trace.collectives.filter(pl.col("kind").is_in(_SYNCHRONISING) & ~IS_COPY).with_columns(
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
        group=pl.coalesce("group", pl.lit("?"))
        + pl.coalesce(pl.col("group_ranks").cast(pl.List(pl.String)).list.join(","), pl.lit("")),
    )
    numbered = found.filter(pl.col("sequence").is_not_null()).select(
        pl.format("{} #{} {}", "group", "sequence", pl.col("kind").cast(pl.String)).alias("key"), "rank", "end_ns"
    )
    rest = found.filter(pl.col("sequence").is_null())
    frames = [numbered.unique(["key", "rank"], keep="none"), *_by_content(rest)]
    return pl.concat(frames)


def _by_content(found: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Collectives without a number, of each group and step in which all ranks show the same ones in the same order."""
    # an all-to-all may carry another size on every rank
    size = pl.when(pl.col("kind") != Kind.ALL_TO_ALL.value).then("bytes").fill_null(-1)
    content = pl.format(
        "{} {} {}", pl.col("kind").cast(pl.String), pl.col("dtype").cast(pl.String).fill_null("?"), size
    )
    ordered = found.sort("start_ns").with_columns(content=content)
    for (_, step), block in ordered.group_by("group", "step", maintain_order=True):
        shown = block.group_by("rank").agg(pl.col("content").str.join("\n"))
        if len(shown) < 2 or shown["content"].n_unique() > 1:
            continue
        key = pl.format(f"{{}} step {step} at {{}}", "group", pl.int_range(pl.len()).over("rank"))
        block = block.with_columns(key=key)
        # a group without a name may be several: what more ranks show than take part is not one collective
        is_one = (pl.col("group_size").min().over("key") >= len(shown)).fill_null(True)
        yield block.filter(is_one).select("key", "rank", "end_ns")


def _clocks(trace: Trace) -> list[list[int]]:
    """Ranks by the clock that they surely share, the first rank's first."""
    hosts = hosts_of(trace)
    clocks: dict[str, list[int]] = {}
    for rank in trace.ranks:
        clocks.setdefault(hosts.get(rank, f"\0 rank {rank}"), []).append(rank)
    return list(clocks.values())


def _common_ends(matched: pl.DataFrame, known: list[int], ranks: list[int]) -> pl.DataFrame:
    """``here`` and ``there``, the ends of each collective that both sides took part in."""
    return (
        matched.with_columns(
            here=pl.when(pl.col("rank").is_in(ranks)).then("end_ns"),
            there=pl.when(pl.col("rank").is_in(known)).then("end_ns"),
        )
        .group_by("key")
        .agg(_middle("here"), _middle("there"))
        .drop_nulls()
    )


def _middle(name: str) -> pl.Expr:
    """The lower median, of ends that several ranks of one clock have of one collective."""
    times = pl.col(name).drop_nulls().sort()
    return times.slice((times.len() - 1) // 2, 1).first().alias(name)


def fit(here_ns: np.ndarray, there_ns: np.ndarray, origin_ns: int) -> Fit:
    """The clock ``here`` against the one ``there``, from the ends of the same collectives (int64 ns on each)."""
    difference = here_ns - there_ns
    middle = _median(difference)
    constant = Fit(middle, 0.0, _median(np.abs(difference - middle)), len(difference))
    times = (there_ns - origin_ns).astype(np.float64)
    if len(times) < _FEWEST_FOR_DRIFT or np.ptp(times) < _LONG_NS:
        return constant
    slope, start, residual = _line(times, (difference - middle).astype(np.float64))
    if abs(slope) * np.ptp(times) <= 2 * max(residual, 1):
        return constant
    return Fit(middle + round(start), slope * 1e6, residual, len(difference))


def _line(times: np.ndarray, values: np.ndarray) -> tuple[float, float, int]:
    """Slope and value at 0 of the line through most of the points, and the median distance of all from it."""
    slope, start = np.polyfit(times, values, 1)
    off = np.abs(values - (start + slope * times))
    for _ in range(_TRIMS):
        kept = off <= max(5 * float(np.median(off)), 1.0)
        slope, start = np.polyfit(times[kept], values[kept], 1)
        off = np.abs(values - (start + slope * times))
    return float(slope), float(start), round(float(np.median(off)))


def _method(fit: Fit, is_sure: bool) -> Method:
    """``is_sure`` says that the ranks compared with are themselves on the reference's clock."""
    if abs(fit.offset_ns) > max(_TELLING * fit.residual_ns, _NOISE_NS) or fit.drift_ppm != 0:
        return Method.ENDS
    if fit.residual_ns >= _SCATTERED_NS:
        return Method.SCATTERED
    return Method.ENDS_AGREE if is_sure else Method.AGREE_WITH_UNTOLD


@lru_cache(maxsize=16)  # the same for every recording of one rank
def _clock_table(rows: tuple[tuple, ...]) -> pl.DataFrame:
    return frame_of(CLOCK_SCHEMA, dict(zip(CLOCK_SCHEMA, zip(*rows, strict=True), strict=True)))


def _row(rank: int, method: Method, fit: Fit | None = None) -> tuple:
    if fit is None:
        return (rank, 0, 0.0, None, 0, method.value)
    if method is Method.ENDS:
        return (rank, -fit.offset_ns, -fit.drift_ppm or 0.0, fit.residual_ns, fit.matched, method.value)
    return (rank, 0, 0.0, fit.residual_ns, fit.matched, method.value)


def _shifted(trace: Trace, shifts: Mapping[int, Fit]) -> Trace:
    """Starts and ends moved; durations stay, a drift of some ppm is nothing to them."""
    origin_ns = trace.origin_ns
    return replace(
        trace,
        spans=_moved(trace.spans, shifts, origin_ns, "start_ns", "issued_ns"),
        steps=_moved(trace.steps, shifts, origin_ns, "start_ns", "end_ns"),
    )


def _moved(frame: pl.DataFrame, shifts: Mapping[int, Fit], origin_ns: int, *columns: str) -> pl.DataFrame:
    """The frame with these columns on the reference's clock; the origin is a time of the reference's."""
    table = pl.DataFrame(
        [(rank, fit.offset_ns, fit.drift_ppm) for rank, fit in shifts.items()],
        schema={"rank": pl.Int32, "offset": pl.Int64, "drift": pl.Float64},
        orient="row",
    )
    offset, drift = pl.col("offset").fill_null(0), pl.col("drift").fill_null(0.0) * 1e-6
    gained = drift / (1 + drift)  # of what this clock shows since the origin: it ran drift more than the reference's
    since_ns = {name: pl.col(name) - offset - origin_ns for name in columns}
    return (
        frame.join(table, on="rank", how="left", maintain_order="left")
        .with_columns(
            (pl.col(name) - offset - (since * gained).round().cast(pl.Int64)).alias(name)
            for name, since in since_ns.items()
        )
        .drop("offset", "drift")
    )


def _median(values: np.ndarray) -> int:
    """The middle value, the lower of two: a time that was measured, not one between two."""
    return int(np.sort(values)[(len(values) - 1) // 2])
