"""What is known of a job: how it stands after each fact, what it says of itself, and the end that counts."""

import asyncio
import json
from typing import Any

import pytest

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.conditions import Reason
from rlinf_api.names import WorkerId
from rlinf_api.report import DriverState, Failure
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.job import NO_PLAN_YET, STARTING, STEPPING, Dirty, Job, Outlook
from rlinf_worker.driver.members import WorkerState
from rlinf_worker.driver.topology import QueueSpec, Topology
from rlinf_worker.uplink.outbox import Outbox
from tests.builders_driver import JOB_UID, Clock, make_job

LOST = Outlook(DriverState.RECOVERING, Reason.RECOVERING, "worker env/0 is lost")


def new(**facts: Any) -> Job:
    return make_job(steps=3).known(Clock(), **facts)


def begun(**facts: Any) -> Job:
    job = new(**facts)
    job.placement = make_job().placement
    job.begin()
    assert job.take_marks() is Dirty.SHOWN
    return job


def test_a_job_waits_for_a_plan_then_for_workers_then_steps():
    job = new()
    assert (job.standing, job.revision, job.is_running) == (NO_PLAN_YET, 0, False)
    job.placement = make_job(revision=4).placement
    assert (job.standing, job.revision, job.is_running) == (STARTING, 4, False)
    assert (job.begun, job.began) == (False, False)
    job.begin()
    assert (job.standing, job.is_running) == (STEPPING, True)
    assert (job.begun, job.began) == (True, True)


def test_a_job_that_begins_without_somebody_is_recovering_in_those_words():
    job = new()
    job.placement = make_job().placement
    job.begin(without="worker env/0 is lost")
    assert (job.standing, job.is_running) == (LOST, False)
    job.begin()
    assert job.standing == STEPPING


def test_a_loss_is_said_once_and_its_first_words_stay_where_the_next_are_a_guess():
    job = begun()
    job.say_recovering("worker env/0 is lost", unless_said=True)
    assert (job.standing, job.take_marks()) == (LOST, Dirty.SHOWN)
    job.say_recovering("worker env/0 is lost")
    job.say_recovering("a guess", unless_said=True)
    assert (job.standing, job.take_marks()) == (LOST, Dirty.NOTHING)
    job.say_recovering("worker env/1 is lost")
    assert (job.standing.message, job.take_marks()) == ("worker env/1 is lost", Dirty.SHOWN)
    job.say_running(Reason.STEPPING, "slow")
    assert job.standing.message == "worker env/1 is lost", "what is unusual of steps does not hide a loss"


def test_before_its_first_steps_and_while_it_ends_a_job_does_not_recover():
    job = new()
    job.placement = make_job().placement
    job.say_recovering("worker env/0 is lost")
    assert (job.standing, job.marks) == (STARTING, Dirty.NOTHING)
    job = begun()
    job.ending_at = 1.0
    job.say_recovering("worker env/0 is lost")
    assert (job.standing, job.marks, job.ending) == (STEPPING, Dirty.NOTHING, True)


def test_news_of_a_running_job_are_shown_when_they_change():
    job = begun()
    job.say_running(Reason.STEPPING, "slow")
    assert job.standing == Outlook(DriverState.RUNNING, Reason.STEPPING, "slow")
    assert (job.take_marks(), job.is_running) == (Dirty.SHOWN, True)
    job.say_running(Reason.STEPPING, "slow")
    assert job.take_marks() is Dirty.NOTHING


@pytest.mark.parametrize(
    ("attempt", "first_of_life", "began", "is_first", "has_begun"),
    [
        (1, False, False, True, False), (1, False, True, True, True), (2, False, False, False, True),
        (2, True, False, True, True),
    ],
)  # fmt: skip
def test_a_driver_knows_whether_anybody_was_there_before_it(attempt, first_of_life, began, is_first, has_begun):
    job = new(attempt=attempt, first_of_life=first_of_life)
    job.began = began
    assert (job.is_first, job.has_begun) == (is_first, has_begun)


def test_marks_gather_until_they_are_taken():
    job = new()
    job.mark(Dirty.TIME)
    job.mark(Dirty.UNITS | Dirty.SHOWN)
    assert job.take_marks() == Dirty.TIME | Dirty.UNITS | Dirty.SHOWN
    assert job.take_marks() == Dirty.NOTHING
    assert len(Dirty) == 5


def test_a_flow_has_declared_its_channels_once_one_of_them_commits():
    job = new()
    assert not job.declared
    queue = QueueSpec(channel="t", producer="env", consumer="actor", rounds=False)
    job.topology = Topology(queues=(queue,))
    assert not job.declared
    job.topology = Topology(queues=(QueueSpec(channel="t", producer="env", consumer="actor", rounds=True),))
    assert job.declared


def test_all_are_here_when_those_who_are_not_have_others_do_their_work():
    job = new()
    assert not job.all_here, "nobody is nobody"
    job.members.adopt(make_job().placement)
    for record in job.members.workers.values():
        record.state = WorkerState.READY
    assert job.all_here
    job.members.workers[WorkerId("env/1")].state = WorkerState.CONNECTED
    assert not job.all_here
    job.members.away = frozenset({WorkerId("env/1")})
    assert job.all_here


@pytest.mark.parametrize(
    ("uri", "saved", "stands_on", "is_saved"),
    [
        ("", None, None, True),
        ("/c", None, None, False),
        ("/c", (PolicyVersion(0, 0), "/c/0"), None, True),
        ("/c", (PolicyVersion(0, 1), "/c/1"), None, False),
        ("/c", None, PolicyVersion(0, 0), True),
        ("/c", None, PolicyVersion(1, 0), False),
    ],
)
def test_weights_are_safe_when_they_are_saved_or_restored_or_nobody_wants_them(uri, saved, stands_on, is_saved):
    job = new(checkpoint_uri=uri)
    job.saved, job.stands_on = saved, stands_on
    assert job.is_saved is is_saved


def test_an_instruction_bears_a_number_the_driver_and_the_plan_that_it_is_about():
    job, outbox = new(attempt=3), Outbox[Any]()
    job.placement = make_job(revision=7).placement
    job.sessions.agents.enter(("sim", 0), outbox, 1)
    stop = agents_pb2.Stop(worker="env/0", reason="r")
    assert job.instruct(("sim", 0), stop=stop) == 1
    assert job.instruct(("sim", 0), plan_revision=8, stop=stop) == 2
    assert [m.instruction for m in outbox._messages] == [
        agents_pb2.Instruction(id=1, driver_attempt=3, stop=stop),
        agents_pb2.Instruction(id=2, driver_attempt=3, plan_revision=8, stop=stop),
    ]


# --- waiting ----------------------------------------------------------------------------------------------------------
async def test_who_waits_for_a_fact_looks_again_each_time_something_is_shown():
    job = new()
    waiter = asyncio.create_task(job.until(lambda: job.sequence == 2, what="two"))
    for _ in range(2):
        await asyncio.sleep(0)
        assert not waiter.done()
        job.show()
    await waiter
    assert job.sequence == 2


async def test_a_wait_for_what_is_true_already_does_not_wait_and_one_of_an_ended_job_says_for_what():
    job = new()
    await job.until(lambda: True, what="nothing")
    job.ended.set()
    await job.until(lambda: True, what="nothing")
    with pytest.raises(asyncio.CancelledError, match="the driver ended while waiting for a plan"):
        await job.until(lambda: False, what="a plan")


# --- the end ----------------------------------------------------------------------------------------------------------
def at_step(job: Job, steps: int) -> Job:
    job.ledger.version = PolicyVersion(0, steps)
    return job


NOT_SAVED = "; its last checkpoint was not confirmed in time"


@pytest.mark.parametrize(
    ("steps", "how", "end"),
    [
        (2, {"saved": True}, Outlook(DriverState.DRAINED, "Stopped", "stopped after step 2 of 3")),
        (2, {"saved": False}, Outlook(DriverState.DRAINED, "Stopped", f"stopped after step 2 of 3{NOT_SAVED}")),
        (3, {"saved": True}, Outlook(DriverState.COMPLETE, "FlowFinished", "3 steps are done")),
        (3, {"saved": False}, Outlook(DriverState.COMPLETE, "FlowFinished", f"3 steps are done{NOT_SAVED}")),
        (
            3,
            {"saved": True, "made_before": True},
            Outlook(
                DriverState.COMPLETE,
                "FlowFinished",
                "the job is complete already: its checkpoint is of step 3 of 3; raise spec.flow.steps to go on",
            ),
        ),
    ],
)
def test_a_job_that_finishes_says_how_far_it_came(tmp_path, steps, how, end):
    job = at_step(begun(output=str(tmp_path)), steps)
    job.finish(**how)
    assert (job.standing, job.ended.is_set(), job.ending, job.marks) == (end, True, True, Dirty.SHOWN)
    [line] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    del line["time"]
    assert line == {
        "source": "driver", "event": "end", "message": end.message, "reason": end.reason, "state": str(end.state),
    }  # fmt: skip


def test_the_first_end_counts_and_nothing_of_a_later_one_is_told(tmp_path):
    job, failure = begun(output=str(tmp_path)), Failure(reason="KeyError", message="k")
    job.fail(Reason.USER_ERROR, "no", failure)
    job.fail(Reason.INTERNAL_ERROR, "later", Failure(reason="Other", message="o"))
    job.finish(saved=True)
    job.stop("later")
    assert (job.standing, job.failure) == (Outlook(DriverState.FAILED, "UserError", "no"), failure)
    [line] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (line["event"], line["message"], line["reason"], line["state"]) == ("failed", "no", "UserError", "Failed")


@pytest.mark.parametrize(("how", "reason"), [({}, "Stopped"), ({"stale": True}, "Stale")])
def test_a_driver_that_must_not_go_on_keeps_the_state_that_the_job_had(tmp_path, how, reason):
    job = begun(output=str(tmp_path))
    job.say_recovering("worker env/0 is lost")
    job.stop("a newer driver exists", **how)
    assert job.standing == Outlook(DriverState.RECOVERING, reason, "a newer driver exists")
    assert json.loads((tmp_path / "events.jsonl").read_text())["event"] == "stopped"


def test_the_lines_that_an_ending_job_could_not_write_are_told_of_at_its_end():
    job, flushed = begun(), list[bool]()
    job.output.flush = lambda: flushed.append(job.ended.is_set())  # type: ignore[method-assign]
    job.finish(saved=True)
    assert flushed == [False], "before whoever waits for the end may leave"


def test_a_new_job_knows_nothing():
    job = new(checkpoint_uri="/c", attempt=2)
    facts = (job.roster, job.saved, job.stands_on, job.ending_at, job.failure, job.sequence, job.ending, job.marks)
    assert facts == (0, None, None, None, None, 0, False, Dirty.NOTHING)
    assert (job.uid, job.attempt, job.checkpoint_uri, job.ledger.steps) == (JOB_UID, 2, "/c", 3)
    made = make_job(steps=9, staleness=2, every_steps=4).known(Clock())
    assert (made.ledger.steps, made.ledger.max_staleness) == (9, 2)
