"""The experiment: one frozen value that says everything a run needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import InitVar
from pathlib import Path
from typing import Any, Literal, Self

from ..base.errors import ExperimentError
from ..base.provenance import Provenance
from .knobs import (
    Accumulation,
    Capture,
    Checkpointing,
    Data,
    GlassBox,
    Gradient,
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
from .rules import refuse_what_cannot_be
from .spec import Spec, spec
from .strategies import translate

Engine = Literal["single", "ddp", "fsdp1", "fsdp2", "glassbox"]


@spec
class Experiment(Spec):
    """What to run. Every field is a knob; a combination that the engine cannot do is refused on construction.

    ``model`` also takes a function or class that returns a module. ``strategy`` takes FSDP1's names (FULL_SHARD,
    SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD) and is translated into ``mesh`` and ``reshard_after_forward``.

    ``reshard_after_forward``: True frees a unit's gathered parameters after its forward, False keeps them until
    its backward, an integer reshards to groups of that many ranks.
    """

    name: str = "experiment"
    model: Mlp | Transformer | UserModel = Mlp()
    engine: Engine = "fsdp2"
    mesh: Mesh = None  # type: ignore[assignment]  # filled below: two ranks, or one for "single"
    wrap: Wrap = Wrap()
    reshard_after_forward: bool | int = True
    prefetch: Prefetch = Prefetch()
    offload: Offload = Offload()
    precision: Precision = Precision()
    gradient: Gradient = Gradient()
    checkpointing: Checkpointing = Checkpointing()
    accumulation: Accumulation = Accumulation()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    steps: Steps = Steps()
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    links: Links | None = None
    glassbox: GlassBox = GlassBox()
    capture: Capture = Capture()
    strategy: InitVar[str | None] = None

    def __post_init__(self, strategy: str | Callable[..., Any] | None = None) -> None:
        if callable(self.model):
            object.__setattr__(self, "model", UserModel.of(self.model))
        if self.mesh is None:
            two_ranks = Mesh(replicate=2) if self.engine == "ddp" else Mesh(shard=2)
            object.__setattr__(self, "mesh", Mesh() if self.engine == "single" else two_ranks)
        if strategy is not None:
            for field, value in translate(strategy, self).items():
                object.__setattr__(self, field, value)
        super().__post_init__()

    def _check(self) -> None:
        if not self.name.strip() or len(self.name) > 80:
            raise ExperimentError(f"Experiment.name must have 1 to 80 characters; got {self.name[:80]!r}")
        refuse_what_cannot_be(self)

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits that depend on the content and on nothing else (the name included)."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    def provenance_on(self, device: Literal["cpu", "cuda"]) -> Provenance:
        """What a recording of this experiment on ``device`` may call itself."""
        if device == "cuda":
            return Provenance.CUDA
        return Provenance.CPU_EMULATED_LINKS if self.links else Provenance.CPU

    def with_settings(self, settings: Mapping[str, str]) -> Self:
        """The experiment with dotted keys changed: ``{"prefetch.forward": "2"}``. Values are JSON, or plain text."""
        content = self.to_dict()
        for key, text in settings.items():
            _set(content, key, _value(text))
        changed = type(self).from_dict(content)
        if isinstance(self.model, UserModel) and isinstance(changed.model, UserModel):
            object.__setattr__(changed.model, "pickled", self.model.pickled)
        return changed

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The experiment in a JSON file. Raises ExperimentError, in one line, for whatever is wrong with it."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ExperimentError(f"an experiment file must be readable; {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ExperimentError(f"an experiment file must be JSON; {path}: {error}") from None
        return cls.from_dict(content)

    def save(self, path: str | Path) -> None:
        """Writes the JSON that ``load`` reads."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _set(content: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for depth, parent in enumerate(parents):
        if parent not in content:
            raise ExperimentError(f"there is no setting {dotted!r}; {parent!r} is not one of {', '.join(content)}")
        if content[parent] is None:
            content[parent] = {}
        if not isinstance(content[parent], dict):
            raise ExperimentError(f"there is no setting {dotted!r}; {'.'.join(parents[: depth + 1])} has no parts")
        content = content[parent]
    content[last] = value
