"""What the engine asks of a device: streams, events, memory that is counted. Two files keep this promise.

A stream does its work in the order submitted. An event is a point in a stream; "compute" is the stream in which the
model's own operators run: the calling thread on a CPU, the current CUDA stream on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ...base.errors import FsdpvizError


class Lane(StrEnum):
    """The streams of one rank. The value is the thread's name, and so the lane's name in a timeline."""

    GATHER = "gather stream"
    REDUCE = "reduce stream"
    REPLICATE = "replicate stream"
    H2D = "H2D stream"
    D2H = "D2H stream"
    OPTIMIZER = "optimizer stream"
    READ = "disk read"
    WRITE = "disk write"


class Wire(StrEnum):
    """What a transfer runs over. Transfers on one wire share it, whatever their streams."""

    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"
    H2D = "h2d"  # PCIe has both directions at once
    D2H = "d2h"


class Cargo(NamedTuple):
    """Bytes that go over a wire, by the counting of FACTS: S·(n−1)/n for a gather of S bytes among n ranks."""

    wire: Wire
    wire_bytes: float


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Compute issued from here on runs after the event. On a CPU this blocks, and raises what the work raised."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the event: for work of the host on what a device has written."""
        ...


class Stream(Protocol):
    def submit(
        self, label: str, work: Callable[[], None], after: Iterable[Event] = (), cargo: Cargo | None = None
    ) -> Event:
        """Runs ``work`` under the range ``label`` once ``after`` and all earlier work are done; the event is its end.

        What ``work`` refers to must live until somebody has waited for the event.
        """
        ...


class DirectLoad(Protocol):
    """A file whose content goes to the device without a copy in host memory."""

    def load(self, on_device: torch.Tensor) -> None:
        """Blocks until ``on_device`` holds the file's first bytes. The device must have done with that memory."""
        ...


class Accelerator(Protocol):
    """A device with its streams and its memory."""

    device: torch.device
    pools: Pools

    def stream(self, lane: Lane) -> Stream:
        """The stream of that name, made on first use."""
        ...

    def compute_event(self) -> Event:
        """All compute issued so far."""
        ...

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from and to, pinned where there is a device."""
        ...

    def open_direct(self, path: Path) -> DirectLoad | None:
        """The file at ``path``, or None for a device that reads through host memory."""
        ...

    def fail(self, error: BaseException) -> None:
        """Whoever waits on the CPU, now or later, gets ``error``; for work that will never end."""
        ...

    def close(self) -> None:
        """Ends threads. Work already submitted is done first."""
        ...


class Pool:
    """Bytes of one kind of memory: how many now, how many at most, how many allowed. Safe from every thread."""

    def __init__(self, name: str, budget_bytes: int | None = None) -> None:
        self.name, self.budget_bytes = name, budget_bytes
        self.now_bytes = self.peak_bytes = 0
        self._lock = threading.Lock()

    def take(self, count_bytes: int) -> None:
        """Counts an allocation. Raises FsdpvizError, having counted nothing, when it breaks the budget."""
        with self._lock:
            now_bytes = self.now_bytes + count_bytes
            if self.budget_bytes is not None and now_bytes > self.budget_bytes:
                raise FsdpvizError(
                    f"{self.name} memory has a budget of {self.budget_bytes:,} bytes and needs {now_bytes:,}. "
                    "Raise the budget, offload more, or prefetch less"
                )
            self.now_bytes = now_bytes
            self.peak_bytes = max(self.peak_bytes, now_bytes)

    def give(self, count_bytes: int) -> None:
        with self._lock:
            self.now_bytes -= count_bytes
            assert self.now_bytes >= 0, f"{self.name}: gave back more than was taken"

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes = self.now_bytes


class Pools:
    """The three tiers' accounts."""

    def __init__(
        self, device_bytes: int | None = None, host_bytes: int | None = None, disk_bytes: int | None = None
    ) -> None:
        self.device = Pool("device", device_bytes)
        self.host = Pool("host", host_bytes)
        self.disk = Pool("disk", disk_bytes)
