"""Who leads, over an API server with faults: won, kept, lost, given away; and clocks that are set."""

import asyncio
import contextlib
import datetime as dt
import itertools
import re
import time

import pytest

from rlinf_api import times
from rlinf_api.errors import ClusterBusy
from rlinf_operator.clients.lease import Election

LEASE = ("Lease", "rlinf-system", "rlinf-operator")


@pytest.fixture
async def candidate(server):
    made = []

    def new(identity: str, **more) -> Election:
        settings = {"lease_s": 6.0, "renew_deadline_s": 3.0, "retry_s": 1.0} | more
        api = server.client(timeout_s=settings["retry_s"])
        made.append(Election(api, name=LEASE[2], namespace=LEASE[1], identity=identity, **settings))
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
    await within(candidate("a", lease_s=6.5).won, 20)
    spec = server.objects[LEASE]["spec"]
    assert spec["renewTime"] == spec["acquireTime"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", spec["renewTime"]), "the API takes no other"
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("a", 7, 1)


async def test_a_leader_renews_and_says_since_when_it_leads(server, candidate):
    await within(candidate("a").won, 20)
    since = server.objects[LEASE]["spec"]["acquireTime"]
    async with asyncio.timeout(20):
        while server.objects[LEASE]["spec"]["renewTime"] == since:
            await asyncio.sleep(0.05)
    assert server.objects[LEASE]["spec"]["acquireTime"] == since
    assert server.objects[LEASE]["spec"]["leaseTransitions"] == 1


async def test_the_second_waits_while_the_first_renews(server, candidate):
    first, second = candidate("a"), None
    await within(first.won, 20)
    second = candidate("b")
    await asyncio.sleep(2.5)
    assert not second.won.is_set()
    assert not first.ended.is_set()


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
    first = candidate("a", renew_deadline_s=1.5)
    await within(first.won, 20)
    server.fault(status=500, times=1000)
    await within(first.ended, 20)


async def test_an_api_server_that_hangs_ends_it_too(server, candidate):
    first = candidate("a", renew_deadline_s=1.5)
    await within(first.won, 20)
    server.fault(status=500, times=1000, delay_s=30)
    await within(first.ended, 20)


async def test_a_connection_that_breaks_now_and_then_ends_nothing(server, candidate):
    first = candidate("a")
    await within(first.won, 20)
    server.fault(status=500, times=1)
    await asyncio.sleep(2.5)
    assert not first.ended.is_set()


async def test_one_that_never_led_releases_nothing(server, candidate):
    await within(candidate("a").won, 20)
    second = candidate("b")
    await asyncio.sleep(0.2)
    await second.release()
    assert holder(server) == "a"


class CutOff:
    """Its first call hangs and answers a cancel with an error, as one whose own time is over at that moment may; each
    other one answers so at once."""

    def __init__(self) -> None:
        self.calls, self.asked = 0, asyncio.Event()

    async def get(self, *_, **__):
        self.calls += 1
        self.asked.set()
        if self.calls == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise ClusterBusy("get of Lease", got="no answer")


async def test_one_that_is_given_up_asks_no_more_though_its_call_answers_the_cancel_with_an_error():
    api = CutOff()
    election = Election(
        api, name=LEASE[2], namespace=LEASE[1], identity="a", lease_s=90.0, renew_deadline_s=3.0, retry_s=60.0,  # type: ignore[arg-type]
    )  # fmt: skip
    await within(api.asked, 20)
    async with asyncio.timeout(20):
        await election.release()
    assert election.ended.is_set()
    assert api.calls == 1


async def test_a_lease_that_somebody_emptied_is_not_given_away(server, candidate):
    first = candidate("a", lease_s=180.0, renew_deadline_s=90.0, retry_s=60.0)
    await within(first.won, 20)
    server.put({"kind": "Lease", "metadata": {"name": LEASE[2], "namespace": LEASE[1]}})
    await first.release()
    assert "spec" not in server.objects[LEASE]


# --- two that lead, and none ------------------------------------------------------------------------------------------

HOUR_S = 3600.0


def held_by(holder: str, *, lease_s: int) -> dict[str, object]:
    moment = "2026-01-01T00:00:00.000000Z"
    spec = {
        "holderIdentity": holder, "leaseDurationSeconds": lease_s, "acquireTime": moment, "renewTime": moment,
    }  # fmt: skip
    return {"kind": "Lease", "metadata": {"name": LEASE[2], "namespace": LEASE[1]}, "spec": spec}


def set_clock(monkeypatch, *steps_s: float) -> None:
    """The wall clock is off by the next of the steps at each reading, then by the last."""
    offsets = itertools.chain(steps_s, itertools.repeat(steps_s[-1]))
    now = times.utc_now
    monkeypatch.setattr(times, "utc_now", lambda: now() + dt.timedelta(seconds=next(offsets)))


async def reads(server, number: int) -> None:
    async with asyncio.timeout(20):
        while server.count("GET", "/leases/") < number:
            await asyncio.sleep(0.02)


async def test_a_leader_that_reads_of_another_holder_ends_at_once(server, candidate):
    """A minute before its deadline: the other one leads by now."""
    first = candidate("a", lease_s=90.0, renew_deadline_s=60.0)
    await within(first.won, 20)
    await reads(server, server.count("GET", "/leases/") + 1)
    server.put(held_by("b", lease_s=90))
    await within(first.ended, 20)
    await first.release()
    assert holder(server) == "b"


async def test_a_leader_whose_clock_is_set_back_ends_when_its_time_is_over(server, candidate, monkeypatch):
    first = candidate("a", renew_deadline_s=1.5)
    await within(first.won, 20)
    set_clock(monkeypatch, *(-number * HOUR_S for number in range(100)))
    server.fault(status=500, times=1000)
    await within(first.ended, 20)


async def test_a_leader_that_was_stopped_for_longer_than_its_time_asks_nobody_before_it_ends(server, candidate):
    first = candidate("a", lease_s=4.0, renew_deadline_s=1.5)
    await within(first.won, 20)
    await reads(server, server.count("GET", "/leases/") + 1)
    time.sleep(2.7)  # noqa: ASYNC251 - as by SIGSTOP: nothing of the process runs
    asked = len(server.requests)
    await within(first.ended, 20)
    assert first.ended.is_set()
    assert len(server.requests) == asked


async def test_a_follower_whose_clock_is_set_forward_takes_no_lease_that_lives(server, candidate, monkeypatch):
    """For as long as the holder was promised, which is not its own time while the setting is being changed."""
    server.put(held_by("a", lease_s=30))
    set_clock(monkeypatch, *(number * HOUR_S for number in range(100)))
    second = candidate("b", lease_s=2.0, renew_deadline_s=1.5)
    await reads(server, 4)
    assert not second.won.is_set()
    assert holder(server) == "a"


async def test_a_follower_whose_clock_is_set_back_takes_a_lease_that_is_over(server, candidate, monkeypatch):
    server.put(held_by("a", lease_s=2))
    set_clock(monkeypatch, 0.0, 0.0, -HOUR_S)
    second = candidate("b", lease_s=4.0)
    await within(second.won, 20)
    assert holder(server) == "b"
