"""Lanes: what they are called, and their order in a picture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import polars as pl

from ..base.kinds import COMPUTATION, WORK, Kind
from .kineto import Recording

_THREAD_NAME = re.compile(r"^thread -?\d+ \((?P<name>.*)\)$")
_GENERIC = re.compile(r"^(?:python[\d.]*|pt_main_thread|)$")


def main_lane(events: pl.DataFrame) -> int:
    """The lane of the thread that runs the training loop; −1 for a recording without host threads.

    It is the process's first thread, else the one with the profiler's steps, else the one with most
    operators.
    """
    host = events.filter(pl.col("category").is_in(["cpu_op", "user_annotation"]))
    if host.is_empty():
        return -1
    lanes = host.group_by("lane").agg(
        is_first=(pl.col("process") == pl.col("thread")).any(),
        has_steps=pl.col("name").str.starts_with("ProfilerStep").any(),
        operators=pl.len(),
    )
    return int(lanes.sort("is_first", "has_steps", "operators", descending=True)["lane"][0])


def lane_table(
    recording: Recording, rank: int, events: pl.DataFrame, main: int, names: Mapping[str, str]
) -> pl.DataFrame:
    """LANE_SCHEMA's columns, by ``lane``. ``events`` has lane, kind, is_device, is_link and the recording's
    columns.

    ``names`` are the run's own, by thread id.
    """
    kind = pl.col("kind")
    busy = kind.is_in([item.value for item in COMPUTATION])
    lanes = (
        events.group_by("lane")
        .agg(
            pl.col("process", "thread").first(),
            is_device=pl.col("is_device").any(),
            is_profiler=(pl.col("category") == "Trace").all(),
            has_links=pl.col("is_link").any(),
            has_gloo=pl.col("name").str.starts_with("gloo:").any(),
            has_backward=pl.col("name").str.starts_with("autograd::engine::").any(),
            has_work=kind.is_in([item.value for item in WORK]).any(),
            has_ranges=kind.is_in([Kind.WAIT.value, Kind.ANNOTATION.value]).any(),
            compute_ns=pl.when(busy).then(pl.col("duration_ns")).otherwise(0).sum(),
        )
        .sort("lane")
    )
    rows = lanes.to_dicts()
    called = _names(rows, recording, main, names)
    primary = max(rows, key=lambda row: (row["compute_ns"], row["lane"] == main))["lane"] if rows else -1
    order = sorted(rows, key=lambda row: _order(row, primary, main))
    place = {row["lane"]: index for index, row in enumerate(order)}
    return lanes.select(
        rank=pl.lit(rank, pl.Int32),
        lane=pl.col("lane").cast(pl.Int32),
        name=pl.Series([called[row["lane"]] for row in rows], dtype=pl.String),
        is_device="is_device",
        process="process",
        thread="thread",
        sort=pl.Series([place[row["lane"]] for row in rows], dtype=pl.Int32),
    )


def _order(row: dict, primary: int, main: int) -> tuple:
    if row["lane"] == primary:
        group = 0
    elif row["has_work"]:
        group = 1
    elif row["has_ranges"] and not row["is_profiler"]:
        group = 2
    else:
        group = 3
    number = re.search(r"\d+", row["thread"])
    return (
        group,
        row["is_profiler"],
        row["lane"] != main,
        not row["has_links"],
        -row["compute_ns"] if not row["has_gloo"] else 0,
        int(number[0]) if number else 0,
        row["lane"],
    )


def _names(rows: list[dict], recording: Recording, main: int, given: Mapping[str, str]) -> dict[int, str]:
    devices = {row["process"] for row in rows if row["is_device"]}
    called = {row["lane"]: _name(row, recording, main, given, len(devices) > 1) for row in rows}
    often = Counter(called.values())
    nth: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: (len(row["thread"]), row["thread"], row["lane"])):
        name = called[row["lane"]]
        if often[name] > 1:
            nth[name] += 1
            called[row["lane"]] = f"{name} {nth[name]}"
    return called


def _name(row: dict, recording: Recording, main: int, given: Mapping[str, str], many_devices: bool) -> str:
    thread = row["thread"]
    if row["is_device"]:
        stream = thread if thread.startswith("stream") else f"stream {thread}"
        stream = "device" if thread == "-1" else stream  # waits for a whole device or an event
        return f"GPU {row['process']} {stream}" if many_devices else stream
    if thread in given:
        return given[thread]
    if row["lane"] == main:
        return "main thread"
    if row["has_links"]:
        return "link"
    if row["has_gloo"]:
        return "gloo"
    if row["has_backward"]:
        return "backward thread"
    if row["is_profiler"]:
        return "profiler"
    match = _THREAD_NAME.match(recording.thread_names.get((row["process"], thread), ""))
    return f"thread {thread}" if match is None or _GENERIC.match(match["name"]) else match["name"]
