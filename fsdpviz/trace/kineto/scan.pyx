# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Ordinary events, read from a file's bytes straight into columns, without an object for each. Compiled.

[Note: one language, two readers] ``events`` reads every event that JSON can spell, with msgspec; this reads only what
profilers write, and stops before the first event that is anything else: a time with an exponent, an id that is a
list, a damaged byte. ``events`` then goes on from there. So nothing depends on this file but speed: without a compiler
it is missing, and the tables are the same.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t

from .json_text cimport CUT, ODD, Text, Token, blank, is_digit, key, next_item, number, reads, skipped, string, word

import msgspec
import numpy as np

from .scanned import Scanned

cdef enum:  # columns of texts
    CATEGORY = 0
    NAME = 1
    PROCESS = 2
    THREAD = 3
    TEXTS = 4

cdef extern from *:  # constants that the C compiler sees as such
    """
    #define MOST_US (((int64_t)1 << 61) / 1000)
    #define NO_NUMBER INT64_MIN
    """
    const int64_t MOST_US
    const int64_t NO_NUMBER


cdef struct Event:
    unsigned char phase  # 0 where none was read
    Token texts[TEXTS]
    int64_t start_ns  # NO_NUMBER where none was read
    int64_t duration_ns
    int64_t correlation
    int64_t bytes
    Py_ssize_t args_begin  # 0 where there are none
    Py_ssize_t args_end
    bint is_differentiated
    bint has_group
    bint has_collective
    bint is_open


# -- values of an event

cdef Py_ssize_t label(Text text, Py_ssize_t at, Py_ssize_t end, Token *token) noexcept nogil:
    """Behind a name or an id: a string or an integer."""
    cdef Py_ssize_t digit
    if at >= end:
        return CUT
    if text[at] == c'"':
        return string(text, at, end, token)
    if text[at] != c"-" and not is_digit(text[at]):
        return ODD
    at = number(text, at, end, token)
    if at < 0:
        return at
    for digit in range(token.begin, token.end):
        if not is_digit(text[digit]) and (digit > token.begin or token.end == token.begin + 1):
            return ODD
    if token.end - token.begin > 18 or (text[token.begin] == c"-" and text[token.begin + 1] == c"0"):
        return ODD  # what reads as another text
    return at


cdef inline Py_ssize_t whole(Text text, Py_ssize_t at, Py_ssize_t end, int most, int64_t *value) noexcept nogil:
    """Behind a whole number of at most so many digits, up to 18; something must follow it."""
    cdef Py_ssize_t first = at
    at = amount(text, at, end, most, value)
    return ODD if at > first + 1 and text[first] == c"0" else at


cdef inline Py_ssize_t amount(Text text, Py_ssize_t at, Py_ssize_t end, int most, int64_t *value) noexcept nogil:
    """The same of the digits behind a point too, which may begin with 0."""
    cdef Py_ssize_t first = at
    cdef int64_t found = 0
    while at < end and at - first < most and is_digit(text[at]):
        found = found * 10 + (text[at] - 48)
        at += 1
    if at >= end:
        return CUT
    value[0] = found
    return ODD if at == first or is_digit(text[at]) else at


cdef inline bint goes_on(unsigned char character) noexcept nogil:
    """True for what makes another number of the digits before."""
    return character == c"." or character == c"e" or character == c"E"


cdef Py_ssize_t microseconds(Text text, Py_ssize_t at, Py_ssize_t end, int64_t *ns) noexcept nogil:
    """Behind a time of at most three decimals that is not negative."""
    cdef int64_t value = 0, thousandths = 0
    cdef Py_ssize_t point
    at = whole(text, at, end, 16, &value)
    if at < 0:
        return at
    if text[at] == c".":
        point = at
        at = amount(text, at + 1, end, 3, &thousandths)
        if at < 0:
            return at
        thousandths *= 1 if at - point == 4 else 10 if at - point == 3 else 100
    if goes_on(text[at]) or value >= MOST_US:
        return ODD
    ns[0] = value * 1000 + thousandths
    return at


cdef Py_ssize_t integer(Text text, Py_ssize_t at, Py_ssize_t end, int64_t *value) noexcept nogil:
    """Behind an integer of at most 18 digits."""
    cdef int64_t found = 0
    cdef bint is_negative
    if at >= end:
        return CUT
    is_negative = text[at] == c"-"
    at = whole(text, at + is_negative, end, 18, &found)
    if at < 0:
        return at
    value[0] = -found if is_negative else found
    return ODD if goes_on(text[at]) else at


cdef inline Py_ssize_t is_given(Text text, Py_ssize_t at, Py_ssize_t end, bint *given) noexcept nogil:
    """Behind any value; whether it is another than null."""
    given[0] = at < end and text[at] != c"n"
    return skipped(text, at, end, 2)


cdef inline void forget_arguments(Event *event) noexcept nogil:
    event.correlation = event.bytes = NO_NUMBER
    event.is_differentiated = event.has_group = event.has_collective = event.is_open = False
    event.args_begin = event.args_end = 0


cdef Py_ssize_t arguments(Text text, Py_ssize_t at, Py_ssize_t end, Event *event) noexcept nogil:
    """Behind an event's ``args``."""
    cdef Token token
    cdef bint is_last
    cdef Py_ssize_t value
    forget_arguments(event)
    if at >= end:
        return CUT
    if text[at] == c"n":
        return word(text, at, end, b"null", 4)
    if text[at] != c"{":
        return ODD
    event.args_begin = at
    at = blank(text, at + 1, end)
    if at < end and text[at] == c"}":
        event.args_end = at + 1
        return at + 1
    while True:
        at = key(text, at, end, &token)
        if at < 0:
            return at
        if reads(text, &token, b"correlation", 11):
            at = integer(text, at, end, &event.correlation)
        elif reads(text, &token, b"bytes", 5):
            at = integer(text, at, end, &event.bytes)
        elif reads(text, &token, b"Fwd thread id", 13):
            value = at
            at = skipped(text, at, end, 2)
            if at >= 0 and text[value] == c"-":  # perhaps a zero too
                return ODD
            event.is_differentiated = at == value + 1 and text[value] == c"0"
        elif reads(text, &token, b"Collective name", 15):
            at = is_given(text, at, end, &event.has_collective)
        elif reads(text, &token, b"Process Group Name", 18):
            at = is_given(text, at, end, &event.has_group)
        elif reads(text, &token, b"finished", 8):
            event.is_open = at < end and text[at] == c"f"
            at = skipped(text, at, end, 2)
        else:
            at = skipped(text, at, end, 2)
        if at < 0:
            return at
        at = next_item(text, at, end, c"}", &is_last)
        if at >= 0 and is_last:
            event.args_end = at
        if at < 0 or is_last:
            return at


cdef Py_ssize_t value_of(Text text, Py_ssize_t at, Py_ssize_t end, const Token *name, Event *event) noexcept nogil:
    """Behind the value of an event's key."""
    cdef Token token
    if reads(text, name, b"ph", 2):
        if at >= end:
            return CUT
        if event.phase or text[at] != c'"':
            return ODD
        at = string(text, at, end, &token)
        if at >= 0:
            if token.end != token.begin + 1:
                return ODD
            event.phase = text[token.begin]
        return at
    if reads(text, name, b"ts", 2):
        return microseconds(text, at, end, &event.start_ns)
    if reads(text, name, b"dur", 3):
        return microseconds(text, at, end, &event.duration_ns)
    if reads(text, name, b"cat", 3):
        return label(text, at, end, &event.texts[CATEGORY])
    if reads(text, name, b"name", 4):
        return label(text, at, end, &event.texts[NAME])
    if reads(text, name, b"pid", 3):
        return label(text, at, end, &event.texts[PROCESS])
    if reads(text, name, b"tid", 3):
        return label(text, at, end, &event.texts[THREAD])
    if reads(text, name, b"args", 4):
        return arguments(text, at, end, event)
    return skipped(text, at, end, 1)


cdef Py_ssize_t event_at(Text text, Py_ssize_t at, Py_ssize_t end, Event *event) noexcept nogil:
    """Behind one event; ``at`` is its brace."""
    cdef Token name
    cdef bint is_last
    cdef int column
    event.phase = 0
    event.start_ns = event.duration_ns = NO_NUMBER
    forget_arguments(event)
    for column in range(TEXTS):
        event.texts[column].begin = event.texts[column].end = 0  # an absent text reads as ""
        event.texts[column].is_escaped = False
    at = blank(text, at + 1, end)
    while True:
        at = key(text, at, end, &name)
        if at < 0:
            return at
        at = value_of(text, at, end, &name, event)
        if at < 0:
            return at
        at = next_item(text, at, end, c"}", &is_last)
        if at < 0 or is_last:
            return at


# -- many events

cdef class Scanner:
    """Scans blocks of one file; the same text has the same code in all of them.

    ``codes``, of category, name, process and thread in this order, number a text when it is new.
    """

    cdef list _codes
    cdef list _known  # a dict for each column, from the bytes of a text to its code

    def __init__(self, codes):
        self._codes = list(codes)
        self._known = [{} for _ in self._codes]

    def scan(self, spelled, Py_ssize_t start, bint is_inside):
        """A Scanned of the whole events of these bytes from ``start`` on. ``is_inside`` says that an event came before,
        so that a comma comes first.
        """
        cdef const unsigned char[::1] block = spelled
        cdef Py_ssize_t end = len(block), at = start, begin, following
        cdef Text text = &block[0] if end else NULL
        cdef Py_ssize_t most = (end - start) // 25 + 1, rows = 0  # {"ph":"X","ts":1,"dur":1} has 25 bytes
        cdef Event event
        cdef bint is_odd = False
        cdef int column
        cdef Token before[TEXTS]
        cdef int last[TEXTS]
        numbers = np.empty((4, most), np.int64)
        codes = np.empty((TEXTS, most), np.int32)
        places = np.empty((2, most), np.int64)
        flags = np.empty((3, most), np.bool_)
        cdef int64_t[:, ::1] number_rows = numbers
        cdef int[:, ::1] code_rows = codes
        cdef int64_t[:, ::1] place_rows = places
        cdef unsigned char[:, ::1] flag_rows = flags.view(np.uint8)
        others = []
        flows = 0
        for column in range(TEXTS):
            last[column] = -1
        while True:
            begin = blank(text, at, end)
            if is_inside and begin < end and text[begin] == c",":
                begin = blank(text, begin + 1, end)
                is_odd = begin < end and text[begin] != c"{"
            elif is_inside:
                is_odd = begin < end and text[begin] != c"]"
                break
            if begin >= end or is_odd:
                break
            if text[begin] != c"{":
                is_odd = text[begin] != c"]"
                break
            following = event_at(text, begin, end, &event)
            if following < 0:
                is_odd = following == ODD
                break
            if event.phase == c"X":
                if event.start_ns == NO_NUMBER or event.duration_ns == NO_NUMBER:
                    is_odd = True
                    break
                for column in range(TEXTS):
                    if last[column] < 0 or not same(text, &before[column], &event.texts[column]):
                        last[column] = self._code(text, column, &event.texts[column])
                        before[column] = event.texts[column]
                    code_rows[column, rows] = last[column]
                number_rows[0, rows] = event.start_ns
                number_rows[1, rows] = event.duration_ns
                number_rows[2, rows] = event.correlation
                number_rows[3, rows] = event.bytes
                place_rows[0, rows] = event.args_begin
                place_rows[1, rows] = event.args_end
                flag_rows[0, rows] = event.is_differentiated
                flag_rows[1, rows] = event.has_group or event.has_collective
                flag_rows[2, rows] = event.is_open
                rows += 1
            elif event.phase == c"s" or event.phase == c"t" or event.phase == c"f":
                flows += 1
            elif event.phase:
                others.append(PyBytes_FromStringAndSize(<const char *>text + begin, following - begin))
            else:
                is_odd = True
                break
            at = following
            is_inside = True
        kept = slice(0, rows)
        return Scanned(
            spelled, numbers[:, kept].copy(), codes[:, kept].copy(), places[:, kept].copy(), flags[:, kept].copy(),
            others, flows, at, bool(is_odd),
        )

    cdef int _code(self, Text text, int column, const Token *token) except -1:
        known = <dict>self._known[column]
        spelled = PyBytes_FromStringAndSize(<const char *>text + token.begin, token.end - token.begin)
        code = known.get(spelled)
        if code is None:
            read = msgspec.json.decode(b'"' + spelled + b'"') if token.is_escaped else spelled.decode()
            code = known[spelled] = self._codes[column][read]
        return code


cdef inline bint same(Text text, const Token *one, const Token *other) noexcept nogil:
    return reads(text, one, <const char *>text + other.begin, other.end - other.begin)
