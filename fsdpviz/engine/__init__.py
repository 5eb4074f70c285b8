"""How a step runs: one adapter a file, each over a class of PyTorch's own, and the glass box, which is ours."""

from __future__ import annotations

from .ddp import Ddp
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2
from .glassbox_engine import GlassBoxEngine
from .protocol import Engine, RankContext, Unit
from .single import Single

ENGINES: dict[str, type[Engine]] = {
    "single": Single,
    "ddp": Ddp,
    "fsdp1": Fsdp1,
    "fsdp2": Fsdp2,
    "glassbox": GlassBoxEngine,
}

__all__ = ["ENGINES", "Engine", "RankContext", "Unit"]
