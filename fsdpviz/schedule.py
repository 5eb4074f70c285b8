"""What is issued when: pure functions over unit names, used by engines and by whoever replays a step.

Units are in forward order, the root first; it holds what no block holds and runs around all of them.
"""

from __future__ import annotations

from collections.abc import Sequence


def forward_prefetch_targets(units: Sequence[str], depth: int) -> dict[str, list[str]]:
    """For each unit, the units whose all-gather it issues before its own forward: the next ``depth`` ones."""
    return {unit: list(units[i + 1 : i + 1 + depth]) for i, unit in enumerate(units)}


def backward_prefetch_targets(units: Sequence[str], depth: int) -> dict[str, list[str]]:
    """For each unit, the units whose all-gather it issues before its own gradients are computed.

    Backward visits the root first (its output is the loss's input) and then the blocks from the last to the first.
    """
    root, *blocks = units
    return forward_prefetch_targets([root, *reversed(blocks)], depth)
