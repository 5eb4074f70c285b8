"""The glass box as an engine of experiments: knobs into a Policy, and no logic of its own."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import nn

from ..experiment import Experiment
from ..schedule import Policy, Tier
from .dtypes import torch_dtype
from .glassbox import CpuAccelerator, CudaAccelerator, Pools, ShardedModel, ShardedOptimizer
from .protocol import Engine, RankContext, Unit


class GlassBoxEngine(Engine):
    emits_unit_ranges = True

    def __init__(self, experiment: Experiment, context: RankContext) -> None:
        super().__init__(experiment, context)
        self._model: ShardedModel | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the disk tier, as long as the engine

    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        experiment = self.experiment
        policy = policy_of(experiment)
        if Tier.DISK in (policy.parameters_on, policy.gradients_on, policy.optimizer_on):
            self._folder = tempfile.TemporaryDirectory(prefix="fsdpviz-")
        precision, gradient = experiment.precision, experiment.gradient
        self._model = ShardedModel(
            module.to(self.context.device),
            sharding_degree=experiment.mesh.shard,
            units={unit.name: unit.modules for unit in units},
            policy=policy,
            param_dtype=torch_dtype(precision.param),
            reduce_dtype=torch_dtype(precision.reduce),
            output_dtype=torch_dtype(precision.output),
            gradient_divide_factor=gradient.divide_factor,
            gradient_predivide_factor=gradient.predivide_factor,
            accelerator=self._accelerator(policy),
            disk_folder=self._folder.name if self._folder else None,
        )
        return self._model

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return ShardedOptimizer(cast(ShardedModel, model), optimizer)

    def reduces_gradients(self, model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
        return cast(ShardedModel, model).reduces_gradients(reduce)

    def full_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        sharded = cast(ShardedModel, model)
        state = sharded.full_state_dict()
        return {name: state[name] for name, _ in sharded.named_parameters()}

    def accounted_memory(self) -> dict[str, int] | None:
        assert self._model is not None  # asked after a step
        pools = self._model.accelerator.pools
        return {
            "peak_device_bytes": pools.device.peak_bytes,
            "peak_host_tier_bytes": pools.host.peak_bytes,
            "peak_disk_tier_bytes": pools.disk.peak_bytes,
        }

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _accelerator(self, policy: Policy) -> CpuAccelerator | CudaAccelerator:
        box = self.experiment.glassbox
        pools = Pools(box.device_budget_bytes, box.host_budget_bytes, box.disk_budget_bytes)
        one = policy.streams == "one"
        if self.context.is_cuda:
            on_host = policy.parameters_on is not Tier.DEVICE
            return CudaAccelerator(self.context.device, pools, one_stream=one, steps_on_host=on_host)
        return CpuAccelerator(self.experiment.links, pools, one_stream=one)


def policy_of(experiment: Experiment) -> Policy:
    """The schedule that the experiment's knobs state. A prefetch depth that is not given is one unit."""
    box, prefetch = experiment.glassbox, experiment.prefetch
    parameters = Tier(box.parameters_on or ("host" if experiment.offload.parameters else "device"))
    follows = Tier.DEVICE if parameters is Tier.DEVICE else Tier.HOST
    return Policy(
        forward_depth=1 if prefetch.forward is None else prefetch.forward,
        backward_depth=1 if prefetch.backward is None else prefetch.backward,
        order=box.order,
        gathered_limit=box.gathered_limit,
        reshard_after_forward=experiment.reshard_after_forward,
        keep_last=box.keep_last,
        streams=box.streams,
        reduce_when=box.reduce_when,
        reduces_in_flight=box.reduces_in_flight,
        optimizer_when=box.optimizer_when,
        parameters_on=parameters,
        gradients_on=Tier(box.gradients_on or follows),
        optimizer_on=Tier(box.optimizer_on or follows),
    )
