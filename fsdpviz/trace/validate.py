"""Which analyses a recording supports, and for the others why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from ..base.kinds import COMMUNICATION, COMPUTATION, WORK
from .align import UNTOLD, Method, matches
from .table import MIXED_RANKS, UNCATEGORISED, UNREAD_DEVICE, Note

if TYPE_CHECKING:
    from .table import Trace

_FSDP_RANGES = r"^(?:FSDP::|FullyShardedDataParallel\.)"


@dataclass(frozen=True)
class Support:
    """One analysis. ``reason`` says what is missing and how to record it; "" where nothing is."""

    analysis: str
    is_supported: bool
    reason: str = ""

    def __str__(self) -> str:
        mark = "yes" if self.is_supported else "no"
        return f"{self.analysis}: {mark}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Validation:
    """What a recording supports: breakdown, overlap, bandwidth, fsdp, waits, memory."""

    supports: tuple[Support, ...]

    def __getitem__(self, analysis: str) -> Support:
        found = next((support for support in self.supports if support.analysis == analysis), None)
        if found is None:
            raise KeyError(f"no analysis {analysis!r}; there are {', '.join(one.analysis for one in self.supports)}")
        return found

    def __iter__(self) -> Iterator[Support]:
        return iter(self.supports)

    @property
    def supported(self) -> tuple[str, ...]:
        return tuple(support.analysis for support in self.supports if support.is_supported)

    def __str__(self) -> str:
        return "\n".join(map(str, self.supports))


def validation(trace: Trace) -> Validation:
    """Looks at what is in the table; nothing is read again."""
    checks = {
        "breakdown": _breakdown,
        "overlap": _overlap,
        "bandwidth": _bandwidth,
        "fsdp": _fsdp,
        "waits": _waits,
        "memory": _memory,
    }
    return Validation(tuple(_support(name, *check(trace)) for name, check in checks.items()))


def _support(analysis: str, missing: str = "", remark: str = "") -> Support:
    return Support(analysis, not missing, missing or remark)


def _count(trace: Trace, kinds: frozenset) -> int:
    return len(trace.spans.filter(pl.col("kind").is_in(_values(kinds))))


def _values(kinds: frozenset) -> list[str]:
    return [kind.value for kind in kinds]


def _breakdown(trace: Trace) -> tuple[str, ...]:
    if unread := _note(trace, UNREAD_DEVICE):
        return (_said("spans of a device without a category, which are not among its work", unread),)
    if not _count(trace, WORK):
        return ("nothing in it is work: no kernel, no copy, no operator. Record ProfilerActivity.CPU or CUDA",)
    if mixed := _mixed_ranks(trace):
        return (mixed,)
    if uncategorised := _note(trace, UNCATEGORISED):
        return "", _said("spans without a category count as the host's", uncategorised)
    if trace.steps.is_empty():
        return "", "it has no ranges of steps (ProfilerStep#N, step N), so that the recording is taken whole"
    return ("",)


def _mixed_ranks(trace: Trace) -> str:
    """Why a rank's work is not one rank's; "" where nothing speaks against it."""
    note = _note(trace, MIXED_RANKS)
    if note is None:
        return ""
    return (
        f"{note.count} processes launched its work ({note.example}): it is of several ranks, and what one computes "
        "would hide what another transfers. Open the ranks' own files"
    )


def _said(what: str, note: Note) -> str:
    return f"{what}: {note.count}, for example {note.example}"


def _note(trace: Trace, what: str) -> Note | None:
    return next((note for note in trace.notes if note.what == what), None)


def _overlap(trace: Trace) -> tuple[str, ...]:
    if unread := _note(trace, UNREAD_DEVICE):
        return (_said("spans of a device without a category, which are not among its work", unread),)
    if not _count(trace, COMMUNICATION):
        return ("no transfer between ranks is in it",)
    if not _count(trace, COMPUTATION):
        return ("nothing in it computes, so that all communication is exposed",)
    if mixed := _mixed_ranks(trace):
        return (mixed,)
    return ("",)


def _bandwidth(trace: Trace) -> tuple[str, ...]:
    collectives = trace.collectives
    if collectives.is_empty():
        return ("no transfer between ranks is in it",)
    lacks = {
        "its size (record with record_shapes=True)": collectives["bytes"].null_count(),
        "the size of its group (distributedInfo has no pg_config)": collectives["group_size"].null_count(),
        "a duration": int((collectives["duration_ns"] == 0).sum()),
    }
    what, count = max(lacks.items(), key=lambda item: item[1])
    if count == len(collectives):
        return (f"no collective has {what}",)
    return "", f"{count} of {len(collectives)} collectives lack {what}" if count else ""


def _fsdp(trace: Trace) -> tuple[str, ...]:
    if not trace.whole.spans["name"].str.contains(_FSDP_RANGES).any():
        return ("it has no FSDP ranges: no FSDP::… and no FullyShardedDataParallel.…",)
    if trace.whole.units.is_empty():
        return ("its FSDP ranges issue no transfer and no copy: no launch in it lies inside one",)
    device = trace.lanes.filter(pl.col("is_device")).select("rank", "lane")
    work = trace.spans.filter(pl.col("kind").is_in(_values(WORK))).join(device, on=["rank", "lane"], how="semi")
    unknown = work["issued_ns"].null_count()
    return "", f"{unknown} of {len(work)} device spans have no launch in it, and so no unit" if unknown else ""


def _waits(trace: Trace) -> tuple[str, ...]:
    if len(trace.ranks) < 2:
        return ("it has one rank. Open the files of all ranks together",)
    alone = trace.clock.filter(pl.col("method") == Method.NONE.value)["rank"].to_list()
    if alone:
        return (f"ranks {alone} are not on the others' clock: too few collectives match",)
    if not matches(trace).group_by("key").len().filter(pl.col("len") > 1).height:
        return ("no collective is the same one on two ranks by group and sequence number, or by content",)
    residual = trace.clock["residual_ns"].max()
    limit = f"ends of matched collectives differ by {residual} ns (median)" if residual else ""
    unsure = trace.clock.filter(pl.col("method").is_in(_values(UNTOLD)))["rank"].to_list()
    return "", f"ranks {unsure} may be on clocks of their own: {limit}" if unsure else limit


def _memory(trace: Trace) -> tuple[str, ...]:
    for key in ("memory", "allocator"):
        recorded = trace.about.get(key)
        if isinstance(recorded, Mapping) and any(recorded.values()):
            return ("",)
    return ("no memory was recorded: that is in a run folder and in an allocator snapshot, not in a profiler's trace",)
