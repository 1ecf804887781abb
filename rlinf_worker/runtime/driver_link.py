"""The worker's one stream to the driver: batches out, batches in, made again with what this worker holds.

For: runtime.worker, which owns it and gives it a `Session`: what to say first, what to do with what comes. Not for: the
meaning of a message.

    dial the name ─► Hello (everything held) ─► Welcome ─► batches both ways ─► broken ─► back-off ─► dial again

What was under way in a stream that breaks is lost, on either side. That is why a Hello states everything that counts,
and why nothing is kept here for a driver that is away.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | messages of the driver | a stream; a batch; a back-off | the driver; gRPC's keepalive (4 s); close |
| _write, one per stream | what was told, what is marked | something to send | tell, mark; the end of the stream |

A stream that can only be read is none: where the writing of it fails, it ends. What cannot be written at all is a bug
and ends `run`, as a worker that is heard of no more and lives on would hold up its job for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api.errors import DeadlineExceeded, RetryableError, RLinfError, Stale, UserError, WorkerUnreachable
from rlinf_worker.runtime.host import Drainable
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)

MAX_OUTGOING: Final = 20_000
"""Messages that wait to be written. Announcements and acknowledgements are bounded by capacity and credit far below
it; a stream that does not move for so long is broken and made again."""
WELCOME_TIMEOUT_S: Final = 10.0  # a driver that is up answers a Hello in a millisecond

Dial = Callable[[], Awaitable[grpc.aio.Channel]]


class Session(Protocol):
    """What the stream carries."""

    def hello(self, *, highest_driver_attempt: int) -> pb.Hello:
        """Everything this worker holds, now. Called before each connection; nothing may wait in between."""
        ...

    def on_welcome(self, welcome: pb.Welcome, *, is_new_driver: bool) -> None: ...
    def on_message(self, message: pb.DriverMessage) -> None: ...


class RefusedByDriver(RLinfError):
    """The driver's last word to this worker; it exits with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(f"the driver refuses this worker: {message}")
        self.exit_code = exit_code


class DriverLink:
    """`run` until `close`, or until it raises: RefusedByDriver, WorkerUnreachable (the driver was away too long)."""

    def __init__(self, session: Session, *, dial: Dial, settings: Settings) -> None:
        self._session, self._dial, self._settings = session, dial, settings
        self._outgoing: deque[pb.WorkerMessage] = deque()
        self._marked: dict[Drainable, None] = {}
        self._something = asyncio.Event()
        self._is_open = False
        self._is_written = asyncio.Event()
        self._call: Any = None
        self._is_closing = False
        self.is_connected = False
        self.highest_driver_attempt = 0
        self.reconnects = 0
        self.sent_messages = 0

    # --- saying -------------------------------------------------------------------------------------------------------
    def tell(self, message: pb.WorkerMessage) -> None:
        """In the next batch; dropped where no stream is open, as the next Hello says what counts."""
        if not self._is_open:
            return
        if len(self._outgoing) >= MAX_OUTGOING:
            logger.error("the driver does not read; connecting anew", extra={"messages": len(self._outgoing)})
            self._break()
            return
        self._outgoing.append(message)
        self._something.set()

    def mark(self, source: Drainable) -> None:
        """Its `drain` is called for the next batch."""
        self._marked[source] = None
        self._something.set()

    def _break(self) -> None:
        self._is_open = False
        self._outgoing.clear()
        if self._call is not None:
            self._call.cancel()

    async def close(self, *, timeout_s: float = 0.5) -> None:
        """Everything told so far arrives, if the driver reads; then `run` returns. Gives up silently: last moments."""
        self._is_closing = True
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(timeout_s):
                while self._is_open and (self._outgoing or self._marked or not self._is_written.is_set()):
                    self._is_written.clear()
                    self._something.set()
                    await self._is_written.wait()
                if self._is_open:
                    # A call that is cancelled at once may take its last message along: the driver ends it.
                    await self._call.done_writing()
                    await self._call.code()

    async def _write(self, call: Any) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            # One turn of the loop later everything that this turn gives rise to is in the batch.
            await asyncio.sleep(0)
            batch = list(self._outgoing)
            self._outgoing.clear()
            marked, self._marked = self._marked, {}
            for source in marked:
                source.drain(batch)
            if batch:
                self._is_written.clear()
                self.sent_messages += 1
                await call.write(pb.WorkerBatch(messages=batch))
            self._is_written.set()

    # --- connecting ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        settings = self._settings
        backoff_s, away_since, why = settings.reconnect_backoff_s, monotonic(), "it was never reached"
        while True:
            try:
                welcomed = await self._connect_once()
                if welcomed:
                    self.reconnects += 1
                    backoff_s, away_since = settings.reconnect_backoff_s, monotonic()
                why = "its stream ended"
            except (RetryableError, DeadlineExceeded) as error:
                why = str(error)
            except grpc.aio.AioRpcError as error:
                if self.is_connected:
                    backoff_s, away_since = settings.reconnect_backoff_s, monotonic()
                    self.reconnects += 1
                why = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise UserError("the driver refuses this worker's certificate", got=why) from error
            finally:
                self.is_connected = False
                self._break()
            if self._is_closing:
                return
            away_s = monotonic() - away_since
            if away_s > settings.driver_absence_timeout_s:
                raise WorkerUnreachable(
                    f"no driver for {away_s:.0f} s", got=why, wanted="a driver at RLINF_DRIVER_ADDRESS",
                    next="this worker ends; its slots must not stay taken",
                )  # fmt: skip
            logger.info("driver is away", extra={"why": why, "away_s": round(away_s, 1)})
            await asyncio.sleep(backoff_s)
            backoff_s = min(settings.reconnect_backoff_max_s, backoff_s * 2)

    async def _connect_once(self) -> bool:
        """One stream from dial to end; whether it was welcomed."""
        channel = await self._dial()
        async with channel:
            call: Any = channels_pb2_grpc.ChannelsStub(channel).Connect()
            self._call = call
            # From here on `tell` queues behind the Hello: what changes after it was made is not lost.
            hello = self._session.hello(highest_driver_attempt=self.highest_driver_attempt)
            self._outgoing = deque([pb.WorkerMessage(hello=hello)])
            self._is_open = True
            self._something.set()
            writer = asyncio.get_running_loop().create_task(self._write(call), name="to the driver")
            writer.add_done_callback(lambda _: call.cancel())
            try:
                await self._expect_welcome(call)
                await self._read(call)
            except asyncio.CancelledError:
                if _is_cancelled_from_outside():
                    raise
                # `_break` ended the call, or the writer
            finally:
                self._is_open = False
                writer.cancel()
                await asyncio.wait([writer])
                call.cancel()
            if not writer.cancelled() and (error := writer.exception()) is not None:
                if not isinstance(error, (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)):
                    raise error
                logger.info("the stream to the driver could not be written", extra={"error": str(error)})
            return self.is_connected

    async def _expect_welcome(self, call: Any) -> None:
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                batch = await call.read()
        except TimeoutError as error:
            raise DeadlineExceeded("the driver's Welcome", timeout_s=WELCOME_TIMEOUT_S, missing="any answer") from error
        if batch is grpc.aio.EOF or not batch.messages:
            raise WorkerUnreachable("the driver ended the stream without a word", next="try again")
        first = batch.messages[0]
        if first.WhichOneof("kind") == "refusal":
            self._on_refusal(first.refusal)
        if first.WhichOneof("kind") != "welcome":
            raise WorkerUnreachable("the driver did not begin with a Welcome", got=str(first.WhichOneof("kind")))
        welcome = first.welcome
        if welcome.driver_attempt < self.highest_driver_attempt:
            raise Stale(
                "a driver of an older attempt answered", got=str(welcome.driver_attempt),
                wanted=f"at least {self.highest_driver_attempt}",
            )  # fmt: skip
        if welcome.protocol not in (names.PROTOCOL, names.PROTOCOL - 1):
            raise UserError(
                "driver and worker speak different protocols", got=str(welcome.protocol), wanted=str(names.PROTOCOL),
                next="use the same version of rlinf_worker in all images of a job",
            )  # fmt: skip
        is_new = welcome.driver_attempt > self.highest_driver_attempt > 0
        self.highest_driver_attempt = welcome.driver_attempt
        self.is_connected = True
        logger.info("connected to the driver", extra={"driver_attempt": welcome.driver_attempt})
        self._session.on_welcome(welcome, is_new_driver=is_new)
        for message in batch.messages[1:]:
            self._session.on_message(message)

    def _on_refusal(self, refusal: pb.Refusal) -> None:
        """A driver that cannot use us yet (it has no plan) is asked again; else this worker ends."""
        if refusal.exit_code in (names.EXIT_OK, names.EXIT_RETRYABLE):
            raise WorkerUnreachable("the driver is not ready for this worker", got=refusal.message, next="try again")
        raise RefusedByDriver(refusal.message, exit_code=refusal.exit_code)

    async def _read(self, call: Any) -> None:
        on_message = self._session.on_message
        while (batch := await call.read()) is not grpc.aio.EOF:
            for message in batch.messages:
                on_message(message)


def _is_cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
