"""A sharding engine to read: FSDP and HSDP on torch.distributed alone.

Read ``schedule.py`` first (what is issued when), then ``model.py`` (what hangs on the module), ``unit.py`` and
``gradients.py`` (where each tensor lives, and until when).
"""

from ...schedule import Policy, Tier
from .accelerator import Pools
from .cpu import CpuAccelerator
from .cuda import CudaAccelerator
from .model import ShardedModel
from .optimizer import ShardedOptimizer
from .scaling import ShardedGradScaler
from .wrapping import by_block, by_rule, by_size

__all__ = [
    "CpuAccelerator",
    "CudaAccelerator",
    "Policy",
    "Pools",
    "ShardedGradScaler",
    "ShardedModel",
    "ShardedOptimizer",
    "Tier",
    "by_block",
    "by_rule",
    "by_size",
]
