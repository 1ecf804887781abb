"""A change of plan that cannot go on by itself, in memory: no disk for the checkpoint that it needs, no node for a pod
that it has, a preparation given up before it. The job goes on, and the next plan has its way."""

from unittest.mock import Mock

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import server, status
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.pending import Phase
from rlinf_worker.flows import registry
from tests.fakes.driver_world import SimAgent, World
from tests.unit.rlinf_worker.driver.test_switch import CHANGES, STEPS, changed, check, elastic


def sleep(world: World, seconds: float) -> None:
    """Time in which everybody lives and nothing else happens."""
    for _ in range(round(seconds)):
        world.clock.now += 1.0
        for agent in world.agents.values():
            agent.tell(heartbeat=agents_pb2.Heartbeat())


# --- no disk ----------------------------------------------------------------------------------------------------------
async def gang_without_disk() -> World:
    world = await changed({"actors": 2}, before=1)
    world.disk_is_full = True
    await world.run_until(lambda: bool(world.driver.commits.problem))
    assert world.driver.switch.phase is Phase.WAITING
    return world


async def test_a_checkpoint_that_fails_before_a_new_gang_is_made_at_a_later_step():
    world = await gang_without_disk()
    failed_at = world.driver.job.ledger.committed
    await world.run_until(lambda: world.driver.job.ledger.committed > failed_at)
    assert world.driver.job.revision == 1
    waits = (
        "waiting for a checkpoint on which its gang can begin; the last could not be written: No space left on device"
    )
    assert status.report(world.driver).plan_message == waits
    world.disk_is_full = False
    sleep(world, 11.0)
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert len(world.committed) == STEPS, "the checkpoint that came at last was the gang's: no step is made again"


async def test_a_new_gang_that_gets_no_checkpoint_costs_the_plan_and_not_the_job():
    world = await gang_without_disk()
    sleep(world, world.driver.job.settings.gang_checkpoint_timeout_s + 1.0)
    world.driver.tick()
    revision, why = world.driver.switch.failed
    assert revision == 2
    assert why == "its gang begins on a checkpoint, none could be written for 600 s: No space left on device"
    await world.run()
    check(world)
    assert world.driver.job.revision == 1
    assert world.driver.workforce.restarts == 0


async def test_a_disk_that_was_full_long_before_a_plan_is_committed_does_not_cost_it():
    world = World(elastic(1))
    world.disk_is_full = True
    await world.run_until(lambda: bool(world.driver.commits.problem))
    sleep(world, world.driver.job.settings.gang_checkpoint_timeout_s + 1.0)
    world.pin(elastic(2, actors=2))
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    world.driver.tick()
    assert (world.driver.switch.phase, world.driver.switch.failed) == (Phase.WAITING, (0, ""))
    world.disk_is_full = False
    await world.run()
    check(world)
    assert world.driver.job.revision == 2


async def test_the_word_that_a_checkpoint_failed_survives_a_broken_stream():
    world = await changed({"actors": 2}, before=1)
    world.disk_is_full = True
    actor = world.workers[WorkerId("actor/0")]
    await world.run_until(lambda: any(m.saved.problem for m in actor.to_driver))
    world.break_stream("actor/0")
    await world.run_until(lambda: bool(world.driver.commits.problem))
    world.disk_is_full = False
    sleep(world, 11.0)
    await world.run()
    check(world)
    assert world.driver.job.revision == 2


async def test_an_older_checkpoint_told_again_changes_nothing_of_one_that_failed():
    world = World(elastic(1))
    await world.run_until(lambda: world.driver.job.saved is not None)
    world.disk_is_full = True
    world.pin(elastic(2, actors=2))
    commits, actor = world.driver.commits, world.workers[WorkerId("actor/0")]
    await world.run_until(lambda: bool(commits.problem))
    assert (world.driver.job.revision, world.driver.switch.phase) == (1, Phase.WAITING)
    since, owed_at = commits.failing_since, commits._owed_at
    for _ in range(2):
        sleep(world, 4.0)
        world.break_stream("actor/0")
        await world.run_until(lambda: actor.outbox is not None and not actor.to_driver and not actor.outbox._messages)
        assert (commits.problem, commits.failing_since) == ("No space left on device", since)
        assert commits._owed_at == owed_at is not None, "nor does a failure told again put the next try off"
    sleep(world, 4.0)
    assert not commits.rests, "which is made out of turn"


# --- a plan after one that was given up -------------------------------------------------------------------------------
@pytest.mark.parametrize("failed", [True, False])
async def test_agents_note_the_plan_that_follows_one_that_was_given_up(failed):
    world = await changed(CHANGES["a worker more"])
    await world.run_until(lambda: all(agent.plan.revision == 2 for agent in world.agents.values()))
    world.driver.switch.abort("a test gives it up", failed=failed)
    world.pin(elastic(3, micro_batch=1))
    await world.run_until(lambda: world.driver.switch.phase is Phase.PREPARED)
    assert {agent.plan.revision for agent in world.agents.values()} == {3}
    await world.run_until(lambda: world.driver.job.revision == 3)
    assert {agent.plan.committed for agent in world.agents.values()} == {3}, "noted before the plan is in force"
    await world.run()
    check(world)


# --- no node ----------------------------------------------------------------------------------------------------------
class Nowhere(SimAgent):
    """A pod that finds no node."""

    def connect(self) -> None:
        return


@pytest.mark.parametrize("change", ["a pod more", "all at once"])
async def test_a_pod_of_the_new_plan_that_is_lost_for_good_leaves_a_way_back(change):
    world = await changed(CHANGES[change])
    await world.run_until(lambda: world.driver.switch.phase is Phase.HANDING_OVER)
    world.kill_pod("sim", 1)
    world.agents["sim", 1] = Nowhere(world, ("sim", 1), attempt=2)
    world.clock.now += world.driver.job.settings.broken_agent_s + 0.1  # noticed before everybody has answered
    world.driver.tick()
    until = world.clock.now + 10.0  # others of its role take over its work only later
    await world.run_until(lambda: world.clock.now > until)
    driver = world.driver
    assert (driver.job.revision, driver.job.standing.state, driver.job.ledger.open_steps) == (
        2,
        DriverState.RECOVERING,
        (),
    )
    assert any("sim-1" in phrase for phrase in driver.job.members.missing())
    world.pin(elastic(1))
    await world.run_until(lambda: driver.job.revision == 1)
    await world.run_until(lambda: driver.job.standing.state is DriverState.RUNNING)
    await world.run()
    check(world)
    assert driver.switch.number == 3


# --- agents that come while the commit is told ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "ordinal"), [("sizes", 0), ("a worker more", 0), ("a pod more", 0), ("a pod more", 1)]
)
async def test_an_agent_that_attaches_while_the_commit_is_told_is_told_it_too(change, ordinal):
    world = await changed(CHANGES[change])
    await world.run_until(lambda: world.driver.switch.phase is Phase.WAITING)
    world.agents["gpu", 0].frozen = True  # the answer to its commit is long in coming
    await world.run_until(lambda: world.driver.switch.phase is Phase.TELLING)
    world.kill_pod("sim", ordinal)
    world.agents["sim", ordinal].comes_now = True
    await world.run_until(lambda: world.agents["sim", ordinal].plan.revision == 2)
    world.agents["gpu", 0].frozen = False
    await world.run()
    check(world)
    assert world.driver.job.revision == 2


# --- a driver that is at work before it hears of the commit -----------------------------------------------------------
@pytest.mark.parametrize("phase", [Phase.TELLING, Phase.HANDING_OVER], ids=lambda phase: phase.name)
async def test_a_commit_that_a_driver_hears_of_when_it_is_at_work_is_finished_all_the_same(phase, monkeypatch):
    world = await changed(CHANGES["a worker more"])
    await world.run_until(lambda: world.driver.switch.phase is phase)
    await world.run_until(lambda: any(agent.plan.committed == 2 for agent in world.agents.values()))
    world.operator_is_up = False
    world.plan = elastic(1).plan
    world.replace_driver()
    with monkeypatch.context() as patch:  # workers come first
        patch.setattr(SimAgent, "connect", lambda self: None)
        await world.run_until(lambda: world.driver.job.begun)
    for agent in world.agents.values():
        agent.comes_now = True
    await world.run()
    check(world)
    assert world.driver.job.revision == 2
    assert world.driver.switch.failed == (0, "")


# --- a driver that has not begun when it hears of the commit ----------------------------------------------------------
async def committed_before(monkeypatch, **change) -> World:
    """A new driver with the old plan, all of whose workers have come; the agents, which have committed, come next."""
    world = await changed(change)
    await world.run_until(lambda: world.driver.switch.phase is Phase.HANDING_OVER)
    await world.run_until(
        lambda: any(a.plan.committed == 2 for a in world.agents.values()) and "env/1" not in world.workers
    )
    world.operator_is_up = False
    world.plan, world.switches = elastic(1).plan, 1
    world.replace_driver()
    with monkeypatch.context() as patch:  # workers come first
        patch.setattr(SimAgent, "connect", lambda self: None)
        members = world.driver.job.members.workers
        await world.run_until(lambda: all(members[wid].state is WorkerState.READY for wid in world.workers))
    assert not world.driver.job.begun, "env/1 is not there any more"
    for agent in world.agents.values():
        agent.comes_now = True
    return world


async def test_a_commit_is_not_called_finished_by_a_driver_that_has_no_plan_yet():
    world = await changed({"envs": 4})
    await world.run_until(lambda: world.driver.switch.number == 2 and world.driver.switch.phase is Phase.IDLE)
    first, seen = elastic(1), list[tuple[str, str]]()
    driver = first.driver(world.clock, attempt=world.attempt + 1)
    driver.job.output.event = lambda kind, message, **_: seen.append((kind, message))  # type: ignore[method-assign]
    world.driver, world.attempt = driver, world.attempt + 1
    agent = world.agents["sim", 0]
    for _ in range(2):
        agent.outbox = None
        agent.connect()
        assert (agent.outbox, seen, driver.switch.number) == (None, [], 0), "it is to come again"
    driver.switch.first(first.plan, switches=1)
    driver.settle()
    agent.connect()
    assert agent.outbox is not None
    assert ("plan", "plan revision 2 was committed before this driver began: it is finished") in seen


async def test_who_is_only_in_the_old_plan_is_not_awaited_once_its_commit_is_known(monkeypatch):
    world = await committed_before(monkeypatch, **CHANGES["a worker less"])
    await world.run()
    check(world)
    assert world.driver.job.revision == 2


async def test_workers_that_came_before_the_commit_was_known_are_told_its_sizes(monkeypatch):
    world = await committed_before(monkeypatch, envs=1, micro_batch=1, depth=3)
    await world.run_until(lambda: world.driver.job.revision == 2 and world.driver.switch.phase is Phase.IDLE)
    assert {wid: worker.replans.number for wid, worker in world.workers.items()} == dict.fromkeys(world.workers, 2)
    await world.run()
    check(world)


# --- before the first step --------------------------------------------------------------------------------------------
async def test_a_flow_that_has_not_begun_learns_how_many_workers_another_plan_has(monkeypatch):
    asked: list[int] = []
    load = registry.load

    def loaded(name: str):
        async def flow(run):
            asked.append(run.workers("env"))
            await load(name)(run)

        return flow

    monkeypatch.setattr(registry, "load", loaded)
    world = World(elastic(1), seed=1)  # under which the plan comes before the first step is over
    await world.run_until(lambda: world.driver.job.declared)
    world.pin(elastic(2, envs=3))
    await world.run_until(lambda: world.driver.job.revision == 2)
    assert world.driver.job.ledger.committed == 0
    await world.run()
    check(world)
    assert asked[-1] == 3


# --- a word that comes late -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("problem", ["", "flow 'ppo' did not declare its channels within 10 s"])
async def test_a_plan_that_comes_into_force_while_its_flow_is_asked_is_not_prepared_again(problem, monkeypatch):
    world = await changed(CHANGES["sizes"])
    switch = world.driver.switch

    async def would_run(*_, **__):
        await world.run_until(lambda: world.driver.job.revision == 2 and switch.phase is Phase.IDLE)
        return problem

    monkeypatch.setattr(server, "would_run", would_run)
    servicer = server.JobServicer(world.driver, on_plan=lambda: None, seen_end=lambda: None)
    plan_json = elastic(2, **CHANGES["sizes"]).plan.model_dump_json(by_alias=True)
    answer = await servicer.PreparePlan(job_pb2.PlanRequest(plan_json=plan_json, revision=2), Mock())
    assert answer.ok
    assert (switch.phase, switch.pending, switch.failed) == (Phase.IDLE, None, (0, ""))
    await world.run()
    check(world)
    assert switch.number == 2


# --- what does not fit ------------------------------------------------------------------------------------------------
async def test_a_cycle_that_the_flow_does_not_have_is_refused_by_name(monkeypatch):
    world = World(elastic(1))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    plan = elastic(2).plan
    cycle = {"roles": ["env", "rolout"], "stages": 2}
    wrong = type(plan).model_validate({**plan.model_dump(by_alias=True), "cycles": [cycle]})
    monkeypatch.setattr(world.driver.job, "event", event := Mock())
    problem = world.driver.switch.prepare(wrong)
    assert "the flow has no cycle of env and rolout" in problem
    assert "wanted among env and rollout" in problem
    event.assert_called_with("plan-failed", f"plan revision {wrong.revision} is refused: {problem}", revision=2)
    monkeypatch.undo()
    right = type(plan).model_validate(
        {**plan.model_dump(by_alias=True), "cycles": [cycle | {"roles": ["rollout", "env"]}]}
    )
    assert world.driver.switch.prepare(right) == ""
