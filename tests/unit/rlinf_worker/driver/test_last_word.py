"""What a driver said of a commit stands: its successor says the same to the ranks that have not heard it. Ranks that
differ on `checkpoint` would wait for each other, one of them in a collective."""

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.commits import CHECKPOINT_RETRY_S
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World


def words(world: World) -> dict[str, tuple[int, bool, bool]]:
    """Of each rank: the last commit that it has heard, with `checkpoint` and `last`."""
    said = {wid: w.last_commit for wid, w in world.workers.items() if w.last_commit is not None}
    return {wid: (word.step, word.checkpoint, word.last) for wid, word in said.items()}


async def until_one_rank_has_heard(world: World) -> None:
    await world.run_until(lambda: any(checkpoint for _, checkpoint, _ in words(world).values()))
    assert len(set(words(world).values())) == 2, "one rank has heard it and one has not"


def ask_again_out_of_turn(world: World) -> None:
    """After a checkpoint that could not be written."""
    saved = pb.Saved(version=pb.PolicyVersion(number=2), problem="No space left on device")
    world.driver.on_worker_message(WorkerId("actor/0"), pb.WorkerMessage(saved=saved))
    world.clock.now += CHECKPOINT_RETRY_S


OUT_OF_TURN = {"a drain": lambda w: w.driver.drain(), "a checkpoint that could not be written": ask_again_out_of_turn}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cause", OUT_OF_TURN)
async def test_a_new_driver_tells_the_other_rank_what_the_first_has_heard(cause, seed):
    world = World(make_job(steps=9, every_steps=1000, actors=2), seed=seed)
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    OUT_OF_TURN[cause](world)
    await until_one_rank_has_heard(world)
    word = max(words(world).values())
    world.replace_driver()
    await world.run_until(lambda: {w[0] for w in words(world).values()} == {word[0]})
    assert set(words(world).values()) == {word}
    await world.run()
    is_drained = cause == "a drain"
    assert world.driver.job.standing.state is (DriverState.DRAINED if is_drained else DriverState.COMPLETE)
    assert world.driver.job.ledger.committed == (word[0] if is_drained else 9), "no rank does a step after the last"
    assert world.checkpoints[0].number == word[0]
    assert world.driver.job.saved is not None
    assert world.driver.job.saved[0].number == world.driver.job.ledger.committed
    assert {branch for branch, _, _ in world.committed} == {0}


async def test_a_drain_that_a_driver_did_not_end_is_ended_by_the_next_also_after_the_last_step():
    """All ranks have heard that it is the last; a suspension is asked for again."""
    world = World(make_job(steps=9))
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    world.driver.drain()
    await world.run_until(lambda: any(last for _, _, last in words(world).values()))
    word = max(words(world).values())
    world.replace_driver()
    await world.run_until(lambda: world.driver.job.begun or world.driver.job.ended.is_set())
    world.driver.drain()
    await world.run()
    assert world.driver.job.standing.state is DriverState.DRAINED
    assert world.driver.job.ledger.committed == word[0]


async def lose_the_last_checkpoint_as_it_is_written(world: World, monkeypatch: pytest.MonkeyPatch) -> int:
    """All ranks have heard the last word, and a new driver has begun. The step of that word."""
    await world.run_until(lambda: any(last for _, _, last in words(world).values()))
    word = max(words(world).values())
    world.replace_driver()
    with monkeypatch.context() as patch:
        patch.setattr(world.driver.commits, "on_saved", lambda saved: None)
        await world.run_until(lambda: world.driver.job.begun or world.driver.job.ended.is_set())
    assert world.driver.job.ending_at is not None
    world.checkpoints[:] = [version for version in world.checkpoints if version.number < word[0]]
    world.kill("actor/0")
    return word[0]


async def test_a_job_whose_last_checkpoint_is_lost_under_a_new_driver_makes_its_last_steps_again(monkeypatch):
    """Nobody has asked for a drain."""
    world = World(make_job(steps=11, every_steps=4))
    assert await lose_the_last_checkpoint_as_it_is_written(world, monkeypatch) == 11
    await world.run()
    assert (world.driver.job.standing.state, world.driver.job.standing.message) == (
        DriverState.COMPLETE,
        "11 steps are done",
    )
    assert [str(version) for version in world.checkpoints] == ["b0-4", "b0-8", "b1-11"]


async def test_a_drain_whose_last_checkpoint_is_lost_under_a_new_driver_ends_behind_one_more_step(monkeypatch):
    """Also before the operator has asked the new driver for it."""
    world = World(make_job(steps=11, every_steps=4))
    await world.run_until(lambda: world.driver.job.ledger.committed == 5)
    world.driver.drain()
    assert await lose_the_last_checkpoint_as_it_is_written(world, monkeypatch) in (5, 6)
    await world.run()
    assert (world.driver.job.standing.state, world.driver.job.standing.message) == (
        DriverState.DRAINED,
        "stopped after step 5 of 11",
    )
    assert [str(version) for version in world.checkpoints] == ["b0-4", "b1-5"]


@pytest.mark.parametrize("by", ["who committed", "its successor"])
async def test_the_last_checkpoint_has_its_time_and_no_more(by, monkeypatch):
    world = World(make_job(steps=3))
    await world.run_until(lambda: any(last for _, _, last in words(world).values()))
    if by == "its successor":
        world.replace_driver()
    monkeypatch.setattr(world.driver.commits, "on_saved", lambda saved: None)
    job = world.driver.job
    await world.run_until(lambda: job.ending_at is not None)

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds)):
            world.clock.now += 1.0
            for agent in world.agents.values():
                agent.tell(heartbeat=agents_pb2.Heartbeat())
            world.driver.tick()

    pass_time(job.settings.save_timeout_s - 2.0)
    assert not job.ended.is_set()
    pass_time(4.0)
    assert job.ended.is_set()


async def test_a_last_word_of_a_branch_that_is_dead_ends_no_step_of_the_same_number():
    world = World(make_job(steps=6, every_steps=2))
    await world.run_until(lambda: world.driver.job.ledger.committed == 3)
    world.kill("actor/0")
    await world.run_until(lambda: world.driver.job.ledger.version == PolicyVersion(1, 3))
    driver, old = world.driver, pb.StepCommit(step=3, version=pb.PolicyVersion(number=3), checkpoint=True, last=True)
    driver.commits.forget()  # as a driver that has begun the branch and not committed on it
    driver.commits.learn(pb.Hello(last_commit=old), is_rank=True)
    assert driver.commits.last == old
    assert (driver.commits.told_last, driver.commits.is_saving) == (False, False)
    again = driver.commits._again(3)
    assert (again.version.branch, again.checkpoint, again.last) == (1, False, False)


async def test_what_a_rank_was_told_on_a_branch_that_is_dead_is_no_word_of_the_new_one():
    """The gang is formed anew behind a driver that has adopted it."""
    world = World(make_job(steps=6, every_steps=2, actors=2))
    await world.run_until(lambda: world.driver.job.ledger.committed == 3)
    world.replace_driver()
    world.kill("actor/1")
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE
    assert [str(version) for version in world.checkpoints] == ["b0-2", "b1-4", "b1-6"]


@pytest.mark.parametrize("seed", range(4))
async def test_a_drain_that_meets_a_new_driver_waits_for_what_only_workers_know(seed):
    """As the operator asks each driver for it, from its first second on."""
    world = World(make_job(steps=50, every_steps=1000, actors=2), seed=seed)
    await world.run_until(lambda: world.driver.job.ledger.committed == 4)
    world.replace_driver()
    world.driver.drain()
    world.driver.tick()
    assert not world.driver.job.ended.is_set(), "it does not know yet that there are four steps to keep"
    await world.run()
    assert world.driver.job.standing.state is DriverState.DRAINED
    assert world.driver.job.ledger.committed in (4, 5), "behind the step that was open, or the next one"
    assert world.checkpoints == [world.driver.job.ledger.version]
    assert world.driver.job.standing.message == f"stopped after step {world.driver.job.ledger.committed} of 50"


async def test_a_drain_that_meets_a_new_driver_makes_no_step_where_all_is_kept():
    """The envs find no node, so that no step is open and none can be made."""
    world = World(make_job(steps=50, every_steps=1))
    await world.run_until(lambda: world.driver.job.saved is not None)
    world.operator_is_up = False
    for env in ("env/0", "env/1"):
        world.kill(env)
    del world.agents[("sim", 0)]
    kept = world.driver.job.ledger.version
    world.replace_driver()
    world.driver.drain()
    began_at = world.clock.now
    await world.run()
    assert world.driver.job.standing.state is DriverState.DRAINED
    assert (world.driver.job.ledger.committed, world.checkpoints) == (kept.number, [kept])
    assert world.clock.now - began_at < 5, "as soon as it is known, and not at the operator's deadline"


async def test_a_drain_of_a_new_driver_makes_one_step_where_the_actor_is_lost_and_all_is_kept():
    world = World(make_job(steps=50, every_steps=1))
    await world.run_until(lambda: world.driver.job.saved is not None)
    kept = world.driver.job.ledger.version
    world.replace_driver()
    world.kill("actor/0")
    world.driver.drain()
    await world.run()
    assert world.driver.job.standing.state is DriverState.DRAINED
    assert (world.driver.job.ledger.committed, str(world.checkpoints[-1])) == (kept.number + 1, "b1-2")


async def test_a_drain_of_a_job_that_was_resumed_and_finds_no_node_ends_at_once():
    """Attempts go on over suspensions, and nothing of the life before is left to be heard."""
    job, clock = make_job(steps=50), Clock()
    driver = job.driver(clock, attempt=2, checkpoint_uri="/c", first_of_life=True)
    driver.switch.first(job.plan, switches=0)
    driver.settle()
    driver.drain()
    driver.tick()
    assert (driver.job.standing.state, driver.job.standing.message) == (
        DriverState.DRAINED,
        "stopped after step 0 of 50",
    )


async def test_a_drain_of_a_new_driver_without_anything_to_keep_ends_as_soon_as_that_is_known():
    world = World(make_job(steps=50))
    world.replace_driver()
    world.driver.drain()
    await world.run()
    assert world.driver.job.standing.state is DriverState.DRAINED
    assert world.driver.job.ledger.committed <= 1
