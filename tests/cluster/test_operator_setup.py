"""The operator set up otherwise: for one namespace only, and with certificates that live three minutes."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import worker_image
from tests.cluster.control_plane import ControlPlane, cartpole, condition
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = pytest.mark.cluster
LIFE_S = 180


@pytest.fixture(scope="module")
def image(cluster: Cluster) -> str:
    return worker_image.load(cluster)


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Iterator[str]:
    yield cluster.site_packages_volume(namespace, name="site-packages")
    cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-site-packages")


def is_complete(job: dict[str, Any]) -> bool:
    return condition(job, "Complete") == "True"


def is_running(job: dict[str, Any]) -> bool:
    return condition(job, "Running") == "True"


def further_than(job: dict[str, Any]) -> Callable[[dict[str, Any]], bool]:
    """A new branch begins at a smaller number: without checkpoints, at the first step."""

    def version(of: dict[str, Any]) -> tuple[int, int]:
        found = of["status"]["policyVersion"]
        return int(found["branch"]), int(found["number"])

    return lambda later: version(later) > version(job)


@pytest.mark.timeout(180)
def test_an_operator_of_one_namespace_needs_no_right_elsewhere(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    with ControlPlane(cluster, tmp_path, namespaces=(namespace,)) as plane:
        plane.apply(namespace, cartpole(claim=claim))
        plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=120)
        assert plane.operator.metric('rlinf_operator_api_calls_total{code="403"') == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_certificates_of_three_minutes_are_renewed_while_a_job_runs(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    """After more than a whole life every certificate is another one, and a pod that starts then still gets in."""

    def expiry() -> str:
        config = cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps/cartpole-job")
        return str(config["metadata"]["annotations"]["rlinf.io/certificate-expires"])

    with ControlPlane(cluster, tmp_path, certificate_life_s=str(LIFE_S)) as plane:
        plane.apply(namespace, cartpole(claim=claim, steps=100_000))
        plane.until(namespace, "cartpole", is_running, what="Running", timeout_s=90)
        first, started = expiry(), time.monotonic()
        until(lambda: time.monotonic() - started > LIFE_S + 20, what="a whole life to pass", timeout_s=LIFE_S + 60)
        assert expiry() > first
        assert is_running(plane.job(namespace, "cartpole"))
        assert plane.job(namespace, "cartpole")["status"]["attempt"] == 1
        # A worker that starts now has a new certificate, and meets a driver that is older than a life.
        cluster.kubectl("-n", namespace, "delete", "pod", "-l", "rlinf.io/component=worker", "--wait=false")
        plane.until(
            namespace, "cartpole", lambda job: job["status"]["attempt"] == 2 and is_running(job),
            what="the next worker to work", timeout_s=90,
        )  # fmt: skip
        plane.until(namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what="a further step")
        # The operator, started anew, is let in by a driver whose certificate is of the second life.
        plane.operator.kill()
        plane.operator.start()
        plane.until(namespace, "cartpole", further_than(plane.job(namespace, "cartpole")), what="a step after that")
