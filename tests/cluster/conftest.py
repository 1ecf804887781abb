"""A real Kubernetes for tests marked `cluster`: one for the whole run, a namespace of its own for every test.

    cluster     tools.testcluster.cluster.Cluster: kubectl(), api_client(), kubeconfig, addresses, node(), load()
    namespace   name of a new namespace under Pod Security *restricted*; deleted afterwards
    faults      tools.testcluster.faults.Faults; whatever a test broke is mended afterwards
    image       name of the worker image in the cluster
    claim       name of a volume in the namespace with what the worker image leaves out
    paced       tests.cluster.paced.Paced: a job that is in the middle of its work until the test says go()

A machine that cannot run it skips these tests with one sentence; under CI=true that is a failure. The cluster ends with
the test run, also when the run is killed.
"""

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster import pods, worker_image
from tests.cluster.paced import Paced
from tools.testcluster import binaries, requirements
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import MissingRequirement
from tools.testcluster.faults import Faults
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until


def skip_or_fail(why: str) -> None:
    """CI must not go green because its machine cannot run the tests."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"under CI=true cluster tests must run: {why}", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session", autouse=True)
def able_machine() -> None:
    """Asked before any test here: files with a cluster of their own, and tests that only attach, want it no less."""
    try:
        requirements.check(loops=Options().nodes)
        requirements.ensure(requirements.FOR_A_CLUSTER, report=binaries.say)
    except MissingRequirement as err:
        skip_or_fail(str(err))


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
    pods.make_namespace(cluster, name)
    yield name
    try:
        pods.remove_namespace(cluster, name)
    except ApiError as err:
        pytest.fail(f"namespace {name} could not be deleted: {err}", pytrace=False)


@pytest.fixture
def faults(cluster: Cluster, namespace: str) -> Iterator[Faults]:
    """Made after the namespace, so that all is mended when that is removed."""
    yield cluster.faults
    cluster.faults.undo_all()
    # A Ready node stays tainted until the controller manager has seen that it is: no pod goes there meanwhile.
    until(lambda: tainted(cluster) == [], what="the nodes to take pods again", timeout_s=60, every_s=0.2)


def tainted(cluster: Cluster) -> list[str]:
    """Real nodes on which not every pod may be."""
    items = cluster.api.get("/api/v1/nodes")["items"]
    own = {node.name for node in cluster.nodes}
    return [i["metadata"]["name"] for i in items if i["metadata"]["name"] in own and i["spec"].get("taints")]


@pytest.fixture
def claim(cluster: Cluster, namespace: str) -> Iterator[str]:
    """The machine's site-packages in the namespace, for torch."""
    yield cluster.site_packages_volume(namespace, name="site-packages")
    cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-site-packages")


@pytest.fixture
def paced(cluster: Cluster, namespace: str, claim: str) -> Iterator[Paced]:
    with Paced(cluster, namespace, claim=claim) as made:
        yield made
