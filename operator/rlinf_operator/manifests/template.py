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
from rlinf_api.templates import KEY_OF
from rlinf_operator.manifests.metadata import Manifest

_TOLD_APART_BY: Final = {**{field: (key,) for field, key in KEY_OF.items()}, "tolerations": ("key", "effect")}
_NOTHING: Final[tuple[object, ...]] = (None, "", {})


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
            merged[key] = owned[key] if wanted in _NOTHING else wanted
        elif isinstance(owned[key], Mapping) and isinstance(wanted, Mapping):
            merged[key], found = merge(owned[key], wanted, path=here, defaults=defaults)
            conflicts += found
        elif key in _TOLD_APART_BY and isinstance(owned[key], list) and isinstance(wanted, list):
            by = _TOLD_APART_BY[key]
            merged[key], found = _merge_named(owned[key], wanted, by=by, path=here, defaults=defaults)
            conflicts += found
        elif owned[key] != wanted:
            conflicts.append(f"{here} is {sentences.shown(wanted)}; the operator sets {_cut(owned[key])}")
    return merged, conflicts


def _merge_named(
    owned: list[Any], template: list[Any], *, by: tuple[str, ...], path: str, defaults: Container[str]
) -> tuple[list[Any], list[str]]:
    """Owned entries first, each with what the template adds to it; then the template's own, in its order."""
    conflicts: list[str] = []
    by_name = {_name(entry, by): entry for entry in template if isinstance(entry, Mapping)}
    merged: list[Any] = []
    for entry in owned:
        extra, here = by_name.get(_name(entry, by)), f"{path}[{entry[by[0]]}]"
        if extra is None or extra == entry:
            merged.append(entry)
        elif by != ("name",) or not _is_whole(entry, extra):
            together, found = merge(entry, extra, path=here, defaults=defaults)
            merged.append(together)
            conflicts += found
        else:
            merged.append(entry)
            conflicts.append(f"{here} is {sentences.shown(extra)}; the operator sets it")
    owned_names = {_name(entry, by) for entry in owned}
    merged += [e for e in template if not isinstance(e, Mapping) or _name(e, by) not in owned_names]
    return merged, conflicts


def _name(entry: Mapping[str, Any], by: tuple[str, ...]) -> tuple[str, ...]:
    """As texts: a template may hold anything, a mapping for a name too."""
    return tuple(str(entry.get(field)) for field in by)


def _is_whole(entry: Mapping[str, Any], extra: Mapping[str, Any]) -> bool:
    """An environment variable, a port or a volume has one source: merging two of them would be a third thing. Two empty
    directories are one, with the fields of both."""
    return "command" not in entry and not ("emptyDir" in entry and "emptyDir" in extra)


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
