"""What an edit of an RLJob may not change: the rules that the CRD has in CEL (`oldSelf`), for a store without CEL.

For: `runner.py`, as the local store's admission. The sentences are those of the API server, word for word; a test
compares them with the rules of `rlinf_api.job`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_api.store import Invalid
from rljob.local.objects import Manifest, ref

Spec = Mapping[str, Any]


def _kinds(spec: Spec) -> dict[str, str]:
    return {role["name"]: role["kind"] for role in spec.get("roles") or ()}


READERS: Final[dict[str, Callable[[Spec], object]]] = {
    "spec.seed cannot change once the job exists; make a new RLJob": lambda spec: spec.get("seed", 0),
    "spec.flow.name cannot change once the job exists; make a new RLJob": lambda spec: (spec.get("flow") or {}).get(
        "name"
    ),
    "spec.roles: roles and their kinds cannot change once the job exists; make a new RLJob": _kinds,
}
"""Sentence to what must stay the same."""


def admit_rljob(new: Manifest, old: Manifest | None) -> Manifest:
    for sentence, read in READERS.items():
        if old is not None and read(new.get("spec") or {}) != read(old.get("spec") or {}):
            raise Invalid(f"{ref(new)}: {sentence}")
    return new
