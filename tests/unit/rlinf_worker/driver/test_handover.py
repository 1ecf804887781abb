"""Pods that were told to end, in whole jobs: until when they work, and what is made again afterwards: nothing."""

import pytest

from rlinf_api import names
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.sessions import Refuse
from tests.builders_driver import make_job
from tests.fakes.driver_world import World

ACTOR, SIM = ("gpu", 0), ("sim", 0)


def may_leave(agent):
    """It was told so, whether or not it has obeyed by now."""
    return agent.may_leave or any(message.instruction.HasField("leave") for message in agent.outbox._messages)


def steps_of(world):
    return [(branch, step) for branch, step, _ in world.committed]


def has_handed_over(world, agent, *, to):
    """The pod of the actor's agent, once, and nothing was made again."""
    assert may_leave(agent)
    assert world.driver.handover.outcomes == {"HandedOver": 1}
    assert [step for _, step in steps_of(world)] == list(range(1, 41))
    assert [text for kind, text in world.said if kind == "pod-lost"] == [
        f"pod j-gpu-0-a1 has handed its work over to {to}"
    ]


class Telling(World):
    said: list[tuple[str, str]]


@pytest.fixture
def world(monkeypatch):
    def made(*, steps=40, every_steps=1000, checkpoints=True, **job):
        world = Telling(make_job(steps=steps, every_steps=every_steps, **job), checkpoints=checkpoints)
        world.said, event = [], world.driver.job.event

        def heard(kind, text, **fields):
            world.said.append((kind, text))
            event(kind, text, **fields)

        monkeypatch.setattr(world.driver.job, "event", heard)
        return world

    return made


def heard(world):
    for agent in world.agents.values():
        agent.tell(heartbeat={})


async def until_step(world, number):
    await world.run_until(lambda: world.driver.job.ledger.committed >= number)


async def test_a_pod_of_a_gang_is_saved_with_each_step_and_goes_when_its_successor_is_there(world):
    world = world()
    await until_step(world, 3)
    assert world.checkpoints == []
    world.evict(*ACTOR)
    await until_step(world, 7)
    assert [version.number for version in world.checkpoints][:3] == [4, 5, 6]
    assert not world.agents[ACTOR].may_leave, "it has 17 s, and nobody has come for its place"
    old = world.agents[ACTOR]
    world.successor(*ACTOR)
    await world.run()
    has_handed_over(world, old, to="j-gpu-0-a2")
    assert sorted({branch for branch, _ in steps_of(world)}) == [0, 1]
    assert len(world.checkpoints) < 20, "and once it has gone steps are as ever"
    assert world.driver.workforce.toll._failures.count == 0
    assert [text for kind, text in world.said if kind == "leaving"] == [
        "pod j-gpu-0-a1 is to end: it works on until its successor is there, for 17 s at most; each step is saved"
    ]


async def test_a_pod_without_a_gang_works_until_its_successor_is_there_and_nothing_is_saved(world):
    world = world()
    await until_step(world, 3)
    world.evict(*SIM)
    await until_step(world, 8)
    assert world.driver.job.members.in_pod(SIM)[0].state is WorkerState.READY
    world.successor(*SIM)
    await world.run()
    assert steps_of(world) == [(0, step) for step in range(1, 41)]
    assert [version.number for version in world.checkpoints] == [40], "its last"
    assert world.driver.handover.outcomes == {"HandedOver": 1}


async def test_who_has_no_successor_in_time_is_lost_as_ever_behind_its_last_step(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR, within_s=5.0)
    await until_step(world, 6)
    world.clock.now += 6.0
    heard(world)
    world.driver.tick()
    assert (world.agents[ACTOR].may_leave, world.driver.handover.outcomes) == (False, {"EndedBefore": 1})
    assert not world.driver.handover.wants_checkpoint
    last = world.driver.job.ledger.committed
    world.kill_pod(*ACTOR)
    await world.run()
    assert [step for _, step in steps_of(world)] == list(range(1, 41))
    assert world.driver.job.ledger.version.branch == 1
    assert last >= 6


def break_stream(world, key):
    agent = world.agents[key]
    world.driver.on_agent_gone(key, agent.outbox)
    agent.outbox = None


async def test_a_stream_that_breaks_for_a_moment_ends_no_hand_over(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    await until_step(world, 5)
    old = world.agents[ACTOR]
    world.successor(*ACTOR)
    world._come()
    break_stream(world, ACTOR)
    world.clock.now += 1.0
    world.driver.tick()
    world._come()
    assert world.coming, "it comes again: whose place it wants may be back in a moment"
    old.connect()
    world.evict(*ACTOR, within_s=16.0)
    await world.run()
    has_handed_over(world, old, to="j-gpu-0-a2")
    assert [kind for kind, _ in world.said].count("leaving") == 1


async def test_who_has_left_is_not_welcomed_again_ahead_of_his_successor(world):
    """His stream ends with the word that he may leave, and an agent dials anew at once."""
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    old = world.agents[ACTOR]
    world.successor(*ACTOR)
    await world.run_until(lambda: world.driver.handover.outcomes["HandedOver"] == 1)
    with pytest.raises(Refuse, match="pod j-gpu-0-a1 has left") as refused:
        old.connect()
    assert refused.value.exit_code == names.EXIT_STALE
    await world.run()
    has_handed_over(world, old, to="j-gpu-0-a2")
    assert world.driver.workforce.toll._failures.count == 0


async def test_one_whose_stream_stays_broken_is_lost_as_ever(world):
    world = world()
    await until_step(world, 3)
    world.evict(*SIM)
    break_stream(world, SIM)
    world.clock.now += world.driver.job.settings.broken_agent_s + 0.1
    heard(world)
    world.driver.tick()
    world.driver.handover.settle()
    assert world.driver.handover.outcomes == {"EndedBefore": 1}
    assert [text for kind, text in world.said if kind == "pod-lost"] == ["the agent of pod j-sim-0-a1 is gone"]


async def test_a_successor_that_comes_between_two_checkpoints_waits_for_the_next(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    world.successor(*ACTOR)
    world.driver.tick()
    world._come()
    assert world.coming, "step 3 is not saved"
    assert not world.agents[ACTOR].may_leave
    await world.run()
    assert [step for _, step in steps_of(world)] == list(range(1, 41))


async def test_a_successor_that_dies_before_its_turn_is_waited_for_no_longer_but_the_next_one(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    world.successor(*ACTOR)
    world._come()
    assert world.driver.handover._leavers[ACTOR].successor == "j-gpu-0-a2"
    world.coming.clear()
    world.clock.now += world.driver.job.settings.limits.agent_dead_after_s + 0.1
    heard(world)
    world.driver.tick()
    assert world.said[-1] == (
        "leaving",
        "pod j-gpu-0-a2, which came for the place of j-gpu-0-a1, is not heard any more; another is waited for",
    )
    await until_step(world, 7)
    old = world.agents[ACTOR]
    assert not may_leave(old), "steps are saved, and nobody is there who could go on"
    assert world.driver.handover.outcomes == {}
    world.successor(*ACTOR, attempt=3)
    await world.run()
    has_handed_over(world, old, to="j-gpu-0-a3")


async def test_an_earlier_successor_that_still_comes_does_not_stand_for_the_one_after_it(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    for attempt in (3, 2):
        world.successor(*ACTOR, attempt=attempt)
        world._come()
    assert world.driver.handover._leavers[ACTOR].successor == "j-gpu-0-a3"


async def test_without_a_place_for_checkpoints_the_successor_is_enough(world):
    world = world(checkpoints=False, steps=8)
    await until_step(world, 3)
    world.evict(*ACTOR)
    assert world.said[-1][0] == "leaving"
    assert "saved" not in world.said[-1][1], "nothing can be"
    world.successor(*ACTOR)
    world._come()
    assert not world.coming


async def test_a_disk_that_is_full_holds_nobody(world):
    world = world(steps=30)
    world.disk_is_full = True
    await until_step(world, 3)
    world.evict(*ACTOR, within_s=1000.0)
    await until_step(world, 9)
    assert [kind for kind, _ in world.said].count("checkpoint-failed") == 1, "not with each step"
    world.successor(*ACTOR)
    world._come()
    assert not world.coming
    assert world.driver.commits.problem
    assert world.driver.handover.outcomes == {"HandedOver": 1}


async def test_a_job_whose_steps_do_not_go_on_lets_its_pods_go_at_once(world):
    world = world()
    await until_step(world, 3)
    world.driver.job.say_recovering("worker env/0 is started again")
    world.evict(*ACTOR)
    await world.run_until(lambda: world.agents[ACTOR].may_leave)
    assert world.driver.handover.outcomes == {}


async def test_what_stops_the_steps_later_lets_them_go_too(world):
    world = world()
    await until_step(world, 3)
    world.evict(*ACTOR)
    world.driver.job.say_recovering("worker env/0 is started again")
    old = world.agents[ACTOR]
    world.driver.tick()
    assert may_leave(old)
    assert world.driver.handover.outcomes == {"EndedBefore": 1}


async def test_a_job_that_ends_keeps_its_pods_until_its_last_checkpoint_is_there(world):
    world = world(steps=6, checkpoints=True)
    await until_step(world, 3)
    world.evict(*SIM)
    await world.run_until(lambda: world.driver.job.ending_at is not None)
    assert not world.driver.job.is_saved
    world.successor(*SIM)
    world._come()
    assert world.coming, "it would let go of what makes the checkpoint"
    await world.run()
    assert world.driver.job.standing.reason == "FlowFinished"
    assert world.driver.job.is_saved


async def test_a_pod_that_no_plan_wants_goes_at_once(world):
    world = world()
    await until_step(world, 3)
    world.driver.job.members.pods[SIM].wanted = False
    world.evict(*SIM)
    assert may_leave(world.agents[SIM])


async def test_the_ranks_of_a_gang_go_together(world):
    """Two pods of one gang: it is formed anew once."""
    world = world(actors=2, gpu_pods=2)
    pods = [("gpu", 0), ("gpu", 1)]
    await until_step(world, 3)
    for pod in pods:
        world.evict(*pod)
    world.successor(*pods[0])
    await until_step(world, 7)
    assert world.coming, "the other has no successor yet"
    world.successor(*pods[1])
    await world.run()
    assert [step for _, step in steps_of(world)] == list(range(1, 41))
    assert world.driver.job.ledger.version == PolicyVersion(1, 40)
    assert world.driver.handover.outcomes == {"HandedOver": 2}
