"""What becomes of a job when its pods are drained, run out of memory, have no image or no room, or come back too late.

All on one operator; a namespace per test. Every deadline below is how long a person may have to wait, with its reason.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from rlinf_api import names
from tests.cluster import hungry, worker_image
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
from tests.cluster.pods import create, pod
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.faults import Faults
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

COMPLETE_S = 120
"""From a pod's start, or of STEPS steps that take no time: 10 s on an idle machine, ten times that when busy."""
DRAIN_S = 60
"""What the product promises of `kubectl drain`: a pod has 30 s of grace, and works on for 17 of them at most."""
WORKER_GRACE_S = 45
"""Of a worker pod: it works on for 32 s at most, by when its successor's agent, 3 s on an idle machine, has said hello.
As much as a node that is drained in DRAIN_S may wait for."""
NAMED_S = 30
"""Until a condition says why a pod does not start: the kubelet's first pull fails within 2 s, the scheduler's first
try at once; a status write follows within a second. Ten times that when busy."""
REPLACED_S = 15 + BEGUN_S
"""A silent node counts as Ready for 10 s here (50 s in production), pods stay bound to it for 5 s more, and the next
one starts."""
RETURN_S = 30
"""An agent that is cut off tries its driver every 2 s at most; the kubelet, which the test starts again, then sees the
container's end."""
PULLED_S = 60
"""The kubelet tries a missing image again after 10, 20, 40 s."""


@pytest.fixture(scope="module")
def plane(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


def says(job: Manifest, kind: str, reason: str) -> str:
    """The condition's message where its reason is this one; empty otherwise."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next((str(c["message"]) for c in listed if (c["type"], c["reason"]) == (kind, reason)), "")


def started(plane: ControlPlane, namespace: str, manifest: Manifest) -> tuple[Manifest, Manifest]:
    """(driver pod, worker pod) of a job that makes steps."""
    began = time.monotonic()
    plane.apply(namespace, manifest)
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
    print(f"apply to the first step: {time.monotonic() - began:.1f} s")
    (driver,), (worker,) = pods_of(plane, namespace, "driver"), pods_of(plane, namespace, "worker")
    return driver, worker


def completed(plane: ControlPlane, namespace: str, *, steps: int) -> Manifest:
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    assert job["status"]["step"] == steps
    return job


def away_from_the_driver(manifest: Manifest) -> Manifest:
    """Its worker pods on another node than its driver, as long as there is one."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {names.LABEL_COMPONENT: names.COMPONENT_DRIVER}},
    }
    rule = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    manifest["spec"]["pools"][0]["template"]["spec"]["affinity"] = {"podAntiAffinity": rule}
    return manifest


# --- drain ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("component", ["driver", "worker"])
def test_a_drained_node_is_empty_within_a_minute_and_the_job_completes(
    plane: ControlPlane, cluster: Cluster, namespace: str, paced: Paced, component: str
):
    manifest = paced.job(checkpoint={"uri": paced.checkpoints, "everySteps": 1000})
    manifest["spec"]["pools"][0]["template"]["spec"]["terminationGracePeriodSeconds"] = WORKER_GRACE_S
    driver, worker = started(plane, namespace, away_from_the_driver(manifest))
    node = (driver if component == "driver" else worker)["spec"]["nodeName"]
    apart = driver["spec"]["nodeName"] != worker["spec"]["nodeName"]
    began = time.monotonic()
    try:
        cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={DRAIN_S}s",
            timeout_s=DRAIN_S + 10,
        )  # fmt: skip
        drained_s = time.monotonic() - began
        paced.go()
        # On the other node, while this one takes no pods.
        job = completed(plane, namespace, steps=STEPS)
    finally:
        cluster.kubectl("uncordon", node)
    print(
        f"drain of the {component}'s node: {drained_s:.1f} s; Complete {time.monotonic() - began:.1f} s after it began"
    )
    assert drained_s < DRAIN_S
    assert job["status"]["attempt"] == 2
    assert [entry.split(" ")[2] for entry in job["status"]["restarts"]] == ["Infrastructure"] * (1 if apart else 2)
    if apart and component == "worker":
        said = cluster.kubectl("-n", namespace, "logs", driver["metadata"]["name"])
        print(*(line for line in said.splitlines() if "handed its work over" in line or '"branch"' in line), sep="\n")
        assert "pod cartpole-cpu-0-a1 has handed its work over to cartpole-cpu-0-a2" in said
        assert "training goes on from" in said, "a gang that is formed anew, on what was saved behind its last step"
        assert "steps are made again" not in said


def evicted(cluster: Cluster, namespace: str, name: str) -> int:
    """The API server's answer: 201, or 429 where a budget keeps the pod."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    try:
        cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/eviction", body=body)
    except ApiError as error:
        return error.status
    return 201


def test_a_driver_that_is_not_to_be_evicted_stays_until_its_job_has_ended(
    cluster: Cluster, plane: ControlPlane, namespace: str, paced: Paced
):
    job = paced.job()
    job["spec"]["driver"] = {"evictable": False}
    driver, _ = started(plane, namespace, job)
    name = driver["metadata"]["name"]
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"

    def is_counted() -> bool:
        [budget] = cluster.api.get(path)["items"]
        status = budget.get("status") or {}
        return (status.get("expectedPods"), status.get("disruptionsAllowed")) == (1, 0)

    until(is_counted, what="the budget to have counted the driver", timeout_s=NAMED_S)
    assert evicted(cluster, namespace, name) == 429
    paced.go()
    plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    until(lambda: not cluster.api.get(path)["items"], what="the end of the budget", timeout_s=NAMED_S)
    assert evicted(cluster, namespace, name) == 201, "what is left of it holds up no drain"


# --- out of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("victim", "attempt"), [("worker", 1), ("agent", 2)])
def test_a_pod_that_runs_out_of_memory_is_named_and_the_job_goes_on(
    plane: ControlPlane, cluster: Cluster, namespace: str, claim: str, victim: str, attempt: int
):
    """The kernel may kill one process, and the container lives on, or the container, and the kubelet says so."""
    plane.apply(namespace, hungry.job(cluster, namespace, claim=claim, victim=victim))
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=BEGUN_S + COMPLETE_S)
    first = job["status"]["firstFailure"]
    print(f"{victim}: {json.dumps(first)}")
    assert first["pod"] == "cartpole-cpu-0-a1"
    assert first["node"] in [node.name for node in cluster.nodes]
    assert (first["exitCode"], first["reason"]) == (137, "OOMKilled")
    assert job["status"]["attempt"] == attempt
    assert job["status"]["step"] == 12
    if victim == "worker":
        assert (first["role"], first["worker"]) == ("env", 0)
        assert "memory limit" in first["message"]


# --- no image, no room ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remedy", ["the manifest names another", "the image appears"])
def test_a_missing_image_is_named_with_its_remedy_and_the_job_starts_once_it_is_there(
    plane: ControlPlane, cluster: Cluster, namespace: str, claim: str, remedy: str
):
    missing = f"localhost/rlinf-worker:{namespace}"
    manifest = cartpole(claim=claim)
    (agent,) = manifest["spec"]["pools"][0]["template"]["spec"]["containers"]
    agent["image"] = missing
    plane.apply(namespace, manifest)
    job = plane.until(
        namespace, "cartpole", lambda job: says(job, "PodsReady", "ImageUnavailable"), what="ImageUnavailable",
        timeout_s=NAMED_S,
    )  # fmt: skip
    message = says(job, "PodsReady", "ImageUnavailable")
    assert "cartpole-cpu-0-a1" in message
    assert missing in message
    assert "correct spec.pools[*].image" in message
    began = time.monotonic()
    if remedy == "the image appears":
        worker_image.load(cluster, name=missing)
        timeout_s = PULLED_S + BEGUN_S
    else:
        agent["image"] = worker_image.NAME
        plane.apply(namespace, manifest)
        timeout_s = COMPLETE_S
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=timeout_s)
    print(f"{remedy}: Complete {time.monotonic() - began:.1f} s later")
    # Where nothing of the pod was wrong but its image's absence it is the same pod.
    assert job["status"]["attempt"] == (1 if remedy == "the image appears" else 2)


@pytest.mark.parametrize("room", ["another pod goes", "the pool is lowered"])
def test_a_pod_without_room_is_named_in_the_schedulers_words_and_the_job_starts_once_there_is_some(
    plane: ControlPlane, cluster: Cluster, namespace: str, claim: str, room: str
):
    """A node has four fake GPUs. Two pods of three each leave no node for a third."""
    manifest = cartpole(claim=claim, pods=1 if room == "another pod goes" else 3)
    manifest["spec"]["pools"][0]["slots"] = {"perPod": 3, "resource": "nvidia.com/gpu", "memory": "1Gi"}
    if room == "another pod goes":
        others = [pod(f"other-{index}") for index in range(len(cluster.nodes))]
        for other in others:
            other["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "3"}}
        create(cluster, namespace, *others)
    plane.apply(namespace, manifest)
    # At first it may be the claim that the scheduler waits for; the condition follows its words.
    job = plane.until(
        namespace, "cartpole", lambda job: "Insufficient nvidia.com/gpu" in says(job, "PodsReady", "Unschedulable"),
        what="Unschedulable for want of GPUs", timeout_s=NAMED_S,
    )  # fmt: skip
    message = says(job, "PodsReady", "Unschedulable")
    assert "cartpole-cpu-" in message
    assert "free resources or lower spec.pools" in message
    if room == "another pod goes":
        cluster.kubectl("-n", namespace, "delete", "pod", "other-0", "--wait=false")
    else:
        manifest["spec"]["pools"][0]["pods"] = 2
        plane.apply(namespace, manifest)
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=COMPLETE_S)
    assert job["status"]["restarts"] == []


# --- back too late ----------------------------------------------------------------------------------------------------


def test_a_pod_that_comes_back_after_its_replacement_is_refused_and_exits_without_being_counted(
    plane: ControlPlane, cluster: Cluster, namespace: str, paced: Paced, faults: Faults
):
    """The node is cut off with its processes alive; contact comes back while the replacement works."""
    driver, worker = started(plane, namespace, away_from_the_driver(paced.job()))
    lost, kept = worker["spec"]["nodeName"], driver["spec"]["nodeName"]
    assert lost != kept, "the scheduler put driver and worker on one node; this test needs them apart"
    pod_path = f"/api/v1/namespaces/{namespace}/pods/{worker['metadata']['name']}"
    # Its last state can be read as long as the finalizer is there.
    keep: dict[str, Any] = {"metadata": {"finalizers": ["test.rlinf.io/keep"]}}
    cluster.api.request("PATCH", pod_path, body=keep, kind="application/merge-patch+json")
    began = time.monotonic()
    faults.cut(lost, kept)
    # Without its kubelet nobody there obeys the deletion: the agent ends by its own judgement, and containerd, which
    # lives on, keeps its exit code.
    cluster.node(lost).stop(f"{lost}-kubelet")
    assert processes_of(worker["metadata"]["uid"])

    def second() -> Manifest | None:
        workers = pods_of(plane, namespace, "worker")
        return next((p for p in workers if p["metadata"]["name"] == "cartpole-cpu-0-a2"), None)

    plane.until(namespace, "cartpole", lambda _: second(), what="the next attempt's pod", timeout_s=REPLACED_S)
    print(f"node lost to replacement created: {time.monotonic() - began:.1f} s")
    # A recovery begins a branch. Running=True and a step alone may still be those of before the cut.
    plane.until(
        namespace, "cartpole", lambda job: job["status"]["policyVersion"]["branch"] == 1 and is_stepping(job),
        what="steps of the next attempt", timeout_s=REPLACED_S,
    )  # fmt: skip
    print(f"node lost to the next step: {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    faults.heal_network()
    uid = worker["metadata"]["uid"]
    until(lambda: not processes_of(uid), what="the old pod's processes to end", timeout_s=RETURN_S)
    print(f"contact back to the old agent's end: {time.monotonic() - began:.1f} s")
    faults.revive(lost)

    def end() -> Manifest:
        statuses = cluster.api.get(pod_path)["status"].get("containerStatuses") or [{}]
        found: Manifest = statuses[0].get("state", {}).get("terminated") or {}
        return found

    ended = until(end, what="the old pod's exit code", timeout_s=RETURN_S)
    assert ended["exitCode"] == names.EXIT_STALE
    assert "attempt 2 has taken its place" in json.loads(ended["message"])["message"]
    job = plane.job(namespace, "cartpole")
    assert condition(job, "Complete") != "True", "the job ended before the old pod did: nothing was tested"
    unkeep = {"metadata": {"finalizers": None}}
    cluster.api.request("PATCH", pod_path, body=unkeep, kind="application/merge-patch+json")
    paced.go()
    job = completed(plane, namespace, steps=STEPS)
    assert job["status"]["attempt"] == 2
    # The loss of the node, once; not the exit of what came back.
    assert [entry.split(" ")[1:] for entry in job["status"]["restarts"]] == [["cartpole-cpu-0-a1", "Infrastructure"]]
    assert job["status"]["policyVersion"] == {"branch": 1, "number": STEPS}


def processes_of(pod_uid: str) -> list[int]:
    """The cluster's nodes are namespaces of this machine, which sees their processes."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(names.ENV_POD_UID) == pod_uid:
                found.append(process.pid)
        except psutil.Error:  # it ended while it was looked at
            continue
    return found
