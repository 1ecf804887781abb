"""An agent that stands still (SIGSTOP) in a pod that runs on: only its driver knows. Its pod is replaced by its word.

Driver and operator are told to wait for seconds, where they wait for a minute each.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_api import names
from tests.cluster.control_plane import (
    ControlPlane,
    Manifest,
    await_replaced,
    further_than,
    is_complete,
    is_stepping,
    pods_of,
)
from tests.cluster.paced import Paced
from tools.testcluster import cgroups
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("a pod has to have run for longer than a start takes before its agent's silence costs it"),
    pytest.mark.timeout(400),
]
LIMIT_S = 120.0
QUICK = {"agent_replaced_after_s": 2}
RUN_S = 45.0
"""How long a pod must have run: longer than the next one, whose place is still called silent, takes to its hello."""
REPLACED_S = 120.0
"""By then the pod has run long enough. An agent is called dead after 4 s, named 2 s later, and has 1 s to end."""


@pytest.fixture
def plane(cluster: Cluster, image: str, tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(cluster, tmp_path, agent_silent_deadline_s=f"{RUN_S:g}") as made:
        yield made


def agent_of(cluster: Cluster, pod: Manifest) -> int:
    """The machine's pid of the first process of its container; that of the pod's other container is a pause."""
    group = f"{cluster.paths.cgroup}/{pod['spec']['nodeName']}"
    found = []
    for pid in cgroups.pids(group):
        try:
            folder = Path(f"/proc/{pid}")
            is_own = pod["metadata"]["uid"] in (folder / "cgroup").read_text()
            within = next(row for row in (folder / "status").read_text().splitlines() if row.startswith("NSpid"))
            words = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        if is_own and within.split()[-1] == "1" and "rlinf_worker" in words:
            found.append(pid)
    [agent] = found
    return agent


def test_an_agent_that_stands_still_costs_its_pod_and_the_job_goes_on(
    cluster: Cluster, namespace: str, plane: ControlPlane, paced: Paced
):
    job = paced.job()
    settings = [{"name": names.ENV_SETTINGS, "value": json.dumps(QUICK)}]
    driver = {"name": names.CONTAINER_DRIVER, "env": settings}
    job["spec"]["driver"] = {"template": {"spec": {"containers": [driver]}}}
    plane.apply(namespace, job)
    before = plane.until(namespace, "cartpole", is_stepping, what="steps", timeout_s=LIMIT_S)

    [pod] = pods_of(plane, namespace, "worker")
    frozen = agent_of(cluster, pod)
    os.kill(frozen, signal.SIGSTOP)
    await_replaced(plane, namespace, "worker", attempt=2, timeout_s=REPLACED_S)
    until(lambda: not Path(f"/proc/{frozen}").exists(), what="the end of the frozen agent", timeout_s=30)
    later = plane.until(
        namespace, "cartpole", lambda job: is_stepping(job) and further_than(before)(job), what="further steps",
        timeout_s=LIMIT_S,
    )  # fmt: skip

    def told() -> list[str]:
        events = cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]
        return [str(event["message"]) for event in events if event["reason"] == "AgentSilent"]

    said, *more = until(told, what="the event", timeout_s=30)
    assert more == []
    node = pod["spec"]["nodeName"]
    assert said.startswith(f"pod cartpole-cpu-0-a1 on node {node} (AgentSilent): its driver hears nothing"), said
    assert later["status"]["firstFailure"]["reason"] == "AgentSilent"
    assert [p["metadata"]["labels"]["rlinf.io/attempt"] for p in pods_of(plane, namespace, "driver")] == ["1"]
    paced.go()
    plane.until(namespace, "cartpole", is_complete, what="Complete", timeout_s=LIMIT_S)
