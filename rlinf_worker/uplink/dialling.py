"""The end of an uplink that dials: an agent's or a worker's one stream to its driver, made again whenever it ends.

For: agent.attach and runtime.worker, which give it a `Part` (what to say first, what to do with what comes) and a
`Dialect` (how the service carries messages). Not for: the meaning of a message.

    dial ─► hello ─► Welcome ─► messages both ways ─► the stream ends ─► back-off ─► dial again
             made anew each time    refused: come again (back-off) | end with this exit code | stale (back-off)

Nothing but the hello is said to a driver that has not welcomed us. Of what is told from the making of the hello on,
nothing is lost while the stream lives; `Kept` has the table of what outlives it. The highest driver attempt that
ever welcomed us is remembered: a driver of a lower one has been replaced, does not know it, and is refused.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| `run` | streams, one after the other | back-off between them | time; `close`; a driver's last word raises |
| the stream: its reader | the driver's messages | the next one | the driver; keepalive, where it is frozen (<= 6 s) |
| the stream: its writer | the outbox, then what is marked | something to say | `tell`, `mark`, `close` |

A stream that can only be read is none: where the writing of it fails, it ends. What cannot be written at all is a bug
and ends `run`, as a part that is heard of no more and lives on would hold up its job for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api.errors import DeadlineExceeded, Refused, RetryableError, RLinfError, Stale, UserError, WorkerUnreachable
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.outbox import Kept, Lasts, Outbox, Sized, Told, in_frames

logger = logging.getLogger(__name__)

Said = TypeVar("Said", bound=Sized)
Heard = TypeVar("Heard")
_Said_contra = TypeVar("_Said_contra")
_Heard_contra = TypeVar("_Heard_contra", contravariant=True)

Dial = Callable[[], Awaitable[grpc.aio.Channel]]

_FINAL: Final = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)
"""Answers of a driver of our job (its certificate said so) that trying again does not change."""

_REASON_WAIT_S: Final = 0.1
"""After a write has failed: the reader knows why a stream ended, the writer only that it did. The status comes with the
end of the stream, so this is for the event loop alone."""


class Drainable(Protocol[_Said_contra]):
    """Has things to tell the driver, in few messages, when asked."""

    comes_last: bool
    """What it says is of what others say: that no more is made of a unit, behind what was."""

    def drain(self, out: list[_Said_contra]) -> None: ...


class Part(Protocol[_Heard_contra]):
    """Who dials: an agent or a worker. All three are called in the event loop and must not block."""

    def hello(self, *, highest_driver_attempt: int) -> Any:
        """The message with everything that it holds, now. Called for each connection; nothing is awaited before the
        outbox is open."""
        ...

    def on_welcome(self, welcome: Any, *, is_new_driver: bool) -> None:
        """Called once per stream, before any `on_message`. Not for the very first driver: `is_new_driver`."""
        ...

    def on_message(self, message: _Heard_contra) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(Generic[Said, Heard]):
    """How one service of the driver carries messages. Its messages of both directions are a oneof `kind`, with `hello`
    there, `welcome` (driver_attempt, protocol) and `refusal` (message, exit_code) back.

    Dialect(call=lambda channel: AgentsStub(channel).Attach(), pack=lambda batch: batch[0],
         unpack=lambda frame: [frame], frame_messages=1)
    """

    call: Callable[[grpc.aio.Channel], Any]
    pack: Callable[[list[Said]], Any]
    unpack: Callable[[Any], Sequence[Heard]]
    frame_messages: int | None
    """At most so many in one frame; None: any number."""


class RefusedByDriver(RLinfError):
    """The driver's last word to this part: it exits with `exit_code`. `said`: the driver's sentence alone."""

    def __init__(self, said: str, *, who: str, exit_code: int) -> None:
        super().__init__(f"the driver refuses {who}: {said}")
        self.said, self.exit_code = said, exit_code


class DriverAbsent(WorkerUnreachable):
    """Nobody drives for too long: slots that nobody drives must not stay taken."""


def to_driver(address: str, *, tls: rpc.TlsFolder, job_uid: str) -> Dial:
    """Dials the driver of that job. Its name is looked up and the certificates are read each time, as both change."""
    server = names.tls_name(names.COMPONENT_DRIVER, job_uid)

    async def dial() -> grpc.aio.Channel:
        return await rpc.dial(address, tls=tls, server=server)

    return dial


class Uplink(Generic[Said, Heard]):
    """`run` until `close`, or until it raises: RefusedByDriver, Refused (by gRPC status), DriverAbsent, UserError (it
    speaks another protocol), and whatever the part raises that is not worth another try."""

    def __init__(
        self,
        part: Part[Heard],
        *,
        wire: Dialect[Said, Heard],
        dial: Dial,
        who: str,
        address: str,
        settings: Settings,
        write_timeout_s: float,
        kept: int,
        clock: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`who` and `address` are for sentences. `write_timeout_s`: for one frame to be taken; `kept`: messages that
        wait for a driver. `clock`: stands still while we do, as a driver that we could not dial is not absent.
        `jitter`: from [0, 1)."""
        self._part, self._wire, self._dial = part, wire, dial
        self._who, self._address, self._settings = who, address, settings
        self._write_timeout_s, self._clock, self._jitter = write_timeout_s, clock, jitter
        self._kept: Kept[Said] = Kept(limit=kept)
        self._outbox: Outbox[Told[Said]] | None = None  # from the making of a hello until its stream ends
        self._in_hand: deque[Told[Said]] = deque()  # taken from the outbox, and not written yet
        self._marked: dict[Drainable[Said], None] = {}
        self._broken: asyncio.Future[str] | None = None  # why we end the stream that is under way
        self._closing = asyncio.Event()
        self._over = asyncio.Event()  # no stream is welcomed
        self._over.set()
        self._left_at: float | None = None  # by the last driver that had welcomed us
        self._unsaid = 0
        self.is_connected = False
        self.highest_driver_attempt = 0
        self.streams = 0
        """Streams so far, of drivers that welcomed us."""
        self.frames = 0
        """Written, the hellos apart."""

    @property
    def dropped(self) -> int:
        """Messages that found no room while there was no driver."""
        return self._kept.dropped

    @property
    def driverless_s(self) -> float:
        """Since the last driver was lost; 0: there is one, or there never was."""
        return 0.0 if self._left_at is None else self._clock() - self._left_at

    # --- saying -------------------------------------------------------------------------------------------------------
    def tell(self, message: Said, *, lasts: Lasts = Lasts.STREAM) -> None:
        """Written soon, in order; `lasts` says what becomes of it where no stream is open or this one breaks. A stream
        whose outbox is full is not read: it is broken and made again."""
        self._say(Told(message, lasts))

    def repeat(self, key: str, message: Said) -> None:
        """Told now, and again in each stream to come, until `forget`; a newer one takes the place of its key."""
        self._kept.repeat(key, message)
        self._say(Told(message, is_repeated=True))

    def forget(self, key: str) -> None:
        self._kept.forget(key)

    def mark(self, source: Drainable[Said], *, can_wait: bool = False) -> None:
        """Its `drain` is called for the next frame, or for the first one of the next stream."""
        self._marked[source] = None
        if self._outbox is not None:
            self._outbox.poke(can_wait=can_wait)

    def _say(self, told: Told[Said]) -> None:
        outbox = self._outbox
        if outbox is None or outbox.closed is not None:
            self._kept.add([told])
            return
        outbox.put(told)
        if outbox.closed is not None:
            self._kept.add(outbox.take())
            self.cut(outbox.closed)

    def cut(self, why: str) -> None:
        """Ends the stream that is under way; the next one is dialled as after any other end."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_result(why)

    async def close(self, *, timeout_s: float) -> int:
        """Everything told so far arrives, if the driver reads it in time; then `run` returns. A call that is cancelled
        takes along what was written last, so the driver ends the stream when we have said all. How many messages were
        left unsaid."""
        self._closing.set()
        if self._outbox is not None:
            self._outbox.poke()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        self.cut("this end closes")
        return self._unsaid if self._outbox is None else self._outbox.waiting

    # --- connecting ---------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        settings = self._settings
        pause_s, away_since, why = settings.reconnect_backoff_s, self._clock(), "no try was made"
        while not self._closing.is_set():
            was_connected = False
            try:
                why = await self._until_broken()
            except grpc.aio.AioRpcError as error:
                why = f"{error.code().name}: {error.details()}"
                if error.code() in _FINAL:
                    raise Refused(f"driver {self._address} refuses {self._who}", got=why) from error
            except (RetryableError, DeadlineExceeded, OSError) as error:
                why = str(error)
            finally:
                was_connected, self.is_connected = self.is_connected, False
                self._over.set()
            if was_connected:
                # A driver with nothing to say is no absent one: its absence begins with the stream's end.
                pause_s, away_since = settings.reconnect_backoff_s, self._clock()
                self._left_at = away_since
            if self._closing.is_set():
                return
            if was_connected:
                extra = {"error": why, "driver_attempt": self.highest_driver_attempt}
                logger.warning("driver lost; dialling again", extra=extra)
            else:
                logger.debug("driver not reached", extra={"error": why})
            if self._clock() - away_since >= settings.driver_absence_timeout_s:
                raise DriverAbsent(
                    f"no driver for {settings.driver_absence_timeout_s:g} s at {self._address}", got=why,
                    wanted="a driver that welcomes " + self._who, next="see why the driver pod of the job does not run",
                )  # fmt: skip
            # All parts of a job lose their driver in the same moment: half of the pause is by chance.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * (0.5 + 0.5 * self._jitter())):
                    await self._closing.wait()
            pause_s = min(settings.reconnect_backoff_max_s, pause_s * 2)

    async def _until_broken(self) -> str:
        """One stream from dial to end; why it ended, where that is no error."""
        broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._broken = broken
        stream: asyncio.Future[Any] = asyncio.create_task(self._one_stream(), name=f"stream of {self._who}")
        try:
            await asyncio.wait([stream, broken], return_when=asyncio.FIRST_COMPLETED)
            if stream.done():
                stream.result()
                return "the driver ended the stream"
            logger.warning("the stream to the driver is given up", extra={"why": broken.result()})
            return broken.result()
        finally:
            self._broken = None
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)

    async def _one_stream(self) -> None:
        """Returns or raises when the stream is over."""
        channel: grpc.aio.Channel | None = None
        call: Any = None
        outbox: Outbox[Told[Said]] = Outbox()
        settings, wire = self._settings, self._wire
        try:
            async with _within(settings.connect_timeout_s, f"a connection to driver {self._address}"):
                channel = await self._dial()
                call = wire.call(channel)
                hello = self._part.hello(highest_driver_attempt=self.highest_driver_attempt)
                self._outbox = outbox  # from here on `tell` queues behind the hello: what changes now is not lost
                await self._write_frame(call, [hello])
            async with _within(settings.welcome_timeout_s, f"the welcome of driver {self._address}"):
                frame = await call.read()
            if frame is grpc.aio.EOF:
                raise WorkerUnreachable(f"driver {self._address} hung up", got=await _why(call), wanted="a welcome")
            first, *more = wire.unpack(frame)
            self._begin(first, outbox)
            for message in more:
                self._hear(message)
            await self._both_ways(call, outbox)
        finally:
            self._outbox = None
            self._unsaid = outbox.waiting
            self._kept.add([*self._in_hand, *outbox.take()])
            self._in_hand.clear()
            if call is not None:
                call.cancel()
            if channel is not None:
                await channel.close()

    async def _both_ways(self, call: Any, outbox: Outbox[Told[Said]]) -> None:
        reader, writer = asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call, outbox))
        try:
            await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                has_said_all = not writer.cancelled() and writer.exception() is None
                # Then the driver ends the stream; `close` bounds this.
                await asyncio.wait({reader}, timeout=None if has_said_all else _REASON_WAIT_S)
            for task in (reader, writer):
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            for message in self._wire.unpack(frame):
                self._hear(message)

    async def _write(self, call: Any, outbox: Outbox[Told[Said]]) -> None:
        """Returns when we close and all is said."""
        outbox.poke()  # something may have been marked before there was a stream
        while True:
            await outbox.filled()
            # One turn of the loop later everything that this turn gives rise to is in the frame.
            await asyncio.sleep(0)
            self._drain_marked()
            self._in_hand += outbox.take(self._wire.frame_messages)
            for part in in_frames([told.message for told in self._in_hand]):
                await self._write_frame(call, part)
                self.frames += 1
                for _ in part:
                    self._in_hand.popleft()
            if self._closing.is_set() and not outbox.waiting and not self._marked:
                outbox.close("all is said")
                await call.done_writing()
                return

    def _drain_marked(self) -> None:
        marked, self._marked = self._marked, {}
        drained: list[Said] = []
        for source in sorted(marked, key=lambda source: source.comes_last):
            source.drain(drained)
        for message in drained:
            self.tell(message)

    async def _write_frame(self, call: Any, batch: list[Said]) -> None:
        frame = self._wire.pack(batch)
        try:
            async with _within(self._write_timeout_s, f"driver {self._address} reading what {self._who} says"):
                await call.write(frame)
        except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:  # grpc's word for a call that has ended
            raise WorkerUnreachable(f"the stream of driver {self._address} has ended", got=await _why(call)) from error

    # --- what the driver says -----------------------------------------------------------------------------------------
    def _begin(self, first: Any, outbox: Outbox[Told[Said]]) -> None:
        """The first message of a stream: a Welcome of a driver that may be obeyed, or an error."""
        kind = first.WhichOneof("kind")
        if kind == "refusal" and first.refusal.exit_code == names.EXIT_RETRYABLE:
            # No plan yet, or an older driver that sees it has been replaced: neither is worth a worker's life.
            raise WorkerUnreachable(f"the driver says to come again: {first.refusal.message}")
        if kind == "refusal":
            self._end(first.refusal)
        if kind != "welcome":
            raise WorkerUnreachable("the driver speaks out of turn", got=str(kind), wanted="one welcome, first")
        welcome, highest = first.welcome, self.highest_driver_attempt
        if welcome.protocol != names.PROTOCOL:
            raise UserError(
                "the driver speaks another protocol", got=str(welcome.protocol), wanted=str(names.PROTOCOL),
                next="run driver and worker pods from images of the same version",
            )  # fmt: skip
        if welcome.driver_attempt < highest:
            raise Stale(
                "a driver that has been replaced welcomes us", got=f"driver attempt {welcome.driver_attempt}",
                wanted=f"{highest} or more", next="it must exit, as a newer one drives this job",
            )  # fmt: skip
        for told in self._kept.welcomed(outbox.take(), is_same_driver=welcome.driver_attempt == highest):
            outbox.put(told)
        self.highest_driver_attempt = welcome.driver_attempt
        self.is_connected, self._left_at = True, None
        self._over.clear()
        self.streams += 1
        logger.info("connected to the driver", extra={"driver_attempt": welcome.driver_attempt, "at": self._address})
        self._part.on_welcome(welcome, is_new_driver=welcome.driver_attempt > highest > 0)

    def _hear(self, message: Any) -> None:
        kind = message.WhichOneof("kind")
        if kind == "refusal":
            self._end(message.refusal)
        if kind == "welcome":
            raise WorkerUnreachable("the driver speaks out of turn", got="welcome", wanted="one welcome, first")
        self._part.on_message(message)

    def _end(self, refusal: Any) -> NoReturn:
        raise RefusedByDriver(refusal.message, who=self._who, exit_code=refusal.exit_code)


@contextlib.asynccontextmanager
async def _within(limit_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(what, timeout_s=limit_s) from error


async def _why(call: Any) -> str:
    if not call.done():
        return "no status"
    return f"{(await call.code()).name}: {await call.details()}"
