"""Layouts worked out by hand: a 3 × 2 weight and a bias of 3 on two ranks, 9 elements padded to 10."""

from __future__ import annotations

import pytest

from fsdpviz.engine.glassbox.layout import Region, owners

REGION = Region.of({"weight": (3, 2), "bias": (3,)}, 2)


def test_slots_lie_end_to_end_and_are_padded_to_a_multiple_of_the_ranks() -> None:
    assert [(slot.start, slot.stop) for slot in REGION.slots] == [(0, 6), (6, 9)]
    assert (REGION.numel, REGION.shard_numel, REGION.full_numel) == (9, 5, 10)


def test_each_rank_has_its_piece_of_each_slot() -> None:
    weight, bias = REGION.slots
    assert REGION.piece(weight, 0) == slice(0, 5)
    assert REGION.piece(bias, 0) == slice(5, 5)  # none
    assert REGION.piece(weight, 1) == slice(0, 1)
    assert REGION.piece(bias, 1) == slice(1, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 16])
def test_the_pieces_of_all_ranks_make_the_whole(ranks: int) -> None:
    region = Region.of({"a": (3, 2), "b": (), "c": (4,)}, ranks)
    flat = [*range(region.numel), *([-1] * (region.full_numel - region.numel))]
    for slot in region.slots:
        found = []
        for rank in range(ranks):
            shard = flat[rank * region.shard_numel : (rank + 1) * region.shard_numel]
            found += shard[region.piece(slot, rank)]
        assert found == list(range(slot.start, slot.stop))


def test_nothing_is_a_region_too() -> None:
    empty = Region.of({}, 4)
    assert (empty.numel, empty.shard_numel, empty.full_numel) == (0, 0, 0)


def test_a_parameter_belongs_to_the_innermost_unit_and_a_shared_one_to_the_root() -> None:
    parameters = {"tokens": 1, "blocks.0.w": 2, "blocks.0.inner.w": 3, "blocks.1.w": 4, "blocks.1.tied": 2, "head": 1}
    units = {"outer": ["blocks.0"], "inner": ["blocks.0.inner"], "second": ["blocks.1"]}
    assert owners(parameters, units, "root") == {
        "root": ["tokens", "blocks.0.w"],
        "outer": [],
        "inner": ["blocks.0.inner.w"],
        "second": ["blocks.1.w"],
    }


def test_a_name_that_only_begins_like_a_unit_is_not_in_it() -> None:
    assert owners({"blocks.10.w": 1}, {"one": ["blocks.1"]}, "root") == {"root": ["blocks.10.w"], "one": []}
