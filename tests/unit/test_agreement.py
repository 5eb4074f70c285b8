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


def test_the_verdict_names_the_first_difference_and_the_odd_rank_first() -> None:
    opened = {rank: recorded(*entries).laid_open() for rank, entries in enumerate(["abcd", "axcd", "abc", "abce"])}
    assert verdict(opened) == "ranks have diverged at collective 2: rank 1 issued x; ranks 0, 2, 3 issued b"


def test_the_verdict_on_what_nobody_remembers_any_more() -> None:
    one, other = recorded("a", *["c"] * 2000), recorded("b", *["c"] * 2000)
    assert verdict({0: one.laid_open(), 1: other.laid_open()}).startswith("ranks have diverged before collective 2,")
