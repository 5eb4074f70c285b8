"""Ranks that a script merged into one Kineto file, taken apart again.

Scripts put the files of several ranks into one for a picture. Each gives the processes new names: ``[TP00] 1234``,
``rank0_1234``, ``1234_0``, a number for each rank added to all, or the name ``RANK 0 - GPU``; ids, streams and what the
file says around its events stay as they were, and the latter is of one rank. A profiler records one process, so that a
file in which several launch work is such a one. Each is a rank, with the processes of its devices: those that are
called as it is, where each process is called like one rank; or else those that it alone launched on. Where two launched
on one device nothing tells whose its work is, and the file is left as one rank.

A process with several devices is one rank, and so is a file of a process and others that launch nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..align import MERGED
from ..files.ranks import rank_said
from ..kineto.arguments import NO_NUMBER
from ..kineto.reader import Recording
from ..meaning.classify import DEVICE_CATEGORIES, is_call
from ..meaning.contested import Calls, chosen
from ..meaning.groups import ranks_in
from ..table import MIXED_RANKS, Note

_SGLANG = re.compile(r"^\[(?P<label>[A-Z]{2}\d{1,6}(?:-[A-Z]{2}\d{1,6})*)\] ")
_BEHIND = re.compile(r"^.{1,200}_(?P<label>\d{1,6})$")
_MEETS = re.compile(r"^(?:gloo:|c10d::)")  # what only a process of a group does
_OF_HOST = frozenset({"cpu_op", "user_annotation"})
_NUMBER = re.compile(r"[0-9]{1,18}$")
_LONGEST = 255


Ranked = tuple[int | None, Recording]  # the rank where the file tells it


@dataclass(frozen=True)
class _Label:
    text: str
    rank: int | None = None
    is_sure: bool = True  # False for a number behind a name, which may count anything


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Work:
    """Processes as codes into the recording's own, which rise in order of appearance. Of the device spans whose id any
    call has: the device, the lane, the group of the id's calls and the start.
    """

    hosts: list[int]  # that launch; without a device those that meet others; without either the devices
    devices: list[int]
    candidates: list[int]  # hosts with a call that may have launched something
    calls: Calls | None = None
    device: np.ndarray = field(default_factory=_none)
    lane: np.ndarray = field(default_factory=_none)
    group: np.ndarray = field(default_factory=_none)
    start_ns: np.ndarray = field(default_factory=_none)
    nearest: np.ndarray = field(default_factory=_none)  # the process whose call is told by time, see ``contested``

    def owner(self, owners: Mapping[int, int]) -> np.ndarray:
        """By span the process that owns its device, −1 for none."""
        return np.array([owners.get(device, -1) for device in self.device.tolist()], np.int64)

    def explained(self, owner: np.ndarray) -> np.ndarray:
        """Which of the spans come after a call of the owner with their id (bool)."""
        if self.calls is None:
            return np.zeros(len(owner), bool)
        call = self.calls.of_process(self.group, owner)
        return (call >= 0) & (self.calls.started[call] <= self.start_ns)

    def contradicts(self, owners: Mapping[int, int]) -> bool:
        """Whether a device with work from its owner's first call on has none that is the owner's."""
        owner = self.owner(owners)
        if self.calls is None or not (owner >= 0).any():
            return False
        first = np.full(int(max(self.calls.process.max(), owner.max())) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, self.calls.process, self.calls.started)
        is_since = (owner >= 0) & (self.start_ns >= first[owner])
        return not {*self.device[is_since].tolist()} <= {*self.device[self.explained(owner)].tolist()}

    def is_divided(self, owners: Mapping[int, int]) -> bool:
        """Whether each device's work is its owner's alone.

        What was launched before the recording began has no call, but maybe the id of another process's: streams run in
        order, so that it comes before what has one.
        """
        is_owners = self.explained(self.owner(owners))
        if not is_owners.any():
            return False
        first = np.full(int(self.lane.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, self.lane[is_owners], self.start_ns[is_owners])
        is_late = self.start_ns > first[self.lane]
        return {*self.device[is_owners].tolist()} == {*self.devices} and not (is_late & ~is_owners).any()


def taken_apart(recording: Recording) -> list[Ranked]:
    """The ranks in a recording, those whose number it tells in its order; most often there is one."""
    whole: list[Ranked] = [(recording.rank, recording)]
    labels = _labels(recording)
    if groups := _labelled(recording, labels):
        return _ranks(recording, groups, labels)
    if len(hosts := _hosts(recording)) < 2:
        return whole
    work = _work(recording, hosts)
    if groups := _owned(work):
        return _ranks(recording, groups, {code: label for code, label in labels.items() if label.is_sure})
    if len(work.candidates) < 2:
        return whole
    note = Note(MIXED_RANKS, len(work.candidates), _called(recording, [*work.candidates, *work.devices]))
    return [(recording.rank, replace(recording, notes=(*recording.notes, note)))]


# -- who works on what


def _hosts(recording: Recording) -> list[int]:
    calls = recording.codes["category"].where(is_call).nonzero()[0]
    if len(calls := calls[recording.numbers["correlation"][calls] != NO_NUMBER]):
        return _processes(recording, calls)
    if devices := _devices(recording):
        return devices
    if len(_processes(recording, recording.codes["category"].where(_OF_HOST.__contains__))) < 2:
        return []
    return _processes(recording, recording.codes["name"].where(lambda name: _MEETS.match(name) is not None))


def _devices(recording: Recording) -> list[int]:
    return _processes(recording, recording.codes["category"].where(DEVICE_CATEGORIES.__contains__))


def _processes(recording: Recording, rows: np.ndarray) -> list[int]:
    process = recording.codes["process"]
    is_there = np.zeros(len(process.values), bool)
    is_there[process.codes[rows]] = True
    return is_there.nonzero()[0].tolist()


def _work(recording: Recording, hosts: list[int]) -> _Work:
    numbers, process = recording.numbers, recording.codes["process"].codes.astype(np.int64)
    device = recording.codes["category"].where(DEVICE_CATEGORIES.__contains__).nonzero()[0]
    calls = (recording.codes["category"].where(is_call) & (numbers["correlation"] != NO_NUMBER)).nonzero()[0]
    devices = np.unique(process[device]).tolist()
    if not len(device) or not len(calls):
        return _Work(hosts, devices, [])
    ids = numbers["correlation"]
    known = Calls(calls, ids[calls], process[calls], numbers["start_ns"][calls])
    found, _ = chosen(known, ids[device], numbers["start_ns"][device], process[device])
    device, found = device[found >= 0], found[found >= 0]
    candidates = np.unique(process[calls[np.isin(ids[calls], ids[device])]]).tolist()
    group, start_ns = known.groups_of(ids[device]), numbers["start_ns"][device]
    lane = process[device] * len(recording.codes["thread"].values) + recording.codes["thread"].codes[device]
    lane = np.unique(lane, return_inverse=True)[1]
    return _Work(hosts, devices, candidates, known, process[device], lane, group, start_ns, process[found])


# -- which processes are one rank


def _labels(recording: Recording) -> dict[int, _Label]:
    found: dict[int, _Label] = {}
    for code, process in enumerate(recording.codes["process"].values):
        if label := _label(*recording.names_of(process)):
            found[code] = label
    return found


def _label(process: str, *called: str) -> _Label | None:
    if match := _SGLANG.match(process[:_LONGEST]):
        places = match["label"].split("-")
        return _Label(match["label"], int(places[0][2:]) if len(places) == 1 else None)
    for text in (process, *called):
        text = text[:_LONGEST]
        if "rank" in text.lower() and (rank := rank_said(text.replace(" ", "_"))) is not None:
            return _Label(f"rank {rank}", rank)
    match = _BEHIND.match(process)
    return _Label(f"rank {int(match['label'])}", int(match["label"]), is_sure=False) if match else None


def _labelled(recording: Recording, labels: Mapping[int, _Label]) -> list[list[int]]:
    """The processes of each rank, by what they are called; none where that is not told of all that work, or where
    what runs on a device is nobody's who is called like it.
    """
    if len({label.text for label in labels.values()}) < 2:
        return []
    devices = {*_devices(recording)}
    hosts = {
        *_processes(
            recording, recording.codes["category"].where(lambda category: category in _OF_HOST or is_call(category))
        )
    }
    if not labels.keys() >= hosts | devices:
        return []
    of_label: defaultdict[str, list[int]] = defaultdict(list)
    for code in sorted(labels):
        of_label[labels[code].text].append(code)
    groups = [codes for codes in of_label.values() if not (hosts | devices).isdisjoint(codes)]
    # a number that counts anything is a rank's only where it is behind the names of a whole rank
    wanted = [hosts, devices] if devices else [hosts]
    is_sure = all(labels[code].is_sure for code in hosts | devices)
    if not is_sure and any(some.isdisjoint(codes) for codes in groups for some in wanted):
        return []
    work = _work(recording, sorted(hosts))
    callers = {*work.calls.process.tolist()} if work.calls else set[int]()
    owners = {
        device: host
        for codes in groups
        for host in [code for code in codes if code in callers][:1]
        for device in devices.intersection(codes)
    }
    return groups if len(groups) > 1 and not work.contradicts(owners) else []


def _owned(work: _Work) -> list[list[int]]:
    """The same by who launched on which devices; none where two launched on one."""
    if not work.devices:
        return [[host] for host in work.hosts]
    owners = _owners(work)
    if set(owners.values()) != set(work.candidates) or not work.is_divided(owners):
        return []
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for device in work.devices:
        groups[owners[device]].append(device)
    return [list(dict.fromkeys((host, *devices))) for host, devices in groups.items()] if len(groups) > 1 else []


def _owners(work: _Work) -> dict[int, int]:
    """By device the process that launched most on it, where that can be told."""
    several = int(max(work.nearest, default=0)) + 1
    pairs, often = np.unique(work.device * several + work.nearest, return_counts=True)
    return {pair // several: pair % several for pair in pairs[np.argsort(often, kind="stable")].tolist()}


# -- their recordings


def _ranks(recording: Recording, groups: list[list[int]], labels: Mapping[int, _Label]) -> list[Ranked]:
    """Processes that launch nothing, and whose name tells nothing, are shown with the first rank: nobody knows whose
    they are.
    """
    said = [{labels[code].rank for code in codes if code in labels} for codes in groups]
    numbers = [ranks.pop() if len(ranks) == 1 else None for ranks in said]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = [None] * len(groups)
    places = _places(recording, groups)
    order = sorted(range(len(groups)), key=lambda group: (numbers[group] or 0, places[group]))
    of = np.full(len(recording.codes["process"].values), -1)
    for group, codes in enumerate(groups):
        of[codes] = group
    is_other = of < 0
    of[is_other] = order[0]
    group_of = of[recording.codes["process"].codes]
    by_group = np.argsort(group_of, kind="stable")
    bounds = np.searchsorted(group_of[by_group], np.arange(len(groups) + 1))
    what = "ranks of a merged file, taken apart by their processes"
    notes = [*recording.notes, Note(what, len(groups), _called(recording, groups[order[0]]))]
    is_others = is_other[recording.codes["process"].codes] & recording.codes["category"].where(_OF_HOST.__contains__)
    if count := int(is_others.sum()):
        what = "spans of processes that nothing joins to a rank, shown with the first"
        notes.append(Note(what, count, _called(recording, _processes(recording, is_others))))
    found: list[Ranked] = []
    for group in order:
        rows = by_group[bounds[group] : bounds[group + 1]]
        mine = tuple(notes) if group == order[0] else ()
        found.append((numbers[group], recording.only(rows, _header(recording.header, numbers[group]), mine)))
    return found


def _header(header: Mapping[str, Any], rank: int | None) -> dict[str, Any]:
    """What stands around the events is of one rank. Of the groups that it is in, those that name another are the
    other's too.
    """
    kept = {key: value for key, value in header.items() if key not in ("distributedInfo", "host_name")}
    info = header.get("distributedInfo")
    if isinstance(info, dict) and rank is not None:
        groups = info.get("pg_config")
        mine = [
            group
            for group in (groups if isinstance(groups, list) else [])
            if isinstance(group, dict) and rank in (ranks_in(group.get("ranks")) or ())
        ]
        kept["distributedInfo"] = {**info, "rank": rank, "pg_config": mine}
    return {**kept, MERGED: True}


def _places(recording: Recording, groups: list[list[int]]) -> list[int]:
    """What the groups are sorted by: the numbers of their devices where all have one, else their first spans."""
    names = recording.codes["process"].values
    devices = {*_devices(recording)}
    texts = [[names[code] for code in codes if code in devices] for codes in groups]
    if all(of_group and all(_NUMBER.match(text) for text in of_group) for of_group in texts):
        return [min(map(int, of_group)) for of_group in texts]
    return [min(codes) for codes in groups]


def _called(recording: Recording, codes: list[int]) -> str:
    return ", ".join(recording.codes["process"].values[code][:20] or "''" for code in codes)[:60]
