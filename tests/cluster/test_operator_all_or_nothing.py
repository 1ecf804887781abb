"""spec.allOrNothing: two jobs and as many places as one of them needs. Without a scheduler of gangs the half-placed one
gives back what the other lacks; where PodGroups are served no pod of a job has a node before all of them have one.

A place is a node: pods with label `place` keep away from each other. A pod of nobody has one until a job is stuck.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import pods, worker_image
from tests.cluster.control_plane import ControlPlane, Manifest, cartpole, is_complete, refused_calls
from tests.cluster.kueues import said
from tools.testcluster import binaries
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


@pytest.fixture(scope="module")
def gangs() -> Iterator[Cluster]:
    name = f"pytest-gangs-{os.getpid()}"
    made = Cluster.up(name, Options(nodes=2, gang_scheduling=True), report=binaries.say, owner_pid=os.getpid())
    worker_image.load(made)
    yield made
    Cluster.down(name)


@pytest.mark.slow("a cluster of its own, whose scheduler has the gates of gangs")
def test_the_scheduler_of_the_cluster_places_all_pods_or_none(gangs: Cluster, tmp_path: Path):
    namespace = "gangs"
    pods.make_namespace(gangs, namespace)
    claim = gangs.site_packages_volume(namespace, name="site-packages")
    with ControlPlane(gangs, tmp_path) as plane:
        blocks = blocker(gangs, namespace)
        for name in JOBS:
            plane.apply(namespace, job(name, claim=claim))
        until(lambda: len(of_jobs(plane, namespace)) == 6, what="the pods of both", timeout_s=60)
        for name in JOBS:
            plane.until(namespace, name, finds_no_node, what=f"{name} to wait")
        waiting = of_jobs(plane, namespace)
        assert {pod["spec"].get("nodeName") for pod in waiting} == {None}
        groups = {pod["metadata"]["labels"]["rlinf.io/job"]: pod["spec"]["schedulingGroup"] for pod in waiting}
        assert groups == {name: {"podGroupName": f"rljob-{name}"} for name in JOBS}
        assert said(plane.job(namespace, "first"), "Admitted") == ("True", "Admitted")
        gangs.api.delete(blocks)
        complete_in_turn(plane, namespace)
        statuses: list[Any] = [plane.job(namespace, name)["status"] for name in JOBS]
        assert [status["life"] for status in statuses] == [1, 1], "nobody had to give anything back"
        assert refused_calls(plane.operator) == []
