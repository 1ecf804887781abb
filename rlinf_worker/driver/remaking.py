"""Work that is done again: the tickets from which lost units were made wait for somebody once more.

For: exchange.py, which hears of what is lost; stalls.py, which looks whether a step is short of anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlinf_worker.driver.ends import StepEnds
from rlinf_worker.driver.flow_queue import FlowQueue
from rlinf_worker.driver.job import Job
from rlinf_worker.queues.units import UnitId, UnitInfo


class Remaking:
    def __init__(self, job: Job, queues: Mapping[str, FlowQueue], ends: StepEnds) -> None:
        """`queues`: all of the flow, once they are declared."""
        self._job, self._queues, self._ends = job, queues, ends
        self._bereft: set[int] = set()
        """Steps that were open as a worker died that makes units: what it had made may have been told to nobody yet."""

    def producer_died(self) -> None:
        self._bereft |= {step.number for step in self._job.ledger.open_steps}

    def make_again(self, lost: Iterable[UnitInfo]) -> None:
        self._work_on({UnitId(unit.branch, ticket) for unit in lost for ticket in unit.of_tickets})

    def make_up(self, step: int) -> list[str]:
        """Tickets on which nobody works any more, though units of them are to come, of a step in which a producer died:
        where it answers in a cycle, whoever had asked may be through with a ticket whose units died with it before
        they were announced. They wait again; once for each death, as a role may also have made too few."""
        short = [ticket for ticket, _, _ in self._ends.short(step)] if step in self._bereft else []
        if short:
            self._bereft.discard(step)
        self._work_on({UnitId(self._ends.age_of(step).branch, ticket) for ticket in short})
        return short

    def close_step(self, step: int) -> None:
        self._bereft.discard(step)

    def _work_on(self, wanted: set[UnitId]) -> None:
        for queue in self._queues.values() if wanted else ():
            queue.tickets.make_again(wanted)
            if not queue.core.is_end:  # what has come there does not come again
                queue.core.expect_again(wanted)
