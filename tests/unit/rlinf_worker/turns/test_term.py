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

    def did(self, units: int, *, step: int = 3) -> bool:
        """Whether its turn is due then."""
        self.progress = Progress(units=units, items=99, step=step)
        return self.term.is_due()


@pytest.fixture
def worker():
    return Worker()


def test_a_turn_of_so_many_units_is_due_with_the_last_of_them_whatever_the_step(worker):
    worker.term.begin(until_units=2)
    worker.term.step_ended()
    assert [worker.did(units, step=4) for units in (10, 11, 12, 13)] == [False, False, True, True]


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


def test_else_it_is_due_with_the_end_of_the_step_in_which_it_took_something(worker):
    worker.term.begin(until_units=0)
    assert [worker.did(10, step=step) for step in (-1, 0, 0, 1)] == [False, False, False, True]
    worker.term.begin(until_units=0)
    assert [worker.did(10, step=step) for step in (1, 1, 2)] == [False, False, True]


def test_or_when_the_step_that_it_has_told_done_is_committed(worker):
    worker.term.begin(until_units=0)
    assert not worker.did(10)
    worker.term.step_ended()
    assert worker.did(10)
    worker.term.begin(until_units=0)
    assert not worker.did(10), "it is of the turn in which it was told"
