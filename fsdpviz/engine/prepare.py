"""From an experiment to something that can train: units, checkpointing, sharding, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor

from ..base.errors import ExperimentError
from ..experiment import Checkpointing, Experiment, Optimizer, Wrap
from .protocol import RankContext, Unit


def synchronise(module: nn.Module, context: RankContext) -> None:
    """Gives every rank rank 0's parameters and buffers, before sharding. Collective over all ranks."""
    if context.world_size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        payload = tensor.detach().to(context.device)
        dist.broadcast(payload, src=0)
        with torch.no_grad():
            tensor.copy_(payload)


def checkpointed(module: nn.Module, blocks: dict[str, nn.Module], checkpointing: Checkpointing) -> dict[str, nn.Module]:
    """The blocks, every n-th of them wrapped to run its forward again in backward; ``module`` is changed in place."""
    if not checkpointing.every:
        return blocks
    wrapped = {}
    for index, (name, block) in enumerate(blocks.items()):
        if index % checkpointing.every == 0:
            block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, block)
        wrapped[name] = block
    return wrapped


def units(blocks: dict[str, nn.Module], wrap: Wrap) -> tuple[Unit, ...]:
    """The units in forward order, without the root, as ``wrap`` says."""
    if wrap.policy == "root":
        return ()
    named = list(blocks.items())
    groups = (named[start : start + wrap.group_size] for start in range(0, len(named), wrap.group_size))
    return tuple(Unit(", ".join(name for name, _ in group), tuple(block for _, block in group)) for group in groups)


def optimizer(spec: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, made once and after sharding: an earlier one would hold the unsharded parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if spec.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=spec.lr,
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            foreach=spec.foreach,
        )
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=spec.lr, weight_decay=spec.weight_decay, foreach=spec.foreach)


def local_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter as this rank stores it: its shard, or the whole where nothing is sharded."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield name, tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_units(experiment: Experiment, blocks: dict[str, nn.Module]) -> None:
    """The rules that need to know how many blocks a user's model has."""
    experiment_blocks = len(blocks)
    if experiment.checkpointing.every > max(experiment_blocks, 1):
        raise ExperimentError(
            f"checkpointing every {experiment.checkpointing.every} blocks checkpoints none of {experiment_blocks}. "
            "Use Checkpointing(every=1)"
        )
    if experiment.wrap.group_size > max(experiment_blocks, 1):
        raise ExperimentError(
            f"a unit of {experiment.wrap.group_size} blocks needs as many; the model has {experiment_blocks}. "
            f"Use Wrap(policy='group', group_size={max(experiment_blocks, 1)})"
        )
