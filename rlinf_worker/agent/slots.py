"""Serves rlinf.slots.v1alpha1.Slots on the pod's unix socket: what workers say of themselves, and orders to them.

Called by the workers of this pod (`rlinf_worker.runtime`). Not for payloads, and not for who may call: the socket is
reachable from inside the pod only, by this user only.

| what | consumes | waits for | unblocked by |
|---|---|---|---|
| `Join`, reader (one per worker) | its reports | the next report | worker, or its death |
| `Join`, orders (the same call) | its queue | the next order | `order`, or the end of the reader |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2, slots_pb2_grpc
from rlinf_api.errors import DeadlineExceeded, Stale, UserError

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 30.0  # a worker that imports its role on a busy node is slow to speak, not gone
STOP_SERVER_S: Final = 0.2
_MAX_ORDERS: Final = 64  # a worker that reads none is about to be killed anyway


class Hearer(Protocol):
    """Who is told what workers say, in the event loop. `join` raises Stale for a process that has no place here."""

    def join(self, worker: str, *, attempt: int, pid: int) -> None: ...

    def heard(self, worker: str, attempt: int, report: slots_pb2.WorkerReport) -> None: ...


class SlotsServer(slots_pb2_grpc.SlotsServicer):
    def __init__(self, hearer: Hearer, *, path: str) -> None:
        self._hearer, self._path = hearer, path
        self._orders: dict[str, asyncio.Queue[slots_pb2.AgentOrder | None]] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        folder = Path(self._path).parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            Path(self._path).unlink(missing_ok=True)  # an agent that was killed left it
            if folder.stat().st_uid == os.getuid():
                folder.chmod(0o700)  # an emptyDir with fsGroup is root's: then the socket's own mode must do
        except OSError as error:
            raise UserError(
                f"run directory {folder} cannot be used", got=str(error), wanted="a writable emptyDir",
                next="look at the pod's volume mounts",
            ) from error  # fmt: skip
        self._server = grpc.aio.server()
        slots_pb2_grpc.add_SlotsServicer_to_server(self, self._server)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise UserError(f"socket {self._path} cannot be made", got=str(error)) from error
        await self._server.start()
        Path(self._path).chmod(0o600)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_SERVER_S)
        Path(self._path).unlink(missing_ok=True)

    def order(self, worker: str, order: slots_pb2.AgentOrder) -> bool:
        """False: it is not connected or does not listen; the bound of whoever waits for the effect applies."""
        queue = self._orders.get(worker)
        if queue is None or queue.full():
            logger.warning("order not delivered", extra={"worker": worker, "order": order.WhichOneof("kind")})
            return False
        queue.put_nowait(order)
        return True

    async def Join(
        self, request_iterator: AsyncIterator[slots_pb2.WorkerReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[slots_pb2.AgentOrder]:
        hello = await self._hello(request_iterator, context)
        worker, attempt = hello.worker, hello.attempt
        queue: asyncio.Queue[slots_pb2.AgentOrder | None] = asyncio.Queue(_MAX_ORDERS + 1)
        earlier, self._orders[worker] = self._orders.get(worker), queue
        if earlier is not None and not earlier.full():
            earlier.put_nowait(None)  # it connects again: the older call ends
        try:  # after the queue is there: joining may give an order at once
            self._hearer.join(worker, attempt=attempt, pid=hello.pid)
        except Stale as error:
            self._forget(worker, queue)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        reader = asyncio.create_task(self._read(request_iterator, worker=worker, attempt=attempt, queue=queue))
        try:
            while (order := await queue.get()) is not None:
                yield order
        finally:
            reader.cancel()
            self._forget(worker, queue)

    def _forget(self, worker: str, queue: asyncio.Queue[slots_pb2.AgentOrder | None]) -> None:
        if self._orders.get(worker) is queue:
            del self._orders[worker]

    @staticmethod
    async def _hello(
        requests: AsyncIterator[slots_pb2.WorkerReport], context: grpc.aio.ServicerContext[Any, Any]
    ) -> slots_pb2.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests, None)
        except TimeoutError:
            late = DeadlineExceeded("a worker's hello", timeout_s=HELLO_TIMEOUT_S)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(late))
        if first is None or first.WhichOneof("kind") != "hello":
            got = first.WhichOneof("kind") if first else "the end"
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"a worker's first report is: got {got}, wanted hello"
            )
        assert first is not None
        return first.hello

    async def _read(
        self,
        requests: AsyncIterator[slots_pb2.WorkerReport],
        *,
        worker: str,
        attempt: int,
        queue: asyncio.Queue[slots_pb2.AgentOrder | None],
    ) -> None:
        try:
            async for report in requests:
                self._hearer.heard(worker, attempt, report)
        except grpc.RpcError as error:  # it died; SIGCHLD says so
            logger.debug("worker's stream broke", extra={"worker": worker, "error": repr(error)})
        except Exception:
            logger.exception("a worker's report broke the agent", extra={"worker": worker})
            raise
        finally:
            if not queue.full():
                queue.put_nowait(None)
