"""A warm spare's process: what it says while it warms up, and how it ends or becomes a worker."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import UserError, WorkerUnreachable
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.spare import Spare
from rlinf_worker.settings import Settings

FLOW = FlowSettings(name="ppo", steps=3, seed=1, max_staleness=0, order="arrival", config={"env": "CartPole-v1"})
PLACE = slots_pb2.Promote(worker="env/1", attempt=4, rank=1, world=2, slots=[2, 3], config_json='{"a": 2}')


class Link:
    """Stands for AgentLink: the test is the agent."""

    def __init__(self, identity, *, phases, on_stop, on_promote, **_):
        self.phases, self.on_stop, self.on_promote = phases, on_stop, on_promote
        self.broken, self.closed = asyncio.Event(), False

    async def open(self):
        pass

    async def run(self):
        await self.broken.wait()
        raise WorkerUnreachable("the agent of this worker is gone")

    async def close(self):
        for _ in range(5):
            await asyncio.sleep(0)
        self.closed = True


class Warming:
    """A role whose import ends when the test says so."""

    def __init__(self):
        self.may_end, self.warmed = threading.Event(), []

    def make(self):
        assert self.may_end.wait(10)
        return self

    def warm(self, flow, config):
        self.warmed.append((flow, dict(config)))

    async def run(self, ctx):
        pass


class Site:
    def __init__(self, make):
        identity = WorkerIdentity(
            worker=names.spare_id("env", 0), role="env", kind="fake", attempt=1, pool="sim", config={"a": 1}
        )
        self.link: Any = None

        def open_link(*arguments, **options):
            self.link = Link(*arguments, **options)
            return self.link

        self.spare = Spare(identity, settings=Settings(), make_role=make, flow=FLOW, open_link=open_link)
        self.running = asyncio.create_task(self.spare.run())

    async def until(self, phase):
        async with asyncio.timeout(10):
            while self.link is None or self.link.phases.phase != phase:
                await asyncio.sleep(0.002)

    async def ended(self):
        async with asyncio.timeout(10):
            try:
                return await self.running
            finally:
                await self.spare.left()
                assert self.link.closed


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in (names.ENV_WORKER_ID, names.ENV_WORKER_RANK, names.ENV_WORKER_WORLD, names.ENV_WORKER_ATTEMPT):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(names.ENV_WORKER_SLOTS, "")
    monkeypatch.setenv(names.ENV_WORKER_SPARE, "/flow.json")
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    yield
    comm.write_text(before.strip())


async def test_a_spare_warms_its_role_waits_and_becomes_the_worker_whose_place_it_is_given():
    role = Warming()
    site = Site(role.make)
    await site.until("load")
    role.may_end.set()
    await site.until("idle")
    assert role.warmed == [(FLOW, {"a": 1})]
    site.link.on_promote(PLACE)
    identity, make_role = await site.ended()
    assert make_role() is role
    assert (identity.worker, identity.attempt, identity.rank, identity.world) == ("env/1", 4, 1, 2)
    assert (identity.slots, identity.config, identity.role, identity.pool) == ((2, 3), {"a": 2}, "env", "sim")
    assert os.environ[names.ENV_WORKER_ID] == "env/1"
    assert os.environ[names.ENV_WORKER_SLOTS] == "2,3"
    assert os.environ[names.ENV_WORKER_SPARE] == ""
    assert Path("/proc/self/comm").read_text().strip() == "env/1", "as people and tests find it"


async def test_one_that_still_imports_takes_the_place_and_the_worker_waits_for_the_import():
    role = Warming()
    site = Site(role.make)
    await site.until("load")
    site.link.on_promote(PLACE)
    _, make_role = await site.ended()
    waiting = asyncio.get_running_loop().run_in_executor(None, make_role)
    assert not waiting.done()
    role.may_end.set()
    assert await waiting is role


async def test_a_spare_that_is_told_to_end_does_not_wait_for_its_import():
    role = Warming()
    site = Site(role.make)
    await site.until("load")
    site.link.on_stop("not in the plan", 1.0)
    assert await site.ended() is None
    assert site.spare.exit_code == names.EXIT_OK
    role.may_end.set()


async def test_an_import_that_fails_ends_the_spare_with_its_sentence():
    def make():
        raise UserError("role kind 'x:Y' cannot be imported", got="no module x")

    with pytest.raises(UserError, match="cannot be imported"):
        await Site(make).ended()


async def test_a_spare_ends_with_its_agent():
    role = Warming()
    role.may_end.set()
    site = Site(role.make)
    await site.until("idle")
    site.link.broken.set()
    with pytest.raises(WorkerUnreachable):
        await site.ended()
