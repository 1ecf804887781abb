"""Where ranks meet before they work together. Collectives themselves: test_learner.py."""

import asyncio
import socket

import pytest

from rlinf_api.errors import DeadlineExceeded, WorkerUnreachable
from rlinf_worker.roles.actor import gang as gangs
from rlinf_worker.roles.actor.gang import Gang
from rlinf_worker.roles.protocol import GangStore


@pytest.fixture
def ranks():
    """Three ranks in one process: each has a client of rank 0's store."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return [Gang(GangStore(host="127.0.0.1", port=port, prefix="roster-1", rank=n, world=3)) for n in range(3)]


async def test_a_rank_waits_beside_its_loop_until_all_are_there(ranks):
    early = [asyncio.ensure_future(rank.meet((0, 1, 0))) for rank in ranks[:2]]
    signs = 0
    while signs < 20:  # what the loop has besides goes on
        await asyncio.sleep(0.01)
        signs += 1
    assert not any(task.done() for task in early)
    async with asyncio.timeout(20):
        await ranks[2].meet((0, 1, 0))
        await asyncio.gather(*early)


async def test_a_place_is_met_at_by_who_has_come_as_far_or_further(ranks):
    async with asyncio.timeout(20):
        ahead = [asyncio.ensure_future(rank.meet((1, 2, 0))) for rank in ranks[1:]]
        await ranks[0].meet((0, 7, 1))
        assert not any(task.done() for task in ahead)
        await ranks[0].meet((1, 2, 0))
        await asyncio.gather(*ahead)


async def test_who_did_not_come_is_named(ranks, monkeypatch):
    monkeypatch.setattr(gangs, "MEET_TIMEOUT_S", 0.2)
    await asyncio.gather(*(rank.meet((0, 0, 0)) for rank in ranks))
    with pytest.raises(
        DeadlineExceeded, match=r"roster-1 to meet at step 4 of branch 2 did not happen.*missing: rank 0, 2"
    ):
        await ranks[1].meet((2, 4, 0))


async def test_a_store_that_is_gone_is_a_rank_that_is_gone(ranks):
    waiting = asyncio.ensure_future(ranks[1].meet((0, 1, 0)))
    await asyncio.sleep(0.05)
    del ranks[0]  # with the last reference to its store the server ends, as with rank 0's process
    with pytest.raises(WorkerUnreachable, match="rank 0 of roster-1 is gone"):
        async with asyncio.timeout(20):
            await waiting
