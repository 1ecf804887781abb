"""spec.pools[*].topology, as the cluster's own scheduler takes it: nodes that are labelled as two racks."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.control_plane import ControlPlane, Manifest, cartpole, pods_of
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
RACK = "rlinf.test/rack"
PODS = 4
PLACED_S = 60
"""From apply to a node for each pod: a plan, and a try of the scheduler for each. Ten times that when busy."""


@pytest.fixture(scope="module")
def plane(cluster: Cluster, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="module")
def racks(cluster: Cluster) -> Iterator[list[str]]:
    """Names of the nodes of a rack each."""
    nodes = [node.name for node in cluster.nodes[:2]]
    for node in nodes:
        cluster.kubectl("label", "node", node, f"{RACK}={node}", "--overwrite")
    yield nodes
    for node in nodes:
        cluster.kubectl("label", "node", node, f"{RACK}-")


def job(**pool: Any) -> Manifest:
    """Nothing of it needs to run: a node that is found is what is looked at."""
    made = cartpole(claim="none", pods=PODS)
    made["spec"]["pools"][0] |= {"template": {}, **pool}
    made["spec"]["pools"][0]["slots"] |= {"cpu": "10m", "memory": "64Mi"}
    return made


def nodes_of(plane: ControlPlane, namespace: str) -> Counter[str]:
    found = Counter[str]()

    def placed() -> bool:
        found.clear()
        found.update(p["spec"]["nodeName"] for p in pods_of(plane, namespace, "worker") if p["spec"].get("nodeName"))
        return found.total() == PODS

    until(placed, what="a node for each worker pod", timeout_s=PLACED_S, every_s=0.2)
    return found


@pytest.mark.parametrize(
    ("topology", "per_rack"), [({"required": RACK}, [PODS]), ({"spread": RACK}, [PODS // 2, PODS // 2])], ids=str
)
def test_worker_pods_are_in_one_rack_or_in_all(
    plane: ControlPlane, racks: list[str], namespace: str, topology: Manifest, per_rack: list[int]
):
    plane.apply(namespace, job(topology=topology))
    assert sorted(nodes_of(plane, namespace).values()) == per_rack
