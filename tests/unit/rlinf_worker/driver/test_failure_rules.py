"""spec.failurePolicy.rules of workers whose pod lives on: what the driver does, counts, and leaves to the operator."""

import pytest

from rlinf_api.job import FailurePolicySpec
from rlinf_api.report import DriverReport, DriverState, Failure, Ruling
from rlinf_api.wire import report_from_pb, report_to_pb
from rlinf_worker.driver import rules
from tests.unit.rlinf_worker.driver.test_workforce import Site, told


def started(*listed, max_restarts=20, **more):
    site = Site(envs=1, **more)
    policy = FailurePolicySpec.model_validate({"maxRestarts": max_restarts, "rules": list(listed)})
    site.job.spec = site.job.spec.model_copy(update={"failure_policy": policy})
    site.force = type(site.force)(site.job)
    site.agents = type(site.agents)(site.job, site.force)
    outbox = site.attach()
    site.force.start_workers()
    told(outbox)
    return site, outbox


def test_fail_job_fails_it_with_the_rule_whatever_the_exit_code_means_else():
    site, _ = started({"name": "no-licence", "role": "env", "exitCodes": [3], "action": "FailJob"})
    site.exit("env/0", 1, 3, message="no licence")
    [(reason, message, failure)] = site.failed
    assert reason == "FailureRule"
    said = "rule 'no-licence' of spec.failurePolicy says FailJob: "
    said += "worker env/0 ended (ExitCode, exit code 3): no licence"
    assert message == said
    assert failure is not None
    assert failure.role == "env"
    assert site.force.toll.rules.count["FailJob"] == 1


@pytest.mark.parametrize("code", [64, 70])
def test_an_exit_that_ends_a_job_without_rules_is_tried_again_by_one(code):
    site, outbox = started({"exitCodes": [64, 70], "action": "RestartWorker"})
    site.exit("env/0", 1, code)
    site.later(1)
    assert site.failed == []
    assert told(outbox) == [("start", "env/0", 2)]


def test_what_meets_no_rule_is_as_ever():
    site, _ = started({"role": "actor", "action": "Ignore"}, {"pool": "train", "action": "Ignore"})
    site.exit("env/0", 1, 64, message="x")
    assert [reason for reason, _, _ in site.failed] == ["UserError"]


def test_ignore_counts_against_no_bound_but_its_own(monkeypatch):
    monkeypatch.setattr(rules, "MOST_IGNORED", 3)
    site, _ = started({"role": "env", "action": "Ignore"}, max_restarts=0)
    for attempt in range(1, 4):
        site.exit("env/0", attempt, 1)
        site.later(11)
    assert site.failed == []
    site.exit("env/0", 4, 1, message="again")
    [(reason, message, _)] = site.failed
    assert reason == "TooManyRestarts"
    assert "4 failures of workers met rule '0' of spec.failurePolicy says Ignore within 3600 s" in message
    assert "more than its bound of 3; the last was env/0: again" in message


def test_a_rules_own_bound_counts_apart_from_the_jobs():
    site, _ = started({"name": "flaky", "exitCodes": [3], "action": "RestartWorker", "maxRestarts": 1}, max_restarts=1)
    site.exit("env/0", 1, 3)
    site.later(1)
    site.exit("env/0", 2, 4)
    site.later(1)
    assert site.failed == []
    site.exit("env/0", 3, 3)
    [(reason, message, _)] = site.failed
    assert reason == "TooManyRestarts"
    assert "2 failures of workers met rule 'flaky'" in message
    assert "more than its maxRestarts of 1" in message


def test_a_rule_without_a_bound_counts_against_the_jobs():
    site, _ = started({"exitCodes": [3], "action": "RestartWorker"}, max_restarts=0)
    site.exit("env/0", 1, 3)
    assert [reason for reason, _, _ in site.failed] == ["TooManyRestarts"]


def test_a_back_off_takes_the_place_of_the_usual_pause_and_grows():
    site, outbox = started({"exitCodes": [3], "action": "RestartWorker", "backOffSeconds": 20})
    for attempt, pause in ((1, 20), (2, 40)):
        site.exit("env/0", attempt, 3)
        site.later(pause - 1)
        assert told(outbox) == []
        site.later(2)
        assert told(outbox) == [("start", "env/0", attempt + 1)]


@pytest.mark.parametrize("action", ["RestartJob", "Suspend"])
def test_what_is_of_the_whole_job_is_left_to_the_operator_and_the_worker_comes_back(action):
    site, outbox = started({"name": "r", "role": "env", "action": action}, max_restarts=0)
    site.exit("env/0", 1, 3, message="first")
    site.later(1)
    assert told(outbox) == [("start", "env/0", 2)]
    site.exit("env/0", 2, 3, message="second")
    [ruling] = site.force.toll.rules.standing
    assert (ruling.action, ruling.rule, ruling.failure.message) == (action, "r", "first")
    assert site.failed == []


def test_a_pod_is_asked_for_until_another_attempt_of_it_comes():
    site, outbox = started({"role": "env", "action": "RestartPod"})
    site.exit("env/0", 1, 3)
    site.later(5)
    assert told(outbox) == [], "its pod goes in this time"
    assert [(r.action, r.failure.pod) for r in site.force.toll.rules.standing] == [("RestartPod", "j-sim-0-a1")]
    site.attach()
    assert len(site.force.toll.rules.standing) == 1
    site.attach(attempt=2)
    assert site.force.toll.rules.standing == ()


def test_where_nobody_replaces_the_pod_the_worker_is_started_where_it_was():
    site, outbox = started({"role": "env", "action": "RestartPod"})
    site.exit("env/0", 1, 3)
    site.later(11)
    assert told(outbox) == [("start", "env/0", 2)]


def test_a_worker_that_is_given_up_meets_a_rule_without_codes():
    site, _ = started({"role": "env", "exitCodes": [3], "action": "Ignore"}, {"role": "env", "action": "FailJob"})
    site.force.give_up(site.record("env/0"), "it is not well")
    [(reason, message, _)] = site.failed
    assert reason == "FailureRule"
    assert message.endswith("worker env/0 ended (GivenUp, exit code -1): it is not well")


def test_a_pod_that_is_replaced_is_the_operators_count():
    site, _ = started(max_restarts=0)
    site.clock.now += 5
    site.tick()
    site.attach(attempt=2)
    assert site.gone
    assert site.failed == []


def test_an_agent_that_is_given_up_and_comes_back_is_counted():
    site, _ = started(max_restarts=0)
    site.clock.now += 5
    site.tick()
    assert site.failed == []
    site.attach()
    [(reason, message, _)] = site.failed
    assert reason == "TooManyRestarts"
    assert message.endswith("the last was pod j-sim-0-a1: its agent was given up, and came back")


def test_rulings_pass_the_wire():
    failure = Failure(role="env", worker=3, pod="p", node="n", exit_code=3, reason="X", message="m")
    rulings = (Ruling(action="Suspend", rule="a", failure=failure),)
    report = DriverReport(job_uid="u", driver_attempt=1, state=DriverState.RUNNING, rulings=rulings)
    assert report_from_pb(report_to_pb(report)) == report
