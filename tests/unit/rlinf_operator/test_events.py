"""What people are told as events, and what the log says of a pass."""

import logging
from datetime import timedelta

import pytest

from rlinf_api import times
from rlinf_api.conditions import Condition, JobCondition, Reason, Status
from rlinf_api.job import RLJobStatus
from rlinf_api.report import Failure
from rlinf_operator.policies.failure import Cause, Verdict
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.reconcile import events, telling
from rlinf_operator.reconcile.state import DeletePod, Event
from tests.builders import NOW, UID, ppo_job


def status(*said):
    """(type, status, reason, message) each."""
    return RLJobStatus(
        conditions=[
            Condition(
                type=kind, status=value, reason=reason, message=message, last_transition_time=times.text(NOW),
                observed_generation=1,
            )
            for kind, value, reason, message in said
        ]
    )  # fmt: skip


V, P, R = JobCondition.VALID, JobCondition.PODS_READY, JobCondition.RUNNING
T, F, U = Status.TRUE, Status.FALSE, Status.UNKNOWN


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (None, (V, F, Reason.INVALID_SPEC, "m"), ("Warning", "InvalidSpec")),
        (None, (V, T, Reason.ACCEPTED, "m"), None),
        (None, (JobCondition.SUSPENDED, T, Reason.SUSPENDED_BY_USER, "m"), ("Normal", "SuspendedByUser")),
        (None, (JobCondition.SUSPENDED, F, Reason.NOT_SUSPENDED, "m"), None),
        (None, (P, T, Reason.PODS_READY, "m"), ("Normal", "PodsReady")),
        (None, (P, F, Reason.PODS_STARTING, "m"), None),
        (None, (R, T, Reason.STEPPING, "m"), ("Normal", "Stepping")),
        (None, (JobCondition.COMPLETE, T, Reason.FLOW_FINISHED, "m"), ("Normal", "FlowFinished")),
        (None, (JobCondition.FAILED, T, Reason.TOO_MANY_RESTARTS, "m"), ("Warning", "TooManyRestarts")),
        (None, (P, F, Reason.UNSCHEDULABLE, "m"), ("Warning", "Unschedulable")),
        (None, (P, F, Reason.IMAGE_UNAVAILABLE, "m"), ("Warning", "ImageUnavailable")),
        (None, (JobCondition.DEGRADED, T, Reason.DRIVER_UNREACHABLE, "m"), ("Warning", "DriverUnreachable")),
        (None, ("Newer", T, "Whatever", "m"), None),
        (None, ("Newer", T, Reason.PODS_MISSING, "m"), ("Warning", "PodsMissing")),
        ((P, T, Reason.PODS_READY, "m"), (P, T, Reason.PODS_READY, "n"), None),
        ((P, F, Reason.PODS_STARTING, "m"), (P, F, Reason.UNSCHEDULABLE, "m"), ("Warning", "Unschedulable")),
        ((P, F, Reason.PODS_STARTING, "m"), (P, T, Reason.PODS_READY, "m"), ("Normal", "PodsReady")),
        ((V, F, Reason.INVALID_SPEC, "m"), (V, F, Reason.NOT_SUPPORTED_YET, "m"), None),
    ],
)
def test_a_condition_that_changes_is_an_event_where_somebody_has_to_know(before, after, told):
    found = events.of_transition(status(before) if before else status(), status(after))
    assert [(event.type, event.reason, event.message, event.pod) for event in found] == (
        [(*told, after[3], "")] if told else []
    )


def test_an_events_sentence_is_cut_at_a_thousand_characters():
    [found] = events.of_transition(status(), status((V, F, Reason.INVALID_SPEC, "m" * 1001)))
    assert found.message == "m" * 1000


def pod(**fields):
    return PodView(name="math-sim-0-a1", uid="p1", component="worker", created_at=NOW, **fields)


@pytest.mark.parametrize(
    ("view", "verdict", "message"),
    [
        (pod(), Verdict(alive=False, cause=Cause.STALE), "pod math-sim-0-a1 ended (Stale)"),
        (
            pod(node="n1", exit_code=0),
            Verdict(alive=False, cause=Cause.PROGRAM, failure=Failure(reason="Oops", message="no")),
            "pod math-sim-0-a1 on node n1 ended (Oops) with exit code 0: no",
        ),
        (
            pod(exit_code=3),
            Verdict(alive=False, cause=Cause.PROGRAM, failure=Failure(reason="Oops")),
            "pod math-sim-0-a1 ended (Oops) with exit code 3",
        ),
        (
            pod(),
            Verdict(alive=False, cause=Cause.PROGRAM, failure=Failure(reason="Oops", message="m" * 2000)),
            "pod math-sim-0-a1 ended (Oops): " + "m" * (1000 - 32),
        ),
    ],
)
def test_a_pod_that_ended_is_an_event_of_that_pod(view, verdict, message):
    wanted = Event(type="Warning", reason="PodEnded", message=message, pod="math-sim-0-a1")
    assert events.of_ended([(view, verdict)]) == (wanted,)


def test_an_event_is_about_the_pod_where_that_is_there_and_about_the_job_otherwise():
    world = ppo_job().world().created()
    told = Event(type="Warning", reason="PodEnded", message="m", pod="math-sim-0-a1")
    job = {"apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "name": "math", "uid": UID, "namespace": "team"}
    sim = {"apiVersion": "v1", "kind": "Pod", "name": "math-sim-0-a1", "uid": "pod-2", "namespace": "team"}
    made = telling.event_manifest(told, world.observed(), now=NOW + timedelta(seconds=1))
    moment = "2026-11-21T12:00:01Z"
    assert made == {
        "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "math.", "namespace": "team"},
        "involvedObject": sim, "type": "Warning", "reason": "PodEnded", "message": "m",
        "source": {"component": "rlinf-operator"}, "firstTimestamp": moment, "lastTimestamp": moment, "count": 1,
    }  # fmt: skip
    for name in ("", "math-sim-9-a1"):
        other = Event(type="Normal", reason="PodsReady", message="m", pod=name)
        assert telling.event_manifest(other, world.observed(), now=NOW)["involvedObject"] == job


# --- the log ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    known = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def read():
        found = [(r.getMessage(), {k: v for k, v in vars(r).items() if k not in known}) for r in caplog.records]
        caplog.clear()
        return found

    return read


def test_the_log_has_a_line_for_each_condition_that_moved(lines):
    world = ppo_job().world()
    world.status = status((V, T, Reason.ACCEPTED, ""), (P, F, Reason.PODS_STARTING, "a"))
    after = status((V, T, Reason.ACCEPTED, "x"), (P, F, Reason.UNSCHEDULABLE, "b" * 501), (R, T, Reason.STEPPING, ""))
    events.log_changes(world.observed(), after.model_copy(update={"attempt": 4}))
    who = {"job": "team/math", "attempt": 4}
    assert lines() == [
        ("condition changed",
         who | {"type": "PodsReady", "status": "False", "reason": "Unschedulable", "why": "b" * 500}),
        ("condition changed", who | {"type": "Running", "status": "True", "reason": "Stepping", "why": ""}),
    ]  # fmt: skip


def test_the_log_says_of_a_pod_that_is_made_whose_place_it_takes_and_of_one_that_is_deleted_why(lines):
    world = ppo_job().world().created().all_ready()
    first = world.pods["math-sim-0-a1"]
    events.PodLog(world.observed()).made(first)
    world.exited("math-sim-0-a1", 1, reason="OOMKilled")
    second = {"metadata": {**first["metadata"], "name": "math-sim-0-a2"}}
    second["metadata"]["labels"] = {**first["metadata"]["labels"], "rlinf.io/attempt": "2"}
    events.PodLog(world.observed()).made(second)
    driver = world.pods["math-driver-a1"]
    labels = {**driver["metadata"]["labels"], "rlinf.io/attempt": "3"}
    world.ended_by_kubelet("math-driver-a1", reason="Evicted", message="")
    log = events.PodLog(world.observed())
    log.made({"metadata": {**driver["metadata"], "name": "math-driver-a3", "labels": labels}})
    log.deleted(DeletePod(name="math-sim-0-a1", uid="pod-2", why="gone"))
    log.deleted(DeletePod(name="x", uid="unknown", why="gone"))
    job = {"job": "team/math"}
    ended = "takes the place of math-sim-0-a1 (Failed, OOMKilled, exit code 1)"
    assert lines() == [
        ("pod made", job | {"attempt": 1, "pod": "math-sim-0-a1", "why": "its place has no pod"}),
        ("pod made", job | {"attempt": 2, "pod": "math-sim-0-a2", "why": ended}),
        ("pod made",
         job | {"attempt": 3, "pod": "math-driver-a3", "why": "takes the place of math-driver-a1 (Failed, Evicted)"}),
        ("pod deleted", job | {"attempt": 1, "pod": "math-sim-0-a1", "why": "gone"}),
        ("pod deleted", job | {"attempt": 0, "pod": "x", "why": "gone"}),
    ]  # fmt: skip
