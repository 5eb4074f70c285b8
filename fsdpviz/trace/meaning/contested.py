"""Which of several processes' calls launched a device span, where one file has the events of them all.

Correlation ids are a process's own: calls of two processes may have one id, and a device span does not say whose it
is. A rank works on a device of its own, as a rule; so a device's spans are those of the process that explains all of
them: each that any process explains begins after that one's call. Of several such processes it is the one whose calls
are nearest. Where none explains all, the processes share the device, and each span is the last call's before it. A
span whose id that process has no call of is another's call's with the id: no process then explains it.

[Note: no table of processes and spans] A file may have many of both, and most processes have no call with a span's id.
So calls stay a list, sorted by id and process, and memory is that of the calls and the spans.
"""

from __future__ import annotations

import numpy as np


class Calls:
    """Of each process the first call with each id, sorted by id and process. ``group`` numbers the ids, rising;
    the calls of one are from ``first[group]`` to ``first[group + 1]``.
    """

    def __init__(self, rows: np.ndarray, ids: np.ndarray, process: np.ndarray, started: np.ndarray) -> None:
        """From calls in the order of their rows."""
        order = np.lexsort((process, ids))
        ids, process = ids[order], process[order]
        is_new_id = np.append(True, ids[1:] != ids[:-1])
        is_first = is_new_id.copy()
        is_first[1:] |= process[1:] != process[:-1]
        self.rows, self.started = rows[order][is_first], started[order][is_first]
        self.ids, self.process = ids[is_first], process[is_first]
        self.group = np.cumsum(is_new_id)[is_first] - 1
        self.first = np.append(is_new_id[is_first].nonzero()[0], len(self.ids))

    def groups_of(self, ids: np.ndarray) -> np.ndarray:
        """Which group each id's calls are, −1 where it has none."""
        known = self.ids[self.first[:-1]]
        group = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[group] == ids, group, -1)

    def counts(self) -> np.ndarray:
        """How many calls each group has."""
        return np.diff(self.first)

    def last_before(self, group: np.ndarray, start_ns: np.ndarray) -> np.ndarray:
        """Of each span the last call of the group that began before it, −1 where none did."""
        spans = len(group)
        times = np.concatenate((self.started, start_ns))
        groups = np.concatenate((self.group, group))
        behind = np.concatenate((-self.process, np.ones(spans, np.int64)))  # at one time calls are before spans
        order = np.lexsort((behind, times, groups))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        call = np.maximum.accumulate(np.where(order < len(self.rows), np.arange(len(order)), -1))[place[-spans:]]
        found = np.where(call >= 0, order[call], 0)
        return np.where((call >= 0) & (self.group[found] == group), found, -1)

    def of_process(self, group: np.ndarray, process: np.ndarray) -> np.ndarray:
        """Of each span the call of the group that this process made, −1 where it made none."""
        several = int(self.process.max()) + 1
        keys, wanted = self.group * several + self.process, group * several + process
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where((process >= 0) & (keys[at] == wanted), at, -1)


def chosen(calls: Calls, ids: np.ndarray, start_ns: np.ndarray, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of the call that launched each device span, −1 for none, and of which spans several processes have calls
    (bool).
    """
    group = calls.groups_of(ids)
    has_call = group >= 0
    is_contested = has_call & (calls.counts()[group] > 1)
    found = np.where(has_call, calls.rows[calls.first[group + 1] - 1], -1)
    asked = (has_call & np.isin(device, device[is_contested])).nonzero()[0]
    if not len(asked):
        return found, is_contested
    group, start_ns, device = group[asked], start_ns[asked], device[asked]
    nearest = calls.last_before(group, start_ns)
    owner = np.empty(len(asked), np.int64)
    by_device = np.argsort(device, kind="stable")
    for mine in np.split(by_device, np.diff(device[by_device]).nonzero()[0] + 1):
        explained = mine[nearest[mine] >= 0]
        owner[mine] = _explaining(calls, group[explained], start_ns[explained])
    of_owner = calls.of_process(group, owner)
    call = np.where(of_owner >= 0, of_owner, nearest)
    found[asked] = np.where(call >= 0, calls.rows[call], found[asked])
    return found, is_contested


def _explaining(calls: Calls, group: np.ndarray, start_ns: np.ndarray) -> int:
    """The process that explains all of these spans of a device, each of which some process explains; −1 for none."""
    if not len(group):
        return -1
    groups, which, often = np.unique(group, return_inverse=True, return_counts=True)
    earliest = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(earliest, which, start_ns)
    counts = calls.counts()[groups]
    of = np.repeat(np.arange(len(groups)), counts)
    call = np.arange(len(of)) + np.repeat(calls.first[groups] - (np.cumsum(counts) - counts), counts)
    explains = calls.started[call] <= earliest[of]
    of, call = of[explains], call[explains]
    processes, which = np.unique(calls.process[call], return_inverse=True)
    explains_all = np.bincount(which) == len(groups)
    distance = np.bincount(which, (earliest[of] - calls.started[call]) * often[of].astype(float))
    return int(processes[np.where(explains_all, distance, np.inf).argmin()]) if explains_all.any() else -1
