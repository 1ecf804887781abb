"""What the arbiter adds to the rule: time. Read off its timer, without waiting for it."""

import pytest

from rlinf_worker.settings import Settings
from rlinf_worker.turns.arbiter import Arbiter, Report
from rlinf_worker.turns.rule import LeaseSet, Standing, Turn


class Hands:
    """Takes orders, and remembers the number of the last one to each worker."""

    def __init__(self):
        self.last: dict[str, int] = {}

    def order(self, lease, order, *, number):
        self.last[order.worker] = number

    def kill(self, lease, worker, *, why):
        raise AssertionError(f"{worker} is killed: {why}")

    def stalled(self, lease, why):
        raise AssertionError(why)


@pytest.fixture
async def granted():
    """Two workers that were granted their turn and load."""
    hands = Hands()
    lease = LeaseSet(name="all", turns=(Turn(role="env", workers=("env/0", "env/1")),))
    arbiter = Arbiter(lease, hands, Settings(), first_number=0)
    for worker in ("env/0", "env/1"):
        arbiter.said(Report(worker=worker, standing=Standing.WANTS, ripe=True))
    assert set(hands.last) == {"env/0", "env/1"}
    yield arbiter, hands
    arbiter.close()


async def test_one_of_several_that_answers_gives_the_others_no_more_time(granted):
    arbiter, hands = granted
    due = arbiter._release.when()
    arbiter.said(Report(worker="env/0", standing=Standing.HOLDS, seen=hands.last["env/0"]))
    assert not arbiter._release.cancelled()
    assert arbiter._release.when() == due
    arbiter.said(Report(worker="env/1", standing=Standing.HOLDS, seen=hands.last["env/1"]))
    assert arbiter._release is None
