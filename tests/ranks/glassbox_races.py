"""Checks of the glass box: no delay on any stream changes a bit, and builds with a planted race are caught.

Imported by ``glassbox_worker.py``, which runs them.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from glassbox_parts import (
    check,
    digest,
    jitter,
    random_policy,
    seeded,
    sharded,
    train,
)

from fsdpviz.engine.glassbox import CpuAccelerator, Policy, Tier
from fsdpviz.engine.glassbox.accelerator import Cargo, Event, Lane, Stream
from fsdpviz.engine.glassbox.unit import Unit, full_of


def digest_of(policy: Policy, accelerator: CpuAccelerator, degree: int | None, folder: str) -> str:
    model, optimizer = sharded(seeded(), policy, accelerator=accelerator, sharding_degree=degree, disk_folder=folder)
    try:
        train(model, optimizer, 2)
        return digest(model)
    finally:
        model.close()


@check
def jittered() -> dict[str, Any]:
    """Distinct results over random schedules with random delays; 1 means that none changed a bit."""
    world = dist.get_world_size()
    count = int(sys.argv[2])
    digests: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            draw = random.Random(seed)
            policy = random_policy(draw)
            degree = draw.choice([2, 4]) if world == 4 and policy.reshard_after_forward != 2 else None
            found = digest_of(policy, CpuAccelerator(jitter=jitter(seed)), degree, folder)
            digests.setdefault(str(degree or world), set()).add(found)
    return {degree: len(found) for degree, found in digests.items()} | {"runs": count}


class _Forgets:
    """A stream whose work starts before what it should wait for."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, label: str, work: Callable[[], None], after: Any = (), cargo: Cargo | None = None) -> Event:
        return self._stream.submit(label, work, (), cargo)


class Racing(CpuAccelerator):
    """The build with a race in it: what one lane waits for is forgotten."""

    def __init__(self, lane: Lane, seed: int) -> None:
        super().__init__(jitter=jitter(seed))
        self._racing = lane

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        return _Forgets(stream) if lane is self._racing else stream


class _NotWaitedFor:
    """An event that compute passes at once; other streams still wait."""

    def __init__(self, event: Event) -> None:
        self.synchronize = event.synchronize

    def wait(self) -> None:
        pass


class _RunsAhead:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def submit(self, label: str, work: Callable[[], None], after: Any = (), cargo: Cargo | None = None) -> Event:
        return _NotWaitedFor(self._stream.submit(label, work, after, cargo))


class RunningAhead(CpuAccelerator):
    """The build in which compute does not wait for its gathers, which are late."""

    def __init__(self) -> None:
        super().__init__(jitter=lambda lane: 2e-3 if lane is Lane.GATHER else 0.0)
        self.races = True

    def stream(self, lane: Lane) -> Stream:
        stream = super().stream(lane)
        return _RunsAhead(stream) if lane is Lane.GATHER and self.races else stream


@contextmanager
def poisoned() -> Iterator[None]:
    """Freed parameters become NaN and keep their memory.

    Compute that does not wait frees a unit whose gather is still to come, and gloo would write into memory that is
    gone: the process ends. With memory that stays, whoever reads too early reads NaN, and the result shows it.
    """

    def free(unit: Unit) -> None:
        unit._show(full=False)
        for held in unit._held:
            full_of(held).fill_(torch.nan)
        unit._accelerator.pools.device.give(unit.full_bytes)

    before = Unit._free_full
    Unit._free_full = free  # type: ignore[method-assign]
    try:
        yield
    finally:
        Unit._free_full = before


@check
def planted_race_at_gather() -> dict[str, Any]:
    """Compute runs ahead of its gathers, in builds that poison; and nothing but that reads what is freed."""
    found: dict[str, Any] = {"ran ahead": 0, "none": 0}
    for policy in (Policy(), Policy(forward_depth=0, backward_depth=0), Policy(reshard_after_forward=False)):
        right = digest_of(policy, CpuAccelerator(), None, "")
        with poisoned():
            found["none"] += digest_of(policy, CpuAccelerator(), None, "") != right
            model, optimizer = sharded(seeded(), policy, accelerator=(accelerator := RunningAhead()))
            train(model, optimizer, 2)
            accelerator.races = False
            found["ran ahead"] += digest(model) != right
            model.close()
    return found


@check
def planted_race() -> dict[str, int]:
    """How many of eight runs of builds with a race gave another result; the race is such that nothing else breaks."""
    caught = {}
    disk = {"parameters_on": Tier.DISK, "gradients_on": Tier.DISK, "optimizer_on": Tier.DISK}
    plants: dict[str, tuple[Lane, dict[str, Any]]] = {
        "none": (Lane.D2H, {}),  # the companion: a lane that this policy does not use
        "optimizer before reduction": (Lane.OPTIMIZER, {"optimizer_when": "backward", "reduces_in_flight": 9}),
        "copy in before read": (Lane.H2D, disk),
    }
    for name, (lane, settings) in plants.items():
        with tempfile.TemporaryDirectory() as folder:
            right = digest_of(Policy(**settings), CpuAccelerator(), None, folder)
            raced = [_raced(Policy(**settings), Racing(lane, seed), folder) for seed in range(8)]
        caught[name] = sum(found != right for found in raced)
    return caught


def _raced(policy: Policy, accelerator: CpuAccelerator, folder: str) -> str:
    try:
        return digest_of(policy, accelerator, None, folder)
    except AssertionError:
        return "noticed"
