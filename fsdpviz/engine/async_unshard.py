"""The one private name of PyTorch that we call. On gloo, all-gathers overlap compute only with it."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from ..base.errors import FsdpvizError


def set_async_unshard(root: FSDPModule) -> None:
    """Makes every unit under ``root`` issue its all-gathers asynchronously from the compute stream."""
    setter = getattr(root, "_set_unshard_async_op", None)
    if setter is None:
        raise FsdpvizError(
            "explicit prefetch on this device needs FSDPModule._set_unshard_async_op, which torch "
            f"{torch.__version__} lacks. Use torch 2.9 to 2.13, or prefetch=Prefetch()"
        )
    setter(True)
