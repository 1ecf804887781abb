"""A worker whose stream to the driver broke: what it says when it is back, what it is told, what comes meanwhile."""

import pytest

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.queues.units import UnitId
from tests.builders_driver import make_job
from tests.fakes.driver_roles import SimActor
from tests.fakes.driver_workers import SimWorker
from tests.fakes.driver_world import World
from tests.fakes.memory_links import MemoryPeer


def credits_said(worker: SimWorker) -> list[int]:
    worker.drain()
    return [m.credit.units for m in worker.to_driver if m.WhichOneof("kind") == "credit"]


async def test_credit_is_said_once_behind_what_is_said_again():
    """The driver hands out by it at once: said with the Hello, it would leave out what was lost with the stream."""
    world = World(make_job(envs=1, slices=8, micro_batch=1, depth=2))
    await world.run_until(lambda: world.driver.job.begun)
    env = world.workers[WorkerId("env/0")]
    segments = env.queues["segments"]

    def on_their_way() -> int:
        told = env.outbox._messages if env.outbox is not None else ()
        return sum(len(m.assign.units) for m in told if m.WhichOneof("kind") == "assign")

    await world.run_until(lambda: segments.into.given.waiting == 0 and on_their_way() > 0)
    lost = on_their_way()
    world.break_stream("env/0")
    env.connect()
    assert credits_said(env) == []
    assert on_their_way() == lost
    world._to_worker(env)
    assert sum(credits_said(env)) == 2 - segments.into.given.waiting
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()


async def test_the_end_of_a_route_that_was_lost_with_the_stream_is_told_again():
    """It would go on sending there, and nobody takes it."""
    world = World(make_job(envs=2, rollouts=2))
    await world.run_until(lambda: world.driver.job.begun and "actions" in world.workers[WorkerId("env/1")].askers)
    env = world.workers[WorkerId("env/1")]
    out = env.askers["actions"]._with
    await world.run_until(lambda: ("rollout/1", 1) in out)
    world.stand_in("rollout/1")
    world.break_stream("env/1")
    env.connect()
    await world.run_until(lambda: ("rollout/0", 1) in out)
    assert list(out) == [("rollout/0", 1)]


async def begun(world: World) -> None:
    await world.run_until(lambda: "actor/0" in world.workers and world.driver.job.begun)


async def has_a_plan(world: World) -> None:
    await world.run_until(lambda: world.driver.job.declared)


async def with_one_of_its_units_under_way(world: World) -> SimActor:
    actor = world.workers[WorkerId("actor/0")]
    assert isinstance(actor, SimActor)
    await world.run_until(lambda: bool(payloads_for(actor)))
    return actor


def payloads_for(actor: SimActor) -> list[MemoryPeer]:
    def is_payload(message: Message) -> bool:
        return isinstance(frames.decode(message.head), frames.Payload)

    return [peer for peer in actor.links.with_frames if any(map(is_payload, peer.inbox))]


def all_comes(actor: SimActor) -> None:
    for peer in payloads_for(actor):
        while peer.inbox:
            peer.deliver()


@pytest.mark.parametrize("actors", [1, 2])
async def test_what_comes_before_the_welcome_of_a_new_driver_is_trained_on_once(actors):
    """It was neither here nor made anew when the Hello was said, so the new driver gives it to any rank."""
    for seed in range(6):
        world = World(make_job(envs=1, actors=actors, slices=6, micro_batch=1, staleness=1), seed=seed)
        await begun(world)
        actor = await with_one_of_its_units_under_way(world)
        world.replace_driver()
        await has_a_plan(world)
        actor.connect()
        before = len(actor.items)
        all_comes(actor)
        taken = actor.items[before:]
        await world.run()
        assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()
        assert {step: keys for _, step, keys in world.committed} == {n: world.expected(n) for n in (1, 2, 3)}
        assert taken == [], "handed out before anybody knew whose it is"


async def test_what_comes_before_the_welcome_of_the_same_driver_is_here_with_it():
    world = World(make_job(envs=1, slices=6, micro_batch=1), seed=1)
    await begun(world)
    actor = await with_one_of_its_units_under_way(world)
    pulls = set(actor.queues["trajectories"].into.given.units.pulling())
    world.break_stream("actor/0")
    actor.connect()
    all_comes(actor)
    came = pulls.difference(actor.queues["trajectories"].into.given.units.pulling())
    assert came
    assert not actor.items
    world._to_worker(actor)
    actor.drain()
    held = [UnitId(m.held.branch, key) for m in actor.to_driver for key in m.held.keys]
    assert came <= set(held)
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()
