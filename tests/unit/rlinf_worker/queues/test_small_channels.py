"""Steps that are larger than their channel: they go on, and what runs ahead of the oldest one is held back."""

import re

import pytest

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from tests.builders_driver import make_job
from tests.fakes.driver_world import World


async def test_a_producer_that_keeps_its_share_is_named():
    world = World(make_job(envs=2, slices=9, micro_batch=1, depth=2, capacity=4, staleness=1))
    await world.run_until(lambda: world.driver.job.declared)
    exchange = world.driver.exchange
    await world.run_until(lambda: bool(exchange.full()))
    said = exchange.full()[0]
    kept = r"env/\d keeps \d+ units, \d+ bytes, of step [23] in channel 'trajectories'"
    pattern = kept + ", whose capacity gives it 2, 536870912"
    assert re.fullmatch(pattern, said)
    world.clock.now += 31
    world.driver.notices.look(world.clock.now)
    assert said in world.driver.job.standing.message


async def test_a_producer_of_the_oldest_step_alone_is_not_named():
    """It keeps far more than its share, and nothing holds it back."""
    world, kept = World(make_job(envs=2, slices=9, micro_batch=1, depth=2, capacity=4, staleness=0)), 0
    await world.run_until(lambda: world.driver.job.declared)
    exchange = world.driver.exchange

    def is_over() -> bool:
        nonlocal kept
        assert exchange.full() == []
        kept = max(kept, *(len(queue.core.book.made_by(WorkerId("env/0"))) for queue in exchange.queues.values()))
        return world.driver.job.standing.state is DriverState.COMPLETE

    await world.run_until(is_over)
    assert kept > 2


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_step_that_is_larger_than_its_channel_goes_on(staleness):
    held_back = 0
    for seed in range(5):
        job = make_job(envs=2, slices=9, micro_batch=1, depth=2, capacity=2, staleness=staleness)
        world = World(job, seed=seed)
        await world.run()
        assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()
        held_back += len(world.held_back)
    assert held_back or not staleness, "the bound is for steps that are ahead of the oldest"


async def test_a_channel_that_is_full_of_a_later_step_is_no_end_of_an_earlier_one():
    """A producer dies as the others have filled the channel: what it had made is made again, by them."""
    for at in range(150, 400, 25):
        world = World(make_job(envs=2, slices=6, micro_batch=1, depth=2, capacity=4, staleness=1), seed=at)
        await world.run(at={at: lambda world: world.kill("env/1")})
        assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()
