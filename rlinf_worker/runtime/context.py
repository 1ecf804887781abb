"""`RoleContext` in a worker process: the role's one view of channels, weights, checkpoints, gang and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final, Literal, TypeVar

from rlinf_api.errors import UserError
from rlinf_api.slots import Allotment
from rlinf_worker.channels.protocol import Channel, LineageKey, PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints
from rlinf_worker.cycles.protocol import Answering, Asking
from rlinf_worker.gang.saving import beside
from rlinf_worker.gang.steps import StepLoop
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import FlowSettings, Gang, Phase, StepCommit, Trainer, Weights
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.runtime.work import Work
from rlinf_worker.spans import Recorder, SpanKind
from rlinf_worker.sums import Amount
from rlinf_worker.turns.worker import Turns

End = TypeVar("End")

PHASES: Final[Mapping[SpanKind, Phase]] = {"compute": "step", "load": "load", "offload": "load"}
"""That spans set by themselves."""


class Context:
    """Made once the driver has said which flow it is."""

    def __init__(
        self,
        identity: WorkerIdentity,
        session: WorkerSession,
        *,
        phases: Phases,
        work: Work,
        recorder: Recorder,
        turns: Turns,
        clock: Callable[[], float],
        stopping: asyncio.Event,
    ) -> None:
        assert session.flow is not None
        self.worker, self.role, self.rank = identity.worker, identity.role, identity.rank
        self.attempt, self.config = identity.attempt, identity.config
        self.pool, self.slots = identity.pool, identity.slots
        self.devices = identity.own_devices
        self.flow: FlowSettings = session.flow
        self.stopping = stopping
        self._session, self._phases, self._recorder, self._turns = session, phases, recorder, turns
        self._work, self._clock = work, clock
        self.moved = work.moved
        self._checkpoints: Checkpoints | None = None

    @property
    def world(self) -> int:
        return self._session.replans.world

    def stages(self, cycle: str) -> int:
        return self._session.replans.stages(cycle)

    @property
    def yield_wanted(self) -> asyncio.Event:
        return self._turns.yield_wanted

    @property
    def allotment(self) -> Allotment:
        return self._session.replans.allotment

    async def other_allotment(self, than: Allotment) -> Allotment:
        return await self._session.replans.other_allotment(than)

    def channel(self, name: str) -> Channel:
        return self._declared(self._session.queues, name, "is at no end of queue")

    def asking(self, name: str) -> Asking:
        return self._declared(self._session.askers, name, "asks in no cycle")

    def answering(self, name: str) -> Answering:
        return self._declared(self._session.answerers, name, "answers in no cycle")

    def _declared(self, found: Mapping[str, End], name: str, what: str) -> End:
        if name not in found:
            known = ", ".join(found)
            raise UserError(
                f"role {self.role!r} {what} {name!r}",
                got=repr(name),
                wanted=f"one of {known}" if known else "a flow that gives it one",
                next=f"look at what flow {self.flow.name!r} declares",
            )
        return found[name]

    @property
    def weights(self) -> Weights:
        return self._session.weights

    @property
    def checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            session, loop = self._session, asyncio.get_running_loop()

            def told(tell: Callable[[PolicyVersion, str], None]) -> Callable[[PolicyVersion, str], None]:
                """It is written in a thread, and told in the loop."""

                def later(version: PolicyVersion, words: str) -> None:
                    loop.call_soon_threadsafe(tell, version, words)

                return later

            self._checkpoints = Checkpoints(
                session.checkpoint_uri,
                role=self.role,
                roles=session.gangs,
                keep=session.checkpoint_keep,
                on_saved=told(session.steps.saved),
                on_failed=told(session.steps.not_saved),
                moved=self.moved,
            )
        return self._checkpoints

    def share(self, name: str, value: Any) -> None:
        self._session.facts.share(name, value)

    async def shared(self, name: str) -> Any:
        return await self._session.facts.shared(name)

    @property
    def gang(self) -> Gang:
        return self._session.gang

    async def ready(self, *, version: PolicyVersion | None = None) -> PolicyVersion:
        store, highest, state = self._checkpoints, 0, ""
        if store is not None:  # its folder may be on a slow network disk
            with self._phases.during("load"):
                highest = await beside(lambda: store.highest_branch)
            state = store.state_of(version) if version is not None else ""
        self.phase("ready")
        self._session.on_device()  # before the word to the driver: links are made again while no step is open
        begun = await self._session.steps.ready(version=version, highest_branch=highest, state_json=state)
        self.phase("step")
        self._follow_goal()
        if store is not None and self.rank == 0:
            with self._phases.during("load"):
                await beside(lambda: store.opened(begun.branch))
        return begun

    def _follow_goal(self) -> None:
        """An edit of the running job moves how far it goes and how much is kept."""
        told = self._session.steps
        if told.of_job:
            self.flow = replace(self.flow, steps=told.of_job)
        if told.kept and self._checkpoints is not None:
            self._checkpoints.keep = told.kept

    async def train(self, trainer: Trainer) -> None:
        await StepLoop(trainer, self, clock=self._clock).run()

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        committing = self._recorder.begin("comm", step=step)
        try:
            ended = [
                one for queue in self._session.queues.values() for one in queue.into.ended.take(step, branch=branch)
            ]
            commit = await self._session.steps.done(step, branch=branch, keys=keys, metrics=metrics, ended=ended)
        finally:
            committing.end()
        self._follow_goal()
        self._turns.step_ended()
        self.moved()
        return commit

    def phase(self, phase: Phase, *, deadline_s: float | None = None) -> None:
        self._phases.enter(phase, deadline_s=deadline_s)

    def span(
        self,
        kind: Literal["compute", "load", "offload", "weights", "comm", "other"],
        *,
        step: int = -1,
        phase: Phase | None = None,
        deadline_s: float | None = None,
        units: float = 0.0,
        tokens: float = 0.0,
    ) -> AbstractContextManager[Amount]:
        phase = phase or PHASES.get(kind) or (None if deadline_s is None else "step")
        return self._span(kind, step, phase, deadline_s, Amount(units, tokens))

    @contextmanager
    def _span(
        self, kind: SpanKind, step: int, phase: Phase | None, deadline_s: float | None, amount: Amount
    ) -> Iterator[Amount]:
        if kind == "compute" and deadline_s is None:
            deadline_s = self._phases.first_deadline_s
        span = self._recorder.begin(kind, step=step)
        in_phase = self._phases.during(phase, deadline_s=deadline_s) if phase is not None else nullcontext()
        try:
            with self._work.piece(kind), in_phase:
                yield amount
        finally:
            seconds = span.end(amount=amount if amount.units or amount.tokens else None)
            if kind == "compute":
                self._phases.note_step(seconds)
            elif kind == "weights":
                self._recorder.sums.moved("publish", seconds, 0.0)

    def report(self, *, step: int, metrics: Mapping[str, float], key: LineageKey | str = "") -> None:
        self._session.steps.report(step=step, branch=self._session.highest_branch, metrics=metrics, key=key)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._turns.turn():
            self._session.on_device()  # a role may load in its first turn
            yield

    async def safe_point(self, *, oldest: int | None = None) -> None:
        await self._turns.safe_point(oldest=oldest)
