"""Obeys the driver: an Instruction in, a Result out, once per id.

Called by `main.py` for every instruction that the Book admits. `Start` and `Stop` are the supervisor's, lease sets and
turns are turns.py's.

| instruction | done when | in time, or |
|---|---|---|
| start | its slots are free (vacancy.py) and the process runs (under a later number, if that one has been) | error |
| stop | its tree is gone | SIGKILL after the grace; at once where that is 0 |
| leave | noted: an agent that was told to end does so at once | |
| lease sets | taken over | |
| turn | on its way to the worker, whose report is the answer | error, where it cannot be |
| prepare, commit, abort | noted for the next hello | |
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.errors import RLinfError, Stale, UserError
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.agent.vacancy import Vacancy

logger = logging.getLogger(__name__)


class Book:
    """Which instructions of which driver are obeyed: the highest driver attempt, each id once, results repeatable.
    `admit` each instruction; do it and `finish`. Bounded: the oldest answers are forgotten first."""

    def __init__(self, *, keep: int) -> None:
        self._keep = keep
        self._answers: OrderedDict[int, agents_pb2.Result | None] = OrderedDict()
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

    def admit(self, id: int, *, driver_attempt: int) -> bool | agents_pb2.Result:
        """True: do it. False: it is under way, and the answer will come by itself."""
        if refused := self.hear(driver_attempt):
            return agents_pb2.Result(instruction_id=id, ok=False, error=refused)
        if id in self._answers:
            return self._answers[id] or False
        self._answers[id] = None
        while len(self._answers) > self._keep:
            self._answers.popitem(last=False)
        return True

    def finish(self, answer: agents_pb2.Result, *, driver_attempt: int) -> bool:
        """It is to be sent; False where the driver that asked has been replaced."""
        if driver_attempt != self.highest:
            return False
        if answer.instruction_id in self._answers:
            self._answers[answer.instruction_id] = answer
        return True


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


class Instructions:
    def __init__(
        self,
        *,
        supervisor: Supervisor,
        turns: AgentTurns,
        vacancy: Vacancy,
        book: Book,
        tell: Callable[[agents_pb2.AgentMessage], None],
    ) -> None:
        self._supervisor, self._turns, self._vacancy = supervisor, turns, vacancy
        self._book, self._tell = book, tell
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_by: dict[str, int] = {}  # worker to driver attempt
        self.plan = NewestPlan()
        self.may_leave = asyncio.Event()  # the driver has handed over what this pod does
        self.refused = 0

    def take(self, instruction: agents_pb2.Instruction) -> None:
        """Admits and begins; returns at once."""
        attempt = instruction.driver_attempt
        match self._book.admit(instruction.id, driver_attempt=attempt):
            case True if instruction.WhichOneof("kind") == "turn":
                self._pass_on(instruction)
            case True:
                task = asyncio.create_task(self._obey(instruction))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case False:
                logger.debug("instruction came again", extra={"id": instruction.id})
            case answer:
                if attempt < self._book.highest:  # else it is a question again, and was counted
                    self.refused += 1
                self._tell(agents_pb2.AgentMessage(result=answer))

    async def _obey(self, instruction: agents_pb2.Instruction) -> None:
        try:
            await self._do(instruction)
            self._finish(instruction)
        except Exception as error:  # noqa: BLE001 - top of a task: the driver hears of it, and so does the log
            self._failed(instruction, error)

    def _pass_on(self, instruction: agents_pb2.Instruction) -> None:
        """An order for a worker's turn, at once. The worker's own report answers it; only a refusal is told."""
        try:
            self._turns.obey(instruction.turn)
            done = agents_pb2.Result(instruction_id=instruction.id, ok=True)
            self._book.finish(done, driver_attempt=instruction.driver_attempt)
        except Exception as error:  # noqa: BLE001 - as in _obey
            self._failed(instruction, error)

    def _finish(self, instruction: agents_pb2.Instruction, *, error: str = "") -> None:
        answer = agents_pb2.Result(instruction_id=instruction.id, ok=not error, error=error)
        if self._book.finish(answer, driver_attempt=instruction.driver_attempt):
            self._tell(agents_pb2.AgentMessage(result=answer))

    def _failed(self, instruction: agents_pb2.Instruction, error: Exception) -> None:
        self.refused += 1
        where = {"id": instruction.id, "kind": instruction.WhichOneof("kind")}
        if isinstance(error, RLinfError):
            logger.warning("instruction failed", extra={**where, "error": str(error)})
            self._finish(instruction, error=str(error))
        else:
            logger.error("instruction failed by a bug", extra=where, exc_info=error)
            self._finish(instruction, error=f"{type(error).__name__}: {error}")

    async def _do(self, instruction: agents_pb2.Instruction) -> None:
        match instruction.WhichOneof("kind"):
            case "start":
                await self._start(start_of(instruction.start), driver_attempt=instruction.driver_attempt)
            case "stop":
                stop = instruction.stop
                self._vacancy.give_up(stop.worker)
                await self._supervisor.stop(stop.worker, reason=stop.reason, grace_s=stop.grace_s)
            case "leave":
                self.may_leave.set()
            case "lease_sets":
                await asyncio.gather(*map(self._leave_alone, self._turns.adopt(instruction.lease_sets)))
            case "prepare":
                prepare = instruction.prepare
                self._plan(
                    self.plan.prepare(
                        instruction.plan_revision, switch=prepare.switch_number, plan_json=prepare.plan_json
                    )
                )
            case "commit":
                self._plan(self.plan.commit(instruction.plan_revision, switch=instruction.commit.switch_number))
            case "abort":
                aborted = {"plan_revision": instruction.plan_revision, "why": instruction.abort.reason}
                logger.info("a plan that was prepared is not taken up", extra=aborted)
                self._plan(self.plan.abort(instruction.plan_revision, switch=instruction.abort.switch_number))
            case None:
                raise UserError(
                    "an instruction of a kind that this agent does not know", got=f"id {instruction.id}",
                    next="run driver and worker pods from images of the same version",
                )  # fmt: skip

    async def _leave_alone(self, worker: str) -> None:
        """It takes no turns any more, and hears so when nobody else that ends is on its slots. One that ends itself
        hears nothing: it would load once more, beside who has its slots now."""
        await self._vacancy.left_to(worker)
        if not self._supervisor.life(worker).ending:
            self._turns.alone(worker)

    async def _start(self, start: Start, *, driver_attempt: int) -> None:
        """A driver that came back counts attempts from what lives; what died before its time it cannot know. The number
        must grow all the same, as peers have seen the earlier ones: it becomes the next one here."""
        await self._vacancy.wait(start)
        life = self._supervisor.life(start.worker)
        last = life.attempt if not life.alive else 0
        if start.attempt <= last and driver_attempt > self._started_by.get(start.worker, driver_attempt):
            logger.info("attempt renumbered", extra={"worker": start.worker, "asked": start.attempt, "last": last})
            start = replace(start, attempt=last + 1)
        await self._supervisor.start(start)
        self._started_by[start.worker] = driver_attempt

    def _plan(self, outcome: NewestPlan | str) -> None:
        if isinstance(outcome, str):
            raise Stale(outcome)
        self.plan = outcome

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def start_of(message: agents_pb2.Start) -> Start:
    """Raises UserError for what no worker could be: the driver hears it as the error of its instruction."""
    role, _, number = message.worker.rpartition("/")
    if not role or not number.isdigit() or "/" in role:
        raise UserError("a worker cannot have this name", got=repr(message.worker), wanted="role/number")
    try:
        config = json.loads(message.config_json or "{}")
    except ValueError as error:
        raise UserError(f"the config of worker {message.worker} is not JSON", got=str(error)) from error
    if not isinstance(config, dict):
        raise UserError(f"the config of worker {message.worker} is not an object", got=type(config).__name__)
    return Start(
        worker=message.worker,
        role=message.role or role,
        kind=message.kind,
        rank=message.rank,
        world=message.world or 1,
        attempt=message.attempt,
        slots=tuple(message.slots),
        config_json=message.config_json or "{}",
        spare=message.spare,
        from_spare=message.from_spare,
        flow_json=message.flow_json or "{}",
    )
