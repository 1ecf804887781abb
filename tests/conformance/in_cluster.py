"""Worlds in a real Kubernetes: a namespace each, under one operator and one scheduler of the test cluster."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from rlinf_operator.clients.kube import KubeApi, connect
from rlinf_operator.metrics import Metrics
from tests.cluster import pods, worker_image
from tests.cluster.control_plane import ControlPlane
from tests.conformance.world import CLAIM, ENVS_MOUNT, LIVES, SIDECAR, Manifest, World
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

SITE_PACKAGES: Final = "site-packages"
CALL_TIMEOUT_S: Final = 20.0
WATCH_S: Final = 600
INJECT: Final = {"conformance.rlinf.io/inject": "true"}
"""Label of namespaces whose pods get a sidecar."""
CONTAINER: Final[Manifest] = {
    "image": "localhost/box:1",
    "command": LIVES,
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
MUTATION: Final = (
    'has(object.spec.containers) ? [JSONPatch{op: "add", path: "/spec/containers/0", value: Object.spec.containers{'
    f"name: {json.dumps(SIDECAR)}, image: {json.dumps(CONTAINER['image'])}, command: {json.dumps(LIVES)}, "
    "securityContext: Object.spec.containers.securityContext{allowPrivilegeEscalation: false, "
    'capabilities: Object.spec.containers.securityContext.capabilities{drop: ["ALL"]}}}}] : []'
)
ADMISSION: Final = "admissionregistration.k8s.io/v1"
INJECTION: Final[tuple[Manifest, ...]] = (
    {
        "apiVersion": ADMISSION, "kind": "MutatingAdmissionPolicy", "metadata": {"name": "conformance-sidecar"},
        "spec": {
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ]
            },
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": MUTATION}}],
            "reinvocationPolicy": "Never",
        },
    },
    {
        "apiVersion": ADMISSION, "kind": "MutatingAdmissionPolicyBinding", "metadata": {"name": "conformance-sidecar"},
        "spec": {
            "policyName": "conformance-sidecar",
            "matchResources": {"namespaceSelector": {"matchLabels": INJECT}},
        },
    },
)  # fmt: skip


def control_plane(cluster: Cluster, folder: Path) -> ControlPlane:
    """As quick as rljob run's; drivers ask for little, as the nodes have room for a few worlds only."""
    return ControlPlane(
        cluster, folder, driver_cpu="50m", progress_interval_s="0.5", coalesce_s="0.02", retry_min_s="0.1",
        retry_max_s="2",
    )  # fmt: skip


class ClusterWorld(World):
    def __init__(self, plane: ControlPlane, api: KubeApi, *, namespace: str, folder: Path) -> None:
        self.plane, self.store, self.namespace, self.folder = plane, api, namespace, folder
        self._api = api

    async def changes(self, opened: asyncio.Event) -> AsyncIterator[tuple[str, Manifest]]:
        listed = [page async for page in self._api.pages("RLJob", namespace=self.namespace)]
        version = listed[-1].resource_version
        async with self._api.open_watch(
            "RLJob", resource_version=version, server_timeout_s=WATCH_S, namespace=self.namespace
        ) as events:
            opened.set()
            async for event in events:
                assert event["type"] != "ERROR", f"a watch that has a gap records no sequence: {event}"
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]

    async def listed(self, kind: str) -> list[Manifest]:
        return [item async for page in self._api.pages(kind, namespace=self.namespace) for item in page.items]

    def template(self) -> Manifest:
        made = super().template()
        [agent] = made["spec"]["containers"]
        agent["volumeMounts"] += [{"name": SITE_PACKAGES, "mountPath": worker_image.MOUNT, "readOnly": True}]
        claim = {"claimName": SITE_PACKAGES, "readOnly": True}
        made["spec"]["volumes"] += [{"name": SITE_PACKAGES, "persistentVolumeClaim": claim}]
        return made

    def container(self, **own: Any) -> Manifest:
        return CONTAINER | own

    async def inject(self) -> None:
        await asyncio.to_thread(self._inject)

    def _inject(self) -> None:
        cluster = self.plane.cluster
        listed = {"apiVersion": "v1", "kind": "List", "items": list(INJECTION)}
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(listed))
        patch = {"metadata": {"labels": INJECT}}
        cluster.kubectl("patch", "namespace", self.namespace, "--type=merge", "-p", json.dumps(patch))
        until(self._is_injected, what=f"pods of {self.namespace} to get a sidecar", timeout_s=60, every_s=0.2)

    def _is_injected(self) -> bool:
        """The API server reads policies and namespaces from copies of its own."""
        path = f"/api/v1/namespaces/{self.namespace}/pods?dryRun=All"
        made = self.plane.cluster.api.request("POST", path, body=pods.pod("probe"))
        return any(container["name"] == SIDECAR for container in made["spec"]["containers"])

    def python_path(self) -> str:
        return f"{ENVS_MOUNT}:{worker_image.MOUNT}"

    async def scheduler_away(self) -> None:
        await asyncio.to_thread(self.plane.scheduler.stop)

    async def scheduler_back(self) -> None:
        self.plane.scheduler.start()


class ClusterBackend:
    name, at_once = "cluster", 3

    def __init__(self, cluster: Cluster, plane: ControlPlane, *, injects: bool = False) -> None:
        """`injects`: a sidecar into each pod of each world."""
        self._cluster, self._plane, self._injects = cluster, plane, injects

    @asynccontextmanager
    async def world(self, folder: Path) -> AsyncIterator[World]:
        namespace = f"conformance-{uuid.uuid4().hex[:8]}"
        shared = folder / "shared"
        shared.mkdir(parents=True)
        for path in (folder, shared):
            path.chmod(0o777)  # pods run as a user of their own
        await asyncio.to_thread(self._make, namespace, shared)
        connection = await connect(kubeconfig=str(self._cluster.kubeconfig))
        try:
            api = KubeApi(connection, timeout_s=CALL_TIMEOUT_S, metrics=Metrics())
            made = ClusterWorld(self._plane, api, namespace=namespace, folder=shared)
            await made.prepare()
            if self._injects:
                await made.inject()
            yield made
        finally:
            await connection.close()
            await asyncio.to_thread(self._remove, namespace)

    def _make(self, namespace: str, shared: Path) -> None:
        pods.make_namespace(self._cluster, namespace)
        self._cluster.site_packages_volume(namespace, name=SITE_PACKAGES)
        self._cluster.site_packages_volume(namespace, name=CLAIM, folder=shared)
        until(lambda: self._bound(namespace), what="the claims to be bound", timeout_s=60, every_s=0.1)

    def _bound(self, namespace: str) -> bool:
        """Until then the scheduler finds no node for a pod, and says so in PodsReady."""
        claims = self._cluster.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims")["items"]
        return all(claim.get("status", {}).get("phase") == "Bound" for claim in claims)

    def _remove(self, namespace: str) -> None:
        pods.remove_namespace(self._cluster, namespace)
        for claim in (SITE_PACKAGES, CLAIM):
            self._cluster.api.delete(f"/api/v1/persistentvolumes/{namespace}-{claim}")
