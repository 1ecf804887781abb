"""Who has come how far, as rank 0 and the others know it. Over links between workers: test_gang_meets.py."""

import pytest

from rlinf_worker.gang.meeting import Meeting, Word


@pytest.fixture
def ranks() -> list[Meeting]:
    return [Meeting(rank=rank, world=3) for rank in range(3)]


def tell(ranks: list[Meeting]) -> None:
    """Every word reaches whom it is for; said twice, as over a link that was made anew."""
    for _ in range(2):
        for rank in ranks[1:]:
            ranks[0].hear(rank.rank, rank.word)
        for rank in ranks[1:]:
            rank.hear(0, ranks[0].word)


def test_nobody_meets_before_all_have_come(ranks):
    for rank in ranks[:2]:
        rank.come((0, 1, 0), rank.rank)
    tell(ranks)
    assert [rank.met((0, 1, 0)) for rank in ranks] == [None, None, None]
    assert ranks[0].away((0, 1, 0)) == [2]
    ranks[2].come((0, 1, 0), 2)
    tell(ranks)
    assert [rank.met((0, 1, 0)) for rank in ranks] == [[0, 1, 2]] * 3


def test_a_place_is_met_at_by_who_has_come_as_far_or_further(ranks):
    """As under a new driver, which gives the rounds of a step other numbers."""
    for rank in ranks[1:]:
        rank.come((1, 2, 0), f"of {rank.rank}")
    ranks[0].come((0, 7, 1), "behind")
    tell(ranks)
    assert ranks[0].met((0, 7, 1)) == ["behind", "of 1", "of 2"]
    assert ranks[1].met((1, 2, 0)) is None
    ranks[0].come((1, 2, 0), "of 0")
    tell(ranks)
    assert [rank.met((1, 2, 0)) for rank in ranks] == [["of 0", "of 1", "of 2"]] * 3


def test_the_place_before_is_no_answer_for_this_one(ranks):
    for place in ((0, 1, 0), (0, 1, 1)):
        assert all(rank.met(place) is None for rank in ranks)
        for rank in ranks:
            rank.come(place, place[2])
        tell(ranks)
        assert [rank.met(place) for rank in ranks] == [[place[2]] * 3] * 3


def test_only_rank_0_speaks_for_all(ranks):
    ranks[1].come((0, 1, 0), 1)
    ranks[1].hear(2, Word((0, 1, 0), [7]))
    assert ranks[1].met((0, 1, 0)) is None
    assert ranks[1].away((0, 1, 0)) == [0]
