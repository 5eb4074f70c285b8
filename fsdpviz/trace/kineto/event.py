"""One event of a Kineto file: what is kept of it, by its phase."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import msgspec

from .arguments import ABSENT, NO_ARGS, NO_NAMES, Args, Names


class Span(msgspec.Struct, frozen=True, gc=False, tag_field="ph", tag="X"):
    """An event with a duration; ``ts`` and ``dur`` are its decimal text, µs."""

    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = ABSENT
    dur: msgspec.Raw = ABSENT
    args: Args | None = NO_ARGS


class Metadata(msgspec.Struct, frozen=True, gc=False, tag_field="ph", tag="M"):
    name: Any = None
    pid: Any = None
    tid: Any = None
    args: Names | None = NO_NAMES


class Other(msgspec.Struct, frozen=True, gc=False):
    """An event without a duration that is not looked at, only counted."""

    ph: Any = None
    name: Any = None


class _Tagged(msgspec.Struct, frozen=True, gc=False, tag_field="ph", tag="i"):
    name: Any = None


class _AnyEvent(msgspec.Struct, frozen=True, gc=False):
    """An event of any phase, whose ``args`` may be anything."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: msgspec.Raw = ABSENT
    dur: msgspec.Raw = ABSENT
    args: msgspec.Raw = ABSENT


# flows ("s", "t", "f") repeat what correlation ids say: nothing of them is kept
_FLOWS = [msgspec.defstruct(f"_Flow_{tag}", [], tag_field="ph", tag=tag, frozen=True, gc=False) for tag in "stf"]
_OTHERS = [_Tagged] + [
    msgspec.defstruct(f"_Tagged_{tag}", [], bases=(_Tagged,), tag_field="ph", tag=tag, frozen=True, gc=False)
    for tag in "ICBEbneSTpFNODPRcv"
]
FLOWS = frozenset(_FLOWS)
TAG_OF_OTHERS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in _OTHERS}  # type: ignore[attr-defined]
EVENT = reduce(operator.or_, [Span, Metadata, *_FLOWS, *_OTHERS])
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(EVENT)


def event_of(text: bytes | msgspec.Raw) -> Any:
    """Raises msgspec.DecodeError where the text is no JSON or no event."""
    try:
        return _DECODER.decode(text)
    except msgspec.ValidationError:
        event = msgspec.json.decode(text, type=_AnyEvent)
    if event.ph == "X":
        return Span(event.cat, event.name, event.pid, event.tid, event.ts, event.dur)
    return Other(event.ph, event.name)
