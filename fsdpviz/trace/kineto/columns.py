"""Events gathered into columns, block by block: texts as codes into a list of distinct ones, times as integers.

A block's objects live only until its columns are made, so that memory grows with the table and not with the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from ..table import Tally, taken
from .arguments import NO_ARGS, NO_NUMBER, Args, Message, Tensors, integer_of, message_of, tensors_of, text_of
from .event import FLOWS, TAG_OF_OTHERS, Metadata, Other, Span
from .nanoseconds import microseconds_to_ns
from .scanned import Scanned

_CATEGORIES_OF_2020 = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
# operators whose tensor sizes are needed: they say what a collective carries
_CARRIES_TENSORS = re.compile(r"^(?:c10d|_?c10d_functional|gloo|nccl|fsdpviz|symm_mem|vllm)::?")
_PROFILER_MARKS = ("Iteration Start", "Record Window End")  # two instants that every file has


@dataclass(frozen=True, eq=False)
class Coded:
    """A column of texts: ``codes`` (int32) into ``values``, the distinct texts in order of appearance."""

    codes: np.ndarray
    values: list[str]

    @classmethod
    def of(cls, column: pl.Series) -> Coded:
        """The same of a column without nulls."""
        values = column.unique(maintain_order=True)
        return cls(column.cast(pl.Enum(values)).to_physical().cast(pl.Int32).to_numpy(), values.to_list())

    def where(self, decides: Callable[[str], bool]) -> np.ndarray:
        """Which rows have a text that the function says yes to (bool); it is asked once a distinct text."""
        return np.fromiter(map(decides, self.values), bool, len(self.values))[self.codes]

    def only(self, rows: np.ndarray) -> Coded:
        """The same of these rows, without the texts that they do not have."""
        codes, first, which = np.unique(self.codes[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return Coded(place[which], [self.values[code] for code in codes[order].tolist()])

    def series(self) -> pl.Series:
        return taken(pl.Series(self.values, dtype=pl.String), self.codes)


class Codes(dict[Any, int]):
    """The code of each value that was looked up, by what it reads as; "" for an absent one."""

    def __init__(self, spelled: Callable[[str], str] = str) -> None:
        super().__init__()
        self.by_text: dict[str, int] = {}
        self.texts: list[str] = []  # by code
        self._spelled = spelled

    def __missing__(self, value: Any) -> int:
        text = self._spelled(text_of(value) or "")
        code = self[value] = self.by_text.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        return code

    def encode(self, values: Sequence[Any]) -> np.ndarray:
        try:
            return np.fromiter(map(self.__getitem__, values), np.int32, len(values))
        except TypeError:  # a list or an object where a name should be
            return np.fromiter((self[text_of(value)] for value in values), np.int32, len(values))


_INTEGERS = ("start_ns", "duration_ns", "correlation", "bytes")


class ColumnBuilder:
    """``add`` takes the events of a file one list at a time; the rest is what they come to."""

    def __init__(self, tally: Tally) -> None:
        self.has_any_event = False
        self.tensors: dict[int, Tensors] = {}
        self.messages: dict[int, Message] = {}
        self.thread_names: dict[tuple[str, str], str] = {}
        self.process_names: dict[str, str] = {}
        self.process_labels: dict[str, str] = {}
        self._tally = tally
        self._rows = 0
        self._codes = {
            "category": Codes(lambda text: _CATEGORIES_OF_2020.get(text, text)),
            "name": Codes(),
            "process": Codes(),
            "thread": Codes(),
        }
        self._pieces: dict[str, list[np.ndarray]] = {column: [] for column in (*self._codes, *_INTEGERS)}
        self._differentiated: list[np.ndarray] = []
        self._left_out: Counter[str] = Counter()
        self._carries = bytearray()  # by code of a name

    @property
    def text_codes(self) -> list[Codes]:
        """The codes of category, name, process and thread."""
        return [*self._codes.values()]

    def add(self, events: Sequence[Any] | Scanned) -> None:
        if isinstance(events, Scanned):
            self._add_scanned(events)
            return
        spans = [event for event in events if type(event) is Span]
        if len(spans) < len(events):
            self._look_at_others(events)
        if spans:
            self.has_any_event = True
            self._add_spans(spans)

    def coded(self) -> dict[str, Coded]:
        """Category, name, process and thread."""
        return {
            column: Coded(_joined(self._pieces.pop(column), np.int32), codes.texts)
            for column, codes in self._codes.items()
        }

    def integers(self) -> dict[str, np.ndarray]:
        """Start and duration, correlation and bytes, NO_NUMBER where there is none."""
        return {column: _joined(self._pieces.pop(column), np.int64) for column in _INTEGERS}

    def note_what_is_left_out(self) -> None:
        if self._left_out:
            most = self._left_out.most_common(3)
            example = ", ".join(f"{count} of phase {phase!r}" for phase, count in most)
            what = "instants, counters and other events without a duration, left out"
            self._tally.add(what, self._left_out.total(), example)

    # -- events without a duration

    def _look_at_others(self, events: Sequence[Any]) -> None:
        for kind in dict.fromkeys(type(event) for event in events if type(event) is not Span):
            if kind in FLOWS:
                self.has_any_event = True
                continue
            of_kind = [event for event in events if type(event) is kind]
            if kind is Metadata:
                self.has_any_event = True
                self._name_threads_and_processes(of_kind)
            else:
                self._count(kind, of_kind)

    def _name_threads_and_processes(self, events: Iterable[Metadata]) -> None:
        """A thread is named twice when it was renamed: the first name is the one it works under. A script that merges
        files names a process anew, behind the profiler's own name: the last name is taken.
        """
        for event in events:
            if event.args is None:
                continue
            name, labels, process = event.args.name, event.args.labels, text_of(event.pid) or ""
            if event.name == "thread_name" and isinstance(name, str):
                self.thread_names.setdefault((process, text_of(event.tid) or ""), name.strip())
            elif event.name == "process_name" and isinstance(name, str):
                self.process_names[process] = name.strip()
            elif event.name == "process_labels" and isinstance(labels, str):
                self.process_labels[process] = labels.strip()

    def _count(self, kind: type, events: Sequence[Any]) -> None:
        for event in events:
            phase = event.ph if kind is Other else TAG_OF_OTHERS[kind]
            self.has_any_event |= isinstance(phase, str)
            if not str(event.name).startswith(_PROFILER_MARKS):
                self._left_out[str(phase)] += 1

    # -- spans

    def _add_scanned(self, scanned: Scanned) -> None:
        self.has_any_event |= scanned.flows > 0
        rows = scanned.codes.shape[1]
        if not rows:
            return
        self.has_any_event = True
        for columns, values in ((_INTEGERS, scanned.numbers), (self._codes, scanned.codes)):
            for column, piece in zip(columns, values, strict=True):
                self._pieces[column].append(piece)
        is_differentiated, has_message, is_open = scanned.flags
        self._note_open(scanned.codes[1], is_open.nonzero()[0])
        self._differentiated.append(is_differentiated.nonzero()[0] + self._rows)
        with_message, with_tensors = has_message.nonzero()[0], self._carried(scanned.codes[1]).nonzero()[0]
        if len(with_message) or len(with_tensors):
            self._keep(with_message, with_tensors, scanned.args(np.union1d(with_message, with_tensors)))
        self._rows += rows

    def _keep(self, with_message: np.ndarray, with_tensors: np.ndarray, args: Mapping[int, Args]) -> None:
        """Keeps what the arguments of these rows say; both count from the first new row."""
        for row in with_message.tolist():
            if message := message_of(args[row]):
                self.messages[self._rows + row] = message
        for row in with_tensors.tolist():
            if tensors := tensors_of(args[row]):
                self.tensors[self._rows + row] = tensors

    def _add_spans(self, spans: list[Span]) -> None:
        start_ns, has_start = microseconds_to_ns([event.ts for event in spans])
        if not has_start.all():
            lost = (~has_start).nonzero()[0]
            self._tally.add("spans without a start time, left out", len(lost), str(spans[lost[0]].name)[:60])
            spans = [spans[index] for index in has_start.nonzero()[0]]
            start_ns = start_ns[has_start]
        pieces = self._pieces
        pieces["start_ns"].append(start_ns)
        pieces["duration_ns"].append(self._durations(spans))
        for column, values in (
            ("category", [event.cat for event in spans]),
            ("name", [event.name for event in spans]),
            ("process", [event.pid for event in spans]),
            ("thread", [event.tid for event in spans]),
        ):
            pieces[column].append(self._codes[column].encode(values))
        args: list[Args] = [event.args or NO_ARGS for event in spans]
        pieces["correlation"].append(_integers([arg.correlation for arg in args]))
        # few have the others; their default is known by identity
        copies = [index for index, arg in enumerate(args) if arg.nbytes is not NO_NUMBER]
        sizes = np.full(len(args), NO_NUMBER, np.int64)
        sizes[copies] = _integers([args[index].nbytes for index in copies])
        pieces["bytes"].append(sizes)
        self._keep_differentiated([arg.forward_thread for arg in args])
        is_open = [index for index, arg in enumerate(args) if arg.finished is False]
        self._note_open(pieces["name"][-1], np.array(is_open, np.int64))
        with_message = [i for i, arg in enumerate(args) if arg.group is not None or arg.collective is not None]
        with_tensors = self._carried(pieces["name"][-1]).nonzero()[0]
        self._keep(np.array(with_message, np.int64), with_tensors, dict(enumerate(args)))
        self._rows += len(spans)

    def _note_open(self, names: np.ndarray, rows: np.ndarray) -> None:
        if len(rows):
            name = self._codes["name"].texts[names[rows[0]]]
            self._tally.add("ranges still open when the profiler stopped, which is their end", len(rows), name[:60])

    def _keep_differentiated(self, forward_threads: list[Any]) -> None:
        """An operator that autograd recorded has a sequence number and forward thread 0; its backward has a thread."""
        if 0 in forward_threads:
            rows = [
                row for row, thread in enumerate(forward_threads, self._rows) if type(thread) is int and thread == 0
            ]
            self._differentiated.append(np.array(rows, np.int64))

    def differentiated(self) -> np.ndarray:
        """Rows of operators that autograd recorded: forward's, and those that a checkpoint runs again."""
        return _joined(self._differentiated, np.int64)

    def _durations(self, spans: Sequence[Span]) -> np.ndarray:
        duration_ns, is_known = microseconds_to_ns([event.dur for event in spans])
        for what, wrong in (
            ("spans without a duration, taken as 0", ~is_known),
            ("negative durations, taken as 0", duration_ns < 0),
        ):
            if wrong.any():
                self._tally.add(what, int(wrong.sum()), str(spans[int(np.argmax(wrong))].name)[:60])
        return np.maximum(duration_ns, 0)

    def _carried(self, names: np.ndarray) -> np.ndarray:
        """Which of these rows have tensors that say what a collective carries (bool)."""
        texts, known = self._codes["name"].texts, len(self._carries)
        if known < len(texts):
            self._carries.extend(_CARRIES_TENSORS.match(name) is not None for name in texts[known:])
        return np.frombuffer(self._carries, bool)[names]


def _integers(values: list[Any]) -> np.ndarray:
    if set(map(type, values)) == {int}:
        try:
            return np.fromiter(values, np.int64, len(values))
        except OverflowError:
            pass
    found = (integer_of(value) for value in values)
    return np.fromiter((NO_NUMBER if number is None else number for number in found), np.int64, len(values))


def _joined(pieces: list[np.ndarray], dtype: Any) -> np.ndarray:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)
