"""A pool's template, merged under what the operator owns: owned fields win, and what they overrode is reported. Pure.

Lists of named things merge by their name, as Kubernetes' strategic merge does; other lists are the operator's where it
has one, the template's otherwise. What is reported goes into events: of the template's lists and mappings, which may
hold a token, their kind alone.

>>> merged, conflicts = merge({"restartPolicy": "Never"}, {"restartPolicy": "Always", "priority": 7}, path="spec")
>>> merged, conflicts
({'restartPolicy': 'Never', 'priority': 7}, ["spec.restartPolicy is 'Always'; the operator sets 'Never'"])
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

from rlinf_api import sentences
from rlinf_operator.manifests.metadata import Manifest

KEY_OF: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "ports": "name",
    "volumes": "name",
    "tolerations": "key",
    "volumeMounts": "mountPath",
}
_JOINED: Final = {**KEY_OF, "imagePullSecrets": "name"}
_WHOLE: Final = frozenset({"env", "ports", "volumes"})
"""Named things with one source each: two of a name are not joined."""


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    """One template over a more general one: what both say, `over` says. Named things are joined by name, tolerations
    added; any other list is that of `over`. Neither argument is changed.

    >>> overlay({"spec": {"priorityClassName": "low"}}, {"spec": {"priorityClassName": "high", "priority": 7}})
    {'spec': {'priorityClassName': 'high', 'priority': 7}}
    """
    merged: Manifest = dict(base)
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


def _joined(base: list[Any], over: list[Any], *, key: str, whole: bool) -> list[Any]:
    """`whole`: an entry of `over` takes the place of its namesake. Others have what both say."""
    mine = {entry.get(key): entry for entry in over if isinstance(entry, Mapping)}
    found = []
    for entry in base:
        own = mine.pop(entry.get(key), None) if isinstance(entry, Mapping) and entry.get(key) else None
        found.append(entry if own is None else own if whole else overlay(entry, own))
    return [*found, *(e for e in over if not isinstance(e, Mapping) or not e.get(key) or e.get(key) in mine)]


def merge(
    owned: Mapping[str, Any], template: Mapping[str, Any], *, path: str, defaults: Container[str] = ()
) -> tuple[Manifest, list[str]]:
    """(merged, conflicts). Neither argument is changed. `defaults`: paths of which the operator only has a default, as
    a whole: there the template wins, and that is no conflict."""
    merged: Manifest = dict(owned)
    conflicts: list[str] = []
    for key, wanted in template.items():
        here = f"{path}.{key}" if path else key
        if key not in owned:
            merged[key] = wanted
        elif here in defaults:
            merged[key] = wanted or owned[key]
        elif isinstance(owned[key], Mapping) and isinstance(wanted, Mapping):
            merged[key], found = merge(owned[key], wanted, path=here, defaults=defaults)
            conflicts += found
        elif key in KEY_OF and isinstance(owned[key], list) and isinstance(wanted, list):
            merged[key], found = _merge_named(owned[key], wanted, key=KEY_OF[key], path=here, defaults=defaults)
            conflicts += found
        elif owned[key] != wanted:
            conflicts.append(f"{here} is {sentences.shown(wanted)}; the operator sets {_cut(owned[key])}")
    return merged, conflicts


def _merge_named(
    owned: list[Any], template: list[Any], *, key: str, path: str, defaults: Container[str]
) -> tuple[list[Any], list[str]]:
    """Owned entries first, each with what the template adds to it; then the template's own, in its order."""
    conflicts: list[str] = []
    by_name = {entry.get(key): entry for entry in template if isinstance(entry, Mapping)}
    merged: list[Any] = []
    for entry in owned:
        extra = by_name.get(entry[key])
        if extra is None or extra == entry:
            merged.append(entry)
        elif key != "name" or not _is_whole(entry):
            together, found = merge(entry, extra, path=f"{path}[{entry[key]}]", defaults=defaults)
            merged.append(together)
            conflicts += found
        else:
            merged.append(entry)
            conflicts.append(f"{path}[{entry[key]}] is {sentences.shown(extra)}; the operator sets it")
    owned_names = {entry[key] for entry in owned}
    merged += [e for e in template if not isinstance(e, Mapping) or e.get(key) not in owned_names]
    return merged, conflicts


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """An environment variable, a port or a volume has one source: merging two of them would be a third thing."""
    return "command" not in entry


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
