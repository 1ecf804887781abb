"""An RLRuntime on a genuine API server: a job waits for it, is made with it, and keeps it while it is at work."""

import json
from pathlib import Path

import pytest

from tests.cluster.control_plane import (
    BEGUN_S,
    ControlPlane,
    Manifest,
    await_replaced,
    is_stepping,
    pods_of,
    refused_calls,
)
from tests.cluster.kueues import said
from tests.cluster.paced import Paced
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError
from tools.testcluster.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def runtime(name: str, which: str, **spec: object) -> Manifest:
    agent = {"name": "agent", "env": [{"name": "WHICH", "value": which}]}
    pools = {"slots": {"perPod": 3, "cpu": "100m", "memory": "600Mi"}, "template": {"spec": {"containers": [agent]}}}
    meta = {"name": name}
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLRuntime",
        "metadata": meta,
        "spec": {"poolDefaults": pools} | spec,
    }


def worker(plane: ControlPlane, namespace: str) -> Manifest:
    (found,) = pods_of(plane, namespace, "worker")
    return found


def which(pod: Manifest) -> str:
    env = next(c for c in pod["spec"]["containers"] if c["name"] == "agent")["env"]
    return next(str(e["value"]) for e in env if e["name"] == "WHICH")


def test_a_job_waits_for_its_runtime_and_keeps_what_it_began_with(
    cluster: Cluster, image: str, namespace: str, paced: Paced, tmp_path: Path
):
    name = f"{namespace}.gpu"

    def put(which: str) -> None:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(runtime(name, which)))

    with ControlPlane(cluster, tmp_path) as plane:
        job = paced.job(runtime=name)
        for pool in job["spec"]["pools"]:
            del pool["slots"]
        plane.apply(namespace, job)
        waits = plane.until(
            namespace, "cartpole", lambda j: said(j, "Valid")[1] == "RuntimeNotFound", what="no runtime"
        )
        assert said(waits, "Valid") == ("False", "RuntimeNotFound")
        assert plane.pods(namespace) == []
        try:
            put("one")
            begun = plane.until(namespace, "cartpole", is_stepping, what="a first step", timeout_s=BEGUN_S)
            assert "slots" not in begun["spec"]["pools"][0], "the API server fills nothing in, nor does the operator"
            assert begun["status"]["runtime"]["name"] == name
            pod = worker(plane, namespace)
            assert which(pod) == "one"
            assert len([p for p in pod["spec"]["containers"][0]["ports"] if p["name"].startswith("data-")]) == 3
            put("two")
            plane.touch(namespace, "cartpole")
            plane.until(
                namespace, "cartpole", lambda j: said(j, "Valid") == ("True", "RuntimeChanged"),
                what="that it has changed", timeout_s=90,
            )  # fmt: skip
            assert worker(plane, namespace)["metadata"]["uid"] == pod["metadata"]["uid"]
            cluster.kubectl("-n", namespace, "delete", "pod", pod["metadata"]["name"], "--wait=false")
            await_replaced(plane, namespace, "worker", attempt=2)
            assert which(worker(plane, namespace)) == "one"
            cluster.kubectl(
                "-n", namespace, "patch", "rljob", "cartpole", "--type=merge", "-p", '{"spec":{"suspend":true}}'
            )
            plane.until(
                namespace, "cartpole", lambda j: j["status"]["state"] == "Suspended", what="suspended", timeout_s=120
            )
            cluster.kubectl(
                "-n", namespace, "patch", "rljob", "cartpole", "--type=merge", "-p", '{"spec":{"suspend":false}}'
            )
            until(
                lambda: [which(pod) for pod in pods_of(plane, namespace, "worker")] == ["two"],
                what="a worker of the changed runtime", timeout_s=120,
            )  # fmt: skip
            assert refused_calls(plane.operator) == []
        finally:
            cluster.kubectl("delete", "rlruntime", name, "--ignore-not-found")


def test_a_runtime_that_is_wrong_is_refused_by_the_api_server(cluster: Cluster, namespace: str, tmp_path: Path):
    with ControlPlane(cluster, tmp_path):
        for change, sentence in (
            ({"quee": "a"}, 'unknown field "spec.quee"'),
            ({"poolDefaults": {"slots": {"resource": "a.com/x", "hostMemory": "8 GB"}}}, "should match"),
            ({"poolDefaults": {"slots": {"perPod": 65}}}, "should be less than or equal to 64"),
        ):
            made = runtime(f"{namespace}.wrong", "one", **change)
            words = ("apply", "--dry-run=server", "-f", "-")
            with pytest.raises(ClusterError, match=sentence):
                cluster.kubectl(*words, stdin=json.dumps(made))
