"""What a Kineto file says around its events: the rank, the host, the devices, the base of its times."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from ..table import Note
from .repair import clean

# of what a damaged file says around its events, these are looked for one by one
_KEY = re.compile(rb'"(distributedInfo|deviceProperties|traceName|baseTimeNanoseconds|host_name)"\s*:\s*')
_OF_RANK = re.compile(rb'"(backend|rank|world_size)"\s*:\s*("[^"\\]{0,99}"|[0-9]{1,18})(?=\s*[,}])')
_LONGEST_INFO_BYTES = 64 << 10


class File(msgspec.Struct, rename="camel"):
    """A file's own keys, of which the events are one."""

    trace_events: Any
    distributed_info: Any = None
    device_properties: Any = None
    trace_name: Any = None
    base_time_nanoseconds: Any = None
    host_name: Any = msgspec.field(default=None, name="host_name")


_DECODER = msgspec.json.Decoder(File)


def header_of(file: File) -> dict[str, Any]:
    """What the file says around its events, by its own keys."""
    header = {
        "distributedInfo": file.distributed_info,
        "deviceProperties": file.device_properties,
        "traceName": file.trace_name,
        "baseTimeNanoseconds": file.base_time_nanoseconds,
        "host_name": file.host_name,
    }
    return {key: value for key, value in header.items() if value is not None}


def header_in(text: bytes) -> tuple[dict[str, Any], list[Note]] | None:
    """What a file without its events says, and how it was mended; None where that is damaged beyond mending."""
    for mended in (bytes, _cleaned):
        try:
            return header_of(_DECODER.decode(mended(text))), []
        except (msgspec.DecodeError, RecursionError):
            continue
    from .mend import Mender  # its patterns cost ordinary files more than it takes to read a small one

    mender = Mender(_cleaned(text))
    found = mender.value(0)
    if found is None:
        return None
    try:
        return header_of(_DECODER.decode(found[0])), [*mender.notes, *behind(mender.text[found[1] :])]
    except (msgspec.DecodeError, RecursionError):
        return None


def behind(text: bytes) -> list[Note]:
    """A note of what stands behind the end of a file's JSON, as another file's does that was appended."""
    left = text.strip()
    return [Note("text behind the end of the trace, left out", 1, left[:60].decode("utf-8", "replace"))] if left else []


def pieces_in(text: bytes) -> tuple[dict[str, Any], list[Note]]:
    """The same key by key, of a text that is damaged beyond mending: what can be read of it, perhaps nothing, and a
    note of that.
    """
    text = _cleaned(text)
    header: dict[str, Any] = {}
    for key in _KEY.finditer(text):
        name = key[1].decode()
        if name not in header and (value := _value_at(text, key.end(), name)) is not None:
            header[name] = value
    return header, [Note("damage around the events; some of what it says was read", 1, ", ".join(header) or "nothing")]


def _value_at(text: bytes, at: int, name: str) -> Any:
    from .mend import Mender  # as in header_in

    if found := Mender(text).value(at):
        with suppress(msgspec.DecodeError, RecursionError):  # JSON that holds what no value can be, as a huge number
            return msgspec.json.decode(found[0])
    if name != "distributedInfo":
        return None
    parts = _OF_RANK.findall(text, at, at + _LONGEST_INFO_BYTES)
    return {part.decode(): msgspec.json.decode(value) for part, value in reversed(parts)} or None


def _cleaned(text: bytes) -> bytes:
    return clean(text)[0]
