"""Which plan is in force, which one is on its way, and what the driver must be told. Pure.

The driver is soft state: whenever its report names another revision than the one in force (0 after a restart), it is
told again. A plan that does not fit the job (any more) is passed over with its reason, and another one is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from rlinf_api import conditions, names, times
from rlinf_api.conditions import Condition, PlanCondition, Reason, Status
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import ConditionModel, RLJobSpec
from rlinf_api.plan import RLPlanStatus, resolve
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.reconcile.state import Instruct, Observed, PlanView


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChoice:
    current: PlanView | None = None
    pending: PlanView | None = None
    passed_over: tuple[PlanView, ...] = ()
    """Newest plans that cannot be used, each with its problem."""
    highest_revision: int = 0

    @property
    def request(self) -> str:
        """Reason for asking the scheduler; empty where a plan is in force."""
        if self.current is not None:
            return ""
        return "CapacityChanged" if self.highest_revision else "Initial"

    def pods(self) -> dict[str, int]:
        """Pods per pool; while a plan is on its way, as many as either needs."""
        wanted: dict[str, int] = {}
        for plan in (self.current, self.pending):
            for pool in plan.spec.pools if plan and plan.spec else ():
                wanted[pool.name] = max(wanted.get(pool.name, 0), pool.pods)
        return wanted


def choose(observed: Observed, spec: RLJobSpec, report: DriverReport | None) -> PlanChoice:
    """`status.plan.current` says which plan is in force; the driver's report may move it to the pending one."""
    usable, passed_over = [], []
    for plan in sorted(observed.plans, key=lambda p: p.revision):
        problem = _problem(plan, observed, spec)
        if problem:
            passed_over.append(replace(plan, problem=problem))
        else:
            usable.append(plan)
    highest = max((p.revision for p in observed.plans), default=0)
    if not usable:
        return PlanChoice(passed_over=tuple(passed_over), highest_revision=highest)
    named = next((p for p in usable if p.name == observed.status.plan.current), None)
    newest = usable[-1]
    in_driver = next((p for p in usable if report is not None and p.revision == report.plan_revision), None)
    current = named or newest
    if in_driver is not None and in_driver.revision > current.revision:
        current = in_driver  # committed; the status had no time to say so
    return PlanChoice(
        current=current,
        pending=newest if newest.revision > current.revision else None,
        passed_over=tuple(p for p in passed_over if p.revision > newest.revision),
        highest_revision=highest,
    )


def instruct(choice: PlanChoice, *, report: DriverReport | None, address: str, pods_ready: bool) -> Instruct | None:
    """At once where the driver has no plan; a switch begins when every pod that it needs is ready."""
    if report is None or choice.current is None or choice.current.spec is None or not address:
        return None
    if report.state in (DriverState.COMPLETE, DriverState.FAILED, DriverState.DRAINED):
        return None
    attempt = report.driver_attempt
    if report.plan_revision != choice.current.revision:
        return Instruct(
            address=address, driver_attempt=attempt, revision=choice.current.revision, plan=choice.current.spec,
            steps=("Prepare", "Commit"),
        )  # fmt: skip
    if choice.pending is not None and choice.pending.spec is not None and pods_ready:
        prepared = report.plan_prepared == choice.pending.revision
        return Instruct(
            address=address, driver_attempt=attempt, revision=choice.pending.revision, plan=choice.pending.spec,
            steps=("Commit",) if prepared else ("Prepare", "Commit"),
        )  # fmt: skip
    return None


def statuses(
    choice: PlanChoice, observed: Observed, *, report: DriverReport | None, now: datetime
) -> tuple[tuple[str, RLPlanStatus], ...]:
    """Status of each plan whose conditions must change: Applied once the driver has it, Superseded once another is."""
    if report is None or choice.current is None or report.plan_revision != choice.current.revision:
        return ()
    changed = []
    for plan in sorted(observed.plans, key=lambda p: p.revision):
        if plan.name == choice.current.name:
            kind, message = PlanCondition.APPLIED, f"driver attempt {report.driver_attempt} executes it"
        elif plan.revision < choice.current.revision:
            kind, message = PlanCondition.SUPERSEDED, f"by revision {choice.current.revision}"
        else:
            continue
        old = tuple(conditions.from_dict(c.model_dump(by_alias=True)) for c in plan.status.conditions)
        if conditions.is_true(old, kind):
            continue
        reason = Reason.PLAN_IN_FORCE if kind is PlanCondition.APPLIED else "Superseded"
        new = Condition(
            type=kind,
            status=Status.TRUE,
            reason=reason,
            message=message,
            last_transition_time=times.text(now),
            observed_generation=plan.generation,
        )
        after = [ConditionModel.model_validate(c.as_dict()) for c in conditions.set_condition(old, new)]
        changed.append((plan.name, plan.status.model_copy(update={"conditions": after})))
    return tuple(changed)


def driver_address(ip: str) -> str:
    return f"{ip}:{names.PORT_DRIVER_GRPC}" if ip else ""


def _problem(plan: PlanView, observed: Observed, spec: RLJobSpec) -> str:
    if plan.spec is None:
        return plan.problem
    if plan.spec.job.uid != observed.job.uid:
        return f"it is a plan of job uid {plan.spec.job.uid}"
    failed = next((c for c in plan.status.conditions if c.type == PlanCondition.FAILED and c.status == "True"), None)
    if failed is not None:
        return f"it failed: {failed.message}"
    try:
        resolve(plan.spec, spec)
    except InvalidManifest as error:
        return str(error)
    for pool in plan.spec.pools:
        known = next((p for p in spec.pools if p.name == pool.name), None)
        if known is None:
            return f"pool {pool.name!r} is not in spec.pools"
        most = known.pods if isinstance(known.pods, int) else known.pods.max
        if pool.pods > most:
            return f"it has {pool.pods} pods of pool {pool.name!r}, spec.pools[{pool.name}].pods allows {most}"
    return ""
