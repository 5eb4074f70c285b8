"""Numbers as people read them. Binary prefixes for memory, decimal ones for traffic and time."""

from __future__ import annotations

NS_PER_MS = 1_000_000


def format_ns(duration_ns: float) -> str:
    """``"1.5 ms"``: three significant figures with the unit that fits."""
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(duration_ns) >= scale:
            return (
                f"{duration_ns / scale:.3g} {unit}"
                if abs(duration_ns) < 1000 * scale
                else f"{duration_ns / scale:,.0f} {unit}"
            )
    return f"{duration_ns:.0f} ns"


def format_memory(memory_bytes: float) -> str:
    """``"1.5 MiB"``, in powers of 1024."""
    return _scaled(memory_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_payload(payload_bytes: float) -> str:
    """``"1.5 MB"``, in powers of 1000, as bandwidths are."""
    return _scaled(payload_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < base:
            return f"{value:.0f} {unit}" if unit == units[0] else f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"
