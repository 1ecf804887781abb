"""A namespace that is being deleted: nothing can be made there, the job goes with it. It is told, then left alone."""

import dataclasses
import json

import pytest

from rlinf_api.errors import RLinfError
from rlinf_operator.clients import api_errors
from rlinf_operator.reconcile.loop import Reconciler
from rlinf_scheduler.service import Planning
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import AUTHORITY, KEY, QUICK, Cluster

ANSWER = {
    "kind": "Status",
    "code": 403,
    "reason": "Forbidden",
    "message": 'pods "x" is forbidden: unable to create new content in namespace team because it is being terminated',
    "details": {"causes": [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]},
}


def refused(answer=ANSWER):
    return api_errors.of_answer("create of Pod team/x", status=403, body=json.dumps(answer).encode())


def test_the_answer_is_told_from_a_missing_right():
    error = refused()
    assert error.reason == "NamespaceTerminating"
    assert "the namespace is being deleted; the job goes with it" in str(error)
    assert "Role" not in str(error)


@pytest.mark.parametrize(
    "details", [None, {}, {"causes": None}, {"causes": ["x"]}, {"causes": [{"reason": "FieldValueInvalid"}]}, "x"]
)
def test_any_other_403_is_a_missing_right_or_a_policy(details):
    assert refused({**ANSWER, "details": details}).reason == "Forbidden"


def cluster_that_goes(*, pause_s=60.0):
    cluster = Cluster()
    settings = dataclasses.replace(QUICK, retry_max_s=pause_s)
    cluster.reconciler = Reconciler(
        store=cluster.store, scheduler=Planning(cluster.store), drivers=lambda _: cluster.drivers, authority=AUTHORITY,
        settings=settings, clock=lambda: NOW,
    )  # fmt: skip
    return cluster


async def brought_down(cluster):
    """Up, then the namespace controller takes a pod, and the operator would make it again."""
    await cluster.apply()
    await cluster.settle()
    for kind in ("Pod", "Service", "NetworkPolicy", "ConfigMap", "Secret", "Event"):
        cluster.store.refuse["create", kind] = refused()
    await cluster.store.delete("Pod", "math-sim-1-a1", namespace="team", grace_period_s=0)
    return await cluster.reconciler.pass_over(KEY)


async def test_it_stands_in_the_status_once_and_then_nothing_is_written():
    cluster = cluster_that_goes()
    applied = await brought_down(cluster)
    assert applied.going
    assert not applied.try_again, "a pass that is repeated with a back-off begins at half a second"
    assert "the namespace is being deleted; the job goes with it" in (await cluster.condition("PodsReady"))[2]
    tried, create = [], cluster.store.create

    async def watched(obj):
        tried.append(obj["kind"])
        return await create(obj)

    cluster.store.create = watched
    await cluster.store.delete("Service", "math", namespace="team")
    cluster.store.writes.clear()
    for _ in range(10):  # an event for each object that goes
        await cluster.reconciler.pass_over(KEY)
    assert (tried, cluster.store.writes) == ([], [])
    assert cluster.drivers.followed == {}


async def test_when_the_pause_is_over_it_is_looked_at_again():
    cluster = cluster_that_goes(pause_s=0.0)
    assert (await brought_down(cluster)).going
    cluster.store.refuse.clear()
    await cluster.settle()
    assert "math-sim-1-a2" in await cluster.names("Pod")


async def test_a_job_made_again_under_the_name_waits_for_nothing():
    cluster = cluster_that_goes()
    await brought_down(cluster)
    await cluster.store.delete("RLJob", "math", namespace="team")
    cluster.store.refuse.clear()
    again = ppo_job()
    again.manifest["metadata"]["uid"] = "another"
    await cluster.apply(again)
    await cluster.settle()
    assert (await cluster.condition("PodsReady"))[:2] == ("True", "PodsReady")


async def test_another_refusal_is_tried_again_soon():
    cluster = cluster_that_goes()
    await cluster.apply()
    cluster.store.refuse["create", "Pod"] = RLinfError("exceeded quota")
    await cluster.settle(2)
    applied = await cluster.reconciler.pass_over(KEY)
    assert not applied.going
    assert "exceeded quota" in applied.try_again
