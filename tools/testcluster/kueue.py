"""Kueue in the hub: its own controllers, scheduler and webhooks against the cluster's API server. `Cluster` calls this.

    testcluster up --with kueue

CRDs and webhooks are those of the module that the program is built from, as they lie beside it (binaries.KUEUE), but
for what an installation fills in, too: webhooks are called at the hub, and version v1beta1, which would need a
conversion at each read, is left out. Integrations with other kinds of jobs are not part of the program (go-kueue).

A test that needs another configuration, such as waitForPodsReady: extras.restart_kueue.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from tools.testcluster import binaries, pki
from tools.testcluster.api import Api, ApiError
from tools.testcluster.layout import Addresses, Paths

VERSION = "v1beta2"
WEBHOOK_PORT = 9443
HEALTH_PORT = 9444
SERVED_TIMEOUT_S = 30.0
OWN_KINDS = ("workloads", "resourceflavors", "clusterqueues", "cohorts", "localqueues", "topologies")
"""Whose webhooks the program serves."""


def identity(addresses: Addresses) -> pki.Identity:
    return pki.Identity(
        file="kueue", common_name="testcluster:kueue", organizations=("system:masters",), ips=(addresses.hub,)
    )


class Wait(Protocol):
    def __call__(self, probe: Callable[[], bool], *, what: str, timeout_s: float) -> None: ...


def prepare(paths: Paths, addresses: Addresses, api: Api, *, wait: Wait) -> Path:
    """Certificates, configuration and CRDs, unless they are there; the folder of the program."""
    folder = binaries.ready(binaries.KUEUE)
    served = paths.config / "kueue-webhooks"
    served.mkdir(exist_ok=True)
    key, certificate = pki.issue_from(paths.pki, identity(addresses))
    for name, data in (("tls.key", key), ("tls.crt", certificate)):
        (served / name).write_bytes(data)
        (served / name).chmod(0o600)
    kubeconfig = pki.kubeconfig_for(served / "tls", ca=paths.pki / "ca.crt", server=addresses.server)
    (paths.config / "kueue.kubeconfig").write_text(yaml.safe_dump(kubeconfig), encoding="utf-8")
    configure(paths)
    if is_served(api):  # it has run before, and died
        return folder
    for definition in sorted((folder / "crds").glob("*.yaml")):
        made = crd(yaml.load(definition.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))
        api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=made)
    wait(lambda: is_served(api), what="the API server to serve Kueue's kinds", timeout_s=SERVED_TIMEOUT_S)
    return folder


def install_webhooks(paths: Paths, addresses: Addresses, api: Api) -> None:
    """Once the program answers them: before, no object of Kueue's could be written."""
    ca = base64.b64encode((paths.pki / "ca.crt").read_bytes()).decode()
    text = (binaries.ready(binaries.KUEUE) / "webhooks.yaml").read_text(encoding="utf-8")
    for found in yaml.safe_load_all(text):
        made = webhooks(found, addresses, ca=ca)
        plural = made["kind"].lower() + "s"
        api.request("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", body=made)


def words(folder: Path, paths: Paths) -> list[str]:
    return [
        str(folder / "kueue"),
        f"--config={paths.config}/kueue.yaml",
        f"--cert-dir={paths.config}/kueue-webhooks",
        f"--kubeconfig={paths.config}/kueue.kubeconfig",
        "--zap-log-level=2",
    ]


def configure(paths: Paths, more: Mapping[str, Any] | None = None) -> None:
    """Kueue reads it once, when it starts."""
    (paths.config / "kueue.yaml").write_text(configuration(more), encoding="utf-8")


def configuration(more: Mapping[str, Any] | None = None) -> str:
    """`more`: fields of Kueue's Configuration over these."""
    return yaml.safe_dump(
        {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH_PORT}"},
            "webhook": {"port": WEBHOOK_PORT},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": ["pod"]},  # one must be named, and the program sets none up
            "clientConnection": {"qps": 500, "burst": 1000},  # the default of 50 would be what a test measures
            "featureGates": {"MultiKueue": False, "VisibilityOnDemand": False},
            **(more or {}),
        }
    )


def crd(found: dict[str, Any]) -> dict[str, Any]:
    versions = [version for version in found["spec"]["versions"] if version["name"] == VERSION]
    kept = versions or found["spec"]["versions"]
    return {**found, "spec": {**found["spec"], "versions": kept}}


def webhooks(found: dict[str, Any], addresses: Addresses, *, ca: str) -> dict[str, Any]:
    kept = []
    for hook in found["webhooks"]:
        if hook["rules"][0]["apiGroups"] == ["kueue.x-k8s.io"]:
            path = hook["clientConfig"]["service"]["path"]
            url = f"https://{addresses.hub}:{WEBHOOK_PORT}{path}"
            kept.append({**hook, "clientConfig": {"url": url, "caBundle": ca}})
    return {**found, "metadata": {"name": "kueue-" + found["metadata"]["name"]}, "webhooks": kept}


def is_served(api: Api) -> bool:
    try:
        found = api.get(f"/apis/kueue.x-k8s.io/{VERSION}")
    except ApiError as err:
        if err.status != 404:
            raise
        return False
    return set(OWN_KINDS) <= {resource["name"] for resource in found["resources"]}
