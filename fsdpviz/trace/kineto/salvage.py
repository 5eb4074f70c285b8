"""A whole file, or its end, that is not the JSON it should be: what is whole or can be mended, event by event."""

from __future__ import annotations

from typing import Any

from ..files.sniff import EVENTS
from ..table import Note
from .header import behind, header_in, pieces_in
from .mend import Mender


def salvage(data: bytes) -> tuple[list[bytes], dict[str, Any], list[Note]] | None:
    """The events' own text, the header that could be read, and notes; None if it is no list of events. ``data`` is
    clean.
    """
    if match := EVENTS.search(data):
        before = data[: match.end()] + b"]}"
        header, notes = header_in(before) or pieces_in(before)
        start = match.end()
    elif data.lstrip()[:1] == b"[":
        header, notes = dict[str, Any](), list[Note]()
        start = data.index(b"[") + 1
    else:
        return None
    found = Mender(data).events(start, is_last=True)
    after = data[found.end :]
    if not found.is_closed:
        notes.append(Note("file cut short; what is whole was read", 1, after[:60].decode("utf-8", "replace").strip()))
        more, repairs = pieces_in(after)
        repairs = repairs if more else []
    elif match:
        more, repairs = header_in(b'{"traceEvents":[' + after) or pieces_in(after)
    else:
        more, repairs = {}, behind(after[1:])
    return found.texts, header | more, [*found.notes, *notes, *repairs]
