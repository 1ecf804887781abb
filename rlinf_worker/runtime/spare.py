"""A warm spare: a worker's process that has done what it can without a place, and waits for one.

    start ──> load: the role's imports, its `warm` ──> idle ──Promote──> a Worker like any other, in this process

For: runtime.main, where the agent's environment says that this process is one. It has no rank, no slot, no listener and
no stream to the driver: nobody but its agent knows of it. Not for: whether and when it takes a place (the driver's).

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | the first of: Promote, stop, a failed import, the agent's end | | any of them |
| import of the role (thread) | | nothing | |
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rlinf_api import names
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_worker import devices
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import FlowSettings, Role, Warmable
from rlinf_worker.runtime.agent_link import AgentLink
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.work import Work
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.threads import in_a_thread

logger = logging.getLogger(__name__)

BEAT_S: Final = 2.0  # a fifth of the shortest deadline that it could miss, and next to no CPU

COMM_BYTES: Final = 15  # the kernel keeps no more


class Spare:
    """`await Spare(...).run()`: who it has become, and its role; None where it was told to end."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        settings: Settings,
        make_role: Callable[[], Role],
        flow: FlowSettings,
        open_link: Callable[..., AgentLink] = AgentLink,
    ) -> None:
        self._identity, self._settings, self._make_role, self._flow = identity, settings, make_role, flow
        self._open_link = open_link
        self._stopping = asyncio.Event()
        self._place: asyncio.Future[slots_pb2.Promote] = asyncio.get_running_loop().create_future()
        self.exit_code = names.EXIT_OK
        self._leaving: asyncio.Future[None] | None = None

    def stop(self, why: str, grace_s: float = 0.0, *, exit_code: int = names.EXIT_OK) -> None:
        logger.info("spare stops", extra={"why": why, "grace_s": grace_s})
        self.exit_code = max(self.exit_code, exit_code)
        self._stopping.set()

    def _promote(self, place: slots_pb2.Promote) -> None:
        if not self._place.done():
            self._place.set_result(place)

    async def run(self) -> tuple[WorkerIdentity, Callable[[], Role]] | None:
        phases = Phases(self._settings)
        link = self._open_link(
            self._identity,
            phases=phases,
            work=Work(waits=Waits(), phases=phases, moves=lambda: None),
            recorder=Recorder(),
            numbers=lambda: (),
            on_stop=self.stop,
            on_promote=self._promote,
            flush_s=BEAT_S,
        )
        await link.open()
        phases.enter("load")
        made = in_a_thread(self._warm_role, name="import of the role")
        role = asyncio.wrap_future(made)
        stop, agent = asyncio.ensure_future(self._stopping.wait()), asyncio.ensure_future(link.run())
        ends: set[asyncio.Future[Any]] = {self._place, stop, agent, role}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if role.done() and role.exception() is None:
                phases.enter("idle")
                ends.discard(role)
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._place.done():
                return become(self._identity, self._place.result()), made.result
            if self._stopping.is_set():
                return None
            for end in ends:  # the import failed, or the agent is gone: either raises
                if end.done():
                    end.result()
            raise InvariantBroken("a warm spare ended without a cause")
        finally:
            self._leaving = asyncio.ensure_future(_leave(link, {stop, agent, role}))

    async def left(self) -> None:
        """The stream of the spare is closed; beside the first steps of the worker that it has become."""
        if self._leaving is not None:
            await self._leaving

    def _warm_role(self) -> Role:
        role = self._make_role()
        if isinstance(role, Warmable):
            role.warm(self._flow, self._identity.config)
        return role


async def _leave(link: AgentLink, waits: set[asyncio.Future[Any]]) -> None:
    await link.close()  # first: a read that is cancelled takes along what was not written yet
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def become(identity: WorkerIdentity, place: slots_pb2.Promote) -> WorkerIdentity:
    """Also in this process' environment, which the role and what it starts may read; and by its name in `ps`, as what
    /proc shows of an environment is that of its start."""
    with contextlib.suppress(OSError):  # for people alone
        Path("/proc/self/comm").write_text(place.worker[:COMM_BYTES], encoding="utf-8")
    os.environ |= {
        names.ENV_WORKER_ID: place.worker,
        names.ENV_WORKER_RANK: str(place.rank),
        names.ENV_WORKER_WORLD: str(place.world),
        names.ENV_WORKER_ATTEMPT: str(place.attempt),
        names.ENV_WORKER_SLOTS: ",".join(map(str, place.slots)),
        names.ENV_WORKER_SPARE: "",
        **devices.environ_of(devices.of(os.environ), place.slots),  # CUDA reads it as it begins, which is after `warm`
    }
    return dataclasses.replace(
        identity,
        worker=WorkerId(place.worker),
        rank=place.rank,
        world=place.world,
        attempt=place.attempt,
        slots=tuple(place.slots),
        config=json.loads(place.config_json or "{}"),
    )


def flow_of(path: str) -> FlowSettings:
    """What the agent left for a spare, who hears of no driver's Welcome."""
    return FlowSettings.from_json(Path(path).read_text(encoding="utf-8"))
