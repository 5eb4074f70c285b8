"""One rank, no sharding: the reference that every other engine is held against."""

from __future__ import annotations

from torch import nn

from .protocol import Engine, Unit


class Single(Engine):
    def shard(self, module: nn.Module, units: tuple[Unit, ...]) -> nn.Module:
        return module.to(self.context.device)
