"""Carries a Decision out: children, one status write, deletions, then events. Decides nothing.

The order is what makes a crash between any two writes harmless (docs: places.py, restart.py):

1. questions (RequestPlan, Prepare/Commit) and the queue's order beside Service, NetworkPolicy, PodDisruptionBudget and
   Secrets; then the ConfigMap, whose existence says that the Secrets exist; then the pods (creating.py: in slow start).
2. the status, once, with the answers in it, against the resourceVersion that was read. Refused children leave lives,
   counts of pods and first attempts as they were; so do those that a large job leaves to its next pass. None in the
   pass that had a job's first plan made.
3. deletions: a pod that ended is in status.restarts by now. One whose successor was refused stays, unless it is alive,
   has inputs of before an edit, and counts in the quota that refuses.
4. plan statuses, drain, events.

A 409 on create is success where the owner is this job: an earlier pass, or another replica before it lost its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from rlinf_api import conditions, names, supported, times
from rlinf_api import job as api
from rlinf_api.errors import InvariantBroken, RetryableError, RLinfError, WorkerUnreachable
from rlinf_api.job import RLJobStatus
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_operator.clients import objects
from rlinf_operator.clients.api_errors import NamespaceTerminating
from rlinf_operator.clients.authority import Authority
from rlinf_operator.clients.driver import Drivers
from rlinf_operator.clients.objects import ObjectStore
from rlinf_operator.clients.queues import Providers
from rlinf_operator.clients.scheduler import Scheduler
from rlinf_operator.manifests import config
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.reconcile import creating, events, outcome
from rlinf_operator.reconcile.creating import Makers, PodsMade
from rlinf_operator.reconcile.events import PodLog
from rlinf_operator.reconcile.outcome import Answers
from rlinf_operator.reconcile.state import Decision, DeletePod, Observed
from rlinf_operator.reconcile.telling import EventRecorder

logger = logging.getLogger(__name__)
FIRST_WRITES: Final = timedelta(minutes=10)
"""How old a job may be whose Secrets count as of its first writes: an operator that died in them is back by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What a pass writes through."""

    store: ObjectStore
    scheduler: Scheduler
    drivers: Drivers
    authority: Authority
    clock: Callable[[], datetime]
    recorder: EventRecorder
    queues: Providers | None = None
    makers: Makers = field(default_factory=Makers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    wrote_status: bool = False
    finished: bool = False
    """By the status that was written."""
    progressed: bool = False
    """A plan was written: look again at once."""
    try_again: str = ""
    """Why the pass must be repeated with back-off; empty: it need not."""
    left_status: bool = False
    """To the next pass, which follows at once."""
    over_quota: str = ""
    """What the API server said where a quota is full: nobody asks it again before the pause of `try_again` is over."""
    going: bool = False
    """The namespace is being deleted: nothing can be made there, and the job goes as well."""


async def apply(
    decision: Decision, observed: Observed, clients: Clients, *, may_leave_status: bool = False, no_room: str = ""
) -> Applied:
    """`no_room`: what a full quota said a moment ago: no pod is tried, and all is as if it had said so again."""
    job = observed.job
    if decision.delete_job:
        await objects.delete_if_there(clients.store, "RLJob", job.name, namespace=job.namespace, uid=job.uid)
        return Applied()
    log = events.PodLog(observed)
    answers = await _write_children(decision, observed, clients, no_room=no_room, log=log)
    if answers.planned and may_leave_status and not answers.held:
        # A job's first plan: the next pass makes its pods at once, and its status says all that this one's would.
        return Applied(progressed=True, left_status=True)
    status = outcome.status_after(answers, observed, decided=decision.status, now=clients.clock())
    wrote = status != observed.status
    if wrote:
        await _write_status(observed, status, clients.store)
        events.log_changes(observed, status)
    if answers.going:
        return Applied(wrote_status=wrote, going=True)
    refused, held = (*answers.writes_refused, *answers.late_refused), answers.held
    goes_first = set(answers.makes_room)
    unwanted = [p for p in decision.delete_pods if not (held and p.for_successor) or p.makes_room in goes_first]
    await _settled(*(_delete_pod(clients.store, pod, namespace=job.namespace, log=log) for pod in unwanted))
    for kind, name, uid in (
        ("NetworkPolicy", names.network_policy_name(job.name), decision.delete_network_policy),
        ("PodDisruptionBudget", names.disruption_budget_name(job.name), decision.delete_disruption_budget),
    ):
        if uid:
            await objects.delete_if_there(clients.store, kind, name, namespace=job.namespace, uid=uid)
    await _settled(*(_write_plan_status(clients.store, observed, *entry) for entry in decision.plan_statuses))
    for name, uid in decision.delete_plans:
        await objects.delete_if_there(clients.store, "RLPlan", name, namespace=job.namespace, uid=uid)
    if (order := decision.drain) is not None:
        clients.drivers.drain(observed.key, order.target, deadline_s=order.deadline_s)
    told = [*events.of_transition(observed.status, status), *events.of_plan(observed.status, status, observed.plans)]
    told += [*decision.events, *events.of_roll(unwanted)]
    if decision.adjust is not None and not answers.not_adjusted:
        told.append(events.of_adjusted(decision.adjust))
    if answers.infeasible and outcome.asks_for_fewer(observed, decision.status):
        told.append(events.of_no_smaller_plan(answers.infeasible))
    told = told if held else [*told, *decision.events_of_made]
    await clients.recorder.tell(observed, told, now=clients.clock())
    more = len(refused[3:]) + answers.untried
    told_of = [*refused[:3], f"and {more} more"] if more else refused
    others = (answers.scheduler_away, answers.driver_refused, answers.not_adjusted, answers.queue_refused)
    trouble = "; ".join(filter(None, (*told_of, *others)))
    finished = wrote and conditions.is_finished(status.conditions)
    progressed = bool(answers.planned) or bool(answers.rest and not refused)
    return Applied(
        wrote_status=wrote, finished=finished, progressed=progressed, try_again=trouble, over_quota=answers.over_quota
    )


async def _write_children(
    decision: Decision, observed: Observed, clients: Clients, *, no_room: str, log: PodLog
) -> Answers:
    planned: Answers
    children: Answers
    planned, queue_refused, driver_refused, not_adjusted, children = await _settled(
        _ask_scheduler(decision, observed, clients),
        _tell_queue(decision, observed, clients),
        _instruct(decision, clients),
        _adjust(decision, clients),
        _create_children(decision, observed, clients, no_room=no_room, log=log),
    )
    return replace(
        children,
        planned=planned.planned,
        infeasible=planned.infeasible,
        scheduler_away=planned.scheduler_away,
        queue_refused=queue_refused,
        driver_refused=driver_refused,
        not_adjusted=not_adjusted,
    )


async def _create_children(
    decision: Decision, observed: Observed, clients: Clients, *, no_room: str, log: PodLog
) -> Answers:
    """What was refused: of what the job needs, and of pods that only the plan on its way needs."""
    refused: list[RLinfError]
    refused, (expire, issuer, trouble) = await _settled(
        _write_surroundings(decision, observed, clients.store), _certify(decision, observed, clients)
    )
    refused += trouble
    if decision.write_config and not refused:
        refused += await _in_parallel([_write_config(observed, clients.store, expire, issuer=issuer)])
    if refused:
        return Answers(writes_refused=tuple(map(str, refused)), going=any(map(_is_going, refused)))
    if not decision.create_pods:
        return Answers()
    pods, later = decision.create_pods, decision.later_pods
    if no_room:
        made = PodsMade(untried=[*(pod["metadata"]["name"] for pod in pods), *later])
    else:

        async def create(pod: Manifest) -> None:
            if await _create(clients.store, pod, observed):
                log.made(pod)

        made = await creating.make(pods, create, makers=clients.makers, rest=later)
    return _answers(decision, made, no_room=no_room)


def _answers(decision: Decision, made: PodsMade, *, no_room: str) -> Answers:
    late = tuple(str(error) for name, error in made.refused.items() if name in decision.late_pods)
    due = {name: error for name, error in made.refused.items() if name not in decision.late_pods}
    said, of_due = tuple(map(str, due.values())), any(map(objects.is_over_quota, due.values()))
    if no_room:
        of_due = any(name not in decision.late_pods for name in made.untried)
        said, late = ((no_room,), ()) if of_due else ((), (no_room,))
    return Answers(
        writes_refused=said, late_refused=late, rest=len(made.rest), no_room=of_due,
        untried=len(made.untried) - (1 if no_room else 0),
        over_quota=no_room or next((str(e) for e in made.refused.values() if objects.is_over_quota(e)), ""),
        makes_room=tuple(p.makes_room for p in decision.delete_pods if p.makes_room) if of_due else (),
        going=any(map(_is_going, made.refused.values())),
    )  # fmt: skip


def _is_going(error: RLinfError) -> bool:
    return isinstance(error, NamespaceTerminating)


async def _ask_scheduler(decision: Decision, observed: Observed, clients: Clients) -> Answers:
    if not decision.request_plan:
        return Answers()
    try:
        answer = await clients.scheduler.request_plan(
            _within(observed.manifest, decision.plan_within),
            reason=decision.request_plan,
            highest_revision=decision.highest_revision,
        )
    except RetryableError as error:
        return Answers(scheduler_away=str(error))
    return Answers(planned=answer.plan, infeasible=answer.infeasible)


def _within(job: Manifest, most: Mapping[str, int] | None) -> Manifest:
    """The job as if its pools could have no more pods than these: what the planner may count with."""
    if most is None:
        return job
    pools = []
    for pool in job["spec"]["pools"]:
        pods = pool.get("pods", 1)
        bounds = pods if isinstance(pods, dict) else {"min": pods, "max": pods}
        ceiling = max(1, bounds["min"], min(bounds["max"], most.get(pool["name"], 0)))
        pools.append({**pool, "pods": {"min": bounds["min"], "max": ceiling}})
    return {**job, "spec": {**job["spec"], "pools": pools}}


async def _tell_queue(decision: Decision, observed: Observed, clients: Clients) -> str:
    if decision.queue is None or clients.queues is None or observed.queue is None:
        return ""
    try:
        provider = clients.queues.of(observed.queue.provider)
        await provider.carry_out(decision.queue, observed.manifest, now=clients.clock())
    except RLinfError as error:
        return f"the queue refused to {decision.queue.kind.replace('_', ' ')}: {error}"
    return ""


async def _instruct(decision: Decision, clients: Clients) -> str:
    order = decision.instruct
    if order is None:
        return ""
    target, plan = order.target, order.plan
    for step in order.steps:
        try:
            refusal = await clients.drivers.apply_plan(target, plan, step=step, switches=order.switches, uid=order.uid)
        except WorkerUnreachable as error:
            return str(error)
        if refusal:
            return f"driver attempt {target.attempt} refused {step} of plan revision {plan.revision}: {refusal}"
    return ""


async def _adjust(decision: Decision, clients: Clients) -> str:
    if (order := decision.adjust) is None:
        return ""
    try:
        return await clients.drivers.adjust(order.target, order.goal)
    except WorkerUnreachable as error:
        return str(error)


# --- children ---------------------------------------------------------------------------------------------------------


async def _settled(*parts: Awaitable[Any]) -> tuple[Any, ...]:
    """All of them, to their end, then the first failure: no write of this pass may still be on its way in the next."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return tuple(results)


async def _in_parallel(writes: Iterable[Awaitable[object]]) -> list[RLinfError]:
    """Those that failed, in their order; a failure that is a bug of ours is raised."""
    found = []
    for result in await asyncio.gather(*writes, return_exceptions=True):
        if isinstance(result, InvariantBroken) or (
            isinstance(result, BaseException) and not isinstance(result, RLinfError)
        ):
            raise result
        if isinstance(result, RLinfError):
            found.append(result)
    return found


async def _create(store: ObjectStore, manifest: Manifest, observed: Observed) -> bool:
    """Whether it was not there. 409 is success after a look at the owner: it may be an earlier pass's object, or
    somebody else's."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        await store.create(manifest)
    except NamespaceTerminating:
        raise
    except AlreadyExists as error:
        existing = await objects.get_or_none(store, kind, name, namespace=observed.job.namespace)
        if existing is None:
            raise RLinfError(f"the name of {kind} {name} was taken a moment ago", next="it is tried again") from error
        if observed.job.uid not in objects.owner_uids(existing):
            raise RLinfError(
                f"{kind} {observed.job.namespace}/{name} exists and does not belong to this job",
                got=f"owners {sorted(objects.owner_uids(existing)) or 'none'}",
                wanted=f"RLJob uid {observed.job.uid}",
                next="delete it, or make the job again under another name",
            ) from error
    except RLinfError as error:
        raise RLinfError(
            f"{kind} {name} was refused by the API server", got=str(error), next="it is tried again"
        ) from error
    else:
        return True
    return False


async def _write_surroundings(decision: Decision, observed: Observed, store: ObjectStore) -> list[RLinfError]:
    """Before any pod: a refused policy keeps pods away, as they would be open to their neighbours, and a refused budget
    does, as the driver could be evicted."""
    writes: list[Awaitable[object]] = []
    if decision.service is not None:
        writes.append(_create(store, decision.service, observed))
    if decision.network_policy is not None:
        exists = observed.network_policy is not None
        writes.append(_create_or_patch(store, decision.network_policy, observed, exists=exists))
    if decision.disruption_budget is not None:
        writes.append(_create(store, decision.disruption_budget, observed))
    return await _in_parallel(writes)


async def _create_or_patch(store: ObjectStore, wanted: Manifest, observed: Observed, *, exists: bool) -> None:
    if not exists:
        await _create(store, wanted, observed)
        return
    content: Manifest = {key: wanted[key] for key in ("spec", "data") if key in wanted}
    change: Manifest = {"metadata": {"annotations": wanted["metadata"]["annotations"]}, **content}
    await store.patch(wanted["kind"], wanted["metadata"]["name"], patch=change, namespace=observed.job.namespace)


async def _certify(
    decision: Decision, observed: Observed, clients: Clients
) -> tuple[datetime | None, str, list[RLinfError]]:
    """When the first certificate expires and whose they are, as far as it is known, and what was refused.

    Secrets are never read. With the ConfigMap, one that exists is kept. Without it nobody knows when one that exists
    expires, so it is written anew, unless the job is so young that it must be of the job's first writes: those of an
    operator that died count, or one that dies at them each time would never get on.
    """
    known = observed.config.certificates_expire if observed.config else None
    issuer = observed.config.issuer if observed.config else ""
    signer = clients.authority.trusted()[0]  # before they are made: another CA in between would not be told of
    issued = [clients.authority.secret(observed.job, part) for part in decision.certificates]
    if not issued:
        return known, issuer, []
    ends, now = min(not_after for _, not_after in issued), clients.clock()
    made_at = times.parse(observed.manifest["metadata"].get("creationTimestamp")) or now
    age = max(now - made_at, timedelta(0))
    first = observed.config is None and age < min(FIRST_WRITES, (ends - now) / 6)
    anew = decision.renew_certificates or (observed.config is None and not first)
    trouble = await _in_parallel(_write_secret(clients.store, secret, anew=anew) for secret, _ in issued)
    if anew:
        known, issuer = ends, signer
    elif first:
        known, issuer = ends - age, signer  # it was made with the job itself
    return known, issuer, trouble


async def _write_secret(store: ObjectStore, secret: Manifest, *, anew: bool) -> None:
    """Its name carries the job's uid, so a 409 can only be the job's own."""
    meta = secret["metadata"]
    try:
        await store.create(secret)
    except RLinfError as error:
        is_full = objects.is_over_quota(error)
        if not isinstance(error, AlreadyExists) and not (is_full and await _is_there(store, meta)):
            raise
        if anew:
            change = {"metadata": {"annotations": meta["annotations"]}, "data": secret["data"]}
            await store.patch("Secret", meta["name"], patch=change, namespace=meta["namespace"])


async def _is_there(store: ObjectStore, meta: Manifest) -> bool:
    """Whether a Secret exists, without reading it: a full quota refuses a create before the name is looked at."""
    try:
        await store.patch("Secret", meta["name"], patch={}, namespace=meta["namespace"])
    except NotFound:
        return False
    return True


async def _write_config(observed: Observed, store: ObjectStore, expire: datetime | None, *, issuer: str) -> None:
    spec = supported.examine(observed.manifest).spec
    if spec is None:
        raise InvariantBroken(f"a ConfigMap was decided for job {observed.key}, whose spec is invalid")
    wanted = config.config_map(observed.job, spec, certificates_expire=expire, issuer=issuer)
    await _create_or_patch(store, wanted, observed, exists=observed.config is not None)


# --- status, deletions, events ----------------------------------------------------------------------------------------


async def _write_status(observed: Observed, status: RLJobStatus, store: ObjectStore) -> None:
    """A Conflict means that somebody changed the job since it was read: the pass is repeated on what it says now."""
    known = {field.alias for field in RLJobStatus.model_fields.values()}
    raw = {k: v for k, v in (observed.manifest.get("status") or {}).items() if k not in known}
    # The API server keeps managedFields of a status by itself; sent along, they are a third of what it has to read.
    metadata = {k: v for k, v in observed.manifest["metadata"].items() if k != "managedFields"}
    job = {**observed.manifest, "metadata": metadata, "status": {**raw, **api.dump(status)}}
    await store.replace(job, subresource="status")


async def _delete_pod(store: ObjectStore, pod: DeletePod, *, namespace: str, log: PodLog) -> None:
    if await objects.delete_if_there(
        store, "Pod", pod.name, namespace=namespace, uid=pod.uid, grace_period_s=pod.grace_period_s
    ):
        log.deleted(pod)


async def _write_plan_status(store: ObjectStore, observed: Observed, name: str, status: api.Model) -> None:
    with contextlib.suppress(NotFound):
        await store.patch(
            "RLPlan", name, patch={"status": api.dump(status)}, namespace=observed.job.namespace, subresource="status"
        )
