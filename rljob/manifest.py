"""A manifest file as a person wrote it: read, override, check. Every problem becomes one sentence; nothing else leaves.

Called by `rljob validate` and `rljob run`. The rules themselves are rlinf_api's and the flow's; this module only
brings them to one file. Imports stay light: validate answers in half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf_api import supported
from rlinf_api.errors import InvalidManifest, UserError
from rlinf_api.job import Problem, RLJobSpec

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    name: str
    manifest: dict[str, Any]
    spec: RLJobSpec | None
    problems: tuple[Problem, ...]

    def lines(self) -> Iterator[str]:
        yield from map(str, self.problems)


def read(file: Path) -> dict[str, Any]:
    """The one RLJob of a file; other documents in it are refused."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidManifest(f"manifest {file} cannot be read", got=str(error), next="check the path") from error
    try:
        documents = [d for d in yaml.load_all(text, Loader=Loader) if d is not None]
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise InvalidManifest(f"manifest {file} is not YAML", got=where, next="correct that line") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InvalidManifest(
            f"manifest {file} must hold one RLJob", got=f"{len(documents)} documents" if documents else "nothing",
            next="keep one document of kind RLJob",
        )  # fmt: skip
    return documents[0]


def check(manifest: dict[str, Any]) -> Checked:
    """Every problem of the manifest, the flow's own config included."""
    spec, problems = supported.validate(manifest)
    if spec is not None:
        problems = [*problems, *_flow_problems(spec)]
    metadata = manifest.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    return Checked(name=name, manifest=manifest, spec=spec, problems=tuple(problems))


def _flow_problems(spec: RLJobSpec) -> Iterator[Problem]:
    from rlinf_worker.flows import registry

    if ":" in spec.flow.name or spec.flow.name not in registry.FLOWS:
        return  # the user's own flow is checked where it runs; an unknown name is told by `supported`
    try:
        registry.check_config(spec.flow.name, spec.flow.config)
    except UserError as error:
        for sentence in str(error).split("; spec."):
            field, _, message = (sentence if sentence.startswith("spec.") else f"spec.{sentence}").partition(": ")
            yield Problem(field=field, message=message)


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
            node = _child(node, part, path)
        try:
            value = yaml.load(text, Loader=Loader)
        except yaml.YAMLError as error:
            raise InvalidManifest(f"--set {path}: value is not YAML", got=repr(text)) from error
        if not isinstance(node, dict):
            raise InvalidManifest(f"--set {path}: nothing can be set there", got=type(node).__name__)
        node[parts[-1]] = value


def _child(node: Any, part: str, path: str) -> Any:
    if isinstance(node, dict):
        return node.setdefault(part, {})
    if isinstance(node, list):
        for position, entry in enumerate(node):
            if str(position) == part or (isinstance(entry, dict) and entry.get("name") == part):
                return entry
        known = ", ".join(str(e.get("name")) for e in node if isinstance(e, dict))
        raise InvalidManifest(f"--set {path}: no entry {part!r}", wanted=f"one of {known}")
    raise InvalidManifest(f"--set {path}: {part!r} is below a plain value", got=repr(node))
