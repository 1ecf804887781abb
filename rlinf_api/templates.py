"""Pod templates laid over each other, the more special over the more general. Pure.

Called for the layers of a job (rlinf_operator/manifests/pods.py) and of its runtime (runtimes.py). Not for: what the
operator itself owns of a pod (rlinf_operator/manifests/template.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

KEY_OF: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
_JOINED: Final = {**KEY_OF, "imagePullSecrets": "name"}
_WHOLE: Final = frozenset({"env", "ports", "volumes"})
"""Named things with one source each: two of a name are not joined."""


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One template over a more general one: what both say, `over` says. Named things are joined by name, tolerations
    added; any other list is that of `over`. Neither argument is changed.

    >>> overlay({"spec": {"priorityClassName": "low"}}, {"spec": {"priorityClassName": "high", "priority": 7}})
    {'spec': {'priorityClassName': 'high', 'priority': 7}}
    """
    merged: dict[str, Any] = dict(base)
    for field, wanted in over.items():
        have = base.get(field)
        if isinstance(have, Mapping) and isinstance(wanted, Mapping):
            merged[field] = overlay(have, wanted)
        elif field == "tolerations" and isinstance(have, list) and isinstance(wanted, list):
            merged[field] = [*have, *(entry for entry in wanted if entry not in have)]
        elif field in _JOINED and isinstance(have, list) and isinstance(wanted, list):
            merged[field] = _joined(have, wanted, key=_JOINED[field], whole=field in _WHOLE)
        else:
            merged[field] = wanted
    return merged


def without(template: Mapping[str, Any], container: str) -> dict[str, Any]:
    """A template of all pods, for those that have no such container."""
    spec = template.get("spec")
    listed = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(listed, list) or not isinstance(spec, Mapping):
        return dict(template)
    kept = [c for c in listed if not (isinstance(c, Mapping) and c.get("name") == container)]
    return {**template, "spec": {**spec, "containers": kept}}


def with_image(container: str, image: str) -> dict[str, Any]:
    """A template that says no more than this image; of an empty one nothing."""
    return {"spec": {"containers": [{"name": container, "image": image}]}} if image else {}


def _joined(base: list[Any], over: list[Any], *, key: str, whole: bool) -> list[Any]:
    """`whole`: an entry of `over` takes the place of its namesake. Others have what both say."""
    mine = {entry.get(key): entry for entry in over if isinstance(entry, Mapping)}
    found = []
    for entry in base:
        own = mine.pop(entry.get(key), None) if isinstance(entry, Mapping) and entry.get(key) else None
        found.append(entry if own is None else own if whole else overlay(entry, own))
    return [*found, *(e for e in over if not isinstance(e, Mapping) or not e.get(key) or e.get(key) in mine)]
