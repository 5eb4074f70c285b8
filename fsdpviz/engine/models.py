"""The modules that experiments train, each with its batches and its loss.

Shapes: B samples, T tokens, D model width, H heads, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import FsdpvizError
from ..experiment import Experiment, Mlp, Transformer, UserModel

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, targets


@dataclass(frozen=True)
class Trainable:
    """A module with what training needs besides it.

    ``make_batch(samples, sequence, generator)`` returns inputs and targets on the CPU; ``loss(outputs, targets)``
    is a mean over samples. ``blocks`` names the repeated modules in forward order: what wrapping counts in.
    """

    module: nn.Module
    blocks: dict[str, nn.Module]
    make_batch: Callable[[int, int, torch.Generator], Batch]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def build(experiment: Experiment, pickled: bytes = b"") -> Trainable:
    """The experiment's model in fp32 on the CPU.

    Every rank builds it from the same seed, so that all start from equal weights; ``replicas.synchronise`` makes
    sure of it for user models that draw from elsewhere. Raises FsdpvizError when a user's model does not build.
    """
    torch.manual_seed(experiment.seed)
    spec = experiment.model
    if isinstance(spec, Mlp):
        return _mlp(spec, experiment.seed)
    if isinstance(spec, Transformer):
        return _transformer(spec, experiment.data.sequence)
    return _user(spec, pickled)


def _mlp(spec: Mlp, seed: int) -> Trainable:
    module = MlpStack(spec)
    features, outputs = spec.widths[0], spec.widths[-1]
    teacher = torch.randn(features, outputs, generator=torch.Generator().manual_seed(seed)) / features**0.5

    def make_batch(samples: int, sequence: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(samples, features, generator=generator)
        return inputs, torch.tanh(inputs @ teacher)

    return Trainable(module, _named_blocks(module, "blocks"), make_batch, F.mse_loss)


class MlpStack(nn.Module):
    """A stack of linears with an activation between them. (B, widths[0]) → (B, widths[-1])."""

    def __init__(self, spec: Mlp) -> None:
        super().__init__()
        activation = {"none": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU}[spec.activation]
        pairs = list(zip(spec.widths, spec.widths[1:], strict=False))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), activation() if i < len(pairs) - 1 else nn.Identity())
            for i, (before, after) in enumerate(pairs)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def _transformer(spec: Transformer, sequence: int) -> Trainable:
    module = DecoderLm(spec, sequence)

    def make_batch(samples: int, sequence: int, generator: torch.Generator) -> Batch:
        tokens = synthetic_text(samples, sequence + 1, spec.vocabulary, generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    return Trainable(module, _named_blocks(module, "blocks"), make_batch, loss)


def synthetic_text(samples: int, length: int, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of shape (samples, length): each follows from the one before, or, one time in ten, from nowhere."""
    noise = torch.randint(vocabulary, (samples, length), generator=generator)
    is_noise = torch.rand(samples, length, generator=generator) < 0.1
    tokens = noise.clone()
    for position in range(1, length):
        follows = (5 * tokens[:, position - 1] + 7) % vocabulary
        tokens[:, position] = torch.where(is_noise[:, position], noise[:, position], follows)
    return tokens


class DecoderLm(nn.Module):
    """A pre-norm decoder. Tokens (B, T) → logits (B, T, V)."""

    def __init__(self, spec: Transformer, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.positions = nn.Embedding(sequence, spec.width)
        self.blocks = nn.ModuleList(DecoderBlock(spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(spec.width)
        self.output = nn.Linear(spec.width, spec.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        if spec.tied:
            self.output.weight = self.tokens.weight

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)  # noqa: N806
        hidden_BTD = self.tokens(tokens_BT) + self.positions(positions_T)  # noqa: N806
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)  # noqa: N806
        return self.output(self.norm(hidden_BTD))


class DecoderBlock(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and beside a residual. (B, T, D) → (B, T, D)."""

    def __init__(self, spec: Transformer) -> None:
        super().__init__()
        width = spec.width
        self.heads = spec.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, spec.mlp_ratio * width), nn.GELU(), nn.Linear(spec.mlp_ratio * width, width)
        )

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:  # noqa: N803
        batch, length, width = hidden_BTD.shape
        heads = self.query_key_value(self.attention_norm(hidden_BTD)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BTD = hidden_BTD + self.projection(attended.transpose(1, 2).reshape(batch, length, width))  # noqa: N806
        return hidden_BTD + self.mlp(self.mlp_norm(hidden_BTD))


def _named_blocks(module: nn.Module, name: str) -> dict[str, nn.Module]:
    return {f"{name}.{index}": block for index, block in enumerate(module.get_submodule(name).children())}


def _user(spec: UserModel, pickled: bytes) -> Trainable:
    target = _unpickle(spec, pickled) if spec.is_from_notebook else _import(spec)
    arguments = spec.arguments
    try:
        module = target(**arguments)
    except Exception as error:  # the user's code, the boundary of ours
        raise FsdpvizError(f"the model {spec.target} does not build: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise FsdpvizError(f"the model {spec.target} must return an nn.Module; it returned {type(module).__name__}")
    make_batch: Any = getattr(module, "make_batch", None)
    if make_batch is None:
        raise FsdpvizError(
            f"the model {spec.target} needs make_batch(samples, sequence, generator) -> (inputs, targets); it has none"
        )
    loss: Any = getattr(module, "loss", F.mse_loss)
    return Trainable(module, _blocks_of(module), make_batch, loss)


def _blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """``module.blocks`` if it is a ModuleList, else the longest ModuleList, else every child that has parameters."""
    lists = {name: child for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and len(child)}
    if lists:
        name = "blocks" if "blocks" in lists else max(lists, key=lambda name: len(lists[name]))
        return _named_blocks(module, name)
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def _unpickle(spec: UserModel, pickled: bytes) -> Callable[..., Any]:
    import cloudpickle

    if not pickled:
        raise FsdpvizError(
            f"the model {spec.target} was defined in a notebook and did not travel with this JSON. "
            "Define it again and pass it to Experiment(model=…)"
        )
    return cloudpickle.loads(pickled)


def _import(spec: UserModel) -> Callable[..., Any]:
    path, _, name = spec.target.rpartition(":")
    file = Path(path).expanduser().resolve()
    module_spec = importlib.util.spec_from_file_location(f"fsdpviz_user_{file.stem}", file)
    if module_spec is None or module_spec.loader is None:
        raise FsdpvizError(f"the model file {path} cannot be imported; it must be a .py file")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    sys.path.insert(0, str(file.parent))  # so that the file finds its neighbours, as a script would
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's code, the boundary of ours
        raise FsdpvizError(f"the model file {path} cannot be imported: {type(error).__name__}: {error}") from error
    target = getattr(module, name, None)
    if not callable(target):
        raise FsdpvizError(
            f"{path} must define a function or class {name}; it has {inspect.getdoc(target) or target!r}"
        )
    return target
