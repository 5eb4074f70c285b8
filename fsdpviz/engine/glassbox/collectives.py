"""The process groups of one rank, one a stream, and the three collectives that run in them.

[Note: one group a stream]
A communicator runs its collectives one at a time, in the order issued, and every rank must issue the same order. Two
streams on one group would queue behind each other on NCCL and deadlock on gloo. So gather, reduce and replicate have
groups of their own, and all ranks make all groups, in one order.

[Note: one group a size, on gloo]
gloo ends the process, without a word to Python, where two ranks meet in one group with messages of different size. So
each size has a group of its own: ranks that have diverged then wait, and waiting can be noticed, see ``agreement.py``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...base.errors import FsdpvizError
from ...experiment import Mesh
from ...experiment.ranks import replicate_group, shard_group
from ..links import gather_into, reduce_scatter
from .accelerator import Cargo, Wire
from .agreement import Agreement

MOST_SIZES = 4  # groups of their own for so many sizes a stream; the others share one


@dataclass
class Traffic:
    """What this rank has issued since ``clear``: collectives and bytes by kind; bytes are the full size."""

    count: Counter[str] = field(default_factory=Counter)
    total_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, full_bytes: int) -> None:
        self.count[kind] += 1
        self.total_bytes[kind] += full_bytes

    def clear(self) -> None:
        self.count.clear()
        self.total_bytes.clear()


class Collectives:
    """The collectives of one rank of a replicate × shard mesh. Making it is collective over all ranks."""

    def __init__(self, mesh: Mesh, rank: int, *, small_ranks: int | None = None) -> None:
        if small_ranks is not None and (mesh.shard % small_ranks or not 1 < small_ranks < mesh.shard):
            raise FsdpvizError(
                "an integer reshard_after_forward must divide the shard group and be neither 1 nor all of it; "
                f"got {small_ranks} for {mesh.shard} ranks. Use True or False"
            )
        self.mesh, self.rank, self.small_ranks = mesh, rank, small_ranks
        self.shard_rank = rank % mesh.shard
        self.traffic = Traffic()
        shards = [shard_group(mesh, r) for r in range(0, mesh.world_size, mesh.shard)]
        replicas = [replicate_group(mesh, r) for r in range(mesh.shard)]
        self.agreement = Agreement(rank, mesh.world_size)
        self._training_thread = threading.current_thread()
        self._device_mesh: DeviceMesh | None = None  # made when a state dict is first asked for
        self._gather = _Groups(shards, rank)
        self._reduce = _Groups(shards, rank)
        self._replicate = _Groups(replicas, rank) if mesh.replicate > 1 else None
        self._small = None
        if small_ranks is not None:
            parts = [group[i : i + small_ranks] for group in shards for i in range(0, mesh.shard, small_ranks)]
            self._small = _Groups(parts, rank)

    def separate(self, gathered: Iterable[int], reduced: Iterable[int]) -> None:
        """Gives sizes, in bytes, groups of their own. Collective. See [Note: one group a size, on gloo]."""
        sizes = sorted(set(reduced))
        for groups in (self._gather, self._small):
            _ = groups and groups.separate(sorted(set(gathered)))
        self._reduce.separate(sizes)
        if self._replicate is not None:
            self._replicate.separate([size // self.mesh.shard for size in sizes])

    def named(self, collective: str) -> str:
        """What a range around a gather or a reduce-scatter is called: alone in its shard group, a rank only copies."""
        return collective if self.mesh.shard > 1 else "copy"

    def gather(self, full: torch.Tensor, shard: torch.Tensor, *, small: bool = False) -> None:
        """All-gathers shards into ``full``. Collective over the shard group, or the small group inside it."""
        if full.numel() == shard.numel():
            full.copy_(shard)
            return
        groups = self._small if small and self._small is not None else self._gather
        self._carry_out(lambda async_op: gather_into(full, shard, groups.of(full.nbytes), async_op=async_op))
        self.traffic.add("all_gather", full.nbytes)

    def reduce(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Sums ``full`` over the shard group and leaves this rank's part in ``shard``. Collective over the group."""
        if full.numel() == shard.numel():
            shard.copy_(full)
            return
        group = self._reduce.of(full.nbytes)
        self._carry_out(lambda async_op: reduce_scatter(shard, full, group, dist.ReduceOp.SUM, async_op=async_op))
        self.traffic.add("reduce_scatter", full.nbytes)

    def replicate(self, shard: torch.Tensor) -> None:
        """Sums the reduced shard over replicas, in place. Collective over the replicate group."""
        assert self._replicate is not None  # the mesh has replicas
        group = self._replicate.of(shard.nbytes)
        self._carry_out(lambda async_op: dist.all_reduce(shard, group=group, async_op=async_op))
        self.traffic.add("all_reduce", shard.nbytes)

    def sum_over_shards(self, value: torch.Tensor) -> None:
        """Sums a small tensor over the shard group, in place. To be run on the gather stream, whose group it uses."""
        self._carry_out(lambda async_op: dist.all_reduce(value, group=self._gather.of(0), async_op=async_op))

    def most_of_all(self, value: torch.Tensor) -> None:
        """The largest of all ranks', in place: within the shard group, then across replicas. To be run on the gather
        stream while no other collective is under way."""
        for groups in (self._gather, self._replicate):
            if groups is not None:
                group = groups.of(0)
                self._carry_out(
                    lambda async_op, group=group: dist.all_reduce(value, dist.ReduceOp.MAX, group, async_op=async_op)
                )

    def device_mesh(self) -> DeviceMesh:
        """The mesh of (replicas ×) shard ranks over the groups that are there, for DTensors that lie on the CPU."""
        if self._device_mesh is None and self._replicate is None:
            self._device_mesh = DeviceMesh.from_group(self._gather.of(0), "cpu", mesh_dim_names=("shard",))
        elif self._device_mesh is None:
            assert self._replicate is not None
            groups = [self._replicate.of(0), self._gather.of(0)]
            ranks = torch.arange(self.mesh.world_size).view(self.mesh.replicate, self.mesh.shard)
            names = ("replicate", "shard")
            self._device_mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
        return self._device_mesh

    def close(self) -> None:
        """Ends the groups, whose sockets would otherwise last as long as the job. Collective over all ranks."""
        self.agreement.close()
        for groups in (self._gather, self._reduce, self._replicate, self._small):
            _ = groups and groups.close()

    def _carry_out(self, issue: Callable[[bool], dist.Work | None]) -> None:
        """Issues a collective and waits for it. Where that is the training thread's own work, it can be freed."""
        if not self._gather.on_gloo or threading.current_thread() is not self._training_thread:
            issue(False)
            return
        work, error = issue(True), []

        def wait() -> None:
            try:
                _ = work and work.wait()
            except RuntimeError as raised:
                error.append(raised)

        waiting = threading.Thread(target=wait, name="collective", daemon=True)
        waiting.start()
        waiting.join(1.0)  # to its very end: a thread inside c10d when the interpreter ends aborts the process
        while waiting.is_alive():
            self.agreement.check()
            waiting.join(1.0)
        if error:
            raise error[0]

    def gather_cargo(self, full_bytes: int, *, small: bool = False) -> Cargo:
        ranks = self.small_ranks if small and self.small_ranks else self.mesh.shard
        return Cargo(Wire.INTRA_NODE, full_bytes * (ranks - 1) / ranks)

    def reduce_cargo(self, full_bytes: int) -> Cargo:
        return Cargo(Wire.INTRA_NODE, full_bytes * (self.mesh.shard - 1) / self.mesh.shard)

    def replicate_cargo(self, shard_bytes: int) -> Cargo:
        return Cargo(Wire.INTER_NODE, 2 * shard_bytes * (self.mesh.replicate - 1) / self.mesh.replicate)


class _Groups:
    """The groups of one stream: one for everything, and on gloo one more a size."""

    def __init__(self, ranks: list[list[int]], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self._made = [_my_group(ranks, rank)]
        self._by_size: dict[int, Any] = {}
        self.on_gloo = dist.get_backend(self._made[0]) == "gloo"

    def separate(self, sizes: Iterable[int]) -> None:
        if self.on_gloo and len(self._ranks[0]) > 1:
            for size in list(sizes)[:MOST_SIZES]:
                self._by_size[size] = _my_group(self._ranks, self._rank)
                self._made.append(self._by_size[size])

    def of(self, size_bytes: int) -> Any:
        return self._by_size.get(size_bytes, self._made[0])

    def close(self) -> None:
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()  # a group that is referred to keeps its threads
        self._by_size.clear()


def _my_group(groups: list[list[int]], rank: int) -> Any:
    """The group of ``groups`` that holds ``rank``; all are made, in order, by every rank."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine
