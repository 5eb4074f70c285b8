"""Where a shard lies between uses, and how it comes to the device for a gather.

    tier     self.tensor is            on its way to the gather
    DEVICE   device memory             nothing
    HOST     pinned host memory        copy in (H2D stream)
    DISK     a memory-mapped file      read (disk thread) into host memory, then copy in (H2D stream)

The optimizer works on ``self.tensor`` wherever it lies.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import torch

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from ...schedule import Tier
from .accelerator import Accelerator, Cargo, Event, Lane, Pool, Wire


def place(
    tensor: torch.Tensor, tier: Tier, accelerator: Accelerator, file: Path
) -> tuple[torch.Tensor, np.memmap | None]:
    """A copy of ``tensor`` (one dim) in ``tier``, counted there, and its map where it is a file.

    Raises FsdpvizError when the budget or the disk has no room.
    """
    pool_of(accelerator, tier).take(tensor.nbytes)
    if tier is Tier.DEVICE:
        return tensor.detach().to(accelerator.device, copy=True), None
    if tier is Tier.HOST:
        return accelerator.host_empty(tensor.numel(), tensor.dtype).copy_(tensor.detach()), None
    mapped = _map_file(file, tensor.nbytes)
    on_disk = torch.from_numpy(mapped)[: tensor.nbytes].view(tensor.dtype)
    return on_disk.copy_(tensor.detach()), mapped


def pool_of(accelerator: Accelerator, tier: Tier) -> Pool:
    pools = accelerator.pools
    return {Tier.DEVICE: pools.device, Tier.HOST: pools.host, Tier.DISK: pools.disk}[tier]


def _map_file(file: Path, size_bytes: int) -> np.memmap:
    """A mapped file whose blocks all exist: a hole that the disk cannot fill would kill the process on a write."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, max(size_bytes, 1))
        finally:
            os.close(descriptor)
        return np.memmap(file, np.uint8, "r+", shape=(max(size_bytes, 1),))
    except OSError as error:
        why = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"
        raise FsdpvizError(f"the disk tier in {file.parent} {why}; choose another folder or Tier.HOST") from error


class ShardStore:
    """One unit's parameter shard in its tier. ``bring_in`` makes ``on_device`` for one gather, ``let_go`` ends it."""

    def __init__(self, unit: str, shard: torch.Tensor, tier: Tier, accelerator: Accelerator, file: Path) -> None:
        self.tier = tier
        self._unit, self._accelerator = unit, accelerator
        self.tensor, mapped = place(shard, tier, accelerator, file)
        self._mapped = [] if mapped is None else [mapped]
        self._host: torch.Tensor | None = None  # DISK: what was read; dies in let_go
        self._staged: torch.Tensor | None = None  # HOST, DISK: the copy on the device; dies in let_go
        self._arrived: Event | None = None
        self._flushed: Event | None = None
        self.written: Event | None = None  # the last change of the shard by a side stream; reads come after it

    @property
    def on_device(self) -> torch.Tensor:
        """What the gather sends."""
        return self.tensor if self.tier is Tier.DEVICE else _there(self._staged)

    def gather_after(self) -> list[Event]:
        """What the gather waits for."""
        return [event for event in (self._arrived, self.written) if event is not None]

    def read(self) -> None:
        """Disk → host, on the reading thread."""
        self._accelerator.pools.host.take(self.tensor.nbytes)
        host = self._host = self._accelerator.host_empty(self.tensor.numel(), self.tensor.dtype)
        after = [self.written] if self.written else []

        def read() -> None:
            host.copy_(self.tensor)

        self._arrived = self._accelerator.stream(Lane.READ).submit(loop_label("disk_read", self._unit), read, after)

    def bring_in(self) -> None:
        """Host → device, on the H2D stream."""
        self._accelerator.pools.device.take(self.tensor.nbytes)
        source = self._host if self.tier is Tier.DISK else self.tensor
        assert source is not None  # read() comes first
        after = [*self.gather_after(), self._accelerator.compute_event()]

        def copy_in() -> None:
            self._staged = torch.empty_like(source, device=self._accelerator.device)
            self._staged.copy_(source, non_blocking=True)

        cargo = Cargo(Wire.H2D, source.nbytes)
        stream = self._accelerator.stream(Lane.H2D)
        self._arrived = stream.submit(loop_label("h2d", self._unit, source.nbytes), copy_in, after, cargo)

    def let_go(self) -> None:
        """The gather has ended; the copies go."""
        if self._staged is not None:
            self._accelerator.pools.device.give(self._staged.nbytes)
        if self._host is not None:
            self._accelerator.pools.host.give(self._host.nbytes)
        self._staged = self._host = self._arrived = None

    def write_too(self, mapped: np.memmap | None) -> None:
        """Another file that the optimizer changes with this shard."""
        self._mapped += [] if mapped is None else [mapped]

    def write_behind(self) -> None:
        """Sends what the optimizer changed to the disk, on the writing thread. Reads need not wait for it."""
        if not self._mapped:
            return
        after = [self.written] if self.written else []

        def write() -> None:
            for mapped in list(self._mapped):
                mapped.flush()

        stream = self._accelerator.stream(Lane.WRITE)
        self._flushed = stream.submit(loop_label("disk_write", self._unit), write, after)


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None  # bring_in() comes first
    return tensor
