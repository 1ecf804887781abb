"""Kueue's own scheduler and controllers over real jobs: one quota that fits one job at a time, on a node that its
flavor names and whose taint the flavor tolerates. The second waits; one of more priority takes the place of another,
which goes on later where it was; one that is deactivated, and one whose Workload is deleted by hand.

The quota counts pods: a driver and a worker are a job, whatever they ask of the cores.

Two queues of one cohort lend each other theirs, and take it back; a queue of racks says which nodes a job has. Jobs of
these are pods that nobody starts: where they may be is what is looked at.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import worker_image
from tests.cluster.control_plane import (
    ControlPlane,
    Manifest,
    cartpole,
    condition,
    is_complete,
    is_stepping,
    pods_of,
    refused_calls,
)
from tests.cluster.kueues import KUEUE, LABEL, local_queue, said, workload
from tests.cluster.paced import Paced
from tools.testcluster import binaries
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("jobs wait for each other, and two of them start their pods three times"),
    pytest.mark.timeout(400),
]
QUEUE = "team"
TAINT = {"key": "rlinf.test/fast", "value": "yes", "effect": "NoSchedule"}
FAST = {"rlinf.test/speed": "fast"}
LIMIT_S = 120.0
RACK = "rlinf.test/rack"
COHORT = {"lender": {"reclaimWithinCohort": "Any"}, "borrower": {}}
"""ClusterQueues of one cohort, each with a quota of two pods; what each may do to the others."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its own: with Kueue in it, nobody else's label would be without a provider."""
    name = f"pytest-kueue-{os.getpid()}"
    made = Cluster.up(name, Options(nodes=2, kueue=True), report=binaries.say, owner_pid=os.getpid())
    worker_image.load(made)
    node = made.nodes[1].name
    made.kubectl("label", "node", node, "rlinf.test/speed=fast")
    made.kubectl("taint", "node", node, "rlinf.test/fast=yes:NoSchedule")
    for number in range(2):
        made.kubectl("label", "node", made.nodes[number].name, f"{RACK}=r{number}")
    for manifest in (*quota(), *cohort(), *racks()):
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


def cohort() -> list[Manifest]:
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "2"}
    resources = [{"name": name, "nominalQuota": quantity} for name, quantity in amounts.items()]
    group = {"coveredResources": list(amounts), "flavors": [{"name": "plain", "resources": resources}]}
    return [
        api | {"kind": "ResourceFlavor", "metadata": {"name": "plain"}, "spec": {}},
        *(
            api | {
                "kind": "ClusterQueue", "metadata": {"name": name},
                "spec": {
                    "namespaceSelector": {}, "cohortName": "both", "resourceGroups": [group], "preemption": preemption,
                },
            }
            for name, preemption in COHORT.items()
        ),
    ]  # fmt: skip


def racks() -> list[Manifest]:
    """A ClusterQueue that knows in which rack each node is."""
    api = {"apiVersion": "kueue.x-k8s.io/v1beta2"}
    toleration = {"key": TAINT["key"], "operator": "Exists"}
    resources = [{"name": name, "nominalQuota": "64Gi" if name == "memory" else "64"} for name in ("cpu", "memory")]
    group = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": "racks", "resources": resources}]}
    levels = [{"nodeLabel": RACK}, {"nodeLabel": "kubernetes.io/hostname"}]
    return [
        api | {"kind": "Topology", "metadata": {"name": "racks"}, "spec": {"levels": levels}},
        api | {
            "kind": "ResourceFlavor", "metadata": {"name": "racks"},
            "spec": {
                "nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": "racks", "tolerations": [toleration],
            },
        },
        api | {
            "kind": "ClusterQueue", "metadata": {"name": "racks"},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
    ]  # fmt: skip


def unstarted(name: str, *, queue: str, pods: int, **spec: Any) -> Manifest:
    """Its pods ask for little, and none of them has to run."""
    made = cartpole(name, claim="none", pods=pods, **spec)
    made["metadata"]["labels"] = {LABEL: queue}
    pool = made["spec"]["pools"][0]
    pool["template"] = {}
    pool["slots"] |= {"cpu": "10m", "memory": "64Mi"}
    return made


@pytest.fixture
def queue(cluster: Cluster, namespace: str) -> str:
    made = {
        "apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": {"name": QUEUE},
        "spec": {"clusterQueue": "all"},
    }  # fmt: skip
    cluster.kubectl("-n", namespace, "create", "-f", "-", stdin=json.dumps(made))
    return QUEUE


@pytest.fixture(scope="module")
def plane(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made
        assert refused_calls(made.operator) == []


def queued(manifest: Manifest, *, name: str = "", priority: str = "") -> Manifest:
    labels = {LABEL: QUEUE} | ({"kueue.x-k8s.io/priority-class": priority} if priority else {})
    meta = manifest["metadata"] | ({"name": name} if name else {})
    return {**manifest, "metadata": {**meta, "labels": {**meta.get("labels", {}), **labels}}}


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
    cluster: Cluster, namespace: str, claim: str, queue: str, plane: ControlPlane, paced: Paced
):
    low = queued(paced.job(checkpoint={"uri": paced.checkpoints, "everySteps": 1000}), name="low")
    plane.apply(namespace, low)
    plane.until(namespace, "low", is_stepping, what="the first job's steps", timeout_s=LIMIT_S)

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
    again = plane.until(namespace, "low", is_stepping, what="the first job to go on", timeout_s=LIMIT_S)
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


def test_a_queue_lends_its_quota_to_its_cohort_and_takes_it_back(cluster: Cluster, namespace: str, plane: ControlPlane):
    for name in COHORT:
        local_queue(cluster, namespace, name)

    def admitted(job: Manifest) -> bool:
        return said(job, "Admitted") == ("True", "Admitted")

    # A driver and three workers: twice what its own queue has.
    nowhere = {"spec": {"nodeSelector": {"rlinf.test/nowhere": "yes"}}}
    plane.apply(namespace, unstarted("borrows", queue="borrower", pods=3, template=nowhere))
    plane.until(namespace, "borrows", admitted, what="admission by what the cohort has", timeout_s=LIMIT_S)
    until(lambda: len(pods_of(plane, namespace, "worker")) == 3, what="its pods", timeout_s=30)

    def borrowed() -> bool:
        [used] = cluster.api.get(f"{KUEUE}/clusterqueues/borrower")["status"]["flavorsUsage"]
        return bool({r["name"]: r.get("borrowed") for r in used["resources"]}["pods"] == "2")

    until(borrowed, what="Kueue to count what was borrowed", timeout_s=30)

    # The lender has a job of its own: the other gives back all that it has, and waits until it can borrow again.
    plane.apply(namespace, unstarted("owns", queue="lender", pods=1, template=nowhere))
    waits = plane.until(
        namespace, "borrows", lambda job: said(job, "Admitted") == ("False", "Queued"), what="to wait again",
        timeout_s=LIMIT_S,
    )  # fmt: skip
    assert waits["status"]["state"] == "Queued"
    evicted = {c["type"]: c for c in workload(cluster, namespace, "borrows")["status"]["conditions"]}["Evicted"]
    assert evicted["reason"] == "Preempted"
    plane.until(namespace, "owns", admitted, what="admission of the lender's own", timeout_s=LIMIT_S)
    owners = {p["metadata"]["labels"]["rlinf.io/job"] for p in pods_of(plane, namespace, "worker")}
    assert owners <= {"owns"}
    cluster.kubectl("-n", namespace, "delete", "rljob", "owns", "--wait=false")
    plane.until(namespace, "borrows", admitted, what="what it had borrowed", timeout_s=LIMIT_S)


def test_a_queue_that_knows_racks_has_a_jobs_workers_in_one(cluster: Cluster, namespace: str, plane: ControlPlane):
    local_queue(cluster, namespace, "racks")
    near = {"mode": "Auto", "topology": {"required": RACK}}
    plane.apply(namespace, unstarted("near", queue="racks", pods=4, placement=near))
    plane.until(namespace, "near", lambda job: said(job, "Admitted")[0] == "True", what="admission", timeout_s=LIMIT_S)

    def placed() -> bool:
        found = plane.pods(namespace)
        return len(found) == 5 and all(p["spec"].get("nodeName") for p in found)

    until(placed, what="a node for each pod", timeout_s=60, every_s=0.2)
    workers, (driver,) = pods_of(plane, namespace, "worker"), pods_of(plane, namespace, "driver")
    chosen = workload(cluster, namespace, "near")["status"]["admission"]["podSetAssignments"]
    assert all("topologyAssignment" in one for one in chosen), "and the driver's, as the queue has nothing but racks"
    [node] = {p["spec"]["nodeName"] for p in workers}
    assert all(p["spec"]["nodeSelector"]["kubernetes.io/hostname"] == node for p in workers)
    assert driver["spec"]["nodeSelector"]["kubernetes.io/hostname"] == driver["spec"]["nodeName"]
    assert not any(p["spec"].get("schedulingGates") for p in (*workers, driver))
