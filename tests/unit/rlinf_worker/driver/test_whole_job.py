"""The driver's core under a whole job in memory: it ends, and each step trains on its units exactly once, whatever dies
and whenever. tests/fakes/driver_world.py says what is a model there."""

from typing import Any

import pytest

from rlinf_api.report import DriverState
from rlinf_worker.driver import status
from tests.builders_driver import make_job
from tests.fakes.driver_world import World, strike_at_points


def check(world: World) -> None:
    """Complete; every committed step has its units; the last branch leads without a gap from where it began."""
    assert world.driver.job.standing.state is DriverState.COMPLETE, world.driver.job.standing.message + world.story()
    for _, step, keys in world.committed:
        assert keys == world.expected(step)
    order = [(branch, step) for branch, step, _ in world.committed]
    assert order == sorted(set(order)), "each (branch, step) once, branches never mixed"
    last_life: dict[int, int] = {}
    for branch, step in order:
        last_life = {n: b for n, b in last_life.items() if n < step} | {step: branch}
    assert sorted(last_life) == list(range(1, world.driver.job.ledger.steps + 1))


async def test_a_job_without_faults_commits_every_step_once_on_one_branch():
    world = World(make_job(steps=4))
    await world.run()
    check(world)
    assert [(b, s) for b, s, _ in world.committed] == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert status.report(world.driver).checkpoint_step == 4
    assert world.driver.workforce.restarts == 0


class Watched(World):
    most_open = 0
    """Steps that were open at once."""

    async def step(self) -> bool:
        went = await super().step()
        self.most_open = max(self.most_open, len(self.driver.job.ledger.open_steps))
        return went


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_steps_overlap_as_far_as_staleness_allows_and_each_trains_on_its_own_units(staleness):
    for seed in range(5):
        world = Watched(make_job(steps=6, staleness=staleness), seed=seed)
        await world.run()
        check(world)
        assert world.most_open == staleness + 1


SHAPES: dict[str, dict[str, Any]] = {
    "one of each": {"envs": 1, "slices": 2, "micro_batch": 1},
    "two envs": {"envs": 2, "slices": 4},
    "in lineage order": {"envs": 2, "slices": 5, "order": "lineage"},
    "a gang": {"envs": 2, "actors": 2, "slices": 5, "micro_batch": 1},
    "a stale gang": {"envs": 2, "actors": 2, "slices": 3, "staleness": 1},
}
FAULTS = {
    "an env is killed": lambda w: w.kill("env/0"),
    "the actor is killed": lambda w: w.kill("actor/0"),
    "the rollout is killed": lambda w: w.kill("rollout/0"),
    "the pod of envs is lost": lambda w: w.kill_pod("sim"),
    "the pod of the actor is lost": lambda w: w.kill_pod("gpu"),
    "the driver is replaced": lambda w: w.replace_driver(),
    "the stream of an env breaks": lambda w: w.break_stream("env/0"),
    "the stream of the actor breaks": lambda w: w.break_stream("actor/0"),
    "driver and actor are killed": lambda w: (w.replace_driver(), w.kill("actor/0")),
    "driver and env are killed": lambda w: (w.kill("env/0"), w.replace_driver()),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_point_costs_time_and_nothing_else(shape, fault):
    await strike_at_points(
        lambda seed: World(make_job(steps=3, every_steps=1, **SHAPES[shape]), seed=seed),
        FAULTS[fault],
        check=check,
        points=6,
    )


FILTERS = {
    "a ticket": {"env:1": "segments"},
    "what was made": {"env:1": "trajectories"},
    "both": {"env:0": "segments", "env:1": "trajectories"},
    "everything": {"env:0": "segments", "env:1": "trajectories", "env:2": "segments", "env:3": "trajectories"},
}


@pytest.mark.parametrize("dropped", FILTERS)
@pytest.mark.parametrize("shape", ["in lineage order", "a gang"])
async def test_a_step_commits_without_the_units_that_a_filter_drops(shape, dropped):
    """Whoever dies meanwhile: what is made again is dropped again, and nothing else is missing."""
    job = {**SHAPES[shape], "slices": 4}
    whole = World(make_job(steps=3, every_steps=1, **job))
    whole.filtered = FILTERS[dropped]
    await whole.run()
    check(whole)
    points = range(1, whole.delivered, max(1, whole.delivered // 3))
    for seed, (fault, point) in enumerate((fault, point) for fault in FAULTS for point in points):
        world = World(make_job(steps=3, every_steps=1, **job), seed=seed)
        world.filtered = FILTERS[dropped]
        try:
            await world.run(at={point: FAULTS[fault]})
            check(world)
        except BaseException:
            print(f"seed {seed}, {fault}, point {point} of {whole.delivered}")
            raise
