"""A worker whose stream to the driver broke: what it says with its next Hello, what it is told, what comes meanwhile."""

from rlinf_api.names import WorkerId
from tests.builders_driver import make_job
from tests.fakes.driver_workers import SimWorker
from tests.fakes.driver_world import World


def credits_said(worker: SimWorker) -> list[int]:
    worker.drain()
    return [m.credit.units for m in worker.to_driver if m.WhichOneof("kind") == "credit"]


async def test_credit_that_went_with_the_hello_is_not_said_again_after_the_welcome():
    """The driver hands out by it at once, and would hand out the same again by another word of it."""
    world = World(make_job(envs=1, slices=8, micro_batch=1, depth=2))
    await world.run_until(lambda: world.driver.begun)
    env = world.workers[WorkerId("env/0")]
    world.break_stream("env/0")
    env.connect()
    assert credits_said(env) == [2]
    world._to_worker(env)
    assert env.outbox is not None
    assert credits_said(env) == [2]


async def test_the_end_of_a_route_that_was_lost_with_the_stream_is_told_again():
    """It would go on sending there, and nobody takes it."""
    world = World(make_job(envs=2, rollouts=2))
    await world.run_until(lambda: world.driver.begun and "observations" in world.workers[WorkerId("env/1")].streams)
    env = world.workers[WorkerId("env/1")]
    out = env.streams["observations"]._out
    await world.run_until(lambda: ("rollout/1", 1) in out)
    world.stand_in("rollout/1")
    world.break_stream("env/1")
    env.connect()
    await world.run_until(lambda: ("rollout/0", 1) in out)
    assert list(out) == [("rollout/0", 1)]
