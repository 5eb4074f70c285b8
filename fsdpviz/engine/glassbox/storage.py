"""Where a shard lies between uses, and how it comes to the device for a gather.

    tier     self.tensor is            on its way to the gather
    DEVICE   device memory             nothing
    HOST     pinned host memory        copy in (H2D stream)
    DISK     a memory-mapped file      read (disk thread) into host memory, then copy in (H2D stream);
                                       read straight into device memory where the accelerator can

The optimizer works on ``self.tensor`` wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from ...schedule import Tier
from .accelerator import Accelerator, Cargo, DirectLoad, Event, Lane, Pool, Wire
from .disk import MappedFile


def place(
    tensor: torch.Tensor, tier: Tier, accelerator: Accelerator, file: Path
) -> tuple[torch.Tensor, MappedFile | None]:
    """A copy of ``tensor`` (one dim) in ``tier``, counted there, and its map where it is a file.

    Raises FsdpvizError, having counted nothing, when the budget or the disk has no room.
    """
    pool = pool_of(accelerator, tier)
    pool.take(tensor.nbytes)
    if tier is Tier.DEVICE:
        return tensor.detach().to(accelerator.device, copy=True), None
    if tier is Tier.HOST:
        return accelerator.host_empty(tensor.numel(), tensor.dtype).copy_(tensor.detach()), None
    try:
        mapped = MappedFile(file, tensor.nbytes)
    except FsdpvizError:
        pool.give(tensor.nbytes)
        raise
    return mapped.tensor(tensor.numel(), tensor.dtype).copy_(tensor.detach()), mapped


def pool_of(accelerator: Accelerator, tier: Tier) -> Pool:
    pools = accelerator.pools
    return {Tier.DEVICE: pools.device, Tier.HOST: pools.host, Tier.DISK: pools.disk}[tier]


class ShardStore:
    """One unit's parameter shard in its tier. ``bring_in`` makes ``on_device`` for one gather, ``let_go`` ends it.

    Once a write has failed, every touch raises what it raised, until ``rewritten``.
    """

    def __init__(self, unit: str, shard: torch.Tensor, tier: Tier, accelerator: Accelerator, file: Path) -> None:
        self.tier = tier
        self._unit, self._accelerator = unit, accelerator
        self.tensor, mapped = place(shard, tier, accelerator, file)
        self._files = [] if mapped is None else [mapped]  # all that the optimizer changes with this shard
        self._direct = None if mapped is None else accelerator.open_direct(file)
        self._host: torch.Tensor | None = None  # DISK: what was read; dies in let_go
        self._staged: torch.Tensor | None = None  # HOST, DISK: the copy on the device; dies in let_go
        self._arrived: Event | None = None
        self._flushed: Event | None = None  # the last write; the next one waits for it
        self._lost: FsdpvizError | None = None  # what a write raised on its thread
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
        self.check()
        if self._direct is not None:
            return  # bring_in reads, straight to the device
        self._accelerator.pools.host.take(self.tensor.nbytes)
        host = self._host = self._accelerator.host_empty(self.tensor.numel(), self.tensor.dtype)
        after = [self.written] if self.written else []

        def read() -> None:
            host.copy_(self.tensor)

        self._arrived = self._accelerator.stream(Lane.READ).submit(loop_label("disk_read", self._unit), read, after)

    def bring_in(self) -> None:
        """Host → device, on the H2D stream."""
        self.check()
        self._accelerator.pools.device.take(self.tensor.nbytes)
        if self._direct is not None:
            self._load(self._direct)
            return
        source = self._host if self.tier is Tier.DISK else self.tensor
        assert source is not None  # read() comes first
        after = [*self.gather_after(), self._accelerator.compute_event()]

        def copy_in() -> None:
            self._staged = torch.empty_like(source, device=self._accelerator.device)
            self._staged.copy_(source, non_blocking=True)

        cargo = Cargo(Wire.H2D, source.nbytes)
        stream = self._accelerator.stream(Lane.H2D)
        self._arrived = stream.submit(loop_label("h2d", self._unit, source.nbytes), copy_in, after, cargo)

    def _load(self, direct: DirectLoad) -> None:
        """Disk → device, on the reading thread: when compute has done with the memory, and the file has all of it."""
        staged = self._staged = torch.empty(
            self.tensor.numel(), dtype=self.tensor.dtype, device=self._accelerator.device
        )
        flushed = [] if self._flushed is None else [self._flushed]
        after = [*self.gather_after(), *flushed, self._accelerator.compute_event()]
        stream = self._accelerator.stream(Lane.READ)
        self._arrived = stream.submit(loop_label("disk_read", self._unit), lambda: direct.load(staged), after)

    def let_go(self) -> None:
        """The gather has ended; the copies go."""
        if self._staged is not None:
            self._accelerator.pools.device.give(self._staged.nbytes)
        if self._host is not None:
            self._accelerator.pools.host.give(self._host.nbytes)
        self._staged = self._host = self._arrived = None

    def give_up(self) -> None:
        """Ends what a step that raised has begun. Raises what that raises; a lost shard stays lost."""
        pending = [event for event in (self._arrived, self.written, self._flushed) if event is not None]
        self.written = self._flushed = None
        with ExitStack() as stack:
            stack.callback(self.let_go)
            for event in pending:
                stack.callback(event.synchronize)

    def write_too(self, mapped: MappedFile | None) -> None:
        """Another file that the optimizer changes with this shard."""
        self._files += [] if mapped is None else [mapped]

    def write_behind(self) -> None:
        """Sends what the optimizer changed to the disk, on the writing thread. Reads need not wait for it.

        The step before has been written when this returns, or this raises why not.
        """
        if not self._files:
            return
        self.drain()

        def flush() -> None:
            for file in list(self._files):
                file.flush()

        self.write(flush, [self.written] if self.written else [])

    def write(self, work: Callable[[], None], after: Iterable[Event]) -> Event:
        """Runs ``work`` on the writing thread; what it raises is told at the next touch of this shard."""

        def write() -> None:
            try:
                work()
            except FsdpvizError as error:
                self._lost = error
                raise

        stream = self._accelerator.stream(Lane.WRITE)
        self._flushed = stream.submit(loop_label("disk_write", self._unit), write, after)
        return self._flushed

    def check(self) -> None:
        """Raises FsdpvizError where a write is known to have failed; waits for none."""
        if self._lost is not None:
            raise FsdpvizError(str(self._lost)) from self._lost

    def drain(self) -> None:
        """Waits for the write under way. Raises FsdpvizError where it, or one before, has failed."""
        flushed, self._flushed = self._flushed, None
        if flushed is not None:
            flushed.synchronize()
        self.check()

    def rewritten(self) -> None:
        """The whole shard has a new value, such as a checkpoint's: sends it to the disk and waits for it."""
        with suppress(FsdpvizError):
            self.drain()
        self._lost = None
        self.write_behind()
        self.drain()


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None  # bring_in() comes first
    return tensor
