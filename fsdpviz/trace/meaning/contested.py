"""Which of several processes' calls launched a device span, where one file has the events of them all.

Correlation ids are a process's own: calls of two processes may have one id, and a device span does not say whose it
is. A rank works on a device of its own, as a rule; so a device's spans are those of the process that explains all of
them: each that any process explains begins after that one's call. Of several such processes it is the one whose calls
are nearest. Where none explains all, the processes share the device, and each span is the last call's before it.
"""

from __future__ import annotations

import numpy as np

_NEVER = 2**62


def chosen(choices: np.ndarray, started: np.ndarray, start_ns: np.ndarray, device: np.ndarray) -> np.ndarray:
    """Of each of D device spans the call that launched it, −1 for none. ``choices``, P × D, are the calls of P
    processes (−1 where one has none), ``started`` when they did; ``start_ns`` and ``device`` are the spans'.
    """
    since = start_ns - started
    since[(choices < 0) | (since < 0)] = _NEVER
    found = np.empty(len(start_ns), np.int64)
    for one in np.unique(device):
        mine = (device == one).nonzero()[0]
        found[mine] = _on_one_device(choices[:, mine], since[:, mine])
    return found


def _on_one_device(choices: np.ndarray, since: np.ndarray) -> np.ndarray:
    is_explained = (since < _NEVER).any(axis=0)
    explains_all = (since[:, is_explained] < _NEVER).all(axis=1)
    if explains_all.any():
        distance = np.where(explains_all, since[:, is_explained].sum(axis=1, dtype=float), np.inf)
        return choices[distance.argmin()]
    nearest = choices[since.argmin(axis=0), np.arange(since.shape[1])]
    return np.where(is_explained, nearest, choices.max(axis=0))
