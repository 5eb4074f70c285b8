"""What the ``args`` of an event say that is of use: a launch's id, a copy's size, a collective's message, an
operator's tensor sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import msgspec

from ...base.kinds import Kind
from ..meaning.classify import collective_in
from ..meaning.dtypes import ITEM_BYTES_OF, dtype_named
from ..meaning.groups import ranks_in

ABSENT = msgspec.Raw(b"")
NO_NUMBER = -(2**63)  # where a column of integers has none
_MOST_DIMS = 64  # torch's own limit
_MOST_RANKS = 1 << 15  # of one group, where a few characters of a file may state any number
_DIGITS = re.compile("-?[0-9]{1,19}")


class Args(msgspec.Struct, frozen=True, gc=False):
    """The arguments that are looked at; all others are read past."""

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
    first_rank: Any = msgspec.field(default=None, name="Global rank start")
    rank_stride: Any = msgspec.field(default=None, name="Global rank stride")
    sequence: Any = msgspec.field(default=None, name="Seq")
    forward_thread: Any = msgspec.field(default=None, name="Fwd thread id")
    finished: Any = None  # false where the profiler stopped first


class Names(msgspec.Struct, frozen=True, gc=False):
    """The same of an event that names a process or a thread."""

    name: Any = None
    labels: Any = None


NO_ARGS, NO_NAMES = Args(), Names()


@dataclass(frozen=True)
class Tensors:
    """Sizes of the tensor arguments of an operator or a range: elements of each tensor in each argument (one, or a list
    of them), and each argument's element type.
    """

    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str | None, ...]  # as table.DTYPE spells them; None where not recorded, as for a list

    @cached_property
    def elements(self) -> tuple[int, ...]:
        """Of each argument; a list counts as one."""
        return tuple(map(sum, self.sizes))

    @property
    def total_bytes(self) -> int | None:
        """Of all arguments together; None where one has no known type, or where there is none."""
        sizes = [ITEM_BYTES_OF[dtype] for dtype in self.dtypes if dtype]
        if not sizes or len(sizes) < len(self.elements):
            return None
        return sum(elements * size for elements, size in zip(self.elements, sizes, strict=True))


@dataclass(frozen=True)
class Message:
    """What a collective's own arguments say; ``payload_bytes`` is the larger of its two messages, or what an all-to-all
    sends.
    """

    collective: str
    payload_bytes: int | None
    group: str | None
    dtype: str | None = None  # as table.DTYPE spells it
    group_description: str | None = None
    group_size: int | None = None
    group_ranks: Sequence[int] | None = None  # None also where the profiler cut the list and states no stride
    sequence: int | None = None


def text_of(value: Any) -> str | None:
    """A name or an id as text; None stays None."""
    return value if value is None or type(value) is str else str(value)


def integer_of(value: Any) -> int | None:
    """A number of 64 bits, stated as one or as its digits; None for whatever is none."""
    if type(value) is str and _DIGITS.fullmatch(value):
        value = int(value)
    return value if type(value) is int and -(2**63) < value < 2**63 else None


def size_of(value: Any) -> int | None:
    """A number of ranks, None for whatever is none."""
    number = integer_of(value)
    return number if number is not None and 0 < number < 2**31 else None


def rank_of(value: Any) -> int | None:
    """A rank, stated as a number or as its digits; None for whatever is none."""
    number = integer_of(value)
    return number if number is not None and 0 <= number < 2**31 else None


def message_of(arg: Args) -> Message | None:
    """None for arguments that are not a collective's."""
    if arg.collective is None and arg.group is None:
        return None
    collective, dtype, size = text_of(arg.collective) or "", dtype_named(text_of(arg.dtype)), size_of(arg.group_size)
    elements = _message_elements(collective, integer_of(arg.elements_in), integer_of(arg.elements_out))
    return Message(
        collective,
        elements * ITEM_BYTES_OF[dtype] if elements is not None and dtype else None,
        text_of(arg.group) or None,
        dtype,
        text_of(arg.group_description) or None,
        size,
        _group_ranks(arg, size),
        integer_of(arg.sequence),
    )


def _message_elements(collective: str, sent: int | None, received: int | None) -> int | None:
    """None also where a barrier says that it carries nothing."""
    if _names_one(collective) is Kind.ALL_TO_ALL:
        return sent
    most = max((size for size in (sent, received) if size is not None), default=None)
    return None if most == 0 and collective == "barrier" else most


def _group_ranks(arg: Args, size: int | None) -> Sequence[int] | None:
    if type(arg.group_ranks) is not str:
        return ranks_in(arg.group_ranks)
    if "..." in arg.group_ranks and size is not None:
        return _strided_ranks(arg.group_ranks, integer_of(arg.first_rank), integer_of(arg.rank_stride), size)
    return _ranks_in_text(arg.group_ranks)


def _strided_ranks(text: str, first: int | None, stride: int | None, size: int) -> range | None:
    """The ranks of ``"[0, 2, 4, ...]"``, a list cut after 30, by the first, the stride and their number; None where the
    rest of the list is not among them. The stride that torch states of an uneven group is negative.
    """
    if first is None or first < 0 or stride is None or stride < 1 or size > _MOST_RANKS:
        return None
    ranks = range(first, first + stride * size, stride)
    left = _ranks_in_text(text.partition("...")[0].rstrip(", ") + "]")
    return ranks if left and left == tuple(ranks[: len(left)]) and ranks[-1] < 2**31 else None


_names_one = lru_cache(maxsize=256)(collective_in)  # a file names few
# each collective of a group repeats its ranks
_ranks_in_text = lru_cache(maxsize=64)(ranks_in)


def tensors_of(arg: Args) -> Tensors | None:
    """None where the sizes were not recorded."""
    dims = bytes(arg.dims)
    return _tensors(dims, bytes(arg.types)) if dims else None


@lru_cache(maxsize=1024)  # steps repeat their sizes
def _tensors(dims_text: bytes, types_text: bytes) -> Tensors | None:
    try:
        dims = msgspec.json.decode(dims_text)
        types = msgspec.json.decode(types_text) if types_text else []
    except msgspec.DecodeError:  # damage inside a text, which reading past it does not find
        return None
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    dtypes = [_dtype(text) for text in (types + [""] * len(dims))[: len(dims)]]
    pairs = [(_sizes(shape, dtype is not None), dtype) for shape, dtype in zip(dims, dtypes, strict=True)]
    return Tensors(tuple(sizes for sizes, _ in pairs if sizes), tuple(dtype for sizes, dtype in pairs if sizes))


def _dtype(text: Any) -> str | None:
    """The element type of a tensor: C++'s name, in small letters. A mere number has a capital ("Int", "Scalar")."""
    return dtype_named(text) if isinstance(text, str) and text[:1].islower() else None


def _sizes(shape: Any, is_tensor: bool) -> tuple[int, ...]:
    """Elements of one tensor, or of each in a list of them; none for whatever is neither.

    A shape without sizes is one element, where anything says that it is a tensor's: a type, or the list it is in.
    """
    if not isinstance(shape, list) or not (shape or is_tensor):
        return ()
    if all(isinstance(size, int) for size in shape):
        is_shape = len(shape) <= _MOST_DIMS and all(0 <= size < 2**62 for size in shape)
        elements = prod(shape) if is_shape else 2**62
        return (elements,) if elements < 2**62 else ()
    return tuple(sum(_sizes(inner, True)) for inner in shape)
