"""What the operator logs: a line for each change that a pass made, with job and attempt, and none for a quiet pass."""

import itertools
import logging

import pytest

from rlinf_api import times
from rlinf_api.errors import ClusterBusy
from rljob.local.store import MemoryStore
from tests.builders import NOW
from tests.fakes.cluster import KEY, Cluster

CHANGES = ("condition changed", "pod made", "pod deleted")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, logger="rlinf_operator.reconcile")

    def taken():
        found = [vars(record) for record in caplog.records]
        caplog.clear()
        return found

    return taken


def changes(found):
    assert all(line["levelno"] == logging.INFO for line in found if line["message"] in CHANGES)
    return [line for line in found if line["message"] in CHANGES]


async def lose(cluster, pod):
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": times.text(NOW)}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": ended}]}
    await MemoryStore.patch(
        cluster.store, "Pod", pod, namespace="team", patch={"status": status}, subresource="status"
    )  # fmt: skip


async def test_a_start_is_told_pod_by_pod_and_condition_by_condition(lines):
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    found = changes(lines())
    made = {(line["pod"], line["attempt"], line["why"]) for line in found if line["message"] == "pod made"}
    pods = await cluster.names("Pod")
    assert made == {(pod, 1, "its place has no pod") for pod in pods}
    assert len(pods) == 4
    told = [(line["type"], line["status"], line["reason"]) for line in found if line["message"] == "condition changed"]
    assert ("Running", "True", "Stepping") in told
    assert all(before != after for before, after in itertools.pairwise(told))
    assert {line["job"] for line in found} == {str(KEY)}
    await cluster.settle(3)
    assert changes(lines()) == [], "a pass that changes nothing tells nothing"


async def test_a_lost_pod_is_told_with_its_end_and_its_successor(lines):
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    lines()
    await lose(cluster, "math-train-0-a1")
    await cluster.settle()
    found = changes(lines())
    (made,) = [line for line in found if line["message"] == "pod made"]
    (gone,) = [line for line in found if line["message"] == "pod deleted"]
    assert (made["pod"], made["attempt"]) == ("math-train-0-a2", 2)
    assert made["why"] == "takes the place of math-train-0-a1 (Failed, OOMKilled, exit code 137)"
    assert (gone["pod"], gone["attempt"]) == ("math-train-0-a1", 1)
    assert {line["attempt"] for line in found if line["message"] == "condition changed"} <= {1, 2}


async def test_what_was_refused_is_not_told_as_done(lines):
    cluster = Cluster()
    await cluster.apply()
    cluster.store.refuse["create", "Pod"] = ClusterBusy("scripted")
    await cluster.settle(4)
    assert [line for line in lines() if line["message"] == "pod made"] == []


async def test_the_same_trouble_is_told_once_and_every_pass_at_debug(lines):
    cluster = Cluster()
    await cluster.apply()
    cluster.store.refuse["create", "Pod"] = ClusterBusy("scripted")
    await cluster.reconciler._one(KEY)  # has the plan made
    lines().clear()
    for _ in range(3):
        await cluster.reconciler._one(KEY)
    found = lines()
    levels = [line["levelno"] for line in found if line["message"] == "pass is repeated"]
    assert levels == [logging.INFO, logging.DEBUG, logging.DEBUG]
    passes = [line for line in found if line["message"] == "pass"]
    assert [line["result"] for line in passes] == ["repeated"] * 3
    assert {line["levelno"] for line in passes} == {logging.DEBUG}
