"""The driver's core, one rule at a time; test_whole_job.py has them together."""

import asyncio
import json

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.commits import CHECKPOINT_RETRY_S
from rlinf_worker.driver.outbox import Outbox
from rlinf_worker.driver.sessions import Refuse
from tests.builders_driver import JOB_UID, Clock, make_job
from tests.fakes.driver_world import World


def hello(**fields) -> agents_pb2.Hello:
    known = {"job_uid": JOB_UID, "pod": "p", "pool": "sim", "attempt": 1, "protocol": names.PROTOCOL}
    return agents_pb2.Hello(**{**known, **fields})


@pytest.mark.parametrize(
    ("fields", "exit_code", "says"),
    [
        ({"job_uid": "other"}, names.EXIT_STALE, f"this is job {JOB_UID}, the caller is of job other"),
        ({"protocol": names.PROTOCOL + 1}, names.EXIT_USER_ERROR, "is not spoken here"),
        ({"protocol": names.PROTOCOL - 2}, names.EXIT_USER_ERROR, "is not spoken here"),
    ],
)
async def test_a_hello_of_another_job_or_protocol_is_refused(fields, exit_code, says):
    world = World(make_job())
    with pytest.raises(Refuse, match=says) as caught:
        world.driver.on_agent_hello(hello(**fields), Outbox())
    assert caught.value.exit_code == exit_code
    assert not world.driver.ended.is_set()


async def test_a_driver_that_meets_the_obedience_to_a_newer_one_ends_itself():
    world = World(make_job())
    with pytest.raises(Refuse, match="driver attempt 1 has been replaced"):
        world.driver.on_agent_hello(hello(highest_driver_attempt=2), Outbox())
    assert (world.driver.ended.is_set(), world.driver.reason) == (True, "Stale")


async def test_a_step_that_a_rank_has_done_for_a_newer_driver_is_not_committed():
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.ledger.committed == 1)
    done = pb.StepDone(step=2, rank=0, keys=list(world.expected(2)), highest_driver_attempt=2)
    driver.on_worker_message(WorkerId("actor/0"), pb.WorkerMessage(step_done=done))
    assert (driver.ended.is_set(), driver.reason, driver.ledger.committed) == (True, "Stale", 1)


async def test_a_checkpoint_that_could_not_be_written_is_told_and_asked_for_again(tmp_path):
    world = World(make_job(steps=50, every_steps=1000))
    driver = world.driver
    await world.run_until(lambda: driver.ledger.committed == 2)
    saved = pb.Saved(version=pb.PolicyVersion(number=2), problem="No space left on device")
    driver.on_worker_message(WorkerId("actor/0"), pb.WorkerMessage(saved=saved))
    await world.run_until(lambda: driver.ledger.committed == 4)
    assert world.checkpoints == [], "not at once: each try costs a step its time"
    world.clock.now += CHECKPOINT_RETRY_S
    await world.run_until(lambda: driver.saved is not None)
    await world.run_until(lambda: driver.ledger.committed == 10)
    assert [version.number for version in world.checkpoints] == [5], "and not again once there is one"


async def test_a_drain_stops_behind_the_open_step_with_a_checkpoint():
    world = World(make_job(steps=50))
    await world.run_until(lambda: world.driver.ledger.committed == 2)
    world.driver.drain()
    await world.run()
    report = status.report(world.driver)
    assert report.state is DriverState.DRAINED
    assert report.checkpoint_step == report.step == world.committed[-1][1]
    assert report.step in (2, 3)
    assert report.message == f"stopped after step {report.step} of 50"


async def test_a_drain_before_anything_has_begun_ends_at_once():
    world = World(make_job())
    world.driver.drain()
    world.driver.tick()
    assert world.driver.state is DriverState.DRAINED


async def test_an_actor_that_dies_costs_a_branch_and_the_steps_since_its_checkpoint():
    world = World(make_job(steps=5, every_steps=2))
    await world.run_until(lambda: world.driver.ledger.committed == 3)
    world.kill("actor/0")
    await world.run()
    assert world.driver.state is DriverState.COMPLETE
    assert [(b, s) for b, s, _ in world.committed][-3:] == [(1, 3), (1, 4), (1, 5)]
    assert status.report(world.driver).branch == 1
    assert status.report(world.driver).restarts == 1


async def test_without_checkpoints_a_lost_actor_begins_at_the_first_step():
    world = World(make_job(steps=3), checkpoints=False)
    await world.run_until(lambda: world.driver.ledger.committed == 2)
    world.kill("actor/0")
    await world.run_until(lambda: world.driver.ledger.version.branch == 1)
    assert world.driver.ledger.committed == 0
    await world.run()
    assert world.driver.state is DriverState.COMPLETE


async def test_a_new_driver_makes_the_same_keys_and_no_branch():
    world = World(make_job(steps=5))
    await world.run_until(lambda: world.driver.ledger.committed == 2)
    world.replace_driver()
    await world.run()
    assert [(b, s) for b, s, _ in world.committed] == [(0, n) for n in range(1, 6)]
    assert all(keys == world.expected(step) for _, step, keys in world.committed)


async def test_recovery_is_seen_while_it_lasts():
    world = World(make_job(steps=50))
    await world.run_until(lambda: world.driver.ledger.committed == 1)
    world.kill("env/0")
    report = status.report(world.driver)
    assert (report.state, report.reason) == (DriverState.RECOVERING, "Recovering")
    assert "worker env/0 is started again" in report.message
    assert report.missing == ("worker env/0 in pod j-sim-0-a1: down",)
    await world.run_until(lambda: world.driver.state is DriverState.RUNNING)


async def test_a_commit_whose_word_was_lost_is_said_again_word_for_word():
    world = World(make_job(steps=5, every_steps=1))
    driver = world.driver
    await world.run_until(lambda: driver.ledger.committed == 1)
    first = driver.commits.last
    outbox = Outbox()
    done = pb.StepDone(step=1, rank=0, keys=list(world.expected(1)))
    again = pb.Hello(
        job_uid=JOB_UID, worker="actor/0", attempt=1, protocol=names.PROTOCOL, ready=True, steps_done=[done]
    )
    driver.on_worker_hello(again, outbox)
    commits = [m.step_commit for m in outbox._messages if m.HasField("step_commit")]
    assert commits == [first]
    assert commits[0].checkpoint


async def test_two_workers_that_know_different_facts_end_the_job():
    world = World(make_job())
    await world.run_until(lambda: world.driver.begun)
    driver = world.driver
    for worker, shape in (("env/0", [4]), ("env/1", [4]), ("env/1", [5])):
        assert not driver.ended.is_set()
        fact = pb.Fact(name="spaces", json=json.dumps(shape))
        driver.on_worker_message(WorkerId(worker), pb.WorkerMessage(fact=fact))
    assert (driver.state, driver.reason) == (DriverState.FAILED, "UserError")
    assert driver.message == "env/1 says spaces is [5], another worker said [4]"


async def test_a_step_that_takes_unusually_long_is_named_with_what_it_waits_for():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: bool(world.driver.ledger.open_steps))
    world.driver._notice(world.clock.now + 31)
    assert world.driver.message.startswith("step 1 has run for 31 s (usual 0.0 s), waiting for units env:0@1, env:1@1")
    world.driver._notice(world.clock.now)
    assert world.driver.message == ""


async def test_how_large_units_are_is_known_once_a_step_has_had_them():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: world.driver.ledger.committed >= 1)
    assert world.driver.exchange is not None
    sizes = world.driver.exchange.measured()["trajectories"]
    assert sizes.largest_bytes > 0
    assert (sizes.step_units, sizes.step_bytes) == (2, 2 * sizes.largest_bytes), "a unit of each slice"


async def test_turns_without_items_are_the_reason_of_a_running_job():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: bool(world.driver.ledger.open_steps))
    word = agents_pb2.Notice(kind="turns-stalled", message="two turns in a row passed without an item")
    key = next(iter(world.driver.members.pods))
    world.driver.on_agent_message(key, agents_pb2.AgentMessage(notice=word))
    world.driver._notice(world.clock.now)
    assert (world.driver.reason, world.driver.message) == ("TurnsWithoutItems", word.message)
    word.message = ""
    world.driver.on_agent_message(key, agents_pb2.AgentMessage(notice=word))
    world.driver._notice(world.clock.now)
    assert (world.driver.reason, world.driver.message) == ("Stepping", "")


async def test_a_wait_ends_with_the_driver():
    driver = make_job().driver(Clock())
    waiting = asyncio.ensure_future(driver.until(lambda: False, what="something"))
    await asyncio.sleep(0)
    driver.fail("UserError", "enough")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)
