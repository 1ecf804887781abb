"""A job under an API server that misbehaves, or with a node that is lost: it completes, with nothing done twice."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import (
    BEGUN_S,
    PRODUCTION_LEASE,
    ControlPlane,
    cartpole,
    install,
    is_complete,
    is_stepping,
)
from tests.cluster.paced import STEPS as PACED_STEPS
from tests.cluster.paced import Paced
from tools.testcluster.apiproxy import Answer, ApiProxy, CutWatch, Delay, Drop, DropAfter, Mute, Rule
from tools.testcluster.cluster import Cluster
from tools.testcluster.faults import Faults
from tools.testcluster.waiting import until

STEPS = 20
"""Each storm is over writes and watches, of which a job has as many with few steps."""
LONGER = 60
PASSES = "rlinf_operator_reconcile_seconds_count"
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def installed(cluster: Cluster) -> None:
    """Once for the file, where each test begins processes of its own."""
    install(cluster)


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[ApiProxy]:
    with ApiProxy(cluster) as made:
        yield made


OURS = "/apis?/.*/(pods|rljobs|rlplans|services|networkpolicies|secrets|configmaps).*"
STORMS = {
    "watches are cut": [Rule(watch=True, do=CutWatch(after_s=1.0))],
    "watches are too old": [Rule(watch=True, do=CutWatch(after_s=1.0, gone=True))],
    "watches that say nothing": [Rule(watch=True, do=Mute())],
    "500 to reads and writes": [
        Rule(method=method, path=OURS, do=Answer(status=500), times=6) for method in ("GET", "POST", "PUT", "PATCH")
    ],
    "429 to writes": [Rule(method="POST", do=Answer(status=429, retry_after_s=1), times=8)],
    "conflicts on every status write": [
        Rule(method="PUT", path=".*/rljobs/.*/status", do=Answer(status=409, reason="Conflict"), times=12)
    ],
    "conflicts on every patch": [Rule(method="PATCH", path=OURS, do=Answer(status=409, reason="Conflict"), times=4)],
    "writes that are done and not answered": [Rule(method="POST", do=DropAfter(), times=8)],
    "pods, statuses and plans whose writes are done and not answered": [
        # By path: the first writes of a job, which go at once, would use up a count that they share.
        Rule(method="POST", path=".*/pods", do=DropAfter(), times=3),
        Rule(method="DELETE", path=".*/pods/.*", do=DropAfter(), times=2),
        Rule(method="PUT", path=".*/rljobs/.*/status", do=DropAfter(), times=3),
        Rule(method="PATCH", path=".*/rlplans/.*/status", do=DropAfter(), times=2),
    ],
    "connections that break": [Rule(method=method, do=Drop(), times=5) for method in ("GET", "POST", "PUT", "DELETE")],
    "an API server that is slow": [Rule(watch=False, do=Delay(delay_s=0.7))],
}
SETTINGS = {
    "watches that say nothing": {"watch_inactivity_s": "4"},
    "conflicts on every status write": {"retry_max_s": "4"},
}
"""Of the operator, where its own pace would take longer than a test may: 90 s until a silent watch is given up, and
three minutes for twelve refusals of a job whose pods have nothing more to tell."""


@pytest.mark.parametrize("storm", STORMS)
def test_a_job_completes_although(
    cluster: Cluster, image: str, proxy: ApiProxy, namespace: str, claim: str, storm: str, tmp_path: Path
):
    rules = [replace(rule) for rule in STORMS[storm]]
    for rule in rules:
        if rule.watch:  # before the operator opens them
            proxy.add(rule)
    settings = SETTINGS.get(storm, {})
    with ControlPlane(cluster, tmp_path, installed=True, through=proxy.kubeconfig, **settings) as plane:
        for rule in rules:
            if not rule.watch:
                proxy.add(rule)
        plane.apply(namespace, cartpole(claim=claim, steps=STEPS, placement={"profileSteps": 0}))
        job = plane.until(namespace, "cartpole", is_complete, what=f"Complete although {storm}", timeout_s=150)
        # Worker pods are deleted after the status was written that says Complete.
        until(lambda: all(rule.used for rule in rules), what=f"each fault of {storm} to come", timeout_s=30)
        assert job["status"]["attempt"] == 1, "a pod was made twice"
        assert plane.operator.running
        plans = cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rlplans")["items"]
        assert [plan["metadata"]["name"] for plan in plans] == ["cartpole-p1"]


def test_pods_made_without_an_answer_stay_the_only_ones_while_their_watch_says_nothing(
    cluster: Cluster, image: str, proxy: ApiProxy, namespace: str, claim: str, tmp_path: Path
):
    """Nothing but the operator's own knowledge of its writes keeps a pass from taking them for lost."""
    proxy.add(Rule(watch=True, path=".*/pods", do=Mute()))
    settings = {"watch_inactivity_s": "20"}  # longer than what follows, until the watch speaks again
    with ControlPlane(cluster, tmp_path, installed=True, through=proxy.kubeconfig, **settings) as plane:
        lost = proxy.add(Rule(method="POST", path=".*/pods", do=DropAfter(), times=2))
        plane.apply(namespace, cartpole(claim=claim, steps=LONGER))
        plane.until(
            namespace, "cartpole", lambda job: job.get("status", {}).get("attempt", 0) >= 1,
            what="the pods to be counted", timeout_s=60,
        )  # fmt: skip
        assert lost.used == 2
        for _ in range(3):
            passes = plane.operator.metric(PASSES)
            plane.touch(namespace, "cartpole")
            until(partial(has_passed, plane, passes), what="a pass", timeout_s=30)
        proxy.clear()
        job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=150)
        assert job["status"]["attempt"] == 1, "a pod was made twice"
        assert job["status"].get("restarts", []) == []


def has_passed(plane: ControlPlane, before: float) -> bool:
    return plane.operator.metric(PASSES) > before


def test_the_lease_does_not_wait_in_line_behind_pods(cluster: Cluster, proxy: ApiProxy, namespace: str, tmp_path: Path):
    """120 pods at once, 6 s each, over fewer connections: the leader's own calls have 2 s."""
    with ControlPlane(cluster, tmp_path, installed=True, through=proxy.kubeconfig, **PRODUCTION_LEASE) as plane:
        slow = Rule(method="POST", path=f"/api/v1/namespaces/{namespace}/pods.*", do=Delay(delay_s=6.0))
        proxy.add(slow)
        plane.apply(namespace, crowd(pods=120))
        plane.until(namespace, "crowd", lambda _: len(plane.pods(namespace)) > 120, what="all pods", timeout_s=150)
        assert slow.used
        assert plane.operator.running
        assert plane.operator.metric("rlinf_operator_leader") == 1


def crowd(*, pods: int) -> dict[str, Any]:
    """A job whose pods fit nowhere."""
    job = cartpole("crowd", claim="none", pods=pods)
    env = pods - 2
    job["spec"]["flow"]["config"] |= {"numEnvs": env, "slices": env}
    job["spec"]["roles"] = [role | ({"workers": env} if role["name"] == "env" else {}) for role in job["spec"]["roles"]]
    job["spec"]["pools"][0] |= {
        "roles": [role["name"] for role in job["spec"]["roles"]],
        "slots": {"perPod": 1, "cpu": "10m", "memory": "64Mi"},
        "template": {"spec": {"nodeSelector": {"nowhere": "true"}}},
    }
    return job


def test_a_job_goes_on_when_a_node_is_lost(
    cluster: Cluster, image: str, namespace: str, paced: Paced, faults: Faults, tmp_path: Path
):
    with ControlPlane(cluster, tmp_path, installed=True) as plane:
        plane.apply(namespace, paced.job())
        plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
        worker = next(p for p in plane.pods(namespace) if p["metadata"]["labels"]["rlinf.io/component"] == "worker")
        lost = worker["spec"]["nodeName"]
        faults.lose_contact(lost)

        def replaced(_: dict[str, Any]) -> bool:
            workers = [p for p in plane.pods(namespace) if p["metadata"]["labels"]["rlinf.io/component"] == "worker"]
            elsewhere = [p for p in workers if p["spec"].get("nodeName") not in (None, lost)]
            return any(p["status"]["phase"] == "Running" for p in elsewhere)

        plane.until(namespace, "cartpole", replaced, what="the worker on the other node", timeout_s=60)
        # A recovery begins a branch: those are steps of the next worker, and not of the lost one, which may live on.
        plane.until(
            namespace, "cartpole", lambda job: job["status"]["policyVersion"]["branch"] >= 1 and is_stepping(job),
            what="steps of the next worker", timeout_s=150,
        )  # fmt: skip
        paced.go()
        job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=150)
        assert job["status"]["step"] == PACED_STEPS
        assert job["status"]["attempt"] >= 2
