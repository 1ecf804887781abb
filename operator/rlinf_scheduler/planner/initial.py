"""The first plan of a job, before anything was measured: fill the pools in the order in which the job lists them.

    1. Each role, in the order of spec.roles, gets its fewest workers, first fit over its pools in the order of
       spec.pools: into the pods that the pools have at least, then into further ones up to what they may have.
    2. What is left in the pods that are open by then is shared out among the roles that may still grow, evenly, the
       earlier role first. No pod is opened for that: a pool does not grow for nothing.

Every worker has its slots to itself: roles run side by side; in turns (collocated.py) with `mode: Collocated`, and
where there are too few slots and all roles declare their memory. Nothing was measured, so what the plan assumes stands
in its reason. Names are never compared, only positions: a renamed role or pool gets the same plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from pydantic import ValidationError

from rlinf_api import sentences
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import PlacementMode, PoolSpec, Range, RLJobSpec, as_range
from rlinf_api.plan import (
    BasedOn,
    Capacity,
    ChannelPlan,
    CyclePlan,
    JobRef,
    PlanReason,
    PlanReasonModel,
    PoolPlan,
    RLPlanSpec,
    WorkerPlan,
)
from rlinf_api.slots import Slot, compress
from rlinf_scheduler.planner import allowed, collocated, memory
from rlinf_scheduler.planner.candidate import MAX_STAGES
from rlinf_scheduler.planner.collocated import FirstLayout
from rlinf_scheduler.planner.infeasible import Infeasible, NeedSlots, Objection, Reason

CYCLES: Final[dict[str, tuple[str, ...]]] = {"ppo": ("env", "rollout")}
"""Roles of a registered flow that feed each other within a step."""
DEFAULT_SLICES: Final = 2  # flow ppo's
UNTIMED: Final = "how long a step takes is not known before steps are measured"
"""What a plan says that no profile stands behind; one of replan/first.py has the time."""


@dataclass(slots=True)
class _Pool:
    """Free slots of a pool's open pods. Slots of a pod are taken from index 0 up, so what is free is always its end."""

    spec: PoolSpec
    used: list[int] = field(default_factory=list)  # per open pod
    first: dict[int, int] = field(default_factory=dict)
    """Cost of slots to the first pod that may hold so many: none before it ever will, as nothing is given back."""

    def take(self, slots: int, *, may_open: bool) -> tuple[Slot, ...] | None:
        per_pod = self.spec.slots.per_pod
        for ordinal in range(self.first.get(slots, 0), len(self.used)):
            used = self.used[ordinal]
            if used + slots <= per_pod:
                self.used[ordinal] += slots
                self.first[slots] = ordinal
                return tuple(Slot(self.spec.name, ordinal, used + i) for i in range(slots))
        self.first[slots] = len(self.used)
        if not may_open or slots > per_pod or len(self.used) >= as_range(self.spec.pods).max:
            return None
        self.used.append(slots)
        return tuple(Slot(self.spec.name, len(self.used) - 1, i) for i in range(slots))

    def room_for(self, slots: int) -> int:
        """Further workers of so many slots that the open pods hold."""
        return sum((self.spec.slots.per_pod - used) // slots for used in self.used)


def initial(
    spec: RLJobSpec, *, job: JobRef, revision: int = 1, reason: PlanReason = PlanReason.INITIAL
) -> RLPlanSpec | Infeasible:
    """The plan, or why there is none; also where the flow's config, which nobody may have checked yet, is no plan's."""
    try:
        placed = _placed(spec)
        if isinstance(placed, Infeasible):
            return placed
        return RLPlanSpec(
            job=job,
            revision=revision,
            based_on=BasedOn(),
            pools=[PoolPlan(name=name, pods=pods) for name, pods in placed.pods.items()],
            workers=[
                WorkerPlan(
                    role=role.name,
                    count=len(groups),
                    slots=compress(slot for group in groups for slot in group),
                    memory=memory.planned(role),
                )
                for role, groups in zip(spec.roles, placed.workers, strict=True)
            ],
            lease_sets=list(placed.lease_sets),
            channels=channels(spec),
            cycles=_cycles(spec, placed.workers),
            reason=PlanReasonModel(code=reason, message=f"{placed.said}; {UNTIMED}"),
        )
    except ValidationError as error:
        said = [str(p) for p in sentences.problems(error, RLPlanSpec, value=None, prefix=error.title)]
    except InvalidManifest as error:
        said = [str(error)]
    where = "in spec.flow.config or spec.pools"
    return Infeasible(reasons=tuple(Objection(f"no plan can hold it: {what} {where}") for what in said))


def fewest_pods(spec: RLJobSpec, pods: Mapping[str, int]) -> dict[str, int]:
    """How few pods a first plan could do with of each pool that has more than it must have, while the other pools have
    `pods`. A queue may admit as few.

    >>> pools = [{"name": "cpu", "roles": ["env"], "pods": {"min": 1, "max": 9}, "slots": {"perPod": 2}}]
    >>> role = {"name": "env", "kind": "m:E", "workers": {"min": 3, "max": 9}}
    >>> spec = RLJobSpec.model_validate({"flow": {"name": "m:f", "steps": 1}, "roles": [role], "pools": pools})
    >>> fewest_pods(spec, {"cpu": 4})
    {'cpu': 2}
    """
    found: dict[str, int] = {}
    for pool in spec.pools:
        most = pods.get(pool.name, 0)
        low = max(1, as_range(pool.pods).min)
        if most > low:
            tried = range(low, most)  # what a plan has, it can do with
            found[pool.name] = low + bisect_left(tried, True, key=partial(_has_room, spec, pods, pool.name))
    return found


def _has_room(spec: RLJobSpec, pods: Mapping[str, int], name: str, most: int) -> bool:
    """For a first plan, with so many pods of pool `name`."""

    def bound(pool: PoolSpec) -> PoolSpec:
        count = most if pool.name == name else max(1, pods.get(pool.name, 0))
        least = min(as_range(pool.pods).min, count)
        return pool.model_copy(update={"pods": Range(min=least, max=count)})

    placed = _placed(spec.model_copy(update={"pools": [bound(pool) for pool in spec.pools]}))
    return isinstance(placed, FirstLayout)


def _placed(spec: RLJobSpec) -> FirstLayout | Infeasible:
    never: list[Reason] = [*memory.too_large(spec), *allowed.never(spec)]
    if never:
        return Infeasible(reasons=tuple(never))
    if spec.placement.mode is PlacementMode.COLLOCATED:
        return collocated.place(spec)
    pools = [_Pool(spec=p, used=[0] * as_range(p.pods).min) for p in spec.pools]
    taken: list[list[tuple[Slot, ...]]] = [[] for _ in spec.roles]
    short = _place_fewest(spec, pools, taken)
    if not short:
        _share_rest(spec, pools, taken)
        workers = [groups[: allowed.most(role, len(groups))] for role, groups in zip(spec.roles, taken, strict=True)]
        pods = {p.spec.name: len(p.used) for p in pools}
        return FirstLayout(pods=pods, workers=workers, said=_explain(spec, pools, workers))
    if spec.placement.mode is not PlacementMode.AUTO:
        return Infeasible(reasons=tuple(short))
    instead = collocated.place(spec)
    # Unasked only where memory is known: roles that find no room on a slot while others keep theirs there would be
    # killed, and a slot too few is said at once.
    if not all(map(memory.is_known, spec.roles)):
        in_turns = isinstance(instead, FirstLayout)
        return Infeasible(reasons=tuple(replace(reason, in_turns=in_turns) for reason in short))
    if isinstance(instead, Infeasible):  # why not side by side, and why not in turns either
        return Infeasible(reasons=(*short, *(r for r in instead.reasons if r not in short)))
    return instead


def _place_fewest(spec: RLJobSpec, pools: list[_Pool], taken: list[list[tuple[Slot, ...]]]) -> list[NeedSlots]:
    short: list[NeedSlots] = []
    for position, role in enumerate(spec.roles):
        homes = [p for p in pools if role.name in p.spec.roles and memory.fits(role, p.spec)]
        need = allowed.fewest(role)
        for _ in range(need):
            group = _first_fit(homes, role.slots_per_worker)
            if group is None:
                names = {p.spec.name for p in homes}
                beside = [
                    r.name
                    for r, groups in zip(spec.roles[:position], taken, strict=False)
                    if any(g[0].pool in names for g in groups)
                ]
                reason = NeedSlots(
                    role=role.name, need=need, slots_per_worker=role.slots_per_worker, placed=len(taken[position]),
                    pools=tuple(p.spec.name for p in homes), beside=tuple(beside),
                )  # fmt: skip
                short.append(reason)
                break
            taken[position].append(group)
    return short


def _first_fit(homes: Sequence[_Pool], slots: int) -> tuple[Slot, ...] | None:
    """Open pods of any pool before a further pod of any."""
    for may_open in (False, True):
        for pool in homes:
            if (group := pool.take(slots, may_open=may_open)) is not None:
                return group
    return None


def _share_rest(spec: RLJobSpec, pools: list[_Pool], taken: list[list[tuple[Slot, ...]]]) -> None:
    """Pool by pool; each role takes its even share of what is left in one piece, so that ranges stay short."""
    for pool in pools:
        growing = [
            (position, role)
            for position, role in enumerate(spec.roles)
            if role.name in pool.spec.roles
            and memory.fits(role, pool.spec)
            and len(taken[position]) < allowed.limit(role)
        ]
        while growing:
            progress = False
            for number, (position, role) in enumerate(growing):
                share = -(-pool.room_for(role.slots_per_worker) // (len(growing) - number))
                for _ in range(min(share, allowed.limit(role) - len(taken[position]))):
                    group = pool.take(role.slots_per_worker, may_open=False)
                    if group is None:
                        break
                    taken[position].append(group)
                    progress = True
            growing = [(p, r) for p, r in growing if len(taken[p]) < allowed.limit(r)]
            if not progress:
                break


def channels(spec: RLJobSpec) -> list[ChannelPlan]:
    """What flow.config.channels asks for ({name: {microBatch, depth, capacity}}); other channels have the contract's
    defaults."""
    wanted = spec.flow.config.get("channels")
    found = []
    for name, value in wanted.items() if isinstance(wanted, dict) else ():
        fields = value if isinstance(value, dict) else {}
        default = ChannelPlan(name=name)
        micro_batch = _positive(fields.get("microBatch"), default.micro_batch)
        depth = _positive(fields.get("depth"), default.depth)
        asked = fields.get("capacity")
        if not isinstance(asked, dict) or asked.keys() - {"units", "bytes"}:
            asked = {}  # as all that a flow of one's own calls so and that is none
        capacity = sentences.checked(Capacity, asked, prefix=f"spec.flow.config.channels.{name}.capacity")
        capacity = Capacity(units=max(capacity.units, micro_batch * depth), bytes=capacity.bytes)
        found.append(ChannelPlan(name=name, micro_batch=micro_batch, depth=depth, capacity=capacity))
    return found


def _positive(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def _cycles(spec: RLJobSpec, taken: Sequence[Sequence[tuple[Slot, ...]]]) -> list[CyclePlan]:
    """The cycles of a registered flow, or what flow.config.cycles names: [{roles, stages}, ...]. Where neither says how
    many stages, there are as many as a worker has slices: no measurement speaks against keeping both roles at work."""
    config, own = spec.flow.config, CYCLES.get(spec.flow.name, ())
    found = [(own, config.get("stages"))] if own else []
    if isinstance(named := config.get("cycles"), list):
        asked = [(one.get("roles"), one.get("stages")) for one in named if isinstance(one, dict)]
        found = [(tuple(map(str, roles)), stages) for roles, stages in asked if isinstance(roles, list)] or found
    slices = _positive(config.get("slices"), DEFAULT_SLICES) if own else 1
    workers = {role.name: len(groups) for role, groups in zip(spec.roles, taken, strict=True)}
    return [
        CyclePlan(
            roles=list(roles),
            stages=min(MAX_STAGES, _positive(wanted, -(-slices // max(1, workers[roles[0]])))),
        )
        for roles, wanted in found
        if roles and workers.keys() >= set(roles)
    ]


def _explain(spec: RLJobSpec, pools: Sequence[_Pool], taken: Sequence[Sequence[tuple[Slot, ...]]]) -> str:
    idle = [
        f"{sum(p.spec.slots.per_pod - used for used in p.used)} of pool {p.spec.name}"
        for p in pools
        if any(used < p.spec.slots.per_pod for used in p.used)
    ]
    unused = f"; idle slots: {', '.join(idle)}" if idle else ""
    return (
        f"pools filled in order, roles side by side: {collocated.roles_text(spec, taken)}{unused}. Assumed, as nothing "
        "is measured yet: every slot holds its role's memory, and all workers of a role are equally fast"
    )
