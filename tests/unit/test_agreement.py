"""What ranks have issued, compared without any process: made records and the verdict on them."""

from __future__ import annotations

import pytest

from fsdpviz.engine.glassbox.agreement import Record, verdict


def recorded(*entries: str) -> Record:
    record = Record()
    for entry in entries:
        record.note(entry)
    return record


@pytest.mark.parametrize(
    ("mine", "others", "differ"),
    [
        ("abc", "abc", False),
        ("abc", "ab", False),  # ahead
        ("ab", "abc", False),  # behind
        ("", "abc", False),
        ("abc", "abd", True),
        ("abc", "ad", True),
        ("ad", "abcdef", True),
        ("abc", "acb", True),  # the same ones in another order
        ("aabc", "abc", True),
    ],
)
def test_records_differ_where_both_have_come_to(mine: str, others: str, differ: bool) -> None:
    assert recorded(*mine).differs(recorded(*others).told()) is differ


def test_a_difference_shows_long_after_it() -> None:
    one, other = recorded("a", *["b"] * 5000), recorded("c", *["b"] * 4999)
    assert one.differs(other.told()) and other.differs(one.told())


def test_a_record_looks_back_further_than_the_others_tell() -> None:
    told = recorded(*["a"] * 300).told()
    assert not recorded(*["a"] * 70_000).differs(told)  # too old to say
    assert recorded(*["a"] * 100, *["b"] * 60_000).differs(told)


def on_verdict(*ranks: str) -> tuple[str, bool]:
    return verdict({rank: recorded(*entries).laid_open() for rank, entries in enumerate(ranks)}, len(ranks))


def test_the_verdict_names_the_first_difference_and_the_odd_rank_first() -> None:
    said, is_whole = on_verdict("abcd", "axcd", "abc", "abce")
    assert said == "ranks have diverged at collective 2: rank 1 issued x; ranks 0, 2, 3 issued b" and is_whole


def test_a_difference_is_found_beyond_what_the_slowest_rank_has_issued() -> None:
    said, is_whole = on_verdict("abcd", "axcd", "", "a")
    assert said == (
        "ranks have diverged at collective 2: rank 0 issued b; rank 1 issued x; ranks 2, 3 did not come so far"
    )
    assert not is_whole


def test_a_rank_that_laid_nothing_open_is_named() -> None:
    opened = {0: recorded(*"abc").laid_open(), 1: recorded(*"abd").laid_open()}
    said, is_whole = verdict(opened, 3)
    assert said.endswith("collective 3: rank 0 issued c; rank 1 issued d; rank 2 did not come so far") and not is_whole


def test_the_verdict_on_what_nobody_remembers_any_more() -> None:
    said, is_whole = on_verdict("a" + "c" * 2000, "b" + "c" * 2000)
    assert said.startswith("ranks have diverged before collective 2,") and is_whole


def test_what_is_laid_open_in_the_midst_of_a_note_is_in_its_place() -> None:
    """Another thread looks between the steps of a note: an entry is there that the count does not hold yet."""
    record = recorded(*"abc")
    record.last.append((record.count, "d"))
    assert record.laid_open() == {"first": 0, "entries": [*"abcd"]}
