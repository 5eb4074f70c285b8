"""A worker for tests: the glass box under a covering array of policies, in ranks that join once.

torchrun … glassbox_grid_worker.py <results.json> <strength>
"""

from __future__ import annotations

import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import Configuration, covering_array
from glassbox_parts import BLOCKS, Net, mine, run, seeded, sgd
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fsdpviz.engine.glassbox import Policy, ShardedModel, ShardedOptimizer, Tier
from fsdpviz.engine.glassbox.build import replayed_peaks
from fsdpviz.schedule import step_events

SAMPLES, STEPS = 8, 3  # of the global batch, whatever the world
TIERS = tuple(Tier)
FP32, BF16 = torch.float32, torch.bfloat16


def knobs(world: int) -> dict[str, tuple[Any, ...]]:
    return {
        "shard": tuple(degree for degree in (1, 2, 4) if degree <= world),
        "precision": ((FP32, FP32), (BF16, FP32), (BF16, BF16)),  # of parameters, of reductions
        "parameters_on": TIERS,
        "gradients_on": TIERS,
        "optimizer_on": TIERS,
        "forward_depth": (0, 1, 3),
        "backward_depth": (0, 1, 3),
        "order": ("pre", "post"),
        "gathered_limit": (None, 1, 3),
        "reshard_after_forward": (True, False, 2) if world == 4 else (True, False),
        "keep_last": (0, 2),
        "streams": ("separate", "one"),
        "reduce_when": ("unit", "end"),
        "reduces_in_flight": (1, 2, 9),
        "accumulation": ("none", "local", "reduced"),  # two microbatches, whose gradients are added up, or reduced each
        "checkpointing": (False, True),
        "optimizer_when": ("step", "backward"),
        "optimizer": ("sgd", "adamw"),
    }


def is_possible(partial: Configuration) -> bool:
    """A part is kept of a shard group of four alone; an optimizer in backward needs the final gradient."""
    keeps_part = partial.get("reshard_after_forward") == 2 and not isinstance(
        partial.get("reshard_after_forward"), bool
    )
    in_backward = partial.get("optimizer_when") == "backward"
    return not (keeps_part and partial.get("shard", 4) != 4) and not (
        in_backward and partial.get("accumulation") == "reduced"
    )


def policy_of(row: Configuration) -> Policy:
    return Policy(**{name: row[name] for name in Policy.__dataclass_fields__ if name in row})


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"sgd": sgd, "adamw": adamw}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 5, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


def module_of(row: Configuration) -> Net:
    module = seeded()
    assert isinstance(module, Net)
    if row["checkpointing"]:
        for index, block in enumerate(module.blocks):
            module.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    return module


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, microbatches: int, guard: Callable[[bool], Any]
) -> float:
    """This rank's loss."""
    inputs, targets = (mine(tensor) for tensor in batch(step))
    total = 0.0
    for index, (x, y) in enumerate(zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)):
        with guard(index == microbatches - 1):
            loss = F.mse_loss(model(x).float(), y) / microbatches
            loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def mean_over_ranks(losses: list[float]) -> list[float]:
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return (mean / dist.get_world_size()).tolist()


Trained = tuple[list[float], dict[str, torch.Tensor]]


@functools.cache
def reference(param: torch.dtype, optimizer: str, parts: int) -> Trained:
    """Unsharded, of the global batch, in ``parts`` that are rounded one by one as ranks and microbatches are."""
    module = seeded()
    stepper = OPTIMIZERS[optimizer](module.parameters())
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step)
        total = 0.0
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            cast = {name: parameter.to(param) for name, parameter in module.named_parameters()}
            loss = F.mse_loss(torch.func.functional_call(module, cast, (x.to(param),)).float(), y) / parts
            loss.backward()
            total += loss.item()
        stepper.step()
        stepper.zero_grad()
        losses.append(total)
    return losses, {name: value.detach().clone() for name, value in module.named_parameters()}


@functools.cache
def fsdp2(shard: int, param: torch.dtype, reduce: torch.dtype, optimizer: str) -> Trained:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}
    module: Any = seeded()
    for block in module.blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)
    stepper = OPTIMIZERS[optimizer](module.parameters())
    losses = [one_step(module, stepper, step, 1, lambda _last: nullcontext()) for step in range(STEPS)]
    weights = {name: _whole(value) for name, value in module.named_parameters()}
    return mean_over_ranks(losses), weights


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def expected_traffic(row: Configuration) -> dict[str, list[int]]:
    """Of one step, by hand: counts and full bytes. The root has 111 elements, a block 312; W shard ranks pad them.

    A microbatch gathers each unit in forward, and each block again in backward unless it is kept; the last
    ``keep_last`` are.
    """
    world, shard = dist.get_world_size(), row["shard"]
    param, reduce = (dtype.itemsize for dtype in row["precision"])
    root, block = (-(-numel // shard) * shard for numel in (111, 312))
    microbatches = 1 if row["accumulation"] == "none" else 2
    reductions = 2 if row["accumulation"] == "reduced" else 1
    again = 0 if row["reshard_after_forward"] is False else BLOCKS - row["keep_last"]
    found = {}
    if shard > 1:
        gathers = BLOCKS + again
        found["all_gather"] = [microbatches * (1 + gathers), microbatches * (root + gathers * block) * param]
        found["reduce_scatter"] = [reductions * (1 + BLOCKS), reductions * (root + BLOCKS * block) * reduce]
    if world > shard:
        found["all_reduce"] = [reductions * (1 + BLOCKS), reductions * (root + BLOCKS * block) // shard * reduce]
    return found


def compared(model: ShardedModel, losses: list[float], weights: Mapping[str, torch.Tensor], to: Trained) -> list[float]:
    """The largest relative difference of a loss and the largest difference of a weight."""
    expected, whole = to
    of_losses = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return [of_losses, max((weights[name] - value).abs().max().item() for name, value in whole.items())]


def trained(row: Configuration, folder: Path) -> dict[str, Any]:
    """What one configuration gave. The last of its steps is the one that is counted."""
    param, reduce = row["precision"]
    microbatches = 1 if row["accumulation"] == "none" else 2
    policy = policy_of(row)
    model = ShardedModel(
        module_of(row), row["shard"], policy=policy, param_dtype=param, reduce_dtype=reduce, disk_folder=folder
    )
    optimizer = ShardedOptimizer(model, OPTIMIZERS[row["optimizer"]](model.parameters()))

    def guard(is_last: bool) -> Any:
        return model.reduces_gradients(is_last or row["accumulation"] == "reduced")

    pools = (model.accelerator.pools.device, model.accelerator.pools.host, model.accelerator.pools.disk)
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1:
            for pool in pools:
                pool.reset_peak()
            model.collectives.traffic.clear()
            model.issued = []
        losses.append(one_step(model, optimizer, step, microbatches, guard))
    issued, traffic = [str(event) for event in model.issued or ()], model.collectives.traffic
    counted = {kind: [count, traffic.total_bytes[kind]] for kind, count in traffic.count.items()}
    laid_out = {name: (unit.trainable, unit.frozen) for name, unit in model.units().items()}
    per_element = 4 * (2 if row["optimizer"] == "adamw" else 1)
    state = {name: per_element * sum(s.numel() for s in held[0].shards) for name, held in laid_out.items()}
    names = ["(root)", *(f"blocks.{index}" for index in range(BLOCKS))]
    reduces = [True] if microbatches == 1 else [row["accumulation"] == "reduced", True]
    formula = replayed_peaks(laid_out, model.context, state, reduces)
    expected = step_events(names, policy, replicas=model.collectives.mesh.replicate, reduces=reduces)
    if policy.optimizer_when == "step":
        expected = [event for event in expected if event.op not in ("optimizer", "write")]
    weights, losses = model.full_state_dict(), mean_over_ranks(losses)
    digest = hashlib.sha256()
    for shard in model.parameters():
        digest.update(shard.detach().contiguous().numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    model.close()
    world = dist.get_world_size()
    return {
        "reference": compared(model, losses, weights, reference(param, row["optimizer"], world * microbatches)),
        "fsdp2": compared(model, losses, weights, fsdp2(row["shard"], param, reduce, row["optimizer"])),
        "traffic": [counted, expected_traffic(row)],
        "issued": issued,
        "expected": [str(event) for event in expected],
        "replicas": [len(set(digests[first :: row["shard"]])) for first in range(row["shard"])],
        "peaks": [[pool.peak_bytes for pool in pools], [formula[tier] for tier in Tier]],
    }


def grid() -> list[dict[str, Any]]:
    world = dist.get_world_size()
    rows = covering_array(knobs(world), int(sys.argv[2]), is_possible)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for index, row in enumerate(rows):
            told = {name: str(value) for name, value in row.items()}
            found.append({"row": told} | trained(row, Path(folder) / str(index)))
    return found


def misled() -> dict[str, Any]:
    """The companion: what each comparison finds where one thing is not as stated."""
    world = dist.get_world_size()
    row: Configuration = {name: values[0] for name, values in knobs(world).items()} | {"shard": world}
    with tempfile.TemporaryDirectory() as folder:
        right = trained(row, Path(folder))
        OPTIMIZERS["sgd"] = lambda parameters: torch.optim.SGD(parameters, lr=0.0501, momentum=0.9, weight_decay=0.01)
        wrong = trained(row, Path(folder))  # the reference and FSDP2 are remembered
        OPTIMIZERS["sgd"] = sgd
        late = trained(row | {"reduces_in_flight": 1, "reduce_when": "end"}, Path(folder))
        kept = trained(row | {"reshard_after_forward": False}, Path(folder))
    return {
        "reference": [right["reference"][1], wrong["reference"][1]],
        "fsdp2": [right["fsdp2"][1], wrong["fsdp2"][1]],
        "traffic": kept["traffic"][0] != right["traffic"][1],
        "order": late["issued"] != right["expected"],
        "peaks": late["peaks"][0] != right["peaks"][1],
    }


if __name__ == "__main__":
    run({"grid": grid, "misled": misled})
