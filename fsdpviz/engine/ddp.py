"""PyTorch's DistributedDataParallel: every rank holds the whole model and gradients are all-reduced in buckets."""

# no "from __future__ import annotations" here: DDP checks a hook's annotations, and wants types, not texts
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from .dtypes import torch_dtype
from .protocol import Engine, Unit


class Ddp(Engine):
    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        module = module.to(self.context.device)
        devices = [self.context.device.index] if self.context.is_cuda else None
        model = DistributedDataParallel(module, device_ids=devices)
        gradient, reduce_dtype = self.experiment.gradient, torch_dtype(self.experiment.precision.reduce)
        if gradient.divide_factor is not None or gradient.predivide_factor is not None or reduce_dtype is not None:
            factor = gradient.divide_factor or self.context.world_size
            predivide = gradient.predivide_factor or factor
            model.register_comm_hook(_Division(predivide, factor / predivide, reduce_dtype), dividing_all_reduce)
        return model

    def reduces_gradients(self, model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
        return nullcontext() if reduce else cast(DistributedDataParallel, model).no_sync()

    def full_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return super().full_weights(cast(DistributedDataParallel, model).module)


@dataclass(frozen=True)
class _Division:
    before: float
    after: float
    dtype: torch.dtype | None


def dividing_all_reduce(division: _Division, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket's sum over ranks, divided before and after, in the element type asked for. Collective."""
    gradient = bucket.buffer()
    payload = gradient.to(division.dtype or gradient.dtype) / division.before
    work = dist.all_reduce(payload, async_op=True)
    assert work is not None  # what async_op=True returns in a rank of the group

    def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return gradient.copy_(future.value()[0].div_(division.after))

    return work.get_future().then(finish)
