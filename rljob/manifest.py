"""A manifest file as a person wrote it: read, override, check. Every problem becomes one sentence; nothing else leaves.

Called by `rljob validate` and `rljob run`. The rules themselves are rlinf_api's and the flow's; this module only
brings them to one file. Imports stay light: validate answers in half a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf_api import sentences, supported
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import PoolSpec, Problem, RLJobSpec
from rljob import documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    name: str
    manifest: dict[str, Any]
    spec: RLJobSpec | None
    problems: tuple[Problem, ...]


def read(file: Path) -> dict[str, Any]:
    """The one RLJob of a file; other documents in it are refused."""
    found = documents.of_file(file, what=f"manifest {file}")
    if len(found) != 1 or not isinstance(found[0], dict):
        got = "nothing" if not found else f"{len(found)} documents"
        if len(found) == 1:
            got = "a list" if isinstance(found[0], list) else sentences.shown(found[0])
        raise InvalidManifest(
            f"manifest {file} must hold one RLJob", got=got,
            wanted="one mapping with apiVersion, kind, metadata, spec", next="see examples/cartpole/rljob.yaml",
        )  # fmt: skip
    return found[0]


def check(manifest: dict[str, Any], *, has_plan: bool = False) -> Checked:
    """Every problem of the manifest, the flow's own config included, and whether the pools have room for the roles;
    with `has_plan` that plan says where they have."""
    spec, problems = supported.validate(manifest)
    if spec is not None:
        problems = [*problems, *_flow_problems(spec)]
    if spec is not None and not problems and not has_plan:
        problems = list(_room_problems(spec))
    metadata = manifest.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    return Checked(name=name, manifest=manifest, spec=spec, problems=tuple(problems))


def _flow_problems(spec: RLJobSpec) -> Iterator[Problem]:
    from rlinf_worker.flows import registry

    if ":" in spec.flow.name or spec.flow.name not in registry.FLOWS:
        # The user's own flow is checked where it runs; an unknown name is told by `supported`.
        yield from registry.check_roles(spec)
    else:
        yield from registry.check_job(spec)


def _room_problems(spec: RLJobSpec) -> Iterator[Problem]:
    """What the scheduler would answer a job of this shape: whether it fits depends on nothing but the manifest."""
    from rlinf_api.plan import JobRef
    from rlinf_scheduler.planner.infeasible import Infeasible
    from rlinf_scheduler.planner.initial import initial

    answer = initial(spec, job=JobRef(name="any", uid="any"))
    if isinstance(answer, Infeasible):
        for reason in answer.reasons:
            yield Problem(field=f"spec.roles[{reason.role}]" if reason.role else "spec", message=str(reason))


def advice(spec: RLJobSpec) -> Iterator[str]:
    """What a right manifest may be sorry for on a cluster, in sentences; what is wrong is refused."""
    for pool in spec.pools:
        if missing := _not_asked_for(spec, pool):
            given, none = pool.slots.resource, " and no ".join(missing)
            yield (
                f"spec.pools[{pool.name}]: its pods ask for {given} and for no {none}: "
                "they are the first to be evicted, and a quota may refuse them; name requests in resources of "
                f"spec.pools[{pool.name}].template.spec.containers[agent]"
            )


def _not_asked_for(spec: RLJobSpec, pool: PoolSpec) -> list[str]:
    """What a pool of accelerators does not ask for; for others the operator asks. A limit alone is a request, too. What
    is no mapping asks for nothing: the API server refuses it."""
    from rlinf_operator.manifests import pods

    if not pool.slots.resource:
        return []
    found = pods.agent_field(spec, pool, "resources")
    given = found if isinstance(found, dict) else {}
    parts = (given.get(part) for part in ("requests", "limits"))
    asked = {name for part in parts if isinstance(part, dict) for name in part}
    return [name for name in ("cpu", "memory") if name not in asked]


def override(manifest: dict[str, Any], assignments: Iterable[str]) -> None:
    """`spec.roles[env].workers=2` and `spec.flow.config.numEnvs=8`, in place; values are YAML.

    >>> m = {"spec": {"roles": [{"name": "env"}]}}
    >>> override(m, ["spec.roles[env].workers=2"]); m["spec"]["roles"][0]["workers"]
    2
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        parts = [p for p in path.replace("]", "").replace("[", ".").split(".") if p]
        if not equals or not parts or parts[0] != "spec":
            raise InvalidManifest(
                "--set cannot be read", got=repr(assignment), wanted="spec.path=value",
                next="write for example --set spec.flow.steps=10",
            )  # fmt: skip
        node: Any = manifest
        for part in parts[:-1]:
            place = _place(node, part, path)
            node = node.setdefault(place, {}) if isinstance(node, dict) else node[place]
        try:
            value = next(iter(documents.read(text, what=f"--set {path}")), None)
        except (yaml.YAMLError, ValueError) as error:
            raise InvalidManifest(
                f"--set {path}: the value is not YAML", got=repr(text), wanted="a number, a word, or a quoted text",
                next="quote it for the shell and for YAML: --set \"path='text'\"",
            ) from error  # fmt: skip
        node[_place(node, parts[-1], path)] = value


def _place(node: Any, part: str, path: str) -> Any:
    """The key or index that `part` is in a node."""
    if isinstance(node, dict):
        return part
    if isinstance(node, list):
        return _position(node, part, path)
    raise InvalidManifest(
        f"--set {path}: nothing can be set below a plain value", got=f"{part!r} below {node!r}",
        wanted="a path of fields and list entries", next="shorten the path, or write spec.roles[NAME].field",
    )  # fmt: skip


def _position(entries: list[Any], part: str, path: str) -> int:
    for position, entry in enumerate(entries):
        if str(position) == part or (isinstance(entry, dict) and entry.get("name") == part):
            return position
    named = ", ".join(str(e["name"]) for e in entries if isinstance(e, dict) and "name" in e)
    known = named or f"0 to {len(entries) - 1}"
    raise InvalidManifest(
        f"--set {path}: the list has no such entry", got=repr(part), wanted=f"one of {known}",
        next="name an entry that the manifest has",
    )  # fmt: skip
