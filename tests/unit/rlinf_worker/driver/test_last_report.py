"""What a driver leaves behind in its termination message, for an operator that was away when it said it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_api import names, wire
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2
from rlinf_api.conditions import Reason
from rlinf_api.report import Failure
from rlinf_operator.settings import OperatorSettings
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import main, server, status
from rlinf_worker.driver.settings import DriverSettings
from tests.builders_driver import Clock, make_job
from tests.fakes.driver_world import World


@pytest.fixture
def message(tmp_path, monkeypatch):
    """The termination message of a driver, bytes and all."""
    file = tmp_path / "termination.json"
    monkeypatch.setenv(names.ENV_TERMINATION_LOG, str(file))

    def left_by(driver):
        code = main._exit_code(driver, terminated=False)
        return code, file.read_bytes()

    return left_by


async def test_a_driver_that_is_done_says_how_far_it_came_and_where_the_checkpoint_is(message):
    world = World(make_job(steps=3))
    await world.run()
    world.driver.job.saved = (PolicyVersion(1, 3), "/ckpt/b1-3")
    code, text = message(world.driver)
    said = json.loads(text)
    assert (code, said["state"], said["step"], said["steps"], said["branch"]) == (0, "Complete", 3, 3, 0)
    assert (said["checkpointUri"], said["checkpointStep"]) == ("/ckpt/b1-3", 3)


async def test_an_operator_that_hangs_up_as_soon_as_it_has_read_the_end_has_read_it():
    """The driver would linger otherwise, until the operator takes its pod for one that does not end."""
    world, seen = World(make_job(steps=3)), list[str]()
    await world.run()
    assert world.driver.job.ended.is_set()
    servicer = server.JobServicer(world.driver, on_plan=lambda: None, seen_end=lambda: seen.append("end"))
    context: Any = SimpleNamespace(cancelled=lambda: False)
    reports: Any = servicer.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), context)
    assert (await anext(reports)).state == wire.report_to_pb(status.report(world.driver)).state
    await reports.aclose()
    assert seen == ["end"]


def test_the_operator_is_told_that_no_scheduler_takes_profiles():
    driver = make_job().driver(Clock())
    told = []
    for outcome in ("accepted", "unanswered", "refused"):
        driver.profiles.went(outcome)
        told.append(status.report(driver).scheduler_away)
    assert told == [False, True, False]


def test_a_driver_lingers_for_less_than_an_operator_waits_for_its_exit():
    assert DriverSettings().linger_s + 5 < OperatorSettings().finish_grace_s


def test_a_driver_without_a_checkpoint_names_none(message):
    driver = make_job().driver(Clock())
    driver.job.finish(saved=True)
    said = json.loads(message(driver)[1])
    assert (said["state"], said["step"], said["checkpointUri"]) == ("Drained", 0, "")


@pytest.mark.parametrize(("length", "is_told"), [(1024, True), (1025, False)])
def test_a_checkpoints_place_that_would_take_a_quarter_of_the_message_is_not_told(message, length, is_told):
    driver, uri = make_job().driver(Clock()), "/".ljust(length, "d")
    driver.job.saved = (PolicyVersion(0, 2), uri)
    driver.job.finish(saved=True)
    said = json.loads(message(driver)[1])
    assert (said["checkpointUri"], said["checkpointStep"]) == (uri if is_told else "", 2)


def test_a_driver_names_who_failed_first_and_where(message):
    driver = make_job().driver(Clock())
    driver.workforce.toll.first_failure = Failure(
        role="env", worker=3, pod="math-sim-1-a2", node="n7", reason="KeyError", message="'x'", exit_code=1
    )
    driver.fail(Reason.USER_ERROR, "env/3 fails again and again")
    said = json.loads(message(driver)[1])
    assert [said[key] for key in ("role", "worker", "pod", "node")] == ["env", 3, "math-sim-1-a2", "n7"]
    assert (said["reason"], said["message"]) == ("UserError", "env/3 fails again and again")


@pytest.mark.parametrize("text", ["x" * 9000, "\N{SNOWMAN}" * 2000, '"' * 5000], ids=["long", "wide", "escaped"])
def test_a_long_message_is_cut_and_not_the_json_around_it(message, text):
    driver = make_job().driver(Clock())
    driver.job.saved = (PolicyVersion(0, 2), "/" + "d" * 1000)
    driver.fail(Reason.USER_ERROR, "begin " + text + " the cause")
    code, data = message(driver)
    assert len(data) <= names.MAX_TERMINATION_BYTES
    said = json.loads(data)
    assert (code, said["state"], said["reason"]) == (names.EXIT_USER_ERROR, "Failed", "UserError")
    assert said["message"].endswith(" the cause")
    assert said["checkpointStep"] == 2


@pytest.mark.parametrize("reason", ["UserError", "CheckpointUnreadable", "CheckpointUnwritable"])
def test_what_only_the_user_can_repair_ends_with_64(message, reason):
    driver = make_job().driver(Clock())
    driver.fail(reason, "no")
    code, text = message(driver)
    assert (code, json.loads(text)["reason"]) == (64, reason)
