"""Slots that go from one worker to another in one real agent: the next begins when the one before is gone."""

import asyncio

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from tests.fakes.pod import running, start


def waits_for_slots(worker):
    return lambda m: any((p.worker, p.phase) == (worker, "waits for its slots") for p in m.heartbeat.progress)


async def test_the_next_worker_of_a_slot_begins_when_the_one_before_is_gone(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, deaf=True)
        stop = agents_pb2.Stop(worker="env/0", grace_s=0.7, reason="the plan has another worker there")
        stopping = asyncio.create_task(driver.instruct(stop=stop))
        starting = asyncio.create_task(running(driver, worker="rollout/0", deaf=True))
        await driver.wait("heartbeat", waits_for_slots("rollout/0"))
        await starting
        exited = [m.exited.worker for _, m in driver.seen if m.WhichOneof("kind") == "exited"]
        assert exited == ["env/0"], "its end was told before the other began"
        assert (await stopping).ok


async def test_a_worker_that_waits_for_its_slots_is_given_up_by_a_stop(pod):
    one = pod()
    async with one.driver() as driver:
        one.start(driver)
        await driver.wait("hello")
        await running(driver, deaf=True)
        stopping = asyncio.create_task(driver.instruct(stop=agents_pb2.Stop(worker="env/0", grace_s=0.7)))
        unwanted = asyncio.create_task(driver.instruct(start=start("env/1")))
        await driver.wait("heartbeat", waits_for_slots("env/1"))
        assert (await driver.instruct(stop=agents_pb2.Stop(worker="env/1"))).ok
        assert "given up before it began" in (await unwanted).error
        assert (await stopping).ok
