"""PyTorch's FullyShardedDataParallel, the first FSDP: one flat parameter a unit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from ..experiment.strategies import fsdp1_strategy
from .dtypes import torch_dtype
from .protocol import Engine, Unit


class Fsdp1(Engine):
    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        experiment, context = self.experiment, self.context
        strategy = ShardingStrategy[fsdp1_strategy(experiment)]
        wrapped = {id(module) for unit in units for module in unit.modules}
        prefetches_backward = experiment.prefetch.backward != 0
        assert context.mesh is not None  # only engine "single" runs without one
        model = FullyShardedDataParallel(
            module,
            device_mesh=context.mesh if experiment.mesh.replicate > 1 and experiment.mesh.shard > 1 else None,
            sharding_strategy=strategy,
            cpu_offload=CPUOffload(offload_params=True) if experiment.offload.parameters else None,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE if prefetches_backward else None,
            forward_prefetch=bool(experiment.prefetch.forward),
            mixed_precision=self._mixed_precision(),
            device_id=context.device,
            use_orig_params=True,
        )
        self._set_gradient_factors(model)
        return model

    def reduces_gradients(self, model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
        return nullcontext() if reduce else cast(FullyShardedDataParallel, model).no_sync()

    def full_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return super().full_weights(model)

    def _mixed_precision(self) -> MixedPrecision | None:
        param, reduce = (
            torch_dtype(self.experiment.precision.param),
            torch_dtype(self.experiment.precision.reduce),
        )
        if param is None and reduce is None:
            return None
        return MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param)

    def _set_gradient_factors(self, model: FullyShardedDataParallel) -> None:
        """FSDP1 has no argument for the factors; its communication hook's state has both."""
        gradient = self.experiment.gradient
        if gradient.divide_factor is None and gradient.predivide_factor is None:
            return
        assert model.process_group is not None  # FSDP1 made or took one
        state: Any = default_hooks.DefaultState(model.process_group)
        factor = gradient.divide_factor or self.context.world_size
        predivide = gradient.predivide_factor or state.gradient_predivide_factor
        state.gradient_predivide_factor = predivide
        state.gradient_postdivide_factor = factor / predivide
        model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
