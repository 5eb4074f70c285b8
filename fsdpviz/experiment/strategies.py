"""FSDP1's sharding strategies in terms of mesh and resharding, which say the same and more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.errors import ExperimentError
from .knobs import Mesh

if TYPE_CHECKING:
    from .experiment import Experiment

NAMES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def translate(strategy: object, experiment: Experiment) -> dict[str, Any]:
    """The fields of ``experiment`` that ``strategy`` decides.

    FULL_SHARD and SHARD_GRAD_OP shard over all ranks, with and without resharding after forward; NO_SHARD
    replicates; HYBRID_SHARD keeps the mesh, which must have replicas. ``ShardingStrategy.FULL_SHARD`` itself and
    ``"ShardingStrategy.FULL_SHARD"`` are taken too.
    """
    name = str(getattr(strategy, "name", strategy)).rpartition(".")[2].upper()
    if name not in NAMES:
        raise ExperimentError(f"a sharding strategy is one of {', '.join(NAMES[:4])}; got {strategy!r}")
    mesh = experiment.mesh
    if name == "NO_SHARD":
        return {"mesh": Mesh(replicate=mesh.world_size)}
    if name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        if mesh.replicate > 1:
            raise ExperimentError(
                f"{name} shards over all ranks; the mesh has {mesh.replicate} replicas. "
                f"Use mesh=Mesh(shard={mesh.world_size}), or HYBRID_SHARD"
            )
        return {"reshard_after_forward": name == "FULL_SHARD"}
    if mesh.replicate == 1 or mesh.shard == 1:
        raise ExperimentError(
            f"{name} needs a mesh with replicas and shards; got {mesh.replicate} × {mesh.shard}. "
            "Use mesh=Mesh(replicate=2, shard=2)"
        )
    return {"reshard_after_forward": name == "HYBRID_SHARD"}


def fsdp1_strategy(experiment: Experiment) -> str:
    """The name of FSDP1's strategy that does what ``mesh`` and ``reshard_after_forward`` say."""
    if experiment.mesh.shard == 1:
        return "NO_SHARD"
    if experiment.mesh.replicate > 1:
        return "HYBRID_SHARD" if experiment.reshard_after_forward else "_HYBRID_SHARD_ZERO2"
    return "FULL_SHARD" if experiment.reshard_after_forward else "SHARD_GRAD_OP"
