"""Workers of one process whose weights go over links in memory: real channels and frames, no sockets.

    net = WeightsNet()
    actor, rollout = net.node("actor/0", pod="a"), net.node("rollout/0", pod="b")
    await net.route(actor, rollout)
    await actor.weights.publish(version, tensors)
    await rollout.weights.pull(version)

A frame is delivered in the loop's next turn, after `net.change` has had a look at it: that may alter it, or lose it.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlinf_worker.channels.host import Host
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links import frames
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer, PeerLinks
from rlinf_worker.spans import Recorder
from rlinf_worker.weights.channel import WeightsChannel

Working = Awaitable[None] | None
Change = Callable[["WeightsNode", "WeightsNode", Any, list[bytes]], bool]
"""(from, to, frame, buffers) -> whether it is delivered; buffers may be altered in place."""


class MemoryLink:
    """One end."""

    def __init__(self, kind: str, deliver: Callable[[Message], None]) -> None:
        self.kind, self._deliver = kind, deliver
        self.broken: LinkBroken | None = None
        self._ended = asyncio.Event()

    def send_nowait(self, message: Message) -> bool:
        if self.broken is not None:
            raise self.broken
        self._deliver(message)
        return True

    async def send(self, message: Message) -> None:
        self.send_nowait(message)
        await asyncio.sleep(0)

    async def wait_broken(self) -> None:
        await self._ended.wait()

    def end(self) -> None:
        self.broken = LinkBroken("net", "the test broke it")
        self._ended.set()


class WeightsNode:
    """One worker. In the place of links.peers.PeerLinks, too."""

    def __init__(self, net: "WeightsNet", endpoint: Endpoint, *, rank: int, shm_dir: str | None) -> None:
        self.net, self.endpoint = net, endpoint
        self.handlers: dict[Any, Any] = {}
        self.on_unreachable: list[Any] = []
        self.errors: list[BaseException] = []
        self.arrived: dict[str, deque[tuple[bytes, list[bytes]]]] = {}  # by who sent it: what has not been looked at
        self.all: dict[str, Peer] = {}
        self.host = Host(
            worker=endpoint.worker, role=endpoint.worker.partition("/")[0], peers=cast(PeerLinks, self), waits=Waits(),
            recorder=Recorder(), tell=lambda _: None, mark=lambda source, *, can_wait=False: None,
            finish_item=lambda _: None,
            fatal=self.errors.append,
        )  # fmt: skip
        self.weights = WeightsChannel(self.host, shm_dir=shm_dir, rank=rank, gang=lambda: net.gang)

    def peer(self, worker: str) -> Peer:
        return self.all.setdefault(worker, Peer(Identity(job="j", worker=worker, attempt=1)))

    def find(self, worker: str, attempt: int) -> Peer | None:
        return self.all.get(worker) if attempt == 1 else None

    def want(self, endpoint: Endpoint, *, by: str, at_once: bool) -> Peer:
        peer = self.peer(endpoint.worker)
        peer.endpoint = endpoint
        peer.wanted_by.add(by)
        other = self.net.nodes.get(endpoint.worker)
        if peer.link is None and other is not None:
            self.net.link(self, other)
        return peer

    def unwant(self, peer: Peer, *, by: str) -> None:
        peer.wanted_by.discard(by)


class WeightsNet:
    def __init__(self, shm_dir: Path | None = None) -> None:
        self._shm_dir = str(shm_dir) if shm_dir is not None else None
        self.nodes: dict[str, WeightsNode] = {}
        self.gang: list[Endpoint] = []
        self.said: list[tuple[str, str, Any]] = []
        self.frozen: set[str] = set()
        self._working: set[asyncio.Task[None]] = set()
        self.change: Change = lambda *_: True

    def node(self, worker: str, *, pod: str, rank: int = 0) -> WeightsNode:
        endpoint = Endpoint(worker=worker, attempt=1, pod_uid=pod)
        made = self.nodes[worker] = WeightsNode(self, endpoint, rank=rank, shm_dir=self._shm_dir)
        return made

    async def route(self, producer: WeightsNode, consumer: WeightsNode) -> None:
        """Returns when the consumer has subscribed."""
        producer.weights.on_route(consumer.endpoint, outgoing=True)
        consumer.weights.on_route(producer.endpoint, outgoing=False)
        for _ in range(3):
            await asyncio.sleep(0)

    def link(self, one: WeightsNode, other: WeightsNode) -> None:
        kind = "shm" if one.endpoint.pod_uid == other.endpoint.pod_uid else "tcp"
        for here, there in ((one, other), (other, one)):
            link: Any = MemoryLink(kind, partial(self._deliver, here, there))
            here.peer(there.endpoint.worker).link = link
        for here, there in ((one, other), (other, one)):
            here.weights.on_up(here.peer(there.endpoint.worker))

    def _deliver(self, here: WeightsNode, there: WeightsNode, message: Message) -> None:
        frame = frames.decode(message.head)
        _, parts = message.encoded()
        buffers = [bytes(cast(memoryview, part)) for part in parts]
        self.said.append((here.endpoint.worker, there.endpoint.worker, frame))
        if here.endpoint.worker not in self.frozen and self.change(here, there, frame, buffers):
            asyncio.get_running_loop().call_soon(self._arrive, here, there, message.head, buffers)

    def _arrive(self, here: WeightsNode, there: WeightsNode, head: bytes, buffers: list[bytes]) -> None:
        arrived = there.arrived.get(here.endpoint.worker)
        if arrived is not None:
            arrived.append((head, buffers))  # behind one that is being worked off
        elif (working := self._handle(here, there, head, buffers)) is not None:
            there.arrived[here.endpoint.worker] = deque()
            task = asyncio.get_running_loop().create_task(self._work_off(here, there, working))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _work_off(self, here: WeightsNode, there: WeightsNode, first: Awaitable[None]) -> None:
        try:
            await first
            while arrived := there.arrived[here.endpoint.worker]:
                if (working := self._handle(here, there, *arrived.popleft())) is not None:
                    await working
        except Exception as error:  # noqa: BLE001  as links do
            there.host.fatal(error)
        finally:
            del there.arrived[here.endpoint.worker]

    def _handle(self, here: WeightsNode, there: WeightsNode, head: bytes, buffers: list[bytes]) -> Working:
        peer = there.peer(here.endpoint.worker)
        if there.endpoint.worker in self.frozen or peer.link is None or there.endpoint.worker not in self.nodes:
            return None
        frame = frames.decode(head)
        message = Message(head, buffers=[memoryview(bytearray(b)) for b in buffers])
        working: Working = there.handlers[type(frame)](peer, frame, message)
        return working

    def freeze(self, node: WeightsNode) -> None:
        """It says and hears nothing more; its links stay as they are."""
        self.frozen.add(node.endpoint.worker)

    def unroute(self, node: WeightsNode) -> None:
        """The driver says to all others that its life is over, whatever its links look like."""
        for other in self.nodes.values():
            if other is not node:
                other.weights.on_unroute(node.endpoint.worker, 1)

    def kill(self, node: WeightsNode) -> None:
        """With its links; every other worker finds it unreachable."""
        del self.nodes[node.endpoint.worker]
        for other in self.nodes.values():
            peer = other.all.get(node.endpoint.worker)
            if peer is not None and peer.link is not None:
                cast(Any, peer.link).end()
                peer.link = None

    def frames_of(self, kind: type[Any], *, by: str = "", to: str = "") -> list[Any]:
        return [f for a, b, f in self.said if isinstance(f, kind) and by in ("", a) and to in ("", b)]

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.weights.close()
