"""An edit of a running job under a ResourceQuota that is full: the pods of before count in it."""

from dataclasses import replace

import pytest

from rlinf_api.errors import RLinfError
from rlinf_api.job import RLJobStatus
from rlinf_api.report import DriverState, Failure, Ruling
from rlinf_operator.policies import restart
from rlinf_operator.reconcile import outcome
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import KEY
from tests.fakes.quota import World

EDIT, BACK = {"config": {"gamma": 0.5}}, {"config": None}


async def under_a_full_quota(*, binds=False):
    world = World()
    world.quota.binds = binds
    await world.apply()
    await world.passes(8)
    world.quota.most = 4
    return world


@pytest.mark.parametrize("binds", [True, False], ids=["pods that a kubelet ends", "pods that are gone at once"])
async def test_an_edit_takes_effect_and_counts_as_no_loss(binds):
    """A live pod counts in the quota: its successor's refusal would never end."""
    world = await under_a_full_quota(binds=binds)
    await world.edit(flow=EDIT)
    await world.passes(1)
    says = (await world.condition("PodsReady"))[2]
    assert "exceeded quota" in says
    assert "4 pods that are replaced go first, to make room" in says
    assert [pool["restarts"] for pool in (await world.status())["pools"]] == [0, 0]
    await world.end_deleted()
    await world.passes(5)
    pods = await world.names("Pod")
    assert [pod.rpartition("-a")[0] for pod in pods] == ["math-driver", "math-sim-0", "math-sim-1", "math-train-0"]
    assert not any(pod.endswith("-a1") for pod in pods)
    assert (await world.condition("PodsReady"))[:2] == ("True", "PodsReady")
    assert (await world.status())["restarts"] == []
    assert world.events("PodEnded") == []
    assert (await world.condition("Degraded"))[0] == "False"


@pytest.mark.parametrize("there", [True, False], ids=["Secrets that are there", "a Secret that is not"])
async def test_a_quota_on_secrets_makes_no_pod_go_for_nothing(there):
    """It refuses a Secret before the API server sees that its name is taken."""
    world = await under_a_full_quota()
    world.quota.most = 1000
    world.quota.refuse["create", "Secret"] = RLinfError("secrets are forbidden: exceeded quota: count/secrets")
    if not there:
        name = next(name for name in await world.names("Secret") if "driver" in name)
        await world.store.delete("Secret", name, namespace="team")
    before = await world.names("Pod")
    await world.edit(flow=EDIT)
    await world.passes(8)
    after = await world.names("Pod")
    assert len(after) == 4
    assert not set(after) & set(before) if there else after == before


async def test_a_pod_that_vanishes_after_such_an_edit_counts_as_ever():
    world = await under_a_full_quota()
    await world.edit(flow=EDIT)
    await world.passes(8)
    (pod,) = [p for p in await world.names("Pod") if "sim-1" in p]
    await world.store.delete("Pod", pod, namespace="team", grace_period_s=0)
    await world.passes(3)
    assert [e.split()[1:] for e in (await world.status())["restarts"]] == [["math-sim-1", "Infrastructure"]]


async def test_what_is_refused_for_another_reason_leaves_the_pods_of_before_at_work():
    """An edit of a template that the API server does not take must not cost the job."""
    world = await under_a_full_quota()
    world.quota.most = 1000
    world.quota.refuse["create", "Pod"] = RLinfError("pods are forbidden: violates PodSecurity")
    await world.edit(flow=EDIT)
    await world.passes(4)
    assert await world.names("Pod") == ["math-driver-a1", "math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"]
    status, reason, message = await world.condition("PodsReady")
    assert (status, reason) == ("False", "PodsMissing")
    assert "make room" not in message


def test_no_more_is_noted_than_the_crd_takes():
    decided = RLJobStatus(restarts=["2026-11-21T12:00:00Z math-sim-0-a1 Program"])
    answers = Answers(writes_refused=("exceeded quota",), makes_room=tuple(f"math-sim-{n}" for n in range(2000)))
    observed = replace(ppo_job().world().observed(), status=decided)
    found = outcome.status_after(answers, observed, decided=decided, now=NOW)
    assert len(found.restarts) == restart.MAX_ENTRIES
    assert found.restarts[0] == decided.restarts[0]


async def test_a_live_pod_that_a_rule_replaces_makes_room_and_counts_once():
    rule = {"name": "broke", "role": "env", "action": "RestartPod"}
    world = World()
    await world.apply(ppo_job().with_spec(failurePolicy={"rules": [rule]}))
    await world.passes(8)
    world.quota.most = 4
    failure = Failure(role="env", worker=0, pod="math-sim-0-a1", exit_code=3, reason="Exit3")
    ruling = Ruling(action="RestartPod", rule="broke", failure=failure)
    world.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1, rulings=(ruling,))
    await world.passes(1)
    assert "1 pods that are replaced go first, to make room" in (await world.condition("PodsReady"))[2]
    await world.passes(5)
    pods = await world.names("Pod")
    assert len(pods) == 4
    assert "math-sim-0-a1" not in pods
    assert [e.split()[1:] for e in (await world.status())["restarts"]] == [["math-sim-0-a1", "Program:broke"]]


async def test_an_edit_that_fits_no_quota_can_be_taken_back():
    world = await under_a_full_quota()
    world.quota.most = 0
    await world.edit(flow=EDIT)
    await world.passes(3)
    assert await world.names("Pod") == []
    world.quota.most = 4
    await world.edit(flow=BACK)
    await world.passes(4)
    assert len(await world.names("Pod")) == 4
    assert (await world.status())["restarts"] == []
