"""A CPU that behaves like an accelerator: a stream is an in-order worker thread, an event is set by it.

Device and host memory are the same RAM here, so they are told apart by counting. Links may be emulated: the
transfer is real and its time is stretched, see ``engine/links.py``.

[Note: threads are streams]
The profiler records each thread as a lane, so a timeline of this engine looks like one of CUDA streams. Torch's
operators and gloo let go of Python's lock while they work; what a stream adds to compute is the time of Python's own
lines, about 50 µs a piece of work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue

import torch
from torch.profiler import record_function

from ...experiment import Link, Links
from ..links import sleep_until
from .accelerator import Cargo, DirectLoad, Event, Lane, Pools, Stream, Wire

Jitter = Callable[[Lane], float]  # seconds to sleep before a piece of work: tests only


class CpuEvent:
    """Set when the work has ended, well or not."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        if not self._ended.is_set():  # a stream that failed has ended it before its work does
            self._error = error
            self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error

    synchronize = wait  # to wait is to block, where compute is the calling thread


class _Done:
    def wait(self) -> None:
        pass

    synchronize = wait


class EmulatedLink:
    """One wire. Who comes while it is busy queues behind: two streams on one wire get half of it each."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._free_ns = 0

    def reserve(self, wire_bytes: float) -> int:
        """When a transfer that is ready now has arrived, in ns of ``perf_counter_ns``."""
        with self._lock:
            begins_ns = max(time.perf_counter_ns(), self._free_ns)
            self._free_ns = begins_ns + self._link.transfer_ns(wire_bytes)
            return self._free_ns


class CpuStream:
    """A thread that does work in the order submitted."""

    def __init__(
        self,
        lane: Lane,
        wires: dict[Wire, EmulatedLink],
        jitter: Jitter | None,
        *,
        device: torch.device | None = None,  # the CUDA device that this host lane serves
    ) -> None:
        self._lane, self._wires, self._jitter, self._device = lane, wires, jitter, device
        self._queue: SimpleQueue[tuple[str, Callable[[], None], tuple[Event, ...], Cargo | None, CpuEvent] | None]
        self._queue = SimpleQueue()
        self._pending: deque[CpuEvent] = deque()
        self._failure: BaseException | None = None
        is_up = threading.Event()
        threads = torch.get_num_threads()  # a new thread would take all cores
        self._thread = threading.Thread(target=self._run, args=(threads, is_up), name=lane.value, daemon=True)
        self._thread.start()
        is_up.wait()  # the thread exists before the profiler looks for threads

    def submit(
        self, label: str, work: Callable[[], None], after: Iterable[Event] = (), cargo: Cargo | None = None
    ) -> CpuEvent:
        event = CpuEvent()
        self._pending.append(event)
        if self._failure is not None:
            event.end(self._failure)
        self._queue.put((label, work, tuple(after), cargo, event))
        return event

    def fail(self, error: BaseException) -> None:
        """Whoever waits for this stream gets ``error``: its thread is in a collective that will never end."""
        self._failure = error
        for event in list(self._pending):
            event.end(error)

    def close(self) -> None:
        self._queue.put(None)
        if self._failure is None:
            self._thread.join()

    def _run(self, threads: int, is_up: threading.Event) -> None:
        torch.set_num_threads(threads)
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a thread of its own starts on device 0
        is_up.set()
        while (item := self._queue.get()) is not None:
            label, work, after, cargo, event = item
            try:
                if self._jitter is not None:
                    time.sleep(self._jitter(self._lane))
                for earlier in after:
                    earlier.synchronize()
                with record_function(label), torch.no_grad():
                    _carry(work, self._wires.get(cargo.wire) if cargo else None, cargo)
            except BaseException as error:  # noqa: BLE001  # the thread's boundary: whoever waits gets it
                event.end(error)
            else:
                event.end()
            self._pending.popleft()
            del item, work, after, event  # the thread must not keep buffers alive while it idles


class InlineStream:
    """One stream for all: work is done where it is submitted, before submit returns."""

    def __init__(self, wires: dict[Wire, EmulatedLink]) -> None:
        self._wires = wires

    def submit(
        self, label: str, work: Callable[[], None], after: Iterable[Event] = (), cargo: Cargo | None = None
    ) -> Event:
        for earlier in after:
            earlier.wait()
        with record_function(label), torch.no_grad():
            _carry(work, self._wires.get(cargo.wire) if cargo else None, cargo)
        return _Done()


def _carry(work: Callable[[], None], link: EmulatedLink | None, cargo: Cargo | None) -> None:
    if link is None or cargo is None:
        work()
    else:
        arrives_ns = link.reserve(cargo.wire_bytes)
        work()
        sleep_until(arrives_ns)


class CpuAccelerator:
    """The CPU as device. ``links`` are emulated; ``jitter`` delays every piece of work, for tests."""

    device = torch.device("cpu")

    def __init__(
        self,
        links: Links | None = None,
        pools: Pools | None = None,
        *,
        one_stream: bool = False,
        jitter: Jitter | None = None,
    ) -> None:
        self.pools = pools or Pools()
        self._one_stream, self._jitter = one_stream, jitter
        self._streams: dict[Lane, CpuStream] = {}
        self._wires = _wires(links) if links else {}
        self._inline = InlineStream(self._wires)

    def stream(self, lane: Lane) -> Stream:
        if self._one_stream:
            return self._inline
        if lane not in self._streams:
            self._streams[lane] = CpuStream(lane, self._wires, self._jitter)
        return self._streams[lane]

    def compute_event(self) -> Event:
        return _Done()  # compute has ended when the calling thread gets here

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def open_direct(self, path: Path) -> DirectLoad | None:
        return None  # device memory is host memory

    def fail(self, error: BaseException) -> None:
        for stream in self._streams.values():
            stream.fail(error)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def _wires(links: Links) -> dict[Wire, EmulatedLink]:
    stated = {
        Wire.INTRA_NODE: links.intra_node,
        Wire.INTER_NODE: links.inter_node,
        Wire.H2D: links.host_device,
        Wire.D2H: links.host_device,
    }
    return {wire: EmulatedLink(link) for wire, link in stated.items() if link is not None}
