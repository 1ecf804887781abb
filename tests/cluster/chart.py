"""The control plane in a test cluster as people get it: image built from this checkout, chart installed by helm.

image = chart.load_image(cluster)                 # builds it where the code has changed, imports it into every node
release = chart.install(cluster, "rlinf-system", values={"operator": {"settings": {"resync_s": 5}}})
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlinf_operator import access
from tools.chart import images, rendering
from tools.testcluster.api import ApiError
from tools.testcluster.cluster import Cluster
from tools.testcluster.waiting import until

INSTALL_TIMEOUT_S = 180
Values = dict[str, Any]


@functools.cache
def _archive() -> Path:
    return images.build([images.CONTROL])[images.CONTROL]


def load_image(cluster: Cluster) -> str:
    """Its name. NotBuilt (a ClusterError) where BuildKit is not in the cache."""
    cluster.load(_archive())
    return images.catalogue()[images.CONTROL].name


@dataclass(frozen=True, kw_only=True)
class Release:
    cluster: Cluster
    namespace: str
    name: str = rendering.RELEASE
    values: Values = field(default_factory=dict)

    def helm(self, verb: str, *words: str) -> str:
        """`helm VERB` of this release; a verb may be two words, as in `get notes`."""
        argv = [*verb.split(), self.name, "--namespace", self.namespace, *words]
        return self.cluster.helm(*argv, timeout_s=INSTALL_TIMEOUT_S + 30)

    def upgrade(self, **more: Any) -> str:
        """Installs it or brings it to these values; returns when every Deployment has its pods and no others."""
        file = self.cluster.paths.root / f"values-{self.namespace}.yaml"
        file.write_text(yaml.safe_dump({**self.values, **more}), encoding="utf-8")
        try:
            said = self.cluster.helm(
                "upgrade", self.name, str(rendering.CHART), "--namespace", self.namespace, "--install",
                "--values", str(file), "--wait", "--timeout", f"{INSTALL_TIMEOUT_S}s",
                timeout_s=INSTALL_TIMEOUT_S + 30,
            )  # fmt: skip
            self._rolled_out()
        except Exception as error:
            raise AssertionError(f"{error}\n{self.told()}") from error
        return said

    def roll_back(self) -> None:
        """To what it was before the last upgrade."""
        self.helm("rollback", "--wait", "--timeout", f"{INSTALL_TIMEOUT_S}s")
        self._rolled_out()

    def _rolled_out(self) -> None:
        """helm waits for the new pods alone: for a while those of before are there beside them."""
        selector = f"app.kubernetes.io/instance={self.name}"
        for name in self.kubectl("get", "deployments", "-l", selector, "-o", "name").split():
            words = ("rollout", "status", name, f"--timeout={INSTALL_TIMEOUT_S}s")
            self.kubectl(*words, timeout_s=INSTALL_TIMEOUT_S + 10)

    def told(self) -> str:
        """What one would look at first when it does not get Available."""
        look: Callable[..., str] = functools.partial(self.kubectl, check=False)
        selector = f"app.kubernetes.io/instance={self.name}"
        return "\n".join(
            [
                look("get", "pods", "-o", "wide"),
                look("get", "events", "--sort-by=.lastTimestamp")[-3000:],
                look("logs", "-l", selector, "--tail=15", "--prefix", "--ignore-errors"),
            ]
        )

    def kubectl(self, *words: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *words, **options)

    def get(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Those that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        found = self.get("pods", "-l", selector)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def leader(self) -> str:
        """Name of the pod that holds the Lease; empty while nobody does."""
        try:
            path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/{access.LEASE}"
            return str(self.cluster.api.get(path)["spec"].get("holderIdentity") or "")
        except ApiError as error:
            if error.status != 404:
                raise
            return ""


def install(cluster: Cluster, namespace: str, *, values: Values | None = None) -> Release:
    """Into a namespace under Pod Security *restricted*, which is made if it is not there."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.apply(
        f"/api/v1/namespaces/{namespace}",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}},
    )
    release = Release(cluster=cluster, namespace=namespace, values=values or {})
    release.upgrade()
    until(lambda: release.leader() != "", what="an operator to lead", timeout_s=30)
    return release
