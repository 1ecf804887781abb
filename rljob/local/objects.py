"""Kubernetes-shaped objects as plain dicts: copies, merge patches. Pure.

For: all of local mode. Not for: typed models, which are `rlinf_api.job` and `rlinf_api.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Manifest: TypeAlias = dict[str, Any]


def clone(value: Any) -> Any:
    """A deep copy of JSON-like data; about ten times faster than copy.deepcopy, which the store would feel."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clone(item) for item in value]
    return value


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null removes a key, a list replaces the whole list. Shares with `target` what the patch does not name.

    >>> merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 4}})
    {'b': {'c': 4, 'd': 3}}
    """
    if not isinstance(patch, Mapping):
        return clone(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def meta(obj: Manifest) -> Manifest:
    metadata: Manifest = obj["metadata"]
    return metadata


def ref(obj: Manifest) -> str:
    """How messages name an object: `Pod default/a`."""
    metadata = obj.get("metadata", {})
    return f"{obj.get('kind', '?')} {metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"
