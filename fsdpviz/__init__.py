"""fsdpviz: state an experiment, run it on real ranks, see its timeline.

    import fsdpviz
    run = fsdpviz.run("prefetch-on")
    run.timeline()

Names are imported when they are first used, so that ``import fsdpviz`` takes no time and no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .base.huge_pages import ask_for_huge_pages

if TYPE_CHECKING:
    from .base.errors import FsdpvizError, RankFailed
    from .experiment import Experiment, Mlp, Transformer, UserModel, preset
    from .lab.ab import compare
    from .lab.recording import Recording, open
    from .lab.run import run
    from .trace import Trace

_HOMES = {
    "Experiment": "experiment",
    "FsdpvizError": "base.errors",
    "Mlp": "experiment",
    "RankFailed": "base.errors",
    "Recording": "lab.recording",
    "Trace": "trace",
    "Transformer": "experiment",
    "UserModel": "experiment",
    "compare": "lab.ab",
    "open": "lab.recording",
    "preset": "experiment",
    "run": "lab.run",
}

__all__ = [
    "Experiment",
    "FsdpvizError",
    "Mlp",
    "RankFailed",
    "Recording",
    "Trace",
    "Transformer",
    "UserModel",
    "compare",
    "open",
    "preset",
    "run",
]


ask_for_huge_pages()  # before anything imports polars


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fsdpviz' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
