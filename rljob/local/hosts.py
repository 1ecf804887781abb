"""The hosts file of a namespace: pods by hostname and subdomain, Services by name. Local mode's DNS.

For: `kubelet.py`, which rewrites it as pods come and go; workers find it by RLINF_HOSTS_FILE and ask it before DNS.
Not for: load balancing: a Service with a cluster IP has no proxy here and gets the addresses of its pods, as a
headless one does; where its port is not the pods' port it gets no name, since a connection would go to the wrong place.

One file per namespace, so that the short forms `host.sub` and `svc` mean what they mean in a pod of that namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlinf_api.conditions import written as condition
from rljob.local.objects import Manifest, meta

HEADER = "# written by rljob run; hosts(5): address, then names; a name on several lines has several addresses\n"


def names(label: str, *, namespace: str) -> list[str]:
    """
    >>> names("driver.math", namespace="default")
    ['driver.math.default.svc', 'driver.math.default.svc.cluster.local', 'driver.math.default', 'driver.math']
    """
    full = f"{label}.{namespace}.svc"
    return [full, f"{full}.cluster.local", f"{label}.{namespace}", label]


def text(pods: Iterable[Manifest], services: Iterable[Manifest], *, namespace: str) -> str:
    """`pods` are those of the namespace with an address, whose containers are or will be running."""
    lines: list[str] = []
    ours = sorted((pod for pod in pods if _address(pod)), key=lambda pod: str(meta(pod)["name"]))
    by_name = {meta(service)["name"]: service for service in services}
    for pod in ours:
        spec = pod["spec"]
        service = by_name.get(spec.get("subdomain", ""))
        if service is not None and _selects(service, pod) and _published(service, pod) and spec.get("hostname"):
            known_as = names(f"{spec['hostname']}.{spec['subdomain']}", namespace=namespace)
            lines.append(f"{_address(pod)} {' '.join(known_as)}")
        lines.append(f"{_address(pod)} {meta(pod)['name']}")
    for name in sorted(by_name):
        lines += [
            f"{address} {' '.join(names(name, namespace=namespace))}" for address in _endpoints(by_name[name], ours)
        ]
    return HEADER + "".join(f"{line}\n" for line in lines)


def _endpoints(service: Manifest, pods: Iterable[Manifest]) -> Iterator[str]:
    ports = service["spec"].get("ports") or []
    if service["spec"].get("clusterIP") != "None" and any(p.get("targetPort", p["port"]) != p["port"] for p in ports):
        return
    for pod in pods:
        if _selects(service, pod) and _published(service, pod):
            yield _address(pod)


def _selects(service: Manifest, pod: Manifest) -> bool:
    selector, labels = service["spec"].get("selector") or {}, meta(pod).get("labels") or {}
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def _published(service: Manifest, pod: Manifest) -> bool:
    if service["spec"].get("publishNotReadyAddresses"):
        return True
    return condition(pod, "Ready").get("status") == "True"


def _address(pod: Manifest) -> str:
    status = pod.get("status", {})
    return "" if status.get("phase") in ("Succeeded", "Failed") else str(status.get("podIP", ""))
