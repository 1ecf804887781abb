"""A driver that is not to be evicted: its budget is there before its pod, follows the spec, and ends with the job."""

import pytest

from rlinf_api import names
from rlinf_api.errors import RLinfError
from rlinf_api.report import DriverState
from rlinf_operator.manifests import disruption, pods
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.settings import DEFAULTS
from tests.builders import UID, ppo_job
from tests.fakes.cluster import KEY, Cluster

JOB = JobMeta(namespace="team", name="math", uid=UID)


def held():
    job = ppo_job()
    job.spec["driver"] = {"evictable": False}
    return job


async def running(job):
    cluster = Cluster()
    await cluster.apply(job)
    await cluster.settle()
    return cluster


async def edit(cluster, *, evictable):
    await cluster.store.patch("RLJob", "math", patch={"spec": {"driver": {"evictable": evictable}}}, namespace="team")


def test_it_is_of_the_driver_alone_and_of_one_that_is_ready():
    found, spec = disruption.budget(JOB), held().parsed()
    assert (found["spec"]["minAvailable"], found["spec"]["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    assert found["metadata"]["ownerReferences"][0]["uid"] == UID
    assert found["metadata"]["labels"][names.LABEL_JOB] == "math", "the operator's account may touch what has it"
    wanted = found["spec"]["selector"]["matchLabels"].items()
    driver = pods.driver(JOB, spec, attempt=1, life=1, settings=DEFAULTS).manifest
    worker = pods.worker(JOB, spec, pool="sim", ordinal=0, attempt=1, life=1, settings=DEFAULTS).manifest
    assert wanted <= driver["metadata"]["labels"].items()
    assert not wanted <= worker["metadata"]["labels"].items()


async def test_by_default_there_is_none():
    cluster = await running(ppo_job())
    assert await cluster.names("PodDisruptionBudget") == []


async def test_it_is_there_before_the_first_pod_and_made_once():
    cluster = await running(held())
    kinds = [kind for verb, kind, _ in cluster.store.writes if verb == "create"]
    assert kinds.index("PodDisruptionBudget") < kinds.index("Pod")
    assert kinds.count("PodDisruptionBudget") == 1


async def test_one_that_somebody_deletes_is_made_again():
    cluster = await running(held())
    await cluster.store.delete("PodDisruptionBudget", "math", namespace="team")
    await cluster.settle(2)
    assert await cluster.names("PodDisruptionBudget") == ["math"]


async def test_it_follows_an_edit_of_a_running_job_and_no_pod_is_touched():
    cluster = await running(held())
    for evictable, left in ((True, []), (False, ["math"])):
        await edit(cluster, evictable=evictable)
        cluster.store.writes.clear()
        await cluster.settle(3)
        assert await cluster.names("PodDisruptionBudget") == left
        assert not [write for write in cluster.store.writes if write[1] == "Pod"]


@pytest.mark.parametrize("state", [DriverState.COMPLETE, DriverState.FAILED])
async def test_a_job_that_has_ended_holds_up_no_drain(state):
    cluster = await running(held())
    cluster.drivers.say(KEY, state=state, plan_revision=1, step=100, reason="UserError")
    await cluster.settle(3)
    assert (await cluster.condition("Complete" if state is DriverState.COMPLETE else "Failed"))[0] == "True"
    assert await cluster.names("PodDisruptionBudget") == []
    assert await cluster.names("Pod") != [], "the driver is left to be read, on a node that may be drained"


async def test_somebody_elses_budget_of_that_name_is_left_alone_and_named():
    cluster = Cluster()
    await cluster.apply(held())
    theirs = {"kind": "PodDisruptionBudget", "metadata": {"name": "math", "namespace": "team"}, "spec": {}}
    await cluster.store.create(theirs)
    applied = await cluster.reconciler.pass_over(KEY)
    assert "PodDisruptionBudget team/math exists and does not belong to this job" in applied.try_again


async def test_one_that_is_refused_keeps_pods_away_and_is_named():
    cluster = Cluster()
    await cluster.apply(held())
    cluster.store.refuse["create", "PodDisruptionBudget"] = RLinfError("poddisruptionbudgets is forbidden")
    for _ in range(3):
        applied = await cluster.reconciler.pass_over(KEY)
    assert "PodDisruptionBudget math was refused by the API server" in applied.try_again
    assert await cluster.names("Pod") == []
