"""Rank arithmetic of a replicate × shard mesh, as functions of values."""

from __future__ import annotations

from .knobs import Mesh


def coordinates(mesh: Mesh, rank: int) -> tuple[int, int]:
    """(replica, position in the shard group) of ``rank``."""
    return divmod(rank, mesh.shard)


def shard_group(mesh: Mesh, rank: int) -> list[int]:
    """Ranks that together hold one copy of the parameters."""
    replica, _ = coordinates(mesh, rank)
    return list(range(replica * mesh.shard, (replica + 1) * mesh.shard))


def replicate_group(mesh: Mesh, rank: int) -> list[int]:
    """Ranks that hold the same shard, one a replica."""
    _, position = coordinates(mesh, rank)
    return list(range(position, mesh.world_size, mesh.shard))


def sample_slice(world_size: int, microbatches: int, batch_size: int, rank: int, microbatch: int) -> slice:
    """The samples of the step's global batch that ``rank`` takes as its ``microbatch``-th.

    The batch is cut into microbatches first and into ranks second, so that every engine and world size averages
    over the same samples.
    """
    samples = batch_size // (world_size * microbatches)
    start = (microbatch * world_size + rank) * samples
    return slice(start, start + samples)
