"""Emulated links for FSDP2 on CPU: the transfer is real, and its time is stretched to what the link would take.

One worker thread a link carries transfers in the order issued, as a link and a communicator do. It does the real
collective and then sleeps to its deadline; sleeping costs no core, so what overlaps here overlaps for real.

Bytes on the wire (ring algorithms, n ranks, S the full size): all-gather and reduce-scatter move S·(n−1)/n through
each rank's link, all-reduce 2·S·(n−1)/n. Source: the bus-bandwidth factors of nccl-tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.profiler import record_function

from ..base.labels import loop_label
from ..experiment import Link, Links


class LinkThread:
    """An in-order worker: what a link carries, it carries one after the other."""

    def __init__(self, link: Link, name: str) -> None:
        self.link = link
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=_name_thread, initargs=(name,)
        )
        self._executor.submit(_nothing).result()  # the thread exists before the profiler looks for threads

    def carry(self, label: str, link_bytes: float, transfer: Callable[[], Any]) -> Future[None]:
        """Starts ``transfer`` when the link is free; the future ends when a link of this speed would have ended."""
        return self._executor.submit(self._carry, label, link_bytes, transfer)

    def _carry(self, label: str, link_bytes: float, transfer: Callable[[], Any]) -> None:
        deadline_ns = time.perf_counter_ns() + self.link.transfer_ns(link_bytes)
        with record_function(label):
            transfer()
            sleep_until(deadline_ns)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class EmulatedLinks:
    """The links of one rank, and the collectives that run over them. Not collective to make."""

    def __init__(self, links: Links, mesh: DeviceMesh) -> None:
        shard_size = mesh.size(mesh.ndim - 1)
        self._shard_fraction = (shard_size - 1) / shard_size
        self._intra = LinkThread(links.intra_node, "link intra-node") if links.intra_node else None
        self._inter = _ReplicaLink(links.inter_node, mesh.size(0)) if links.inter_node else None

    def attach(self, sharded: dict[str, FSDPModule]) -> None:
        """Puts the links under every unit of ``sharded``."""
        for name, module in sharded.items():
            if self._intra is not None:
                module.set_custom_all_gather(_PacedAllGather(self._intra, name, self._shard_fraction))
            if self._intra is not None or self._inter is not None:
                module.set_custom_reduce_scatter(
                    _PacedReduceScatter(self._intra, self._inter, name, self._shard_fraction)
                )
            if self._inter is not None:
                module.set_all_reduce_hook(self._inter.finish)

    def close(self) -> None:
        if self._intra is not None:
            self._intra.close()


class _PlainBuffers:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _PacedWork(dist.Work):
    """What FSDP2 waits on before it copies a gathered buffer out."""

    def __init__(self, future: Future[None]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.result()
        return True


class _PacedAllGather(_PlainBuffers, AllGather):
    def __init__(self, link: LinkThread, unit: str, fraction: float) -> None:
        self._link, self._label, self._fraction = link, loop_label("all_gather", unit), fraction

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        def transfer() -> None:
            gather_into(output_tensor, input_tensor, group)

        return _PacedWork(self._link.carry(self._label, output_tensor.nbytes * self._fraction, transfer))


class _PacedReduceScatter(_PlainBuffers, ReduceScatter):
    """FSDP2 ignores what a reduce-scatter returns and orders it by CUDA streams; on CPU it has to be done on return."""

    def __init__(self, link: LinkThread | None, replica_link: _ReplicaLink | None, unit: str, fraction: float) -> None:
        self._link, self._replica_link, self._unit, self._fraction = link, replica_link, unit, fraction

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        def transfer() -> None:
            reduce_scatter(output_tensor, input_tensor, group, op)

        if self._link is None:
            transfer()
        else:
            label = loop_label("reduce_scatter", self._unit)
            self._link.carry(label, input_tensor.nbytes * self._fraction, transfer).result()
        if self._replica_link is not None:
            self._replica_link.begin(self._unit, output_tensor.nbytes)


class _ReplicaLink:
    """Stretches HSDP's all-reduce, which FSDP2 issues itself between a unit's reduce-scatter and its hook.

    ``begin`` runs right before it and ``finish``, as FSDP2's all-reduce hook, right after it; the range between
    them is the transfer.
    """

    def __init__(self, link: Link, replicas: int) -> None:
        self._link, self._replicas = link, replicas
        self._range: Any = None
        self._deadline_ns = 0

    def begin(self, unit: str, payload_bytes: int) -> None:
        link_bytes = 2 * payload_bytes * (self._replicas - 1) / self._replicas
        self._deadline_ns = time.perf_counter_ns() + self._link.transfer_ns(link_bytes)
        self._range = record_function(loop_label("all_reduce", unit))
        self._range.__enter__()

    def finish(self, reduced: torch.Tensor) -> None:
        sleep_until(self._deadline_ns)
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None


def gather_into(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """All-gather by the name that this torch does not call deprecated. Collective over ``group``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, source, group=group, async_op=async_op)


def reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, op: Any, *, async_op: bool = False
) -> dist.Work | None:
    """Reduce-scatter by the name that this torch does not call deprecated. Collective over ``group``."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, source, op=op, group=group, async_op=async_op)


def sleep_until(deadline_ns: int) -> None:
    """Returns at ``deadline_ns`` of ``time.perf_counter_ns``, or at once when that has passed."""
    while (left_ns := deadline_ns - time.perf_counter_ns()) > 0:
        time.sleep(left_ns / 1e9)


def _name_thread(name: str) -> None:
    threading.current_thread().name = name


def _nothing() -> None:
    pass
