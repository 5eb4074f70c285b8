"""What to run, as frozen values: specs, presets, rank arithmetic, and the run folder's layout."""

from .experiment import Experiment
from .knobs import (
    Accumulation,
    Capture,
    Checkpointing,
    Data,
    GlassBox,
    Gradient,
    Link,
    Links,
    Mesh,
    Offload,
    Optimizer,
    Precision,
    Prefetch,
    Steps,
    Wrap,
)
from .models import Mlp, Transformer, UserModel
from .presets import PRESETS, preset
from .run_folder import RankFolder, RunFolder

__all__ = [
    "PRESETS",
    "Accumulation",
    "Capture",
    "Checkpointing",
    "Data",
    "Experiment",
    "GlassBox",
    "Gradient",
    "Link",
    "Links",
    "Mesh",
    "Mlp",
    "Offload",
    "Optimizer",
    "Precision",
    "Prefetch",
    "RankFolder",
    "RunFolder",
    "Steps",
    "Transformer",
    "UserModel",
    "Wrap",
    "preset",
]
