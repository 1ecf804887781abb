"""Plans that change on a running job of a real cluster: one is pinned, a pool grows by a pod and shrinks again, the
operator dies between prepare and commit, a pin that cannot be used is a sentence; bounds are lowered under the plan in
force, and its object is deleted."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import worker_image
from tests.cluster.control_plane import ControlPlane, Manifest, cartpole, condition, is_complete, pods_of
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow("jobs go through several changes of their plan, each with a start of pods"),
    pytest.mark.timeout(600),
]
LIMIT_S = 90.0


def elastic(claim: str) -> Manifest:
    template = worker_image.template(claim)
    slots = {"perPod": 2, "cpu": "100m", "memory": "1Gi"}
    manifest = cartpole(
        claim=claim,
        steps=100_000,
        roles=[
            {"name": "env", "kind": "gymnasium", "workers": {"min": 2, "max": 3}},
            {"name": "rollout", "kind": "torch"},
            {"name": "actor", "kind": f"{worker_image.LIGHT.stem}:Light"},
        ],
        pools=[
            {"name": "sim", "roles": ["env"], "pods": {"min": 1, "max": 2}, "slots": slots, "template": template},
            {"name": "train", "roles": ["rollout", "actor"], "pods": 1, "slots": slots, "template": template},
        ],
        placement={"profileSteps": 0},  # no plan but those that the tests make the scheduler write
    )
    manifest["spec"]["flow"]["config"] |= {"slices": 4, "numEnvs": 8, "epochs": 1}
    return manifest


def bigger(job: Manifest, *, revision: int = 2, pods: int = 2, uid: str = "") -> Manifest:
    """What a person would write: the third env in a second pod."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "rlinf.io/v1alpha1",
        "kind": "RLPlan",
        "metadata": {"name": f"{name}-p{revision}", "labels": {"rlinf.io/job": name}},
        "spec": {
            "job": {"name": name, "uid": uid or job["metadata"]["uid"]},
            "revision": revision,
            "source": "User",
            "pools": [{"name": "sim", "pods": pods}, {"name": "train", "pods": 1}],
            "workers": [
                {"role": "env", "count": 3, "slots": "sim/0/[0-1],sim/1/0"},
                {"role": "rollout", "count": 1, "slots": "train/0/0"},
                {"role": "actor", "count": 1, "slots": "train/0/1"},
            ],
            "channels": [{"name": "trajectories", "microBatch": 2, "depth": 2}],
            "reason": {"code": "Pinned", "message": "by hand"},
        },
    }


def pin(plane: ControlPlane, namespace: str, name: str) -> None:
    change = json.dumps({"spec": {"placement": {"mode": "Pinned", "pin": name}}})
    plane.cluster.kubectl("-n", namespace, "patch", "rljob", "cartpole", "--type", "merge", "-p", change)


def plan_command(plane: ControlPlane, namespace: str, *words: str, code: int = 0) -> str:
    """`rljob plan` as a person with the cluster's kubeconfig."""
    done = subprocess.run(
        [sys.executable, "-m", "rljob", "plan", *words, "-n", namespace],
        env={**os.environ, "KUBECONFIG": str(plane.cluster.kubeconfig)}, capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def of_plan(plane: ControlPlane, namespace: str, name: str) -> dict[str, str]:
    plan = plane.cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rlplans/{name}")
    return {c["type"]: c["status"] for c in (plan.get("status") or {}).get("conditions", [])}


def message(job: Manifest, kind: str) -> str:
    return next(str(c["message"]) for c in job["status"]["conditions"] if c["type"] == kind)


def driver_says(plane: ControlPlane, namespace: str, series: str) -> float:
    """From the driver's own /metrics: the operator may be dead."""
    (driver,) = [p for p in pods_of(plane, namespace, "driver") if p["status"].get("phase") == "Running"]

    def answer() -> str:
        """Empty where it has no time just now."""
        try:
            with urllib.request.urlopen(f"http://{driver['status']['podIP']}:7072/metrics", timeout=5) as found:
                return str(found.read().decode())
        except OSError:
            return ""

    lines = until(answer, what="the metrics of the driver", timeout_s=30).splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{series} ")))


def workers(plane: ControlPlane, namespace: str) -> dict[str, str]:
    """Name to uid."""
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods_of(plane, namespace, "worker")}


def is_under(name: str) -> Any:
    return lambda job: condition(job, "PlanApplied") == "True" and job["status"]["plan"]["current"] == name


def test_a_pinned_plan_grows_a_pool_and_an_older_one_shrinks_it_though_the_operator_dies(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    with ControlPlane(cluster, tmp_path) as plane:
        plane.apply(namespace, elastic(claim))
        running = plane.until(
            namespace,
            "cartpole",
            lambda j: (j.get("status") or {}).get("step", 0) > 2,
            what="step 3",
            timeout_s=LIMIT_S,
        )
        before = workers(plane, namespace)

        plane.apply(namespace, bigger(running, revision=3, uid="another"))
        pin(plane, namespace, "cartpole-p3")
        # A pin may be heard of before the plan that it names: then it names none for a moment.
        job = plane.until(
            namespace, "cartpole",
            lambda j: (
                condition(j, "PlanApplied") == "False"
                and "it is a plan of job uid another" in message(j, "PlanApplied")
            ),
            what="the refusal of the pin",
        )  # fmt: skip
        assert "cartpole-p1 stays in force" in message(job, "PlanApplied")

        plane.apply(namespace, bigger(running))
        pin(plane, namespace, "cartpole-p2")
        until(lambda: len(workers(plane, namespace)) == 3, what="the third pod", timeout_s=LIMIT_S, every_s=0.05)
        plane.operator.kill()
        (new,) = workers(plane, namespace).keys() - before.keys()
        words = ("wait", f"pod/{new}", "--for=condition=Ready", f"--timeout={LIMIT_S:g}s")
        cluster.kubectl("-n", namespace, *words, timeout_s=LIMIT_S + 10)
        step = driver_says(plane, namespace, "rlinf_job_step")
        until(
            lambda: driver_says(plane, namespace, "rlinf_job_step") > step + 5,
            what="steps without an operator", timeout_s=LIMIT_S, every_s=0.2,
        )  # fmt: skip
        assert driver_says(plane, namespace, "rlinf_plan_revision") == 1, "nobody has said commit"

        plane.operator.start()
        job = plane.until(namespace, "cartpole", is_under("cartpole-p2"), what="plan 2 in force", timeout_s=LIMIT_S)
        assert driver_says(plane, namespace, "rlinf_plan_revision") == 2
        until(lambda: of_plan(plane, namespace, "cartpole-p2").get("Applied") == "True", what="Applied", timeout_s=30)
        assert of_plan(plane, namespace, "cartpole-p2")["Prepared"] == "True"
        superseded = {"Applied": "False", "Superseded": "True"}
        until(lambda: of_plan(plane, namespace, "cartpole-p1") == superseded, what="Superseded", timeout_s=30)
        grown = workers(plane, namespace)
        assert {name: uid for name, uid in grown.items() if name in before} == before, "who stays is not touched"
        until(
            lambda: driver_says(plane, namespace, "rlinf_plan_switch_pause_seconds") > 0, what="the pause", timeout_s=30
        )
        print(f"pause {driver_says(plane, namespace, 'rlinf_plan_switch_pause_seconds'):.3f} s")

        said = plan_command(plane, namespace, "history", "cartpole")
        assert "  cartpole-p1  Initial  Superseded" in said
        assert "* cartpole-p2  Pinned  " in said
        assert "workers: 3 env on sim/0/[0-1],sim/1/0" in plan_command(plane, namespace, "explain", "cartpole")
        assert "this job has no plan 'cartpole-p9'" in plan_command(
            plane, namespace, "pin", "cartpole", "cartpole-p9", code=1
        )
        said = plan_command(plane, namespace, "pin", "cartpole", "cartpole-p1")
        assert "cartpole-p1" in said
        assert is_under("cartpole-p1")(plane.job(namespace, "cartpole")), "the command waits until it is"
        until(lambda: workers(plane, namespace) == before, what="the end of the third pod", timeout_s=LIMIT_S)
        job = plane.job(namespace, "cartpole")
        assert job["status"]["plan"]["switches"] == 3
        assert job["status"]["restarts"] == []
        assert condition(job, "Running") == "True"
        assert driver_says(plane, namespace, "rlinf_job_branch") == 0, "no step was made again"
        cluster.kubectl("-n", namespace, "delete", "rljob", "cartpole")


def kept(plane: ControlPlane, namespace: str) -> set[str]:
    """Worker pods that nobody has told to end."""
    pods = pods_of(plane, namespace, "worker")
    return {str(p["metadata"]["name"]) for p in pods if "deletionTimestamp" not in p["metadata"]}


def test_bounds_lowered_and_a_plan_deleted_under_a_running_job_cost_no_pod_before_the_next_is_in_force(
    cluster: Cluster, image: str, namespace: str, claim: str, tmp_path: Path
):
    manifest = elastic(claim)
    env, sim = manifest["spec"]["roles"][0], manifest["spec"]["pools"][0]
    env["workers"], sim["pods"] = {"min": 2, "max": 4}, 2
    with ControlPlane(cluster, tmp_path) as plane:
        plane.apply(namespace, manifest)
        plane.until(
            namespace, "cartpole",
            lambda j: (j.get("status") or {}).get("step", 0) > 2,
            what="step 3", timeout_s=LIMIT_S,
        )  # fmt: skip
        before = workers(plane, namespace)
        surplus = next(name for name in before if "-sim-1-" in name)
        assert len(before) == 3

        change = json.dumps([{"op": "replace", "path": "/spec/pools/0/pods", "value": {"min": 1, "max": 1}}])
        cluster.kubectl("-n", namespace, "patch", "rljob", "cartpole", "--type", "json", "-p", change)

        def has_switched() -> bool:
            there = kept(plane, namespace)  # looked at before the driver is asked: what is gone, was gone under plan 1
            revision = driver_says(plane, namespace, "rlinf_plan_revision")
            assert revision == 2 or surplus in there, "a pod of the plan in force was deleted"
            return revision == 2

        until(has_switched, what="plan 2 in the driver", timeout_s=LIMIT_S, every_s=0.05)
        job = plane.until(namespace, "cartpole", is_under("cartpole-p2"), what="plan 2 in force", timeout_s=LIMIT_S)
        until(lambda: surplus not in workers(plane, namespace), what="the end of the pod", timeout_s=LIMIT_S)
        left = {name: uid for name, uid in before.items() if name != surplus}
        assert workers(plane, namespace) == left
        assert job["status"]["plan"]["switches"] == 2
        print(f"plan 2 by step {driver_says(plane, namespace, 'rlinf_job_step'):g}")

        cluster.kubectl("-n", namespace, "delete", "rlplan", "cartpole-p2")
        plane.until(namespace, "cartpole", is_under("cartpole-p3"), what="one like the deleted", timeout_s=LIMIT_S)
        assert workers(plane, namespace) == left

        end = json.dumps({"spec": {"flow": {"steps": 1}}})  # behind the open step
        cluster.kubectl("-n", namespace, "patch", "rljob", "cartpole", "--type", "merge", "-p", end)
        job = plane.until(namespace, "cartpole", is_complete, what="the end of the flow", timeout_s=2 * LIMIT_S)
        assert job["status"]["step"] >= 3
        assert job["status"]["restarts"] == []
        assert job["status"]["plan"]["current"] == "cartpole-p3"
        assert of_plan(plane, namespace, "cartpole-p1") == {"Applied": "False", "Superseded": "True"}
        events = cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]
        said = " ".join(str(e.get("message", "")) for e in events if e.get("reason") == "PlanNotAllowed")
        assert "cartpole-p1 stays in force, though not allowed any more: it has 2 pods of pool 'sim'" in said
        assert "cartpole-p2 stays in force, though its object is gone; another is asked for" in said
        cluster.kubectl("-n", namespace, "delete", "rljob", "cartpole")
