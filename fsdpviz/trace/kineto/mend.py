"""From text that is nearly JSON to JSON, where it can be told what was meant.

Profilers print their JSON piece by piece, so that the same thing goes wrong in event after event: a value that is
missing, a text without quotes (pytorch/kineto 133, 1213), quotes and backslashes in a text that nobody escaped
(pytorch/kineto 1459, pytorch/pytorch 98432), a comma too many (95460), a key without its first quote (33961). Each mend
is counted; what could be read in two ways is not mended, and its event is left out.

[Note: damage takes linear time] Runs of ordinary pairs and items are passed over by one pattern each. What is looked
for ahead, the end of a text, is not looked for beyond the next event, where reading goes on if it is not found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..table import Note, Tally

_CUT, _ODD = -1, -2  # instead of a place: the text ends inside the value; it is no JSON, and not to be mended
_DEEPEST = 64  # levels of nesting
_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_END_OF_LIST, _QUOTE = ord("]"), ord('"')
_NAME_DEPTH = 1  # an event's own values
_LONGEST_KEY = 200
_MISSING = "values that are missing, read as null"

_STRING = rb'"[^"\\]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\]*+)*+"'
_PLAIN = rb"(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)"
_SCALAR = rb"(?:%s|%s)" % (_STRING, _PLAIN)
_NEXT_ITEM = rb"\s*+(?:,\s*+(?!\])|(?=\]))"
_LIST = rb"\[\s*+(?:(?:%s|\[\s*+(?:%s%s)*+\])%s)*+\]" % (_SCALAR, _SCALAR, _NEXT_ITEM, _NEXT_ITEM)
_KEY = rb"%s\s*+:\s*+" % _STRING
_NEXT_PAIR = rb'\s*+(?:,\s*+(?=")|(?=\}))'
_ARGS = rb"\{\s*+(?:%s(?:%s|%s)%s)*+\}" % (_KEY, _SCALAR, _LIST, _NEXT_PAIR)
_ORDINARY = rb"(?:%s|%s|%s)" % (_SCALAR, _LIST, _ARGS)
_VALUE = re.compile(rb"%s(?=\s*+(?:[,}\]]|\Z))" % _ORDINARY)
_EVENT = re.compile(rb"\{\s*+(?:%s%s%s)*+\}(?=\s*+,)" % (_KEY, _ORDINARY, _NEXT_PAIR))
_PAIRS = re.compile(rb'(?:%s%s\s*+,\s*+(?=["a-zA-Z_]))*+' % (_KEY, _ORDINARY))
_ITEMS = re.compile(rb"(?:%s\s*+,\s*+(?=[^\s,\]}]))*+" % _ORDINARY)
_WHOLE_KEY = re.compile(_KEY)
_HALF_QUOTED_KEY = re.compile(rb'[a-zA-Z_][a-zA-Z_ ]{0,40}"\s*+:\s*+')
_WHOLE_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(?=\s*+[,}\]])', re.DOTALL)
_UNQUOTED = rb'[^\s"{}\[\],][^"{}\[\],]{0,200}+(?=[,}\]])'
_WHOLE_UNQUOTED = re.compile(_UNQUOTED)
_BEFORE_VALUE = rb':(?=\s*+(?:["{\[]|%s\s*+[,}\]]))' % _PLAIN
# a string that is cut runs to the end, or each quote in it would be tried as the first
_ANY_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
_VALUES = re.compile(
    rb'(?:[^":]++|%s|%s)++|(:)\s*+(%s|(?=[,}\]]))|:' % (_ANY_STRING, _BEFORE_VALUE, _UNQUOTED), re.DOTALL
)
_EXACT_KEY = re.compile(rb'"(?:ph|pid|tid|ts|dur)"\s*+:')  # what is damaged there is no text
_NOT_FINITE = re.compile(rb"[+-]?(?:nan(?:\([^)]*\))?|inf(?:inity)?|1\.#[a-z]+)", re.IGNORECASE)
_COMMAS = re.compile(rb"[\s,]*+")

# what stands first in an event, and what every profiler writes in one
_EVENT_KEY = rb'(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*+:'
_TELLING_KEY = rb'"(?:ph|cat|pid|tid|ts|dur|args)"\s*+:'
_BETWEEN = rb'\}\s*+,?\s*+(?=\{\s*+"?%s)' % _EVENT_KEY
_BETWEEN_EVENTS = re.compile(_BETWEEN)
_LAST_EVENT = re.compile(rb'\}\s*+(?=\]\s*+(?:\}?\s*+\Z|,\s*+"[a-zA-Z]))')
_AFTER_EVENT = re.compile(rb"\s*+(?:[,\]{]|\Z)")
_NAME_KEY = re.compile(rb'"name"')
_AFTER_NAME = rb'"(?:ph|cat|pid|tid|ts|dur|args|id|bp|s|cname|id2|scope|tts|tdur|bind_id|flow_in|flow_out|sf)"\s*+:'
_END_OF_NAME = re.compile(rb'(")\s*+,\s*+%s|%s|%s' % (_AFTER_NAME, _TELLING_KEY, _BETWEEN))
_BEFORE_NEXT_KEY = re.compile(rb'\\?"[\s}\]]*+,\s*+"[^"\\]{1,%d}+"\s*+:' % _LONGEST_KEY)
_MARK = re.compile(rb'\\["\\]|(%s|%s)|"(\s*+[,}\]])?' % (_TELLING_KEY, _BETWEEN))
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|(\\)')
_TO_ESCAPE = re.compile(rb'\\(?:["\\]|u[0-9a-fA-F]{4})|(\\)|(")')


@dataclass
class MendedEvents:
    """What could be read of a list of events."""

    texts: list[bytes] = field(default_factory=list)  # each event's own, JSON now
    end: int = 0  # of what was read: the list's closing bracket, or an event that is cut
    is_closed: bool = False  # the list's closing bracket was reached
    notes: list[Note] = field(default_factory=list)


def filled(text: bytes) -> tuple[bytes, list[Note]]:
    """A clean text with a value after each key, and what was mended: the most frequent fault, in one go. Where another
    fault is in the text too, it is still no JSON, and a Mender should begin with what was given here.
    """
    tally = Tally()

    def mended(part: re.Match[bytes]) -> bytes:
        if not part[1]:
            return part[0]
        earliest = max(0, part.start() - _LONGEST_KEY)
        key_end = max(earliest, text.rfind(b'"', earliest, part.start()))
        pair = text[max(earliest, text.rfind(b'"', earliest, key_end)) : part.end()]
        instead = _instead(part[2].rstrip(), pair) if part[2][:1].isalpha() or not part[2] else None
        if instead is None:
            return part[0]
        tally.add(instead[1], 1, _example(pair))
        return b": " + instead[0]

    return _VALUES.sub(mended, text), [*tally.notes.values()]


class Mender:
    """Reads a text that ``repair.clean`` returned, place by place."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._tally = Tally()
        self._patches: list[tuple[int, int, bytes]] = []  # of the value that is being read: from, until, replaced by
        self._told: list[tuple[str, bytes]] = []
        self._key_at = 0
        self._name_depth = 0
        self._too_deep_at = 0

    @property
    def notes(self) -> list[Note]:
        """What was mended in all that was read."""
        return [*self._tally.notes.values()]

    def events(self, at: int, *, is_last: bool, is_long: bool = False) -> MendedEvents:
        """The events of a list from ``at`` on. ``is_last`` says that nothing follows the text, ``is_long`` that more of
        it would hardly make an event whole that is cut.
        """
        self._name_depth = _NAME_DEPTH
        found = MendedEvents()
        while True:
            found.end = at = _behind(_COMMAS, self.text, at)
            if at == len(self.text) or self.text[at] == _END_OF_LIST:
                found.is_closed = at < len(self.text)
                break
            end = self._value_end(at)
            if end >= 0 and (not self._patches or _AFTER_EVENT.match(self.text, end)):  # else it was mended wrongly
                found.texts.append(self._taken(at, end))
                at = end
                continue
            following = self._following(at, is_last) if end == _ODD or is_last or is_long else None
            if following is None:
                break
            self._tally.add("events that are no JSON, left out", 1, _example(self.text[at : at + 60]))
            at = following
        found.notes = self.notes
        return found

    def value(self, at: int) -> tuple[bytes, int] | None:
        """The value that begins at ``at`` and the place behind it; None where it is not to be read."""
        self._name_depth = 0
        end = self._value_end(at)
        return None if end < 0 else (self._taken(at, end), end)

    def _following(self, at: int, is_last: bool) -> int | None:
        """Behind the event that begins at ``at`` and could not be read."""
        match = _BETWEEN_EVENTS.search(self.text, max(at, self._too_deep_at))
        if match is None and is_last:
            match = _LAST_EVENT.search(self.text, at)
        return match.end() if match else None

    # -- what is replaced

    def _replace(self, begin: int, end: int, instead: bytes, what: str, example: bytes) -> None:
        self._patches.append((begin, end, instead))
        self._told.append((what, example))

    def _taken(self, begin: int, end: int) -> bytes:
        for what, example in self._told:
            self._tally.add(what, 1, _example(example))
        pieces: list[bytes] = []
        for start, stop, instead in self._patches:
            pieces += (self.text[begin:start], instead)
            begin = stop
        return b"".join((*pieces, self.text[begin:end]))

    # -- one value

    def _value_end(self, at: int) -> int:
        text, closing = self.text, list[int]()
        self._patches, self._told = [], []
        if match := _EVENT.match(text, at):
            return match.end()
        while at < len(text):
            is_first = text[at] in _CLOSING
            if is_first and (match := _VALUE.match(text, at)):
                at, is_first = match.end(), False
            elif is_first:
                if len(closing) == _DEEPEST:
                    self._too_deep_at = at  # or each level would be tried as the first of so many
                    return _ODD
                closing.append(_CLOSING[text[at]])
                at += 1
            elif (at := self._scalar_end(at, len(closing))) < 0:
                return at
            while closing:
                begin, at = at, _behind(_COMMAS, text, at)
                if at == len(text):
                    return _CUT
                is_last = text[at] == closing[-1]
                if not self._is_separated(begin, at, closing[-1], is_first, is_last):
                    return _ODD
                if not is_last:
                    break
                closing.pop()
                at, is_first = at + 1, False
            else:
                return at
            if closing[-1] == _END_OF_LIST:
                at = _behind(_ITEMS, text, at)
            elif (at := self._key_end(_behind(_PAIRS, text, at))) < 0:
                return at
        return _CUT

    def _is_separated(self, begin: int, end: int, closing: int, is_first: bool, is_last: bool) -> bool:
        """Whether an item, or the closing bracket, may follow at ``end``: with a comma between two items alone."""
        commas, wanted = self.text.count(b",", begin, end), 0 if is_first or is_last else 1
        if commas > wanted:
            example = self.text[max(0, begin - 40) : end + 10]
            if closing == _END_OF_LIST and not is_last:
                nulls = b"," * wanted + b"null," * (commas - wanted)
                self._replace(begin, end, nulls, _MISSING, example)
            else:
                self._replace(begin, end, b"," * wanted, "commas that separate nothing, left out", example)
        return commas >= wanted

    def _key_end(self, at: int) -> int:
        self._key_at = at
        if match := _WHOLE_KEY.match(self.text, at):
            return match.end()
        if match := _HALF_QUOTED_KEY.match(self.text, at):
            self._replace(at, at, b'"', "keys without their first quote", match[0])
            return match.end()
        return _CUT if at == len(self.text) else _ODD

    def _scalar_end(self, at: int, depth: int) -> int:
        text = self.text
        if match := _VALUE.match(text, at):
            return match.end()
        if not depth:
            return _ODD
        if text[at] == _QUOTE:
            return self._string_end(at, depth)
        match = _WHOLE_UNQUOTED.match(text, at)
        spelled = match[0].rstrip() if match else b""
        pair = text[self._key_at : at + len(spelled)]
        instead = _instead(spelled, pair) if match or text[at] in b",}]" else None
        if instead is None:
            return _ODD
        self._replace(at, at + len(spelled), *instead, pair)
        return at + len(spelled)

    def _string_end(self, at: int, depth: int) -> int:
        if match := _WHOLE_STRING.match(self.text, at):
            end = match.end()
        elif (end := self._name_end(at) if depth == self._name_depth else self._text_end(at)) < 0:
            return _ODD
        content = self.text[at + 1 : end - 1]
        is_raw = any(escape[1] for escape in _ESCAPE.finditer(content))  # then none escapes a letter

        def escaped(mark: re.Match[bytes]) -> bytes:
            return b"\\" + mark[0] if mark[2] or (mark[1] and is_raw) else mark[0]

        mended = _TO_ESCAPE.sub(escaped, content) if b"\\" in content else content.replace(b'"', b'\\"')
        if not match and any(mark[2] for mark in _TO_ESCAPE.finditer(content)):
            self._told.append(("quotes inside a text, read as a part of it", content))
        if is_raw:
            self._told.append(("backslashes that escape nothing, read as they are", content))
        self._patches.append((at + 1, end - 1, mended))
        return end

    def _name_end(self, at: int) -> int:
        """Behind the quote after which the event's next key stands."""
        match = _END_OF_NAME.search(self.text, at + 1) if _NAME_KEY.match(self.text, self._key_at) else None
        return match.end(1) if match and match[1] else _ODD

    def _text_end(self, at: int) -> int:
        """Behind the first quote that may be the last, with a pair or more, or none, of quotes before it; before the
        next key.
        """
        inside = 0
        for mark in _MARK.finditer(self.text, at + 1):
            if mark[1]:
                break
            if mark[0][:1] == b'"':
                if mark[2] and inside % 2 == 0:
                    return mark.start() + 1
                inside += 1
            if _BEFORE_NEXT_KEY.match(self.text, mark.start()):
                break
        return _ODD


def _behind(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _instead(spelled: bytes, pair: bytes) -> tuple[bytes, str] | None:
    """What a value that is no JSON is replaced by, and what that is called; ``pair`` has its key before it."""
    if not spelled:
        return b"null", _MISSING
    if _NOT_FINITE.fullmatch(spelled):
        return b"null", "NaN or infinity where JSON has none, read as null"
    if _EXACT_KEY.match(pair):
        return None
    return b'"' + spelled.replace(b"\\", b"\\\\") + b'"', "texts without quotes, read as they are"


def _example(text: bytes) -> str:
    return text[:60].decode("utf-8", "replace")
