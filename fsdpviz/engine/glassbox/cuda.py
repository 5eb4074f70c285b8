"""A CUDA device: streams and events are CUDA's own, host memory is pinned.

[Note: no record_stream]
PyTorch's allocator hands a freed block to the next allocation *of the same stream* at once, and knows nothing of
other streams that may still read it. ``record_stream`` would make it ask, at the price of memory that comes back
late and at random. Instead the engine keeps two rules, which ``unit.py`` follows:

- gathered parameters are allocated by compute and written by the gather stream. Every piece of work waits for the
  compute issued before it (``compute_event``), so a block that compute has freed is not written while it is read.
- what a side stream reads or allocates is referred to until compute has waited for that stream's event.

[Note: host lanes]
Reading and writing files, and an optimizer of offloaded shards, are work of the host: they run on worker threads, as
everything does in ``cpu.py``. Such a thread blocks until the CUDA work before it is done; a CUDA stream that comes
after it cannot be told of it, so the training thread blocks in its place.

[Note: storage straight to the device]
cuFile reads a file into device memory without a copy in host memory. It is a call of the host that no stream orders:
the block that it fills may be one that compute is still reading. So it runs on the reading thread, which first waits
for all compute issued before, and for the flush of what the optimizer wrote through the map of the same file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch.cuda import gds
from torch.profiler import record_function

from ...base.errors import FsdpvizError
from .accelerator import Cargo, Event, Lane, Pools, Stream
from .cpu import CpuStream


class CudaEvent:
    """A point in a CUDA stream; to wait is to make the current stream of its device wait, never the CPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaStream:
    """One CUDA stream. ``work`` is called at once; what it launches runs in the stream's order."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(
        self, label: str, work: Callable[[], None], after: Iterable[Event] = (), cargo: Cargo | None = None
    ) -> CudaEvent:
        with torch.cuda.stream(self._stream):
            for earlier in after:
                earlier.wait()
            with record_function(label), torch.no_grad():
                work()
            return CudaEvent(self._stream)


class DirectFile:
    """A file that is read straight into device memory, see [Note: storage straight to the device]."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = gds.GdsFile(str(path), os.O_RDWR)
        except (RuntimeError, OSError) as error:
            raise FsdpvizError(
                f"GPU-direct storage needs cuFile and a file system that it knows; {path.parent} has not: {error}. "
                "Use CudaAccelerator(direct_storage=False)"
            ) from error

    def load(self, on_device: torch.Tensor) -> None:
        self._file.load_storage(cast(Any, on_device.untyped_storage()))


# as FSDP2 has them: what compute soon waits for goes first where kernels compete
_FIRST = frozenset({Lane.GATHER, Lane.REDUCE, Lane.H2D, Lane.D2H})


class CudaAccelerator:
    """One GPU of this rank. Wires are real, so cargo is not paced. ``steps_on_host`` for offloaded parameters.

    ``direct_storage`` reads parameters of the disk tier straight into device memory.
    """

    def __init__(
        self,
        device: torch.device,
        pools: Pools | None = None,
        *,
        one_stream: bool = False,
        steps_on_host: bool = False,
        direct_storage: bool = False,
    ) -> None:
        self.device, self.pools = device, pools or Pools()
        self._direct_storage = direct_storage
        self._one_stream = one_stream
        self._host_lanes = {Lane.READ, Lane.WRITE} | ({Lane.OPTIMIZER} if steps_on_host else set())
        self._streams: dict[Lane, Stream] = {}
        self._threads: list[CpuStream] = []

    def stream(self, lane: Lane) -> Stream:
        """The stream of that name, made on first use. See [Note: host lanes]."""
        if lane not in self._streams and lane in self._host_lanes:
            self._threads.append(CpuStream(lane, {}, None, device=self.device))
            self._streams[lane] = self._threads[-1]
        if lane not in self._streams:
            if self._one_stream:
                stream = torch.cuda.current_stream(self.device)
            else:
                stream = torch.cuda.Stream(self.device, priority=-1 if lane in _FIRST else 0)
            self._streams[lane] = CudaStream(stream)
        return self._streams[lane]

    def compute_event(self) -> Event:
        return CudaEvent(torch.cuda.current_stream(self.device))

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def open_direct(self, path: Path) -> DirectFile | None:
        return DirectFile(path) if self._direct_storage else None

    def fail(self, error: BaseException) -> None:
        for thread in self._threads:
            thread.fail(error)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
        torch.cuda.synchronize(self.device)
        self._threads.clear()
        self._streams.clear()
