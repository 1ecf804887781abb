"""How the end of one pod is judged, field by field. What follows for a job: test_decide_failures.py."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from rlinf_api import names
from rlinf_api.report import DriverReport, DriverState, Failure
from rlinf_operator.policies import failure, pod_view
from rlinf_operator.policies.failure import Cause
from rlinf_operator.policies.pod_view import PodView
from tests.builders import NOW

GRACE_S = 30.0


def pod(**fields):
    known = {"name": "math-sim-0", "uid": "u", "component": names.COMPONENT_WORKER, "created_at": NOW, "node": "n1"}
    return PodView(**{**known, "phase": "Failed", **fields})


def driver(**fields):
    return pod(**{"name": "math-driver", "component": names.COMPONENT_DRIVER, **fields})


def judged(view, **fields):
    return failure.judge(view, now=NOW, exit_zero_grace_s=GRACE_S, **fields)


def test_a_pod_without_labels_is_of_no_component():
    found = pod_view.view({"metadata": {"name": "a", "uid": "u"}})
    assert (found.component, found.pool, found.ordinal, found.attempt) == ("", "", 0, 1)


BAD, LOST = names.EXIT_USER_ERROR, Cause.INFRASTRUCTURE
DRAINED = driver(phase="Succeeded", exit_code=0, exit_message='{"state": "Drained"}')
EVICTED = pod(phase="Running", deleted_at=NOW, disruption="EvictionByEvictionAPI")
UNKNOWN = pod(exit_code=failure.UNKNOWN_EXIT, exit_reason="Unknown")
CASES = [
    ("a user's mistake", pod(exit_code=BAD), Cause.USER, "UserError"),
    ("a user's, though it is being deleted", pod(exit_code=BAD, deleted_at=NOW), Cause.USER, None),
    ("an init container's is the program's", pod(exit_code=BAD, failed_init="x"), Cause.PROGRAM, "InitFailed"),
    ("a driver that was drained", DRAINED, LOST, "Drained"),
    ("deleted after its end", pod(exit_code=1, deleted_at=NOW), LOST, "Terminated"),
    ("deleted under way", pod(phase="Running", deleted_at=NOW), LOST, "Deleted"),
    ("evicted", EVICTED, LOST, "EvictionByEvictionAPI"),
    ("stale", pod(exit_code=names.EXIT_STALE), Cause.STALE, "Stale"),
    ("of a lost node", pod(), LOST, "NodeLost"),
    ("ended by the kubelet", pod(exit_code=137, pod_reason="Evicted"), LOST, "Evicted"),
    ("unknown to a node that came back", UNKNOWN, LOST, "NodeLost"),
    ("of the program", pod(exit_code=1), Cause.PROGRAM, "Exit1"),
    ("out of memory", pod(exit_code=137, exit_reason="OOMKilled"), Cause.PROGRAM, "OOMKilled"),
    ("killed, and a child out of memory long ago", pod(exit_code=1, exit_reason="OOMKilled"), Cause.PROGRAM, "Exit1"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "view", "cause", "reason"), CASES, ids=[case[0] for case in CASES])
def test_the_cause_of_an_end(what, view, cause, reason):
    found = judged(view)
    assert (found.alive, found.cause) == (False, cause)
    assert found.failure is not None
    assert (found.failure.pod, found.failure.node) == (view.name, "n1")
    assert found.failure.exit_code == (-1 if view.exit_code is None else view.exit_code)
    if reason is not None:
        assert found.failure.reason == reason


@pytest.mark.parametrize(
    "view",
    [
        pod(phase="Running"),
        pod(phase="Pending"),
        pod(phase="Running", disruption="PreemptionByScheduler"),  # announced, not yet begun
        driver(phase="Succeeded", exit_code=0),  # the flow has finished
        driver(phase="Succeeded", exit_code=0, exit_message='{"state": "Complete"}'),
    ],
)
def test_what_has_not_ended_or_has_ended_well_is_the_pod_of_its_place(view):
    assert judged(view) == failure.Verdict(alive=True)


def test_a_worker_that_exits_0_is_waited_for_until_its_driver_has_had_time_to_say_why():
    early = pod(phase="Succeeded", exit_code=0, finished_at=NOW - timedelta(seconds=GRACE_S - 1))
    assert judged(early) == failure.Verdict(alive=True, look_again_s=1.0)
    for ended in (NOW - timedelta(seconds=GRACE_S), None):
        found = judged(pod(phase="Succeeded", exit_code=0, finished_at=ended))
        assert (found.alive, found.cause) == (False, Cause.INFRASTRUCTURE)
        assert found.failure is not None
        assert found.failure.reason == "ExitedEarly"


@pytest.mark.parametrize(("ready", "cause"), [(True, Cause.INFRASTRUCTURE), (False, Cause.NO_DRIVER)])
def test_who_could_not_reach_a_driver_is_lost_only_where_there_is_one(ready, cause):
    said = json.dumps({"reason": failure.DRIVER_ABSENT})
    found = judged(pod(exit_code=names.EXIT_RETRYABLE, exit_message=said), driver_ready=ready)
    assert found.cause is cause
    assert (found.failure is None) is not ready
    assert judged(pod(exit_code=names.EXIT_RETRYABLE), driver_ready=ready).cause is Cause.PROGRAM


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
@pytest.mark.parametrize("state", list(DriverState))
def test_a_driver_that_ended_is_in_the_state_that_it_named(phase, state):
    said = json.dumps({"state": str(state)})
    assert failure.driver_state(driver(phase=phase, exit_code=0, exit_message=said)) is state
    assert failure.driver_state(driver(phase="Running", exit_message=said)) is None


@pytest.mark.parametrize(
    ("phase", "code", "said", "state"),
    [
        ("Succeeded", 0, "", DriverState.COMPLETE),
        ("Succeeded", None, "", DriverState.COMPLETE),
        ("Succeeded", 0, '{"state": "Unheard"}', DriverState.COMPLETE),
        ("Succeeded", 3, "", None),
        ("Failed", 0, "", None),
        ("Failed", 1, "a log's tail", None),
    ],
)
def test_a_driver_that_said_no_state_is_complete_where_it_exited_0(phase, code, said, state):
    assert failure.driver_state(driver(phase=phase, exit_code=code, exit_message=said)) is state


LAST = {"step": 7, "steps": 9, "branch": 2, "checkpointUri": "file:///c", "checkpointStep": 5}


def test_the_last_report_of_a_driver_is_in_its_last_words():
    wanted = DriverReport(
        job_uid="", driver_attempt=1, state=DriverState.FAILED, step=7, steps=9, branch=2,
        checkpoint_uri="file:///c", checkpoint_step=5,
    )  # fmt: skip
    for phase, state in (("Failed", DriverState.FAILED), ("Succeeded", DriverState.COMPLETE)):
        said = failure.last_report(driver(phase=phase, exit_message=json.dumps(LAST)))
        assert said == replace(wanted, state=state)
    assert failure.last_report(driver(phase="Running", exit_message=json.dumps(LAST))) is None
    for nothing in ("", "{", "[]", "{}", json.dumps(LAST | {"step": 0}), json.dumps(LAST | {"step": "7"})):
        assert failure.last_report(driver(exit_message=nothing)) is None
    least = failure.last_report(driver(exit_message='{"step": 1, "branch": -2}'))
    assert least == DriverReport(job_uid="", driver_attempt=1, state=DriverState.FAILED, step=1)


def test_last_words_are_a_failure_with_what_is_missing_left_empty():
    words = {"role": "env", "worker": 3, "pod": "p", "node": "n", "exitCode": 4, "reason": "R", "message": "m"}
    found = failure.last_words(json.dumps(words))
    assert found is not None
    assert found == Failure(role="env", worker=3, pod="p", node="n", exit_code=4, reason="R", message="m")
    least = failure.last_words('{"worker": "x"}')
    assert least is not None
    assert (least.role, least.worker, least.exit_code, least.reason, least.message) == ("", -1, 0, "", "")
    assert failure.last_words("a log's tail") is None


def test_a_pods_own_words_come_before_what_others_say_of_it():
    words = json.dumps({"role": "env", "worker": 3, "node": "elsewhere", "reason": "Mine", "message": "mine"})
    found = judged(pod(exit_code=1, exit_message=words, pod_message="the kubelet's")).failure
    assert found is not None
    assert (found.role, found.worker, found.node, found.reason, found.message) == ("env", 3, "n1", "Mine", "mine")
    kubelets = judged(pod(exit_code=1, exit_reason="ContainerCannotRun", exit_message=words, node="")).failure
    assert kubelets is not None
    assert (kubelets.reason, kubelets.node) == ("ContainerCannotRun", "elsewhere")
    silent = judged(pod(exit_code=1, pod_message="the kubelet's")).failure
    assert silent is not None
    assert (silent.worker, silent.message) == (-1, "the kubelet's")


def test_a_failed_init_container_is_named_with_its_words_or_its_code():
    found = judged(pod(exit_code=2, failed_init="fetch", exit_message="no such bucket\n")).failure
    assert found is not None
    assert (found.reason, found.message) == ("InitFailed", "init container fetch: no such bucket")
    silent = judged(pod(exit_code=2, failed_init="fetch")).failure
    assert silent is not None
    assert silent.message == "init container fetch ended with exit code 2"
