"""The driver's core, one rule at a time; test_whole_job.py has them together."""

import asyncio
import json
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvariantBroken
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState
from rlinf_worker.driver import status
from rlinf_worker.driver.commits import CHECKPOINT_RETRY_S
from rlinf_worker.driver.job import Dirty, MetricBound, Outlook
from rlinf_worker.driver.sessions import Refuse, Sessions
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import JOB_UID, Clock, make_job
from tests.fakes.driver_world import World


def hello(**fields) -> agents_pb2.Hello:
    known = {"job_uid": JOB_UID, "pod": "p", "pool": "sim", "attempt": 1, "protocol": names.PROTOCOL}
    return agents_pb2.Hello(**{**known, **fields})


@pytest.mark.parametrize(
    ("fields", "exit_code", "says"),
    [
        ({"job_uid": "other"}, names.EXIT_STALE, f"this is job {JOB_UID}, the caller is of job other"),
        ({"protocol": names.PROTOCOL + 1}, names.EXIT_USER_ERROR, "another protocol: got 2, wanted 1; run driver and"),
        ({"protocol": names.PROTOCOL - 1}, names.EXIT_USER_ERROR, "another protocol: got 0, wanted 1; run driver and"),
    ],
)
async def test_a_hello_of_another_job_or_protocol_is_refused(fields, exit_code, says):
    world = World(make_job())
    with pytest.raises(Refuse, match=says) as caught:
        world.driver.on_agent_hello(hello(**fields), Outbox[Any]())
    assert caught.value.exit_code == exit_code
    assert not world.driver.job.ended.is_set()


async def test_a_driver_that_meets_the_obedience_to_a_newer_one_ends_itself():
    world = World(make_job())
    with pytest.raises(Refuse, match="driver attempt 1 has been replaced"):
        world.driver.on_agent_hello(hello(highest_driver_attempt=2), Outbox[Any]())
    assert (world.driver.job.ended.is_set(), world.driver.job.standing.reason) == (True, "Stale")


async def test_a_worker_is_told_whose_parts_make_a_checkpoint():
    world = World(make_job())
    await world.run_until(lambda: world.driver.job.begun)
    record = world.driver.job.members.of_role("actor")[0]
    assert list(world.driver._welcome(record).gangs) == ["actor"]


async def test_a_step_that_a_rank_has_done_for_a_newer_driver_is_not_committed():
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    done = pb.StepDone(step=2, rank=0, keys=list(world.expected(2)), highest_driver_attempt=2)
    driver.on_worker_message(WorkerId("actor/0"), pb.WorkerMessage(step_done=done))
    assert (driver.job.ended.is_set(), driver.job.standing.reason, driver.job.ledger.committed) == (True, "Stale", 1)


@pytest.mark.parametrize(
    ("worker", "rank", "got"), [("env/0", 0, "rank 0 of 'env'"), ("actor/0", 1, "rank 1 of 'actor'")]
)
async def test_a_step_is_done_by_ranks_of_the_role_that_takes_rounds_alone(worker, rank, got):
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    done = pb.StepDone(step=2, rank=rank, keys=list(world.expected(2)))
    driver.on_worker_message(WorkerId(worker), pb.WorkerMessage(step_done=done))
    assert (driver.job.standing.reason, driver.job.ledger.committed) == ("UserError", 1)
    assert driver.job.standing.message == (
        f"worker {worker} says that step 2 is done: got {got}, wanted a rank of 'actor', which takes rounds; "
        "leave ctx.step_done to such a role"
    )


@pytest.mark.parametrize(
    ("worker", "said", "words"),
    [
        (
            "env/0",
            {"announce": pb.Announce(channel="segments", units=[pb.Unit(key="a", step=2)])},
            "worker env/0 has put units into 'segments': got a worker of 'env', wanted the flow alone; ",
        ),
        (
            "actor/0",
            {"announce": pb.Announce(channel="trajectories", units=[pb.Unit(key="a", step=2)])},
            "worker actor/0 has put units into 'trajectories': got a worker of 'actor', wanted one of 'env'; ",
        ),
        (
            "env/0",
            {"saved": pb.Saved(version=pb.PolicyVersion(number=9), uri="file:///x")},
            "worker env/0 says what became of checkpoint b0-9: got a worker of 'env', wanted one of 'actor', ",
        ),
    ],
)
async def test_a_worker_says_what_its_role_has_to_say_alone(worker, said, words):
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    saved = driver.job.saved
    driver.on_worker_message(WorkerId(worker), pb.WorkerMessage(**said))
    assert driver.job.standing.reason == "UserError"
    assert driver.job.standing.message.startswith(words)
    assert driver.job.saved == saved


async def test_what_a_worker_has_put_before_its_stream_broke_is_its_roles_to_put_too():
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    counts = driver.exchange.queue("trajectories").core.counts
    announced = counts["announced"]
    made = pb.HeldUnit(channel="trajectories", unit=pb.Unit(key="a", step=2))
    hello = pb.Hello(job_uid=JOB_UID, worker="actor/0", attempt=1, protocol=names.PROTOCOL, ready=True, produced=[made])
    driver.on_worker_hello(hello, Outbox[Any]())
    assert driver.job.standing.reason == "UserError"
    assert driver.job.standing.message.startswith(
        "worker actor/0 has put units into 'trajectories': got a worker of 'actor', wanted one of 'env'; "
    )
    assert counts["announced"] == announced


async def test_a_checkpoint_that_could_not_be_written_is_told_and_asked_for_again(tmp_path):
    world = World(make_job(steps=50, every_steps=1000))
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 2)
    saved = pb.Saved(version=pb.PolicyVersion(number=2), problem="No space left on device")
    driver.on_worker_message(WorkerId("actor/0"), pb.WorkerMessage(saved=saved))
    await world.run_until(lambda: driver.job.ledger.committed == 4)
    assert world.checkpoints == [], "not at once: each try costs a step its time"
    world.clock.now += CHECKPOINT_RETRY_S
    await world.run_until(lambda: driver.job.saved is not None)
    await world.run_until(lambda: driver.job.ledger.committed == 10)
    assert [version.number for version in world.checkpoints] == [5], "and not again once there is one"


async def test_a_drain_stops_behind_the_open_step_with_a_checkpoint():
    world = World(make_job(steps=50))
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
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
    assert world.driver.job.standing.state is DriverState.DRAINED


async def test_an_actor_that_dies_costs_a_branch_and_the_steps_since_its_checkpoint():
    world = World(make_job(steps=5, every_steps=2))
    await world.run_until(lambda: world.driver.job.ledger.committed == 3)
    world.kill("actor/0")
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE
    assert [(b, s) for b, s, _ in world.committed][-3:] == [(1, 3), (1, 4), (1, 5)]
    assert status.report(world.driver).branch == 1
    assert status.report(world.driver).restarts == 1


async def test_without_checkpoints_a_lost_actor_begins_at_the_first_step():
    world = World(make_job(steps=3), checkpoints=False)
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    world.kill("actor/0")
    await world.run_until(lambda: world.driver.job.ledger.version.branch == 1)
    assert world.driver.job.ledger.committed == 0
    await world.run()
    assert world.driver.job.standing.state is DriverState.COMPLETE


async def test_a_new_driver_makes_the_same_keys_and_no_branch():
    world = World(make_job(steps=5))
    await world.run_until(lambda: world.driver.job.ledger.committed == 2)
    world.replace_driver()
    await world.run()
    assert [(b, s) for b, s, _ in world.committed] == [(0, n) for n in range(1, 6)]
    assert all(keys == world.expected(step) for _, step, keys in world.committed)


async def test_recovery_is_seen_while_it_lasts():
    world = World(make_job(steps=50))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.kill("env/0")
    report = status.report(world.driver)
    assert (report.state, report.reason) == (DriverState.RECOVERING, "Recovering")
    assert "worker env/0 is started again" in report.message
    assert report.missing == ("worker env/0 in pod j-sim-0-a1: down",)
    await world.run_until(lambda: world.driver.job.standing.state is DriverState.RUNNING)


async def test_a_commit_whose_word_was_lost_is_said_again_word_for_word():
    world = World(make_job(steps=5, every_steps=1))
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    first = driver.commits.last
    outbox = Outbox[Any]()
    done = pb.StepDone(step=1, rank=0, keys=list(world.expected(1)))
    again = pb.Hello(
        job_uid=JOB_UID, worker="actor/0", attempt=1, protocol=names.PROTOCOL, ready=True, steps_done=[done]
    )
    driver.on_worker_hello(again, outbox)
    commits = [m.step_commit for m in outbox._messages if m.HasField("step_commit")]
    assert commits == [first]
    assert commits[0].checkpoint


async def test_workers_that_share_too_many_facts_at_once_end_the_job():
    world = World(make_job())
    await world.run_until(lambda: world.driver.job.begun)
    driver = world.driver
    for n in range(18):
        fact = pb.Fact(name=f"step-{n}", json="1" * 2**16)
        driver.on_worker_message(WorkerId(f"env/{n % 2}"), pb.WorkerMessage(fact=fact))
    assert driver.job.standing.reason == "UserError"
    assert driver.job.standing.message.startswith("worker env/1 shares more facts than a job keeps, ")


async def test_a_step_that_is_done_early_is_kept_once_however_often_its_rank_connects():
    """A flow may take hours until it opens the step, and each word has all keys of it."""
    world = World(make_job())
    driver = world.driver
    await world.run_until(lambda: driver.job.ledger.committed == 1)
    done = pb.StepDone(step=40, rank=0, keys=["a"])
    for _ in range(5):
        hello = pb.Hello(
            job_uid=JOB_UID, worker="actor/0", attempt=1, protocol=names.PROTOCOL, ready=True, steps_done=[done]
        )
        driver.on_worker_hello(hello, Outbox[Any]())
    assert len(driver.commits._early) == 1


async def test_two_workers_that_know_different_facts_end_the_job():
    world = World(make_job())
    await world.run_until(lambda: world.driver.job.begun)
    driver = world.driver
    for worker, shape in (("env/0", [4]), ("env/1", [4]), ("env/1", [5])):
        assert not driver.job.ended.is_set()
        fact = pb.Fact(name="spaces", json=json.dumps(shape))
        driver.on_worker_message(WorkerId(worker), pb.WorkerMessage(fact=fact))
    assert (driver.job.standing.state, driver.job.standing.reason) == (DriverState.FAILED, "UserError")
    assert driver.job.standing.message == "env/1 says spaces is [5], another worker said [4]"


async def test_a_step_that_takes_unusually_long_is_named_with_what_it_waits_for():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: bool(world.driver.job.ledger.open_steps))
    world.driver.notices.look(world.clock.now + 31)
    assert world.driver.job.standing.message.startswith(
        "step 1 has run for 31 s (usual 0.0 s), waiting for units env:0@1, env:1@1"
    )
    world.driver.notices.look(world.clock.now)
    assert world.driver.job.standing.message == ""


async def test_how_large_units_are_is_known_once_a_step_has_had_them():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: world.driver.job.ledger.committed >= 1)
    assert world.driver.exchange is not None
    sizes = world.driver.exchange.measured()["trajectories"]
    assert sizes.largest_bytes > 0
    assert (sizes.step_units, sizes.step_bytes) == (2, 2 * sizes.largest_bytes), "a unit of each slice"


async def test_turns_without_items_are_the_reason_of_a_running_job():
    world = World(make_job(envs=1, slices=2))
    await world.run_until(lambda: bool(world.driver.job.ledger.open_steps))
    word = agents_pb2.Notice(kind="turns-stalled", message="two turns in a row passed without an item")
    key = next(iter(world.driver.job.members.pods))
    world.driver.on_agent_message(key, agents_pb2.AgentMessage(notice=word))
    world.driver.notices.look(world.clock.now)
    assert (world.driver.job.standing.reason, world.driver.job.standing.message) == ("TurnsWithoutItems", word.message)
    word.message = ""
    world.driver.on_agent_message(key, agents_pb2.AgentMessage(notice=word))
    world.driver.notices.look(world.clock.now)
    assert (world.driver.job.standing.reason, world.driver.job.standing.message) == ("Stepping", "")


async def test_a_number_of_steps_that_is_above_its_bound_is_the_reason_of_a_running_job():
    world = World(make_job(envs=1, slices=2, steps=9))
    driver = world.driver
    await world.run_until(lambda: bool(driver.job.ledger.open_steps))
    driver.job.watches["far"] = MetricBound(at_most=0.01, reason=Reason.LOGPROB_MISMATCH, words="they disagree")

    def said(**numbers):
        driver.commits.metrics.update(numbers)
        driver.notices.look(world.clock.now)
        return driver.job.standing.reason, driver.job.standing.message

    well = ("Stepping", "")
    step = driver.job.ledger.committed
    assert said(near=3.0) == well, "nobody has said it yet"
    assert said(far=0.01) == well
    assert said(far=0.25) == ("LogprobMismatch", f"they disagree: far is 0.25 in step {step}, above 0.01")
    assert said(far=float("nan"))[0] == "LogprobMismatch"
    assert said(far=0.001) == well
    kept = pb.WorkerMessage(kept=pb.Kept(words="worker env/0 keeps 3 MiB"))
    driver.on_worker_message(WorkerId("env/0"), kept)
    reason, words = said(far=0.25)
    assert (reason, "they disagree" in words) == ("MemoryKept", True), "one reason, and all words"


async def test_memory_that_a_role_keeps_beyond_its_plan_is_the_reason_of_a_running_job():
    world = World(make_job(envs=1, slices=2, steps=9))
    driver, wid = world.driver, WorkerId("env/0")
    await world.run_until(lambda: bool(driver.job.ledger.open_steps))
    driver.on_worker_message(wid, pb.WorkerMessage(kept=pb.Kept(words="worker env/0 keeps 3 MiB")))
    driver.notices.look(world.clock.now)
    assert (driver.job.standing.reason, driver.job.standing.message) == ("MemoryKept", "worker env/0 keeps 3 MiB")
    assert "worker env/0 keeps 3 MiB" in world.story()
    driver.on_worker_message(wid, pb.WorkerMessage(kept=pb.Kept()))
    driver.notices.look(world.clock.now)
    assert (driver.job.standing.reason, driver.job.standing.message) == ("Stepping", "")
    driver.on_worker_message(wid, pb.WorkerMessage(kept=pb.Kept(words="worker env/0 keeps 4 MiB")))
    world.kill(wid)
    await world.run_until(lambda: driver.job.members.workers[wid].attempt == 2 and driver.job.all_here)
    assert driver.job.members.workers[wid].kept == "", "another life has said nothing"


async def test_a_wait_ends_with_the_driver():
    driver = make_job().driver(Clock())
    waiting = asyncio.ensure_future(driver.job.until(lambda: False, what="something"))
    await asyncio.sleep(0)
    driver.fail(Reason.USER_ERROR, "enough")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 5)


async def test_whoever_had_links_with_a_worker_is_told_of_its_death_at_once():
    """Not when it is back: until then its peers would send to a life that is no more."""
    world = World(make_job(envs=2, steps=50))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    world.kill("rollout/0")
    for wid in ("env/0", "env/1", "actor/0"):
        outbox = world.workers[WorkerId(wid)].outbox
        assert outbox is not None
        assert {m.unroute.worker for m in outbox._messages if m.HasField("unroute")} == {"rollout/0"}


async def test_the_first_end_of_a_job_counts():
    driver = make_job().driver(Clock())
    driver.fail(Reason.USER_ERROR, "the flow raised")
    driver.job.stop("a newer one exists", stale=True)
    driver.fail(Reason.INTERNAL_ERROR, "and more")
    driver.job.finish(saved=True)
    assert driver.job.standing == Outlook(DriverState.FAILED, "UserError", "the flow raised")


async def test_a_driver_that_does_not_settle_says_so_and_does_not_hang():
    driver = make_job().driver(Clock())
    driver.switch.advance = lambda: driver.job.mark(Dirty.SHOWN)  # type: ignore[method-assign]
    driver.job.mark(Dirty.SHOWN)
    with pytest.raises(InvariantBroken, match="did not settle within 64 rounds"):
        driver.settle()


def test_messages_to_workers_that_are_there_are_counted():
    sessions = Sessions()
    sessions.workers.enter(WorkerId("env/0"), Outbox[Any](), 1)
    for worker in ("env/0", "env/0", "env/1"):
        sessions.tell(WorkerId(worker), begin=pb.Begin())
    assert sessions.told == 2


@pytest.mark.parametrize(("kind", "is_shown"), [("credit", False), ("step_done", True)])
async def test_a_message_wakes_those_whom_it_concerns(kind, is_shown):
    """Units move thousands of times in a second: the flow and the reports are left alone."""
    world = World(make_job(steps=50))
    await world.run_until(lambda: world.driver.job.ledger.committed == 1)
    driver = world.driver
    driver.settle()
    sequence = driver.job.sequence
    message = pb.WorkerMessage()
    getattr(message, kind).SetInParent()
    if kind == "credit":
        message.credit.channel = "trajectories"
    driver.on_worker_message(WorkerId("actor/0"), message)
    assert (driver.job.sequence > sequence) is is_shown
