"""Kubernetes-shaped objects as plain dicts: copies, merge patches, label selectors, time stamps.

Pure functions for the store and the kubelet beside it. Not for typed models: those are `rlinf_api.job` and
`rlinf_api.plan`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeAlias

from rlinf_api.errors import UserError

Manifest: TypeAlias = dict[str, Any]
Clock: TypeAlias = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


def timestamp(moment: datetime) -> str:
    """
    >>> timestamp(datetime(2026, 11, 21, 8, 5, 0, 999, tzinfo=UTC))
    '2026-11-21T08:05:00Z'
    """
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


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


_SET_TERM = re.compile(r"^(?P<key>\S+)\s+(?P<op>in|notin)\s+\((?P<values>[^)]*)\)$")
_TERM = re.compile(r"\s*((?:[^,(]|\([^)]*\))+)\s*(?:,|$)")


def label_matcher(selector: str) -> Callable[[Mapping[str, str]], bool]:
    """The selector grammar of the API server.

    >>> label_matcher("app=a, tier!=db, zone in (x, y), canary, !old")({"app": "a", "zone": "y", "canary": ""})
    True
    """
    tests = [_term(part.strip()) for part in _TERM.findall(selector) if part.strip()]
    return lambda labels: all(test(labels) for test in tests)


def _term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET_TERM.match(term):
        key, values = match["key"], {value.strip() for value in match["values"].split(",")}
        if match["op"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    for sign, wanted in (("!=", False), ("==", True), ("=", True)):
        if sign in term:
            key, value = (part.strip() for part in term.split(sign, 1))
            return lambda labels: (labels.get(key) == value) is wanted
    if " " in term:
        raise UserError(
            f"label selector term {term!r} cannot be read", wanted="key=value, key!=value, key in (a, b), key, !key"
        )
    if term.startswith("!"):
        return lambda labels: term[1:] not in labels
    return lambda labels: term in labels
