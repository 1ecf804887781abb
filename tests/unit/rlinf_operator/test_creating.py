"""Pods of one job are made in slow start, with a bound, and nobody is asked again by what would hear the same."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from rlinf_api.errors import ClusterBusy, InvariantBroken, RLinfError
from rlinf_operator.clients.api_errors import NamespaceTerminating
from rlinf_operator.reconcile import creating
from rlinf_operator.reconcile.creating import AT_ONCE, TOGETHER, Makers, make

QUOTA = RLinfError("pods are forbidden: exceeded quota: team")


def pod(name, pool="sim"):
    labels = {"rlinf.io/pool": pool} if pool else {}
    return {"kind": "Pod", "metadata": {"name": name, "labels": labels}}


def pods(count, pool="sim"):
    return [pod(f"{pool}-{number}", pool) for number in range(count)]


class Server:
    """Answers when it is told to: all creates that are under way, at once."""

    def __init__(self, refuses: Callable[[str], BaseException | None] = lambda name: None):
        self.refuses, self.most = refuses, 0
        self.asked: list[str] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def create(self, manifest):
        name = manifest["metadata"]["name"]
        self.asked.append(name)
        gate = asyncio.get_running_loop().create_future()
        self._waiting.append(gate)
        self.most = max(self.most, len(self._waiting))
        await gate
        if (error := self.refuses(name)) is not None:
            raise error

    async def rounds(self, task, look=lambda asked: None):
        """How many were under way in each round trip. `look` is told of which pods."""
        found, told = [], 0
        while not task.done():
            for _ in range(10):
                await asyncio.sleep(0)
            if self._waiting:
                look(self.asked[told:])
                told = len(self.asked)
                found.append(len(self._waiting))
                gates, self._waiting = self._waiting, []
                for gate in gates:
                    if not gate.done():
                        gate.set_result(None)
        return found


async def run(server, manifests, *, rest=()):
    task = asyncio.create_task(make(manifests, server.create, makers=Makers(), rest=rest))
    rounds = await server.rounds(task)
    return await task, rounds


async def test_each_round_trip_makes_twice_as_many_up_to_the_bound():
    server = Server()
    made, rounds = await run(server, pods(100))
    assert rounds == [1, 2, 4, 8, *[AT_ONCE] * 5, 5]
    assert server.asked == [f"sim-{n}" for n in range(100)]
    assert (made.refused, made.untried, made.rest) == ({}, [], [])


async def test_jobs_that_make_pods_at_once_have_the_same_share_and_a_large_one_waits_as_long_as_small_ones_do():
    server, makers = Server(), Makers()
    sizes = {"large": 120, **{f"small{n}": 10 for n in range(15)}}
    jobs = {
        job: asyncio.create_task(make(pods(size, job), server.create, makers=makers)) for job, size in sizes.items()
    }
    everything = asyncio.gather(*jobs.values())
    rounds, when = [], {}

    def look(asked):
        rounds.append(Counter(name.split("-")[0] for name in asked))
        when.update({job: len(rounds) for job, task in jobs.items() if not task.done()})

    await server.rounds(everything, look=look)
    await everything
    smalls = max(when[job] for job in sizes if job != "large")
    assert max(sum(asked.values()) for asked in rounds) <= TOGETHER
    assert max(asked["large"] for asked in rounds[:smalls]) == TOGETHER // 16, "16 jobs: two pods each"
    assert smalls == 6, "1, then 2 in each round trip"
    assert max(asked["large"] for asked in rounds[smalls:]) == AT_ONCE, "alone it has what a job may have"


async def test_a_pass_leaves_what_is_above_its_bound_to_the_next():
    server = Server()
    made, _ = await run(server, pods(3), rest=("sim-3", "sim-4"))
    assert (len(server.asked), made.rest) == (3, ["sim-3", "sim-4"])


@pytest.mark.parametrize(
    "error",
    [
        QUOTA,
        ClusterBusy("create of Pod", got="429"),
        NamespaceTerminating("create of Pod", got="403"),
    ],
    ids=["quota", "busy", "namespace"],
)
async def test_one_call_is_made_where_all_would_be_refused(error):
    def refuses(name):
        wrapped = RLinfError(f"Pod {name} was refused", got=str(error))
        wrapped.__cause__ = error
        return wrapped

    server = Server(refuses)
    made, rounds = await run(server, [pod("driver", ""), *pods(50)], rest=("sim-50", "sim-51"))
    assert (server.asked, rounds) == (["driver"], [1])
    assert list(made.refused) == ["driver"]
    assert len(made.untried) == 52
    assert made.rest == []
    assert made.over_quota == (error is QUOTA)


async def test_a_quota_that_has_room_for_some_is_asked_little_more_than_it_gives():
    server = Server(lambda name: QUOTA if int(name.split("-")[1]) >= 20 else None)
    made, rounds = await run(server, pods(120))
    assert len(server.asked) <= 20 + AT_ONCE
    assert len(made.refused) + len(made.untried) == 100
    assert rounds[:4] == [1, 2, 4, 8]


async def test_a_pool_that_is_refused_holds_up_no_other():
    server = Server(lambda name: RLinfError("denied by a webhook") if name.startswith("gpu") else None)
    made, _ = await run(server, [*pods(1, ""), *pods(40, "gpu"), *pods(40, "sim")])
    assert {name for name in server.asked if name.startswith("gpu")} == set(made.refused)
    assert len(made.refused) <= 2
    assert len(made.refused) + len(made.untried) == 40
    assert sum(1 for name in server.asked if name.startswith("sim")) == 40


@pytest.mark.parametrize("bug", [KeyError("labels"), InvariantBroken("no such kind")])
async def test_a_bug_is_raised_when_nothing_is_under_way_any_more(bug):
    server = Server(lambda name: bug if name == "sim-3" else None)
    task = asyncio.create_task(make(pods(50), server.create, makers=Makers()))
    await server.rounds(task)
    with pytest.raises(type(bug)):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("operator: create")]


async def test_a_pass_that_is_cancelled_leaves_no_create_behind():
    server = Server()
    task = asyncio.create_task(make(pods(50), server.create, makers=Makers()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert server.asked
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("operator: create")]


async def test_nothing_to_make_is_no_call():
    made = await creating.make([], Server().create, makers=Makers())
    assert (made.refused, made.untried, made.rest) == ({}, [], [])
