"""Operator and scheduler as processes of this machine, against the test cluster, with the rights of access.py alone.

    with ControlPlane(cluster, tmp_path) as plane:
        plane.apply(namespace, job("cartpole", claim=...))
        plane.until(namespace, "cartpole", lambda job: condition(job, "Complete") == "True", what="Complete")
        plane.operator.kill(); plane.operator.start()

Each logs in with the token of a service account, whose Roles are made from the tables in access.py: a verb that is
missing there fails a test here. They reach pods by their addresses, as pods reach them.
"""

import base64
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from rlinf_operator import access
from rlinf_operator.process import ProcessSettings
from rlinf_operator.settings import DEFAULTS
from tests.cluster import worker_image
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import REPOSITORY, Cluster
from tools.testcluster.waiting import until

NAMESPACE = "rlinf-system"
PLURALS = ("rljobs", "rlplans", "rlprofiles", "rlruntimes")  # what has a CRD of ours
Manifest = dict[str, Any]
START_S, STOP_S = 60.0, 18.0
"""A start is mostly Python's imports, 2 s on an idle machine; a stop has the grace period that the chart gives it."""
BEGUN_S = 240.0
"""From apply to a job's first step, or its pods' next one: 6 s on an idle machine, forty times that on a busy one."""
LEASE = {"lease_s": "60", "lease_renew_deadline_s": "40"}
"""A leader that cannot renew ends itself, and nobody starts it again as a kubelet would: where etcd stands still for
10 s, as it may on a busy disk, that is not what a test is about."""
PRODUCTION_LEASE = {name: f"{getattr(ProcessSettings(), name):g}" for name in LEASE}
"""For what is about who leads, and how soon the next one does."""
UNANSWERED = (0, 429, 500, 503, 504)
"""An API server that has no time just now: whoever waits asks again."""
LOWEST_PORT = 20_000
MAX_LOGS = 6  # pods whose last words a failed test shows


def free_port() -> int:
    """Below those that the kernel gives to connections: a process that is started again finds it free again."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = range(LOWEST_PORT, kernels)
    for port in [*random.sample(own, min(100, len(own))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("no port of 127.0.0.1 is free")


class Process:
    """`python -m MODULE` with its log in a file; started and ended by its own pid."""

    def __init__(
        self, name: str, module: str, *, environment: Callable[[], dict[str, str]], folder: Path, http_port: int
    ) -> None:
        self.name, self.module, self.http_port = name, module, http_port
        self.log = folder / f"{name}.log"
        self._environment = environment
        self._scratch = folder  # the client writes its certificates into TMPDIR, and a killed one leaves them there
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module], env=self._environment() | {"TMPDIR": str(self._scratch)},
                cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not stop within {STOP_S:g} s:\n{self.tail()}") from None

    def kill(self) -> None:
        """Also from another thread than the one that starts the next."""
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(timeout=10)

    def get(self, path: str) -> tuple[int, str]:
        """(status, text); status 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, line: str) -> float:
        """The value of the series that starts with `line`; 0 where it is not there."""
        found = [row.rpartition(" ")[2] for row in self.metrics().splitlines() if row.startswith(line)]
        return sum(map(float, found))

    def metrics(self) -> str:
        """All of them, of a process that runs: tests look for what must not be there, and no answer says nothing."""

        def answer() -> str:
            status, text = self.get("/metrics")
            return text if status == 200 else ""

        return until(answer, what=f"the metrics of {self.name}", timeout_s=30)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


class ControlPlane:
    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *,
        system: str = NAMESPACE,
        installed: bool = False,
        through: Path | None = None,
        namespaces: Sequence[str] = (),
        selector: str = "",
        **settings: str,
    ) -> None:
        """`system`: its own namespace, of which two beside each other have one each, and each its `namespaces`.
        `installed`: `install` was called for these.
        `through`: the kubeconfig of a proxy that the operator talks to; the scheduler talks to the API server.
        `namespaces`: those that the operator serves, with Roles in them and no ClusterRole; `selector`: by labels."""
        self._system, self._installed, self._namespaces = system, installed, tuple(namespaces)
        self.cluster, self._folder, self._settings = cluster, folder, settings | {"watch_namespace_selector": selector}
        self._kubeconfig_of = {"rlinf-operator": through or cluster.kubeconfig, "rlinf-scheduler": cluster.kubeconfig}
        self._is_selected = bool(selector)
        self._scheduler_port = free_port()
        self.operators: list[Process] = []
        self._numbers = itertools.count()
        self.scheduler = self._process("scheduler", "rlinf_scheduler", self._scheduler_environment)

    @property
    def operator(self) -> Process:
        return self.operators[0]

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.add_operator().start()
            self._wait_ready(self.operator)
            self._mount_scheduler_secret()
            self.scheduler.start()
            self._wait_ready(self.scheduler)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.operators, self.scheduler):
            process.kill()

    def add_operator(self) -> Process:
        name = f"operator-{next(self._numbers)}"  # also its identity: never again that of another
        made = self._process(name, "rlinf_operator", lambda port: self._operator_environment(name, port))
        self.operators.append(made)
        return made

    def change(self, **settings: str) -> None:
        """Settings of every operator that is started from now on."""
        self._settings = self._settings | settings

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def apply(self, namespace: str, manifest: Manifest) -> None:
        self.cluster.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(manifest))

    def job(self, namespace: str, name: str) -> Manifest:
        found: Manifest = self.cluster.api.get(f"/apis/rlinf.io/v1alpha1/namespaces/{namespace}/rljobs/{name}")
        return found

    def touch(self, namespace: str, name: str) -> None:
        """A pass over the job at once, also where it is to be repeated later."""
        mark = f"touched={time.monotonic_ns()}"
        self.cluster.kubectl("-n", namespace, "annotate", "rljob", name, mark, "--overwrite")

    def pods(self, namespace: str) -> list[Manifest]:
        found: list[Manifest] = self.cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return found

    def until(
        self, namespace: str, name: str, holds: Callable[[Manifest], object], *, what: str, timeout_s: float = 60
    ) -> Manifest:
        """The first state of the job for which `holds` is true."""
        seen: list[Manifest] = []

        def look() -> bool:
            try:
                seen[:] = [self.job(namespace, name)]
                return bool(holds(seen[0]))
            except ApiError as error:
                if error.status not in UNANSWERED:
                    raise
                return False

        try:
            until(look, what=what, timeout_s=timeout_s, every_s=0.2)
        except Exception:
            print(self.describe(namespace, name))
            raise
        return seen[0]

    def describe(self, namespace: str, name: str) -> str:
        """What a person would want to see of a job that did not do what was expected."""
        parts = [
            yaml.safe_dump(self.job(namespace, name).get("status")),
            self.cluster.kubectl("-n", namespace, "get", "pods", "-o", "wide", check=False),
            self.cluster.kubectl("-n", namespace, "get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:],
            *(process.tail() for process in self.operators),
            *(self._last_words(namespace, pod["metadata"]["name"]) for pod in self.pods(namespace)[:MAX_LOGS]),
        ]
        return "\n---\n".join(parts)

    def _last_words(self, namespace: str, pod: str) -> str:
        words = ("-n", namespace, "logs", pod, "--all-containers", "--tail=40")
        return f"{pod}:\n{self.cluster.kubectl(*words, check=False)[-6000:]}"

    def kubeconfig(self, account: str) -> str:
        """A file: who logs in with it is that account."""
        path = self._folder / f"{account}.kubeconfig"
        if not path.exists():
            token = self.cluster.kubectl("-n", self._system, "create", "token", account, "--duration=2h").strip()
            known = yaml.safe_load(self._kubeconfig_of[account].read_text())
            known["users"] = [{"name": account, "user": {"token": token}}]
            for context in known["contexts"]:
                context["context"]["user"] = account
            path.write_text(yaml.safe_dump(known))
        return str(path)

    # --- own ----------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if not self._installed:
            install(
                self.cluster, system=self._system, namespaces=self._namespaces, selected=self._is_selected,
                gang_scheduler=self._settings.get("gang_scheduler", DEFAULTS.gang_scheduler),
            )  # fmt: skip
        # One that an operator before left may be of another CA, or nearly over.
        self.cluster.api.delete(f"/api/v1/namespaces/{self._system}/secrets/{access.SCHEDULER_SECRET}")
        self._folder.mkdir(parents=True, exist_ok=True)

    def _process(self, name: str, module: str, environment: Callable[[int], dict[str, str]]) -> Process:
        port = free_port()
        return Process(name, module, environment=lambda: environment(port), folder=self._folder, http_port=port)

    def _operator_environment(self, name: str, port: int) -> dict[str, str]:
        settings = {
            "namespace": self._system, "identity": name, "kubeconfig": self.kubeconfig("rlinf-operator"),
            "http_host": "127.0.0.1", "http_port": str(port),
            "scheduler_address": f"127.0.0.1:{self._scheduler_port}",
            "worker_image": worker_image.NAME, "driver_image": worker_image.NAME,
            "watch_namespaces": ",".join(self._namespaces),
            "progress_interval_s": "1",  # tests look at the step to know where a job is
            **LEASE,
            **self._settings,
        }  # fmt: skip
        return os.environ | {f"RLINF_OPERATOR_{key.upper()}": value for key, value in settings.items()}

    def _scheduler_environment(self, port: int) -> dict[str, str]:
        settings = {
            "kubeconfig": self.kubeconfig("rlinf-scheduler"), "tls_dir": str(self._folder / "scheduler-tls"),
            "address": f"127.0.0.1:{self._scheduler_port}", "http_host": "127.0.0.1", "http_port": str(port),
        }  # fmt: skip
        return os.environ | {f"RLINF_SCHEDULER_{key.upper()}": value for key, value in settings.items()}

    def _mount_scheduler_secret(self) -> None:
        """What the kubelet would do."""
        folder = self._folder / "scheduler-tls"
        folder.mkdir(exist_ok=True)
        path = f"/api/v1/namespaces/{self._system}/secrets/{access.SCHEDULER_SECRET}"
        for name, content in self.cluster.api.get(path)["data"].items():
            (folder / name).write_bytes(base64.b64decode(content))

    def _wait_ready(self, process: Process) -> None:
        def ready() -> bool:
            assert process.running, f"{process.name} ended:\n{process.tail()}"
            return process.get("/readyz")[0] == 200 and (
                process is self.scheduler or process.metric("rlinf_operator_leader") == 1.0
            )

        until(ready, what=f"{process.name} to be ready", timeout_s=START_S, every_s=0.1)
        if process is not self.scheduler:
            secret = f"/api/v1/namespaces/{self._system}/secrets"
            until(
                lambda: access.SCHEDULER_SECRET in str(self.cluster.api.get(secret)),
                what="the scheduler's certificate", timeout_s=START_S, every_s=0.1,
            )  # fmt: skip


def install(
    cluster: Cluster,
    *,
    system: str = NAMESPACE,
    namespaces: Sequence[str] = (),
    selected: bool = False,
    gang_scheduler: str = DEFAULTS.gang_scheduler,
) -> None:
    """The CRDs, and the rights in `namespaces`, or everywhere. `selected`: those of an operator that goes by labels."""
    for crd in sorted((REPOSITORY / "crds").glob("*.yaml")):
        cluster.kubectl("apply", "-f", str(crd))
    cluster.kubectl("wait", "--for=condition=Established", *(f"crd/{plural}.rlinf.io" for plural in PLURALS))
    for plural in PLURALS:
        until(partial(served, cluster, plural), what=f"the API of {plural}", timeout_s=30)
    objects: list[Manifest] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}]
    for account, rules in (("rlinf-operator", access.OPERATOR), ("rlinf-scheduler", access.SCHEDULER)):
        held = [rule for rule in rules if rule.gang_scheduler in ("", gang_scheduler)]
        objects += rights(account, held, system=system, namespaces=namespaces, selected=selected)
        if namespaces:
            cluster.kubectl("delete", "clusterrolebinding", account, "--ignore-not-found")
    together = {"apiVersion": "v1", "kind": "List", "items": objects}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(together))


def refused_calls(operator: Process) -> list[str]:
    """Calls that RBAC or a policy refused, and reads of Secrets but of the CA: access.py would be wrong. And fields
    that the API server does not know.

    By RBAC's sentence and not by code="403": so answers a namespace as well that is being deleted with its job.
    """
    calls = [line for line in operator.metrics().splitlines() if line.startswith("rlinf_operator_api_calls_total")]
    wrong = [
        line
        for line in calls
        if 'code="401"' in line or ('kind="Secret"' in line and ('verb="list"' in line or 'verb="watch"' in line))
    ]
    said = ("is forbidden: User", "of RLJobs alone", "strict decoding error")
    return wrong + [line for line in operator.log.read_text().splitlines() if any(words in line for words in said)]


def served(cluster: Cluster, plural: str) -> bool:
    """Told of by discovery and answered: a moment after its CRD was Established."""
    try:
        known = cluster.api.get("/apis/rlinf.io/v1alpha1")["resources"]
        cluster.api.get(f"/apis/rlinf.io/v1alpha1/{plural}?limit=1")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return plural in [resource["name"] for resource in known]


def rights(
    account: str,
    rules: Sequence[access.AccessRule],
    *,
    system: str,
    namespaces: Sequence[str] = (),
    selected: bool = False,
) -> list[Manifest]:
    """A service account of the namespace `system` with exactly these rules, everywhere or in the namespaces."""

    def granted(scope: str, namespace: str | None) -> list[Manifest]:
        kind = "Role" if namespace else "ClusterRole"
        meta = {"name": f"{account}-{scope}" if namespace or scope != "jobs" else account} | (
            {"namespace": namespace} if namespace else {}
        )
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": meta}
        rendered = [
            {"apiGroups": [r.group], "resources": [r.resource], "verbs": list(r.verbs)}
            | ({"resourceNames": list(r.names)} if r.names else {})
            for r in rules
            if r.scope == scope
        ]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": meta["name"]}
        subject = {"kind": "ServiceAccount", "name": account, "namespace": system}
        binding = role | {"kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]}
        return [role | {"rules": rendered}, binding]

    found: list[Manifest] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": system}},
        *granted("own", system),
        *granted("cluster", None),
        *(granted("selected", None) if selected else ()),
    ]
    for namespace in namespaces or (None,):
        found += granted("jobs", namespace)
    return found


def cartpole(name: str = "cartpole", *, claim: str, steps: int = 6, pods: int = 1, **spec: Any) -> Manifest:
    """The example, with the machine's site-packages mounted, and an actor without torch: nobody looks at what it
    learns."""
    manifest: Manifest = yaml.safe_load((REPOSITORY / "examples/cartpole/rljob.yaml").read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"]["flow"]["steps"] = steps
    for role in manifest["spec"]["roles"]:
        role["kind"] = f"{worker_image.LIGHT.stem}:Light" if role["name"] == "actor" else role["kind"]
    manifest["spec"]["pools"][0] |= {"pods": pods, "template": worker_image.template(claim)}
    manifest["spec"] |= spec
    return manifest


def pods_of(plane: ControlPlane, namespace: str, component: str) -> list[Manifest]:
    """The pods of jobs in the namespace that are `driver` or `worker`, those that are ending too."""
    found = plane.pods(namespace)
    return [p for p in found if p["metadata"].get("labels", {}).get("rlinf.io/component") == component]


def await_replaced(plane: ControlPlane, namespace: str, component: str, *, attempt: int, timeout_s: float = 60) -> None:
    """Until the pods of that attempt are the only ones: from then on what the job does, it does with them."""

    def alone() -> bool:
        return [p["metadata"]["labels"]["rlinf.io/attempt"] for p in pods_of(plane, namespace, component)] == [
            str(attempt)
        ]

    until(alone, what=f"the {component} of attempt {attempt} alone", timeout_s=timeout_s)


def condition(job: Manifest, kind: str) -> str:
    """Its status; empty where it is not there."""
    listed = (job.get("status") or {}).get("conditions") or []
    return next((str(c["status"]) for c in listed if c["type"] == kind), "")


def is_complete(job: Manifest) -> bool:
    return condition(job, "Complete") == "True"


def is_stepping(job: Manifest) -> bool:
    """At work, and through a step."""
    return condition(job, "Running") == "True" and (job["status"].get("step") or 0) >= 1


def further_than(job: Manifest) -> Callable[[Manifest], bool]:
    """A new branch begins at a smaller number: without checkpoints, at the first step."""

    def version(of: Manifest) -> tuple[int, int]:
        found = of["status"]["policyVersion"]
        return int(found["branch"]), int(found["number"])

    return lambda later: version(later) > version(job)


def seconds_until(holds: Callable[[], object], *, what: str, timeout_s: float) -> float:
    started = time.monotonic()
    until(lambda: bool(holds()), what=what, timeout_s=timeout_s, every_s=0.05)
    return time.monotonic() - started
