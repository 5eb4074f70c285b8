"""Names and texts that a file may hold, and that took a pattern much longer than their length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from growth import LINEAR, growth
from make_trace import op, write_trace

from fsdpviz.analysis.intervals import clip
from fsdpviz.base.kinds import Kind
from fsdpviz.base.labels import parse_label
from fsdpviz.trace import open_trace
from fsdpviz.trace.files.ranks import rank_in_name
from fsdpviz.trace.files.sniff import Format, top_level_keys
from fsdpviz.trace.files.sources import Source
from fsdpviz.trace.kineto.columns import ColumnBuilder
from fsdpviz.trace.kineto.event import event_of
from fsdpviz.trace.kineto.events import EventReader
from fsdpviz.trace.kineto.reader import read_recording
from fsdpviz.trace.kineto.repair import nesting
from fsdpviz.trace.meaning.classify import device_kind, host_kind, is_optimizer_kernel
from fsdpviz.trace.meaning.fsdp1 import PREFIX, fsdp1_labels
from fsdpviz.trace.meaning.gloo import Span, lenders
from fsdpviz.trace.meaning.windows import Windows
from fsdpviz.trace.nsight.names import range_category, range_name
from fsdpviz.trace.reading import readers
from fsdpviz.trace.table import Tally


def kinds(name: str) -> object:
    return device_kind("kernel", name, "", ""), device_kind("gpu_memcpy", name, "", ""), host_kind("cpu_op", name)


@pytest.mark.parametrize(
    "part",
    [
        *(
            "nccl",
            "shmem_",
            "shmem_collect",
            "shmem_fcollect_",
            "shmem_rdxn",
            "shmem_reduce",
            "wait_until",
            "deep_ep::",
        ),
        *("userbuffers_", "userbuffers_x_", "barrier_", "all_", "adam_", "fused_", "AllAll_", "warp_all"),
        *("hybrid_ep::", "hybrid_ep::a::", "dispatch", "nccl_ep_", "epdispatch", " epcombine", " a2a_", "moea2a"),
    ],
)
@pytest.mark.parametrize("end", ["", "_on_stream_kernel", "!"])
def test_names_of_kernels(part: str, end: str) -> None:
    for work in (kinds, is_optimizer_kernel):
        assert growth(work, lambda times: "nv" + part * times + end, 300) < LINEAR


@pytest.mark.parametrize("work", [parse_label, range_name, range_category])
@pytest.mark.parametrize(
    "part", [", op_id = 1", ", seq = 1, ", "1", " [pg=1]", " for ", " (", ")", " (a)", ", bytes = 1", "a"]
)
def test_names_of_ranges(work: Callable[[str], object], part: str) -> None:
    for begin in ("FSDP::x", "FSDP::x for ", "FSDP::x (", "fsdpviz::x (", "a, op_id = "):
        assert growth(work, lambda times, begin=begin: begin + part * times + "!", 300) < LINEAR


@pytest.mark.parametrize("part", ["a", "_", ".pt", "rank", "rank1_", "1", "worker_", "dp_"])
def test_names_of_files(part: str) -> None:
    """A file's on disk has 255 characters, an archive's any number."""
    assert growth(rank_in_name, lambda times: part * times + "!", 1000) < LINEAR


@pytest.mark.parametrize("work", [nesting, top_level_keys])
@pytest.mark.parametrize("part", [b'\\"', b'"', b"\\", b'"a":', b"a", b'"a" '])
def test_strings_that_never_end(work: Callable[[bytes], object], part: bytes) -> None:
    assert growth(work, lambda times: b'{"a' + part * times, 500) < LINEAR


def test_the_nesting_of_a_text_that_ends_in_a_string() -> None:
    assert [nesting(text) for text in (b'{"a\\"{', b'{"a\\', b'{"a}', b'{"a":["{", {"b"')] == [1, 1, 1, 3]


def test_a_stated_rank_is_looked_for_once(tmp_path: Path) -> None:
    def file_of(times: int) -> Source:
        path = tmp_path / f"{times}.json"
        path.write_text('{"a":[' + '{"distributedInfo":{"rank":1}},' * times + '{}],"distributedInfo":{"rank":2}}')
        return Source(path, path.name, Format.KINETO)

    assert readers.stated_rank(file_of(100)) == 2
    assert growth(readers.stated_rank, file_of, 450) < LINEAR


def test_lists_in_other_values_cost_no_copy_of_what_is_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    until = EventReader._header_until

    def counted(self: EventReader, end: int) -> Any:
        copies.append(end)
        return until(self, end)

    monkeypatch.setattr(EventReader, "_header_until", counted)
    path = write_trace(tmp_path / "t.json", [op("aten::mm", 1, 2)])
    path.write_text('{"a":[' + '{"traceEvents":[]},' * 1000 + "{}]," + path.read_text().lstrip()[1:])
    assert read_recording(path).events["name"].to_list() == ["aten::mm"]
    assert len(copies) == 2


def fsdp1_ranges(steps: int, units: int) -> list[tuple[int, int, int, str]]:
    """Of each step a root's forward with units one after the other, and backward's hooks, one after the other."""
    ranges: list[tuple[int, int, int, str]] = []
    for step in range(steps):
        at = step * (20 * units + 10)
        middle = at + 10 * units + 2
        ranges += [(0, at, middle, "forward"), (0, at, at + 1, "_to_kwargs")]
        for unit in range(units):
            start, back = at + 1 + 10 * unit, middle + 10 * (units - unit)
            ranges += [
                (0, start, start + 9, "forward"),
                (0, start + 1, start + 2, "_pre_forward_prefetch"),
                (0, back - 8, back - 5, "_pre_backward_hook"),
                (0, back - 7, back - 6, "_pre_backward_prefetch"),
                (0, back - 5, back - 4, "forward"),  # again
                (0, back - 3, back - 1, "_post_backward_hook"),
            ]
    named = [(0, start + 3, start + 8, f"fsdpviz::forward (b{start})") for _, start, _, name in ranges if "for" in name]
    return [*((lane, start, end, PREFIX + name) for lane, start, end, name in ranges), *named]


def test_steps_and_units_of_fsdp1() -> None:
    found = fsdp1_labels(fsdp1_ranges(2, 3))
    assert sum(label.unit is None for _, label in found) == 4  # no unit comes after the last, none before the first
    assert growth(fsdp1_labels, lambda steps: fsdp1_ranges(steps, 2), 50) < LINEAR
    assert growth(fsdp1_labels, lambda units: fsdp1_ranges(1, units), 100) < LINEAR


def at_and_hold(given: tuple[Windows[int], np.ndarray, np.ndarray]) -> None:
    windows, lanes, times = given
    windows.at(lanes, times)
    windows.hold(lanes, times)


def test_windows_that_overlap() -> None:
    """Each is around all that begin after it."""

    def windows(count: int) -> tuple[Windows[int], np.ndarray, np.ndarray]:
        times = np.arange(2 * count)
        return Windows((0, place, 2 * count - place, place) for place in range(count)), np.zeros_like(times), times

    found, lanes, times = windows(20)
    assert found.at(lanes, times).tolist() == [*range(20), *range(19, -1, -1)]
    assert growth(at_and_hold, windows, 2000) < LINEAR


def test_lanes_of_one_window() -> None:
    def windows(count: int) -> tuple[Windows[int], np.ndarray, np.ndarray]:
        lanes = np.repeat(np.arange(count), 400)
        return Windows((lane, 2, 4, lane) for lane in range(count)), lanes, np.arange(len(lanes)) % 400

    found, lanes, times = windows(40)
    assert found.at(lanes, times).tolist() == np.where((times == 2) | (times == 3), lanes, -1).tolist()
    assert found.hold(lanes, times).all()
    assert growth(at_and_hold, windows, 200) < LINEAR


def test_steps_of_a_long_recording() -> None:
    """Each looks at its own part of what the rank computed."""

    def steps(count: int) -> np.ndarray:
        starts = 10 * np.arange(count)
        return np.column_stack((starts, starts + 5))

    def clip_each(intervals: np.ndarray) -> None:
        for start in intervals[:, 0].tolist():
            clip(intervals, start, start + 10)

    assert clip(steps(4), 13, 22).tolist() == [[13, 15], [20, 22]]
    assert clip(steps(4), 15, 20).tolist() == clip(steps(4), 22, 13).tolist() == []
    assert growth(clip_each, steps, 4000) < LINEAR


def test_gloo_ranges_that_many_links_overlap() -> None:
    """The first takes what nobody has lent to; where all have, the earliest that overlaps."""

    def spans(count: int) -> tuple[list[Span], list[Span]]:
        return tuple(
            [Span(first + place, place, count + place, Kind.ALL_GATHER) for place in range(count)]
            for first in (0, count)
        )  # type: ignore[return-value]

    def join(given: tuple[list[Span], list[Span]]) -> dict[int, list[int]]:
        links, ranges = given
        return lenders(links, ranges, {span.row: span.kind for span in ranges}, {})

    assert join(spans(3)) == {0: [3], 1: [4], 2: [5]}
    links, ranges = spans(3)
    assert join((links[1:], [*ranges, Span(6, 3, 4, Kind.ALL_GATHER)])) == {1: [3, 5, 6], 2: [4]}
    assert growth(join, spans, 300) < LINEAR


def test_names_that_are_new_in_a_block_cost_no_look_at_those_before() -> None:
    class NeverIterated(dict[str, int]):
        def __iter__(self) -> Any:
            raise AssertionError("looked through for each block")

    columns = ColumnBuilder(Tally())
    columns._codes["name"].by_text = NeverIterated()
    for name in (b"op1", b"c10d::op2", b"op1"):
        columns.add([event_of(b'{"ph":"X","name":"%s","ts":1,"dur":1,"args":{"finished":false}}' % name)])
    assert columns._tally.notes["ranges still open when the profiler stopped, which is their end"].example == "op1"
    assert columns.coded()["name"].values == ["op1", "c10d::op2"]


def test_the_tables_of_many_ranks_are_in_one_piece(tmp_path: Path) -> None:
    """Each rank is looked for in every piece."""
    for rank in range(40):
        write_trace(tmp_path / f"rank{rank}.json", [op("aten::mm", 1, 2)], rank=rank)
    trace = open_trace(tmp_path)
    assert trace.ranks == [*range(40)]
    assert trace.spans.n_chunks() == trace.lanes.n_chunks() == 1
