"""A real Kubernetes for tests marked `cluster`: one for the whole run, a namespace of its own for every test.

    cluster     tools.testcluster.cluster.Cluster: kubectl(), api_client(), kubeconfig, addresses, node(), load()
    namespace   name of a new namespace under Pod Security *restricted*; deleted afterwards
    faults      tools.testcluster.faults.Faults; whatever a test broke is mended afterwards
    image       name of the worker image in the cluster
    claim       name of a volume in the namespace with what the worker image leaves out

A machine that cannot run it skips these tests with one sentence; under CI=true that is a failure. The cluster ends with
the test run, also when the run is killed.
"""

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster import worker_image
from tools.testcluster import binaries
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import MissingRequirement
from tools.testcluster.faults import Faults
from tools.testcluster.layout import Options


def skip_or_fail(why: str) -> None:
    """CI must not go green because its machine cannot run the tests."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"under CI=true cluster tests must run: {why}", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    name = f"pytest-{os.getpid()}"
    try:
        made = Cluster.up(
            name, Options(extended_resources=("nvidia.com/gpu=4",)), report=binaries.say, owner_pid=os.getpid()
        )
    except MissingRequirement as err:
        skip_or_fail(str(err))
    yield made
    Cluster.down(name)


@pytest.fixture(scope="session")
def image(cluster: Cluster) -> str:
    """The worker image, loaded."""
    return worker_image.load(cluster)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    name = f"t-{uuid.uuid4().hex[:10]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": name, "labels": labels}})
    yield name
    # Pods at once and without grace: the next test should not share the cores with this one's ends.
    try:
        pods = f"/api/v1/namespaces/{name}/pods?gracePeriodSeconds=0"
        cluster.api.request("DELETE", pods)
        cluster.api.request("DELETE", f"/api/v1/namespaces/{name}")
    except ApiError as err:
        pytest.fail(f"namespace {name} could not be deleted: {err}", pytrace=False)


@pytest.fixture
def faults(cluster: Cluster) -> Iterator[Faults]:
    yield cluster.faults
    cluster.faults.undo_all()


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Iterator[str]:
    """The machine's site-packages in the namespace, for torch."""
    yield cluster.site_packages_volume(namespace, name="site-packages")
    cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-site-packages")
