"""A plan changed on a running job, in memory: prepared, committed at a step boundary or aborted, whoever dies and when.
tests/fakes/driver_world.py says what is a model there; its operator pins a plan until it is in force or has failed."""

from typing import Any

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.names import WorkerId
from rlinf_api.plan import WorkerMemory
from rlinf_api.report import DriverState
from rlinf_api.slots import Allotment
from rlinf_worker.driver import status
from rlinf_worker.driver.pending import Phase
from rlinf_worker.driver.settings import DriverSettings
from tests.builders_driver import Job, make_job
from tests.fakes.driver_world import World

STEPS = 6
BASE: dict[str, Any] = {"envs": 2, "slices": 4, "steps": STEPS, "every_steps": 3}
CHANGES: dict[str, dict[str, Any]] = {
    "sizes": {"micro_batch": 1, "depth": 3},
    "a worker more": {"envs": 3},
    "a worker less": {"envs": 1},
    "a pod more": {"envs": 3, "pods": 2},
    "a gang of two": {"actors": 2},
    "all at once": {"envs": 4, "pods": 2, "actors": 2, "micro_batch": 1},
}


def elastic(revision: int, **changes: Any) -> Job:
    """All plans of one spec: pools and roles may have more and fewer."""
    return make_job(**{**BASE, **changes}, revision=revision, elastic=True)


def check(world: World) -> None:
    """Complete, each step once on its own units, and everybody of one mind about the plan."""
    assert world.driver.job.standing.state is DriverState.COMPLETE, world.driver.job.standing.message + world.story()
    for _, step, keys in world.committed:
        assert keys == world.expected(step), f"step {step}"
    steps = [(branch, step) for branch, step, _ in world.committed]
    assert steps == sorted(set(steps))
    assert {step for _, step in steps} == set(range(1, STEPS + 1))
    revision = world.driver.job.revision
    assert {agent.plan.committed for agent in world.agents.values() if agent.outbox} == {revision}
    wanted = {w.id for w in world.driver.job.placement.workers}
    assert set(world.driver.job.members.workers) == wanted
    assert world.driver.switch.preparing or world.driver.switch.prepared or not world.driver.job.members.prepared


async def changed(change: dict[str, Any], *, seed: int = 0, before: int = 2) -> World:
    world = World(elastic(1), seed=seed)
    await world.run_until(lambda: world.driver.job.ledger.committed == before)
    world.pin(elastic(2, **change))
    return world


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", range(3))
async def test_another_plan_comes_into_force_at_a_step_boundary(change, seed):
    world = await changed(CHANGES[change], seed=seed)
    lives = {wid: w.attempt for wid, w in world.workers.items()}
    await world.run()
    check(world)
    switch = world.driver.switch
    assert (world.driver.job.revision, switch.number, switch.count, switch.phase) == (2, 2, 1, Phase.IDLE)
    gang = CHANGES[change].get("actors", 1) != 1
    kept = {wid for wid in lives if wid in world.workers and not (gang and wid.startswith("actor/"))}
    assert {wid: world.workers[wid].attempt for wid in kept} == {wid: lives[wid] for wid in kept}, "who stays lives on"
    assert world.driver.workforce.restarts == 0
    branches = {branch for branch, _, _ in world.committed}
    assert branches == ({0, 1} if gang else {0})


async def test_the_pause_is_measured_from_the_boundary_until_a_unit_moves():
    world, told = await changed({"envs": 3}), list[dict[str, Any]]()
    await world.run_until(lambda: world.driver.job.revision == 2)
    world.clock.now += 0.25
    world.driver.job.output.event = lambda kind, message, **fields: told.append({"event": kind, **fields})  # type: ignore[method-assign]
    await world.run_until(lambda: world.driver.switch.pause.seconds > 0)
    assert {"event": "plan-switched", "revision": 2, "pause_s": round(world.driver.switch.pause.seconds, 4)} in told
    assert 0.25 <= world.driver.switch.pause.seconds <= 2.0
    assert status.report(world.driver).plan_pause_s == world.driver.switch.pause.seconds


async def test_a_plan_is_called_prepared_from_when_it_is_until_its_commit_is_told():
    world, said = await changed({"envs": 3}), set[tuple[Phase, int, int]]()

    def is_over() -> bool:
        switch = world.driver.switch
        said.add((switch.phase, switch.preparing, switch.prepared))
        return world.driver.job.revision == 2 and switch.phase is Phase.IDLE

    await world.run_until(is_over)
    assert said == {
        (Phase.IDLE, 0, 0), (Phase.PREPARING, 2, 0), (Phase.PREPARED, 0, 2), (Phase.WAITING, 0, 2),
        (Phase.TELLING, 0, 0), (Phase.HANDING_OVER, 0, 0),
    }  # fmt: skip


async def test_another_allotment_reaches_the_workers_that_it_is_for_in_the_lives_that_they_have():
    world = await changed({})
    lives = {wid: w.attempt for wid, w in world.workers.items()}
    given = {"memory": WorkerMemory(kv="1Gi", offloaded="512Mi"), "option": "eager"}
    workers = [w.model_copy(update=given) if w.role == "env" else w for w in world.pinned.workers]
    world.pinned = world.pinned.model_copy(update={"workers": workers})
    await world.run_until(lambda: world.driver.job.revision == 2)
    again = WorkerId("env/1")
    world.kill(again)  # its next life hears it with its Welcome
    await world.run()
    check(world)
    found = {wid: w.replans.allotment for wid, w in world.workers.items()}
    wanted = Allotment(kv_bytes=1 << 30, offloaded_bytes=1 << 29, option="eager")
    assert found == {wid: wanted if wid.startswith("env/") else Allotment() for wid in found}
    assert {wid: w.attempt for wid, w in world.workers.items()} == lives | {again: lives[again] + 1}


async def test_who_is_waited_for_once_a_plan_is_in_force_is_named():
    world = await changed({"actors": 3})
    await world.run_until(lambda: world.driver.job.revision == 2)
    ranks = ", ".join(f"worker actor/{rank} in pod j-gpu-0-a1: down" for rank in range(3))
    assert world.driver.job.standing.message == f"plan revision 2: waiting for {ranks}"


async def test_a_gang_that_is_formed_anew_loses_no_step():
    world = await changed({"actors": 2})
    await world.run()
    check(world)
    assert len(world.committed) == STEPS, "the step before the change was saved: none is made again"


VICTIMS: dict[str, Any] = {
    "the driver": lambda w: w.replace_driver(),
    "the operator": lambda w: setattr(w, "operator_is_up", False),
    "the agent of the old pod": lambda w: w.kill_pod("sim"),
    "the agent of the gang's pod": lambda w: w.kill_pod("gpu"),
    "a worker that stays": lambda w: w.kill("env/0"),
    "the actor": lambda w: w.kill("actor/0"),
    "driver and agent": lambda w: (w.replace_driver(), w.kill_pod("sim")),
    "driver and actor": lambda w: (w.replace_driver(), w.kill("actor/0")),
}
PHASES = [Phase.PREPARING, Phase.PREPARED, Phase.WAITING, Phase.TELLING, Phase.HANDING_OVER]


@pytest.mark.parametrize("phase", PHASES, ids=lambda p: p.name)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("change", ["sizes", "a pod more", "a gang of two"])
async def test_killed_in_any_phase_one_plan_is_in_force_afterwards(change, victim, phase):
    world = await changed(CHANGES[change], seed=len(victim))
    before = world.driver
    await world.run_until(lambda w=world: w.driver.switch.phase is phase)  # type: ignore[misc]
    VICTIMS[victim](world)
    revisions = set()
    while not world.driver.job.ended.is_set():
        seen = world.delivered
        await world.run_until(lambda w=world, n=seen: w.delivered > n + 9 or w.driver.job.ended.is_set())  # type: ignore[misc]
        world.operator_is_up = True
        revisions.add(world.driver.job.revision)
    await world.run()
    check(world)
    assert revisions <= {1, 2}
    if phase in (Phase.TELLING, Phase.HANDING_OVER) and world.driver is before:
        assert world.driver.job.revision == 2, "a commit that was told is finished"


@pytest.mark.parametrize("phase", [Phase.TELLING, Phase.HANDING_OVER], ids=lambda p: p.name)
async def test_a_switch_whose_commit_an_agent_has_seen_is_finished_by_the_next_driver(phase):
    for seed in range(6):
        world = await changed({"envs": 3}, seed=seed)
        await world.run_until(lambda w=world: w.driver.switch.phase is phase)  # type: ignore[misc]
        await world.run_until(lambda w=world: any(a.plan.committed == 2 for a in w.agents.values()))  # type: ignore[misc]
        world.operator_is_up = False  # and knows of nothing: to its status the first plan is in force
        world.plan = elastic(1).plan
        world.replace_driver()
        assert world.driver.job.revision == 1
        await world.run()
        check(world)
        assert world.driver.job.revision == 2


async def test_a_switch_whose_commit_nobody_has_seen_is_given_up_with_its_driver():
    world = await changed({"envs": 3})
    await world.run_until(lambda: world.driver.switch.phase is Phase.PREPARED)
    world.operator_is_up = False
    world.pinned = world.plan
    world.replace_driver()
    await world.run()
    check(world)
    assert world.driver.job.revision == 1
    assert sorted(world.driver.job.members.workers) == ["actor/0", "env/0", "env/1", "rollout/0"]


async def test_a_worker_that_fails_while_it_is_prepared_costs_the_plan_and_nothing_else():
    world = await changed({"envs": 3})
    await world.run_until(lambda: "env/2" in world.workers)
    world.kill("env/2")
    await world.run()
    check(world)
    assert world.driver.job.revision == 1
    revision, why = world.driver.switch.failed
    assert revision == 2
    assert "worker env/2, which it adds, failed" in why
    assert world.driver.workforce.restarts == 0
    assert world.driver.first_failure is None


async def test_a_driver_that_did_not_run_lets_nobodys_time_run_out():
    """None of those that it waits for could be heard: a preparation, a pod that is away, a checkpoint."""
    world = World(elastic(1), stands_still=True)
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.operator_is_up = False
    assert world.driver.switch.prepare(elastic(2, envs=3, pods=2).plan) == ""
    world.kill("env/0")
    pod = world.agents["sim", 0]
    assert pod.outbox is not None
    world.driver.on_agent_gone(pod.key, pod.outbox)
    pod.outbox = None
    world.driver.job.ending_at = world.driver.job.clock() + 0.5
    world.clock.now += 3600.0
    world.driver.tick()
    assert world.driver.switch.phase is Phase.PREPARING
    assert world.driver.job.members.pods[pod.key].lost_at is not None, "it has its time to come back"
    assert not world.driver.job.ended.is_set()
    for _ in range(10):
        world.clock.now += 0.2
        world.driver.tick()
    assert world.driver.job.ended.is_set(), "and now it is over"


async def test_a_preparation_that_takes_too_long_is_given_up_with_what_is_missing():
    world = World(elastic(1))
    world.driver.job.settings = DriverSettings(prepare_timeout_s=30.0)
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.operator_is_up = False
    assert world.driver.switch.prepare(elastic(2, envs=3, pods=2).plan) == ""
    world.clock.now += 31
    for agent in world.agents.values():
        agent.tell(heartbeat=agents_pb2.Heartbeat())
    world.driver.switch.advance()
    assert world.driver.switch.failed == (2, "it was not prepared within 30 s: waiting for agent of pod sim-1")
    assert world.driver.switch.phase is Phase.IDLE
    await world.run()
    check(world)
    assert world.driver.job.revision == 1


async def test_workers_have_the_whole_time_to_answer_however_late_the_agents_did():
    world = World(elastic(1))

    def phase():
        return world.driver.switch.phase

    timeout_s = world.driver.job.settings.commit_timeout_s
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    world.pin(elastic(2, micro_batch=1, depth=3))
    await world.run_until(lambda: phase() is Phase.TELLING)
    world.clock.now += timeout_s - 0.1
    await world.run_until(lambda: phase() is not Phase.TELLING)
    assert phase() is Phase.HANDING_OVER
    world.clock.now += timeout_s - 0.5
    world.driver.switch.advance()
    assert phase() is Phase.HANDING_OVER
    world.clock.now += 1.0
    world.driver.switch.advance()
    assert phase() is Phase.IDLE, "the step goes on without those that have not answered"
    await world.run()
    check(world)


async def test_another_plan_takes_the_place_of_one_that_is_being_prepared():
    world = await changed({"envs": 3, "pods": 2})
    await world.run_until(lambda: world.driver.switch.phase is Phase.PREPARING)
    world.pin(elastic(3, micro_batch=1))
    await world.run()
    check(world)
    assert world.driver.job.revision == 3


async def test_an_older_plan_comes_into_force_again():
    world = await changed({"envs": 3}, before=1)
    await world.run_until(lambda: world.driver.job.revision == 2)
    world.pin(elastic(1))
    await world.run()
    check(world)
    assert (world.driver.job.revision, world.driver.switch.number) == (1, 3)


async def test_workers_come_and_go_again_and_again():
    world = World(elastic(1))
    for revision, envs in enumerate((3, 2, 3, 1), start=2):
        world.pin(elastic(revision, envs=envs))
        await world.run_until(lambda r=revision: world.driver.job.revision == r)  # type: ignore[misc]
    await world.run()
    check(world)
    assert world.driver.switch.count == 4


async def test_a_gang_does_not_change_without_a_checkpoint_to_begin_on():
    world = World(elastic(1), checkpoints=False)
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.pin(elastic(2, actors=2))
    await world.run()
    check(world)
    assert world.driver.job.revision == 1
    assert "would lose all that was learnt" in world.driver.switch.failed[1]


async def test_the_slices_of_a_step_are_shared_out_among_the_new_workers():
    world = await changed({"envs": 4})
    await world.run_until(lambda: world.driver.job.revision == 2)
    await world.run_until(lambda: world.driver.job.ledger.committed == STEPS - 1)
    given = {wid for key, wid in world.assigned if key.endswith(f"@{STEPS - 1}")}
    assert given == {f"env/{n}" for n in range(4)}
