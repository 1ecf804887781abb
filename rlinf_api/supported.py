"""Which flows, kinds and values this version has, and what is wrong with a manifest, one sentence per problem.

`validate` is what `rljob validate`, the local store's admission and the operator's `decide` ask. A field whose feature
does not exist yet is refused by name (`unsupported`), never ignored: whoever builds the feature removes its line here.

Not for: schemas of flow.config and roles[].config. Those belong to the flow and the kind (rlinf_worker), whose driver
refuses a wrong one with exit code 64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from rlinf_api import job as api
from rlinf_api import job_rules, names, sentences, storable
from rlinf_api.flows import FLOW_OF_KIND, FLOWS, KINDS, fits, kind_of
from rlinf_api.job import Problem, RLJobSpec

SYNTHETIC: Final = "synthetic"
_ROLES: Final = "spec.roles"
_ROLES_OF_A_POOL = re.compile(r"spec\.pools\[[^\]]*\]\.roles")
_EXAMPLE: Final = ("env",)
_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # module:function, module:Class


_HAVE_NO_TEXT: Final = ("ppo", SYNTHETIC)


_LATER: Final[tuple[tuple[str, Callable[[RLJobSpec], object], str], ...]] = (
    (
        "spec.flow.maxStaleness",
        lambda s: (s.flow.max_staleness or None) if s.flow.name == "ppo" else None,
        "write 0: flow ppo trains exactly on policy",
    ),
)
"""Fields whose feature does not exist yet: (field, what was set or None, what to write instead)."""


def unsupported(spec: RLJobSpec) -> Iterator[Problem]:
    """Every value whose feature this version does not have: what, where, what to write instead."""
    yield from _flow(spec)
    for role in spec.roles:
        yield from _kind(spec, role)
    for field, read, instead in _LATER:
        if (got := read(spec)) is not None:
            shown = sentences.shown(got)
            yield Problem(field=field, message=f"{shown} is not supported yet in this version; {instead}")
    if "://" in spec.checkpoint.uri and not spec.checkpoint.uri.startswith(("file://", *job_rules.OBJECT_STORES)):
        scheme = spec.checkpoint.uri.split("://", 1)[0]
        instead = "write an absolute path, file://, s3:// or gs://"
        message = f"scheme '{scheme}://' is not supported yet in this version; {instead}"
        yield Problem(field="spec.checkpoint.uri", message=message)


def _flow(spec: RLJobSpec) -> Iterator[Problem]:
    name = spec.flow.name
    if _OWN.fullmatch(name):
        return
    data = spec.data
    texts = {"spec.model": spec.model, "spec.data.train": data and data.train, "spec.data.eval": data and data.eval}
    for field, got in texts.items():
        if name in _HAVE_NO_TEXT and got:
            message = f"flow {name!r} has no language model and reads no data; remove it"
            yield Problem(field=field, message=message)
    if name not in FLOWS:
        hint = sentences.did_you_mean(name, tuple(FLOWS))
        known = f"write {' or '.join(FLOWS)}, or your own module:function"
        yield Problem(field="spec.flow.name", message=f"{name!r} is not a registered flow;{hint} {known}")
        return
    present = [r.name for r in spec.roles]
    for missing in (r for r in FLOWS[name] if r not in present):
        yield Problem(
            field="spec.roles",
            message=f"flow {name!r} uses role {missing!r}, got {', '.join(present)}; add a role named {missing!r}",
        )
    for extra in (r for r in present if FLOWS[name] and r not in FLOWS[name]):
        yield Problem(
            field=f"spec.roles[{extra}]",
            message=f"flow {name!r} has no role {extra!r}, only {', '.join(FLOWS[name])}; remove it, or write your own",
        )


def _kind(spec: RLJobSpec, role: api.RoleSpec) -> Iterator[Problem]:
    field = f"spec.roles[{role.name}].kind"
    if _OWN.fullmatch(role.kind):
        return
    if role.kind not in KINDS:
        hint = sentences.did_you_mean(role.kind, tuple(KINDS))
        known = f"write one of {', '.join(KINDS)}, or your own module:Class"
        yield Problem(field=field, message=f"{role.kind!r} is not a registered kind;{hint} {known}")
    elif (spec.flow.name == SYNTHETIC) != (role.kind == SYNTHETIC) and spec.flow.name in FLOWS:
        whole = "flow 'synthetic' has roles of kind 'synthetic' alone, and no other flow has them"
        yield Problem(field=field, message=f"got {role.kind!r} in flow {spec.flow.name!r}, but {whole}; change one")
    elif spec.flow.name in FLOWS and FLOW_OF_KIND.get(role.kind, spec.flow.name) != spec.flow.name:
        message = f"{role.kind!r} is of flow {FLOW_OF_KIND[role.kind]!r}, not {spec.flow.name!r}; "
        fitting = ", ".join(k for k, plays in KINDS.items() if plays == role.name and fits(k, spec.flow.name))
        yield Problem(field=field, message=f"{message}write {fitting or 'a kind of that flow'}, or module:Class")
    elif spec.flow.name in FLOWS and role.name in FLOWS[spec.flow.name] and KINDS[role.kind] != role.name:
        fitting = ", ".join(k for k, plays in KINDS.items() if plays == role.name and fits(k, spec.flow.name))
        yield Problem(
            field=field,
            message=f"{role.kind!r} plays {KINDS[role.kind]!r}, not {role.name!r}; write {fitting}, or module:Class",
        )


def _with_lines(problem: Problem, raw: Mapping[str, Any]) -> Problem:
    """The problem, with what to write where roles are not there, or empty, and have no default (docs/adr/0045). `raw`:
    the spec as it was written.

    >>> missing = Problem(field="spec.roles", message="is missing; write it")
    >>> str(_with_lines(missing, {"flow": {"name": "own:flow"}}))
    "spec.roles: is missing; write those of your flow, such as [{name: env, kind: gymnasium}]"
    """
    written_flow = raw.get("flow")
    named = written_flow.get("name") if isinstance(written_flow, Mapping) else None
    flow = named if isinstance(named, str) else ""
    of_flow, is_job = FLOWS.get(flow, ()), problem.field == _ROLES
    if not is_job and not _ROLES_OF_A_POOL.fullmatch(problem.field):
        return problem
    got, _, _ = problem.message.partition(";")
    empty = next((shown for shown in map(sentences.shown, ([], None)) if got.startswith(f"got {shown},")), None)
    if got != "is missing" and empty is None:
        return problem
    what = "is missing" if empty is None else f"got {empty}"
    if is_job:
        whose = f"those of flow {flow!r}: " if of_flow else "those of your flow, such as "
        lines = ", ".join(f"{{name: {role}, kind: {kind_of(role, flow)}}}" for role in of_flow or _EXAMPLE)
        return Problem(field=problem.field, message=f"{what}; write {whose}[{lines}]")
    own = raw.get("roles")
    written = [r["name"] for r in own if isinstance(r, Mapping) and r.get("name")] if isinstance(own, list) else []
    known = [role for role in written if isinstance(role, str)] or of_flow
    whose = "for all: " if known else "such as "
    lines = ", ".join(known or _EXAMPLE)
    return Problem(field=problem.field, message=f"{what}; write the roles that may run there, {whose}[{lines}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """`wrong` must change; `later` is what only this version cannot do: the two reasons of condition Valid=False."""

    spec: RLJobSpec | None
    wrong: tuple[Problem, ...] = ()
    later: tuple[Problem, ...] = ()


def examine(manifest: object) -> Examined:
    """An RLJob manifest, as strict as the API server: "3" is no number."""
    if not isinstance(manifest, Mapping):
        message = f"got {sentences.kind_of(manifest)}, wanted a mapping; write an RLJob"
        return Examined(spec=None, wrong=(Problem(field="manifest", message=message),))
    found = list(job_rules.check_envelope(manifest))
    raw = manifest.get("spec")
    if not isinstance(raw, Mapping):
        what = "is missing; write it" if raw is None else f"got {sentences.kind_of(raw)}, wanted a mapping"
        return Examined(spec=None, wrong=(*found, Problem(field="spec", message=what)))
    try:
        text = storable.dumps(raw)
    except (TypeError, ValueError) as error:
        said = storable.problems(raw, "spec") or [Problem(field="spec", message=f"is no JSON: {error}; correct it")]
        return Examined(spec=None, wrong=(*found, *said))
    try:
        spec = RLJobSpec.model_validate_json(text, strict=True)
    except ValidationError as error:
        said = sentences.problems(error, RLJobSpec, value=raw, prefix="spec")
        return Examined(spec=None, wrong=(*found, *(_with_lines(problem, raw) for problem in said)))
    left_out = [_with_lines(problem, raw) for problem in _left_out(spec, raw)]
    if left_out:
        return Examined(spec=None, wrong=(*found, *left_out))
    later = (*unsupported(spec), *_queued(spec, manifest))
    return Examined(spec=spec, wrong=(*found, *job_rules.check(spec)), later=later)


def _queued(spec: RLJobSpec, manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """What Kueue has no words for: it places one pool's pods in a domain, and never those of two."""
    metadata, shared = manifest.get("metadata"), spec.placement.topology
    labels = metadata.get("labels") if isinstance(metadata, Mapping) else None
    queue = labels.get(names.LABEL_QUEUE) if isinstance(labels, Mapping) else None
    group = [pool.name for pool in spec.pools if pool.topology is None]
    if queue and shared is not None and shared.required is not None and len(group) > 1:
        message = f"pods of pools {', '.join(group)} in one {shared.required} are not supported yet for a job in a "
        message += "queue, which places each pool by itself; write preferred, or spec.pools[*].topology"
        yield Problem(field="spec.placement.topology.required", message=message)


def _left_out(spec: RLJobSpec, raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Roles that were not written and have no default."""
    empty = "got [], wanted at least 1; write it"
    if not spec.roles:
        yield Problem(field=_ROLES, message="is missing; write it" if "roles" not in raw else empty)
    pools = raw.get("pools", [])
    for pool, written in zip(spec.pools, pools, strict=True):
        if not pool.roles:
            message = "is missing; write it" if "roles" not in written else empty
            yield Problem(field=f"spec.pools[{pool.name}].roles", message=message)


def validate(manifest: object) -> tuple[RLJobSpec | None, list[Problem]]:
    """(spec, []) is usable; (spec, problems) has the right shape but cannot run; (None, problems) has not."""
    found = examine(manifest)
    return found.spec, [*found.wrong, *found.later]
