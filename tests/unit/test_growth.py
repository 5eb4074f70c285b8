"""Names and texts that a file may hold, and that took a pattern much longer than their length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from growth import LINEAR, growth
from make_trace import op, write_trace

from fsdpviz.base.labels import parse_label
from fsdpviz.trace.files.ranks import rank_in_name
from fsdpviz.trace.files.sniff import Format, top_level_keys
from fsdpviz.trace.files.sources import Source
from fsdpviz.trace.kineto.events import EventReader
from fsdpviz.trace.kineto.reader import read_recording
from fsdpviz.trace.kineto.repair import nesting
from fsdpviz.trace.meaning.classify import device_kind, host_kind, is_optimizer_kernel
from fsdpviz.trace.meaning.fsdp1 import PREFIX, fsdp1_labels
from fsdpviz.trace.nsight.names import range_category, range_name
from fsdpviz.trace.reading import readers


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
