"""What is written into a bar and what is said when the pointer rests on it. All of it escaped."""

from __future__ import annotations

from typing import Any

from ..base.kinds import Kind
from ..base.units import NS_PER_MS, format_ns, format_payload
from .palette import KIND_STYLES
from .text import safe, short_name, short_unit

FONT_PX = 13
_CHARACTER_PX = 7.3  # of FONT_PX, on average
_PADDING_PX = 8
# the width a figure most often has; plotly itself hides what does not fit and shows it after a zoom
_PLOT_PX = 1050


def bar_label(bar: dict[str, Any], view_ns: int) -> str:
    """The longest label that fits the bar, else one for after a zoom; empty for a bar of a pixel or two."""
    width_px = bar["duration_ns"] / view_ns * _PLOT_PX
    if width_px < 2:
        return ""
    candidates = _candidates(bar)
    room = (width_px - _PADDING_PX) / _CHARACTER_PX
    return safe(next((text for text in candidates if len(text) <= room), candidates[0]), 40)


def _candidates(bar: dict[str, Any]) -> list[str]:
    tag = KIND_STYLES[Kind(bar["kind"])].tag
    if bar["spans"] > 1 and bar["units"] != 1:
        return [f"{tag or short_name(bar['name'])} ×{bar['spans']}", f"×{bar['spans']}"]
    if not bar["unit"]:
        return [tag or short_name(bar["name"])]
    unit = short_unit(bar["unit"])
    last = bar["unit"].rsplit(".", 1)[-1]
    return [f"{tag} {unit}".strip(), f"{tag} {last}".strip(), last if last.isdigit() else tag or last]


def bar_hover(bar: dict[str, Any], lane_name: str, origin_ns: int) -> str:
    """Kind, unit, name, times, bytes, phase, step, rank and lane, as far as they are known."""
    words = KIND_STYLES[Kind(bar["kind"])].words
    start_ms = (bar["start_ns"] - origin_ns) / NS_PER_MS
    lines = [f"<b>{_headline(words, bar)}</b>"]
    if bar["spans"] > 1:
        busy = f"busy {format_ns(bar['busy_ns'])} of {format_ns(bar['duration_ns'])}"
        lines.append(f"{bar['spans']:,} spans merged, {busy}; longest: {safe(bar['name'])}")
    else:
        lines.append(safe(bar["name"]))
    lines.append(f"start {start_ms:,.3f} ms · duration {format_ns(bar['duration_ns'])}")
    facts = []
    if bar["bytes"] is not None:
        facts.append(f"{format_payload(bar['bytes'])} ({bar['bytes']:,} bytes)")
    if bar["group"]:
        facts.append(f"group {safe(bar['group'], 40)}")
    if bar["inside"]:
        facts.append(f"{bar['inside']:,} span{'s' if bar['inside'] > 1 else ''} nested inside")
    if facts:
        lines.append(" · ".join(facts))
    where = [safe(bar["phase"], 40)] if bar["phase"] else []
    if bar["step"] is not None:
        where.append(f"step {bar['step']}")
    where += [f"rank {bar['rank']}", safe(lane_name)]
    lines.append(" · ".join(where))
    return "<br>".join(lines)


def _headline(words: str, bar: dict[str, Any]) -> str:
    if bar["units"] > 1:
        return f"{words} · {bar['units']} units"
    return f"{words} · {safe(bar['unit'])}" if bar["unit"] else words
