"""Obeys the driver: an Instruction in, a Result out, once per id.

Called by `main.py` for every instruction that the Book admits. `Start` and `Stop` are the supervisor's, lease sets and
turns are turns.py's.

| instruction | done when | in time, or |
|---|---|---|
| start | its slots are free (vacancy.py) and the process runs (under a later number, if that one has been) | error |
| stop | its tree is gone | SIGKILL after the grace; at once where that is 0 |
| drain | no worker is left; nothing starts any more | SIGKILL after the deadline |
| lease sets | taken over | |
| turn | on its way to the worker, whose report is the answer | error, where it cannot be |
| prepare, commit, abort | noted for the next hello | |
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.errors import RLinfError, Stale, UserError
from rlinf_worker.agent.book import Admission, Book, InstructionResult, NewestPlan
from rlinf_worker.agent.lifecycle import Start
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.agent.vacancy import Vacancy
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)


class Instructions:
    def __init__(
        self,
        settings: Settings,
        *,
        supervisor: Supervisor,
        turns: AgentTurns,
        vacancy: Vacancy,
        book: Book,
        tell: Callable[[agents_pb2.AgentMessage], None],
    ) -> None:
        self._settings, self._supervisor, self._turns, self._vacancy = settings, supervisor, turns, vacancy
        self._book, self._tell = book, tell
        self._tasks: set[asyncio.Task[None]] = set()
        self._started_by: dict[str, int] = {}  # worker to driver attempt
        self.plan = NewestPlan()
        self.refused = 0

    def take(self, instruction: agents_pb2.Instruction) -> None:
        """Admits and begins; returns at once."""
        attempt = instruction.driver_attempt
        match self._book.admit(instruction.id, driver_attempt=attempt):
            case Admission.DO if instruction.WhichOneof("kind") == "turn":
                self._pass_on(instruction)
            case Admission.DO:
                task = asyncio.create_task(self._obey(instruction))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Admission.UNDER_WAY:
                logger.debug("instruction came again", extra={"id": instruction.id})
            case InstructionResult() as answer:
                if attempt < self._book.highest:  # else it is a question again, and was counted
                    self.refused += 1
                self._send(answer)

    async def _obey(self, instruction: agents_pb2.Instruction) -> None:
        try:
            await self._do(instruction)
            self._finish(instruction, InstructionResult(instruction.id, True))
        except Exception as error:  # noqa: BLE001 - top of a task: the driver hears of it, and so does the log
            self._finish(instruction, self._failed(instruction, error))

    def _pass_on(self, instruction: agents_pb2.Instruction) -> None:
        """An order for a worker's turn, at once. The worker's own report answers it; only a refusal is told."""
        try:
            self._turns.obey(instruction.turn)
            self._book.finish(InstructionResult(instruction.id, True), driver_attempt=instruction.driver_attempt)
        except Exception as error:  # noqa: BLE001 - as in _obey
            self._finish(instruction, self._failed(instruction, error))

    def _finish(self, instruction: agents_pb2.Instruction, answer: InstructionResult) -> None:
        if due := self._book.finish(answer, driver_attempt=instruction.driver_attempt):
            self._send(due)

    def _failed(self, instruction: agents_pb2.Instruction, error: Exception) -> InstructionResult:
        self.refused += 1
        where = {"id": instruction.id, "kind": instruction.WhichOneof("kind")}
        if isinstance(error, RLinfError):
            logger.warning("instruction failed", extra={**where, "error": str(error)})
            return InstructionResult(instruction.id, False, str(error))
        logger.error("instruction failed by a bug", extra=where, exc_info=error)
        return InstructionResult(instruction.id, False, f"{type(error).__name__}: {error}")

    def _send(self, answer: InstructionResult) -> None:
        result = agents_pb2.Result(instruction_id=answer.id, ok=answer.ok, error=answer.error)
        self._tell(agents_pb2.AgentMessage(result=result))

    async def _do(self, instruction: agents_pb2.Instruction) -> None:
        match instruction.WhichOneof("kind"):
            case "start":
                await self._start(start_of(instruction.start), driver_attempt=instruction.driver_attempt)
            case "stop":
                stop = instruction.stop
                self._vacancy.give_up(stop.worker)
                await self._supervisor.stop(stop.worker, reason=stop.reason, grace_s=stop.grace_s)
            case "drain":
                grace_s = instruction.drain.deadline_s or self._settings.stop_grace_s
                await self._supervisor.stop_all(reason="the pod is drained", grace_s=grace_s)
            case "lease_sets":
                self._turns.adopt(instruction.lease_sets)
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
                self._plan(self.plan.abort(instruction.plan_revision, switch=instruction.abort.switch_number))
            case None:
                raise UserError(
                    "an instruction of a kind that this agent does not know", got=f"id {instruction.id}",
                    next="run driver and worker pods from images of the same version",
                )  # fmt: skip

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
