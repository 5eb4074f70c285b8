"""Whether all ranks issue the same collectives: a rank that goes another way is named, not waited for.

[Note: how a diverging rank is found]
Every rank must issue the same collectives in the same order. A rank that skips a unit, or calls modules in another
order, makes the others wait for ever, or, where sizes are equal, mixes up their data without a word. So each rank
keeps a running hash of what it has issued (under a microsecond a collective, no message). Once a second a thread tells
the job's store how far it got and compares with rank 0: at the last collective that both have issued, the hashes must
be equal. Where they are not, all ranks lay open what they issued last; as soon as all have come as far as the first
difference, or after a few seconds, one of them writes the verdict down: which rank issued what, at which collective.
Every rank raises that one. A step itself sends nothing and waits for nothing.

A rank that has only not come yet differs from none: that is logged, again and again, and never raised.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from ...base.errors import FsdpvizError

_LOG = logging.getLogger(__name__)
_NUMBERS = itertools.count()  # of the models of this process, in the order that all ranks make them
_REMEMBERED = 1 << 16  # hashes that a rank can look back on
_TOLD = 256  # of them, told to the others: more than ranks can be apart while they wait for each other
_LAID_OPEN = 2000  # entries
_ANSWER_S = 10.0  # so long a verdict waits for ranks that have not come as far as the difference
_MASK = (1 << 64) - 1


class Record:
    """What one rank has issued: a count, a hash for each count, and the last entries in words."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[int, str]] = deque(maxlen=_LAID_OPEN)
        self._hashes = array("Q", bytes(8 * _REMEMBERED))
        self._hash = 0
        self._of_text: dict[str, int] = {}

    def note(self, text: str) -> None:
        number = self._of_text.get(text)
        if number is None:
            number = self._of_text[text] = zlib.crc32(text.encode()) + 1
        self._hash = (self._hash * 0x100000001B3 + number) & _MASK
        self.last.append((self.count, text))
        self._hashes[self.count % _REMEMBERED] = self._hash
        self.count += 1  # last: who reads from another thread sees only what is whole

    def told(self) -> dict[str, object]:
        """The count, and the hashes after the last collectives, the oldest first."""
        count = self.count
        first = max(0, count - _TOLD)
        return {"count": count, "hashes": [self._hashes[at % _REMEMBERED] for at in range(first, count)]}

    def differs(self, told: Mapping[str, object]) -> bool:
        """Whether another rank has issued something else, as far as both have come. False where nobody can tell."""
        count, hashes = told["count"], told["hashes"]
        assert isinstance(count, int) and isinstance(hashes, list)
        mine = self.count
        at = min(count, mine) - 1
        first = count - len(hashes)
        if at < first or at < mine - _REMEMBERED or at < 0:
            return False
        return hashes[at - first] != self._hashes[at % _REMEMBERED]

    def laid_open(self) -> dict[str, object]:
        last = list(self.last)
        return {"first": last[0][0] if last else 0, "entries": [text for _, text in last]}


def verdict(laid_open: Mapping[int, Mapping[str, object]], world_size: int) -> tuple[str, bool]:
    """The first collective that not all ranks have issued alike, and who issued what; pure.

    Ranks that have not come that far, or have laid nothing open, are named as such. The second value is whether there
    are none of those, so that waiting for them would change nothing.
    """
    firsts = {rank: int(str(each["first"])) for rank, each in laid_open.items()}
    entries: dict[int, Sequence[str]] = {rank: each["entries"] for rank, each in laid_open.items()}  # type: ignore[misc]
    begin = max(firsts.values())
    end = max(first + len(entries[rank]) for rank, first in firsts.items())
    for number in range(begin, end):
        issued = {
            rank: entries[rank][number - first] for rank, first in firsts.items() if number < first + len(entries[rank])
        }
        if len(set(issued.values())) > 1:
            behind = [rank for rank in range(world_size) if rank not in issued]
            parts = _who_issued_what(issued) + [f"{_named(behind)} did not come so far"] * bool(behind)
            return f"ranks have diverged at collective {number + 1}: {'; '.join(parts)}", not behind
    everyone = len(laid_open) == world_size
    return f"ranks have diverged before collective {begin + 1}, the oldest that is remembered", everyone


def _who_issued_what(issued: Mapping[int, str]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(issued.items()):
        by_text.setdefault(text, []).append(rank)
    parts = sorted(by_text.items(), key=lambda item: (len(item[1]), item[1]))  # the odd one first
    return [f"{_named(ranks)} issued {text}" for text, ranks in parts]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Agreement:
    """One rank's record and the thread that compares it. Made by all ranks in one order; not collective otherwise."""

    def __init__(self, rank: int, world_size: int, *, period_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.record = Record()
        self.verdict: FsdpvizError | None = None
        self._rank, self._world_size = rank, world_size
        self._period_s, self._patience_s = period_s, patience_s
        self._ended = threading.Event()
        self._since, self._count, self._warned_at = time.monotonic(), 0, 0.0
        self.when_diverged: Callable[[FsdpvizError], None] = _nothing  # frees who waits for a collective
        prefix = f"fsdpviz/agreement/{next(_NUMBERS)}"
        if world_size > 1:
            store: Any = distributed_c10d._get_default_store()
            self._store = distributed_c10d.PrefixStore(prefix, store.clone())  # stores are not for two threads
            self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
            self._thread.start()

    def note(self, text: str) -> None:
        """A collective that all ranks must issue, in words; raises the verdict once there is one."""
        self.record.note(text)
        self.check()

    def check(self) -> None:
        """Raises FsdpvizError, on every rank the same, once ranks are known to have diverged."""
        if self.verdict is not None:
            raise FsdpvizError(str(self.verdict))

    def close(self) -> None:
        self._ended.set()
        if self._world_size > 1 and self._thread is not threading.current_thread():
            # a store that does not answer holds up nobody for long; inside it when the interpreter ends, the thread
            # would abort the process
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._period_s) and self.verdict is None:
                self._look()
        except (dist.DistError, RuntimeError) as error:  # the store has gone, and with it the job
            _LOG.debug("rank %d: no longer compares with the others: %s", self._rank, error)

    def _look(self) -> None:
        self._store.set(f"told/{self._rank}", json.dumps(self.record.told()))
        if self._store.check(["told/0"]) and self.record.differs(json.loads(self._store.get("told/0"))):
            self._store.set("alarm", str(self._rank))
        if self._store.check(["alarm"]):
            self._judge()
        self._warn()

    def _judge(self) -> None:
        """Lays open what this rank has issued until one rank, the first that can tell, has written the verdict down."""
        keys = {rank: f"open/{rank}" for rank in range(self._world_size)}
        deadline = time.monotonic() + _ANSWER_S
        while not self._store.check(["verdict"]):
            self._store.set(keys[self._rank], json.dumps(self.record.laid_open()))
            opened = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
            said, is_whole = verdict(opened, self._world_size)
            if is_whole or time.monotonic() > deadline:
                self._store.compare_set("verdict", "", said)
            else:
                time.sleep(0.05)
        self.verdict = FsdpvizError(
            f"every rank must call the same modules in the same order; {self._store.get('verdict').decode()}. Look for "
            "a condition that differs between ranks. The model cannot be used any more; start the job anew "
            f"(rank {self._rank})"
        )
        self.when_diverged(self.verdict)

    def _warn(self) -> None:
        """Logs, now and then, whom this rank is waiting for."""
        now, count = time.monotonic(), self.record.count
        if count != self._count:
            self._since, self._count = now, count
        waited_s = now - self._since
        if now - max(self._warned_at, self._since) < self._patience_s:
            return
        self._warned_at = now
        behind = []
        for rank in range(self._world_size):
            key = f"told/{rank}"
            told = json.loads(self._store.get(key))["count"] if self._store.check([key]) else 0
            behind += [f"rank {rank} has issued {told}"] if told < count else []
        if behind:
            whom = ", ".join(behind)
            _LOG.warning("rank %d has issued %d collectives, none for %.0f s; %s", self._rank, count, waited_s, whom)


def _nothing(_error: FsdpvizError) -> None:
    pass
