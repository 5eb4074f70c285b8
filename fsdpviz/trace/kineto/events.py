"""The events of a Kineto file, decoded block by block, so that a file larger than memory opens.

Ordinary events are scanned into columns, where ``scan`` could be compiled; see its [Note: one language, two readers].

[Note: where a block may be cut] ``[`` + what lies before a comma + ``]`` is a whole JSON array only if that comma
stands between two of the array's own items: inside an event or a string the brackets would not match. So the last
``}, {`` of a block is tried first, and decoding it is the proof.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...base.errors import TraceError
from ..files.sniff import EVENTS
from ..table import Note
from .blocks import CUT_GZIP
from .event import EVENT, event_of
from .header import File, header_in, header_of, pieces_in
from .repair import clean, nesting, refuse_other_formats
from .scanned import Scanned
from .scanner import Scanner

LONGEST_EVENT_BYTES = 64 << 20  # what is held at once of a file in which no event ends
_DAMAGED_BYTES = 8 << 20  # how much is read on before an event that does not end counts as damaged
_TRIES = 4
_LIST = re.compile(rb"\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_COMMA = re.compile(rb"\s*,\s*")
_BOM = b"\xef\xbb\xbf"


class _FileOfEvents(File, rename="camel"):
    trace_events: list[EVENT]  # type: ignore[valid-type]


class _FileOfRaw(File, rename="camel"):
    trace_events: list[msgspec.Raw]


_EVENTS_DECODER: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[EVENT])  # type: ignore[valid-type]
_FILE_DECODER = msgspec.json.Decoder(_FileOfEvents)
_OPENING = b'{"traceEvents":['


class EventReader:
    """Iterates over lists of events, or what the ``scanner`` made of them; afterwards ``header`` has what the file says
    around them.
    """

    def __init__(self, path: Path, blocks: Iterator[bytes], notes: list[Note], scanner: Scanner | None = None) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._scanner = scanner
        self._notes = notes
        self._blocks = blocks
        self._pending = b""  # read, and not yet decoded; from the first event on, once _start is 0
        self._start = 0  # where in the pending bytes the events begin: most are scanned from there, and none copied
        self._opening = b""  # what makes the pending bytes JSON again
        self._is_last = False  # nothing comes after the pending bytes
        self._has_events = False
        self._is_inside = False  # the pending bytes follow an event, and a comma comes first
        self._unscanned_bytes = 0  # how many pending bytes held no whole event
        self._unmended_bytes = 0  # and how many did once they were mended

    def __iter__(self) -> Iterator[Sequence[Any] | Scanned]:
        """Raises TraceError, one line with the file and the cause, when nothing of it is a trace."""
        self._find_start()
        while not self._is_last:
            if (scanned := self._scanned()) is not None:
                yield scanned
                if scanned.others:
                    yield self._decode(b",".join(scanned.others)) or ()
            if scanned is None or scanned.is_odd:
                self._skip_comma()
                events = self._next_events()
                self._has_events |= bool(events)
                yield events
            elif len(self._pending) > LONGEST_EVENT_BYTES:
                self._give_up()
            self._read_more()
        self._drop_opening()
        self._skip_comma()
        yield self._last_events()

    # -- bytes

    def _read_more(self) -> None:
        if block := next(self._blocks, b""):
            self._pending += block
        else:
            self._is_last = True

    def _find_start(self) -> None:
        self._read_more()
        refuse_other_formats(self.path, self._pending)
        self._pending = self._pending.removeprefix(_BOM)
        if match := _LIST.match(self._pending):
            self._opening, self._start = b"[", match.end()
            return
        if begin := self._own_list():
            self._opening, self._start = _OPENING, begin
        elif len(self._pending) > LONGEST_EVENT_BYTES:
            raise TraceError(f"{self.path} is not a trace: no traceEvents in its first {LONGEST_EVENT_BYTES >> 20} MiB")

    def _own_list(self) -> int:
        """Where the file's own list of events begins, 0 where none does; the header is what stands before it.

        A list of that name inside another value does not count, as long as the file has one of its own.
        """
        nested = depth = counted = 0
        for match in self._lists():
            header = None if nested else self._header_until(match.end())  # that it is JSON is the proof
            if header is None:
                depth, counted = depth + nesting(self._pending[counted : match.start()]), match.start()
                if depth == 1:
                    header = self._header_until(match.end()) or pieces_in(self._pending[: match.end()])
            if header is not None:
                self._take(header)
                return match.end()
            nested = nested or match.end()
        if nested:
            self._notes.append(Note("traceEvents inside another value, read as the file's own", 1))
            if (header := pieces_in(self._pending[:nested]))[0]:
                self._take(header)
        return nested

    def _header_until(self, end: int) -> tuple[dict[str, Any], list[Note]] | None:
        return header_in(self._pending[:end] + b"]}")

    def _take(self, header: tuple[dict[str, Any], list[Note]]) -> None:
        self.header |= header[0]
        self._notes += header[1]

    def _lists(self) -> Iterator[re.Match[bytes]]:
        """Whatever is called like the list of events, in order; the file is read as far as it takes."""
        searched = 0
        while True:
            while match := EVENTS.search(self._pending, searched):
                yield match
                searched = match.end()
            if self._is_last or len(self._pending) > LONGEST_EVENT_BYTES:
                return
            searched = max(searched, len(self._pending) - 100)
            self._read_more()

    def _drop_opening(self) -> None:
        self._pending, self._start = self._pending[self._start :], 0

    # -- ordinary events

    def _scanned(self) -> Scanned | None:
        """None where nothing was scanned."""
        text = self._pending
        if self._scanner is None or not _is_utf8(text):
            self._drop_opening()
            return None
        if len(text) < 2 * self._unscanned_bytes:  # still inside one long event
            return Scanned.nothing()
        scanned = self._scanner.scan(text, self._start, self._is_inside)
        self._unscanned_bytes = 0 if scanned.end > self._start else len(text)
        self._is_inside |= scanned.end > self._start
        self._pending, self._start = text[scanned.end :], 0
        self._has_events |= self._is_inside
        return scanned

    def _skip_comma(self) -> None:
        if self._is_inside and (match := _COMMA.match(self._pending)):
            self._pending = self._pending[match.end() :]
        self._is_inside = False

    # -- a block with more to come

    def _next_events(self) -> Sequence[Any]:
        """The events that are whole; none where more must be read first."""
        cuts = self._cuts()
        for end, following in cuts:
            if (events := self._decode(memoryview(self._pending)[:end])) is not None:
                self._go_on(self._pending[following:])
                return events
        events = self._mended(*cuts[0]) if cuts and len(self._pending) >= 2 * self._unmended_bytes else ()
        if len(self._pending) > LONGEST_EVENT_BYTES:
            self._give_up()
        return events

    def _mended(self, end: int, following: int) -> Sequence[Any]:
        """The events of what is damaged, or ends inside a long event."""
        from .mend import Mender, filled  # its patterns cost ordinary files more than it takes to read a small one

        text, notes = clean(self._pending[:end])
        events = self._decode(text) if notes else None
        if events is None:
            whole, more = filled(text)
            events = self._decode(whole) if more else None
            notes += more if events is not None else ()
        if events is None:
            found = Mender(text).events(0, is_last=False, is_long=len(text) >= _DAMAGED_BYTES)
            if not found.end:
                self._unmended_bytes = len(self._pending)
                return ()
            notes += found.notes
            events = self._decoded(found.texts)
            if found.end < len(text):
                self._pending, following = text[found.end :] + self._pending[end:], 0
        self._notes += notes
        self._go_on(self._pending[following:])
        return events

    def _go_on(self, pending: bytes) -> None:
        self._pending, self._unscanned_bytes, self._unmended_bytes = pending, 0, 0

    def _cuts(self) -> list[tuple[int, int]]:
        """Where an event may end and the next begins, the last first. See [Note: where a block may be cut]."""
        for start in (max(0, len(self._pending) - (8 << 10)), 0):
            if found := [(match.start() + 1, match.end()) for match in _BETWEEN.finditer(self._pending, start)]:
                return found[: -_TRIES - 1 : -1]
        return []

    def _decode(self, items: bytes | memoryview) -> Sequence[Any] | None:
        """None where the items are not JSON."""
        text = b"".join((b"[", items, b"]"))  # one copy: fresh pages of memory cost as much as decoding into them
        if not _is_utf8(text):  # msgspec does not look at what it reads past
            return None
        try:
            return _EVENTS_DECODER.decode(text)
        except msgspec.ValidationError:
            pass  # the part before the odd event is JSON, the rest may not be
        except msgspec.DecodeError:
            return None
        try:
            return self._each(msgspec.json.decode(text, type=list[msgspec.Raw]))
        except msgspec.DecodeError:
            return None

    def _decoded(self, texts: Sequence[bytes]) -> Sequence[Any]:
        """The events of texts that are JSON."""
        events = self._decode(b",".join(texts))
        return self._each(texts) if events is None else events

    def _give_up(self) -> None:
        """Reads no further: what is pending is no event, or follows the last one."""
        if not self._has_events:
            raise TraceError(f"{self.path} is not a trace: no event ends in {LONGEST_EVENT_BYTES >> 20} MiB of it")
        self._blocks = iter(())

    # -- the end

    def _last_events(self) -> Sequence[Any]:
        try:
            return self._decode_rest(self._opening + self._pending)
        except msgspec.DecodeError:
            pass
        from .mend import filled  # as in _mended
        from .salvage import salvage

        text, repairs = clean(self._opening + self._pending)
        whole, more = filled(text)
        try:
            events = self._decode_rest(whole)
            repairs += more
        except msgspec.DecodeError as error:
            salvaged = salvage(text)
            if salvaged is None or not (salvaged[0] or self._has_events):
                is_cut = any(note.what == CUT_GZIP for note in self._notes)
                cause = "damaged gzip, cut short" if is_cut else str(error)[:80]
                raise TraceError(f"{self.path} is not a trace: no whole event is in it ({cause})") from error
            texts, header, more = salvaged
            self.header |= header
            repairs += more
            events = self._decoded(texts)
        self._notes += repairs
        return events

    def _decode_rest(self, text: bytes) -> Sequence[Any]:
        if not _is_utf8(text):  # as in _decode
            raise msgspec.DecodeError("bytes that are no UTF-8")
        try:
            if self._opening == b"[":
                return _EVENTS_DECODER.decode(text)
            file = _FILE_DECODER.decode(text)
            self.header |= header_of(file)
            return file.trace_events
        except msgspec.ValidationError:
            return self._decode_rest_one_by_one(text)

    def _decode_rest_one_by_one(self, text: bytes) -> Sequence[Any]:
        """For JSON that is whole and has an event of another shape among its events."""
        try:
            if self._opening == b"[":
                return self._each(msgspec.json.decode(text, type=list[msgspec.Raw]))
            file = msgspec.json.decode(text, type=_FileOfRaw)
        except msgspec.ValidationError as error:
            raise TraceError(f"{self.path} is JSON but no trace: it has no list traceEvents") from error
        self.header |= header_of(file)
        return self._each(file.trace_events)

    def _each(self, texts: Sequence[bytes | msgspec.Raw]) -> list[Any]:
        events: list[Any] = []
        odd: list[str] = []
        for text in texts:
            try:
                events.append(event_of(text))
            except (msgspec.DecodeError, RecursionError):
                event = self._cleaned(text)
                if event is None:
                    odd.append(bytes(text)[:60].decode("utf-8", "replace"))
                else:
                    events.append(event)
        if odd:
            self._notes.append(Note("entries of traceEvents that are no events, left out", len(odd), odd[0]))
        return events

    def _cleaned(self, text: bytes | msgspec.Raw) -> Any:
        """The event once what JSON forbids is replaced; None where that is not enough."""
        mended, repairs = clean(bytes(text))
        try:
            event = event_of(mended) if repairs else None
        except (msgspec.DecodeError, RecursionError):
            return None
        self._notes += repairs if event is not None else ()
        return event


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        codecs.utf_8_decode(text, "strict", False)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return True
