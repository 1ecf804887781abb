"""A driver that serves Agents.Attach over real mTLS and does what the test says. Records everything with its time.

async with FakeDriver(tls, host="127.0.7.1", job_uid="uid") as driver:
    await driver.wait("hello")
    await driver.instruct(start=agents_pb2.Start(worker="env/0", role="env", attempt=1))
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc

ALLOWED = {"/rlinf.agents.v1alpha1.Agents/Attach": frozenset({"pool"})}


class FakeDriver(agents_pb2_grpc.AgentsServicer):
    def __init__(
        self,
        tls: Path,
        *,
        host: str,
        job_uid: str,
        port: int = 0,
        attempt: int = 1,
        refusal: agents_pb2.Refusal | None = None,
        protocol: int = names.PROTOCOL,
        mute: bool = False,
    ) -> None:
        self.host, self.port, self.attempt = host, port, attempt
        self._tls, self._job_uid, self._refusal, self._protocol = rpc.TlsFolder(tls), job_uid, refusal, protocol
        self._mute = mute
        self.pause_s = 0.0  # before it reads a message: a busy driver's
        self.seen: list[tuple[float, agents_pb2.AgentMessage]] = []
        self._changed = asyncio.Event()
        self._out: asyncio.Queue[agents_pb2.DriverMessage | None] = asyncio.Queue()
        self._ids = itertools.count(1)
        self._server: grpc.aio.Server | None = None
        self.streams = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> "FakeDriver":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        gate = rpc.Gatekeeper(ALLOWED, job_uid=self._job_uid)
        self._server = grpc.aio.server(interceptors=[gate], options=list(rpc.SERVER_OPTIONS))
        agents_pb2_grpc.add_AgentsServicer_to_server(self, self._server)
        self.port = self._server.add_secure_port(f"{self.host}:{self.port}", self._tls.server_credentials())
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Attach(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        self.streams += 1
        self._out = asyncio.Queue()
        hello = await anext(request_iterator)
        self._note(hello)
        if self._mute:
            await asyncio.sleep(60)
        if self._refusal is not None:
            yield agents_pb2.DriverMessage(refusal=self._refusal)
            return
        yield agents_pb2.DriverMessage(
            welcome=agents_pb2.Welcome(driver_attempt=self.attempt, protocol=self._protocol, heartbeat_interval_s=0)
        )
        out = self._out

        async def read() -> None:
            try:
                async for message in request_iterator:
                    await asyncio.sleep(self.pause_s)
                    self._note(message)
            finally:
                out.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (message := await out.get()) is not None:
                yield message
        finally:
            reader.cancel()

    def _note(self, message: agents_pb2.AgentMessage) -> None:
        self.seen.append((time.monotonic(), message))
        self._changed.set()

    # --- what a test does -------------------------------------------------------------------------------------------
    def send(self, **instruction: Any) -> int:
        """Sends an instruction; returns its id. `id` and `driver_attempt` may be given."""
        id = instruction.pop("id", None) or next(self._ids)
        attempt = instruction.pop("driver_attempt", self.attempt)
        message = agents_pb2.Instruction(id=id, driver_attempt=attempt, **instruction)
        self._out.put_nowait(agents_pb2.DriverMessage(instruction=message))
        return id

    async def instruct(self, **instruction: Any) -> agents_pb2.Result:
        before = len(self.seen)
        id = self.send(**instruction)
        found = await self.wait("result", lambda m: m.result.instruction_id == id, since=before)
        return found.result

    def refuse(self, message: str, *, exit_code: int) -> None:
        self._out.put_nowait(agents_pb2.DriverMessage(refusal=agents_pb2.Refusal(message=message, exit_code=exit_code)))

    async def wait(
        self,
        kind: str,
        accept: Callable[[agents_pb2.AgentMessage], bool] = lambda _: True,
        *,
        within_s: float = 20.0,
        since: int = 0,
    ) -> agents_pb2.AgentMessage:
        """The first message of that kind (from number `since` on) that is accepted."""
        at = since
        try:
            async with asyncio.timeout(within_s):
                while True:
                    while at < len(self.seen):
                        message = self.seen[at][1]
                        at += 1
                        if message.WhichOneof("kind") == kind and accept(message):
                            return message
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            kinds = [m.WhichOneof("kind") for _, m in self.seen if m.WhichOneof("kind") != "heartbeat"]
            raise AssertionError(f"no {kind} within {within_s} s; seen: {kinds}, {len(self.seen)} in all") from None
