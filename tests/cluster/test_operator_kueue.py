"""Kueue's own scheduler and controllers over real jobs: one quota that fits one job at a time, on a node that its
flavor names and whose taint the flavor tolerates. The second waits; one of more priority takes the place of another,
which goes on later where it was; one that is deactivated, and one whose Workload is deleted by hand.

The quota counts pods: a driver and a worker are a job, whatever they ask of the cores.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import worker_image
from tests.cluster.control_plane import ControlPlane, Manifest, cartpole, condition, is_complete, pods_of, refused_calls
from tests.cluster.paced import FOLDERS, Paced
from tools.testcluster import binaries
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("jobs wait for each other, and two of them start their pods three times"),
    pytest.mark.timeout(400),
]
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
QUEUE, LABEL = "team", "kueue.x-k8s.io/queue-name"
TAINT = {"key": "rlinf.test/fast", "value": "yes", "effect": "NoSchedule"}
FAST = {"rlinf.test/speed": "fast"}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its own: with Kueue in it, nobody else's label would be without a provider."""
    name = f"pytest-kueue-{os.getpid()}"
    made = Cluster.up(name, Options(nodes=2, kueue=True), report=binaries.say, owner_pid=os.getpid())
    worker_image.load(made)
    node = made.nodes[1].name
    made.kubectl("label", "node", node, "rlinf.test/speed=fast")
    made.kubectl("taint", "node", node, "rlinf.test/fast=yes:NoSchedule")
    for manifest in quota():
        made.kubectl("create", "-f", "-", stdin=json.dumps(manifest))
    yield made
    Cluster.down(name)


def quota() -> list[Manifest]:
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    toleration = {"key": TAINT["key"], "operator": "Equal", "value": TAINT["value"], "effect": TAINT["effect"]}
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "2"}
    flavor = {"name": "fast", "resources": [{"name": n, "nominalQuota": q} for n, q in amounts.items()]}
    return [
        api | {
            "kind": "ResourceFlavor", "metadata": {"name": "fast"},
            "spec": {"nodeLabels": FAST, "nodeTaints": [TAINT], "tolerations": [toleration]},
        },
        api | {
            "kind": "ClusterQueue", "metadata": {"name": "all"},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [{"coveredResources": list(amounts), "flavors": [flavor]}],
            },
        },
        api | {"kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}, "value": 1000},
    ]  # fmt: skip


@pytest.fixture
def queue(cluster: Cluster, namespace: str) -> str:
    made = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": QUEUE},
        "spec": {"clusterQueue": "all"},
    }  # fmt: skip
    cluster.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(made))
    return QUEUE


@pytest.fixture
def plane(cluster: Cluster, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path) as made:
        yield made
        assert refused_calls(made.operator) == []


def queued(manifest: Manifest, *, name: str = "", priority: str = "") -> Manifest:
    labels = {LABEL: QUEUE} | ({"kueue.x-k8s.io/priority-class": priority} if priority else {})
    meta = manifest["metadata"] | ({"name": name} if name else {})
    return {**manifest, "metadata": {**meta, "labels": {**meta.get("labels", {}), **labels}}}


def said(job: Manifest, kind: str) -> tuple[str, str]:
    """(status, reason)."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next(((c["status"], c["reason"]) for c in listed if c["type"] == kind), ("", ""))


def workload(cluster: Cluster, namespace: str, job: str) -> Manifest:
    found: Manifest = cluster.api.get(f"{KUEUE}/namespaces/{namespace}/workloads/rljob-{job}")
    return found


def requests(found: Manifest) -> list[Manifest]:
    return [s["template"]["spec"]["containers"][0]["resources"]["requests"] for s in found["spec"]["podSets"]]


def activate(cluster: Cluster, namespace: str, job: str, *, active: bool) -> None:
    path = f"{KUEUE}/namespaces/{namespace}/workloads/rljob-{job}"
    cluster.api.request("PATCH", path, body={"spec": {"active": active}}, kind="application/merge-patch+json")


def test_the_second_of_two_jobs_waits_and_both_run_where_their_flavor_says(
    cluster: Cluster, namespace: str, claim: str, queue: str, plane: ControlPlane
):
    small = {"numEnvs": 2, "slices": 1, "horizon": 8, "epochs": 1, "minibatches": 1}
    for name in ("first", "second"):
        job = cartpole(name, claim=claim, steps=3)
        job["spec"]["flow"]["config"] |= small
        plane.apply(namespace, queued(job))
        if name == "first":
            plane.until(namespace, name, lambda job: said(job, "Admitted") == ("True", "Admitted"), what="admission")
    waits = plane.until(
        namespace, "second", lambda job: said(job, "Admitted") == ("False", "Queued"), what="the second to wait"
    )
    assert waits["status"]["state"] == "Queued"
    asked = workload(cluster, namespace, "second")
    edit = [{"op": "add", "path": "/spec/pools/0/slots/memory", "value": "700Mi"}]
    cluster.kubectl("-n", namespace, "patch", "rljob", "second", "--type=json", "-p", json.dumps(edit))

    def changed() -> bool:
        now = workload(cluster, namespace, "second")
        assert now["metadata"]["uid"] == asked["metadata"]["uid"], "it keeps its place"
        return bool(requests(now) != requests(asked))

    until(changed, what="the Workload to ask for what the job needs now", timeout_s=30)
    plane.until(namespace, "first", is_complete, what="the first to complete", timeout_s=LIMIT_S)
    nodes: set[str] = set()
    specs: list[dict[str, Any]] = []

    def done() -> bool:
        of_second = [p for p in plane.pods(namespace) if p["metadata"]["labels"]["rlinf.io/job"] == "second"]
        specs.extend(p["spec"] for p in of_second)
        nodes.update(p["spec"]["nodeName"] for p in of_second if p["spec"].get("nodeName"))
        return is_complete(plane.job(namespace, "second"))

    until(done, what="the second to complete", timeout_s=LIMIT_S, every_s=0.2)
    assert nodes == {cluster.nodes[1].name}
    assert condition(workload(cluster, namespace, "first"), "PodsReady") == "True"
    assert all(spec["nodeSelector"] == FAST for spec in specs)
    for name in ("first", "second"):
        until(
            lambda name=name: condition(workload(cluster, namespace, name), "Finished") == "True",  # type: ignore[misc]
            what=f"the Workload of {name} to be finished", timeout_s=30,
        )  # fmt: skip


def test_an_evicted_job_goes_on_later_where_it_was(
    cluster: Cluster, namespace: str, claim: str, queue: str, plane: ControlPlane
):
    folder = Path(tempfile.mkdtemp(prefix="rlinf-kueue-", dir=FOLDERS))
    folder.chmod(0o777)
    cluster.site_packages_volume(namespace, name="checkpoints", folder=folder)
    try:
        with Paced(cluster, namespace, claim=claim) as paced:
            _evicted_and_back(cluster, namespace, claim, plane, paced)
    finally:
        cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-checkpoints")
        shutil.rmtree(folder, ignore_errors=True)


def _evicted_and_back(cluster: Cluster, namespace: str, claim: str, plane: ControlPlane, paced: Paced) -> None:
    low = queued(paced.job(checkpoint={"uri": "file:///checkpoints", "everySteps": 1000}), name="low")
    template = low["spec"]["pools"][0]["template"]["spec"]
    template["containers"][0]["volumeMounts"].append({"name": "checkpoints", "mountPath": "/checkpoints"})
    template["volumes"].append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}})
    plane.apply(namespace, low)

    def steps(job: Manifest) -> bool:
        return condition(job, "Running") == "True" and (job["status"].get("step") or 0) >= 1

    plane.until(namespace, "low", steps, what="the first job's steps", timeout_s=LIMIT_S)

    # One of more priority takes its place, once its checkpoint is written and its pods are gone.
    urgent = cartpole("urgent", claim=claim, steps=2)
    urgent["spec"]["flow"]["config"] |= {"numEnvs": 2, "slices": 1, "horizon": 8, "epochs": 1, "minibatches": 1}
    plane.apply(namespace, queued(urgent, priority="urgent"))
    evicted = plane.until(
        namespace, "low", lambda job: said(job, "Suspended") == ("True", "SuspendedByQueue"), what="eviction",
        timeout_s=LIMIT_S,
    )  # fmt: skip
    assert evicted["status"]["state"] == "Queued"
    left_at = evicted["status"]["step"]
    assert evicted["status"]["checkpoint"]["step"] == left_at >= 1
    plane.until(namespace, "urgent", is_complete, what="the urgent job to complete", timeout_s=LIMIT_S)
    again = plane.until(namespace, "low", steps, what="the first job to go on", timeout_s=LIMIT_S)
    assert again["status"]["step"] >= left_at
    assert again["status"]["life"] == 2

    # Deactivated: it stays away until somebody activates it.
    activate(cluster, namespace, "low", active=False)
    stopped = plane.until(
        namespace, "low",
        lambda job: said(job, "Suspended") == ("True", "SuspendedByQueue")
        and said(job, "Admitted") == ("False", "Deactivated"),
        what="deactivation", timeout_s=LIMIT_S,
    )  # fmt: skip
    assert stopped["status"]["state"] == "Suspended"
    until(
        lambda: "admission" not in workload(cluster, namespace, "low")["status"], what="quota given back", timeout_s=30
    )
    assert pods_of(plane, namespace, "worker") == []
    activate(cluster, namespace, "low", active=True)
    plane.until(namespace, "low", lambda job: said(job, "Admitted")[0] == "True", what="admission", timeout_s=LIMIT_S)
    paced.go()

    # Deleted by hand: it is asked for again, and the job goes on when it is admitted again.
    before = workload(cluster, namespace, "low")["metadata"]["uid"]
    cluster.api.delete(f"{KUEUE}/namespaces/{namespace}/workloads/rljob-low")
    plane.until(namespace, "low", is_complete, what="the first job to complete", timeout_s=LIMIT_S)
    assert workload(cluster, namespace, "low")["metadata"]["uid"] != before
