"""A covering array: few configurations in which every possible combination of values of any ``strength`` knobs occurs.

Greedy: each configuration begins with a combination that has not occurred yet and takes, knob by knob, the value that
brings most of the others. The same on every rank.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Configuration = dict[str, Any]
Combination = frozenset[tuple[str, int]]  # knobs and the places of their values


def covering_array(
    knobs: Mapping[str, Sequence[Any]], strength: int, is_possible: Callable[[Configuration], bool], seed: int = 0
) -> list[Configuration]:
    """``is_possible`` is asked of partial configurations too, and judges only by the knobs that are there."""

    def values(chosen: Mapping[str, int]) -> Configuration:
        return {knob: knobs[knob][place] for knob, place in chosen.items()}

    draw = random.Random(seed)
    missing = dict.fromkeys(combinations(knobs, strength, is_possible))
    array = []
    while missing:
        chosen = dict(next(iter(missing)))
        rest = [knob for knob in knobs if knob not in chosen]
        draw.shuffle(rest)
        for knob in rest:
            gains: dict[int, int] = {}
            for place in range(len(knobs[knob])):
                if is_possible(values(chosen | {knob: place})):
                    others = itertools.combinations(chosen.items(), strength - 1)
                    gains[place] = sum(frozenset((*other, (knob, place))) in missing for other in others)
            most = max(gains.values())
            chosen[knob] = draw.choice([place for place, gain in gains.items() if gain == most])
        for combination in itertools.combinations(chosen.items(), strength):
            missing.pop(frozenset(combination), None)
        array.append({knob: knobs[knob][chosen[knob]] for knob in knobs})
    return array


def combinations(
    knobs: Mapping[str, Sequence[Any]], strength: int, is_possible: Callable[[Configuration], bool]
) -> list[Combination]:
    """Every possible combination of values of ``strength`` knobs."""
    found = []
    for names in itertools.combinations(knobs, strength):
        for places in itertools.product(*(range(len(knobs[name])) for name in names)):
            if is_possible({name: knobs[name][place] for name, place in zip(names, places, strict=True)}):
                found.append(frozenset(zip(names, places, strict=True)))
    return found


def is_covered(
    array: Sequence[Configuration],
    knobs: Mapping[str, Sequence[Any]],
    strength: int,
    is_possible: Callable[[Configuration], bool],
) -> bool:
    """Whether every possible combination occurs in ``array``; does not ask how it was made."""
    occurring = {
        frozenset((name, list(knobs[name]).index(row[name])) for name in names)
        for row in array
        for names in itertools.combinations(knobs, strength)
    }
    return set(combinations(knobs, strength, is_possible)) <= occurring
