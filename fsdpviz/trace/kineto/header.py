"""What a Kineto file says around its events: the rank, the host, the devices, the base of its times."""

from __future__ import annotations

from typing import Any

import msgspec

from .repair import clean


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


def header_in(text: bytes) -> dict[str, Any] | None:
    """What stands before the events; None where that is damaged beyond cleaning."""
    for mended in (bytes, lambda damaged: clean(damaged)[0]):
        try:
            return header_of(_DECODER.decode(mended(text)))
        except (msgspec.DecodeError, RecursionError):
            continue
    return None
