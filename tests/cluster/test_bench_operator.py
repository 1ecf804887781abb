"""The benchmark of the operator, at a size of seconds: that it measures, not what."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench.operator_parts import beside, finished, scale, single
from tools.bench.operator_parts.field import Field
from tools.testcluster import kwok
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
NODES, JOBS, WORKERS, FINISHED = 2, 3, 3, 8
LEASE = "--node-lease-duration-seconds=8"


@pytest.fixture
def fake_nodes(cluster: Cluster) -> Iterator[None]:
    """What `--kwok-nodes` would have given it, with leases for a cluster whose nodes are lost after 10 s of silence."""
    kwok.write_config(cluster.paths.config)
    lease = f"--node-lease-duration-seconds={kwok.LEASE_S}"
    words = kwok.words(cluster.paths, cluster.addresses)
    cluster.hub.start("kwok", [LEASE if word == lease else word for word in words])
    try:
        kwok.make_nodes(cluster.api, NODES, resources=())
        until(lambda: kwok.ready_nodes(cluster.api) == NODES, what="fake nodes", timeout_s=60)
        yield
    finally:
        for index in range(NODES):
            cluster.api.delete(f"/api/v1/nodes/kwok-{index}")
        cluster.hub.stop("kwok")


def test_a_whole_life_of_some_jobs_and_the_writes_of_one_are_measured(
    cluster: Cluster, fake_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scale, "RUN_S", 2.0)
    monkeypatch.setattr(scale, "QUIET_S", 0.5)
    monkeypatch.setattr(single, "RUN_S", 0.5)
    monkeypatch.setattr(finished, "RESYNC_S", 2.0)
    monkeypatch.setattr(finished, "LOOK_S", 6.0)
    said: list[str] = []
    with Field(cluster, pods=WORKERS, folder=tmp_path) as field:
        writes = asyncio.run(single.writes(field))
        large = asyncio.run(beside.measure(field, pods=2 * WORKERS, small=2, say=said.append))
        found = asyncio.run(scale.whole_life(field, jobs=JOBS, failures=2, say=said.append))
        kept = asyncio.run(finished.measure(field, jobs=FINISHED, say=said.append))
        assert cluster.api.get(f"/api/v1/namespaces/{field.namespace}/pods")["items"] == []
    # A pod each, and the plan, Service, NetworkPolicy, two Secrets, ConfigMap and a status at the very least.
    assert set(large) == {"large_job_created", "small_jobs_beside_p99", "small_jobs_alone_p99"}
    assert all(value > 0 for value in large.values())
    assert 0 < kept["finished_gets_per_s"] < 5, "one a second, and some by the edges of seconds"
    assert any("8 finished jobs are there" in line for line in said)
    assert writes >= (WORKERS + 1) + 7
    assert set(found) >= {
        "worker_pods_per_s", "operator_cpu_per_pod", "memory_all_jobs", "failure_to_condition_p99", "restart"
    }  # fmt: skip
    assert all(value > 0 for value in found.values())
    assert 40 < found["memory_all_jobs"] < 400
    assert found["failure_to_condition_p99"] < scale.FAILURE_S
    assert any("they completed and are gone" in line for line in said)
