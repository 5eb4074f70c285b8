"""What cannot be, and the nearest that can. One function a subject; each yields the first thing that is wrong.

A rule gives the reason and the fields to change. The message names all changes that lead to an experiment that
works, and ``ExperimentError.nearest`` holds them, so that a test can try every mend that we propose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..base.errors import ExperimentError
from .knobs import (
    Accumulation,
    Checkpointing,
    GlassBox,
    Gradient,
    Mesh,
    Offload,
    Precision,
    Prefetch,
    Wrap,
)

if TYPE_CHECKING:
    from .experiment import Experiment

Refusal = tuple[str, dict[str, Any]]  # the reason, and the fields whose change mends it


class _Draft:
    """The experiment with some fields changed and nothing checked: what the rules look at."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:  # only for type checkers; every field is set
        raise AttributeError(name)


def refuse_what_cannot_be(experiment: Experiment) -> None:
    """Raises ExperimentError with the first reason and the nearest experiment that works."""
    fields = {field.name: getattr(experiment, field.name) for field in dataclasses.fields(experiment)}
    reasons: list[str] = []
    nearest: dict[str, Any] = {}
    while (refusal := next(_refusals(_Draft(fields | nearest)), None)) is not None:
        reason, changes = refusal
        reasons.append(reason)
        nearest |= changes
        if len(reasons) > 32:
            raise AssertionError(f"the rules contradict each other: {reasons[-3:]}")
    if reasons:
        mend = ", ".join(f"{field}={_as_written(value)}" for field, value in nearest.items())
        raise ExperimentError(f"{reasons[0]}. Nearest that works: {mend}", nearest)


def _as_written(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = [
            f"{field.name}={_as_written(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(changed)})"
    return repr(value)


def _refusals(e: Any) -> Iterator[Refusal]:
    yield from _mesh(e)
    yield from _sharding(e)
    yield from _prefetch(e)
    yield from _offload(e)
    yield from _precision(e)
    yield from _gradient(e)
    yield from _batch(e)
    yield from _glassbox(e)
    yield from _links(e)
    yield from _capture(e)
    if e.seed < 0:
        yield f"seed must be at least 0; got {e.seed}", {"seed": 0}


def _mesh(e: Any) -> Iterator[Refusal]:
    ranks = e.mesh.world_size
    if e.engine == "single" and ranks > 1:
        yield f"engine 'single' runs on one rank; the mesh has {ranks}", {"mesh": Mesh()}
    if e.engine == "ddp" and e.mesh.shard > 1:
        yield (
            f"DDP replicates and never shards; the mesh has shard={e.mesh.shard}",
            {"mesh": Mesh(replicate=ranks)},
        )


def _sharding(e: Any) -> Iterator[Refusal]:
    reshard = e.reshard_after_forward
    is_group = reshard is not True and reshard is not False
    if is_group and e.engine not in ("fsdp2", "glassbox"):
        yield (
            "only FSDP2 and the glass box reshard to a smaller group; "
            f"got reshard_after_forward={reshard} with {e.engine}",
            {"reshard_after_forward": True},
        )
    if is_group and not (1 < reshard < e.mesh.shard and e.mesh.shard % reshard == 0):
        nearest = [d for d in range(2, e.mesh.shard) if e.mesh.shard % d == 0]
        yield (
            "an integer reshard_after_forward must divide the shard group and be neither 1 (that is False) "
            f"nor all of it (that is True); got {reshard} for {e.mesh.shard} ranks",
            {"reshard_after_forward": min(nearest, key=lambda d: abs(d - reshard)) if nearest else True},
        )
    if e.engine in ("single", "ddp") and reshard is not True:
        yield f"{e.engine} gathers nothing, so it has nothing to reshard", {"reshard_after_forward": True}
    if e.engine == "fsdp1" and e.mesh.shard == 1 and reshard is not True:
        yield "NO_SHARD gathers nothing, so it has nothing to reshard", {"reshard_after_forward": True}
    if e.engine == "fsdp1" and e.wrap.group_size > 1:
        yield "a unit of FSDP1 is one module, so it cannot hold several blocks", {"wrap": Wrap()}
    if e.engine in ("single", "ddp") and e.wrap != Wrap():
        yield f"{e.engine} has no units to wrap", {"wrap": Wrap()}


def _prefetch(e: Any) -> Iterator[Refusal]:
    if e.engine in ("single", "ddp") and e.prefetch != Prefetch():
        yield f"{e.engine} gathers nothing, so it has nothing to prefetch", {"prefetch": Prefetch()}
    forward, backward = e.prefetch.forward, e.prefetch.backward
    if e.engine == "fsdp1" and max(forward or 0, backward or 0) > 1:
        yield (
            f"FSDP1 prefetches one unit ahead at most; got forward={forward}, backward={backward}",
            {"prefetch": Prefetch(forward=forward and min(forward, 1), backward=backward and min(backward, 1))},
        )


def _offload(e: Any) -> Iterator[Refusal]:
    if e.offload.parameters and e.engine in ("single", "ddp"):
        yield f"{e.engine} cannot offload parameters; a sharding engine can", {"offload": Offload()}
    if e.offload.pin_memory is not None and not e.offload.parameters:
        yield "pin_memory belongs to offloaded parameters", {"offload": Offload()}
    if e.offload.pin_memory and e.device == "cpu":
        yield (
            "pinned memory needs a CUDA device to copy to; device='cpu' has none",
            {"offload": Offload(parameters=True, pin_memory=False)},
        )
    if e.engine == "fsdp1" and e.offload.parameters and e.device != "cuda":
        yield "FSDP1 always pins what it offloads, and only device='cuda' can", {"engine": "fsdp2"}
    if e.engine == "fsdp1" and e.offload.pin_memory is False:
        yield "FSDP1 always pins what it offloads", {"offload": Offload(parameters=True)}
    if (
        e.engine == "fsdp1"
        and e.offload.parameters
        and e.accumulation.microbatches > 1
        and not e.accumulation.reduce_each
    ):
        yield (
            "FSDP1 cannot accumulate unreduced gradients of offloaded parameters",
            {"accumulation": Accumulation(microbatches=e.accumulation.microbatches)},
        )
    if e.engine == "fsdp1" and e.offload.parameters and e.mesh.shard == 1:
        yield "FSDP1 offloads sharded parameters only; NO_SHARD has none", {"offload": Offload()}


def _precision(e: Any) -> Iterator[Refusal]:
    if e.engine == "single" and e.precision.reduce is not None:
        yield "engine 'single' reduces nothing", {"precision": e.precision.replace(reduce=None)}
    if e.engine in ("single", "ddp") and (e.precision.param is not None or e.precision.output is not None):
        yield (
            f"{e.engine} keeps the parameters' own type; mixed precision belongs to the sharding engines",
            {"precision": Precision(reduce=e.precision.reduce if e.engine == "ddp" else None)},
        )
    if e.engine == "fsdp1" and e.precision.output is not None:
        yield (
            "FSDP1 has no output type of a unit; its outputs follow param",
            {"precision": e.precision.replace(output=None)},
        )


def _gradient(e: Any) -> Iterator[Refusal]:
    if e.engine == "single" and e.gradient != Gradient():
        yield "engine 'single' reduces nothing, so it has nothing to divide", {"gradient": Gradient()}
    if e.engine == "fsdp2" and e.gradient.predivide_factor is not None:
        yield (
            "FSDP2 splits the divisor itself (about √N before the sum for fp16, none for fp32 and bf16) "
            "and takes no predivide",
            {"gradient": Gradient(divide_factor=e.gradient.divide_factor)},
        )
    if e.engine == "fsdp1" and e.gradient != Gradient() and (e.mesh.replicate > 1 or e.mesh.shard == 1):
        yield (
            "FSDP1 takes gradient factors through its communication hook, "
            "which it allows for FULL_SHARD and SHARD_GRAD_OP only",
            {"gradient": Gradient()},
        )
    if e.engine == "fsdp1" and e.gradient != Gradient() and e.precision.reduce is not None:
        yield (
            "FSDP1's communication hook reduces in the gradient's own type",
            {"precision": e.precision.replace(reduce=None)},
        )


def _batch(e: Any) -> Iterator[Refusal]:
    ranks, microbatches = e.mesh.world_size, e.accumulation.microbatches
    if e.data.batch_size % (ranks * microbatches):
        per_step = ranks * microbatches
        nearest = max(per_step, round(e.data.batch_size / per_step) * per_step)
        yield (
            f"the batch of a step must divide by ranks × microbatches = {ranks} × {microbatches}; "
            f"got {e.data.batch_size}",
            {"data": e.data.replace(batch_size=nearest)},
        )
    if microbatches == 1 and not e.accumulation.reduce_each:
        yield "one microbatch is always reduced", {"accumulation": Accumulation()}
    blocks = e.model.unit_count
    if blocks is not None and e.checkpointing.every > blocks:
        yield (
            f"checkpointing every {e.checkpointing.every} blocks checkpoints none of {blocks}",
            {"checkpointing": Checkpointing(every=blocks)},
        )
    if blocks is not None and e.wrap.group_size > blocks:
        yield (
            f"a unit of {e.wrap.group_size} blocks needs as many; the model has {blocks}",
            {"wrap": Wrap(policy="group", group_size=blocks)},
        )


def _tiers(e: Any) -> dict[str, str]:
    """Where the glass box keeps parameters, gradients and optimizer state, defaults filled in."""
    default = "host" if e.offload.parameters else "device"
    parameters = e.glassbox.parameters_on or default
    follows = "device" if parameters == "device" else "host"
    return {
        "parameters_on": parameters,
        "gradients_on": e.glassbox.gradients_on or follows,
        "optimizer_on": e.glassbox.optimizer_on or follows,
    }


def _glassbox(e: Any) -> Iterator[Refusal]:
    box = e.glassbox
    if e.engine != "glassbox":
        if box != GlassBox():
            yield f"the glassbox settings belong to engine 'glassbox'; got {e.engine!r}", {"glassbox": GlassBox()}
        return
    if e.offload.pin_memory is not None:
        yield (
            "the glass box pins offloaded shards wherever there is a CUDA device; pin_memory has no say",
            {"offload": Offload(parameters=e.offload.parameters)},
        )
    if box.optimizer_when == "backward" and e.accumulation.microbatches > 1 and e.accumulation.reduce_each:
        yield (
            "an optimizer in backward would step after every microbatch that is reduced, before the gradient is whole",
            {"accumulation": Accumulation(microbatches=e.accumulation.microbatches, reduce_each=False)},
        )


def _links(e: Any) -> Iterator[Refusal]:
    links = e.links
    if links is None:
        return
    if e.engine not in ("fsdp2", "glassbox"):
        yield f"emulated links carry FSDP2's and the glass box's collectives; {e.engine} has no hook", {"links": None}
    if e.device != "cpu":
        yield f"links are emulated on the CPU only; got device={e.device!r}", {"device": "cpu"}
    if links.host_device is not None and e.engine == "fsdp2":
        rest = {"intra_node": links.intra_node, "inter_node": links.inter_node, "host_device": None}
        yield (
            "FSDP2 makes its own host-to-device copies, and no hook can pace them",
            {"links": links.replace(**rest) if links.intra_node or links.inter_node else None},
        )
    if links.inter_node is not None and e.mesh.replicate == 1:
        yield (
            "the inter-node link carries the all-reduce between replicas; the mesh has none",
            {"links": links.replace(inter_node=None) if links.intra_node else None},
        )
    if links.host_device is not None and e.engine == "glassbox" and {*_tiers(e).values()} == {"device"}:
        rest = {"intra_node": links.intra_node, "inter_node": links.inter_node, "host_device": None}
        yield (
            "the host-device link carries offloaded shards, and none are",
            {"links": links.replace(**rest) if links.intra_node or links.inter_node else None},
        )
    if e.mesh.shard == 1:
        yield "emulated links carry gathers and reduce-scatters; one rank has none", {"links": None}


def _capture(e: Any) -> Iterator[Refusal]:
    steps = e.capture.steps
    if steps is not None and steps[-1] >= e.steps.measured:
        kept = tuple(step for step in steps if step < e.steps.measured) or (0,)
        yield (
            f"capture.steps count the measured steps from 0; got {list(steps)} of {e.steps.measured}",
            {"capture": e.capture.replace(steps=kept)},
        )
    if e.capture.memory_snapshot and e.device == "cpu":
        yield (
            "a memory snapshot is CUDA's allocator history; device='cpu' has none",
            {"capture": e.capture.replace(memory_snapshot=False)},
        )
