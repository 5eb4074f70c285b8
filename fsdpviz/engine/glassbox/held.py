"""What a unit holds, and what all units of a model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ...schedule import Policy
from .accelerator import Accelerator
from .collectives import Collectives
from .layout import Region
from .precision import Division, Precision


@dataclass(frozen=True)
class Place:
    """An attribute of a module that holds a parameter; a tied parameter has several."""

    module: nn.Module
    attribute: str


@dataclass(eq=False)
class Held:
    """One region of a unit: its layout, and its parameters sharded and full, in the order of the slots."""

    region: Region
    places: list[list[Place]]
    names: list[list[str]]  # all names of each parameter; the first is the slot's
    shards: list[nn.Parameter] = field(default_factory=list)  # live as long as the model; the optimizer's
    fulls: list[nn.Parameter] = field(default_factory=list)  # views of full_WT; made at the first gather
    full_WT: torch.Tensor | None = None  # noqa: N815  # its storage lives from gather to free


@dataclass(frozen=True)
class UnitContext:
    """What the units of one model have in common."""

    accelerator: Accelerator
    collectives: Collectives
    policy: Policy
    precision: Precision
    division: Division
    folder: Path  # of the disk tier
