"""Which instructions of which driver an agent obeys: the highest driver attempt, each id once, results repeatable.

Pure; called by `agent.py` for every Welcome and Instruction. Also holds the plan state that a Hello reports.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class InstructionResult:
    id: int
    ok: bool
    error: str = ""


class Admission(Enum):
    DO = auto()
    UNDER_WAY = auto()  # the answer will come by itself


class Book:
    """`admit` each instruction; DO it and `finish`. Bounded: the oldest answers are forgotten first."""

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._answers: OrderedDict[int, InstructionResult | None] = OrderedDict()
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

    def admit(self, id: int, *, driver_attempt: int) -> Admission | InstructionResult:
        if refused := self.hear(driver_attempt):
            return InstructionResult(id, False, refused)
        if id in self._answers:
            return self._answers[id] or Admission.UNDER_WAY
        self._answers[id] = None
        while len(self._answers) > self._keep:
            self._answers.popitem(last=False)
        return Admission.DO

    def finish(self, answer: InstructionResult, *, driver_attempt: int) -> InstructionResult | None:
        """The answer to send; None where the driver that asked has been replaced."""
        if driver_attempt != self.highest:
            return None
        if answer.id in self._answers:
            self._answers[answer.id] = answer
        return answer


@dataclass(frozen=True, slots=True)
class NewestPlan:
    """The newest plan that this agent knows of. A commit that an agent has seen is finished, never undone.

    Ordered by the number of the switch and not by the revision: a person may pin an older plan again. The committed
    plan itself is kept, as a driver that begins anew may have to finish a switch that only agents know of.
    """

    revision: int = 0
    switch: int = 0  # above `committed_switch`: it is prepared
    plan_json: str = ""  # the plan of `revision`
    committed: int = 0  # revision
    committed_switch: int = 0
    committed_json: str = ""

    def prepare(self, revision: int, *, switch: int, plan_json: str) -> NewestPlan | str:
        if switch <= self.committed_switch:
            return self._refusal("prepared", revision, switch)
        return replace(self, revision=revision, switch=switch, plan_json=plan_json)

    def commit(self, revision: int, *, switch: int) -> NewestPlan | str:
        if (revision, switch) == (self.committed, self.committed_switch):
            return self
        if switch <= self.committed_switch:
            return self._refusal("committed", revision, switch)
        if (revision, switch) != (self.revision, self.switch):
            return f"plan {revision} cannot be committed: it was not prepared here by switch {switch}"
        return NewestPlan(revision, switch, self.plan_json, revision, switch, self.plan_json)

    def abort(self, revision: int, *, switch: int) -> NewestPlan | str:
        if switch <= self.committed_switch:
            return f"plan {revision} cannot be aborted: its commit was seen here, so it must be finished"
        return replace(self, revision=self.committed, switch=self.committed_switch, plan_json=self.committed_json)

    def _refusal(self, what: str, revision: int, switch: int) -> str:
        return (
            f"plan {revision} cannot be {what}: got switch {switch}, wanted more than {self.committed_switch}, "
            f"by which plan {self.committed} came into force here"
        )
