"""Loss scaling for fp16: gradients are kept out of fp16's underflow, and a step that overflows is taken by nobody.

[Note: why all ranks must agree]
A rank sees its own shards of the gradients. One infinite element lies in one shard, and if only that rank left out the
step, parameters would be half old and half new. So the finding is the maximum over all ranks, replicas included.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...base.errors import FsdpvizError
from ...base.labels import loop_label
from .accelerator import Lane
from .model import ShardedModel
from .optimizer import ShardedOptimizer


class ShardedGradScaler:
    """As ``torch.amp.GradScaler``, for a ShardedModel: ``scale(loss).backward()``, ``step(optimizer)``, ``update()``.

    Call ``unscale_(optimizer)`` before clipping. Every rank must make the same calls: ``unscale_`` and ``step`` are
    collective over all ranks. Raises FsdpvizError for a model whose optimizer steps in backward.
    """

    def __init__(
        self,
        model: ShardedModel,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if model.policy.optimizer_when == "backward":
            raise FsdpvizError(
                "whether scaled gradients overflowed is known after backward, when units have stepped already; "
                "use Policy(optimizer_when='step') with a ShardedGradScaler"
            )
        self._model = model
        self._scale, self._growth_tracker = float(init_scale), 0
        self._growth_factor, self._backoff_factor, self._growth_interval = (
            growth_factor,
            backoff_factor,
            growth_interval,
        )
        self._overflowed: bool | None = None  # None until this step's gradients are unscaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._scale

    def get_scale(self) -> float:
        return self._scale

    def unscale_(self, optimizer: ShardedOptimizer) -> None:
        """Divides the gradient shards by the scale and asks all ranks whether any is infinite. Collective."""
        if self._overflowed is not None:
            raise FsdpvizError("gradients are unscaled once a step; unscale_() was called after the last update()")
        gradients = [shard for unit in self._model.units().values() for shard in unit.gradients.shards()]
        found = torch.zeros(1, device=self._model.accelerator.device)
        for gradient in gradients:
            gradient.mul_(1.0 / self._scale)
            found += (~torch.isfinite(gradient)).any().to(found.device)
        self._overflowed = self._is_anywhere(found)

    def step(self, optimizer: ShardedOptimizer) -> bool:
        """Steps, and says so, unless a gradient of some rank is infinite: then no rank does. Collective."""
        if self._overflowed is None:
            self.unscale_(optimizer)
        if not self._overflowed:
            optimizer.step()
        return not self._overflowed

    def update(self) -> None:
        """After ``step``: a smaller scale where it overflowed, a larger one once it has not for long."""
        if self._overflowed is None:
            raise FsdpvizError("update() comes after step(), which finds out whether gradients overflowed")
        self._growth_tracker = 0 if self._overflowed else self._growth_tracker + 1
        if self._overflowed:
            self._scale *= self._backoff_factor
        elif self._growth_tracker == self._growth_interval:
            grown = self._scale * self._growth_factor
            self._scale, self._growth_tracker = (grown if math.isfinite(grown) else self._scale), 0
        self._overflowed = None

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "growth_tracker": self._growth_tracker}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scale, self._growth_tracker = float(state_dict["scale"]), int(state_dict["growth_tracker"])

    def _is_anywhere(self, found: torch.Tensor) -> bool:
        """See [Note: why all ranks must agree]."""
        model = self._model
        model.collectives.agreement.note("all_reduce of the overflow")
        stream, after = model.accelerator.stream(Lane.GATHER), [model.accelerator.compute_event()]
        stream.submit(loop_label("overflow"), lambda: model.collectives.most_of_all(found), after).wait()
        return bool(found.item())
