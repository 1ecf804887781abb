"""What the API server refuses when a job is made, `rljob` refuses before it starts one: for the same reason, with the
same remedy."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlinf_api import edits
from rljob import manifest as manifests
from tests.cluster.control_plane import served
from tests.conformance.parts import LEARNS, job
from tests.conformance.world import Manifest
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.waiting import until


def ruled(*others: Manifest, **rule: Any) -> Manifest:
    """A failurePolicy."""
    return {"rules": [{"action": "FailJob"} | rule, *others]}


REFUSED = {
    "a pool names a role that is not there": (
        job(pool={"roles": ["env", "rollout", "actor", "critic"]}), "add the role or remove the name"
    ),
    "a pool has the name of the driver's pod set": (job(pool={"name": "driver"}), "rename it"),
    "no pool may run a role": (job(pool={"roles": ["env", "rollout"]}), "spec.pools[*].roles"),
    "memory beside no accelerator": (job(pool={"slots": {"hostMemory": "4Gi"}}), "name the resource"),
    "a plan is pinned that has no name": (job(placement={"mode": "Pinned"}), "write the name of an RLPlan"),
    "a rule of a role that is not there": (job(failurePolicy=ruled(role="critic")), "spec.roles"),
    "a rule of a pool that does not run the role": (
        job(pool={"name": "cpu"}, failurePolicy=ruled(role="env", pool="gpu")), "spec.pools"
    ),
    "a rule's bound of what restarts nothing": (job(failurePolicy=ruled(maxRestarts=2)), "or write RestartWorker"),
    "a rule's pause of what starts nothing": (job(failurePolicy=ruled(backOffSeconds=2)), "starts nothing again"),
    "a worker's restart for a pod's end": (
        job(failurePolicy=ruled(action="RestartWorker", reasons=["NodeLost"])), "of a whole pod; write RestartPod"
    ),
    "an exit code of what has none": (job(failurePolicy=ruled(exitCodes=[3], reasons=["Evicted"])), "write two rules"),
    "two rules of one name": (
        job(failurePolicy=ruled({"name": "a", "role": "actor", "action": "Ignore"}, name="a")), "rename one"
    ),
    "a rule behind one that meets all": (
        job(failurePolicy=ruled({"role": "env", "action": "Ignore"})), "so meets every failure"
    ),
    "an action that is none": (job(failurePolicy=ruled(action="Restart")), "rules[0].action"),
    "no roles, of a flow of one's own": (
        job(flow={"name": "mine:flow"}, roles=[]), "spec.roles"
    ),
    "several pools, of which one lists no roles": (
        job(pools=[{"name": "cpu", "roles": []}, {"name": "more", "roles": ["env"]}]), "may run there"
    ),
    "a pool names a role that the flow has not": (job(roles=[], pool={"roles": ["critic"]}), "add the role"),
    "a manager without a domain": (job(managedBy="multikueue"), "spec.managedBy"),
    "no steps": (job(steps=0), "spec.flow.steps"),
    "a field that is none": (job(config={}, pool={"podz": 1}), "podz"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rljob_refuses_it_before_the_start(case: str):
    manifest, said = REFUSED[case]
    assert any(said in str(problem) for problem in manifests.check(manifest).problems)


def apply_crd(cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", str(REPOSITORY / "crds" / "rlinf.io_rljobs.yaml"))
    cluster.kubectl("wait", "--for=condition=Established", "crd/rljobs.rlinf.io")
    until(lambda: served(cluster, "rljobs"), what="the API of RLJobs", timeout_s=30)


def stored() -> Manifest:
    """Of the flow's own kinds: then a manifest that writes no roles has the same."""
    manifest: Manifest = copy.deepcopy(job(actor=LEARNS))
    manifest["spec"]["pools"].append({"name": "more", "roles": ["env"]})
    return manifest


def edited(at: str, value: Any) -> Manifest:
    """`edited("roles.0.config", {"a": 1})`: what is stored, with that field of its spec."""
    manifest = stored()
    node, *path = manifest["spec"], *at.split(".")
    for key in path[:-1]:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[int(path[-1]) if isinstance(node, list) else path[-1]] = value
    return manifest


HELD = {
    "spec.seed": edited("seed", 7),
    "spec.managedBy": edited("managedBy", "kueue.x-k8s.io/multikueue"),
    "spec.runtime": edited("runtime", "gpu"),
    "spec.flow.config": edited("flow.config.gamma", 0.5),
    "spec.flow.maxStaleness": edited("flow.maxStaleness", 2),
    "spec.checkpoint.uri": edited("checkpoint.uri", "/other"),
    "spec.model": edited("model", {"path": "/m"}),
    "spec.data": edited("data", {"train": "/d"}),
    "spec.roles[*].config": edited("roles.0.config", {"a": {"deep": [1]}}),
    "spec.roles[*].slotsPerWorker": edited("roles.0.slotsPerWorker", 2),
    "spec.pools": edited("pools.0.name", "other"),
    "spec.pools[*].roles": edited("pools.1.roles", ["actor"]),
    "spec.roles[*]": edited("roles", []),
    "spec.pools[*].slots": edited("pools.0.slots.perPod", 4),
    "spec.pools[*].image": edited("pools.0.image", "other:1"),
    "spec.template.spec": edited("template", {"spec": {"priorityClassName": "high"}}),
    "spec.driver.template.spec": edited("driver", {"template": {"spec": {"priorityClassName": "high"}}}),
    "spec.pools[*].template.spec": edited("pools.0.template", {"spec": {"priorityClassName": "high"}}),
}
NEVER = ("spec.seed", "spec.managedBy")
FREE = {
    "flow.steps": edited("flow.steps", 7),
    "checkpoint": edited("checkpoint.everySteps", 9),
    "pods": edited("pools.0.pods", {"min": 1, "max": 3}),
    "the metadata of all pods": edited("template", {"metadata": {"labels": {"team": "a"}}}),
    "the driver's metadata": edited("driver", {"template": {"metadata": {"labels": {"team": "a"}}}}),
    "a template's metadata": edited("pools.0.template", {"metadata": {"labels": {"team": "a"}}}),
    "the roles in another order": edited("roles", job(actor=LEARNS)["spec"]["roles"][::-1]),
    "a pool's roles in another order": edited("pools.0.roles", ["rollout", "actor", "env"]),
    "a default that is written out": edited("flow.maxStaleness", 0),
}


AT_WORK: Manifest = {"attempt": 1, "state": "Running"}
NOT_YET: tuple[Manifest, ...] = ({}, {"attempt": 0, "state": "Stalled"}, {"attempt": 2, "state": "Starting"})


def sentence_of(manifest: Manifest, *, status: Manifest = AT_WORK) -> str:
    return edits.refusal(stored()["spec"], manifest["spec"], status=status)


@pytest.mark.parametrize("field", HELD)
def test_an_edit_of_what_pods_are_made_from_is_refused_with_the_field(field: str):
    assert sentence_of(HELD[field]).startswith((f"{field} cannot change", f"{field}: "))
    assert field in NEVER or {sentence_of(HELD[field], status=status) for status in NOT_YET} == {""}


SAID = edited("pools.1.slots", {"perPod": 1})
"""What is not there, a runtime may say, so that it is not the same as its default."""


def test_slots_that_were_not_said_are_not_the_same_as_their_defaults():
    assert sentence_of(SAID).startswith("spec.pools[*].slots cannot change")


@pytest.mark.parametrize("edit", FREE)
def test_an_edit_of_anything_else_is_not(edit: str):
    assert sentence_of(FREE[edit]) == ""


@pytest.fixture(scope="module")
def at_work(cluster: Cluster) -> Iterator[Callable[[Manifest], str]]:
    """A job of which the status says that it has had pods, and no operator; what the API server says to an edit."""
    apply_crd(cluster)
    path = "/apis/rlinf.io/v1alpha1/namespaces/default/rljobs"
    cluster.api.request("POST", path, body=stored() | {"metadata": {"name": "edited"}})

    def edit(manifest: Manifest, *, status: Manifest = AT_WORK, suspend: bool = False) -> str:
        one = f"{path}/edited"
        cluster.api.request("PUT", f"{one}/status", body=cluster.api.get(one) | {"status": status})
        body = cluster.api.get(one) | {"spec": manifest["spec"] | {"suspend": suspend}}
        try:
            cluster.api.request("PUT", f"{one}?dryRun=All", body=body)
        except ApiError as error:
            return str(error)
        return ""

    yield edit
    cluster.api.delete(f"{path}/edited")


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("field", HELD)
def test_the_api_server_refuses_that_edit_in_the_same_words(at_work: Callable[..., str], field: str):
    assert sentence_of(HELD[field]) in at_work(HELD[field])
    if field not in NEVER:
        assert {at_work(HELD[field], status=status) for status in NOT_YET} == {""}
        assert at_work(HELD[field], suspend=True) == ""


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_api_server_does_not_take_them_for_the_same_either(at_work: Callable[..., str]):
    assert sentence_of(SAID) in at_work(SAID)


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("edit", FREE)
def test_the_api_server_takes_any_other_edit(at_work: Callable[..., str], edit: str):
    assert at_work(FREE[edit]) == ""


TAKEN: dict[str, Manifest] = {
    "no roles": job(roles=[], pool={"roles": []}),
    "the roles of a flow, in no order": job(roles=[], pool={"roles": ["actor", "env", "rollout"]}),
    "rules in order": job(failurePolicy=ruled(
        {"pool": "cpu", "reasons": ["NodeLost", "Evicted"], "action": "Ignore", "backOffSeconds": 5},
        {"name": "rest", "action": "RestartJob", "maxRestarts": 3}, role="env", exitCodes=[3, 137],
    )),
    "a rule of a role that is not written": job(roles=[], failurePolicy=ruled(role="env", pool="cpu")),
    "one that meets all at the end": job(failurePolicy=ruled()),
    "none": job(failurePolicy={"rules": []}),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_rljob_takes_it(case: str):
    assert manifests.check(TAKEN[case]).problems == ()


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", TAKEN)
def test_the_api_server_takes_it(cluster: Cluster, case: str):
    apply_crd(cluster)
    path = "/apis/rlinf.io/v1alpha1/namespaces/default/rljobs?dryRun=All&fieldValidation=Strict"
    assert cluster.api.request("POST", path, body=TAKEN[case])["kind"] == "RLJob"


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", REFUSED)
def test_the_api_server_refuses_it(cluster: Cluster, case: str):
    manifest, said = REFUSED[case]
    apply_crd(cluster)
    path = "/apis/rlinf.io/v1alpha1/namespaces/default/rljobs?dryRun=All&fieldValidation=Strict"
    with pytest.raises(ApiError) as refused:
        cluster.api.request("POST", path, body=manifest)
    assert said in str(refused.value)
