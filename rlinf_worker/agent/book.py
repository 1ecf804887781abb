"""Which instructions of which driver an agent obeys: the highest driver attempt, each id once, results repeatable.

Pure; called by `agent.py` for every Welcome and Instruction. Also holds the plan state that a Hello reports.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Answer:
    id: int
    ok: bool
    error: str = ""


class Verdict(Enum):
    DO = auto()
    UNDER_WAY = auto()  # the answer will come by itself


class Book:
    """`admit` each instruction; DO it and `finish`. Bounded: the oldest answers are forgotten first."""

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._answers: OrderedDict[int, Answer | None] = OrderedDict()
        self.highest = 0  # driver attempt

    def hear(self, driver_attempt: int) -> str:
        """A driver says which attempt it is. Empty, or the sentence with which it is refused."""
        if driver_attempt < self.highest:
            return (
                f"an older driver speaks: got driver attempt {driver_attempt}, wanted {self.highest} or more; "
                "it must exit, as a newer one drives this job"
            )
        if driver_attempt > self.highest:
            self.highest = driver_attempt
            self._answers.clear()  # ids are numbers of one driver attempt
        return ""

    def admit(self, id: int, *, driver_attempt: int) -> Verdict | Answer:
        if refused := self.hear(driver_attempt):
            return Answer(id, False, refused)
        if id in self._answers:
            return self._answers[id] or Verdict.UNDER_WAY
        self._answers[id] = None
        while len(self._answers) > self._keep:
            self._answers.popitem(last=False)
        return Verdict.DO

    def finish(self, answer: Answer, *, driver_attempt: int) -> Answer | None:
        """The answer to send; None where the driver that asked has been replaced."""
        if driver_attempt != self.highest:
            return None
        if answer.id in self._answers:
            self._answers[answer.id] = answer
        return answer


class PlanStage(Enum):
    NONE = 0
    PREPARED = 1
    COMMITTED = 2


@dataclass(frozen=True, slots=True)
class PlanView:
    """The newest plan revision that this agent knows of. A commit that an agent has seen is finished, never undone."""

    revision: int = 0
    stage: PlanStage = PlanStage.NONE
    committed: int = 0

    def prepare(self, revision: int) -> PlanView | str:
        if revision <= self.committed:
            return f"plan {revision} cannot be prepared: got revision {revision}, wanted more than {self.committed}"
        return PlanView(revision, PlanStage.PREPARED, self.committed)

    def commit(self, revision: int) -> PlanView | str:
        if revision == self.committed:
            return self
        if revision < self.committed:
            return f"plan {revision} cannot be committed: plan {self.committed} is in force here"
        return PlanView(revision, PlanStage.COMMITTED, revision)

    def abort(self, revision: int) -> PlanView | str:
        if revision <= self.committed:
            return f"plan {revision} cannot be aborted: its commit was seen here, so it must be finished"
        stage = PlanStage.COMMITTED if self.committed else PlanStage.NONE
        return PlanView(self.committed, stage, self.committed)
