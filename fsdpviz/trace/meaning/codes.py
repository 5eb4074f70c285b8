"""Kinds and phases as small numbers, while a table is being decided."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ...base.kinds import Kind
from ...base.labels import Phase

KIND_CODE: dict[str, int] = {kind: code for code, kind in enumerate(Kind)}
PHASE_CODE: dict[str, int] = {phase: code for code, phase in enumerate(Phase)}


def is_among(kinds: Collection[Kind]) -> np.ndarray:
    """By code of a kind, whether it is one of these (bool)."""
    return np.array([kind in kinds for kind in KIND_CODE], bool)
