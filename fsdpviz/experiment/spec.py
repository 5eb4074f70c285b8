"""The base of every spec: a frozen value that checks its own field types and goes to JSON and back.

msgspec decides whether a plain value fits its annotation; what it says is turned into one line for the user.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

import msgspec

from ..base.errors import ExperimentError

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen, keyword-only dataclass."""
    return dataclass(frozen=True, kw_only=True)(cls)


class Spec:
    """A frozen, keyword-only dataclass whose field values fit their annotations once it is built."""

    tag: ClassVar[str] = ""  # names the class in JSON where a field may hold one of several

    def __post_init__(self, *_: Any) -> None:
        for name, annotation in field_types(type(self)).items():
            value = getattr(self, name)
            object.__setattr__(self, name, _fitted(f"{type(self).__name__}.{name}", value, annotation))
        self._check()

    def _check(self) -> None:
        """Raises ExperimentError for values that fit their types and yet cannot be. For subclasses."""

    def replace(self, **changes: Any) -> Self:
        """The same spec with some fields changed, checked anew."""
        _refuse_unknown(type(self), changes)
        return dataclasses.replace(typing.cast(Any, self), **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``from_dict`` of it equals ``self``."""
        content: dict[str, Any] = {"type": self.tag} if self.tag else {}
        for name in field_types(type(self)):
            content[name] = _plain(getattr(self, name))
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The spec that ``content`` states. Raises ExperimentError for unknown keys and values of a wrong type."""
        if not isinstance(content, Mapping):
            raise ExperimentError(f"{cls.__name__} is stated by a JSON object; got {content!r}")
        values = {key: value for key, value in content.items() if not (key == "type" and cls.tag)}
        _refuse_unknown(cls, values)
        annotations = field_types(cls)
        built = {
            key: _from_plain(f"{cls.__name__}.{key}", value, annotations.get(key)) for key, value in values.items()
        }
        try:
            return cls(**built)
        except TypeError as error:  # a required field is missing
            raise ExperimentError(f"{cls.__name__}: {error.args[0].split('() ')[-1]}") from None


def field_types(cls: type) -> dict[str, Any]:
    """Each field's annotation, resolved, in order of definition."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _init_names(cls: type) -> list[str]:
    parameters = typing.cast(Any, cls).__dataclass_fields__
    return [name for name, field in parameters.items() if field.init and "ClassVar" not in str(field.type)]


def _refuse_unknown(cls: type, values: Mapping[str, Any]) -> None:
    known = _init_names(cls)
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            mend = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
            raise ExperimentError(f"{cls.__name__} has no field {key!r}; {mend}")


def _spec_choices(annotation: Any) -> list[type[Spec]]:
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    return [option for option in options if isinstance(option, type) and issubclass(option, Spec)]


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _allows_none(annotation: Any) -> bool:
    return _is_union(annotation) and type(None) in typing.get_args(annotation)


def _fitted(where: str, value: Any, annotation: Any) -> Any:
    choices = _spec_choices(annotation)
    if choices:
        if isinstance(value, tuple(choices)) or (value is None and _allows_none(annotation)):
            return value
        names = " or ".join(choice.__name__ for choice in choices)
        raise ExperimentError(f"{where} must be {names}; got {value!r}")
    try:
        return msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        raise ExperimentError(f"{where} must be {describe(annotation)}; got {value!r}") from None


def describe(annotation: Any) -> str:
    """A type as a user reads it: ``'bf16', 'fp16' or None``."""
    if typing.get_origin(annotation) is typing.Literal:
        return _one_of([repr(choice) for choice in typing.get_args(annotation)])
    if _is_union(annotation):
        return _one_of([describe(option) for option in typing.get_args(annotation)])
    if typing.get_origin(annotation) is tuple:
        return f"a list of {describe(typing.get_args(annotation)[0])}"
    if annotation is type(None):
        return "None"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(
        annotation, str(annotation)
    )


def _one_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _plain(value: Any) -> Any:
    if isinstance(value, Spec):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _from_plain(where: str, value: Any, annotation: Any) -> Any:
    choices = _spec_choices(annotation)
    if not choices or not isinstance(value, Mapping):
        return value
    if len(choices) == 1:
        return choices[0].from_dict(value)
    tags = {choice.tag: choice for choice in choices}
    chosen = tags.get(value.get("type", ""))
    if chosen is None:
        raise ExperimentError(f'{where} needs a "type", one of {", ".join(tags)}; got {value.get("type")!r}')
    return chosen.from_dict(value)
