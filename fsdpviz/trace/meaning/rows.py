"""One recording's events as arrays, sorted by lane, start and −end, with texts as codes.

Whatever depends on a name is decided once a distinct name and looked up by code, never once a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from ..kineto.arguments import NO_NUMBER, Message, Tensors
from ..kineto.columns import Coded
from ..kineto.reader import Recording
from .classify import DEVICE_CATEGORIES, is_call
from .contested import Calls, chosen

# how every name begins that a pattern is asked about: most names are looked at once, not once a pattern
MARKED = re.compile(
    r"FSDP::|fsdpviz::|FullySharded|Distributed|Optimizer\.|ProfilerStep|##|autograd::engine|enumerate\(|_?c10d|symm_mem::"
    r"|vllm::|gloo:|nccl:|(?i:train|step|iter)"
)
_FEW = 500  # rows that are sorted sooner than prepared for sorting
_ON_DEVICE = DEVICE_CATEGORIES | {"gpu_user_annotation", "cuda_sync"}


class Rows:
    """Arrays by row; ``lane`` numbers the pairs of process and thread in the order in which the file has them."""

    def __init__(self, recording: Recording) -> None:
        codes, numbers = recording.codes, recording.numbers
        lane, first = _lanes(codes["process"], codes["thread"])
        self.processes = [codes["process"].values[code] for code in codes["process"].codes[first]]  # by lane
        self.threads = [codes["thread"].values[code] for code in codes["thread"].codes[first]]
        start_ns, duration_ns = numbers["start_ns"], numbers["duration_ns"]
        order = _order(lane, start_ns, duration_ns)
        self.lane = lane[order]
        self.start_ns = start_ns[order]
        self.duration_ns = duration_ns[order]
        self.end_ns = self.start_ns + self.duration_ns
        self.correlation = numbers["correlation"][order]
        self.bytes = np.maximum(numbers["bytes"][order], -1)  # −1 where there are none
        self.name = Coded(codes["name"].codes[order], codes["name"].values)
        self.category = Coded(codes["category"].codes[order], codes["category"].values)
        self.is_device = self.in_categories(_ON_DEVICE)
        self.runs_on_device = self.in_categories(DEVICE_CATEGORIES)
        self.tensors: dict[int, Tensors] = {}
        self.messages: dict[int, Message] = {}
        self.differentiated = np.zeros(len(order), bool)
        if recording.differentiated is not None and len(recording.differentiated):
            self.differentiated[recording.differentiated] = True
            self.differentiated = self.differentiated[order]
        if recording.tensors or recording.messages:
            row_of = np.empty(len(order), np.int64)
            row_of[order] = np.arange(len(order))
            self.tensors = {int(row_of[old]): tensors for old, tensors in recording.tensors.items()}
            self.messages = {int(row_of[old]): message for old, message in recording.messages.items()}

    def __len__(self) -> int:
        return len(self.lane)

    def name_of(self, row: int) -> str:
        return self.name.values[self.name.codes[row]]

    def category_of(self, row: int) -> str:
        return self.category.values[self.category.codes[row]]

    def in_categories(self, wanted: Iterable[str] | Callable[[str], bool]) -> np.ndarray:
        """Which rows have one of these categories, or one that the function says yes to (bool)."""
        decides = wanted if callable(wanted) else frozenset(wanted).__contains__
        return self.category.where(decides)

    def named(self, pattern: re.Pattern[str]) -> np.ndarray:
        """Which rows have a name that MARKED and the pattern match from its start (bool)."""
        codes = [code for code in self._marked if pattern.match(self.name.values[code])]
        if not codes:
            return np.zeros(len(self), bool)
        is_named = np.zeros(len(self.name.values), bool)
        is_named[codes] = True
        return is_named[self.name.codes]

    @cached_property
    def _marked(self) -> list[int]:
        return [code for code, name in enumerate(self.name.values) if MARKED.match(name)]

    def named_among(self, decides: Callable[[str], bool], among: np.ndarray) -> np.ndarray:
        """Which of the rows ``among`` all have a name that the function says yes to (bool)."""
        is_asked = np.zeros(len(self.name.values), bool)
        is_asked[self.name.codes[among]] = True
        for code in is_asked.nonzero()[0].tolist():
            is_asked[code] = decides(self.name.values[code])
        return is_asked[self.name.codes] & among

    @cached_property
    def pairs(self) -> tuple[list[tuple[str, str]], np.ndarray]:
        """The distinct pairs of category and name, and for each row which one it is."""
        categories, names = self.category.values, self.name.values
        pair = self.category.codes.astype(np.int64) * len(names) + self.name.codes
        distinct, which = _distinct(pair, len(categories) * len(names))
        return [(categories[code // len(names)], names[code % len(names)]) for code in distinct.tolist()], which

    def decided(self, decides: Callable[[str, str], bool]) -> np.ndarray:
        """Which rows have a category and a name that the function says yes to (bool)."""
        pairs, which = self.pairs
        return np.fromiter((decides(*pair) for pair in pairs), bool, len(pairs))[which]

    def launches(self) -> tuple[np.ndarray, np.ndarray]:
        """By row, the row of the call that launched a device span: itself for host rows, −1 where the file has
        none. And the device spans whose id calls of several processes have: see ``contested``.

        Of several calls of one process with one id the first is taken: the driver's is inside the runtime's.
        """
        found = np.arange(len(self))
        device = self.is_device.nonzero()[0]
        contested = device[:0]
        if not len(device):
            return found, contested
        calls = (self.in_categories(is_call) & (self.correlation != NO_NUMBER)).nonzero()[0]
        found[device] = -1
        if self._are_of_one_process(calls):
            found[device] = self._first_calls(calls, device)
        elif len(calls):
            of_process = self._process[self.lane]
            known = Calls(calls, self.correlation[calls], of_process[calls], self.start_ns[calls])
            found[device], is_contested = chosen(
                known, self.correlation[device], self.start_ns[device], of_process[device]
            )
            contested = device[is_contested]
        return found, contested

    def _first_calls(self, calls: np.ndarray, device: np.ndarray) -> np.ndarray:
        """Of each device span the first of the calls that has its id, −1 where none has."""
        calls = calls[np.argsort(self.correlation[calls], kind="stable")]
        ids = self.correlation[calls]
        at = np.minimum(np.searchsorted(ids, self.correlation[device], "left"), len(ids) - 1)
        return np.where(ids[at] == self.correlation[device], calls[at], -1)

    def _are_of_one_process(self, rows: np.ndarray) -> bool:
        """As in most files; False where there are no rows."""
        has_any = np.zeros(len(self.processes), bool)
        has_any[self.lane[rows]] = True
        return len({self.processes[lane] for lane in has_any.nonzero()[0].tolist()}) == 1

    @cached_property
    def _process(self) -> np.ndarray:
        """By lane, which process it is of."""
        number = {process: at for at, process in enumerate(dict.fromkeys(self.processes))}
        return np.array([number[process] for process in self.processes])


def _distinct(values: np.ndarray, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values, rising, and for each value which one it is; without sorting where they are small."""
    if bound > max(1 << 16, 4 * len(values)):
        return np.unique(values, return_inverse=True)
    is_there = np.zeros(bound, bool)
    is_there[values] = True
    distinct = is_there.nonzero()[0]
    place = np.zeros(bound, np.int64)
    place[distinct] = np.arange(len(distinct))
    return distinct, place[values]


def _lanes(process: Coded, thread: Coded) -> tuple[np.ndarray, np.ndarray]:
    """Each event's lane (int32), and the first event of each lane."""
    pair = process.codes.astype(np.int64) * len(thread.values) + thread.codes
    distinct, which = _distinct(pair, len(process.values) * len(thread.values))
    first = np.full(len(distinct), len(pair), np.int64)
    first[which[::-1]] = np.arange(len(pair))[::-1]  # the last write is the first event
    by_appearance = np.argsort(first)
    number = np.empty(len(distinct), np.int32)
    number[by_appearance] = np.arange(len(distinct), dtype=np.int32)
    return number[which], first[by_appearance]


def _order(lane: np.ndarray, start_ns: np.ndarray, duration_ns: np.ndarray) -> np.ndarray:
    """The rows by lane, start, −end and place in the file."""
    if len(lane) >= _FEW:
        since = start_ns - start_ns.min()
        lane_bits, time_bits = int(lane.max()).bit_length(), int(since.max()).bit_length()
        if lane_bits + time_bits <= 62 and since.min() >= 0:
            return _order_by_key((lane.astype(np.int64) << time_bits) | since, duration_ns)
    return np.lexsort((-duration_ns, start_ns, lane))


def _order_by_key(key: np.ndarray, duration_ns: np.ndarray) -> np.ndarray:
    """The same with lane and start in one number, which is sorted in a fraction of the time."""
    order = np.argsort(key, kind="stable")
    key = key[order]
    is_tied = np.zeros(len(key), bool)
    np.equal(key[1:], key[:-1], out=is_tied[1:])
    is_tied[:-1] |= is_tied[1:]
    tied = is_tied.nonzero()[0]
    order[tied] = order[tied][np.lexsort((-duration_ns[order[tied]], key[tied]))]
    return order
