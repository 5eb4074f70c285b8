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
import polars as pl

_REGULAR = r'^"?(?P<sign>-?)(?P<whole>[0-3]?\d{1,15})(?:\.(?P<fraction>\d{1,3}))?"?$'
_LIMIT = 2**62  # leaves room to add a base time and a duration


def microseconds_to_ns(texts: Sequence[bytes | msgspec.Raw]) -> tuple[np.ndarray, np.ndarray]:
    """Integer nanoseconds (int64) and whether each text was a number at all (bool; its time is then 0).

    More than three decimals are rounded half to even.
    """
    if not texts:
        return np.zeros(0, np.int64), np.zeros(0, bool)
    lines = b"\n".join(texts).decode("utf-8", "replace").split("\n")
    if len(lines) != len(texts):  # some value spans lines: it is no number, and the others are read one by one
        lines = [bytes(text).decode("utf-8", "replace").replace("\n", " ") for text in texts]
    series = pl.Series("text", lines)
    parts = series.str.extract_groups(_REGULAR).struct.unnest()
    parts = parts.select(
        ns=pl.when(pl.col("sign") == "-").then(-1).otherwise(1)
        * (pl.col("whole").cast(pl.Int64) * 1000 + pl.col("fraction").str.pad_end(3, "0").cast(pl.Int64).fill_null(0))
    )
    ns = parts["ns"]
    irregular = np.flatnonzero(ns.is_null().to_numpy())
    values = ns.fill_null(0).to_numpy().astype(np.int64, copy=True)
    valid = np.ones(len(lines), bool)
    for index in irregular:
        exact = _exact(lines[index])
        values[index], valid[index] = (0, False) if exact is None else (exact, True)
    return values, valid


def _exact(text: str) -> int | None:
    try:
        ns = (Decimal(text.strip().strip('"')) * 1000).to_integral_value(ROUND_HALF_EVEN)
        return int(ns) if abs(ns) < _LIMIT else None
    except ArithmeticError:  # decimal's InvalidOperation for no number, its Overflow for 1e9999999
        return None
