"""Units that are not called as their tickets are: several come of one, one of several, as many as come, in chains. Each
step trains on what its tickets became, each once, whatever dies and whenever."""

from collections import Counter

import pytest

from rlinf_api.report import DriverState
from tests.fakes.driver_world import strike_at_points
from tests.fakes.lineage_world import SHAPES, LineageWorld
from tests.unit.rlinf_worker.driver import test_whole_job as whole_job


def check(world: LineageWorld) -> None:
    assert world.driver.job.standing.state is DriverState.COMPLETE, world.driver.job.standing.message + world.story()
    for _, step, keys in world.committed:
        assert len(set(keys)) == len(keys), "a unit counts once"
        if world.shape.is_exact:
            assert keys == world.expected(step)
        else:
            slices = int(world.driver.job.flow_settings.config["slices"])
            of_tickets = Counter(key.rpartition("/")[0] for key in keys)
            tickets = {f"env:{n}@{step}" for n in range(slices)}
            if world.shape.flow == "three_of_each":
                assert of_tickets == Counter(dict.fromkeys(tickets, 3))
            assert of_tickets.keys() <= tickets
    order = [(branch, step) for branch, step, _ in world.committed]
    assert order == sorted(set(order)), "each (branch, step) once, branches never mixed"
    assert {step for _, step in order} == set(range(1, world.driver.job.ledger.steps + 1))


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_step_trains_on_what_its_tickets_become(shape):
    for seed in range(4):
        world = LineageWorld(SHAPES[shape], seed=seed)
        await world.run()
        check(world)
        assert world.driver.workforce.restarts == 0
        for queue in world.driver.exchange.queues.values():
            book = queue.core.book
            assert (book.entries, len(book.worked_on), book.worked_on.take_turned()) == ({}, 0, {}), (
                "nothing is kept of steps"
            )


FAULTS = {
    **whole_job.FAULTS,
    "an env and the rollout are killed": lambda w: (w.kill("env/0"), w.kill("rollout/0")),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_fault_at_any_point_loses_and_doubles_nothing(shape, fault):
    await strike_at_points(lambda seed: LineageWorld(SHAPES[shape], seed=seed), FAULTS[fault], check=check, points=5)
