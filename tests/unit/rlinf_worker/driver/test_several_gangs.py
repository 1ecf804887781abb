"""An actor and a critic end the steps together: a step counts when both have done their part of it, each on what it was
to get; where one is lost both go back to the same checkpoint. Whatever dies, and whenever."""

import pytest

from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology
from tests.fakes.driver_roles import SimActor
from tests.fakes.driver_world import strike_at_points
from tests.fakes.gangs_world import SHAPES, GangsWorld


def check(world: GangsWorld) -> None:
    job = world.driver.job
    assert job.standing.state is DriverState.COMPLETE, job.standing.message + world.story()
    for gang in ("actor", "critic"):
        told = world.committed_by[gang]
        for _, step, keys in told:
            assert keys == world.expected_of(gang, step), gang
        order = [(branch, step) for branch, step, _ in told]
        assert order == sorted(set(order)), "each (branch, step) once, branches never mixed"
        assert {step for _, step in order} == set(range(1, job.ledger.steps + 1))
    assert world.checkpoints[-1].number == job.ledger.steps


async def test_gangs_that_stand_on_different_checkpoints_begin_again(monkeypatch):
    """One of them could not read the newest, for a while."""
    world, restore, stood_on = GangsWorld(SHAPES["the same for both"]), SimActor.restore, list[PolicyVersion]()

    def restore_badly(rank: SimActor) -> None:
        if (rank.id, rank.attempt) == ("critic/0", 2):
            rank.say_ready(world.checkpoints[0])
        else:
            restore(rank)

    monkeypatch.setattr(SimActor, "restore", restore_badly)
    await world.run_until(lambda: world.driver.job.ledger.committed == 2 and len(world.checkpoints) == 2)
    stood_on.extend(world.checkpoints)
    world.kill("actor/0")
    critic = world.driver.job.members.workers[WorkerId("critic/0")]
    await world.run_until(lambda: critic.attempt == 3)
    assert critic.why == f"it stands on {stood_on[0]}, worker actor/0 on {stood_on[1]}"
    await world.run()
    check(world)
    assert [number for branch, number, _ in world.committed] == [1, 2, 3], "no step is made twice"


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_step_counts_when_both_have_done_their_part(shape):
    for seed in range(3):
        world = GangsWorld(SHAPES[shape], seed=seed)
        await world.run()
        check(world)
        assert world.driver.workforce.restarts == 0
        assert len(world.committed_by["actor"]) == len(world.committed_by["critic"]) == 3


FAULTS = {
    "the actor is killed": lambda w: w.kill("actor/0"),
    "the critic is killed": lambda w: w.kill("critic/0"),
    "both are killed": lambda w: (w.kill("critic/0"), w.kill("actor/0")),
    "an env is killed": lambda w: w.kill("env/0"),
    "the pod of both is lost": lambda w: w.kill_pod("gpu"),
    "the stream of the critic breaks": lambda w: w.break_stream("critic/0"),
    "driver and env are killed": lambda w: (w.kill("env/0"), w.replace_driver()),
    "driver and critic are killed": lambda w: (w.replace_driver(), w.kill("critic/0")),
    "critic and driver are killed": lambda w: (w.kill("critic/0"), w.replace_driver()),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_fault_at_any_point_loses_and_doubles_nothing(shape, fault):
    await strike_at_points(lambda seed: GangsWorld(SHAPES[shape], seed=seed), FAULTS[fault], check=check, points=3)


def test_what_a_partner_in_a_cycle_makes_is_behind_a_ticket_too():
    """A simulator takes the tickets, and the policy that it asks makes the units."""
    train = QueueSpec(channel="samples", producer="policy", consumer="train", rounds=True)
    tickets = QueueSpec(channel="tickets", producer="", consumer="sim")
    topology = Topology(cycles=(CycleSpec(channel="moves", asker="sim", answerer="policy"),), queues=(tickets, train))
    assert topology.gangs_behind("tickets") == (train,)
    assert Topology(queues=(tickets, train)).gangs_behind("tickets") == ()
