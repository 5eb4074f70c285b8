"""What the ``args`` of an event say that is of use: a launch's id, a copy's size, a collective's message, an
operator's tensor sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from ..meaning.dtypes import dtype_named
from ..meaning.groups import ranks_in

ABSENT = msgspec.Raw(b"")
NO_NUMBER = -(2**63)  # where a column of integers has none


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments that are looked at; all others are read past."""

    name: Any = None  # of a metadata event
    correlation: Any = NO_NUMBER
    nbytes: Any = msgspec.field(default=NO_NUMBER, name="bytes")
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group: Any = msgspec.field(default=None, name="Process Group Name")
    group_description: Any = msgspec.field(default=None, name="Process Group Description")
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    sequence: Any = msgspec.field(default=None, name="Seq")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    finished: Any = None  # false where the profiler stopped first


NO_ARGS = Args()


@dataclass(frozen=True)
class Tensors:
    """Sizes of an operator's tensor arguments: elements of each (a list of tensors counts as one), bytes an
    element.
    """

    elements: tuple[int, ...]
    item_bytes: int | None
    dtype: str | None = None  # as table.DTYPE spells it


@dataclass(frozen=True)
class Message:
    """What a collective's own arguments say; ``payload_bytes`` is the larger of its two messages."""

    collective: str
    payload_bytes: int | None
    group: str | None
    dtype: str | None = None  # as table.DTYPE spells it
    group_description: str | None = None
    group_size: int | None = None
    group_ranks: tuple[int, ...] | None = None  # None also where the profiler cut the list short
    sequence: int | None = None


def text_of(value: Any) -> str | None:
    """A name or an id as text; None stays None."""
    return value if value is None or type(value) is str else str(value)


def integer_of(value: Any) -> int | None:
    """A number of 64 bits, None for whatever is none."""
    return value if type(value) is int and -(2**63) < value < 2**63 else None


def size_of(value: Any) -> int | None:
    """A number of ranks, None for whatever is none."""
    return value if type(value) is int and 0 < value < 2**31 else None


def message_of(arg: Args) -> Message | None:
    """None for arguments that are not a collective's."""
    if arg.collective is None and arg.group is None:
        return None
    sizes = [size for size in (integer_of(arg.elements_in), integer_of(arg.elements_out)) if size is not None]
    item_bytes = ITEM_BYTES.get((text_of(arg.dtype) or "").lower())
    return Message(
        text_of(arg.collective) or "",
        max(sizes) * item_bytes if sizes and item_bytes else None,
        text_of(arg.group) or None,
        dtype_named(text_of(arg.dtype)),
        text_of(arg.group_description) or None,
        size_of(arg.group_size),
        _ranks_in_text(arg.group_ranks) if type(arg.group_ranks) is str else ranks_in(arg.group_ranks),
        integer_of(arg.sequence),
    )


# each collective of a group repeats its ranks
_ranks_in_text = lru_cache(maxsize=64)(ranks_in)


def tensors_of(arg: Args) -> Tensors | None:
    """None where the sizes were not recorded."""
    dims = bytes(arg.dims)
    return _tensors(dims, bytes(arg.types)) if dims else None


@lru_cache(maxsize=1024)  # steps repeat their sizes
def _tensors(dims_text: bytes, types_text: bytes) -> Tensors | None:
    dims = msgspec.json.decode(dims_text)
    types = msgspec.json.decode(types_text) if types_text else []
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    elements = tuple(size for shape in dims if (size := _elements(shape)))
    named = [kind for kind in types if isinstance(kind, str) and kind.lower() in ITEM_BYTES]
    return Tensors(elements, ITEM_BYTES[named[0].lower()], dtype_named(named[0])) if named else Tensors(elements, None)


def _elements(shape: Any) -> int:
    """Elements of one tensor, or of a list of tensors together; 0 for whatever has no shape."""
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return prod(shape)
    return sum(_elements(inner) for inner in shape if isinstance(inner, list))


# how operators ("c10::Half") and NCCL's own arguments ("Half") spell the types, in small letters
ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "c10::complex<float>", "unsigned long"), 8),
    **dict.fromkeys(("float", "int", "unsigned int", "c10::complex<c10::half>"), 4),
    **dict.fromkeys(("half", "c10::half", "bfloat16", "c10::bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "char", "unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("c10::float8_e4m3fn", "c10::float8_e5m2", "float8_e4m3fn", "float8_e5m2"), 1),
}
