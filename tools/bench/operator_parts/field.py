"""Where the operator is measured: a test cluster with fake nodes, the control plane as processes, stub drivers.

    with Field.up(say, jobs=1000, pods=10) as field:
        field.plane.operator, field.stubs("/state"), field.cpu_s("kube-apiserver")

Every pod of the namespace goes to a fake node, worker pods by their pool's template, drivers, which have none, by an
admission policy of the API server that gives them the selector and the toleration. kwok makes them Running. The stub
drivers listen in the hub's network namespace on addresses that only exist there, and the operator reaches them as it
reaches pods. All of it ends with the cluster, and the cluster ends with this process.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import psutil

from rlinf_api import names
from tests.cluster.control_plane import PRODUCTION_LEASE, ControlPlane, Process
from tools.testcluster import kwok
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import PYTHON_ENVIRONMENT, Cluster
from tools.testcluster.layout import Options
from tools.testcluster.waiting import until

Manifest = dict[str, Any]
Say = Callable[[str], None]
STUBS: Final = "stub-drivers"
CONTROL_PORT: Final = 7060
SPARE_NODES: Final = 4
SELECTED: Final = {"type": "kwok"}
TOLERATED: Final = {"key": kwok.ANNOTATION, "operator": "Exists"}
DRIVERS: Final = {names.LABEL_COMPONENT: names.COMPONENT_DRIVER}
POLICY: Final = "drivers-to-fake-nodes"
PARTS: Final = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "kwok", STUBS)


class Field:
    """`namespace` is the one whose pods are fake."""

    def __init__(self, cluster: Cluster, *, pods: int, folder: Path) -> None:
        self.cluster, self.pods = cluster, pods
        self.namespace = f"bench-{uuid.uuid4().hex[:6]}"
        self.plane = ControlPlane(cluster, folder)
        self.plane.change(progress_interval_s="30", **PRODUCTION_LEASE)  # as in production

    @classmethod
    @contextmanager
    def up(cls, say: Say, *, jobs: int, pods: int) -> Iterator[Field]:
        """A cluster of its own, with room for that many jobs."""
        name = f"bench-{os.getpid()}"
        nodes = -(-jobs * (pods + 1) // kwok.PODS_PER_NODE) + SPARE_NODES
        try:
            cluster = Cluster.up(name, Options(nodes=1, kwok_nodes=nodes), report=say, owner_pid=os.getpid())
            with (
                tempfile.TemporaryDirectory(prefix="rlinf-bench-") as folder,
                cls(cluster, pods=pods, folder=Path(folder)) as field,
            ):
                yield field
        finally:
            Cluster.down(name)

    def __enter__(self) -> Self:
        try:
            self.plane.__enter__()
            self._make_namespace()
            self._start_stubs()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.__exit__(None, None, None)
        self.cluster.hub.stop(STUBS)
        api = self.cluster.api
        try:
            for kind in ("mutatingadmissionpolicybindings", "mutatingadmissionpolicies"):
                api.delete(f"/apis/admissionregistration.k8s.io/v1/{kind}/{POLICY}")
            api.delete(f"/api/v1/namespaces/{self.namespace}")
        except ApiError:  # the cluster broke, and is taken down next
            return

    # --- what is measured ---------------------------------------------------------------------------------------------

    def cpu_s(self, part: str = "operator") -> float:
        """CPU seconds that it has used since it started, by its own clock: the times in /proc come in whole ticks of
        10 ms, of which a few jobs in a few seconds may use none."""
        return time.clock_gettime(cpu_clock(self._process(part).pid))

    def resident_mib(self) -> float:
        return float(self._process("operator").memory_info().rss) / 2**20

    def calls(self) -> Counter[tuple[str, str]]:
        """Calls of the operator to the API server by (verb, kind), those that were refused included."""
        _, text = self.plane.operator.get("/metrics")
        found: Counter[tuple[str, str]] = Counter()
        for line in text.splitlines():
            if line.startswith("rlinf_operator_api_calls_total{"):
                label = dict(re.findall(r'(\w+)="([^"]*)"', line))
                found[label["verb"], label["kind"]] += round(float(line.rpartition(" ")[2]))
        return found

    def passes(self, operator: Process | None = None) -> float:
        return (operator or self.plane.operator).metric("rlinf_operator_reconcile_seconds_count")

    def stubs(self, path: str, *, method: str = "GET") -> Any:
        """An answer of the stub drivers' control."""
        url = f"http://{self.cluster.addresses.hub}:{CONTROL_PORT}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def job(self, name: str, *, pods: int = 0) -> Manifest:
        """PPO with the field's number of worker pods, or another, one slot each."""
        pods = pods or self.pods
        env = pods - 2
        return {
            "apiVersion": "rlinf.io/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "flow": {
                    "name": "ppo",
                    "steps": 100_000,
                    "config": {"env": "CartPole-v1", "numEnvs": 2 * env, "horizon": 32},
                },
                "roles": [
                    {"name": "env", "kind": "gymnasium", "workers": env},
                    {"name": "rollout", "kind": "torch"},
                    {"name": "actor", "kind": "fsdp"},
                ],
                "pools": [
                    {
                        "name": "cpu", "roles": ["env", "rollout", "actor"], "pods": pods,
                        "slots": {"perPod": 1, "cpu": "100m", "memory": "256Mi"},
                        "template": {"spec": {"nodeSelector": SELECTED, "tolerations": [TOLERATED]}},
                    }
                ],
            },
        }  # fmt: skip

    # --- own ----------------------------------------------------------------------------------------------------------

    def _process(self, part: str) -> psutil.Process:
        if part == "operator":
            return psutil.Process(self.plane.operator.pid)
        found = self.cluster.hub.record.read(part)
        assert found is not None, f"{part} does not run"
        return psutil.Process(found.pid)

    def _make_namespace(self) -> None:
        api = self.cluster.api
        label = {"rlinf.io/bench": self.namespace}
        api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": self.namespace, "labels": label}})
        path = "/apis/admissionregistration.k8s.io/v1"
        api.apply(f"{path}/mutatingadmissionpolicies/{POLICY}", policy())
        api.apply(f"{path}/mutatingadmissionpolicybindings/{POLICY}", binding(label))

        def holds() -> bool:
            """It takes the API server a moment to heed a policy."""
            probe = {
                "metadata": {"name": "probe", "labels": DRIVERS},
                "spec": {"containers": [{"name": "a", "image": "localhost/box:1"}]},
            }
            made = api.request("POST", f"/api/v1/namespaces/{self.namespace}/pods?dryRun=All", body=probe)
            return bool(made["spec"].get("nodeSelector") == SELECTED)

        until(holds, what="pods to be led to fake nodes", timeout_s=20, every_s=0.1)

    def _start_stubs(self) -> None:
        hub, net = self.cluster.hub, self.cluster.addresses.net
        subnet = f"10.{net}.192.0"  # of the pods' /17, beyond every node's /24
        hub.run(["ip", "route", "replace", "local", f"{subnet}/18", "dev", "lo"])
        control = f"{self.cluster.addresses.hub}:{CONTROL_PORT}"
        words = [sys.executable, "-m", "tools.bench.operator_parts.stub_drivers"]
        words += ["--kubeconfig", str(self.cluster.kubeconfig), "--namespace", self.namespace, "--subnet", subnet]
        words += ["--control", control]
        hub.start(STUBS, words, env=PYTHON_ENVIRONMENT)

        def answers() -> bool:
            assert hub.record.read(STUBS) is not None, f"the stub drivers ended:\n{hub.log_tail(STUBS)}"
            try:
                return "drivers" in self.stubs("/state")
            except OSError:
                return False

        until(answers, what="the stub drivers", timeout_s=30, every_s=0.1)


def cpu_clock(pid: int) -> int:
    """Number of the clock of a process's CPU time, as clock_getcpuclockid(3) would give it: all its threads, those that
    ended too, in nanoseconds."""
    return (~pid << 3) | 2


def policy() -> Manifest:
    add = (
        '[JSONPatch{op: "add", path: "/spec/nodeSelector", value: {"type": "kwok"}},'
        ' JSONPatch{op: "add", path: "/spec/tolerations", value:'
        " (has(object.spec.tolerations) ? object.spec.tolerations : []) +"
        f' [Object.spec.tolerations{{key: "{kwok.ANNOTATION}", operator: "Exists"}}]}}]'
    )
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": POLICY},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
                "objectSelector": {"matchLabels": DRIVERS},
            },
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": add}}],
        },
    }


def binding(label: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": POLICY},
        "spec": {"policyName": POLICY, "matchResources": {"namespaceSelector": {"matchLabels": label}}},
    }
