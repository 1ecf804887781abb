"""JobSet in the hub, beside Kueue, which then admits its jobs: the stock program of its module. `Cluster` calls this.

    testcluster up --with kueue --with jobset

For the benchmark, which compares an RLJob in a queue with a JobSet in the same one; no test needs it. CRD and webhooks
are those of the module, as they lie beside the program (binaries.JOBSET), but for what an installation fills in:
webhooks are called at the hub, and those of pods for a JobSet's pods only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from tools.testcluster import binaries, hooked
from tools.testcluster.api import Api
from tools.testcluster.layout import Addresses, Paths

NAME: Final = "jobset"
API_VERSION: Final = "jobset.x-k8s.io/v1alpha2"
WEBHOOK_PORT: Final = 9445
HEALTH_PORT: Final = 9446
SERVED_TIMEOUT_S: Final = 30.0
OF_A_JOBSET: Final = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
"""As the module's config/components/webhook/patches have it: what makes the manifest cannot write it there."""


def version() -> str:
    """That of go-jobset/go.mod, the one place that says it.

    >>> version().startswith("v0.")
    True
    """
    text = (binaries.JOBSET_MODULE / "go.mod").read_text(encoding="utf-8")
    return next(line.split()[1] for line in text.splitlines() if line.split()[:1] == ["sigs.k8s.io/jobset"])


def prepare(paths: Paths, addresses: Addresses, api: Api, *, wait: hooked.Wait) -> Path:
    """Certificates, configuration and CRD, unless they are there; the folder of the program."""
    folder = binaries.ready(binaries.JOBSET)
    hooked.give_rights(paths, addresses, NAME)
    (paths.config / "jobset.yaml").write_text(configuration(paths), encoding="utf-8")
    if is_served(api):  # it has run before, and died
        return folder
    hooked.make_kinds(api, folder / "crds", change=lambda found: found)
    wait(lambda: is_served(api), what="the API server to serve JobSets", timeout_s=SERVED_TIMEOUT_S)
    return folder


def install_webhooks(paths: Paths, addresses: Addresses, api: Api) -> None:
    ca, file = hooked.authority(paths), binaries.ready(binaries.JOBSET) / "webhooks.yaml"
    hooked.install(api, file, change=lambda found: webhooks(found, addresses, ca=ca))


def words(folder: Path, paths: Paths) -> list[str]:
    return [
        str(folder / "jobset"),
        f"--config={paths.config}/jobset.yaml",
        f"--kubeconfig={hooked.kubeconfig(paths, NAME)}",
        "--zap-log-level=info",
    ]


def configuration(paths: Paths) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "health": {"healthProbeBindAddress": f"127.0.0.1:{HEALTH_PORT}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"port": WEBHOOK_PORT, "certDir": str(hooked.certificates(paths, NAME))},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "clientConnection": {"qps": 500, "burst": 1000},  # as Kueue's
        }
    )


def webhooks(found: dict[str, Any], addresses: Addresses, *, ca: str) -> dict[str, Any]:
    made = []
    for hook in found["webhooks"]:
        some = {"objectSelector": OF_A_JOBSET} if hook["rules"][0]["resources"] == ["pods"] else {}
        made.append(hooked.at_the_hub(hook, addresses, port=WEBHOOK_PORT, ca=ca) | some)
    return {**found, "metadata": {"name": "jobset-" + found["metadata"]["name"]}, "webhooks": made}


def is_served(api: Api) -> bool:
    return hooked.is_served(api, API_VERSION, ["jobsets"])
