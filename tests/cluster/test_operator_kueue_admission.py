"""Kueue's admissions that are not of all, or not for long: of fewer pods than a job asks for, and one taken back as its
pods find no nodes (waitForPodsReady of Kueue's configuration).

A job whose scheduler knows nothing asks for as few pods as its roles need, which no queue can admit in part. So that of
the first test has a profile in its namespace, by which more simulators are worth a pod each.
"""

import datetime as dt
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef
from rlinf_api.profile import Profile, RLProfileSpec, key_of
from tests.cluster import pods, worker_image
from tests.cluster.control_plane import (
    ControlPlane,
    Manifest,
    condition,
    is_complete,
    is_stepping,
    pods_of,
    refused_calls,
)
from tests.cluster.kueues import LABEL, local_queue, said, workload
from tests.cluster.paced import STEPS, Paced
from tools.testcluster import binaries, extras
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("jobs start their pods twice, and one waits until Kueue takes its admission back"),
    pytest.mark.timeout(600),
]
LIMIT_S = 120.0
READY_S = 90
"""Of waitForPodsReady: a start of pods takes five seconds, and many more on busy cores. A start that is cut short by it
makes a life more than the test knows of."""
PATIENT = {
    "waitForPodsReady": {
        "timeout": f"{READY_S}s", "recoveryTimeout": "5s", "requeuingStrategy": {"backoffBaseSeconds": 1},
    }
}  # fmt: skip
BLOCKING = {"waitForPodsReady": {"timeout": "300s", "blockAdmission": True}}
PLACE = {"rlinf.test/place": "there"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Its own: Kueue is started with other configurations."""
    name = f"pytest-admission-{os.getpid()}"
    made = Cluster.up(name, Options(nodes=1, kueue=True), report=binaries.say, owner_pid=os.getpid())
    worker_image.load(made)
    flavor = {"kind": "ResourceFlavor", "metadata": {"name": "plain"}, "spec": {}}
    for manifest in (flavor, cluster_queue("narrow", pods=2), cluster_queue("roomy", pods=16)):
        made.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "kueue.x-k8s.io/v1beta2", **manifest}))
    yield made
    Cluster.down(name)


def cluster_queue(name: str, *, pods: int) -> Manifest:
    """It counts pods, whatever they ask of the cores."""
    amounts = {"cpu": "64", "memory": "256Gi", "pods": str(pods)}
    resources = [{"name": resource, "nominalQuota": quantity} for resource, quantity in amounts.items()]
    group = {"coveredResources": list(amounts), "flavors": [{"name": "plain", "resources": resources}]}
    spec = {"namespaceSelector": {}, "resourceGroups": [group]}
    return {"kind": "ClusterQueue", "metadata": {"name": name}, "spec": spec}


def grow(cluster: Cluster, queue: str, *, pods: int) -> None:
    path = "/spec/resourceGroups/0/flavors/0/resources/2/nominalQuota"
    change = json.dumps([{"op": "replace", "path": path, "value": str(pods)}])
    cluster.kubectl("patch", "clusterqueue", queue, "--type=json", "-p", change)


@pytest.fixture(scope="module")
def plane(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A driver that is told to drain while its worker is away has a step to finish that does not end: 5 s of that."""
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane"), drain_deadline_s="5") as made:
        yield made
        assert refused_calls(made.operator) == []


@contextmanager
def kueue_with(cluster: Cluster, more: Manifest) -> Iterator[None]:
    extras.restart_kueue(cluster, more)
    try:
        yield
    finally:
        extras.restart_kueue(cluster)


def in_queue(manifest: Manifest, queue: str, *, name: str) -> Manifest:
    meta = {**manifest["metadata"], "name": name}
    return {**manifest, "metadata": {**meta, "labels": {**meta.get("labels", {}), LABEL: queue}}}


def message(job: Manifest, kind: str) -> str:
    listed = (job.get("status") or {}).get("conditions") or []
    return next((str(c["message"]) for c in listed if c["type"] == kind), "")


def asked(cluster: Cluster, namespace: str, job: str) -> dict[str, tuple[int, int | None]]:
    """(pods, fewest) of each pod set."""
    sets = workload(cluster, namespace, job)["spec"]["podSets"]
    return {one["name"]: (one["count"], one.get("minCount")) for one in sets}


def granted(cluster: Cluster, namespace: str, job: str) -> dict[str, int]:
    admission = workload(cluster, namespace, job)["status"].get("admission") or {}
    return {one["name"]: one["count"] for one in admission.get("podSetAssignments", [])}


def conditions_of(cluster: Cluster, namespace: str, job: str) -> dict[str, tuple[str, str]]:
    listed = workload(cluster, namespace, job)["status"].get("conditions", [])
    return {c["type"]: (c["status"], c["reason"]) for c in listed}


def until_told(cluster: Cluster, namespace: str, job: str, status: str, reason: str) -> None:
    """Kueue, of the pods of the job."""

    def told() -> bool:
        return conditions_of(cluster, namespace, job).get("PodsReady") == (status, reason)

    until(told, what=f"Kueue to be told of {job}: PodsReady={status}/{reason}", timeout_s=30)


def workers_of(plane: ControlPlane, namespace: str, job: str) -> set[str]:
    found = pods_of(plane, namespace, "worker")
    return {p["metadata"]["name"] for p in found if p["metadata"]["labels"]["rlinf.io/job"] == job}


def plan_of(plane: ControlPlane, namespace: str, name: str) -> Manifest:
    found: Manifest = plane.cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rlplans/{name}")
    return found


def pods_in_plan(plane: ControlPlane, namespace: str, job: str) -> int:
    """Of the plan that its status names."""
    current = plane.job(namespace, job)["status"]["plan"]["current"]
    [pool] = plan_of(plane, namespace, current)["spec"]["pools"]
    return int(pool["pods"])


def plans_of(plane: ControlPlane, namespace: str) -> list[str]:
    """In a word each, for a test that fails."""
    found = plane.cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rlplans")["items"]
    specs = [(p["metadata"]["name"], p["spec"], p.get("status") or {}) for p in found]
    return [
        f"{name} {spec['pools'][0]['pods']} pods {spec['reason']['code']} on {spec['basedOn'].get('revision', 0)}: "
        + ", ".join(f"{c['type']}={c['status']}/{c['reason']}" for c in status.get("conditions", []))
        for name, spec, status in specs
    ]


def wide(paced: Paced, *, name: str, queue: str, per_pod: int = 2) -> Manifest:
    """One to four simulators beside a rollout and an actor, in one to three pods."""
    job = in_queue(paced.job(steps=40), queue, name=name)
    job["spec"]["flow"]["config"] |= {"slices": 4, "numEnvs": 8}
    job["spec"]["roles"][0]["workers"] = {"min": 1, "max": 4}
    [pool] = job["spec"]["pools"]
    pool |= {"pods": {"min": 1, "max": 3}, "slots": {**pool["slots"], "perPod": per_pod}}
    return job


def profile(job: Manifest) -> Manifest:
    """Of an earlier job with this one's key, as the scheduler keeps them: simulators that take 8 ms a turn, so that a
    fourth one is worth a pod."""
    steps, turns, slices = 5, 32, 4

    def number(value: float, count: int = steps) -> Manifest:
        return {"value": value, "count": count}

    def role(name: str, seconds: float, units: int, count: int, **parts: Any) -> Manifest:
        return {
            "name": name, "pool": "cpu", "workers": 1, "seconds": {"compute": number(seconds * count / steps)},
            "batches": [{"size": units, "units": units, "seconds": number(seconds, count)}], **parts,
        }  # fmt: skip

    def channel(name: str, mode: str, producer: str, consumer: str, units: int) -> Manifest:
        ends = {"producer": producer, "consumer": consumer}
        return {"name": name, "mode": mode, **ends, "units": number(units), "bytes": number(64.0 * units)}

    trips = turns * slices
    released = [{"channel": "trajectories", "count": slices * steps, "seconds": [slices * turns * 8e-3]}]
    key = key_of(RLJobSpec.model_validate(job["spec"]))
    report = Profile.model_validate(
        {
            "key": key, "job": {"name": "earlier", "uid": "earlier"}, "revision": 1,
            "firstStep": 4, "lastStep": 3 + steps, "steps": steps, "stepSeconds": number(1.2),
            "roles": [
                role("env", 8e-3, 1, trips * steps, releases=released),
                role("rollout", 1.5e-4, 1, trips * steps),
                role("actor", 5e-2, slices, steps),
            ],
            "channels": [
                channel("segments", "Queue", "", "env", slices),
                channel("trajectories", "Queue", "env", "actor", slices),
                channel("actions", "Cycle", "env", "rollout", trips),
                channel("actions", "Cycle", "rollout", "env", trips),
                channel("weights", "Weights", "actor", "rollout", 1),
            ],
        }
    )  # fmt: skip
    kept = RLProfileSpec(
        key=key, job=JobRef(name="earlier", uid="earlier"), steps=report.last_step,
        updated=dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), reports=[report],
    )  # fmt: skip
    spec = kept.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    meta = {"name": names.profile_name(key)}
    return {"apiVersion": names.API_VERSION, "kind": "RLProfile", "metadata": meta, "spec": spec}


def test_a_job_runs_with_the_pods_that_were_admitted_and_with_all_once_it_is_admitted_anew(
    cluster: Cluster, namespace: str, plane: ControlPlane, paced: Paced
):
    local_queue(cluster, namespace, "narrow")
    job = wide(paced, name="wide", queue="narrow")
    pods.create(cluster, namespace, profile(job))
    plane.apply(namespace, job)

    # A driver and one pod of two slots: three roles find no room there, so it is not admitted with that.
    plane.until(
        namespace, "wide", lambda job: "insufficient quota" in message(job, "Admitted"), what="Kueue's refusal",
        timeout_s=LIMIT_S,
    )  # fmt: skip
    assert asked(cluster, namespace, "wide") == {"driver": (1, None), "cpu": (3, 2)}
    assert granted(cluster, namespace, "wide") == {}

    grow(cluster, "narrow", pods=3)
    started = plane.until(namespace, "wide", is_stepping, what="steps with fewer pods", timeout_s=LIMIT_S)
    assert granted(cluster, namespace, "wide") == {"driver": 1, "cpu": 2}
    assert said(started, "Admitted") == ("True", "Admitted")
    assert "2 of the 3 pods that pool cpu asked for" in message(started, "Admitted")
    assert pods_in_plan(plane, namespace, "wide") == 2
    assert workers_of(plane, namespace, "wide") == {"wide-cpu-0-a1", "wide-cpu-1-a1"}

    # Quota that is free now is for others, of whom one is admitted: an admission does not grow.
    grow(cluster, "narrow", pods=8)
    other = wide(paced, name="other", queue="narrow", per_pod=3)
    other["spec"]["pools"][0]["pods"] = 1
    plane.apply(namespace, other)
    plane.until(namespace, "other", lambda job: said(job, "Admitted")[0] == "True", what="another's admission")
    assert granted(cluster, namespace, "wide") == {"driver": 1, "cpu": 2}
    assert workers_of(plane, namespace, "wide") == {"wide-cpu-0-a1", "wide-cpu-1-a1"}

    # Its next admission is of all.
    for suspend in (True, False):
        change = json.dumps({"spec": {"suspend": suspend}})
        cluster.kubectl("-n", namespace, "patch", "rljob", "wide", "--type=merge", "-p", change)
        if suspend:
            plane.until(namespace, "wide", lambda job: said(job, "Suspended")[0] == "True", what="suspension")
    plane.until(
        namespace, "wide", lambda job: is_stepping(job) and job["status"]["life"] == 2, what="steps with all pods",
        timeout_s=LIMIT_S,
    )  # fmt: skip
    assert asked(cluster, namespace, "wide") == {"driver": (1, None), "cpu": (3, 2)}, plans_of(plane, namespace)
    assert granted(cluster, namespace, "wide") == {"driver": 1, "cpu": 3}
    assert pods_in_plan(plane, namespace, "wide") == 3
    assert len(workers_of(plane, namespace, "wide")) == 3
    paced.go()
    for name in ("wide", "other"):
        plane.until(namespace, name, is_complete, what=f"{name} to complete", timeout_s=LIMIT_S)


def test_kueue_takes_back_what_finds_no_nodes_and_leaves_what_is_ready(
    cluster: Cluster, namespace: str, plane: ControlPlane, paced: Paced
):
    local_queue(cluster, namespace, "roomy")
    with kueue_with(cluster, PATIENT):
        # At work for as long as the other has its lives.
        plane.apply(namespace, in_queue(paced.job(steps=4 * STEPS), "roomy", name="ready"))
        plane.until(namespace, "ready", is_stepping, what="steps of the first", timeout_s=LIMIT_S)
        until_told(cluster, namespace, "ready", "True", "Started")

        late = in_queue(paced.job(), "roomy", name="late")
        late["spec"]["pools"][0]["template"]["spec"]["nodeSelector"] = PLACE
        plane.apply(namespace, late)
        plane.until(
            namespace, "late", lambda job: said(job, "Admitted") == ("True", "Admitted"), what="admission",
            timeout_s=LIMIT_S,
        )  # fmt: skip
        until(lambda: len(workers_of(plane, namespace, "late")) == 1, what="its pod", timeout_s=30)
        evicted = plane.until(
            namespace, "late", lambda job: said(job, "Admitted") == ("False", "Evicted"), what="the end of its time",
            timeout_s=READY_S + 60,
        )  # fmt: skip
        assert "Exceeded the PodsReady timeout" in message(evicted, "Admitted")
        assert "(PodsReadyTimeout)" in message(evicted, "Admitted")

        # It gives back its pods, then its quota, and is admitted again after Kueue's pause: pods of another life.
        until(
            lambda: workers_of(plane, namespace, "late") == {"late-cpu-0-a2"}, what="the pod of its next admission",
            timeout_s=60,
        )  # fmt: skip
        assert workload(cluster, namespace, "late")["status"]["requeueState"]["count"] == 1
        assert conditions_of(cluster, namespace, "late").get("Requeued", ("", ""))[0] == "True"

        # There is a node now.
        node = cluster.nodes[0].name
        cluster.kubectl("label", "node", node, *(f"{key}={value}" for key, value in PLACE.items()))
        again = plane.until(namespace, "late", is_stepping, what="steps of the second", timeout_s=LIMIT_S)
        assert again["status"]["life"] == 2
        until_told(cluster, namespace, "late", "True", "Started")

        # It loses its pod, and there is no node for another: it gives all back once more.
        cluster.kubectl("label", "node", node, *(f"{key}-" for key in PLACE))
        cluster.kubectl("-n", namespace, "delete", "pod", "late-cpu-0-a2", "--grace-period=1", "--wait=false")
        until(
            lambda: workload(cluster, namespace, "late")["status"]["requeueState"].get("count") == 2,
            what="an eviction for the pod that is lost", timeout_s=60,
        )  # fmt: skip
        cluster.kubectl("label", "node", node, *(f"{key}={value}" for key, value in PLACE.items()))
        plane.until(
            namespace, "late", lambda job: is_stepping(job) and job["status"]["life"] == 3, what="its third life",
            timeout_s=LIMIT_S,
        )  # fmt: skip

        # The first one was admitted before it, and its time was over before the other's was.
        kept = plane.job(namespace, "ready")
        assert said(kept, "Admitted") == ("True", "Admitted")
        assert kept["status"]["life"] == 1
        assert "Evicted" not in conditions_of(cluster, namespace, "ready")
        paced.go()
        for name in ("ready", "late"):
            plane.until(namespace, name, is_complete, what=f"{name} to complete", timeout_s=LIMIT_S)
    assert condition(workload(cluster, namespace, "late"), "Evicted") == "False"


def test_where_admissions_wait_for_ready_pods_the_next_job_waits_for_those_of_the_one_before(
    cluster: Cluster, namespace: str, plane: ControlPlane, paced: Paced
):
    local_queue(cluster, namespace, "roomy")
    node = cluster.nodes[0].name
    cluster.kubectl("label", "node", node, *(f"{key}-" for key in PLACE))
    with kueue_with(cluster, BLOCKING):
        first = in_queue(paced.job(), "roomy", name="first")
        first["spec"]["pools"][0]["template"]["spec"]["nodeSelector"] = PLACE
        plane.apply(namespace, first)
        until(lambda: len(workers_of(plane, namespace, "first")) == 1, what="the first's pod", timeout_s=LIMIT_S)
        plane.apply(namespace, in_queue(paced.job(), "roomy", name="second"))
        plane.until(
            namespace, "second", lambda job: "PodsReady" in message(job, "Admitted"), what="Kueue's reason to wait",
            timeout_s=LIMIT_S,
        )  # fmt: skip
        assert said(plane.job(namespace, "second"), "Admitted") == ("False", "Queued")
        assert workers_of(plane, namespace, "second") == set()

        cluster.kubectl("label", "node", node, *(f"{key}={value}" for key, value in PLACE.items()))
        for name in ("first", "second"):
            plane.until(namespace, name, is_stepping, what=f"steps of the {name}", timeout_s=LIMIT_S)
        assert conditions_of(cluster, namespace, "first")["PodsReady"] == ("True", "Started")
        assert [plane.job(namespace, name)["status"]["life"] for name in ("first", "second")] == [1, 1]
