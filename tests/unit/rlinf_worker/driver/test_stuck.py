"""Steps that can never end under the plan in force: another plan that waits for their end comes into force all the
same, and what was learnt since the newest checkpoint is learnt again. In memory: whole jobs, then the rules."""

from collections.abc import Callable

import pytest

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import status, stuck
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.pending import Phase
from tests.fakes.driver_world import SimAgent, World
from tests.unit.rlinf_worker.driver.test_switch import STEPS, check, elastic
from tests.unit.rlinf_worker.driver.test_switch_ways_out import Nowhere, sleep

GANG = {"actors": 2, "gpu_pods": 2, "every_steps": 2}


def lose_pod(world: World, pool: str, ordinal: int = 0) -> None:
    """For good: its next attempt finds no node."""
    attempt = world.agents[pool, ordinal].attempt + 1
    world.kill_pod(pool, ordinal)
    world.agents[pool, ordinal] = Nowhere(world, (pool, ordinal), attempt=attempt)


async def without_a_rank(*, committed: int = 3, seed: int = 0, checkpoints: bool = True) -> World:
    """Two ranks in two pods; the second pod is lost for good, and a plan for one rank is ready."""
    world = World(elastic(1, **GANG), seed=seed, checkpoints=checkpoints)
    await world.run_until(lambda: len(world.committed) == committed)  # as rank 0 was told
    lose_pod(world, "gpu", 1)
    world.pin(elastic(2, **{**GANG, "actors": 1}))
    return world


def events_of(world: World) -> list[str]:
    """Kinds of events from now on, in order."""
    seen = list[str]()
    world.driver.job.output.event = lambda kind, message, **fields: seen.append(kind)  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("seed", range(4))
async def test_a_gang_without_a_node_for_a_rank_goes_on_in_another_plan(seed):
    world = await without_a_rank(seed=seed)
    seen = events_of(world)
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert (seen.count("steps-given-up"), world.driver.switch.given_up) == (1, 1)
    again = [step for _, step, _ in world.committed if step == 3]
    assert len(again) == 2, "the newest checkpoint is of step 2"
    assert world.driver.workforce.restarts <= 1, "nobody failed but who was lost"


async def test_a_gang_is_waited_for_as_long_as_its_pod_may_come():
    world = await without_a_rank()
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    world.driver.tick()  # from here on it is known to be absent
    limit = world.driver.job.settings.limits.absent_pod_s
    sleep(world, limit - 2.0)
    world.driver.tick()
    assert (world.driver.switch.phase, world.driver.job.revision) == (Phase.WAITING, 1)
    sleep(world, 3.0)
    world.driver.tick()
    assert world.driver.switch.phase is not Phase.WAITING


async def test_what_was_open_is_void_before_anybody_hears_of_the_plan():
    world = await without_a_rank()
    flow, workers = world._flow._task, [world.workers[WorkerId(wid)] for wid in ("env/0", "rollout/0")]
    await world.run_until(lambda: world.driver.switch.phase is Phase.TELLING)
    job = world.driver.job
    assert (job.begun, job.ledger.open_steps, world.driver.gangs.is_here) == (False, (), False)
    assert flow is not None
    assert world._flow._task is not flow, "which may wait for what never comes"
    for worker in workers:
        assert worker.outbox is not None
        told = [message.WhichOneof("kind") for message in worker.outbox._messages]
        assert "replan" not in told
    (env,) = [worker for worker in workers if worker.id == "env/0"]
    assert env.outbox is not None
    assert [m.cancel.branch for m in env.outbox._messages if m.HasField("cancel")] == [0]


async def test_a_checkpoint_that_is_written_is_waited_for():
    world = World(elastic(1, every_steps=2))
    job = world.driver.job
    await world.run_until(lambda: world.driver.commits.is_saving)
    job.members.workers[WorkerId("rollout/0")].losses = (job.ledger.version, stuck.LOSSES)
    assert not world.driver.switch._may_give_up_steps
    await world.run_until(lambda: not world.driver.commits.is_saving)
    assert world.driver.switch._may_give_up_steps


async def test_a_job_that_is_to_end_behind_its_open_step_does_not_go_back_for_a_plan():
    world = await without_a_rank()
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    world.driver.job.ledger.drain()
    world.driver.tick()
    sleep(world, world.driver.job.settings.limits.absent_pod_s + 1.0)
    world.driver.tick()
    switch = world.driver.switch
    assert (switch.phase, switch.given_up) == (Phase.WAITING, 0)
    assert "spec.checkpoint.uri" not in status.report(world.driver).plan_message, "it has one"


async def test_a_step_has_its_time_from_when_the_one_before_ended():
    """The plan waits for long; the step that it waits for has begun a moment ago."""
    world = World(elastic(1, every_steps=2, envs=3, pods=2))
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed == 2)
    world.pin(elastic(2, every_steps=2, envs=2))
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    pending = world.driver.switch.pending
    assert pending is not None
    job.members.pods["sim", 0].absent_since = job.clock() - 500.0
    world.driver.commits.step_seconds.extend([10.0] * 50)
    pending.boundary_at = job.clock() - 400.0
    world.driver.commits.last_at = job.clock() - 19.0
    assert world.driver.switch._cannot_end(pending) == ""
    world.driver.commits.last_at = job.clock() - 21.0
    assert world.driver.switch._cannot_end(pending) != ""


async def test_a_gang_whose_pod_comes_in_time_loses_nothing_but_what_it_had_lost():
    world = await without_a_rank()
    seen = events_of(world)
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    sleep(world, 60.0)
    world.agents["gpu", 1] = SimAgent(world, ("gpu", 1), attempt=2)
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert "steps-given-up" not in seen


async def test_without_checkpoints_a_step_that_cannot_end_is_waited_for_and_people_are_told():
    world = World(elastic(1), checkpoints=False)
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    world.driver.job.members.workers[WorkerId("rollout/0")].losses = (PolicyVersion(0, 2), stuck.LOSSES)
    world.driver.job.members.workers[WorkerId("rollout/0")].why = "exit code 137"
    world.pin(elastic(2, micro_batch=1))
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    said = (
        "waiting for the end of the step, which cannot come: worker rollout/0 was lost 3 times behind step 2: exit "
        "code 137; without spec.checkpoint.uri it is waited for"
    )
    world.driver.switch.tick()
    assert status.report(world.driver).plan_message == said
    await world.run()
    check(world)
    assert len(world.committed) == STEPS, "it did end, in this test, and no step was made again"


async def dies_in_each_step(world: World, who: str, *, until: Callable[[], bool]) -> int:
    """How often: as soon as it is ready, while a step is open."""
    times = 0
    members = world.driver.job.members.workers

    def may_die() -> bool:
        record = members.get(WorkerId(who))
        job = world.driver.job
        is_there = record is not None and record.state is WorkerState.READY and WorkerId(who) in world.workers
        return until() or (is_there and job.begun and bool(job.ledger.open_steps))

    while not until():
        await world.run_until(may_die)
        if not until():
            world.kill(who, said="killed for memory")
            times += 1
    return times


@pytest.mark.parametrize("change", [{"micro_batch": 1, "depth": 3}, {"envs": 3}, {"actors": 2}])
@pytest.mark.parametrize("seed", range(3))
async def test_a_worker_that_dies_in_each_step_of_a_plan_gives_way_to_the_next(change, seed):
    world = World(elastic(1, every_steps=2), seed=seed)
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed == 3)
    world.pin(elastic(2, every_steps=2, **change))
    times = await dies_in_each_step(world, "rollout/0", until=lambda: job.revision == 2)
    assert stuck.LOSSES <= times <= stuck.LOSSES + 1
    await world.run()
    check(world)
    assert job.revision == 2


async def test_what_a_worker_died_of_under_a_plan_that_is_over_takes_no_step_from_the_next():
    """The same step is made again on another branch, under a plan of which nobody dies; a third plan waits."""
    world = World(elastic(1, every_steps=2))
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed == 3)
    world.pin(elastic(2, every_steps=2, micro_batch=1))
    await dies_in_each_step(world, "rollout/0", until=lambda: job.revision == 2)
    assert job.members.workers[WorkerId("rollout/0")].losses == (PolicyVersion(0, 3), stuck.LOSSES)
    await world.run_until(lambda: (job.ledger.version.branch, job.ledger.committed) == (1, 3))
    world.pin(elastic(3, every_steps=2))
    await world.run()
    check(world)
    assert (job.revision, world.driver.switch.given_up) == (3, 1)


async def test_before_the_first_step_has_ended_it_begins_anew_as_another_branch():
    world = World(elastic(1), checkpoints=False)
    job = world.driver.job
    world.pin(elastic(2, micro_batch=1))
    await dies_in_each_step(world, "rollout/0", until=lambda: job.revision == 2 or bool(world.committed))
    assert job.revision == 2, "the step did not end"
    await world.run()
    check(world)
    assert {branch for branch, _, _ in world.committed} == {1}


STRIKES = {
    "the driver": lambda w: w.replace_driver(),
    "the actor": lambda w: w.kill("actor/0"),
    "driver and actor": lambda w: (w.replace_driver(), w.kill("actor/0")),
    "a worker": lambda w: w.kill("env/0"),
    "a pod": lambda w: w.kill_pod("sim"),
}


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.TELLING, Phase.HANDING_OVER], ids=lambda p: p.name)
async def test_struck_as_steps_are_given_up_one_plan_is_in_force_and_no_step_is_lost(strike, phase):
    for seed in range(2):
        world = await without_a_rank(seed=seed)
        await world.run_until(lambda w=world: w.driver.switch.phase is phase)  # type: ignore[misc]
        STRIKES[strike](world)
        await world.run()
        check(world)
        assert world.driver.job.revision == 2


async def test_a_driver_that_comes_to_a_step_that_cannot_end_gives_it_up_too():
    """It knows of no open step, and would wait for everybody to hear of one."""
    world = await without_a_rank()
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    world.replace_driver()
    seen = events_of(world)
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert "steps-given-up" in seen


# --- the rules --------------------------------------------------------------------------------------------------------
async def stands(actors: int = 1) -> World:
    world = World(elastic(1, actors=actors))
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    return world


async def test_who_is_absent_is_given_its_time_unless_it_is_of_a_gang():
    world = await stands()
    job = world.driver.job
    pod = job.members.pods["sim", 0]
    pod.absent_since = job.clock() - job.settings.limits.absent_pod_s - 10.0
    said = "pod sim-0 has been absent for more than 120 s, and worker env/0 is in it"
    assert stuck.why(job, waited_s=119.0, usual_s=60.0) == ""
    assert stuck.why(job, waited_s=121.0, usual_s=60.0) == said
    pod.absent_since = job.clock() - job.settings.limits.absent_pod_s + 1.0
    assert stuck.why(job, waited_s=1e6, usual_s=60.0) == ""
    pod.absent_since = None
    job.members.pods["gpu", 0].absent_since = job.clock() - 130.0
    assert stuck.why(job, waited_s=0.1, usual_s=60.0).endswith("worker actor/0 is in it")


async def test_nobody_waits_for_who_is_away_as_others_do_its_work():
    world = await stands()
    job = world.driver.job
    job.members.pods["sim", 0].absent_since = job.clock() - 500.0
    job.members.away = frozenset({WorkerId("env/0"), WorkerId("env/1")})
    assert stuck.why(job, waited_s=1e6, usual_s=0.0) == ""


async def test_who_is_absent_in_the_next_plan_as_well_gives_way_to_none():
    world = await stands()
    job = world.driver.job
    job.members.pods["sim", 0].absent_since = job.clock() - 500.0
    both = frozenset({WorkerId("env/0"), WorkerId("env/1")})
    assert stuck.why(job, waited_s=1e6, usual_s=0.0, still=both) == ""
    assert stuck.why(job, waited_s=1e6, usual_s=0.0, still=both - {WorkerId("env/1")}).endswith("env/1 is in it")
    job.members.workers[WorkerId("env/0")].losses = (PolicyVersion(0, 2), stuck.LOSSES)
    assert stuck.why(job, waited_s=0.0, usual_s=0.0, still=both) != "", "as of memory, of which it may have more there"


@pytest.mark.parametrize(("pods", "waits"), [(2, True), (1, False)])
async def test_a_plan_with_as_many_pods_waits_for_an_absent_one_itself(pods, waits):
    """With fewer the absent pod may get a node of theirs."""
    world = World(elastic(1, **GANG, pods=2, envs=3))
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed == 2)
    world.pin(elastic(2, **GANG, pods=pods, envs=3, micro_batch=1))
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    pending = world.driver.switch.pending
    assert pending is not None
    job.members.pods["gpu", 1].absent_since = job.clock() - 500.0
    assert {"actor/0", "actor/1"} <= set(pending.changes.kept)
    assert (world.driver.switch._cannot_end(pending) == "") is waits


async def test_a_pod_that_is_lost_three_times_in_a_step_costs_it_nothing():
    world = World(elastic(1, every_steps=2))
    job = world.driver.job
    await world.run_until(lambda: job.ledger.committed == 2)
    for count in range(stuck.LOSSES + 1):
        world.kill_pod("sim")
        attempt = count + 2
        await world.run_until(lambda n=attempt: job.members.pods["sim", 0].attempt == n)  # type: ignore[misc]
        await world.run_until(lambda: job.members.workers[WorkerId("env/0")].state is WorkerState.READY)
        assert job.ledger.committed == 2, "it is still the same step"
    assert job.members.workers[WorkerId("env/0")].losses[1] == 0


async def test_losses_count_for_the_step_in_which_they_were():
    world = await stands()
    job = world.driver.job
    record, force = job.members.workers[WorkerId("env/1")], world.driver.workforce
    assert record.losses[1] == 0
    for count in (1, 2):
        force.lose(record, "exit code 137")
        assert record.losses == (PolicyVersion(0, 2), count)
        assert stuck.why(job, waited_s=0.0, usual_s=0.0) == ""
    force.lose(record, "exit code 137")
    assert stuck.why(job, waited_s=0.0, usual_s=0.0) == "worker env/1 was lost 3 times behind step 2: exit code 137"
    await world.run_until(lambda: job.ledger.committed == 3)
    assert stuck.why(job, waited_s=0.0, usual_s=0.0) == ""
    force.lose(record, "exit code 137")
    assert record.losses == (PolicyVersion(0, 3), 1)
    assert world.driver.job.standing.state is not DriverState.FAILED
