"""Phases and conditions from what containers do, as a kubelet derives them."""

from datetime import UTC, datetime, timedelta

import pytest

from rljob.local.status import ContainerRecord, RanPod, pod_status, terminated
from rljob.local.status import running as running_since

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def ended(code):
    return ContainerRecord("c", state=terminated(code, "Error", "", started_at=NOW, finished_at=NOW))


def running(ready=True):
    return ContainerRecord("c", state=running_since(NOW), ready=ready)


def fresh():
    return ContainerRecord("c")


def status(*main, init=(), previous=None, now=NOW, **more):
    record = RanPod(init=list(init), main=list(main), pod_ip="127.1.0.1", **more)
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


def test_both_conditions_of_readiness_name_the_containers_that_are_not_ready():
    conditions = {c["type"]: c for c in status(running(), running(ready=False))["conditions"]}
    for kind in ("Ready", "ContainersReady"):
        told = conditions[kind]
        assert (told["status"], told["reason"]) == ("False", "ContainersNotReady")
        assert told["message"] == "containers with unready status: [c]"


def test_the_state_of_a_container_that_ended_has_its_process():
    container = ended(3)
    container.process_id = 7
    (shown,) = status(container)["containerStatuses"]
    assert (shown["containerID"], shown["started"]) == ("process://7", False)
    told = shown["state"]["terminated"]
    assert (told["exitCode"], told["containerID"]) == (3, "process://7")
    assert "containerID" not in container.state["terminated"], "what is shown is a copy"
