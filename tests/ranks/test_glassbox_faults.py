"""What goes wrong in the glass box, on real ranks: disks that are full, users' errors, ranks that diverge."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_glassbox_model import FP32, run_checks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three disks: of little room, that cannot be written, and that promises 64 MB where there is one."""
    folder = tmp_path_factory.mktemp("disks")
    small, read_only, thin = (folder / name for name in ("small", "read-only", "thin"))
    mounted: list[Path] = []

    def mount(disk: Path, *what: str) -> bool:
        disk.mkdir(exist_ok=True)
        is_there = not subprocess.run(["mount", *what, str(disk)], capture_output=True, check=False).returncode
        mounted.extend([disk] if is_there else [])
        if not is_there:
            disk.rmdir()
        return is_there

    if sys.platform == "linux":
        mount(small, "-t", "tmpfs", "-o", "size=400k", "tmpfs")
        mount(read_only, "-t", "tmpfs", "-o", "ro", "tmpfs")
        if mount(thin, "-t", "tmpfs", "-o", "size=20m", "tmpfs"):
            image = thin / "image"
            with image.open("wb") as file:
                file.truncate(64 << 20)
            made = subprocess.run(["mkfs.ext2", "-q", str(image)], capture_output=True, check=False)
            _ = made.returncode or mount(thin / "mounted", "-o", "loop", str(image))
    yield folder
    for disk in reversed(mounted):
        subprocess.run(["umount", str(disk)], check=True)


DIVERGING = ["diverges_in_hybrid", "skips_a_unit", "other_order"]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, disks: Path) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("four"), 4, "glassbox_faults_worker", str(disks), *DIVERGING)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, disks: Path) -> dict[str, Any]:
    return run_checks(tmp_path_factory.mktemp("faults"), 2, "glassbox_faults_worker", str(disks))


def on_each(faults: dict[str, Any], name: str) -> list[Any]:
    found = [rank[name] for rank in faults["ranks"]]
    if found[0] is None:
        pytest.skip("only root on Linux may mount a small disk")
    assert "traceback" not in found[0], found[0]
    return found


LOST = re.compile(
    r"FsdpvizError: rank (\d): the disk tier in \S+ is full at \S+\.(parameters|gradients|momentum_buffer), so what "
    "the optimizer wrote is lost. Make room, then load a checkpoint"
)


def test_a_lost_write_is_told_at_every_touch_until_a_checkpoint_is_loaded(faults: dict[str, Any]) -> None:
    for rank, found in enumerate(on_each(faults, "write_lost")):
        for touch in ("wait", "forward", "step", "state"):
            told = LOST.match(found[touch])
            assert told is not None and told[1] == str(rank), found[touch]
        assert found["load"] == found["close"] == ""  # the companion: with room, nothing is said
        assert found["difference"] < FP32


def test_a_lost_write_is_told_by_close_at_the_latest(faults: dict[str, Any]) -> None:
    for error in on_each(faults, "write_lost_unseen_until_close"):
        assert LOST.match(error), error


def test_a_rank_that_lost_a_write_alone_is_the_one_that_says_so(faults: dict[str, Any]) -> None:
    first, second = on_each(faults, "planted_write_error")
    assert set(first.values()) == {""}
    assert all("rank 1: " in error and "cannot be written (Input/output error)" in error for error in second.values())


def test_optimizer_state_without_room_works_on_and_moves_later(faults: dict[str, Any]) -> None:
    for rank, found in enumerate(on_each(faults, "no_room_for_optimizer_state")):
        assert f"rank {rank}: the disk tier" in found["step"] and "the next step tries again" in found["step"]
        assert found["counted"] == 0
        assert found["on disk"] > 0
        assert found["difference"] < FP32


def test_a_full_disk_in_backward_says_that_a_checkpoint_is_needed_and_one_mends_it(faults: dict[str, Any]) -> None:
    for found in on_each(faults, "no_room_in_backward"):
        assert "is full" in found["backward"] and "load a checkpoint" in found["backward"]
        assert found["difference"] < FP32
        assert found["pools"] == 0


def test_a_folder_that_cannot_be_written_is_refused(faults: dict[str, Any]) -> None:
    for rank, error in enumerate(on_each(faults, "not_writable")):
        assert f"rank {rank}: the disk tier in" in error and "cannot be written (Read-only file system)" in error


def test_a_parameter_on_another_device_is_refused(faults: dict[str, Any]) -> None:
    assert faults["other_device"] == (
        "FsdpvizError: parameter extra is on cuda:0; the engine's device is cpu. Use module.to('cpu')"
    )


def test_a_second_backward_through_freed_units_is_right(faults: dict[str, Any]) -> None:
    assert max(faults["second_backward"]) < FP32


def test_forward_in_eval_and_without_gradients_in_the_midst_of_training(faults: dict[str, Any]) -> None:
    assert len(faults["eval_and_no_grad"]) == 6
    assert max(faults["eval_and_no_grad"].values()) < FP32


def test_the_model_is_as_new_after_a_step_that_raised(faults: dict[str, Any]) -> None:
    found = faults["usable_after_every_error"]
    assert len(found) == 16 and "traceback" not in found
    for name, case in found.items():
        assert ("planted" in case["error"]) or ("budget" in case["error"] and "budget" in name), name
        assert case["left"] == [0, 0], name
        assert case["difference"] < FP32, name


def verdicts(found: list[Any]) -> set[str]:
    """What the ranks said, without what each says of itself."""
    return {re.sub(r" \(rank \d\)$", "", rank["error"]) for rank in found}


# depth 1 gathers the root and blocks.0 before the root's forward, blocks.1 before that of blocks.0, and so on
DIVERGED = {
    "skips_a_unit": "collective 4: rank 0 issued all_gather of blocks.2 at the forward of blocks.1; "
    "rank 1 issued all_gather of blocks.2 at the forward of blocks.2",
    "skips_the_last_unit": "collective 5: rank 0 issued all_gather of blocks.3 at the forward of blocks.3; "
    "rank 1 issued all_gather of blocks.2 at the backward of blocks.2",
    "skips_on_one_stream": "collective 2: rank 0 issued all_gather of blocks.0 at the forward of blocks.0; "
    "rank 1 issued all_gather of blocks.1 at the forward of blocks.1",
    "other_order": "collective 4: rank 0 issued all_gather of blocks.2 at the forward of blocks.1; "
    "rank 1 issued all_gather of blocks.2 at the forward of blocks.2",
    "diverges_in_replicas": "collective 5: rank 0 issued all_gather of blocks.3 at the forward of blocks.2; "
    "rank 1 issued all_gather of blocks.3 at the forward of blocks.3",
    "leaves_out_a_batch": "collective 5: rank 0 issued all_gather of blocks.3 at the forward of blocks.3; "
    "rank 1 issued all_gather of (root) at the forward of (root)",
    "asks_for_the_state_alone": "collective 15: rank 0 issued all_gather of (root) at the forward of (root); "
    "rank 1 issued all_gather of (root) for the state",
}


@pytest.mark.parametrize("name", DIVERGED)
def test_ranks_that_diverge_are_named_on_every_rank(faults: dict[str, Any], name: str) -> None:
    found = on_each(faults, name)
    (said,) = verdicts(found)
    assert f"ranks have diverged at {DIVERGED[name]}. Look for" in said
    for rank in found:
        assert all("ranks have diverged" in rank.get(later, said) for later in ("again", "state"))


@pytest.mark.parametrize("name", DIVERGING)
def test_of_four_ranks_the_odd_one_is_named_first(four: dict[str, Any], name: str) -> None:
    (said,) = verdicts(on_each(four, name))
    assert re.search(r"diverged at collective \d+: rank 1 issued [^;]+; ranks 0, 2, 3 issued ", said), said


def test_a_rank_that_is_late_is_waited_for_and_told_of(faults: dict[str, Any]) -> None:
    first, second = on_each(faults, "late_is_not_diverged")
    assert first["error"] == second["error"] == ""
    assert first["told"] and re.fullmatch(
        r"rank 0 has issued 16 collectives, none for \d s; rank 1 has issued 14", first["told"][0]
    )
