"""spec.failurePolicy.rules by what only a cluster has: a pod without a node, or an image, an eviction, a full pod."""

import json
from collections.abc import Iterator

import pytest

from tests.cluster import hungry
from tests.cluster.control_plane import (
    BEGUN_S,
    ControlPlane,
    Manifest,
    cartpole,
    condition,
    is_complete,
    is_stepping,
    pods_of,
)
from tests.cluster.paced import STEPS, Paced
from tools.testcluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

AFTER_S = 3
"""Of the rule; the scheduler's first try follows the pod at once."""
FAILED_S = 60
COMPLETE_S = 150


@pytest.fixture(scope="module")
def plane(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


def with_rules(job: Manifest, *rules: Manifest) -> Manifest:
    job["spec"]["failurePolicy"] = {"rules": list(rules)}
    return job


def is_failed(job: Manifest) -> bool:
    return condition(job, "Failed") == "True"


def test_a_pod_that_finds_no_node_fails_its_job_where_a_rule_says_so(plane: ControlPlane, namespace: str):
    rule = {"name": "no-node", "reasons": ["Unschedulable"], "afterSeconds": AFTER_S, "action": "FailJob"}
    job = with_rules(cartpole(claim="none"), rule)
    job["spec"]["pools"][0]["template"] = {"spec": {"nodeSelector": {"nowhere": "true"}}}
    plane.apply(namespace, job)
    status = plane.until(namespace, "cartpole", is_failed, what="Failed", timeout_s=FAILED_S)["status"]
    [failed] = [c for c in status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "FailureRule"
    assert "rule 'no-node' of spec.failurePolicy says FailJob: pod cartpole-cpu-0-a1" in failed["message"]
    assert status["firstFailure"]["reason"] == "Unschedulable"
    assert status["state"] == "Failed"


def test_an_eviction_restarts_the_job_where_a_rule_says_so(
    cluster: Cluster, plane: ControlPlane, namespace: str, paced: Paced
):
    rule = {"name": "moved", "reasons": ["Evicted"], "action": "RestartJob", "maxRestarts": 1}
    plane.apply(namespace, with_rules(paced.job(), rule))
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
    [worker] = [p["metadata"]["name"] for p in pods_of(plane, namespace, "worker")]
    evict = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": worker, "namespace": namespace}}
    cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{worker}/eviction", body=evict)

    def goes_on(job: Manifest) -> bool:
        return int(job["status"].get("life", 1)) == 2 and is_stepping(job)

    plane.until(namespace, "cartpole", goes_on, what="steps of the second life", timeout_s=COMPLETE_S)
    paced.go()
    status = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)["status"]
    assert status["step"] == STEPS
    assert sorted(entry.partition(" ")[2] for entry in status["restarts"]) == [
        f"{worker} Ruled:moved", "life/2 Program:moved",
    ]  # fmt: skip
    assert status["firstFailure"]["reason"] == "EvictionByEvictionAPI"
    listed = json.loads(cluster.kubectl("-n", namespace, "get", "events", "-o", "json"))["items"]
    [told] = [event for event in listed if event["reason"] == "FailureRule"]
    assert told["involvedObject"]["name"] == worker


def test_an_image_that_nobody_has_fails_its_job_where_a_rule_says_so(plane: ControlPlane, namespace: str):
    """What the kubelet says of it: a rule that names OOMKilled before it does not meet it."""
    rules: list[Manifest] = [
        {"name": "memory", "reasons": ["OOMKilled"], "action": "Suspend"},
        {"name": "no-image", "pool": "cpu", "reasons": ["ImagePull"], "afterSeconds": AFTER_S, "action": "FailJob"},
    ]
    job = with_rules(cartpole(claim="none"), *rules)
    missing = f"localhost/rlinf-worker:{namespace}"
    job["spec"]["pools"][0] |= {"image": missing, "template": {}}
    plane.apply(namespace, job)
    status = plane.until(namespace, "cartpole", is_failed, what="Failed", timeout_s=FAILED_S)["status"]
    [failed] = [c for c in status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "FailureRule"
    assert "rule 'no-image' of spec.failurePolicy says FailJob: pod cartpole-cpu-0-a1" in failed["message"]
    assert missing in failed["message"]


@pytest.mark.parametrize(
    ("victim", "rule"),
    [("worker", {"role": "env", "action": "FailJob"}), ("agent", {"action": "RestartPod", "maxRestarts": 0})],
    ids=["a worker", "its pod"],
)
def test_what_ran_out_of_memory_ends_its_job_where_a_rule_says_so(
    cluster: Cluster, plane: ControlPlane, namespace: str, claim: str, victim: str, rule: Manifest
):
    job = with_rules(
        hungry.job(cluster, namespace, claim=claim, victim=victim),
        {"name": "no-image", "reasons": ["ImagePull"], "action": "Suspend"},
        {"name": "memory", "reasons": ["OOMKilled"], **rule},
    )
    plane.apply(namespace, job)
    status = plane.until(namespace, "cartpole", is_failed, what="Failed", timeout_s=COMPLETE_S)["status"]
    [failed] = [c for c in status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == ("FailureRule" if victim == "worker" else "TooManyRestarts")
    assert "'memory'" in failed["message"]
    first = status["firstFailure"]
    assert (first["pod"], first["exitCode"], first["reason"]) == ("cartpole-cpu-0-a1", 137, "OOMKilled")
    if victim == "worker":
        assert first["role"] == "env"
    assert status["attempt"] == 1
