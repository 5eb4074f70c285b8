"""Labels, units, rank arithmetic, schedules and the run folder: small, pure, worked out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdpviz.base.errors import RankFailed, RankFailure, RunFolderError
from fsdpviz.base.labels import ROOT, RangeLabel, fsdp_label, loop_label, parse_label
from fsdpviz.base.units import format_memory, format_ns, format_payload
from fsdpviz.experiment import Link, Mesh, RunFolder
from fsdpviz.experiment.ranks import coordinates, replicate_group, sample_slice, shard_group
from fsdpviz.experiment.run_folder import read_json, read_json_lines, write_json
from fsdpviz.schedule import backward_prefetch_targets, forward_prefetch_targets

LABELS = [
    ("FSDP::all_gather (blocks.0)", RangeLabel("FSDP", "all_gather", "blocks.0")),
    ("FSDP::all_gather", RangeLabel("FSDP", "all_gather", ROOT)),
    ("FSDP::pre_forward (model.layers.3), op_id = 812", RangeLabel("FSDP", "pre_forward", "model.layers.3")),
    ("FSDP::pre_forward, op_id = 812", RangeLabel("FSDP", "pre_forward", ROOT)),
    ("FSDP::forward_prefetch for blocks.1", RangeLabel("FSDP", "forward_prefetch", "blocks.1")),
    ("FSDP::backward_prefetch for None", RangeLabel("FSDP", "backward_prefetch", ROOT)),
    ("FSDP::backward_prefetch for blocks.1, op_id = 3", RangeLabel("FSDP", "backward_prefetch", "blocks.1")),
    ("FSDP::backward_prefetch for ", RangeLabel("FSDP", "backward_prefetch", ROOT)),  # the root has no name
    ("FSDP::all_gather (experts) [pg=4]", RangeLabel("FSDP", "all_gather", "experts", param_group=4)),
    ("FSDP::all_gather [pg=2], op_id = 8", RangeLabel("FSDP", "all_gather", ROOT, param_group=2)),
    ("FSDP::root_pre_forward", RangeLabel("FSDP", "root_pre_forward", None)),
    (
        "FSDP::post_backward_rs_wait (blocks.0, blocks.1)",
        RangeLabel("FSDP", "post_backward_rs_wait", "blocks.0, blocks.1"),
    ),
    ("fsdpviz::all_gather ((root))", RangeLabel("fsdpviz", "all_gather", ROOT)),
    ("fsdpviz::forward", RangeLabel("fsdpviz", "forward", None)),
    ("aten::mm", None),
    ("FSDP::", None),
    ("NotFSDP::all_gather (x)", None),
]


@pytest.mark.parametrize(("name", "label"), LABELS, ids=[name for name, _ in LABELS])
def test_labels_are_parsed(name: str, label: RangeLabel | None) -> None:
    assert parse_label(name) == label


@pytest.mark.parametrize("unit", ["blocks.0", ROOT, "a (b)", "blocks.0, blocks.1"])
def test_labels_that_are_made_are_understood(unit: str) -> None:
    assert parse_label(fsdp_label("all_gather", unit)) == RangeLabel("FSDP", "all_gather", unit)
    assert parse_label(loop_label("all_gather", unit)) == RangeLabel("fsdpviz", "all_gather", unit)
    assert parse_label(loop_label("h2d", unit, 640)) == RangeLabel("fsdpviz", "h2d", unit, 640)


def test_numbers_are_written_with_units() -> None:
    assert [format_ns(ns) for ns in (0, 999, 1500, 2_500_000, 12_345_678_901)] == [
        "0 ns",
        "999 ns",
        "1.5 µs",
        "2.5 ms",
        "12.3 s",
    ]
    assert [format_memory(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3 GiB"]
    assert [format_payload(n) for n in (999, 1500, 2_000_000)] == ["999 B", "1.5 kB", "2 MB"]


def test_rank_arithmetic_of_two_by_three() -> None:
    mesh = Mesh(replicate=2, shard=3)  # ranks 0 1 2 | 3 4 5
    assert [coordinates(mesh, rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert shard_group(mesh, 4) == [3, 4, 5]
    assert replicate_group(mesh, 4) == [1, 4]


def test_samples_are_shared_out_once_each() -> None:
    taken = [sample for m in range(3) for rank in range(2) for sample in range(12)[sample_slice(2, 3, 12, rank, m)]]
    assert taken == list(range(12))
    assert sample_slice(2, 3, 12, 1, 2) == slice(10, 12)


def test_prefetch_targets() -> None:
    units = ["root", "a", "b", "c"]
    assert forward_prefetch_targets(units, 1) == {"root": ["a"], "a": ["b"], "b": ["c"], "c": []}
    assert forward_prefetch_targets(units, 2)["root"] == ["a", "b"]
    assert backward_prefetch_targets(units, 1) == {"root": ["c"], "c": ["b"], "b": ["a"], "a": []}
    assert forward_prefetch_targets(units, 0) == {unit: [] for unit in units}


def test_a_links_time() -> None:
    # 1 MB at 0.5 GB/s is 2 ms, and 100 µs of latency
    assert Link(bandwidth_gbps=0.5, latency_us=100).transfer_ns(1_000_000) == 2_100_000


def test_a_run_folder_is_never_taken_from_someone_else(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    write_json(folder.experiment, {"name": "x"})
    folder.rank(0).path.mkdir()
    write_json(folder.result, {})
    assert folder.is_finished
    with pytest.raises(RunFolderError, match="overwrite=True"):
        RunFolder.create(folder.path)
    again = RunFolder.create(folder.path, overwrite=True)
    assert not again.is_finished
    assert list(again.ranks()) == []
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds other files"):
        RunFolder.create(other, overwrite=True)
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(other / "thesis.txt")
    assert (other / "thesis.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="not a directory"):
        RunFolder.create(tmp_path / "file" / "run")
    if os.geteuid() != 0:  # root writes everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(RunFolderError, match="permission denied"):
            RunFolder.create(tmp_path / "run")


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert [child.name for child in tmp_path.iterdir()] == ["result.json"]


def test_json_that_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert read_json(path) == {}
    for text in ("", "{", "[1]", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(RunFolderError):
            read_json(path)


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        read_json_lines(path)


def test_a_failed_rank_says_everything() -> None:
    first = RankFailure(1, "ValueError: no", 1, "Traceback: …", ("last line",))
    error = RankFailed(first, (RankFailure(0, "connection closed"),), "runs/x")
    text = str(error)
    assert text.startswith("rank 1 failed: ValueError: no (then rank 0)")
    assert "Traceback: …" in text
    assert "last line" in text
    assert "runs/x" in text
    assert (error.rank, error.traceback) == (1, "Traceback: …")
