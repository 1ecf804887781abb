"""Kueue in the hub: its own controllers, scheduler and webhooks against the cluster's API server. `Cluster` calls this.

    testcluster up --with kueue

CRDs and webhooks are those of the module that the program is built from, as they lie beside it (binaries.KUEUE), but
for what an installation fills in, too: webhooks are called at the hub, and version v1beta1, which would need a
conversion at each read, is left out. Of its integrations with other kinds of jobs that with JobSet is used, where
JobSet runs, too (jobset.py); most others are not part of the program (go-kueue).

A test that needs another configuration, such as waitForPodsReady: extras.restart_kueue.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.testcluster import binaries, hooked
from tools.testcluster.api import Api
from tools.testcluster.layout import Addresses, Paths

NAME = "kueue"
VERSION = "v1beta2"
OWN_GROUP = "kueue.x-k8s.io"
JOBSET_GROUP = "jobset.x-k8s.io"
WEBHOOK_PORT = 9443
HEALTH_PORT = 9444
SERVED_TIMEOUT_S = 30.0
OWN_KINDS = ("workloads", "resourceflavors", "clusterqueues", "cohorts", "localqueues", "topologies")
"""Whose webhooks the program serves."""


def prepare(paths: Paths, addresses: Addresses, api: Api, *, wait: hooked.Wait, jobset: bool = False) -> Path:
    """Certificates, configuration and CRDs, unless they are there; the folder of the program."""
    folder = binaries.ready(binaries.KUEUE)
    hooked.give_rights(paths, addresses, NAME)
    configure(paths, jobset=jobset)
    if is_served(api):  # it has run before, and died
        return folder
    hooked.make_kinds(api, folder / "crds", change=crd)
    wait(lambda: is_served(api), what="the API server to serve Kueue's kinds", timeout_s=SERVED_TIMEOUT_S)
    return folder


def install_webhooks(paths: Paths, addresses: Addresses, api: Api, *, jobset: bool = False) -> None:
    ca, file = hooked.authority(paths), binaries.ready(binaries.KUEUE) / "webhooks.yaml"
    hooked.install(api, file, change=lambda found: webhooks(found, addresses, ca=ca, jobset=jobset))


def words(folder: Path, paths: Paths) -> list[str]:
    return [
        str(folder / "kueue"),
        f"--config={paths.config}/kueue.yaml",
        f"--cert-dir={hooked.certificates(paths, NAME)}",
        f"--kubeconfig={hooked.kubeconfig(paths, NAME)}",
        "--zap-log-level=2",
    ]


def configure(paths: Paths, more: Mapping[str, Any] | None = None, *, jobset: bool = False) -> None:
    """Kueue reads it once, when it starts."""
    (paths.config / "kueue.yaml").write_text(configuration(more, jobset=jobset), encoding="utf-8")


def configuration(more: Mapping[str, Any] | None = None, *, jobset: bool = False) -> str:
    """`more`: fields of Kueue's Configuration over these."""
    # One must be named; pods are, and the program does not set their integration up.
    framework = f"{JOBSET_GROUP}/jobset" if jobset else "pod"
    return yaml.safe_dump(
        {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH_PORT}"},
            "webhook": {"port": WEBHOOK_PORT},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": {"frameworks": [framework]},
            "clientConnection": {"qps": 500, "burst": 1000},  # the default of 50 would be what a test measures
            "featureGates": {"MultiKueue": False, "VisibilityOnDemand": False},
            **(more or {}),
        }
    )


def crd(found: dict[str, Any]) -> dict[str, Any]:
    versions = [version for version in found["spec"]["versions"] if version["name"] == VERSION]
    kept = versions or found["spec"]["versions"]
    return {**found, "spec": {**found["spec"], "versions": kept}}


def webhooks(found: dict[str, Any], addresses: Addresses, *, ca: str, jobset: bool = False) -> dict[str, Any]:
    groups = [OWN_GROUP, JOBSET_GROUP] if jobset else [OWN_GROUP]
    kept = [
        hooked.at_the_hub(hook, addresses, port=WEBHOOK_PORT, ca=ca)
        for hook in found["webhooks"]
        if hook["rules"][0]["apiGroups"][0] in groups
    ]
    return {**found, "metadata": {"name": "kueue-" + found["metadata"]["name"]}, "webhooks": kept}


def is_served(api: Api) -> bool:
    return hooked.is_served(api, f"{OWN_GROUP}/{VERSION}", OWN_KINDS)
