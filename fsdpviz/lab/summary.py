"""One run in the numbers that a table, a page or a JSON file shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..analysis import report
from .recording import Recording

_MEASURES = (
    "step_ms",
    "samples_per_s",
    "peak_device_bytes",
    "peak_host_bytes",
    "all_gather_ms",
    "h2d_ms",
    "d2h_ms",
)
_MEANS = ("compute_ms", "comm_ms", "exposed_comm_ms", "overlap_frac")


def summary(recording: Recording) -> dict[str, Any]:
    """``summary.json``'s entry for one run; a number that was not recorded is None."""
    found = report(recording)
    mean = found.mean()
    stated = recording.about.get("experiment", {})
    environment = recording.about.get("environment", {})
    return {
        "name": recording.name,
        "engine": stated.get("engine"),
        "world_size": environment.get("world_size", len(recording.ranks)),
        "provenance": recording.provenance.value,
        **{name: getattr(mean, name) if mean else None for name in _MEANS},
        **{name: getattr(found.measures, name) for name in _MEASURES},
    }


def summaries(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The content of ``summary.json``."""
    return {"runs": [summary(recording) for recording in recordings]}
