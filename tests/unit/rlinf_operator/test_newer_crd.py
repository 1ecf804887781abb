"""An operator meets jobs of a newer CRD, whose fields it does not know: it goes on with those that run."""

import copy
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from rlinf_api import unknown
from rlinf_api.job import RLJobSpec
from rlinf_api.report import DriverState
from rlinf_operator.reconcile.observe import read_status
from rljob.local.store import MemoryStore
from tests.builders import NOW, ppo_job
from tests.fakes.cluster import KEY, Cluster, Store

EXAMPLES = sorted(Path(__file__).parents[3].glob("examples/**/rljob.yaml"))
NEWER = {"flow": {"speed": 2}, "quota": "team"}


async def running() -> Cluster:
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle()
    await cluster.store.patch("RLJob", "math", namespace="team", patch={"spec": NEWER})
    await cluster.settle()
    cluster.store.writes.clear()
    return cluster


async def test_a_running_job_stays_valid_and_says_which_fields_go_unheeded():
    cluster = await running()
    assert (await cluster.condition("Valid"))[:2] == ("True", "Accepted")
    message = (await cluster.condition("Valid"))[2]
    assert "spec.flow.speed, spec.quota" in message or "spec.quota, spec.flow.speed" in message
    assert "upgrade the operator" in message
    await cluster.settle()
    assert cluster.store.writes == []
    stored = await cluster.store.get("RLJob", "math", namespace="team")
    assert (stored["spec"]["flow"]["speed"], stored["spec"]["quota"]) == (2, "team")


async def test_a_dead_pod_of_a_running_job_is_replaced():
    cluster = await running()
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": (NOW + timedelta(seconds=1)).isoformat()}}
    status = {"phase": "Failed", "containerStatuses": [{"name": "agent", "state": ended}]}
    await MemoryStore.patch(
        cluster.store, "Pod", "math-sim-1-a1", namespace="team", patch={"status": status}, subresource="status"
    )
    await cluster.settle()
    assert "math-sim-1-a2" in await cluster.names("Pod")


async def test_a_plan_that_is_missing_is_asked_for_without_them():
    cluster = await running()
    await cluster.store.delete("RLPlan", "math-p1", namespace="team")
    await cluster.settle()
    assert await cluster.names("RLPlan") == ["math-p2"]


async def test_a_job_that_is_to_begin_is_refused_as_ever():
    cluster = Cluster()
    job = ppo_job()
    job.manifest["spec"] |= {"quota": "team"}
    await cluster.apply(job)
    await cluster.reconciler.pass_over(KEY)
    assert (await cluster.condition("Valid"))[:2] == ("False", "InvalidSpec")
    assert await cluster.names("Pod") == []


@pytest.mark.parametrize(
    ("state", "wanted"), [(DriverState.COMPLETE, ("True", "FlowFinished")), (DriverState.FAILED, ("True", "UserError"))]
)
def test_the_end_of_a_flow_is_recorded_also_under_a_spec_that_became_wrong(state, wanted):
    world = ppo_job().world().started()
    world.step()
    world.edit(objective="Cheap").report(state=state, reason="UserError", plan_revision=1, step=100)
    world.step()
    assert world.condition("Valid") == ("False", "InvalidSpec")
    assert world.condition(state.value) == wanted


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.parent.name for path in EXAMPLES])
def test_nothing_of_what_is_known_is_left_out(path):
    manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
    for spec in (manifest["spec"], ppo_job().build()["spec"]):
        before = copy.deepcopy(spec)
        assert unknown.pruned(spec, RLJobSpec, "spec") == (before, ())


def test_unknown_fields_are_found_in_lists_by_name_and_free_form_values_are_left_alone():
    manifest = ppo_job().build()
    manifest["spec"]["pools"][0] |= {"color": "red", "template": {"anything": {"goes": 1}}}
    manifest["spec"]["flow"]["config"] = {"any": {"thing": 1}}
    after, found = unknown.pruned(manifest["spec"], RLJobSpec, "spec")
    assert found == ("spec.pools[sim].color",)
    assert after["pools"][0]["template"] == {"anything": {"goes": 1}}
    assert after["flow"]["config"] == {"any": {"thing": 1}}


class Newer(Store):
    """With CRDs that have a field more in plans, whose default the API server gives to all of them at each read."""

    since = False

    async def list(self, kind, **how):
        found = await super().list(kind, **how)
        for item in found.items if kind == "RLPlan" and self.since else ():
            item["spec"] |= {"newField": "default", "reason": {**item["spec"]["reason"], "at": "once"}}
            item["status"] = {**(item.get("status") or {}), "newer": {"told": 1}}
        return found


async def test_a_plan_with_fields_of_a_newer_crd_is_read_without_them_by_a_job_that_is_to_begin():
    store = Newer()
    store.since = True
    cluster = Cluster(store)
    await cluster.apply()
    await cluster.settle()
    assert (await cluster.names("RLPlan"), (await cluster.condition("PlanApplied"))[0]) == (["math-p1"], "True")
    message = (await cluster.condition("Valid"))[2]
    assert "without spec.newField of math-p1, spec.reason.at of math-p1, which this operator does not know" in message


async def test_a_running_job_keeps_its_plan_and_its_next_driver_is_told_it():
    store = Newer()
    cluster = Cluster(store)
    await cluster.apply()
    await cluster.settle()
    store.since = True
    await MemoryStore.delete(store, "Pod", "math-driver-a1", namespace="team")
    await cluster.settle()
    assert await cluster.names("RLPlan") == ["math-p1"]
    assert (await cluster.condition("PlanApplied"))[:2] == ("True", "PlanInForce")
    assert "math-driver-a2" in await cluster.names("Pod")


def test_a_status_of_a_newer_operator_is_read_without_what_is_new_also_within_its_lists():
    status = {"attempt": 3, "shape": "round", "pools": [{"name": "sim", "desired": 2, "color": "red"}],
              "plan": {"current": "math-p1", "score": 1.5}}  # fmt: skip
    found = read_status({"status": status})
    assert (found.attempt, found.plan.current, found.pools[0].desired) == (3, "math-p1", 2)
