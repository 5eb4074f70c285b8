"""Where each parameter lies in its unit's flat buffer, and which part of that is whose. Pure: numbers and names.

A unit's parameters are laid end to end, padded to a multiple of the shard ranks, and cut into equal shards:

    weight 3×2, bias 3, on 2 ranks:   w w w w w | w b b b 0      9 elements, padded to 10, 5 a rank

Trainable and frozen parameters lie in regions of their own, so that gradients are reduced for the former alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One parameter in a region: ``start`` counts elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Region:
    """Slots end to end, over ``ranks`` shards of ``shard_numel`` elements each."""

    slots: tuple[Slot, ...]
    ranks: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], ranks: int) -> Region:
        slots, start = [], 0
        for name, shape in shapes.items():
            slots.append(Slot(name, tuple(shape), start))
            start = slots[-1].stop
        return cls(tuple(slots), ranks)

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def shard_numel(self) -> int:
        return -(-self.numel // self.ranks)

    @property
    def full_numel(self) -> int:
        return self.shard_numel * self.ranks

    def piece(self, slot: Slot, rank: int) -> slice:
        """The elements of ``slot`` that lie in the shard of ``rank``, counted inside that shard; may be empty."""
        first = rank * self.shard_numel
        start = min(max(slot.start - first, 0), self.shard_numel)
        stop = min(max(slot.stop - first, 0), self.shard_numel)
        return slice(start, max(start, stop))


def owners(parameters: Mapping[str, int], units: Mapping[str, Sequence[str]], root: str) -> dict[str, list[str]]:
    """For each unit, the names of its parameters, a parameter that has several names counted once, by its first.

    ``parameters`` maps every name to the parameter's identity; ``units`` maps units to their modules' names. A
    parameter belongs to the innermost unit around it; one that several units share belongs to the root, which runs
    around them all.
    """
    modules = sorted(((module, unit) for unit, names in units.items() for module in names), key=lambda m: -len(m[0]))
    claims: dict[int, list[str]] = {}
    for name, identity in parameters.items():
        unit = next((unit for module, unit in modules if name.startswith(f"{module}.")), root)
        claims.setdefault(identity, []).append(unit)
    owned: dict[str, list[str]] = {root: [], **{unit: [] for unit in units}}
    seen: set[int] = set()
    for name, identity in parameters.items():
        if identity not in seen:
            seen.add(identity)
            claimed = set(claims[identity])
            owned[claimed.pop() if len(claimed) == 1 else root].append(name)
    return owned
