"""Phases and conditions from what containers do, as a kubelet derives them."""

from datetime import UTC, datetime, timedelta

import pytest

from rljob.local.status import ContainerRecord, RanPod, Running, Terminated, pod_status

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def ended(code):
    state = Terminated(exit_code=code, reason="", message="", started_at=NOW, finished_at=NOW)
    return ContainerRecord("c", state=state, over=True)


def running(ready=True):
    return ContainerRecord("c", state=Running(started_at=NOW), ready=ready)


def fresh():
    return ContainerRecord("c")


def status(*main, init=(), previous=None, now=NOW, **more):
    record = RanPod(init=list(init), main=list(main), scheduled=True, **more)
    return pod_status(record, previous=previous or {}, generation=1, now=now)


@pytest.mark.parametrize(
    ("init", "main", "phase"),
    [
        ((), (fresh(),), "Pending"),
        ((), (running(),), "Running"),
        ((), (running(), fresh()), "Pending"),
        ((), (running(), ended(0)), "Running"),
        ((), (ended(0), ended(0)), "Succeeded"),
        ((), (ended(0), ended(3)), "Failed"),
        ((running(),), (fresh(),), "Pending"),
        ((ended(1),), (fresh(),), "Failed"),
        ((ended(0),), (running(),), "Running"),
    ],
)
def test_phase(init, main, phase):
    assert status(*main, init=init)["phase"] == phase


def test_a_condition_keeps_its_time_until_its_status_changes():
    first = status(running(ready=False))
    later = NOW + timedelta(minutes=1)
    same = status(running(ready=False), previous=first, now=later)
    assert same == first
    changed = {c["type"]: c for c in status(running(), previous=first, now=later)["conditions"]}
    assert changed["Ready"]["lastTransitionTime"] == "2026-11-21T12:01:00Z"
    assert changed["PodScheduled"]["lastTransitionTime"] == "2026-11-21T12:00:00Z"


def test_conditions_of_others_are_kept():
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    assert disruption in status(running(), previous={"conditions": [disruption]})["conditions"]


def test_a_pod_without_an_address_is_unschedulable():
    record = RanPod(init=[], main=[fresh()], unschedulable="port taken")
    (condition,) = pod_status(record, previous={}, generation=1, now=NOW)["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("PodScheduled", "False", "Unschedulable")
    assert condition["message"] == "port taken"
