"""What the compiled scanner makes of a block of a file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from .arguments import NO_ARGS, Args

_ARGS_DECODER = msgspec.json.Decoder(list[Args])


@dataclass(frozen=True, eq=False)
class Scanned:
    """Events of one block. Spans are rows (R of them, in the order of the file); of the others some are kept whole."""

    text: bytes
    numbers: np.ndarray  # (4, R) int64: start and duration in ns, correlation, bytes; NO_NUMBER where there is none
    codes: np.ndarray  # (4, R) int32: category, name, process, thread
    places: np.ndarray  # (2, R) int64: where the args begin and end in ``text``; 0 and 0 where there are none
    flags: np.ndarray  # (3, R) bool: recorded for autograd; has a collective's arguments; still open at the end
    others: list[bytes]  # metadata, counters, instants: each event's own text
    flows: int
    end: int  # behind the last of these events
    is_odd: bool  # what follows is no ordinary event; otherwise the block ends, or the list of events does

    @classmethod
    def nothing(cls) -> Scanned:
        numbers, codes = np.empty((4, 0), np.int64), np.empty((4, 0), np.int32)
        return cls(b"", numbers, codes, np.empty((2, 0), np.int64), np.empty((3, 0), bool), [], 0, 0, False)

    def args(self, rows: Iterable[int]) -> dict[int, Args]:
        """The arguments of some spans."""
        places = [(int(row), *self.places[:, row].tolist()) for row in rows]
        found = {row: NO_ARGS for row, _, _ in places}
        given = [(row, self.text[begin:end]) for row, begin, end in places if end]
        decoded = _ARGS_DECODER.decode(b"[" + b",".join(text for _, text in given) + b"]")
        return found | {row: args for (row, _), args in zip(given, decoded, strict=True)}
