"""What an edit of an RLJob at work does: which fields a running driver is told, and which its pods are made from.

    in place          flow.steps, checkpoint.everySteps and keep (Goal: the driver is told), and all that only operator
                      and scheduler read: bounds of pods and workers, placement, policies, deadlines, suspend
    while suspended   what pods are made from (`inputs`): a resume makes them anew. So while it starts: no step is lost
    never             seed, the flow's name, roles and their kinds: another job; who looks after it

The API server refuses an edit of the last two by the rules of `RULES`, in CEL, with `oldSelf`; the store of local mode
by `refusal`, word for word. A template's metadata, and an order of entries, are no inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlinf_api.conditions import JobState
from rlinf_api.job import RLJobSpec, roles_in_cel
from rlinf_api.report import Goal
from rlinf_api.unknown import compact


def goal_of(spec: RLJobSpec) -> Goal:
    return Goal(steps=spec.flow.steps, every_steps=spec.checkpoint.every_steps, keep=spec.checkpoint.keep)


def with_goal(spec: RLJobSpec, goal: Goal) -> RLJobSpec:
    flow = spec.flow.model_copy(update={"steps": goal.steps})
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": goal.every_steps, "keep": goal.keep})
    return spec.model_copy(update={"flow": flow, "checkpoint": checkpoint})


def inputs(spec: RLJobSpec, pool: str = "") -> dict[str, Any]:
    """What a pod is made from, by field: the driver's (no pool), or a pool's worker pods'.

    >>> from rlinf_api.job import FlowSpec, PoolSpec, RoleSpec
    >>> job = RLJobSpec(
    ...     flow=FlowSpec(name="ppo", steps=7), pools=[PoolSpec(name="cpu", roles=["env"], pods=2)],
    ...     roles=[RoleSpec(name="env", kind="gymnasium")],
    ... )
    >>> inputs(job, "cpu")
    {'flow.name': 'ppo', 'roles[env].kind': 'gymnasium', 'pools[cpu].roles': ['env']}

    Values that equal their defaults are left out, so that a newer operator, which knows more fields, finds the same.
    """
    said = compact(spec)
    found: dict[str, Any] = {key: said[key] for key in ("seed", "model", "data", "runtime") if key in said}
    found |= {f"flow.{key}": value for key, value in said["flow"].items() if key != "steps"}
    if uri := said.get("checkpoint", {}).get("uri"):
        found["checkpoint.uri"] = uri
    own_template = {} if pool else said.get("driver", {})
    for field, entry in (("template.spec", said), ("driver.template.spec", own_template)):
        if template := entry.get("template", {}).get("spec"):
            found[field] = template
    if pool and (topology := said.get("placement", {}).get("topology")):
        found["placement.topology"] = topology
    for role in said["roles"]:
        own = {k: v for k, v in role.items() if k not in ("name", "workers", "spares")}
        found |= {f"roles[{role['name']}].{key}": value for key, value in own.items()}
    for entry in (p for p in said["pools"] if p["name"] == pool):
        own = {k: v for k, v in entry.items() if k not in ("name", "pods", "template")}
        own["roles"] = sorted(own["roles"])
        found |= {f"pools[{pool}].{key}": value for key, value in own.items()}
        if template := entry.get("template", {}).get("spec"):
            found[f"pools[{pool}].template.spec"] = template
    return found


# --- what an edit is refused for --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EditRule:
    """`same`: in CEL, over `self.spec` and `oldSelf.spec`. `free_while_suspended`: and while it starts."""

    field: str
    message: str
    same: str
    free_while_suspended: bool = False

    @property
    def cel(self) -> str:
        """What has stayed the same comes first: the API server asks all of these at each write of a status too, and to
        look a field up costs it as much as the object around it has fields."""
        return f"{self.same} || {FREE}" if self.free_while_suspended else self.same


STARTS: Final = (JobState.QUEUED, JobState.STARTING, JobState.SUSPENDED)
FREE: Final = (
    "self.spec.suspend || oldSelf.spec.suspend || !has(oldSelf.status) || !has(oldSelf.status.attempt)"
    " || oldSelf.status.attempt == 0 || (has(oldSelf.status.state)"
    f" && oldSelf.status.state in [{', '.join(repr(str(state)) for state in STARTS)}])"
)
"""No pod was made yet, or none has done a step that would be lost (an image that cannot be had is corrected so), or
none is left behind the edit: pods of before a resume are of an earlier life. A job that a rule of failurePolicy has
suspended is resumed by the edit that repairs it."""


def _never(field: str, same: str, *, what: str = "") -> EditRule:
    return EditRule(
        field=field, message=f"{what or field} cannot change once the job exists; make a new RLJob", same=same
    )


def _suspended(field: str, same: str, *, what: str = "") -> EditRule:
    remedy = "set spec.suspend to true, change it, and set spec.suspend to false again"
    message = f"{what or field} cannot change while the job is at work, as its pods are made from it; {remedy}"
    return EditRule(field=field, message=message, same=same, free_while_suspended=True)


def _each(entries: str, same: str) -> str:
    """A rule in CEL over entries that bear one name; `same` compares `e`, the new one, with `o`, the old one.

    >>> _each("roles", "o.config == e.config")
    'self.spec.roles.all(e, oldSelf.spec.roles.all(o, o.name != e.name || o.config == e.config))'
    """
    return f"self.spec.{entries}.all(e, oldSelf.spec.{entries}.all(o, o.name != e.name || {same}))"


def _maybe(field: str, *, new: str = "self.spec", old: str = "oldSelf.spec") -> str:
    """Whether a field that may be absent has stayed the same, in CEL."""
    return f"(has({new}.{field}) ? has({old}.{field}) && {new}.{field} == {old}.{field} : !has({old}.{field}))"


def _names(entries: str, same: str) -> str:
    size = f"self.spec.{entries}.size() == oldSelf.spec.{entries}.size()"
    return f"{size} && self.spec.{entries}.all(e, oldSelf.spec.{entries}.exists(o, {same}))"


_NEW_ROLES, _OLD_ROLES = (roles_in_cel(spec, with_kinds=True) for spec in ("self.spec", "oldSelf.spec"))
RULES: Final[tuple[EditRule, ...]] = (
    _never("spec.seed", "self.spec.seed == oldSelf.spec.seed"),
    _never("spec.managedBy", "self.spec.managedBy == oldSelf.spec.managedBy"),
    _never("spec.flow.name", "self.spec.flow.name == oldSelf.spec.flow.name"),
    _never(
        "spec.roles",
        f"{_names('roles', 'o.name == e.name && o.kind == e.kind')}"
        f" || {_NEW_ROLES}.size() == {_OLD_ROLES}.size() && {_NEW_ROLES}.all(x, x in {_OLD_ROLES})",
        what="spec.roles: roles and their kinds",
    ),
    _suspended(
        "spec.roles[*]",
        "(self.spec.roles.size() == 0) == (oldSelf.spec.roles.size() == 0)",
        what="spec.roles[*]: whether they are written out",
    ),
    _suspended("spec.runtime", _maybe("runtime")),
    _suspended("spec.flow.config", "self.spec.flow.config == oldSelf.spec.flow.config"),
    _suspended("spec.flow.maxStaleness", "self.spec.flow.maxStaleness == oldSelf.spec.flow.maxStaleness"),
    _suspended("spec.checkpoint.uri", "self.spec.checkpoint.uri == oldSelf.spec.checkpoint.uri"),
    _suspended("spec.model", _maybe("model")),
    _suspended("spec.data", _maybe("data")),
    _suspended("spec.roles[*].config", _each("roles", "o.config == e.config")),
    _suspended("spec.roles[*].slotsPerWorker", _each("roles", "o.slotsPerWorker == e.slotsPerWorker")),
    _suspended("spec.pools", _names("pools", "o.name == e.name"), what="spec.pools: which pools there are"),
    _suspended("spec.pools[*].roles", _each("pools", "o.roles == e.roles")),
    _suspended("spec.pools[*].slots", _each("pools", _maybe("slots", new="e", old="o"))),
    _suspended("spec.pools[*].image", _each("pools", "o.image == e.image")),
    _suspended("spec.placement.topology", _maybe("placement.topology")),
    _suspended("spec.pools[*].topology", _each("pools", _maybe("topology", new="e", old="o"))),
    _suspended("spec.template.spec", _maybe("template.spec")),
    _suspended("spec.driver.template.spec", _maybe("driver.template.spec")),
    _suspended("spec.pools[*].template.spec", _each("pools", _maybe("template.spec", new="e", old="o"))),
)
"""In this order an edit of several is answered."""


def is_free(status: Mapping[str, Any]) -> bool:
    """FREE, but for spec.suspend."""
    return not status.get("attempt") or status.get("state") in STARTS


def refusal(before: Mapping[str, Any], after: Mapping[str, Any], *, status: Mapping[str, Any]) -> str:
    """The sentence of the first rule that an edit of a spec, as it is written, breaks; empty: it breaks none."""
    old, new = (RLJobSpec.model_validate(spec) for spec in (before, after))
    broken = {*_moved(old, new), *_written_out(before, after)}
    freely = old.suspend or new.suspend or is_free(status)
    return next((r.message for r in RULES if r.field in broken and not (r.free_while_suspended and freely)), "")


def _written_out(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Fields of RULES that are looked at as they stand there, and not by what they mean: CEL knows no more."""
    if bool(before.get("roles")) != bool(after.get("roles")):
        yield "spec.roles[*]"
    old, new = ({p["name"]: set(p.get("roles") or ()) for p in spec["pools"]} for spec in (before, after))
    if any(roles != new[name] for name, roles in old.items() if name in new):
        yield "spec.pools[*].roles"
    slots = [{p["name"]: _slots(p) for p in spec["pools"]} for spec in (before, after)]
    if any(said != slots[1][name] for name, said in slots[0].items() if name in slots[1]):
        yield "spec.pools[*].slots"


def _slots(pool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """As the API server keeps them: what is not there, a runtime may say, so that it is not the same as a default."""
    said = pool.get("slots")
    return None if said is None else {"resource": "", "cpu": "", **said}


def _moved(old: RLJobSpec, new: RLJobSpec) -> Iterator[str]:
    """Fields of RULES."""
    pools = [{pool.name for pool in spec.pools} for spec in (old, new)]
    if pools[0] != pools[1]:
        yield "spec.pools"
    if old.managed_by != new.managed_by:
        yield "spec.managedBy"
    for pool in ("", *(pools[0] & pools[1])):
        for field in moved(inputs(old, pool), inputs(new, pool)):
            general = re.sub(r"\[[^\]]*\]", "[*]", f"spec.{field}")
            yield "spec.roles" if general == "spec.roles[*].kind" else general


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Fields that are other, or there are none of.

    >>> moved({"seed": 1, "flow.config": {}}, {"flow.config": {}, "model": "/m"})
    ['model', 'seed']
    """
    return sorted(field for field in {*before, *after} if before.get(field) != after.get(field))
