"""A driver for tests of the worker side: serves Channels in this process, matches queues in order of arrival, and does
whatever else a test tells it to. It remembers every message.

    driver = await FakeDriver.start([cycle("questions", "asker", "echo"), queue("units", "maker", "taker")])
    await driver.connected("asker/0")
    driver.route("questions", "asker/0", "echo/0")
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from rlinf_api import rpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.queues.core import QueueCore
from rlinf_worker.queues.units import UnitInfo


def cycle(name: str, asker: str, answerer: str, *, question: str = "", answer: str = "") -> pb.ChannelSpec:
    """`question`, `answer`: as PayloadType.text has them."""
    return pb.ChannelSpec(
        name=name, mode="Cycle", producer=asker, consumer=answerer, depth=8, payload=question, answers=answer
    )


def weights(producer: str, consumer: str) -> pb.ChannelSpec:
    return pb.ChannelSpec(name="weights", mode="Weights", producer=producer, consumer=consumer)


def queue(
    name: str,
    producer: str,
    consumer: str,
    *,
    micro_batch: int = 4,
    depth: int = 2,
    capacity_units: int = 1000,
    capacity_bytes: int = 1 << 30,
    rounds: bool = False,
) -> pb.ChannelSpec:
    return pb.ChannelSpec(
        name=name,
        mode="Queue",
        producer=producer,
        consumer=consumer,
        micro_batch=micro_batch,
        depth=depth,
        capacity_units=capacity_units,
        capacity_bytes=capacity_bytes,
        rounds=rounds,
    )


@dataclass
class Connection:
    hello: pb.Hello
    outbox: asyncio.Queue[pb.DriverMessage | None] = field(default_factory=asyncio.Queue)
    open: bool = True

    def ended(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            reader.exception()  # of a worker that was killed: looked at, so that nobody complains
        self.outbox.put_nowait(None)


class FakeDriver(channels_pb2_grpc.ChannelsServicer):
    def __init__(self, channels: list[pb.ChannelSpec], *, attempt: int = 1) -> None:
        self.channels, self.attempt = {c.name: c for c in channels}, attempt
        self.flow = {"name": "test", "steps": 10, "seed": 1, "max_staleness": 1, "order": "arrival", "config": {}}
        self.connections: dict[str, Connection] = {}
        self.hellos: list[pb.Hello] = []
        self.messages: dict[str, list[pb.WorkerMessage]] = defaultdict(list)
        self.batches = 0
        self.cores: dict[str, QueueCore] = {}
        self.changed = asyncio.Event()
        self.is_matching = True
        self.begin_with: PolicyVersion | None = PolicyVersion(0, 0)
        self.refusal: pb.Refusal | None = None
        self.checkpoint_uri = ""
        self.on_message: Callable[[str, pb.WorkerMessage], None] = lambda worker, message: None
        self._server: grpc.aio.Server | None = None
        self.address = ""
        self.roles: dict[str, set[str]] = defaultdict(set)

    @classmethod
    async def start(
        cls,
        channels: list[pb.ChannelSpec],
        *,
        attempt: int = 1,
        address: str = "127.0.0.1:0",
        tls: rpc.TlsFolder | None = None,
    ) -> FakeDriver:
        driver = cls(channels, attempt=attempt)
        for spec in channels:
            if spec.mode == "Queue":
                driver.cores[spec.name] = QueueCore(micro_batch=spec.micro_batch, rounds=spec.rounds)
        driver._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        channels_pb2_grpc.add_ChannelsServicer_to_server(driver, driver._server)
        if tls is None:
            port = driver._server.add_insecure_port(address)
        else:
            port = driver._server.add_secure_port(address, tls.server_credentials())
        driver.address = f"127.0.0.1:{port}"
        await driver._server.start()
        return driver

    async def stop(self) -> None:
        assert self._server is not None
        for connection in self.connections.values():
            connection.outbox.put_nowait(None)
        await self._server.stop(0)

    async def dial(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=rpc.OPTIONS)

    # --- the service --------------------------------------------------------------------------------------------------
    async def Connect(  # noqa: N802  the service's name
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        batches = request_iterator.__aiter__()
        first = await batches.__anext__()
        hello = first.messages[0].hello
        who = WorkerId(hello.worker)
        self.hellos.append(hello)
        if self.refusal is not None:
            yield pb.DriverBatch(messages=[pb.DriverMessage(refusal=self.refusal)])
            return
        connection = Connection(hello)
        self.connections[hello.worker] = connection
        role = hello.worker.rpartition("/")[0]
        self.roles[role].add(hello.worker)
        for name, core in self.cores.items():
            spec = self.channels[name]
            if spec.consumer == role:
                core.consumers.ranked = [WorkerId(w) for w in sorted(self.roles[role])]
                core.consumers.credit(who, 0)
        welcome = pb.Welcome(
            driver_attempt=self.attempt,
            protocol=1,
            channels=self.channels.values(),
            flow_json=json.dumps(self.flow),
            checkpoint_uri=self.checkpoint_uri,
        )
        connection.outbox.put_nowait(pb.DriverMessage(welcome=welcome))
        for held in hello.taken:
            self.cores[held.channel].restore_held(who, UnitInfo.from_pb(held.unit))
        for made in hello.produced:
            self.cores[made.channel].announce([UnitInfo.from_pb(made.unit)])
        self._match()
        self.changed.set()
        for message in first.messages[1:]:
            self._heard(who, message)

        async def read() -> None:
            async for batch in batches:
                self.batches += 1
                for message in batch.messages:
                    self._heard(who, message)

        reader = asyncio.ensure_future(read())
        reader.add_done_callback(connection.ended)
        try:
            while (message := await connection.outbox.get()) is not None:
                yield pb.DriverBatch(messages=[message])
        finally:
            connection.open = False
            reader.cancel()
            await asyncio.wait([reader])
            self.changed.set()

    def _heard(self, worker: WorkerId, message: pb.WorkerMessage) -> None:
        self.messages[worker].append(message)
        kind = message.WhichOneof("kind")
        self.on_message(worker, message)
        if kind == "announce":
            core = self.cores[message.announce.channel]
            core.announce([UnitInfo.from_pb(u) for u in message.announce.units])
        elif kind == "credit":
            self.cores[message.credit.channel].consumers.credit(worker, message.credit.units)
        elif kind == "held":
            done = self.cores[message.held.channel].held(worker, branch=message.held.branch, keys=message.held.keys)
            self._tell_producers(message.held.channel, done, "held")
        elif kind == "acked":
            done = self.cores[message.acked.channel].acked(worker, branch=message.acked.branch, keys=message.acked.keys)
            self._tell_producers(message.acked.channel, done, "released")
        elif kind == "drop":
            drop = message.drop
            done = self.cores[drop.channel].acked(worker, branch=drop.branch, keys=[drop.key], count="dropped")
            self._tell_producers(drop.channel, done, "released")
        elif kind == "fact":
            for other in self.connections:
                self.send(other, fact=message.fact)
        elif kind == "ready" and self.begin_with is not None:
            self.send(worker, begin=pb.Begin(version=messages.version_to_pb(self.begin_with)))
        self._match()
        self.changed.set()

    def _tell_producers(self, channel: str, done: list[Any], kind: str) -> None:
        for unit in done:
            if unit.producer and unit.producer in self.connections:
                self.send(unit.producer, **{kind: pb.Keys(channel=channel, keys=[unit.key], branch=unit.branch)})

    def _match(self) -> None:
        if not self.is_matching:
            return
        for name, core in self.cores.items():
            if core.rounds:
                for formed in core.match_rounds():
                    for rank, units in formed.parts.items():
                        self.send(
                            rank,
                            round=pb.Round(
                                channel=name,
                                step=formed.step,
                                branch=formed.branch,
                                number=formed.number,
                                last=formed.last,
                                units=[u.to_pb() for u in units],
                                total_weight=formed.total_weight,
                                producers=self._endpoints(units),
                            ),
                        )
            else:
                for consumer, units in core.match().items():
                    assign = pb.Assign(
                        channel=name,
                        units=[u.to_pb() for u in units],
                        producers=self._endpoints(units),
                    )
                    self.send(consumer, assign=assign)

    def _endpoints(self, given: Any) -> list[pb.Endpoint]:
        return [self.connections[p].hello.endpoint for p in {u.producer for u in given} if p in self.connections]

    # --- what a test says ---------------------------------------------------------------------------------------------
    def send(self, worker: str, **kind: Any) -> None:
        self.connections[worker].outbox.put_nowait(pb.DriverMessage(**kind))

    def put(self, channel: str, key: str, *, step: int = 1, branch: int = 0, payload: Any = None) -> None:
        """A unit of the driver's own."""
        unit = pb.Unit(key=key, branch=branch, step=step, weight=1, inline=json.dumps(payload).encode())
        self.cores[channel].announce([UnitInfo.from_pb(unit)])
        self._match()

    def route(self, channel: str, producer: str, consumer: str, *, credit: int = 8, number: int = 0) -> None:
        """Of a cycle, to the one that asks; of weights, to both ends."""
        self.route_to(producer, channel, peer=consumer, outgoing=True, credit=credit, number=number)
        if self.channels[channel].mode == "Weights":
            self.route_to(consumer, channel, peer=producer, outgoing=False, credit=credit, number=number)

    def route_to(
        self, worker: str, channel: str, *, peer: str, outgoing: bool, credit: int = 8, number: int = 0
    ) -> None:
        """One end."""
        endpoint = self.connections[peer].hello.endpoint
        said = pb.Route(channel=channel, peer=endpoint, outgoing=outgoing, credit=credit, number=number)
        self.send(worker, route=said)

    def unroute(self, channel: str, worker: str, peer: str, *, attempt: int, number: int = 0) -> None:
        self.send(worker, unroute=pb.Unroute(channel=channel, worker=peer, attempt=attempt, number=number))

    def lose_consumer(self, worker: str) -> None:
        for core in self.cores.values():
            core.departures.remove_consumer(WorkerId(worker))
        self.connections.pop(worker, None)
        self._match()

    def lose_producer(self, worker: str) -> list[Any]:
        lost = [unit for core in self.cores.values() for unit in core.departures.remove_producer(WorkerId(worker))]
        self.connections.pop(worker, None)
        return lost

    async def until(self, condition: Callable[[], bool], *, what: str, timeout_s: float = 30.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not happen within {timeout_s} s") from None

    async def connected(self, *workers: str, attempt: int = 0) -> None:
        await self.until(
            lambda: all(w in self.connections and self.connections[w].hello.attempt >= attempt for w in workers),
            what=f"hello of {workers}",
        )

    def kinds(self, worker: str) -> list[str]:
        return [str(m.WhichOneof("kind")) for m in self.messages[worker]]
