"""An edit of a running job moves its last step and its checkpoints without a restart."""

from dataclasses import replace

import pytest

from rlinf_api.edits import goal_of, with_goal
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState, Goal
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import status
from rlinf_worker.driver.steps import StepLedger
from tests.builders_driver import make_job
from tests.fakes.driver_world import World


def adjust(world: World, **fields: int) -> None:
    job = world.driver.job
    job.adjust(replace(goal_of(job.spec), **fields))
    world.driver.settle()


async def at(world: World, step: int) -> World:
    await world.run_until(lambda: world.driver.job.ledger.committed == step)
    return world


# --- the ledger -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("opened", "asked", "ends"),
    [
        ((4,), 20, 20),
        ((4,), 4, 4),
        ((4,), 3, 4),  # the open one is done
        ((4, 5, 6), 1, 6),
        ((), 1, 4),  # one more: nobody was told that step 3 is the last
        ((), 3, 4),
        ((), 4, 4),
    ],
)
def test_the_last_step_is_behind_those_that_are_open(opened, asked, ends):
    book = StepLedger(steps=10, max_staleness=2, checkpoint_every=4)
    book.version = PolicyVersion(0, 3)
    for step in opened:
        book.open(step, now=0.0)
    book.aim(steps=asked, checkpoint_every=3)
    assert (book.steps, book.checkpoint_every, book.finished) == (ends, 3, False)
    assert book.may_open(ends + 1) is False
    assert book.has_checkpoint(ends)


def test_what_has_ended_has_ended():
    book = StepLedger(steps=3, max_staleness=0, checkpoint_every=4)
    book.version = PolicyVersion(0, 3)
    book.aim(steps=9, checkpoint_every=4)
    assert (book.steps, book.finished) == (3, True)


# --- a whole job ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", [0, 2, 3])
async def test_a_job_goes_on_to_more_steps_also_where_its_last_one_is_under_way(when):
    """At step 3 of 4 the flow has asked for all that there were."""
    world = await at(World(make_job(steps=4, every_steps=3)), when)
    adjust(world, steps=7)
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE
    assert [(branch, step) for branch, step, _ in world.committed] == [(0, step) for step in range(1, 8)]
    assert [str(version) for version in world.checkpoints] == ["b0-3", "b0-6", "b0-7"]


@pytest.mark.parametrize("asked", [1, 3, 4])
@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_job_ends_with_a_checkpoint_behind_what_is_open(asked, staleness):
    world = await at(World(make_job(steps=30, every_steps=1000, staleness=staleness)), 3)
    last = max((step.number for step in world.driver.job.ledger.open_steps), default=4)
    adjust(world, steps=asked)
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE
    assert world.driver.job.standing.message == f"{max(last, asked)} steps are done"
    assert [str(version) for version in world.checkpoints] == [f"b0-{max(last, asked)}"]


async def test_workers_are_told_with_the_next_commit_and_those_that_come_later_as_they_come():
    world = await at(World(make_job(steps=9, every_steps=2)), 2)
    adjust(world, steps=6, every_steps=3, keep=1)
    actor = world.workers[WorkerId("actor/0")]
    await world.run_until(lambda: actor.last_commit is not None and actor.last_commit.step == 3)
    word = actor.last_commit
    assert word is not None
    assert (word.steps, word.checkpoint_keep, word.checkpoint) == (6, 1, True)
    assert world.driver.job.flow_settings.steps == 6
    assert world.driver.job.spec.checkpoint.keep == 1
    world.kill("actor/0")
    await world.run()
    assert world.driver.job.ledger.committed == 6


async def test_the_report_says_what_was_asked_for_and_not_what_it_came_to():
    """Or the operator would ask again and again."""
    world = await at(World(make_job(steps=9)), 3)
    told: list[str] = []
    world.driver.job.event = lambda kind, message, **_: told.append(message)  # type: ignore[method-assign]
    adjust(world, steps=1)
    adjust(world, steps=1)
    said = status.report(world.driver)
    assert said.goal == Goal(steps=1, every_steps=20, keep=3)
    assert said.steps >= 3
    assert told == ["spec.flow.steps is 1 and was 9"]


async def test_a_driver_that_begins_behind_the_new_end_makes_one_more_step_and_saves_it():
    """The one before it died before it could say which step is the last: the gang is further than the edit goes."""
    world = await at(World(make_job(steps=30, every_steps=1000)), 5)
    world.job = replace(world.job, spec=with_goal(world.job.spec, Goal(steps=3, every_steps=1000, keep=3)))
    world.replace_driver()
    await world.run()
    job = world.driver.job
    assert (job.attempt, job.standing.state) == (2, DriverState.COMPLETE)
    assert job.saved is not None
    assert job.saved[0].number == job.ledger.committed
    assert job.ledger.committed in (5, 6, 7)
