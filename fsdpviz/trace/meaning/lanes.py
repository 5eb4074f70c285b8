"""Lanes: what they are called, and their order in a picture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import polars as pl

from ...base.kinds import COMPUTATION, WORK, Kind
from ..kineto.reader import Recording
from ..table import LANE_SCHEMA
from . import gloo
from .attribute import COUNTED_STEP
from .codes import is_among
from .rows import Rows

_THREAD_NAME = re.compile(r"^thread -?\d+ \((?P<name>.*)\)$")
_NUMBER = re.compile(r"\d+")
_STEP = re.compile(rf"^ProfilerStep|{COUNTED_STEP.pattern}")
_BACKWARD = re.compile(r"^autograd::engine::")
# by code of a kind
_COMPUTES, _WORKS, _IS_RANGE = is_among(COMPUTATION), is_among(WORK), is_among((Kind.WAIT, Kind.ANNOTATION))
_GENERIC = re.compile(r"^(?:python[\d.]*|pt_main_thread|)$")


def main_lane(rows: Rows) -> int:
    """The lane of the thread that runs the training loop; −1 for a recording without host threads.

    It is the process's first thread, else the one with steps, the profiler's or its own, else the one with most
    operators.
    """
    is_host = rows.in_categories(("cpu_op", "user_annotation"))
    operators = np.bincount(rows.lane[is_host], minlength=len(rows.threads))
    with_steps = set(rows.lane[is_host & rows.named(_STEP)].tolist())
    lanes = operators.nonzero()[0].tolist()
    if not lanes:
        return -1
    return max(
        lanes, key=lambda lane: (rows.processes[lane] == rows.threads[lane], lane in with_steps, operators[lane])
    )


def lane_table(
    recording: Recording,
    rank: int,
    rows: Rows,
    kind: np.ndarray,
    is_link: np.ndarray,
    main: int,
    names: Mapping[str, str],
) -> pl.DataFrame:
    """LANE_SCHEMA's columns, by ``lane``. ``kind`` are indices into the list of kinds, by row.

    ``names`` are the run's own, by thread id.
    """
    count = len(rows.threads)
    first = np.searchsorted(rows.lane, np.arange(count, dtype=rows.lane.dtype))  # row of each lane, none of them empty
    marks = {
        "is_device": rows.is_device,
        "has_others": ~rows.in_categories(("Trace",)),  # than the profiler's own
        "has_links": is_link,
        "has_gloo": rows.named(gloo.RANGE),
        "has_backward": rows.named(_BACKWARD),
        "has_work": _WORKS[kind],
        "has_ranges": _IS_RANGE[kind],
    }
    held = np.logical_or.reduceat(np.array([*marks.values()]), first, axis=1).T.tolist()
    compute_ns = np.add.reduceat(np.where(_COMPUTES[kind], rows.duration_ns, 0), first).tolist()
    lanes = [
        {"rank": rank, "lane": lane, "process": process, "thread": thread, "compute_ns": ns}
        | dict(zip(marks, of_lane, strict=True))
        for lane, (process, thread, ns, of_lane) in enumerate(
            zip(rows.processes, rows.threads, compute_ns, held, strict=True)
        )
    ]
    _name_each(lanes, recording, main, names)
    primary = max(lanes, key=lambda row: (row["compute_ns"], row["lane"] == main))["lane"] if lanes else -1
    for place, row in enumerate(sorted(lanes, key=lambda row: _order(row, primary, main))):
        row["sort"] = place
    return pl.DataFrame(lanes, schema=LANE_SCHEMA)


def _order(row: dict, primary: int, main: int) -> tuple:
    if row["lane"] == primary:
        group = 0
    elif row["has_work"]:
        group = 1
    elif row["has_ranges"] and row["has_others"]:
        group = 2
    else:
        group = 3
    number = _NUMBER.search(row["thread"])
    return (
        group,
        not row["has_others"],
        row["lane"] != main,
        not row["has_links"],
        -row["compute_ns"] if not row["has_gloo"] else 0,
        int(number[0]) if number else 0,
        row["lane"],
    )


def _name_each(lanes: list[dict], recording: Recording, main: int, given: Mapping[str, str]) -> None:
    """Adds what each is called; lanes that would be called alike are numbered by their threads."""
    devices = {row["process"] for row in lanes if row["is_device"]}
    alike: defaultdict[str, list[dict]] = defaultdict(list)
    for row in lanes:
        row["name"] = _name(row, recording, main, given, len(devices) > 1)
        alike[row["name"]].append(row)
    for name, rows in alike.items():
        if len(rows) > 1:
            rows.sort(key=lambda row: (len(row["thread"]), row["thread"], row["lane"]))
            for number, row in enumerate(rows, 1):
                row["name"] = f"{name} {number}"


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
    if not row["has_others"]:
        return "profiler"
    match = _THREAD_NAME.match(recording.thread_names.get((row["process"], thread), ""))
    return f"thread {thread}" if match is None or _GENERIC.match(match["name"]) else match["name"]
