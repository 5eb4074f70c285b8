"""The process groups of one rank, one a stream, and the three collectives that run in them.

[Note: one group a stream]
A communicator runs its collectives one at a time, in the order issued, and every rank must issue the same order. Two
streams on one group would queue behind each other on NCCL and deadlock on gloo. So gather, reduce and replicate have
groups of their own, and all ranks make all groups, in one order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from ...base.errors import FsdpvizError
from ...experiment import Mesh
from ...experiment.ranks import replicate_group, shard_group
from ..links import gather_into, reduce_scatter
from .accelerator import Cargo, Wire


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
        self._gather = _my_group(shards, rank)
        self._reduce = _my_group(shards, rank)
        self._replicate = _my_group(replicas, rank) if mesh.replicate > 1 else None
        self._small = None
        if small_ranks is not None:
            parts = [group[i : i + small_ranks] for group in shards for i in range(0, mesh.shard, small_ranks)]
            self._small = _my_group(parts, rank)

    def named(self, collective: str) -> str:
        """What a range around a gather or a reduce-scatter is called: alone in its shard group, a rank only copies."""
        return collective if self.mesh.shard > 1 else "copy"

    def gather(self, full: torch.Tensor, shard: torch.Tensor, *, small: bool = False) -> None:
        """All-gathers shards into ``full``. Collective over the shard group, or the small group inside it."""
        if full.numel() == shard.numel():
            full.copy_(shard)
            return
        gather_into(full, shard, cast(dist.ProcessGroup, self._small if small else self._gather))
        self.traffic.add("all_gather", full.nbytes)

    def reduce(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Sums ``full`` over the shard group and leaves this rank's part in ``shard``. Collective over the group."""
        if full.numel() == shard.numel():
            shard.copy_(full)
            return
        reduce_scatter(shard, full, cast(dist.ProcessGroup, self._reduce), dist.ReduceOp.SUM)
        self.traffic.add("reduce_scatter", full.nbytes)

    def replicate(self, shard: torch.Tensor) -> None:
        """Sums the reduced shard over replicas, in place. Collective over the replicate group."""
        dist.all_reduce(shard, group=self._replicate)
        self.traffic.add("all_reduce", shard.nbytes)

    def sum_over_shards(self, value: torch.Tensor) -> None:
        """Sums a small tensor over the shard group, in place. To be run on the gather stream, whose group it uses."""
        dist.all_reduce(value, group=self._gather)

    def close(self) -> None:
        """Ends the groups, whose sockets would otherwise last as long as the job. Collective over all ranks."""
        for group in (self._gather, self._reduce, self._replicate, self._small):
            if group is not None:
                dist.destroy_process_group(group)
        self._gather = self._reduce = self._replicate = self._small = None

    def gather_cargo(self, full_bytes: int, *, small: bool = False) -> Cargo:
        ranks = self.small_ranks if small and self.small_ranks else self.mesh.shard
        return Cargo(Wire.INTRA_NODE, full_bytes * (ranks - 1) / ranks)

    def reduce_cargo(self, full_bytes: int) -> Cargo:
        return Cargo(Wire.INTRA_NODE, full_bytes * (self.mesh.shard - 1) / self.mesh.shard)

    def replicate_cargo(self, shard_bytes: int) -> Cargo:
        return Cargo(Wire.INTER_NODE, 2 * shard_bytes * (self.mesh.replicate - 1) / self.mesh.replicate)


def _my_group(groups: list[list[int]], rank: int) -> Any:
    """The group of ``groups`` that holds ``rank``; all are made, in order, by every rank."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine
