"""`RoleContext` in a worker process: the role's one view of channels, weights, checkpoints, gang and time.

Made by runtime.worker once the driver has said which flow it is; called from the role's own task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Final, Literal, TypeVar

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import Channel, LineageKey, PolicyVersion
from rlinf_worker.checkpoints.store import FileCheckpoints
from rlinf_worker.cycles.protocol import Answering, Asking
from rlinf_worker.gang.steps import StepLoop
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import CheckpointStore, FlowSettings, Gang, Phase, StepCommit, Trainer, Weights
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.spans import Recorder, SpanKind
from rlinf_worker.turns.worker import Turns

End = TypeVar("End")

PHASES: Final[Mapping[SpanKind, Phase]] = {"compute": "step", "load": "load", "offload": "load"}
"""That spans set by themselves."""


class Context:
    """One per worker process."""

    def __init__(
        self,
        identity: WorkerIdentity,
        session: WorkerSession,
        *,
        phases: Phases,
        recorder: Recorder,
        turns: Turns,
        stopping: asyncio.Event,
    ) -> None:
        assert session.flow is not None
        self.worker, self.role, self.rank = identity.worker, identity.role, identity.rank
        self.attempt, self.config = identity.attempt, identity.config
        self.pool, self.slots = identity.pool, identity.slots
        self.flow: FlowSettings = session.flow
        self.stopping = stopping
        self._session, self._phases, self._recorder, self._turns = session, phases, recorder, turns
        self._checkpoints: FileCheckpoints | None = None

    @property
    def world(self) -> int:
        return self._session.replans.world

    def stages(self, cycle: str) -> int:
        return self._session.replans.stages(cycle)

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
    def checkpoints(self) -> CheckpointStore:
        if self._checkpoints is None:
            session = self._session
            self._checkpoints = FileCheckpoints(
                session.checkpoint_uri,
                keep=session.checkpoint_keep,
                on_saved=session.steps.saved,
                on_failed=session.steps.not_saved,
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
        store, highest = self._checkpoints, 0
        if store is not None:  # its folder may be on a slow network disk, and the loop stands still meanwhile
            with self._phases.during("load"):
                highest = store.highest_branch
        self.phase("ready")
        begun = await self._session.ready(version=version, highest_branch=highest)
        self.phase("step")
        if store is not None and self.rank == 0:
            with self._phases.during("load"):
                store.opened(begun.branch)
        return begun

    async def train(self, trainer: Trainer) -> None:
        await StepLoop(trainer, self).run()

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        committing = self._recorder.begin("comm", step=step)
        try:
            commit = await self._session.step_done(step, branch=branch, keys=keys, metrics=metrics)
        finally:
            committing.end()
        self._turns.term.step_ended()
        return commit

    def phase(self, phase: Phase, *, deadline_s: float | None = None) -> None:
        self._phases.enter(phase, deadline_s=deadline_s)

    def span(
        self,
        kind: Literal["compute", "load", "offload", "weights", "comm", "other"],
        *,
        step: int = -1,
        phase: Phase | None = None,
    ) -> AbstractContextManager[None]:
        return self._span(kind, step, phase or PHASES.get(kind))

    @contextmanager
    def _span(self, kind: SpanKind, step: int, phase: Phase | None) -> Iterator[None]:
        span = self._recorder.begin(kind, step=step)
        try:
            with self._phases.during(phase) if phase is not None else nullcontext():
                yield
        finally:
            seconds = span.end()
            if kind == "compute":
                self._phases.note_step(seconds)

    def report(self, *, step: int, metrics: Mapping[str, float], key: LineageKey | str = "") -> None:
        self._session.report(step=step, metrics=metrics, key=key)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._turns.turn():
            self._session.on_device()  # a role may load in its first turn
            yield

    async def safe_point(self) -> None:
        await self._turns.safe_point()
