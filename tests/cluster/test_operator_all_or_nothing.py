"""spec.allOrNothing: two jobs and as many places as one of them needs. Without a scheduler of gangs the half-placed one
gives back what the other lacks; where PodGroups are served no pod of a job has a node before all of them have one.

A place is a node: pods with label `place` keep away from each other. A pod of nobody has one until a job is stuck.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import templates
from rlinf_operator.gangs import SCHEDULERS
from tests.cluster import pods, worker_image
from tests.cluster.control_plane import (
    ControlPlane,
    Manifest,
    cartpole,
    is_complete,
    is_stepping,
    pods_of,
    refused_calls,
)
from tests.cluster.kueues import said
from tools.testcluster import binaries, gangs
from tools.testcluster.cluster import Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
TIMEOUT_S, LIMIT_S = 8, 150.0
"""The first is half of a pause: a try that meets the other job waits for its end. The second is two pauses of at most
60 s in all, what the jobs take, and a slow machine."""
HOLDS_S = 30
"""How long the half-placed one waits: by then the other has been told that it lacks the place, also on a slow machine.
If the place were given back before, the other would have it at once, and lack nothing."""
SMALL = {"numEnvs": 2, "slices": 1, "horizon": 8, "epochs": 1, "minibatches": 1}
JOBS = ("first", "second")
LABEL = {"place": "yes"}
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": LABEL}, "topologyKey": "kubernetes.io/hostname"}
        ]
    }
}


def job(name: str, *, claim: str, pods: int = 2, timeout_s: int = TIMEOUT_S) -> Manifest:
    """One pod on each of the two nodes, and three workers, for whom one pod of two has too few slots."""
    made = cartpole(name, claim=claim, steps=2, pods=pods, allOrNothing={"timeoutSeconds": timeout_s})
    made["spec"]["flow"]["config"] |= SMALL
    made["spec"]["pools"][0]["slots"]["perPod"] = 3 if pods == 1 else 2
    template = made["spec"]["pools"][0]["template"]
    template["metadata"] = {"labels": LABEL}
    template["spec"]["affinity"] = APART
    return made


def blocker(cluster: Cluster, namespace: str) -> str:
    """On the second node."""
    made = pods.pod("blocker", node=cluster.nodes[1].name)
    pods.create(cluster, namespace, {**made, "metadata": {"name": "blocker", "labels": LABEL}})
    return f"/api/v1/namespaces/{namespace}/pods/blocker"


def of_jobs(plane: ControlPlane, namespace: str) -> list[Manifest]:
    return [pod for pod in plane.pods(namespace) if pod["metadata"]["name"] != "blocker"]


def is_given_back(job: Manifest) -> bool:
    return said(job, "Admitted") == ("False", "NotPlaced")


def finds_no_node(job: Manifest) -> bool:
    return said(job, "PodsReady") == ("False", "Unschedulable")


def complete_in_turn(plane: ControlPlane, namespace: str) -> None:
    for name in JOBS:
        plane.until(namespace, name, is_complete, what=f"{name} to complete", timeout_s=LIMIT_S)


def test_a_half_placed_job_gives_back_what_another_lacks_and_both_complete(
    cluster: Cluster, namespace: str, claim: str, image: str, tmp_path: Path
):
    first, second = JOBS
    with ControlPlane(cluster, tmp_path) as plane:
        blocks = blocker(cluster, namespace)
        plane.apply(namespace, job(first, claim=claim, timeout_s=HOLDS_S))
        plane.until(namespace, first, finds_no_node, what="the first to hold one place of two")
        plane.apply(namespace, job(second, claim=claim, pods=1, timeout_s=120))
        plane.until(namespace, second, finds_no_node, what="the second to lack that place")
        stuck = plane.until(namespace, first, is_given_back, what="the first to give back", timeout_s=LIMIT_S)
        [message] = [c["message"] for c in stuck["status"]["conditions"] if c["type"] == "Admitted"]
        assert f"found none within {HOLDS_S} s" in message
        assert stuck["status"]["placement"]["tries"] == 1
        cluster.api.delete(blocks)
        complete_in_turn(plane, namespace)
        lives = [plane.job(namespace, name)["status"]["life"] for name in JOBS]
        assert lives[0] >= 2
        assert lives[1] == 1, "it had its place by what the first gave back"
        assert refused_calls(plane.operator) == []


# --- with a scheduler of gangs ----------------------------------------------------------------------------------------

OTHERS = [
    pytest.param(name, marks=pytest.mark.skipif("GANGS" not in os.environ, reason=f"make test-gangs builds {name}"))
    for name in gangs.ALL
]


@contextmanager
def cluster_with(scheduler: str) -> Iterator[Cluster]:
    name = f"pytest-gangs-{os.getpid()}"
    options = Options(nodes=2, gang_scheduling=True) if scheduler == "kubernetes" else Options(gangs=(scheduler,))
    made = Cluster.up(name, options, report=binaries.say, owner_pid=os.getpid())
    try:
        worker_image.load(made)
        yield made
    finally:
        Cluster.down(name)


@pytest.mark.slow("a cluster of its own, whose scheduler places gangs")
@pytest.mark.parametrize("scheduler", ["kubernetes", *OTHERS])
def test_a_scheduler_of_gangs_places_all_pods_or_none(scheduler: str, tmp_path: Path):
    with cluster_with(scheduler) as cluster:
        namespace = "gangs"
        pods.make_namespace(cluster, namespace)
        claim = cluster.site_packages_volume(namespace, name="site-packages")
        with ControlPlane(cluster, tmp_path, gang_scheduler=scheduler) as plane:
            both_wait_for_a_place_and_hold_none(plane, namespace, claim, scheduler)
            a_pod_that_is_replaced_finds_its_place_alone(plane, namespace, claim, scheduler)
            assert refused_calls(plane.operator) == []


def both_wait_for_a_place_and_hold_none(plane: ControlPlane, namespace: str, claim: str, scheduler: str) -> None:
    blocks = blocker(plane.cluster, namespace)
    for name in JOBS:
        plane.apply(namespace, job(name, claim=claim))
    until(lambda: len(of_jobs(plane, namespace)) == 6, what="the pods of both", timeout_s=60)
    for name in JOBS:
        plane.until(namespace, name, finds_no_node, what=f"{name} to wait")
    waiting = of_jobs(plane, namespace)
    assert {pod["spec"].get("nodeName") for pod in waiting} == {None}
    assert all(names_its_group(pod, scheduler) for pod in waiting)
    assert said(plane.job(namespace, "first"), "Admitted") == ("True", "Admitted")
    plane.cluster.api.delete(blocks)
    complete_in_turn(plane, namespace)
    statuses: list[Any] = [plane.job(namespace, name)["status"] for name in JOBS]
    assert [status["life"] for status in statuses] == [1, 1], "nobody had to give anything back"


def names_its_group(pod: Manifest, scheduler: str) -> bool:
    group = f"rljob-{pod['metadata']['labels']['rlinf.io/job']}"
    return templates.overlay(pod, SCHEDULERS[scheduler].membership(group)) == pod


def a_pod_that_is_replaced_finds_its_place_alone(
    plane: ControlPlane, namespace: str, claim: str, scheduler: str
) -> None:
    name = "third"
    made = job(name, claim=claim, timeout_s=120)  # the pod before takes half a minute to end, and has the place so long
    made["spec"]["flow"]["steps"] = 1_000_000  # of 12 ms each: it is at work until it is deleted
    plane.apply(namespace, made)
    plane.until(namespace, name, is_stepping, what="its first step", timeout_s=LIMIT_S)
    first, *_ = pods_of(plane, namespace, "worker")
    plane.cluster.api.delete(f"/api/v1/namespaces/{namespace}/pods/{first['metadata']['name']}")

    def replaced() -> bool:
        found = [p for p in pods_of(plane, namespace, "worker") if p["metadata"]["labels"]["rlinf.io/attempt"] == "2"]
        return [bool(p["spec"].get("nodeName")) for p in found] == [True]

    plane.until(namespace, name, lambda _: replaced(), what="another pod in its place, with a node", timeout_s=LIMIT_S)
    workers = pods_of(plane, namespace, "worker")
    assert {pod["spec"]["schedulerName"] for pod in workers} == {
        SCHEDULERS[scheduler].pod_scheduler or "default-scheduler"
    }
    named = {pod["metadata"]["labels"]["rlinf.io/attempt"]: names_its_group(pod, scheduler) for pod in workers}
    assert named == {"1": True, "2": False}
    plane.until(
        namespace, name, lambda job: said(job, "PodsReady")[0] == "True" and is_stepping(job), what="it to go on"
    )
