"""Element types on the way of a unit, and how a summed gradient becomes a mean. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...base.errors import FsdpvizError


@dataclass(frozen=True)
class Precision:
    """``shard`` is what the optimizer sees, ``param`` what is gathered and computed with, ``reduce`` what is summed.

    ``output`` is what the model's floating-point outputs are cast to; None leaves them. Between units nothing is cast,
    since the root's own layers compute in ``param``.
    """

    shard: torch.dtype = torch.float32
    param: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = None

    @classmethod
    def of(
        cls,
        shard: torch.dtype,
        param: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
        output: torch.dtype | None = None,
    ) -> Precision:
        """None for ``param`` keeps the shard's type, None for ``reduce`` that of the gradients, as FSDP2 does."""
        for name, dtype in (("param", param), ("reduce", reduce), ("output", output)):
            if dtype is not None and not dtype.is_floating_point:
                raise FsdpvizError(f"{name}_dtype must be a floating-point type; got {dtype}. Use torch.bfloat16")
        param = param or shard
        return cls(shard, param, reduce or param, output)


@dataclass(frozen=True)
class Division:
    """Each rank divides its gradient by ``before``, the sum is taken, and the result is divided by ``after``.

    before × after is the divisor of the sum, by default the world size, which makes a mean. How it is split changes
    rounding and overflow only.
    """

    before: float
    after: float

    @classmethod
    def of(
        cls, world_size: int, reduce: torch.dtype, factor: float | None = None, predivide: float | None = None
    ) -> Division:
        """Without ``predivide``: all after the sum; for fp16, whose sums overflow at 65 504, about √N before it."""
        divisor = float(factor or world_size)
        if predivide is None:
            predivide = _power_of_two_near_root(world_size) if reduce is torch.float16 else 1.0
        return cls(float(predivide), divisor / predivide)


def _power_of_two_near_root(world_size: int) -> float:
    """FSDP1's choice: doubled while it divides the world size and is below the rest of it."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` as ``dtype`` if it is a floating-point tensor, else as it is."""
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating and dtype is not None else value
