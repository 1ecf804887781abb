"""Who leads, over an API server with faults: won, kept, lost, given away; and what the library alone gets wrong."""

import asyncio

import pytest

from rlinf_operator.clients.lease import Election
from tests.fakes.api_server import FakeApiServer

LEASE = ("Lease", "rlinf-system", "rlinf-operator")


@pytest.fixture
async def server():
    async with FakeApiServer() as made:
        yield made


@pytest.fixture
async def candidate(server):
    made = []

    def new(identity: str, **more) -> Election:
        settings = {"lease_s": 6.0, "renew_deadline_s": 3.0, "retry_s": 1.0} | more
        made.append(Election(server.connection, name=LEASE[2], namespace=LEASE[1], identity=identity, **settings))
        return made[-1]

    yield new
    for election in made:
        await election.release()


async def within(event: asyncio.Event, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await event.wait()


def holder(server) -> str:
    return str(server.objects[LEASE]["spec"]["holderIdentity"])


async def test_the_first_makes_the_lease_and_leads(server, candidate):
    await within(candidate("a").won, 20)
    assert holder(server) == "a"


async def test_the_second_waits_while_the_first_renews(server, candidate):
    first, second = candidate("a"), None
    await within(first.won, 20)
    second = candidate("b")
    await asyncio.sleep(2.5)
    assert not second.won.is_set()
    assert not first.lost.is_set()


async def test_a_lease_that_is_given_away_is_taken_within_a_retry(server, candidate):
    first = candidate("a")
    await within(first.won, 20)
    second = candidate("b")
    await asyncio.sleep(0.2)
    await first.release()
    assert holder(server) == ""
    await within(second.won, 20)
    assert holder(server) == "b"


async def test_an_api_server_that_refuses_ends_the_leadership(server, candidate):
    first = candidate("a")
    await within(first.won, 20)
    server.fault(status=500, times=1000)
    await within(first.lost, 20)
    assert first.ended.is_set()


async def test_an_api_server_that_hangs_ends_it_too(server, candidate):
    first = candidate("a")
    await within(first.won, 20)
    server.fault(status=500, times=1000, delay_s=30)
    await within(first.lost, 20)


async def test_a_connection_that_breaks_now_and_then_ends_nothing(server, candidate):
    first = candidate("a")
    await within(first.won, 20)
    server.fault(status=500, times=1)
    await asyncio.sleep(2.5)
    assert not first.lost.is_set()


async def test_one_that_never_led_releases_nothing(server, candidate):
    await within(candidate("a").won, 20)
    second = candidate("b")
    await asyncio.sleep(0.2)
    await second.release()
    assert holder(server) == "a"
