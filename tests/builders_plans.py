"""Plans that a person writes for a running job of elastic pools, and a World that runs it (reconcile/plans.py).

world = pin(running(plan(2, pods=2)), "math-p2")
"""

from dataclasses import replace
from typing import Any

from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import DriverState
from tests.builders import JobBuilder, World, plan_of, ppo_job

ELASTIC: list[dict[str, Any]] = [
    {"name": "sim", "roles": ["env", "rollout"], "pods": {"min": 1, "max": 3}, "slots": {"perPod": 4}},
    {"name": "train", "roles": ["actor"], "pods": 1, "slots": {"perPod": 1}},
]


def job() -> JobBuilder:
    return ppo_job().with_spec(
        pools=ELASTIC,
        roles=[
            {"name": "env", "kind": "gymnasium", "workers": {"min": 1, "max": 8}},
            {"name": "rollout", "kind": "torch"},
            {"name": "actor", "kind": "fsdp"},
        ],
    )


def plan(revision: int, *, pods: int = 1, uid: str = "", **fields: Any) -> RLPlanSpec:
    value = plan_of(job()).model_dump(mode="json", by_alias=True)
    value |= {"revision": revision, "source": "User", "reason": {"code": "Pinned", "message": "by hand"}, **fields}
    value["pools"] = [{"name": "sim", "pods": pods}, {"name": "train", "pods": 1}]
    if uid:
        value["job"]["uid"] = uid
    return RLPlanSpec.model_validate(value)


def running(*plans: RLPlanSpec) -> World:
    """At work under revision 1, with further plans lying there."""
    world = job().world().planned().created().all_ready().report(state=DriverState.RUNNING, plan_revision=1)
    world.step()
    for found in plans:
        world.with_plan(found)
    return world


def pin(world: World, name: str) -> World:
    return world.edit(placement={"mode": "Pinned", "pin": name})


def name(world: World, revision: int) -> str:
    return f"{world.job.name}-p{revision}"


def reason_of(world: World, kind: str) -> str:
    return world.condition(kind)[1]


def told(world: World) -> tuple[tuple[str, ...], int] | None:
    order = world.decide().instruct
    return (order.steps, order.plan.revision) if order else None


def plan_conditions(world: World, revision: int) -> dict[str, tuple[str, str]]:
    found = dict(world.decide().plan_statuses).get(name(world, revision))
    return {c.type: (c.status, c.reason) for c in found.conditions} if found else {}


def store_statuses(world: World) -> None:
    for found, status in world.decide().plan_statuses:
        world.plans = [replace(p, status=status) if p.name == found else p for p in world.plans]
