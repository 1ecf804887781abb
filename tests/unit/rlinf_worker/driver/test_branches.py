"""No two histories of the weights have one number, whoever is left to tell of them."""

import asyncio
from functools import partial
from typing import Any

import pytest

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.runtime.session import branches_of
from tests.builders_driver import make_job
from tests.fakes.driver_roles import SimActor
from tests.fakes.driver_world import World

LOST = {
    "the actor": ["actor/0"],
    "the actor and an env": ["actor/0", "env/0"],
    "all but a rollout": ["actor/0", "env/0", "env/1"],
}


async def until(world: World, *, branch: int, number: int) -> None:
    await world.run_until(lambda: world.driver.job.ledger.version == PolicyVersion(branch, number))


@pytest.mark.parametrize("lost", LOST)
async def test_a_branch_without_a_checkpoint_is_not_opened_twice_when_the_driver_dies_with_those_who_trained_it(lost):
    for seed in range(6):
        world = World(make_job(steps=14, every_steps=4), seed=seed)
        await until(world, branch=0, number=5)
        world.kill("actor/0")
        await until(world, branch=1, number=7)
        for _ in range(seed * 6):
            await world.step()
        world.replace_driver()
        for worker in LOST[lost]:
            world.kill(worker)
        before = len(world.committed)
        await world.run()
        assert world.driver.job.standing.state is DriverState.COMPLETE, world.story()
        assert {branch for branch, _, _ in world.committed[before:]} == {2}, f"seed {seed}"


async def test_a_branch_is_not_opened_again_of_which_only_a_trace_is_left():
    """A job that goes on in its place: of the checkpoint that was there only the number can be read."""
    world = World(make_job(steps=3))
    world.traces = 4
    await world.run()
    assert [(branch, step) for branch, step, _ in world.committed] == [(5, 1), (5, 2), (5, 3)]


def said_of_branches(world: World) -> list[str]:
    said: list[str] = []
    event = world.driver.job.output.event

    def listen(kind: str, message: str, **fields: Any) -> None:
        if kind == "branch":
            said.append(message)
        event(kind, message, **fields)

    world.driver.job.output.event = listen  # type: ignore[method-assign]
    return said


async def test_a_job_in_a_place_that_was_emptied_begins_and_does_not_go_on():
    """As `rm -r place/*` leaves it: without the checkpoints, and with the mark of the last branch."""
    world = World(make_job(steps=3))
    world.traces = 4
    said = said_of_branches(world)
    await world.run()
    why = "branches up to 4 have left their number where checkpoints are, and there is none to go on from"
    assert said == [f"training begins as branch 5: {why}"]


async def test_a_gang_that_is_lost_before_its_first_checkpoint_goes_on_from_the_first_weights():
    world = World(make_job(steps=3))
    said = said_of_branches(world)
    await until(world, branch=0, number=1)
    world.kill("actor/0")
    await world.run()
    assert said == ["training goes on from b0-0 as branch 1; 1 steps are made again"]


async def test_a_driver_that_goes_back_over_a_checkpoint_of_a_branch_that_it_never_heard_of_opens_a_higher_one():
    world = World(make_job(steps=5, every_steps=2))
    await until(world, branch=0, number=3)
    world.traces = 3
    world.kill("actor/0")
    await world.run()
    assert [(branch, step) for branch, step, _ in world.committed][-3:] == [(4, 3), (4, 4), (4, 5)]


VERSION = pb.PolicyVersion(branch=3, number=7)


@pytest.mark.parametrize(
    "message",
    [
        pb.DriverMessage(begin=pb.Begin(version=VERSION)),
        pb.DriverMessage(step_commit=pb.StepCommit(step=7, version=VERSION)),
        pb.DriverMessage(cancel=pb.Cancel(channel="segments", branch=3)),
        pb.DriverMessage(round=pb.Round(channel="trajectories", branch=3)),
        pb.DriverMessage(held=pb.Keys(channel="segments", branch=3)),
        pb.DriverMessage(released=pb.Keys(channel="segments", branch=3)),
        pb.DriverMessage(assign=pb.Assign(channel="segments", units=[pb.Unit(branch=2), pb.Unit(branch=3)])),
    ],
    ids=lambda message: message.WhichOneof("kind"),
)
def test_a_worker_hears_of_a_branch_by_whatever_names_it(message):
    assert max(branches_of(message)) == 3


def test_what_names_no_branch_is_of_the_first():
    for message in (pb.DriverMessage(welcome=pb.Welcome(driver_attempt=9)),
                    pb.DriverMessage(assign=pb.Assign(channel="segments"))):  # fmt: skip
        assert max(branches_of(message)) == 0


def _committed(world: World, step: int) -> bool:
    return world.driver.job.ledger.committed == step


async def test_a_gang_that_takes_turns_is_formed_anew_by_a_driver_that_never_saw_its_other_ranks_join(monkeypatch):
    """A rank's next life loads in the gang's turn, which is granted when all ranks want it: the one that was ready
    before the driver came does not, until it is ended too. So the new driver may not wait for a rank to join."""
    load, blocked = SimActor.load, list[SimActor]()

    def in_turn(rank: SimActor) -> None:
        ranks = [w for w in rank.world.workers.values() if isinstance(w, SimActor)]
        if len({one.attempt > 1000 for one in ranks}) > 1:
            blocked.append(rank)
            return
        for one in (rank, *(other for other in blocked if other is rank.world.workers.get(other.id))):
            load(one)

    monkeypatch.setattr(SimActor, "load", in_turn)
    for killed_first in (True, False):
        world = World(make_job(steps=6, every_steps=2, actors=2))
        await world.run_until(partial(_committed, world, 3))
        if killed_first:
            world.kill("actor/0")
        world.replace_driver()
        if not killed_first:
            world.kill("actor/0")
        await world.run()
        assert world.driver.job.standing.state is DriverState.COMPLETE
        assert [step for _, step, _ in world.committed][-3:] == [4, 5, 6]
    assert blocked, "it has met the case"


async def test_an_old_rank_that_a_new_driver_hears_first_is_ended_before_the_next_life_of_another_is_heard():
    """Both begin at the same time, and the gang need not wait for one after the other."""
    world = World(make_job(steps=6, every_steps=2, actors=2, gpu_pods=2))
    await world.run_until(lambda: world.driver.job.ledger.committed == 3)
    world.kill("actor/0")
    world.replace_driver()
    records = world.driver.job.members.workers
    lost, other = records[WorkerId("actor/0")], records[WorkerId("actor/1")]
    while not world.driver.job.declared:
        await asyncio.sleep(0)
    world.agents["gpu", 1].connect()
    world.workers[WorkerId("actor/1")].connect()
    assert other.state is WorkerState.READY
    world.agents["gpu", 0].connect()
    assert (lost.state, lost.joined) == (WorkerState.STARTING, False)
    world.agents["sim", 0].connect()  # whoever is heard next
    assert (lost.state, lost.joined) == (WorkerState.STARTING, False)
    assert other.state is not WorkerState.READY
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE
    assert [step for _, step, _ in world.committed][-3:] == [4, 5, 6]
