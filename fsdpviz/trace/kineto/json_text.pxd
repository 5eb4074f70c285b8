"""JSON as it stands in a text, read place by place. Compiled into ``scan``.

[Note: no byte is read past the end] Text comes from strangers. ``at`` is the next byte to look at and ``end`` the
first that is not ours; each function looks at a byte only after ``at < end``, and returns the place behind what it
read, or CUT where the text ended first, or ODD. The tests scan texts that end at a page that must not be touched.
"""

from libc.stdint cimport uint64_t
from libc.string cimport memchr, memcmp, memcpy

cdef enum:
    CUT = -2  # the text ends before the value does
    ODD = -3  # no JSON, or JSON that no profiler writes
    DEEPEST = 64  # levels of nesting

cdef extern from *:
    """
    #define ONES 0x0101010101010101ULL
    #if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    #define FIRST_MARKED(marks) (__builtin_ctzll(marks) >> 3)
    #else
    #define FIRST_MARKED(marks) 0
    #endif
    """
    const uint64_t ONES  # one in each byte
    int FIRST_MARKED(uint64_t marks) noexcept nogil  # the first byte that has a mark, or one before it

ctypedef const unsigned char *Text


cdef struct Token:  # the content of a string, the digits of a number
    Py_ssize_t begin
    Py_ssize_t end
    bint is_escaped


cdef inline uint64_t eight(Text text, Py_ssize_t at) noexcept nogil:
    """Eight bytes at once."""
    cdef uint64_t word
    memcpy(&word, text + at, 8)
    return word


cdef inline uint64_t marked(uint64_t word) noexcept nogil:
    """The highest bit of the first of eight bytes that is a quote, a backslash, a control character or no ASCII, and of
    some behind it: a byte less than b has it set in ``byte - b``, and borrows from the next. 0 where there is none.
    """
    cdef uint64_t quote = word ^ (ONES * 34), backslash = word ^ (ONES * 92)
    return ((word - ONES * 32) | (quote - ONES) | (backslash - ONES) | word) & (ONES * 128)


cdef inline Py_ssize_t blank(Text text, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    """The place of the next byte that is not blank; ``end`` where there is none."""
    if at + 9 <= end and text[at] == 10:  # a line break and what the next line is indented by
        at += 1
        while at + 8 <= end and eight(text, at) == ONES * 32:
            at += 8
    while at < end and (text[at] == 32 or text[at] == 10 or text[at] == 13 or text[at] == 9):
        at += 1
    return at


cdef inline Py_ssize_t symbol(Text text, Py_ssize_t at, Py_ssize_t end, unsigned char wanted) noexcept nogil:
    """Behind one symbol and the blanks around it."""
    at = blank(text, at, end)
    if at >= end:
        return CUT
    return blank(text, at + 1, end) if text[at] == wanted else ODD


cdef inline bint is_digit(unsigned char character) noexcept nogil:
    return 48 <= character <= 57


cdef inline Py_ssize_t escape(Text text, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    """Behind one escape; ``at`` is its backslash."""
    cdef int digit
    if at + 1 >= end:
        return CUT
    if memchr(b'"\\/bfnrt', text[at + 1], 8) != NULL:
        return at + 2
    if text[at + 1] != c"u":
        return ODD
    if at + 6 > end:
        return CUT
    if text[at + 2] == c"d" or text[at + 2] == c"D":  # perhaps half a character
        return ODD
    for digit in range(2, 6):
        if memchr(b"0123456789abcdefABCDEF", text[at + digit], 22) == NULL:
            return ODD
    return at + 6


cdef inline Py_ssize_t string(Text text, Py_ssize_t at, Py_ssize_t end, Token *token) noexcept nogil:
    """Behind a string and its closing quote; ``at`` is its opening one."""
    cdef uint64_t marks
    token.begin = at + 1
    token.is_escaped = False
    at += 1
    while at < end:
        if at + 8 <= end:
            marks = marked(eight(text, at))
            if not marks:
                at += 8
                continue
            at += FIRST_MARKED(marks)
        if text[at] == c'"':
            token.end = at
            return at + 1
        if text[at] < 32:
            return ODD
        if text[at] == c"\\":
            token.is_escaped = True
            at = escape(text, at, end)
            if at < 0:
                return at
        else:
            at += 1
    return CUT


cdef inline Py_ssize_t digits(Text text, Py_ssize_t at, Py_ssize_t end) noexcept nogil:
    """Behind at least one digit; something must follow the last."""
    cdef Py_ssize_t first = at
    while at < end and is_digit(text[at]):
        at += 1
    if at >= end:
        return CUT
    return ODD if at == first else at


cdef inline Py_ssize_t number(Text text, Py_ssize_t at, Py_ssize_t end, Token *token) noexcept nogil:
    """Behind a number; something must follow it."""
    cdef Py_ssize_t first
    token.begin = at
    token.is_escaped = False
    if at < end and text[at] == c"-":
        at += 1
    first = at
    at = digits(text, at, end)
    if at < 0:
        return at
    if text[first] == c"0" and at > first + 1:
        return ODD
    if text[at] == c".":
        at = digits(text, at + 1, end)
        if at < 0:
            return at
    if text[at] == c"e" or text[at] == c"E":
        at += 1
        if at < end and (text[at] == c"+" or text[at] == c"-"):
            at += 1
        at = digits(text, at, end)
        if at < 0:
            return at
    token.end = at
    return at


cdef inline Py_ssize_t word(Text text, Py_ssize_t at, Py_ssize_t end, const char *wanted, int length) noexcept nogil:
    if at + length > end:
        return CUT
    return at + length if memcmp(text + at, wanted, length) == 0 else ODD


cdef inline Py_ssize_t next_item(
    Text text, Py_ssize_t at, Py_ssize_t end, unsigned char closing, bint *is_last
) noexcept nogil:
    """Behind what follows an item of a list or an object: its ``closing`` bracket, or a comma and the blanks after it."""
    at = blank(text, at, end)
    if at >= end:
        return CUT
    is_last[0] = text[at] == closing
    if is_last[0]:
        return at + 1
    return blank(text, at + 1, end) if text[at] == c"," else ODD


cdef inline Py_ssize_t skipped(Text text, Py_ssize_t at, Py_ssize_t end, int depth) noexcept nogil:
    """Behind any value; ``at`` is its first byte."""
    cdef Token token
    cdef unsigned char first, closing
    cdef bint is_last
    if at >= end:
        return CUT
    first = text[at]
    if first == c'"':
        return string(text, at, end, &token)
    if first == c"-" or is_digit(first):
        return number(text, at, end, &token)
    if first == c"t":
        return word(text, at, end, b"true", 4)
    if first == c"f":
        return word(text, at, end, b"false", 5)
    if first == c"n":
        return word(text, at, end, b"null", 4)
    if (first != c"[" and first != c"{") or depth >= DEEPEST:
        return ODD
    closing = c"]" if first == c"[" else c"}"
    at = blank(text, at + 1, end)
    if at < end and text[at] == closing:
        return at + 1
    while True:
        if first == c"{":
            at = key(text, at, end, &token)
            if at < 0:
                return at
        at = skipped(text, at, end, depth + 1)
        if at < 0:
            return at
        at = next_item(text, at, end, closing, &is_last)
        if at < 0 or is_last:
            return at


cdef inline Py_ssize_t key(Text text, Py_ssize_t at, Py_ssize_t end, Token *token) noexcept nogil:
    """Behind a key and its colon, where its value begins."""
    if at >= end:
        return CUT
    if text[at] != c'"':
        return ODD
    at = string(text, at, end, token)
    if at < 0:
        return at
    if token.is_escaped:
        return ODD
    return symbol(text, at, end, c":")


cdef inline bint reads(Text text, const Token *token, const char *wanted, Py_ssize_t length) noexcept nogil:
    return token.end - token.begin == length and memcmp(text + token.begin, wanted, length) == 0
