"""One worker's weights channel as a process, told what to do line by line: for the weights benchmark and its tests.

`python -m tools.bench.runtime_parts.weights_node NAME ATTEMPT POD RUN_DIR` reads a JSON object per line and answers
with one. It has the runtime's links and weights channel and no driver: routes are told it here.

    {"do": "route", "endpoint": {...}, "outgoing": true}      {"do": "publish", "number": 3, "mb": 200, "tensors": 100}
    {"do": "pull", "number": 3}                                {"do": "stats"}        {"do": "block", "s": 2.0}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import xxhash

from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links.endpoint import Endpoint
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.peers import Peer, PeerLinks
from rlinf_worker.spans import Recorder
from rlinf_worker.weights.channel import WeightsChannel
from rlinf_worker.weights.layout import Sharding, box
from rlinf_worker.weights.planning import View
from rlinf_worker.weights.tensors import Shard

Command = dict[str, Any]


class Node:
    def __init__(self, name: str, peers: PeerLinks, *, gang: list[Endpoint]) -> None:
        role, _, rank = name.rpartition("/")
        self.rank, self.peers, self.gang = int(rank), peers, gang
        self.errors: list[str] = []
        host = Host(
            worker=name, role=role, peers=peers, waits=Waits(), recorder=Recorder(), tell=lambda _: None,
            mark=lambda source, *, can_wait=False: None,
            finish_item=lambda _: None, fatal=lambda error: self.errors.append(str(error)),
        )  # fmt: skip
        self.weights = WeightsChannel(host, shm_dir="/dev/shm", rank=self.rank, gang=lambda: self.gang)
        peers.on_up.append(self._on_up)
        self.values: dict[str, np.ndarray[Any, Any]] = {}

    def _on_up(self, peer: Peer) -> None:
        self.weights.on_up(peer)

    # --- what can be asked --------------------------------------------------------------------------------------------
    async def route(self, c: Command) -> Command:
        self.weights.on_route(Endpoint.from_dict(c["endpoint"]), outgoing=c["outgoing"])
        return {}

    async def unroute(self, c: Command) -> Command:
        self.weights.on_unroute(c["worker"], c["attempt"])
        return {}

    async def gang_is(self, c: Command) -> Command:
        self.gang[:] = [Endpoint.from_dict(e) for e in c["endpoints"]]
        return {}

    async def select(self, c: Command) -> Command:
        shape, dim, ranks = tuple(c["shape"]), c["dim"], c["ranks"]
        sharding = Sharding(shape=shape, mesh=(ranks,), dims=(dim,))
        self.weights.select(View(c["rank"], dict.fromkeys(c["names"], sharding)))
        return {}

    def _make(self, c: Command) -> None:
        """`seed`: other contents; `change`: only so many of the tensors are other than before."""
        count, each = c["tensors"], int(c["mb"] * (1 << 20)) // c["tensors"] // 4
        random = np.random.default_rng(c.get("seed", 0))
        for n in range(int(c.get("change") or count)):
            self.values[f"t{n}"] = random.random(each, np.float32).reshape(c.get("shape", (each,)))

    async def publish(self, c: Command) -> Command:
        self._make(c)
        tensors: dict[str, Any] = dict(self.values)
        if (ranks := c.get("ranks", 1)) > 1:
            for name, value in tensors.items():
                sharding = Sharding(shape=value.shape, mesh=(ranks,), dims=(0,))
                (a, b), *_ = box(sharding, self.rank)
                tensors[name] = Shard(np.ascontiguousarray(value[a:b]), sharding)
        version = PolicyVersion(c.get("branch", 0), c["number"])
        took, cpu = [], time.process_time()
        for n in range(c.get("times", 1)):
            began = time.perf_counter()
            await self.weights.publish(
                PolicyVersion(version.branch, version.number + n), tensors, delta=c.get("delta", False)
            )
            took.append(time.perf_counter() - began)
        cpu_s = (time.process_time() - cpu) / len(took)
        return {"seconds": took, "cpu_s": cpu_s, "digest": _digest(self.values)}

    async def pull(self, c: Command) -> Command:
        version, tensors = await self.weights.pull(PolicyVersion(c.get("branch", 0), c["number"]))
        return {"number": version.number, "digest": _digest(tensors), "first": float(tensors["t0"].reshape(-1)[0])}

    async def piece(self, c: Command) -> Command:
        _, tensors = await self.weights.pull(PolicyVersion(c.get("branch", 0), c["number"]))
        return {"digests": {name: _digest({name: value}) for name, value in tensors.items()}}

    async def hold(self, c: Command) -> Command:
        """Passes no more than the first `parts` of a version on; without `parts` all again."""
        sender: Any = self.weights.sender
        here = self._all_here = getattr(self, "_all_here", sender._here)
        sender._here = here
        if (parts := c.get("parts")) is not None:
            sender._here = lambda holding, view, numbers: list(here(holding, view, numbers))[: parts - numbers[0]]
        self.weights._moved.notify()  # a transfer that begins meanwhile waits for the parts that were held
        return {}

    async def spoil(self, c: Command) -> Command:
        """Its memory has other bytes from now on than those that it was sent."""
        here = self.weights.receiver.here
        assert here is not None
        here.lent[: c["bytes"]] = bytes(c["bytes"])
        return {}

    async def write(self, c: Command) -> Command:
        """A role that writes into what it pulled."""
        _, tensors = await self.weights.pull(PolicyVersion(0, c["number"]))
        try:
            tensors["t0"][:] = 0.0
        except ValueError as error:
            return {"refused": str(error)}
        return {"refused": ""}

    async def cut(self, c: Command) -> Command:
        """Breaks the link to a worker; both are there and make it anew."""
        found = [p for p in self.peers._peers.values() if p.worker == c["worker"] and p.link is not None]
        for peer in found:
            if peer.link is not None:
                peer.link.abort("cut by a test")
        return {"links": len(found)}

    async def damage(self, c: Command) -> Command:
        """The next `times` messages with parts arrive with a bit turned."""
        handlers = self.peers.handlers
        kind = next(k for k in handlers if k.__name__ == "WeightsParts")
        handle, left = handlers[kind], [c["times"]]

        def turned(peer: Peer, frame: Any, message: Any) -> Any:
            if left[0]:
                left[0] -= 1
                frame.hashes[0] ^= 1
            return handle(peer, frame, message)

        handlers[kind] = turned
        return {}

    async def block(self, c: Command) -> Command:
        print(json.dumps({"blocked": True}), flush=True)
        time.sleep(c["s"])  # noqa: ASYNC251  as a long C call of an actor does
        return {}

    async def stats(self, c: Command) -> Command:
        weights, part = self.weights, self.weights.receiver.under_way
        here = weights.receiver.here
        receiver, subscribers = weights.receiver, weights.subscribers
        return {
            "sent_bytes": weights.sender.sent_bytes, "corrupt": receiver.corrupt, "retries": receiver.retries,
            "reroutes": receiver.reroutes, "refused": receiver.refused, "conflicts": weights.checksums.conflicts,
            "errors": self.errors, "children": sorted(str(p.worker) for p in subscribers.all),
            "moved": {p.worker: s.via.worker for p, s in subscribers.all.items() if s.via is not None},
            "feeds": {p.worker: f.kind for p, f in receiver.feeds.all.items()},
            "links": sorted({p.link.kind for p in self.peers._peers.values() if p.link is not None}),
            "parts": sum(h is not None for h in part.hashes) if part is not None else 0,
            "here": here.version.number if here is not None else -1, "arenas": len(weights._arenas._kept),
        }  # fmt: skip


def _digest(tensors: Any) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(np.asarray(tensors[name]).tobytes())
    return digest.hexdigest()


async def main(name: str, attempt: int, pod: str, run_dir: str) -> None:
    me = Identity(job="bench", worker=name, attempt=attempt)
    admitted: list[PeerLinks] = []
    listener = await Listener.open(
        me, pod_uid=pod, run_dir=run_dir, shm_dir="/dev/shm", host="127.0.0.1",
        admit=lambda peer, proof: admitted[0].admit(peer, proof) if admitted else None,
    )  # fmt: skip
    peers = PeerLinks(listener, on_fatal=lambda error: print(json.dumps({"fatal": str(error)}), flush=True))
    admitted.append(peers)
    node = Node(name, peers, gang=[])
    peers.start()
    print(json.dumps({"endpoint": listener.endpoint.to_dict()}), flush=True)
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        try:
            answer = await getattr(node, command.pop("do"))(command)
        except Exception as error:  # noqa: BLE001  whoever asked is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    await node.weights.close()
    await peers.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
