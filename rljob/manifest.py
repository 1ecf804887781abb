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

from rlinf_api import names, runtimes, sentences, supported
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import PoolSpec, Problem, RLJobSpec
from rlinf_api.runtimes import RLRuntimeSpec
from rljob import documents, pod_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    name: str
    manifest: dict[str, Any]
    spec: RLJobSpec | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What stands in a file, and in those beside it."""

    file: Path
    job: dict[str, Any] | None
    runtimes: dict[str, dict[str, Any]]
    """RLRuntimes by name."""

    def the_job(self) -> dict[str, Any]:
        if self.job is None:
            raise _no_job(self.file, "RLRuntimes alone")
        return self.job


def read(file: Path) -> dict[str, Any]:
    """The one RLJob of a file; RLRuntimes may stand beside it, other documents are refused."""
    return given(file).the_job()


def given(file: Path, *, beside: Iterable[Path] = ()) -> Given:
    """`beside`: files of RLRuntimes alone. A file of nothing else has no job."""
    found = documents.of_file(file, what=f"manifest {file}")
    is_one = [isinstance(document, dict) and document.get("kind") == runtimes.KIND for document in found]
    jobs = [document for document, one in zip(found, is_one, strict=True) if not one]
    if len(jobs) > 1 or not found or not all(isinstance(job, dict) for job in jobs):
        got = "nothing" if not found else f"{len(jobs)} documents"
        if len(jobs) == 1:
            got = "a list" if isinstance(jobs[0], list) else sentences.shown(jobs[0])
        raise _no_job(file, got)
    listed = [(file, document) for document, one in zip(found, is_one, strict=True) if one]
    for other in beside:
        listed += [(other, document) for document in documents.of_file(other, what=f"runtime {other}")]
    return Given(file=file, job=jobs[0] if jobs else None, runtimes=_by_name(listed))


def _no_job(file: Path, got: str) -> InvalidManifest:
    return InvalidManifest(
        f"manifest {file} must hold one RLJob", got=got,
        wanted="one mapping with apiVersion, kind, metadata, spec", next="see examples/cartpole/rljob.yaml",
    )  # fmt: skip


def _by_name(listed: Iterable[tuple[Path, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file, document in listed:
        kind = document.get("kind") if isinstance(document, dict) else sentences.kind_of(document)
        meta = document.get("metadata") if isinstance(document, dict) else None
        name = meta.get("name") if isinstance(meta, dict) else None
        if kind != runtimes.KIND or not isinstance(name, str) or not name:
            raise InvalidManifest(
                f"{file} must hold {runtimes.KIND}s beside the job", got=f"kind {kind!r}, name {sentences.shown(name)}",
                wanted=f"kind: {runtimes.KIND} and metadata.name", next="see docs/runtimes.md",
            )  # fmt: skip
        if name in found:
            raise InvalidManifest(
                f"{runtimes.KIND} {name!r} is given twice", got=str(file), next="leave one of them out"
            )
        found[name] = document
    return found


def resolved(job: dict[str, Any], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The job as a cluster with these runtimes would run it. InvalidManifest where it names another one, or one that is
    wrong."""
    if not (name := runtimes.named_by(job)):
        return job
    if name not in known:
        ask = f"kubectl get rlruntime {name} -o yaml"
        raise InvalidManifest(
            f"spec.runtime: names {runtimes.KIND} {name!r}, which no file here holds",
            got=", ".join(sorted(known)) or "no runtime",
            next=f"add it to the file as another document, or name its file: --runtime FILE ({ask})",
        )  # fmt: skip
    spec, problems = runtimes.examine(known[name])[0], runtime_problems(known[name])
    if spec is None or problems:
        raise InvalidManifest("; ".join(f"{runtimes.KIND} {name}: {problem}" for problem in problems))
    return runtimes.with_runtime(job, spec)


def check(manifest: dict[str, Any], *, has_plan: bool = False) -> Checked:
    """Every problem of the manifest, the flow's own config included, and whether the pools have room for the roles;
    with `has_plan` that plan says where they have."""
    spec, problems = supported.validate(manifest)
    if spec is not None:
        problems = [*problems, *_template_problems(spec), *_flow_problems(spec)]
    if spec is not None and not problems and not has_plan:
        problems = list(_room_problems(spec))
    metadata = manifest.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    return Checked(name=name, manifest=manifest, spec=spec, problems=tuple(problems))


def _templates(spec: RLJobSpec | RLRuntimeSpec) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """(where it stands, the template, names of our containers in it)."""
    agent, driver = names.CONTAINER_AGENT, names.CONTAINER_DRIVER
    yield "spec.template", spec.template, (agent, driver)
    yield "spec.driver.template", spec.driver.template, (driver,)
    if isinstance(spec, RLRuntimeSpec):
        yield "spec.poolDefaults.template", spec.pool_defaults.template, (agent,)
    for pool in spec.pools:
        yield f"spec.pools[{pool.name}].template", pool.template, (agent,)


def _template_problems(spec: RLJobSpec | RLRuntimeSpec) -> Iterator[Problem]:
    for field, template, _ in _templates(spec):
        yield from pod_fields.check(field, template)


def runtime_problems(manifest: dict[str, Any]) -> list[Problem]:
    """Every problem of an RLRuntime."""
    spec, problems = runtimes.examine(manifest)
    return [*problems, *(_template_problems(spec) if spec is not None else ())]


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
    for field, template, ours in _templates(spec):
        yield from pod_fields.sidecars(field, template, ours=ours)
    for pool in spec.pools:
        if missing := _not_asked_for(spec, pool):
            given, none = pool.slots.resource, " and no ".join(missing)
            fields = ("cpu" if name == "cpu" else "hostMemory" for name in missing)
            yield (
                f"spec.pools[{pool.name}]: its pods ask for {given} and for no {none}: "
                f"they are the first to be evicted, and a quota may refuse them; write {' and '.join(fields)} of "
                f"spec.pools[{pool.name}].slots"
            )


def _not_asked_for(spec: RLJobSpec, pool: PoolSpec) -> list[str]:
    """What neither its slots nor its template ask for. A limit alone is a request, too. What is no mapping asks for
    nothing: the API server refuses it."""
    from rlinf_operator.manifests import pods

    found = pods.agent_field(spec, pool, "resources")
    given = found if isinstance(found, dict) else {}
    parts = (*(given.get(part) for part in ("requests", "limits")), pods.resources(pool.slots)["requests"])
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
