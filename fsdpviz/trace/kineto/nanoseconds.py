"""The decimal text of a time, read into integer nanoseconds without passing through a float.

Kineto writes microseconds: whole ones, or with three decimals, or whatever a tool made of them afterwards.
A double holds microseconds since 1970 to 0.25 µs only, so that a text such as ``1790862152712198.680`` must
never become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal

import msgspec
import numpy as np

_LIMIT = 2**61  # ns; leaves room to add a base time and a duration
_SCALES = np.array([1000, 100, 10, 1], np.int64)  # ns of the last digit, by the number of decimals
_NEWLINE, _POINT, _MINUS, _ZERO = b"\n.-0"
_WIDEST = 20  # characters of a line with its point and end: 63 bits hold whatever 18 digits say
_POWERS = 10 ** np.arange(17, -1, -1, dtype=np.int64)
_FEW = 16  # texts for which nothing is worth trying


def microseconds_to_ns(texts: Sequence[bytes | msgspec.Raw]) -> tuple[np.ndarray, np.ndarray]:
    """Integer nanoseconds (int64) and whether each text was a number at all (bool; its time is then 0).

    More than three decimals are rounded half to even.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    lines = b"\n".join(texts)
    if (values := _plain(lines, len(texts))) is not None:
        return values, np.ones(len(texts), bool)
    return _one_by_one(lines, texts)


def _plain(lines: bytes, count: int) -> np.ndarray | None:
    """The times where all are digits with at most three decimals; None where any is not.

    Without its point a text is a whole number of the unit that its last decimal stands for.
    """
    characters = np.frombuffer(lines, np.uint8)
    if (values := _of_one_width(characters, count)) is not None:
        return values
    if lines.translate(None, b"0123456789.\n-"):
        return None
    ends = np.append((characters == _NEWLINE).nonzero()[0], len(lines))
    starts = np.append(0, ends[:-1] + 1)
    points = (characters == _POINT).nonzero()[0]
    if len(ends) == count and b"-" not in lines and (values := _of_one_form(lines, starts, ends, points)) is not None:
        return values
    signs = (characters == _MINUS).nonzero()[0]
    line_of = np.searchsorted(ends, points)
    decimals = np.zeros(count, np.int64)
    decimals[line_of] = ends[line_of] - points - 1
    has_sign = np.zeros(count, bool)
    has_sign[np.searchsorted(ends, signs)] = True
    digits = ends - starts - has_sign
    digits[line_of] -= 1
    is_plain = (
        len(ends) == count
        and (len(points) < 2 or bool((np.diff(line_of) > 0).all()))  # one point a line
        and len(signs) == int(has_sign.sum())
        and bool((characters[starts[has_sign]] == _MINUS).all())
        and bool((decimals[line_of] > 0).all())
        and bool((digits > decimals).all())
        and int(decimals.max()) <= 3
        and int((digits - decimals).max()) <= 16
    )
    if not is_plain:
        return None
    # at most 19 digits, of which a larger number than 63 bits hold is read as the largest
    values = np.fromstring(lines.replace(b".", b""), np.int64, sep="\n")
    scale = _SCALES[decimals]
    return values * scale if bool((np.abs(values) <= _LIMIT // scale).all()) else None


def _of_one_width(characters: np.ndarray, count: int) -> np.ndarray | None:
    """The times where all texts are as long as the first, with the point at the same place, as starts mostly are;
    None where they are not.
    """
    width, more = divmod(len(characters) + 1, count)
    if more or width > _WIDEST or count < _FEW:
        return None
    table = np.full((count, width), _NEWLINE, np.uint8)
    table.reshape(-1)[:-1] = characters
    point = (table[0] == _POINT).nonzero()[0]
    place = int(point[0]) if len(point) else width - 1
    decimals = max(0, width - 2 - place)
    columns = table.T
    is_so = (columns[-1] == _NEWLINE).all() and (columns[place] == (_POINT if len(point) else _NEWLINE)).all()
    if not is_so or place == 0 or decimals > 3 or (len(point) and not decimals):
        return None
    digits = np.delete(columns[:-1], point, axis=0) - _ZERO  # what stands before "0" becomes large
    if not 1 <= len(digits) <= len(_POWERS) or digits.max() > 9:
        return None
    values, scale = _POWERS[-len(digits) :] @ digits, _SCALES[decimals]
    return values * scale if values.max() <= _LIMIT // scale else None


def _of_one_form(lines: bytes, starts: np.ndarray, ends: np.ndarray, points: np.ndarray) -> np.ndarray | None:
    """The times where none has a sign, and all have a point or none has; None where they differ."""
    decimals, whole_ends = 0, ends
    if len(points):
        if len(points) != len(ends):
            return None
        decimals, whole_ends = ends - points - 1, points
        if decimals.min() < 1 or decimals.max() > 3:
            return None
    whole = whole_ends - starts
    if whole.min() < 1 or whole.max() > 15:  # 10**18 ns are below _LIMIT
        return None
    return np.fromstring(lines.replace(b".", b""), np.int64, sep="\n") * _SCALES[decimals]


def _one_by_one(lines: bytes, texts: Sequence[bytes | msgspec.Raw]) -> tuple[np.ndarray, np.ndarray]:
    split = lines.decode("utf-8", "replace").split("\n")
    if len(split) != len(texts):  # some value spans lines: it is no number
        split = [bytes(text).decode("utf-8", "replace").replace("\n", " ") for text in texts]
    values = np.zeros(len(texts), np.int64)
    valid = np.ones(len(texts), bool)
    for index, text in enumerate(split):
        exact = _exact(text)
        values[index], valid[index] = (0, False) if exact is None else (exact, True)
    return values, valid


def _exact(text: str) -> int | None:
    try:
        ns = (Decimal(text.strip().strip('"')) * 1000).to_integral_value(ROUND_HALF_EVEN)
        return int(ns) if abs(ns) < _LIMIT else None
    except ArithmeticError:  # decimal's InvalidOperation for no number, its Overflow for 1e9999999
        return None
