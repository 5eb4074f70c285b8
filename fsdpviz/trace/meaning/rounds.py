"""Which compute is forward that no range names.

A training loop goes in rounds: forward, backward, perhaps once more for each micro-batch, then what lies between (a
gradient is clipped, DDP finishes its buckets), then the optimizer. Compute outside every range is forward unless a
backward of its round has run: then it is forward only if another backward follows in the round, and autograd recorded
operators between the two, as it does not inside backward.
"""

from __future__ import annotations

import numpy as np

from ...base.labels import Phase
from .attribute import Attribution


def is_forward(times_ns: np.ndarray, windows: Attribution, recorded_ns: np.ndarray | None) -> np.ndarray:
    """For each moment on the main thread that lies in no phase's window, whether it is forward (bool).

    ``recorded_ns`` are the starts of the operators that autograd recorded, rising; None where the file cannot tell.
    """
    phases = windows.phases
    is_backward, is_optimizer = (
        np.array([name is phase for name in phases.names], bool) for phase in (Phase.BACKWARD, Phase.OPTIMIZER)
    )
    order = np.argsort(phases.start_ns[is_backward], kind="stable")
    begins, ends = phases.start_ns[is_backward][order], np.maximum.accumulate(phases.end_ns[is_backward][order])
    # a round ends where an optimizer's range or a step begins
    bounds = np.unique(np.concatenate((phases.start_ns[is_optimizer], windows.steps.start_ns, windows.steps.end_ns)))
    place = np.searchsorted(begins, times_ns, "right")  # backward windows begun by then
    round_of = np.searchsorted(bounds, times_ns, "right")
    round_of_window = np.append(np.searchsorted(bounds, begins, "right"), -1)  # the last stands for none, at −1 too
    before = round_of_window[place - 1] == round_of
    after = round_of_window[place] == round_of
    if recorded_ns is not None and len(begins):
        latest, following = ends[np.maximum(place - 1, 0)], begins[np.minimum(place, len(begins) - 1)]
        between = np.searchsorted(recorded_ns, following, "left") - np.searchsorted(recorded_ns, latest, "left")
        after &= between > 0
    return ~before | after
