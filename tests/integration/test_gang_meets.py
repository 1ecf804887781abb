"""The ranks of a gang over real links, under a driver that is a script: rosters, meeting, torch's process group."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, WorkerUnreachable
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.runtime import gang as gangs
from tests.fakes.channels_driver import queue
from tests.fakes.workers import Pod, pod

CHANNELS = [queue("units", "", "actor", rounds=True)]


async def until(condition, *, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class Ranks:
    """Each does what it is told, in its own worker: `await ranks.meet(1, place, value)`."""

    def __init__(self, p: Pod, *, world: int = 3) -> None:
        self.p, self.world, self.lives = p, world, dict.fromkeys(range(world), 1)
        self.contexts: dict[int, Any] = {}
        for rank in range(world):
            self.start(rank)

    def start(self, rank: int) -> None:
        async def run(ctx: Any) -> None:
            self.contexts[rank] = ctx
            await ctx.gang.form()
            await ctx.stopping.wait()

        self.p.start(f"actor/{rank}", run, attempt=self.lives[rank], world=self.world)

    async def replaced(self, rank: int) -> None:
        await self.p.kill(f"actor/{rank}")
        self.lives[rank] += 1
        self.start(rank)

    async def roster(self, number: int, *, to: list[int] | None = None) -> None:
        """As the driver tells it when all have asked."""
        hellos = {rank: f"actor/{rank}" for rank in range(self.world)}
        connections = self.p.driver.connections
        await until(
            lambda: all(
                w in connections and connections[w].hello.attempt == self.lives[r] and self._joined(w)
                for r, w in hellos.items()
            )
        )
        members = [pb.Member(rank=r, endpoint=connections[w].hello.endpoint) for r, w in hellos.items()]
        roster = pb.Roster(number=number, world=self.world, members=members)
        for rank in range(self.world) if to is None else to:
            self.p.driver.send(f"actor/{rank}", roster=roster)

    def _joined(self, worker: str) -> bool:
        joins = [m for m in self.p.driver.messages[worker] if m.WhichOneof("kind") == "join"]
        return len(joins) >= self.lives[int(worker[-1])]

    def gang(self, rank: int) -> Any:
        return self.contexts[rank].gang

    async def meet(self, *ranks: int, place: Any, value: Any = None) -> list[list[Any]]:
        async with asyncio.timeout(20):
            return list(await asyncio.gather(*(self.gang(r).meet(place, value or r) for r in ranks)))

    async def formed(self, number: int) -> None:
        await until(lambda: all(self.gang(r)._name == f"roster-{number}" for r in range(self.world)))


async def test_ranks_meet_beside_their_loops_and_bring_values(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4)
        await ranks.formed(4)
        early = asyncio.ensure_future(ranks.meet(0, 2, place=(0, 1, 0)))
        for _ in range(20):  # what the loop has besides goes on
            await asyncio.sleep(0.005)
        assert not early.done()
        assert await ranks.meet(1, place=(0, 1, 0)) == [[0, 1, 2]]
        assert await early == [[0, 1, 2]] * 2
        assert await ranks.meet(0, 1, 2, place=(0, 1, 1), value={"seconds": 0.5}) == [[{"seconds": 0.5}] * 3] * 3


async def test_a_word_outlives_the_link_that_it_was_said_over(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4)
        await ranks.formed(4)
        await ranks.meet(0, 1, 2, place=(0, 1, 0))
        waiting = asyncio.ensure_future(ranks.meet(1, 2, place=(0, 2, 0)))
        await asyncio.sleep(0.05)
        for peer in list(ranks.p.workers["actor/0"].host.peers._peers.values()):
            if peer.link is not None:
                peer.link.abort("a cable is pulled")
        assert await ranks.meet(0, place=(0, 2, 0)) == [[0, 1, 2]]
        assert await waiting == [[0, 1, 2]] * 2


async def test_a_rank_that_is_replaced_meets_again_under_the_next_roster(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4)
        await ranks.formed(4)
        waiting = asyncio.ensure_future(ranks.meet(0, 1, place=(0, 1, 0)))
        await asyncio.sleep(0.05)
        await ranks.replaced(2)
        await ranks.roster(5)
        await ranks.formed(5)
        assert await ranks.meet(2, place=(0, 1, 0)) == [[0, 1, 2]]
        assert await waiting == [[0, 1, 2]] * 2


async def test_a_word_under_a_roster_that_the_driver_has_not_told_yet_is_kept(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4, to=[1, 2])
        await until(lambda: all(ranks.gang(r)._name == "roster-4" for r in (1, 2)))
        waiting = asyncio.ensure_future(ranks.meet(1, 2, place=(0, 1, 0)))
        await until(lambda: len(ranks.gang(0)._early) == 2)
        await ranks.roster(4, to=[0])
        await ranks.formed(4)
        assert await ranks.meet(0, place=(0, 1, 0)) == [[0, 1, 2]]
        await waiting


async def test_the_word_of_an_older_roster_or_of_a_stranger_does_not_count(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)

        async def stray(ctx: Any) -> None:
            await ctx.stopping.wait()

        stranger = p.start("env/0", stray)
        await ranks.roster(4)
        await ranks.formed(4)
        await p.driver.connected("env/0")
        to = stranger.host.peers.want(ranks.gang(0).endpoints[0], by="test", at_once=True)
        await until(lambda: to.link is not None)
        for roster in (3, 4, 5):
            for word in ("words", "kept"):
                place, values = ((9, 9, 9), [1, 1, 1]) if word == "words" else (None, [])
                to.post(Message(frames.encode(frames.GangWord(roster, place, values, {"address": b"mine"}))))
        old = ranks.p.workers["actor/1"].host.peers.find("actor/0", 1)
        assert old is not None
        await until(lambda: old.link is not None)
        old.post(Message(frames.encode(frames.GangWord(3, (9, 9, 9), [1], {"address": b"mine"}))))
        await asyncio.sleep(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await ranks.gang(0).meet((0, 1, 0))
        assert ranks.gang(0)._kept == {}


async def test_a_meeting_is_bounded_and_names_who_did_not_come(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4)
        await ranks.formed(4)
        await ranks.meet(0, 1, 2, place=(0, 1, 0))  # each has links to the others from here on
        for worker in p.workers.values():
            worker.host.meet_wait_s = 0.3
        came = ranks.meet(1, place=(2, 4, 0))
        with pytest.raises(DeadlineExceeded, match=r"roster-4 to meet at step 4 of branch 2 .*missing: rank 2"):
            await asyncio.gather(ranks.meet(0, place=(2, 4, 0)), came)
        with pytest.raises(DeadlineExceeded, match=r"missing: rank 0, or one that it waits for"):
            await ranks.meet(1, place=(2, 5, 0))
        with pytest.raises(DeadlineExceeded, match=r"'address', which a rank of roster-4 keeps"):
            await ranks.gang(1).kept("address")


async def test_a_rank_that_cannot_be_reached_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gangs, "LOST_S", 0.3)
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p)
        await ranks.roster(4)
        await ranks.formed(4)
        await ranks.meet(0, 1, 2, place=(0, 1, 0))
        await p.kill("actor/2")
        with pytest.raises(WorkerUnreachable, match="rank 2 of roster-4 cannot be reached"):
            await ranks.meet(0, place=(0, 2, 0))


async def test_a_gang_that_is_not_formed_does_not_meet(tmp_path):
    async with pod(tmp_path, CHANNELS) as p:
        ranks = Ranks(p, world=2)
        await until(lambda: 0 in ranks.contexts)
        with pytest.raises(InvariantBroken, match="before the gang is formed"):
            await ranks.meet(0, place=(0, 1, 0))


RANK = """
import asyncio, json, pathlib, sys
import torch, torch.distributed as dist
from rlinf_worker.roles import mesh
folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])

class Gang:
    world = 2
    def __init__(self): self.rank = rank
    async def meet(self, place, value=None): return [value, value]
    def keep(self, key, value):
        (folder / "new").with_name(f"new-{rank}").write_bytes(value)
        (folder / f"new-{rank}").rename(folder / key.replace("/", "_"))
    async def kept(self, key):
        path = folder / key.replace("/", "_")
        async with asyncio.timeout(60):
            while not path.exists():
                await asyncio.sleep(0.01)
        return path.read_bytes()

async def main():
    signs = 0
    async def tick():
        nonlocal signs
        while True:
            await asyncio.sleep(0.005)
            signs += 1
    ticking = asyncio.ensure_future(tick())
    made = await mesh.of_gang(Gang())
    here = torch.full((3,), float(rank + 1))
    dist.all_reduce(here, group=made.get_group())
    print(json.dumps({"sum": here.tolist(), "size": made.size(), "signs": signs}))

asyncio.run(main())
"""


def test_torch_finds_its_ranks_by_what_they_keep_for_each_other(tmp_path):
    """As processes, as there is one process group in each; their loops go on while torch waits."""
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    running = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE, env=os.environ) for r in range(2)]
    told = [json.loads(process.communicate(timeout=100)[0]) for process in running]
    assert [t["sum"] for t in told] == [[3.0] * 3] * 2
    assert [t["size"] for t in told] == [2, 2]
