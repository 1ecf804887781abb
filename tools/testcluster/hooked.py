"""Somebody else's controller with webhooks, run in the hub: its rights, kinds and webhooks. For kueue.py and jobset.py.

A user's installation gives it a Deployment, a Service and a certificate manager. Here it is a process of the hub, whose
webhooks the API server calls at the hub's address with certificates of the cluster's own CA.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from tools.testcluster import pki
from tools.testcluster.api import Api, ApiError
from tools.testcluster.layout import Addresses, Paths


class Wait(Protocol):
    def __call__(self, probe: Callable[[], bool], *, what: str, timeout_s: float) -> None: ...


def certificates(paths: Paths, name: str) -> Path:
    """The folder that its webhook server reads."""
    return paths.config / f"{name}-webhooks"


def kubeconfig(paths: Paths, name: str) -> Path:
    return paths.config / f"{name}.kubeconfig"


def give_rights(paths: Paths, addresses: Addresses, name: str) -> None:
    """One certificate is both: who it is to the API server, and what its webhooks are served with."""
    who = pki.Identity(
        file=name, common_name=f"testcluster:{name}", organizations=("system:masters",), ips=(addresses.hub,)
    )
    served = certificates(paths, name)
    served.mkdir(exist_ok=True)
    key, certificate = pki.issue_from(paths.pki, who)
    for file, data in (("tls.key", key), ("tls.crt", certificate)):
        (served / file).write_bytes(data)
        (served / file).chmod(0o600)
    made = pki.kubeconfig_for(served / "tls", ca=paths.pki / "ca.crt", server=addresses.server)
    kubeconfig(paths, name).write_text(yaml.safe_dump(made), encoding="utf-8")


def make_kinds(api: Api, folder: Path, *, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Its CRDs, as they lie in `folder` but for `change`."""
    for definition in sorted(folder.glob("*.yaml")):
        made = change(yaml.load(definition.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))
        api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body=made)


def is_served(api: Api, group_version: str, plurals: Iterable[str]) -> bool:
    try:
        found = api.get(f"/apis/{group_version}")
    except ApiError as err:
        if err.status != 404:
            raise
        return False
    return set(plurals) <= {resource["name"] for resource in found["resources"]}


def authority(paths: Paths) -> str:
    """The cluster's CA as a webhook's `caBundle`."""
    return base64.b64encode((paths.pki / "ca.crt").read_bytes()).decode()


def install(api: Api, file: Path, *, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The webhook configurations of `file` but for `change`. Once the program answers them: before, no object of its
    kinds could be written."""
    for found in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        made = change(found)
        plural = made["kind"].lower() + "s"
        api.request("POST", f"/apis/admissionregistration.k8s.io/v1/{plural}", body=made)


def at_the_hub(hook: Mapping[str, Any], addresses: Addresses, *, port: int, ca: str) -> dict[str, Any]:
    path = hook["clientConfig"]["service"]["path"]
    return {**hook, "clientConfig": {"url": f"https://{addresses.hub}:{port}{path}", "caBundle": ca}}
