"""Which model an experiment trains. The modules themselves are built inside a rank, by ``engine.models``."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..base.errors import ExperimentError
from .spec import Spec, spec

Activation = Literal["none", "relu", "gelu"]


@spec
class Mlp(Spec):
    """The lectures' stack of linears: one unit a linear, mean squared error against a fixed random target.

    ``widths`` has the features before, between and after the linears, so n widths make n − 1 linears.
    """

    tag: ClassVar[str] = "mlp"

    widths: tuple[int, ...] = (256, 256, 256)
    activation: Activation = "gelu"

    def _check(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise ExperimentError(f"Mlp.widths needs two or more positive widths; got {list(self.widths)}")

    @property
    def unit_count(self) -> int:
        return len(self.widths) - 1


@spec
class Transformer(Spec):
    """A decoder-only language model, one unit a block, trained on next-token cross-entropy.

    The text is synthetic and learnable: each token is a fixed function of the one before, with some noise.
    """

    tag: ClassVar[str] = "transformer"

    layers: int = 4
    width: int = 128  # model dimension
    heads: int = 4
    vocabulary: int = 256
    mlp_ratio: int = 4  # hidden features of a block's MLP, in widths
    tied: bool = False  # the output projection shares the embedding's weight

    def _check(self) -> None:
        for name in ("layers", "width", "heads", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ExperimentError(f"Transformer.{name} must be at least 1; got {getattr(self, name)}")
        if self.vocabulary < 2:
            raise ExperimentError(f"Transformer.vocabulary must be at least 2; got {self.vocabulary}")
        if self.width % self.heads:
            raise ExperimentError(
                f"Transformer.width must be a multiple of heads; got {self.width} for {self.heads} heads. "
                f"Use width={self.heads * -(-self.width // self.heads)}"
            )

    @property
    def unit_count(self) -> int:
        return self.layers


@spec
class UserModel(Spec):
    """A model of the user's own: ``target`` is ``"file.py:function"``, or use ``UserModel.of(function)``.

    The target is called in every rank with ``arguments`` and returns an ``nn.Module`` that has
    ``make_batch(samples, sequence, generator) -> (inputs, targets)`` and, unless mean squared error will do,
    ``loss(outputs, targets) -> scalar tensor``, a mean over samples. Its blocks are ``module.blocks`` if there is
    such a ``ModuleList``, else its longest ``ModuleList``.

    A function or class from a notebook is pickled by value with cloudpickle. The pickle travels beside the
    experiment, never inside its JSON: a JSON file from a stranger can name such a model and cannot run one.
    """

    tag: ClassVar[str] = "user"

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""  # SHA-256 of the pickle, for models from a notebook
    pickled: bytes = field(default=b"", repr=False, compare=False)

    @classmethod
    def of(cls, function: Callable[..., Any], **arguments: Any) -> UserModel:
        """A model that ``function(**arguments)`` builds; the function or class may live in a notebook cell."""
        import cloudpickle

        if not callable(function):
            raise ExperimentError(f"UserModel.of needs a function or class that returns a module; got {function!r}")
        try:
            pickled = cloudpickle.dumps(function)
        except (
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:  # what pickle raises for an unpicklable
            raise ExperimentError(f"{function!r} cannot travel to the ranks: {error}") from None
        name = getattr(function, "__qualname__", type(function).__name__)
        digest = hashlib.sha256(pickled).hexdigest()
        return cls(target=f"notebook:{name}", arguments=arguments, digest=digest, pickled=pickled)

    @property
    def is_from_notebook(self) -> bool:
        return bool(self.digest)

    @property
    def unit_count(self) -> int | None:
        return None  # known once the module is built

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        del content["pickled"]
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> UserModel:
        if "pickled" in content:
            raise ExperimentError(
                "UserModel has no field 'pickled' in JSON: code never comes out of an experiment file"
            )
        return super().from_dict(content)

    def _check(self) -> None:
        if self.is_from_notebook:
            if self.pickled and hashlib.sha256(self.pickled).hexdigest() != self.digest:
                raise ExperimentError(
                    "UserModel.digest does not belong to the pickle beside it; make it with UserModel.of(…)"
                )
            return
        path, separator, name = self.target.rpartition(":")
        if not separator or not path or not name.isidentifier():
            raise ExperimentError(f"UserModel.target must be 'file.py:function'; got {self.target!r}")
        file = Path(path).expanduser()
        if not file.is_file():
            raise ExperimentError(f"UserModel.target names a Python file that exists; there is no {path}")
        if name not in _top_level_names(file):
            raise ExperimentError(f"UserModel.target names a function or class of {path}; it defines no {name}")


def _top_level_names(file: Path) -> set[str]:
    """What ``file`` binds at its top level, found without running it."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError, OSError) as error:
        raise ExperimentError(f"{file} should be Python and cannot be parsed: {error}") from None
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
