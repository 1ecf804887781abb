"""A driver that serves one stream over loopback and does what a test says, a part that dials it, and a wire to freeze.

async with Driver() as driver, dialled(driver) as (part, uplink):
    await driver.until(lambda: driver.streams)
    uplink.tell(word(1))
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import grpc
import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_worker.settings import Settings
from rlinf_worker.uplink.dialling import Dialect, Uplink

DIALECT: Dialect[pb.WorkerMessage, pb.DriverMessage] = Dialect(
    call=lambda channel: channels_pb2_grpc.ChannelsStub(channel).Connect(),
    pack=lambda batch: pb.WorkerBatch(messages=batch),
    unpack=lambda frame: frame.messages,
    frame_messages=None,
)
QUICK = Settings(reconnect_backoff_s=0.01, reconnect_backoff_max_s=0.05, connect_timeout_s=3.0)


def word(number: int, *, size: int = 0) -> pb.WorkerMessage:
    return pb.WorkerMessage(report=pb.Report(step=number, metrics_json="x" * size))


@dataclass
class Stream:
    hello: pb.Hello
    at: float = field(default_factory=monotonic)
    said: list[int] = field(default_factory=list)
    """Numbers of the words, in the order in which they came."""
    out: asyncio.Queue[pb.DriverMessage | None] = field(default_factory=asyncio.Queue)


class Driver(channels_pb2_grpc.ChannelsServicer):
    def __init__(self, *, attempt: int = 1, port: int = 0) -> None:
        self.attempt, self.port = attempt, port
        self.protocol = names.PROTOCOL
        self.refusal: pb.Refusal | None = None
        self.abort: grpc.StatusCode | None = None
        self.welcoming, self.reading, self.ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.welcoming, self.reading, self.ending):
            gate.set()
        self.streams: list[Stream] = []
        self._changed = asyncio.Event()
        self._server = grpc.aio.server(options=list(rpc.SERVER_OPTIONS))

    async def __aenter__(self) -> Driver:
        channels_pb2_grpc.add_ChannelsServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def dial(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=rpc.OPTIONS)

    @property
    def said(self) -> list[int]:
        """In all streams."""
        return [number for stream in self.streams for number in stream.said]

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        first = await anext(request_iterator)
        assert [m.WhichOneof("kind") for m in first.messages] == ["hello"], "nothing but the hello comes first"
        stream = Stream(first.messages[0].hello)
        self.streams.append(stream)
        self._changed.set()
        if self.abort is not None:
            await context.abort(self.abort, "the test says so")
        await self.welcoming.wait()
        if self.refusal is not None:
            yield pb.DriverBatch(messages=[pb.DriverMessage(refusal=self.refusal)])
            return
        welcome = pb.Welcome(driver_attempt=self.attempt, protocol=self.protocol)
        yield pb.DriverBatch(messages=[pb.DriverMessage(welcome=welcome)])
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (message := await stream.out.get()) is not None:
                yield pb.DriverBatch(messages=[message])
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: Any, stream: Stream) -> None:
        await self.reading.wait()
        async for batch in requests:
            stream.said += [message.report.step for message in batch.messages]
            self._changed.set()
            await self.reading.wait()
        await self.ending.wait()
        stream.out.put_nowait(None)

    async def until(self, condition: Callable[[], object], *, what: str = "", within_s: float = 20.0) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):  # not every condition is of this driver's making
                        async with asyncio.timeout(0.01):
                            await self._changed.wait()
        except TimeoutError:
            heard = [(stream.hello.attempt, stream.said[:20]) for stream in self.streams]
            raise AssertionError(f"{what or 'it'} did not happen within {within_s} s; heard {heard}") from None


class Part:
    """Its hello has the number of hellos that it was asked for as `attempt`."""

    def __init__(self) -> None:
        self.hellos = 0
        self.welcomes: list[tuple[int, bool]] = []
        self.heard: list[str] = []

    def hello(self, *, highest_driver_attempt: int) -> pb.WorkerMessage:
        self.hellos += 1
        hello = pb.Hello(worker="env/0", attempt=self.hellos, highest_driver_attempt=highest_driver_attempt)
        return pb.WorkerMessage(hello=hello)

    def on_welcome(self, welcome: Any, *, is_new_driver: bool) -> None:
        self.welcomes.append((welcome.driver_attempt, is_new_driver))

    def on_message(self, message: pb.DriverMessage) -> None:
        self.heard.append(str(message.WhichOneof("kind")))


class Running:
    """An uplink whose `run` goes on beside the test; what it ended by is `await ended()`."""

    def __init__(self, driver: Driver, *, settings: Settings = QUICK, part: Part | None = None, **given: Any) -> None:
        self.driver, self.part = driver, part or Part()
        more: Any = {
            "wire": DIALECT,
            "write_timeout_s": 5.0,
            "kept": 100,
            "clock": monotonic,
            "dial": lambda: self.driver.dial(),
        } | given
        self.uplink: Uplink[pb.WorkerMessage, pb.DriverMessage] = Uplink(
            self.part, who="worker env/0", address="the driver", settings=settings, **more
        )
        self.task = asyncio.create_task(self.uplink.run())

    async def connected(self) -> None:
        await self.driver.until(lambda: self.uplink.is_connected, what="the connection")

    async def lost(self, *, within_s: float = 20.0) -> None:
        await self.driver.until(lambda: not self.uplink.is_connected, what="the loss", within_s=within_s)

    async def ended(self, *, within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            await asyncio.shield(self.task)


@contextlib.asynccontextmanager
async def dialling(driver: Driver, **more: Any) -> AsyncIterator[Running]:
    running = Running(driver, **more)
    try:
        yield running
    finally:
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)


class Relay:
    """Passes bytes between a dialler and `port`, until it is frozen: then both ends stay connected and hear nothing."""

    def __init__(self, port: int) -> None:
        self._to, self.port, self._thawed = port, 0, asyncio.Event()
        self._thawed.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", 0, family=socket.AF_INET)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # in which the sockets are closed

    def freeze(self) -> None:
        self._thawed.clear()

    async def dial(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=rpc.OPTIONS)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        joining = asyncio.current_task()
        assert joining is not None
        self._tasks.add(joining)
        await self._thawed.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers.append(back)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._thawed.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            return
        finally:
            sink.close()
