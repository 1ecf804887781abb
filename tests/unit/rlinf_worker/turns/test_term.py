"""When a turn is due, by what a worker has done, and what it counts as having done."""

from typing import Any

import pytest

from rlinf_worker.channels.account import Account
from rlinf_worker.turns.term import Progress, Term


def account(side: str, **fields: Any) -> Account:
    return Account(channel="a", side=side, **fields)


@pytest.mark.parametrize(
    ("accounts", "wanted"),
    [
        ([], Progress(units=0, items=0, step=-1)),
        ([account("producer", items=4, step=9)], Progress(units=4, items=4, step=-1)),
        ([account("consumer", items=3, step=2), account("producer", items=4)], Progress(units=3, items=7, step=2)),
        ([account("consumer", items=3, step=2), account("consumer", units=True, items=5, step=1)],
         Progress(units=5, items=8, step=2)),
        ([account("consumer", units=True, items=6, rounds=2), account("consumer", items=1, rounds=1)],
         Progress(units=3, items=7, step=-1)),
    ],
)  # fmt: skip
def test_rounds_count_before_units_and_units_before_items(accounts, wanted):
    assert Progress.of(accounts) == wanted


class Worker:
    def __init__(self) -> None:
        self.progress = Progress(units=10, items=20, step=3)
        self.term = Term(lambda: self.progress)

    def did(self, units: int) -> bool:
        """Whether its turn is due then."""
        self.progress = Progress(units=units, items=99, step=3)
        return self.term.is_due()

    def took(self, *steps: int) -> list[bool]:
        """Whether its turn is due behind each."""
        found = []
        for step in steps:
            self.term.took(step)
            found.append(self.term.is_due())
        return found


@pytest.fixture
def worker():
    return Worker()


def test_a_turn_of_so_many_units_is_due_with_the_last_of_them_whatever_the_step(worker):
    worker.term.begin(until_units=2)
    worker.term.step_ended()
    assert worker.took(3, 4, 5) == [False] * 3
    assert [worker.did(units) for units in (10, 11, 12, 13)] == [False, False, True, True]


def test_a_turn_that_is_told_to_end_is_due_whatever_is_left_of_it_and_the_next_is_not(worker):
    worker.term.begin(until_units=20)
    assert not worker.did(11)
    worker.term.end()
    assert worker.did(11)
    worker.term.begin()
    assert [worker.did(units) for units in (30, 31)] == [False, True]


def test_another_turn_is_as_long_and_begins_where_it_begins(worker):
    worker.term.begin(until_units=2)
    assert worker.did(15)
    worker.term.begin()
    assert [worker.did(units) for units in (15, 16, 17)] == [False, False, True]
    worker.term.begin(until_units=0)
    assert not worker.did(99), "by the step again"


def test_else_it_is_due_with_the_end_of_the_step_that_it_took_first(worker):
    worker.term.begin(until_units=0)
    assert worker.took(-1, 0, 0, 1) == [False, False, False, True]
    worker.term.begin(until_units=0)
    assert worker.took(2, 2, -1, 3) == [False, False, False, True], "the turn before is none of its business"


def test_or_when_the_step_that_it_has_told_done_is_committed(worker):
    worker.term.begin(until_units=0)
    assert worker.took(3) == [False]
    worker.term.step_ended()
    assert worker.term.is_due()
    worker.term.begin(until_units=0)
    assert worker.took(4) == [False], "it is of the turn in which it was told"


def test_a_step_is_over_when_nothing_of_it_is_under_way_though_something_newer_is_begun(worker):
    worker.term.begin(until_units=0)
    worker.took(4, 5, 6)
    assert [worker.term.is_due(oldest=step) for step in (4, 4, 5)] == [False, False, True]
    worker.term.step_ended()
    assert worker.term.is_due(oldest=4), "a gang has told the step done"


def test_a_turn_is_of_the_oldest_step_that_was_left_from_the_one_before(worker):
    worker.term.begin(until_units=0)
    worker.took(6)
    assert [worker.term.is_due(oldest=step) for step in (4, 4, 5)] == [False, False, True]
    worker.term.begin(until_units=0)
    assert [worker.term.is_due(oldest=step) for step in (5, 6)] == [False, True], "though it took nothing"
    worker.term.begin(until_units=0)
    worker.term.end()
    assert worker.term.is_due(oldest=4), "told to end, it does not wait for the longest"
