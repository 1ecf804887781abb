"""What a consumer leaves when it goes: what is open waits again; what has committed is over, said or not."""

import pytest

from rlinf_api.names import WorkerId
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import INLINE, Age, UnitInfo

ENV, OTHER = WorkerId("env/0"), WorkerId("env/1")


def ticket(step: int, *, branch: int = 0) -> UnitInfo:
    return UnitInfo(key=f"env:0@{step}", step=step, branch=branch, producer=INLINE)


@pytest.mark.parametrize("acked", [(), ("env:0@1",), ("env:0@1", "env:0@2")])
def test_tickets_of_committed_steps_are_not_handed_out_again(acked):
    """A role that never acknowledges would else make every step of the job again, each time that it is started."""
    core = QueueCore(micro_batch=10)
    core.consumers.ranked = [ENV, OTHER]
    core.announce([ticket(step) for step in (1, 2, 3, 4)])
    core.consumers.credit(ENV, 10)
    [(_, units)] = core.match().items()
    assert len(units) == 4
    core.held(ENV, branch=0, keys=[unit.key for unit in units])
    core.acked(ENV, branch=0, keys=acked)
    core.close(Age(0, 2))
    over = [unit.key for unit in core.departures.take_over(ENV)]
    assert over == [key for key in ("env:0@1", "env:0@2") if key not in acked], "whoever made it may free it"
    assert core.departures.remove_consumer(ENV) == []
    core.consumers.credit(OTHER, 10)
    [(_, again)] = core.match().items()
    assert [unit.key for unit in again] == ["env:0@3", "env:0@4"]
    assert core.counts["late"] == 2 - len(acked)


def test_steps_that_a_newer_branch_makes_again_are_open():
    core = QueueCore(micro_batch=10)
    core.consumers.ranked = [ENV, OTHER]
    core.announce([ticket(2, branch=1)])
    core.consumers.credit(ENV, 10)
    core.match()
    core.close(Age(0, 5))
    assert core.departures.take_over(ENV) == []
    core.departures.remove_consumer(ENV)
    core.consumers.credit(OTHER, 10)
    assert [unit.key for unit in core.match()[OTHER]] == ["env:0@2"]


def test_what_a_gang_has_of_a_step_is_left_to_its_commit_or_its_branch():
    core = QueueCore(micro_batch=10)
    core.consumers.ranked = [ENV, OTHER]
    core.end_here()
    core.announce([ticket(1)])
    core.consumers.credit(ENV, 10)
    core.match()
    core.close(Age(0, 1))
    assert core.departures.take_over(ENV) == []
