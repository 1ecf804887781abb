"""An agent in the test's own loop: serves Slots at a unix socket, remembers what is said, orders what a test says.

async with SlotsAgent(tmp_path) as agent:
    ...
    await agent.until(lambda: agent.kinds)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2_grpc


class SlotsAgent(slots_pb2_grpc.SlotsServicer):
    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "agent.sock")
        self.said: list[pb.WorkerReport] = []
        self.has_ended = False
        """The worker has closed its side of the stream."""
        self._orders: asyncio.Queue[pb.AgentOrder | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._server = grpc.aio.server()

    async def __aenter__(self) -> SlotsAgent:
        slots_pb2_grpc.add_SlotsServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  the service's name
        async def read() -> None:
            async for report in request_iterator:
                self.said.append(report)
                self._changed.set()
            self.has_ended = True
            self._changed.set()
            self._orders.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (order := await self._orders.get()) is not None:
                yield order
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def order(self, **kind: Any) -> None:
        self._orders.put_nowait(pb.AgentOrder(**kind))

    def hang_up(self) -> None:
        self._orders.put_nowait(None)

    @property
    def kinds(self) -> list[str]:
        return [str(report.WhichOneof("kind")) for report in self.said]

    def of(self, kind: str) -> list[Any]:
        return [getattr(report, kind) for report in self.said if report.WhichOneof("kind") == kind]

    async def until(self, condition: Callable[[], object], *, within_s: float = 20.0) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"the worker has not said it within {within_s} s, but {self.kinds}") from None
