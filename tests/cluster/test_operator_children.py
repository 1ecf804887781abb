"""What belongs to a job is taken away, or somebody else has its name: it is made again, or the job says whose it is."""

from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.control_plane import (
    BEGUN_S,
    ControlPlane,
    Manifest,
    await_replaced,
    cartpole,
    is_complete,
    is_stepping,
)
from tests.cluster.paced import STEPS, Paced
from tests.cluster.pods import create, pod
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def plane(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


def uid(plane: ControlPlane, namespace: str, child: str) -> str:
    """Empty where it is not there."""
    words = ("get", child, "-o", "jsonpath={.metadata.uid}", "--ignore-not-found")
    return plane.cluster.kubectl("-n", namespace, *words).strip()


def test_children_that_are_deleted_are_made_again_under_a_running_job(
    plane: ControlPlane, namespace: str, paced: Paced
):
    plane.apply(namespace, paced.job())
    plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
    children = {"service/cartpole", "networkpolicy/cartpole", "configmap/cartpole-job"}
    uids = {child: uid(plane, namespace, child) for child in children}
    for child in (*children, "rlplan/cartpole-p1"):
        plane.cluster.kubectl("-n", namespace, "delete", child, "--wait=false")
    plane.cluster.kubectl("-n", namespace, "delete", "secret", "-l", "rlinf.io/job=cartpole", "--wait=false")

    def there() -> bool:
        return all(uid(plane, namespace, child) not in ("", before) for child, before in uids.items())

    until(there, what="the children to be back", timeout_s=60)
    # A plan is never written twice under one revision: the driver may still be at work under the one that is gone.
    until(lambda: uid(plane, namespace, "rlplan/cartpole-p2"), what="the next plan", timeout_s=60)
    # A worker that starts now needs its Secret, too.
    plane.cluster.kubectl("-n", namespace, "delete", "pod", "-l", "rlinf.io/component=worker", "--wait=false")
    await_replaced(plane, namespace, "worker", attempt=2)
    paced.go()
    job = plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
    assert job["status"]["step"] == STEPS


def foreign(kind: str, name: str) -> Manifest:
    """Somebody else's: without owner and labels of ours."""
    versions = {"NetworkPolicy": "networking.k8s.io/v1"}
    spec: dict[str, Manifest] = {
        "Service": {"spec": {"clusterIP": "None", "ports": [{"port": 80}]}},
        "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": {"app": "other"}}}},
        "ConfigMap": {"data": {"other": "1"}},
    }
    return {"apiVersion": versions.get(kind, "v1"), "kind": kind, "metadata": {"name": name}, **spec[kind]}


def test_somebody_elses_objects_with_childrens_names_are_named_and_left_alone(
    plane: ControlPlane, namespace: str, claim: str
):
    """One kind after the other, in the order in which the job would make them."""
    theirs = {
        "Service": foreign("Service", "cartpole"),
        "NetworkPolicy": foreign("NetworkPolicy", "cartpole"),
        "ConfigMap": foreign("ConfigMap", "cartpole-job"),
        "Pod": pod("cartpole-driver-a1"),
    }
    create(plane.cluster, namespace, *theirs.values())
    uids = {kind: uid(plane, namespace, f"{kind}/{of['metadata']['name']}") for kind, of in theirs.items()}
    plane.apply(namespace, cartpole(claim=claim))
    for kind, manifest in theirs.items():
        name = manifest["metadata"]["name"]
        sentence = f"{kind} {namespace}/{name} exists and does not belong to this job"

        def named(job: Manifest, sentence: str = sentence) -> bool:
            return sentence in yaml.safe_dump(job.get("status"), width=10_000)

        plane.until(namespace, "cartpole", named, what=f"the name of the foreign {kind} in the status", timeout_s=60)
        assert uid(plane, namespace, f"{kind}/{name}") == uids[kind]
        found = yaml.safe_load(plane.cluster.kubectl("-n", namespace, "get", f"{kind}/{name}", "-o", "yaml"))
        assert "ownerReferences" not in found["metadata"]
        assert manifest.get("data") == found.get("data")
        plane.cluster.kubectl("-n", namespace, "delete", f"{kind}/{name}")
        plane.touch(namespace, "cartpole")
    plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
