"""The lines to write where spec.roles, or a pool's roles, are missing: they have no defaults (docs/adr/0019).

Called by supported.examine, which knows flows and kinds.

>>> kinds = {"gymnasium": "env", "synthetic": ""}
>>> missing = Problem(field="spec.roles", message="is missing; write it")
>>> [str(p) for p in of_roles([missing], {"flow": {"name": "own"}}, flows={"own": ("env",)}, kinds=kinds)]
["spec.roles: is missing; write those of flow 'own': [{name: env, kind: gymnasium}]"]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rlinf_api import sentences
from rlinf_api.job import Problem

_ROLES: Final = "spec.roles"
_ROLES_OF_A_POOL = re.compile(r"spec\.pools\[[^\]]*\]\.roles")
_EXAMPLE: Final = ("env",)


def of_roles(
    problems: Iterable[Problem],
    raw: Mapping[str, Any],
    *,
    flows: Mapping[str, Sequence[str]],
    kinds: Mapping[str, str],
) -> list[Problem]:
    """Those of roles that are not there, or empty, with what to write. `raw`: the spec as it was written."""
    flow = raw.get("flow")
    named = flow.get("name") if isinstance(flow, Mapping) else None
    name = named if isinstance(named, str) else ""
    return [_with_lines(problem, raw, name, flows=flows, kinds=kinds) for problem in problems]


def _with_lines(
    problem: Problem, raw: Mapping[str, Any], flow: str, *, flows: Mapping[str, Sequence[str]], kinds: Mapping[str, str]
) -> Problem:
    of_flow, is_job = flows.get(flow, ()), problem.field == _ROLES
    if not is_job and not _ROLES_OF_A_POOL.fullmatch(problem.field):
        return problem
    got, _, _ = problem.message.partition(";")
    empty = next((shown for shown in map(sentences.shown, ([], None)) if got.startswith(f"got {shown},")), None)
    if got != "is missing" and empty is None:
        return problem
    what = "is missing" if empty is None else f"got {empty}"
    if is_job:
        whose = f"those of flow {flow!r}: " if of_flow else "those of your flow, such as "
        lines = ", ".join(f"{{name: {role}, kind: {_kind(role, flow, kinds)}}}" for role in of_flow or _EXAMPLE)
        return Problem(field=problem.field, message=f"{what}; write {whose}[{lines}]")
    own = raw.get("roles")
    written = [r["name"] for r in own if isinstance(r, Mapping) and r.get("name")] if isinstance(own, list) else []
    known = [role for role in written if isinstance(role, str)] or of_flow
    whose = "for all: " if known else "such as "
    lines = ", ".join(known or _EXAMPLE)
    return Problem(field=problem.field, message=f"{what}; write the roles that may run there, {whose}[{lines}]")


def _kind(role: str, flow: str, kinds: Mapping[str, str]) -> str:
    if kinds.get(flow) == "":
        return flow  # a flow whose roles have kinds of their own
    return next((kind for kind, plays in kinds.items() if plays == role), "module:Class")
