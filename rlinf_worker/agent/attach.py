"""The agent's stream to its driver (rlinf.agents.v1alpha1.Agents/Attach): hello, heartbeats, instructions, and again.

Run by `main.py` for the life of the agent. Workers go on while there is no driver; a new one learns from the hello what
is here. Not for: obeying (that is `instructions.py`), or what is worth telling (`outbox.py`).

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `run` | streams, one after the other | back-off between them | time; a final answer ends it |
| `_write` (per stream) | the outbox | something in it, or the next beat | `Outbox.put`, time |
| `_read` (per stream) | the driver's messages | the next one | driver, its death (<= 4 s), our cancel |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc
from rlinf_api.errors import DeadlineExceeded, RetryableError, Stale, UserError, WorkerUnreachable
from rlinf_api.report import Failure
from rlinf_worker.agent.book import Book
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.outbox import Outbox
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)

_FINAL: Final = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Answers of a driver of our job (its certificate said so) that trying again does not change."""

Call = grpc.aio.StreamStreamCall[agents_pb2.AgentMessage, agents_pb2.DriverMessage]


class Holdings(Protocol):
    """What the agent holds, asked in the event loop whenever a stream begins and at every beat."""

    def hello(self) -> agents_pb2.Hello: ...

    def progress(self) -> list[agents_pb2.Progress]: ...

    def instructed(self, instruction: agents_pb2.Instruction) -> None:
        """Must not block; the answer goes into the outbox some day."""
        ...


class _Ended(Exception):
    """The driver's last word to this agent."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Attachment:
    """`await run()` returns the failure (or the clean end, exit code 0) with which this agent has to exit."""

    def __init__(
        self,
        identity: PodIdentity,
        settings: Settings,
        *,
        holdings: Holdings,
        book: Book,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._identity, self._settings, self._holdings = identity, settings, holdings
        self._book, self._outbox, self._clock, self._jitter = book, outbox, clock, jitter
        self._tls = rpc.TlsFolder(identity.tls_dir)
        self._heard_at = clock()
        self._driver = 0  # attempt of the driver of the last stream
        self._beat_s = settings.heartbeat_interval_s
        self.connected = False
        self._left_at: float | None = None  # by the last driver that had welcomed us
        self.streams = 0
        self.heartbeats = 0
        self._finishing = False
        self._stream_over = asyncio.Event()
        self._stream_over.set()

    async def finish(self) -> None:
        """Returns when the driver has read all that was put into the outbox: it ends the stream when we have. For the
        caller to bound. A call that is cancelled takes along what was written last."""
        self._finishing = True
        self._outbox.filled.set()
        await self._stream_over.wait()

    @property
    def driverless_s(self) -> float:
        return 0.0 if self._left_at is None else self._clock() - self._left_at

    async def run(self) -> Failure:
        self._tls.read()  # a missing Secret is said at once, not after the driver's absence
        pause, last = self._settings.reconnect_backoff_s, "no try was made"
        while True:
            try:
                await self._one_stream()
                last = "the driver ended the stream"
            except _Ended as ended:
                return ended.failure
            except grpc.aio.AioRpcError as error:
                if error.code() in _FINAL:
                    return self._refused(error)
                last = f"{error.code().name}: {error.details()}"
            except (RetryableError, DeadlineExceeded, OSError) as error:
                last = str(error)
            if self.connected:
                self.connected, pause = False, self._settings.reconnect_backoff_s
                # A driver with nothing to say is no absent one: its absence begins with the stream's end.
                self._heard_at = self._left_at = self._clock()
                if self._finishing:
                    return self._absent(last)
                logger.warning("driver lost; workers go on", extra={"error": last, "driver_attempt": self._driver})
            else:
                logger.debug("driver not reached", extra={"error": last})
            if self._clock() - self._heard_at >= self._settings.driver_absence_timeout_s:
                return self._absent(last)
            # Full agents of a job lose their driver in the same moment: half of the pause is by chance.
            await asyncio.sleep(pause * (0.5 + 0.5 * self._jitter()))
            pause = min(self._settings.reconnect_backoff_max_s, pause * 2)

    # --- one stream -------------------------------------------------------------------------------------------------
    async def _one_stream(self) -> None:
        """Returns or raises when the stream is over; raises _Ended for a final answer."""
        address = self._identity.driver_address
        server = names.tls_name("driver", self._identity.job_uid)
        channel: grpc.aio.Channel | None = None
        call: Call | None = None
        try:
            try:
                async with _within(self._settings.connect_timeout_s, f"a connection to driver {address}"):
                    channel = await rpc.dial(address, tls=self._tls, server=server)
                    call = agents_pb2_grpc.AgentsStub(channel).Attach()
                    await call.write(agents_pb2.AgentMessage(hello=self._holdings.hello()))
                async with _within(self._settings.welcome_timeout_s, f"the welcome of driver {address}"):
                    first = await call.read()
            except asyncio.InvalidStateError as error:  # grpc's word for a write on a call that has ended
                raise WorkerUnreachable(f"driver {address} hung up", got=await _why(call)) from error
            if not isinstance(first, agents_pb2.DriverMessage):
                raise WorkerUnreachable(f"driver {address} hung up", got=await _why(call), wanted="a welcome")
            self._hear(first, first_of_stream=True)
            self._stream_over.clear()
            await self._both_ways(call)
        finally:
            self._stream_over.set()
            if call is not None:
                call.cancel()
            if channel is not None:
                await channel.close()

    async def _both_ways(self, call: Call) -> None:
        reader, writer = asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            # The reader knows why a stream ended, the writer only that it did, or that it has said all.
            if not reader.done():
                await asyncio.wait({reader}, timeout=None if self._finishing else 0.1)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, call: Call) -> None:
        while isinstance(message := await call.read(), agents_pb2.DriverMessage):
            self._hear(message, first_of_stream=False)

    async def _write(self, call: Call) -> None:
        beat_at = self._clock()
        while True:
            while message := self._outbox.take():
                await self._send(call, message)
            if self._finishing:
                await call.done_writing()
                return
            if self._clock() >= beat_at:
                self.heartbeats += 1
                beat = agents_pb2.Heartbeat(sequence=self.heartbeats, progress=self._holdings.progress())
                await self._send(call, agents_pb2.AgentMessage(heartbeat=beat))
                # After a pause of ours one beat, not all that were missed.
                beat_at = max(beat_at + self._beat_s, self._clock())
            try:
                async with asyncio.timeout(max(0.0, beat_at - self._clock())):
                    await self._outbox.filled.wait()
            except TimeoutError:
                continue

    async def _send(self, call: Call, message: agents_pb2.AgentMessage) -> None:
        try:  # by then it takes us for dead anyway
            async with _within(self._settings.agent_dead_after_s, "the driver reading what its agent says"):
                await call.write(message)
        except asyncio.InvalidStateError as error:
            raise WorkerUnreachable("the driver's stream has ended", got=await _why(call)) from error

    # --- what the driver says ---------------------------------------------------------------------------------------
    def _hear(self, message: agents_pb2.DriverMessage, *, first_of_stream: bool) -> None:
        kind = message.WhichOneof("kind")
        if kind == "refusal":
            if first_of_stream and message.refusal.exit_code == names.EXIT_RETRYABLE:
                # No plan yet, or an older driver that sees it has been replaced: neither is worth the workers' lives.
                raise WorkerUnreachable(f"the driver says to come again: {message.refusal.message}")
            raise _Ended(self._refusal(message.refusal))
        if first_of_stream != (kind == "welcome"):
            raise WorkerUnreachable("the driver speaks out of turn", got=str(kind), wanted="one welcome, first")
        if kind == "welcome":
            self._welcome(message.welcome)
        self._heard_at = self._clock()
        if kind == "instruction":
            self._holdings.instructed(message.instruction)

    def _welcome(self, welcome: agents_pb2.Welcome) -> None:
        if welcome.protocol not in (names.PROTOCOL, names.PROTOCOL - 1):
            raise UserError(
                "the driver speaks another protocol", got=str(welcome.protocol), wanted=str(names.PROTOCOL),
                next="run driver and worker pods from images of the same version",
            )  # fmt: skip
        if refused := self._book.hear(welcome.driver_attempt):
            raise Stale(refused)
        self._outbox.again(same_driver=welcome.driver_attempt == self._driver)
        self._driver, self.connected, self._left_at = welcome.driver_attempt, True, None
        self.streams += 1
        if welcome.heartbeat_interval_s > 0:
            self._beat_s = min(10.0, max(0.02, welcome.heartbeat_interval_s))
        logger.info("attached", extra={"driver_attempt": self._driver, "driver": self._identity.driver_address})

    def _refusal(self, refusal: agents_pb2.Refusal) -> Failure:
        reason = {names.EXIT_OK: "Finished", names.EXIT_STALE: "Stale"}.get(refusal.exit_code, "Refused")
        return self._failure(refusal.exit_code, reason, refusal.message)

    def _refused(self, error: grpc.aio.AioRpcError) -> Failure:
        text = f"driver {self._identity.driver_address} refuses pod {self._identity.pod}: {error.details()}"
        return self._failure(names.EXIT_USER_ERROR, "Refused", text)

    def _absent(self, last: str) -> Failure:
        text = (
            f"no driver for {self._settings.driver_absence_timeout_s:g} s at {self._identity.driver_address} "
            f"(last try: {last}); see why the driver pod of the job does not run"
        )
        return self._failure(names.EXIT_RETRYABLE, "DriverAbsent", text)

    def _failure(self, exit_code: int, reason: str, message: str) -> Failure:
        where = self._identity
        return Failure(pod=where.pod, node=where.node, exit_code=exit_code, reason=reason, message=message)


@contextlib.asynccontextmanager
async def _within(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(what, timeout_s=limit_s) from error


async def _why(call: Call | None) -> str:
    if call is None or not call.done():
        return "no status"
    return f"{(await call.code()).name}: {await call.details()}"
