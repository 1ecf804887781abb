"""The agent's end of its uplink (rlinf.agents.v1alpha1.Agents/Attach): hello, heartbeats, how long each word lasts.

Run by `main.py` for the life of the agent. Workers go on while there is no driver; a new one learns from the hello what
is here. Not for: the stream itself (`uplink.dialling`), or obeying (`instructions.py`).

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `run` | the uplink; the task of heartbeats beside it | its end | a final answer, or no driver for too long |
| `_beat` | | the next beat | time, a Welcome |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Protocol

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc
from rlinf_api.errors import Refused
from rlinf_api.report import Failure
from rlinf_worker import last_words
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.instructions import Book
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import Dialect, DriverAbsent, RefusedByDriver, Uplink, to_driver
from rlinf_worker.uplink.outbox import Lasts

DIALECT: Final[Dialect[agents_pb2.AgentMessage, agents_pb2.DriverMessage]] = Dialect(
    call=lambda channel: agents_pb2_grpc.AgentsStub(channel).Attach(),
    pack=lambda batch: batch[0],
    unpack=lambda frame: [frame],
    frame_messages=1,
)

LASTS: Final[Mapping[str, Lasts]] = MappingProxyType({"hung": Lasts.JOB, "result": Lasts.DRIVER})
"""Results are for the driver that asked, hangs for any. Turns and notices are in the next hello. Exits are repeated: a
stream that breaks says nothing about what had arrived, and a driver takes them once by (worker, attempt)."""

MIN_BEAT_S: Final = 0.02  # a driver that says less would have the agent do nothing else
MAX_BEAT_S: Final = 10.0  # a driver that says more could not tell a dead agent from a quiet one


class Holdings(Protocol):
    """What the agent holds, asked in the event loop whenever a stream begins and at every beat."""

    def hello(self, *, highest_driver_attempt: int) -> agents_pb2.Hello: ...

    def progress(self) -> list[agents_pb2.Progress]: ...

    def instructed(self, instruction: agents_pb2.Instruction) -> None:
        """Must not block; the answer is told some day."""
        ...


class Attachment:
    """`await run()` returns the failure (or the clean end, exit code 0) with which this agent has to exit."""

    def __init__(
        self,
        identity: PodIdentity,
        settings: Settings,
        *,
        holdings: Holdings,
        book: Book,
        clock: Callable[[], float],
    ) -> None:
        self._identity, self._holdings, self._book = identity, holdings, book
        self._tls = rpc.TlsFolder(identity.tls_dir)
        self.uplink = Uplink(
            self,
            wire=DIALECT,
            dial=to_driver(identity.driver_address, tls=self._tls, job_uid=identity.job_uid),
            who=f"pod {identity.pod}",
            address=identity.driver_address,
            settings=settings,
            write_timeout_s=settings.agent_dead_after_s,  # by then the driver takes us for dead anyway
            kept=settings.outbox_messages,
            clock=clock,
        )
        self._beat_s, self._welcomed = settings.heartbeat_interval_s, asyncio.Event()
        self.heartbeats = 0

    # --- saying -----------------------------------------------------------------------------------------------------
    def tell(self, message: agents_pb2.AgentMessage) -> None:
        self.uplink.tell(message, lasts=LASTS.get(message.WhichOneof("kind") or "", Lasts.STREAM))

    def exited(self, said: agents_pb2.WorkerExited) -> None:
        self.uplink.repeat(said.worker, agents_pb2.AgentMessage(exited=said))

    def started(self, worker: str) -> None:
        """It has a process again: its last exit is history, which the hello's attempt says as well."""
        self.uplink.forget(worker)

    # --- running ----------------------------------------------------------------------------------------------------
    async def run(self) -> Failure:
        self._tls.read()  # a missing Secret is said at once, not after the driver's absence
        beats = asyncio.create_task(self._beat())
        try:
            await self.uplink.run()
            return self._failure(Failure(exit_code=names.EXIT_OK, reason="Closed"))
        except RefusedByDriver as error:
            reason = {names.EXIT_OK: "Finished", names.EXIT_STALE: "Stale"}.get(error.exit_code, "Refused")
            return self._failure(Failure(exit_code=error.exit_code, reason=reason, message=error.said))
        except (Refused, DriverAbsent) as error:
            return self._failure(last_words.of(error))
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _beat(self) -> None:
        """After a pause of ours one beat, not all that were missed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._welcomed.wait()
            self._welcomed.clear()
            if self.uplink.is_connected:
                self.heartbeats += 1
                beat = agents_pb2.Heartbeat(sequence=self.heartbeats, progress=self._holdings.progress())
                self.tell(agents_pb2.AgentMessage(heartbeat=beat))

    def _failure(self, ended: Failure) -> Failure:
        return replace(ended, pod=self._identity.pod, node=self._identity.node)

    # --- what the driver says: the uplink's Part --------------------------------------------------------------------
    def hello(self, *, highest_driver_attempt: int) -> agents_pb2.AgentMessage:
        return agents_pb2.AgentMessage(hello=self._holdings.hello(highest_driver_attempt=highest_driver_attempt))

    def on_welcome(self, welcome: Any, *, is_new_driver: bool) -> None:
        self._book.hear(welcome.driver_attempt)
        if welcome.heartbeat_interval_s > 0:
            self._beat_s = min(MAX_BEAT_S, max(MIN_BEAT_S, welcome.heartbeat_interval_s))
        self._welcomed.set()

    def on_message(self, message: agents_pb2.DriverMessage) -> None:
        if message.WhichOneof("kind") == "instruction":
            self._holdings.instructed(message.instruction)
