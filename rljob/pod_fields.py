"""What of a pod template no API server would take: fields that a pod has not, and values of another kind.

Called by manifest.py, for the templates of a job and of its runtime. The fields are those of the Kubernetes whose
client the constraints pin (pod_fields.json, by tools/gen_pod_fields.py), which this version was built with.
Not for: what a field must be beside its kind (names, bounds, references), which the API server says.

>>> [str(problem) for problem in check("spec.template", {"spec": {"nodeSelecter": {"a": "b"}}})]
["spec.template.spec.nodeSelecter: is not a field of a pod in Kubernetes 1.37; did you mean 'nodeSelector'?"]
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Final

from rlinf_api import sentences
from rlinf_api.job import Problem

ROOT: Final = "V1PodTemplateSpec"
QUANTITIES: Final = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor"})
"""Fields that the description calls text, and where a number means the same."""
_WANTED: Final = {"text": "text", "number": "a whole number", "bool": "true or false"}


@functools.cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files("rljob").joinpath("pod_fields.json").read_text(encoding="utf-8"))
    return found


def check(field: str, template: Mapping[str, Any]) -> Iterator[Problem]:
    """`field`: where the template stands, for the sentences."""
    for part in ("metadata", "spec"):
        if isinstance(template.get(part), Mapping):  # else job_rules says it
            kind = _document()["models"][ROOT][part]
            yield from _look(f"{field}.{part}", template[part], kind, part)


def sidecars(field: str, template: Mapping[str, Any], *, ours: Sequence[str]) -> Iterator[str]:
    """Containers whose name is nearly one of ours: they run beside it. A sentence for each."""
    spec = template.get("spec")
    listed = spec.get("containers") if isinstance(spec, Mapping) else None
    for container in listed if isinstance(listed, list) else ():
        name = container.get("name") if isinstance(container, Mapping) else None
        if isinstance(name, str) and name not in ours and (hint := sentences.did_you_mean(name, ours)):
            yield f"{field}.spec.containers[{name}]: is a container of its own, beside {' or '.join(ours)};{hint}"


def _look(path: str, value: Any, kind: str, field: str) -> Iterator[Problem]:
    if value is None or kind == "any":
        return
    if kind.startswith("["):
        if not isinstance(value, list):
            yield _wrong(path, value, "a list")
        else:
            for number, entry in enumerate(value):
                yield from _look(f"{path}[{_name(entry, number)}]", entry, kind[1:-1], field)
    elif kind.startswith("{") or kind in _document()["models"]:
        if not isinstance(value, Mapping):
            yield _wrong(path, value, "a mapping")
        elif kind.startswith("{"):
            for key, entry in value.items():
                yield from _look(f"{path}.{key}", entry, kind[1:-1], field)
        else:
            yield from _fields(path, value, _document()["models"][kind])
    elif not _is_of(kind, value, is_quantity=field in QUANTITIES):
        yield _wrong(path, value, _WANTED[kind])


def _fields(path: str, value: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[Problem]:
    for key, entry in value.items():
        if key in known:
            yield from _look(f"{path}.{key}", entry, known[key], key)
        else:
            hint = sentences.did_you_mean(str(key), tuple(known)) or " remove it"
            version = _document()["version"]
            yield Problem(field=f"{path}.{key}", message=f"is not a field of a pod in Kubernetes {version};{hint}")


def _is_of(kind: str, value: Any, *, is_quantity: bool) -> bool:
    if kind == "bool":
        return isinstance(value, bool)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return is_number
    return isinstance(value, str | datetime.date) or (is_quantity and (is_number or isinstance(value, float)))


def _name(entry: Any, number: int) -> str:
    name = entry.get("name") if isinstance(entry, Mapping) else None
    return name if isinstance(name, str) and name else str(number)


def _wrong(path: str, value: Any, wanted: str) -> Problem:
    got = sentences.kind_of(value) if wanted.startswith("a ") and wanted != "a whole number" else sentences.shown(value)
    remedy = "write it in quotes" if wanted == "text" and not isinstance(value, Mapping | list) else "write that"
    return Problem(field=path, message=f"got {got}, wanted {wanted}; {remedy}")
