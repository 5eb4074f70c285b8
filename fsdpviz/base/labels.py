"""The names of ranges that engines record, made and parsed in one place.

Two families. ``FSDP::<phase> (<unit fqn>)`` is FSDP2's own grammar, which our engines share; the root unit has
no name in it, a module of several parameter groups adds `` [pg=<ranks that share it>]``, under Nsight
``, op_id = N`` may follow, and prefetches name their target as ``FSDP::forward_prefetch for <fqn>``.
``fsdpviz::<phase>`` names what the training loop does and ``fsdpviz::<collective> (…)`` a transfer over an emulated
link; a copy that no operator's arguments measure says how much it carries: ``fsdpviz::h2d (<unit fqn>), bytes = N``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

ROOT = "(root)"  # how the root unit is written where a name is needed; FSDP2 leaves it blank


class Phase(StrEnum):
    """Which part of a training step a span belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # forward run again inside backward by activation checkpointing
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class RangeLabel:
    """A parsed range name. ``unit`` is None when the label names none; ROOT stands for the unnamed root."""

    family: str  # "FSDP" or "fsdpviz"
    phase: str
    unit: str | None = None
    payload_bytes: int | None = None
    param_group: int | None = None  # ranks that share it, where a module has several parameter groups


_FSDP = re.compile(
    r"^FSDP::(?P<phase>\w+)(?: for(?: (?P<target>.*?))?| \((?P<unit>.*?)\))?(?: \[pg=(?P<group>\d{1,9})\])?"
    r"(?:, op_id = \d+)?$",
    re.ASCII,
)
_OWN = re.compile(r"^fsdpviz::(?P<phase>\w+)(?: \((?P<unit>.*)\))?(?:, bytes = (?P<bytes>\d{1,18}))?$", re.ASCII)

# FSDP2 phases that carry a unit and leave the root's name out
_UNIT_PHASES = frozenset(
    {
        "pre_forward",
        "post_forward",
        "pre_backward",
        "all_gather",
        "all_gather_copy_out",
        "post_backward_accumulate",
        "post_backward_reshard",
        "post_backward_rs_wait",
        "post_backward_reduce",
    }
)


def fsdp_label(phase: str, unit: str) -> str:
    """``FSDP::<phase> (<unit>)``; the root unit (ROOT or "") is written without a name, as FSDP2 does."""
    return f"FSDP::{phase}" if unit in ("", ROOT) else f"FSDP::{phase} ({unit})"


def loop_label(phase: str, unit: str | None = None, payload_bytes: int | None = None) -> str:
    """``fsdpviz::<phase>`` or ``fsdpviz::<phase> (<unit>)``: what the training loop or an emulated link does."""
    label = f"fsdpviz::{phase}" if unit is None else f"fsdpviz::{phase} ({unit})"
    return label if payload_bytes is None else f"{label}, bytes = {payload_bytes}"


def parse_label(name: str) -> RangeLabel | None:
    """The label's parts, or None when ``name`` is of neither family."""
    if not name.startswith(("FSDP::", "fsdpviz::")):  # as most names do not
        return None
    if match := _FSDP.match(name):
        phase = match["phase"]
        unit = match["target"] or match["unit"]
        if not unit or unit == "None":
            unit = ROOT if phase in _UNIT_PHASES or phase.endswith("_prefetch") else None
        group = match["group"]
        return RangeLabel("FSDP", phase, unit, param_group=int(group) if group else None)
    if match := _OWN.match(name):
        unit = match["unit"]
        size = match["bytes"]
        return RangeLabel("fsdpviz", match["phase"], ROOT if unit == "" else unit, int(size) if size else None)
    return None
