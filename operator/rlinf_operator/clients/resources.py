"""Where the API server keeps the kinds that the operator uses. `kind` alone names one: no two share a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from rlinf_api import names
from rlinf_api.errors import InvariantBroken


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    kind: str
    api_version: str
    plural: str

    def path(self, *, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """
        >>> of_kind("Pod").path(namespace="team", name="a", subresource="binding")
        '/api/v1/namespaces/team/pods/a/binding'
        """
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)


_RESOURCES: Final = {
    kind: Resource(kind=kind, api_version=api_version, plural=plural)
    for kind, api_version, plural in (
        ("RLJob", names.API_VERSION, "rljobs"),
        ("RLPlan", names.API_VERSION, "rlplans"),
        ("Pod", "v1", "pods"),
        ("Service", "v1", "services"),
        ("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies"),
        ("ConfigMap", "v1", "configmaps"),
        ("Secret", "v1", "secrets"),
        ("Event", "v1", "events"),
        ("Lease", "coordination.k8s.io/v1", "leases"),
    )
}


def of_kind(kind: str) -> Resource:
    try:
        return _RESOURCES[kind]
    except KeyError:
        raise InvariantBroken(
            f"the operator has no business with kind {kind!r}", wanted=", ".join(_RESOURCES)
        ) from None
