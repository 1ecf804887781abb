"""What should exist now, and what the status should say: `decide(observed, now) -> Decision`. Pure, level-triggered.

Every pass is right from the spec and from what exists; there is no memory of earlier passes. Whatever must outlive a
pass stands in the status (attempts, restarts, the time of a transition) or in children's names, labels, annotations.

The order of questions: is it going; is it finished; is it valid; is it suspended; does its queue let it run; is its
time over; what did its driver say; which plan; which pods. The first that settles the job answers.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from rlinf_api import conditions, names, templates, times, unknown
from rlinf_api.conditions import JobCondition, Reason, Status
from rlinf_api.edits import goal_of
from rlinf_api.job import FailureAction, PlacementMode, PoolStatus, RLJobSpec, SuspendedBy
from rlinf_api.report import DriverReport, DriverState
from rlinf_operator.manifests import asking, certificates, config, disruption, metadata, network, pods
from rlinf_operator.manifests.asking import OrderKind, QueueOrder
from rlinf_operator.manifests.metadata import Manifest, Target
from rlinf_operator.policies import failure, placing, queueing, restart, rules, suspend
from rlinf_operator.policies.pod_view import PodPlace, PodView
from rlinf_operator.policies.queueing import QueueGate
from rlinf_operator.policies.rules import Ruled
from rlinf_operator.reconcile import events, examining, places, plans, status
from rlinf_operator.reconcile.draft import Draft
from rlinf_operator.reconcile.ending import finish, finish_by_driver, finished
from rlinf_operator.reconcile.places import Pods, Wanted
from rlinf_operator.reconcile.plans import PlanChoice
from rlinf_operator.reconcile.state import Adjust, Decision, DeletePod, Drain, Event, Observed
from rlinf_operator.settings import DEFAULTS, OperatorSettings

DRIVER = PodPlace(component=names.COMPONENT_DRIVER)
PER_PASS = 128
"""Pods that one pass makes. 128: a second of all that a small API server takes; most jobs are made in one pass. No
other pod is rendered: what a pass computes, all jobs wait for, and 2,000 manifests are a quarter of a second."""
HOPELESS = (Reason.UNSCHEDULABLE, Reason.IMAGE_UNAVAILABLE, Reason.PODS_MISSING)
"""Reasons of PodsReady: a pod that is needed is not there and does not just start."""
LOOKS_AGAIN_S = 15.0
"""How often a job that waits looks whether its RLRuntime is there, and right, by now. 15 s: a person who repairs one
looks at the job next; a thousand jobs that wait for one are one call each second."""


def decide(observed: Observed, *, now: datetime, settings: OperatorSettings = DEFAULTS) -> Decision:
    if observed.deleting:
        return Decision(status=observed.status)  # owner references take everything along
    draft = Draft(observed, now=now, settings=settings)
    if conditions.is_finished(draft.conditions):
        return finished(draft)
    made_with = observed.runtime
    draft.fields["runtime"] = made_with.kept if made_with is not None else None
    if made_with is not None and made_with.spec is None:
        examining.take_back(draft)
        draft.set(JobCondition.VALID, Status.FALSE, made_with.reason, made_with.message)
        return _looking_again(_leave_alone(draft, why=made_with.reason))
    examined, reason = examining.examine(observed)
    examining.take_back(draft)
    spec, problems = examined.spec, examined.wrong or examined.later
    if spec is None or problems:
        draft.set(JobCondition.VALID, Status.FALSE, reason, "; ".join(map(str, problems)))
        left = _leave_alone(draft, why=reason)
        return _looking_again(left) if made_with is not None else left
    changed = made_with.message if made_with is not None else ""
    said = "; ".join(filter(None, (unknown.told(observed.unknown), changed)))
    draft.set(JobCondition.VALID, Status.TRUE, Reason.RUNTIME_CHANGED if changed else reason, said)
    held = observed.status.suspended_by
    if held is not None and (held.generation != observed.generation or spec.suspend):
        held = draft.fields["suspended_by"] = None  # an edit: whoever made it has read why
    if spec.suspend or held is not None:
        return _suspend(draft, spec, held=held)
    gate = _gate(draft, spec)
    if not gate.opens:
        return _suspend(draft, spec, gate=gate) if _left(draft) else _queue_up(draft, spec, gate)
    draft.set(JobCondition.SUSPENDED, Status.FALSE, Reason.NOT_SUSPENDED)
    return _run(draft, spec, gate)


def _looking_again(decision: Decision) -> Decision:
    """At the job's RLRuntime, of which nobody tells."""
    return replace(decision, requeue_after_s=times.soonest(decision.requeue_after_s, LOOKS_AGAIN_S))


def _gate(draft: Draft, spec: RLJobSpec | None) -> QueueGate:
    """Whether its queue, or what allOrNothing makes of it, lets it have pods, as Admitted says it from now on. `spec`:
    None where it is not valid."""
    left, old = _left(draft), draft.find(JobCondition.ADMITTED)
    gate = queueing.judge(draft.observed.queue, has_pods=bool(left))
    if spec is not None:
        placed = _is_placed_by_us(draft, spec)
        if not placed:
            draft.fields["placement"] = None
        said = old.message if old is not None and old.reason == Reason.NOT_PLACED else "it gave its pods back"
        of_a_try = any(pod.life <= draft.old.life for pod in left)  # later ones are of a pass that was cut off
        waits = placing.gate(draft.old.placement, said=said, pods_left=of_a_try, now=draft.now) if placed else None
        if waits is not None:
            gate = waits
        elif spec.all_or_nothing is not None and not placed and gate.opens:
            gate = queueing.leaves_placing(gate)
    draft.set(JobCondition.ADMITTED, gate.status, gate.reason, gate.message)
    return gate


def _is_placed_by_us(draft: Draft, spec: RLJobSpec) -> bool:
    """Whether the operator sees to it that all pods have a node, or none."""
    view = draft.observed.queue
    return spec.all_or_nothing is not None and (view is None or not view.queue or view.provider == asking.PODGROUPS)


def _left(draft: Draft) -> list[PodView]:
    """Pods that are there, or whose node may still run them."""
    grace = timedelta(seconds=draft.settings.finish_grace_s)
    return [p for p in draft.observed.pods if p.deleted_at is None or p.deleted_at + grace > draft.now]


def _queue_up(draft: Draft, spec: RLJobSpec, gate: QueueGate) -> Decision:
    """A job without pods that may have none: it asks its queue for the pods of the plan that it would begin with."""
    observed, view = draft.observed, draft.observed.queue
    if (ended := finish_by_driver(draft, life=observed.status.life)) is not None:
        return ended
    choice = plans.choose(observed, spec, None, fresh=True)
    status.queued(draft, spec, choice)
    if observed.status.attempt:  # the memory that it goes on as a new life
        draft.set(JobCondition.SUSPENDED, Status.TRUE, Reason.SUSPENDED_BY_QUEUE, f"no pods; {gate.message}")
    else:
        draft.set(JobCondition.SUSPENDED, Status.FALSE, Reason.NOT_SUSPENDED)
    sets: tuple[asking.PodSet, ...] = ()
    if choice.current is not None:
        fewest = choice.pods() if spec.placement.mode is PlacementMode.PINNED else choice.fewest()
        sets = asking.pod_sets(observed.job, spec, choice.pods(), fewest=fewest, settings=draft.settings)
    kind = queueing.asks(view, wanted=asking.inputs(sets) if sets else "") if view is not None else None
    order = QueueOrder(kind=kind, queue=view.queue, pod_sets=sets) if view is not None and kind is not None else None
    if gate.reason is Reason.NOT_PLACED:  # its next try has a group of its own
        order = queueing.leaves(view, pods_left=False)
    decision = Decision(
        status=observed.status,
        request_plan=choice.request,
        highest_revision=choice.highest_revision,
        queue=order,
        plan_statuses=plans.statuses_of_stopped(observed, now=draft.now),
        requeue_after_s=gate.look_again_s,
    )
    return status.written(draft, decision)


def _leave_alone(draft: Draft, *, why: Reason) -> Decision:
    """A spec that is not valid, for the reason `why`: what runs keeps running as it was made, and is spoken of; nothing
    is made or replaced. Of the spec only the wish to be suspended is heeded, by a job that has begun."""
    observed, life = draft.observed, draft.old.life
    driver, report = observed.driver_of(life)
    if (ended := finish_by_driver(draft, life=life)) is not None:
        return ended
    raw = observed.manifest.get("spec")
    if observed.status.attempt and isinstance(raw, dict) and raw.get("suspend") is True:
        return _suspend(draft, None)
    order = None
    if observed.status.attempt and observed.queue is not None and not (gate := _gate(draft, None)).opens:
        if _left(draft):
            return _suspend(draft, None, gate=gate)
        if queueing.asks(observed.queue, wanted="") is OrderKind.GIVE_BACK:  # others wait for it
            order = QueueOrder(kind=OrderKind.GIVE_BACK)
    suspended = draft.find(JobCondition.SUSPENDED)
    if suspended is not None and suspended.status is not Status.FALSE:  # the memory that a resume is a new life
        if not observed.pods:
            message = "no pods; it goes on once the spec is valid: see Valid"
            draft.set(JobCondition.SUSPENDED, suspended.status, suspended.reason, message)
        if driver is None or driver.has_ended:
            draft.set(JobCondition.RUNNING, Status.FALSE, why)
        status.last_progress(draft, driver, report)
        return status.written(draft, Decision(status=observed.status, queue=order))
    found = places.look_on(observed, now=draft.now, settings=draft.settings)
    if not found.live and not found.waiting:
        draft.set(JobCondition.RUNNING, Status.FALSE, why)  # a column of `kubectl get`, unlike Valid
        return status.written(draft, Decision(status=observed.status, queue=order))
    status.left_alone(draft, why=why, pods=found, driver=driver, report=report)
    look_again_s = times.soonest(found.look_again_s, *_moments_s(draft, found, driver, report))
    decision = Decision(status=observed.status, events=events.of_ended(found.ended), requeue_after_s=look_again_s)
    return status.written(draft, decision)


def _run(draft: Draft, spec: RLJobSpec, gate: QueueGate) -> Decision:
    """A valid job that is meant to run, and may."""
    observed, now, settings = draft.observed, draft.now, draft.settings
    left_s = times.remaining_s(times.parse(observed.status.start_time), spec.active_deadline_seconds, now=now)
    life = _life(observed)
    driver, report = observed.driver_of(life)
    if (ended := finish_by_driver(draft, life=life)) is not None:
        return ended
    if left_s is not None and left_s <= 0:
        message = f"spec.activeDeadlineSeconds ({spec.active_deadline_seconds}) is over"
        return finish(draft, JobCondition.FAILED, reason=Reason.DEADLINE_EXCEEDED, message=message, life=life)
    # A driver at work says soon which plan is in force. One that is gone may need the nodes that a plan on its way has.
    has_said = report is not None and report.plan_revision > 0
    is_heard_soon = not has_said and driver is not None and driver.at_work
    no_node_since = None if is_heard_soon else now - timedelta(seconds=settings.pods_ready_deadline_s)
    choice = plans.choose(
        observed, spec, report, fresh=observed.is_fresh(life), no_node_since=no_node_since, most=gate.most(),
        homeless_since=now - timedelta(seconds=settings.homeless_s),
    )  # fmt: skip
    if choice.request and choice.current is not None and (said := _infeasible_before(observed)) is not None:
        draft.set(JobCondition.VALID, Status.FALSE, Reason.INFEASIBLE, said)
        choice = replace(choice, request="")
    wanted = _wanted(draft, spec, choice)
    if driver is not None and driver.at_work and observed.silent_s(driver) >= settings.driver_silent_deadline_s:
        # It runs and says nothing: it is taken for lost, and its successor fences it off.
        lost = replace(driver, phase="Failed", exit_code=None, pod_reason="Unresponsive", finished_at=now)
        observed = replace(observed, pods=tuple(lost if p is driver else p for p in observed.pods))
    # Without a plan nothing is wanted and nothing is taken away: a plan that somebody deleted must not stop a job.
    found = places.settle(observed, wanted, now=now, settings=settings) if choice.current else Pods()
    if found.failed is not None:
        failed = found.failed
        draft.fields["restarts"] = [str(entry) for entry in found.restarts]
        first = failed.failure if failed.reason in conditions.USERS or observed.status.first_failure is None else None
        decision = finish(
            draft, JobCondition.FAILED, reason=failed.reason, message=failed.message, life=life, first=first
        )
        return _telling(decision, found)
    if (ruled := _of_the_job(found, FailureAction.SUSPEND, observed, spec)) is not None:
        return _suspend_by_rule(draft, spec, found=found, ruled=ruled, report=report)
    if (ruled := _of_the_job(found, FailureAction.RESTART_JOB, observed, spec)) is not None:
        return _restart_job(draft, spec, gate, found=found, ruled=ruled, life=life + 1)
    placed = _placing(draft, spec, choice, wanted=wanted, found=found)
    if placed is not None and placed.gives_back:
        return _give_back(draft, spec, found=found, why=placed.gives_back, report=report)
    status.running(draft, spec, choice, wanted=wanted, pods=found, report=report)
    waits = wanted.fresh and found.waiting and not found.create  # a rule's back-off: no pod of this life was made
    draft.fields["life"] = observed.status.life if waits else wanted.life
    look_again_s = times.soonest(left_s, placed.look_again_s if placed is not None else None)
    return _write_running(draft, spec, choice, gate=gate, wanted=wanted, found=found, left_s=look_again_s)


def _give_back(draft: Draft, spec: RLJobSpec, *, found: Pods, why: str, report: DriverReport | None) -> Decision:
    """All pods, as a queue's eviction does. status.placement says when the job tries again."""
    status.ended(draft, found, report)
    draft.knows(restarts=[str(entry) for entry in found.restarts])
    gate = placing.closed(why, look_again_s=0.0)
    draft.set(JobCondition.ADMITTED, gate.status, gate.reason, gate.message)
    return _telling(_suspend(draft, spec, gate=gate), found)


def _placing(
    draft: Draft, spec: RLJobSpec, choice: PlanChoice, *, wanted: Wanted, found: Pods
) -> placing.Placing | None:
    """What spec.allOrNothing makes of the pods that the plan in force needs; None: nothing. A place whose next pod
    waits for its pause lacks no node."""
    if spec.all_or_nothing is None or not _is_placed_by_us(draft, spec):
        return None
    needed = status.needed(wanted, choice)
    live = [found.live[place] for place in needed if place in found.live]
    homeless = [pod for pod in live if not pod.node]
    create = frozenset(found.create)
    missing = [place for place in needed if place in create]
    seen = placing.Placed(
        needed=len(needed), made=len(needed) - len(missing), nodes=len(live) - len(homeless),
        lacking=[*(pod.name for pod in homeless), *(f"{draft.observed.job.name}-{place}" for place in missing)],
        why=next((pod.unschedulable for pod in homeless if pod.unschedulable), ""),
    )  # fmt: skip
    judged = placing.judge(
        draft.old.placement, seen, timeout_s=spec.all_or_nothing.timeout_seconds, uid=draft.observed.job.uid,
        now=draft.now,
    )  # fmt: skip
    draft.fields["placement"] = judged.memory
    return judged


def _telling(decision: Decision, found: Pods) -> Decision:
    """With what became of pods, before anything that follows from it."""
    told = (*events.of_ended(found.ended), *events.of_rules(found.ruled))
    return replace(
        decision, events=(*told, *decision.events),
        ruled=(*_actions(found), *decision.ruled),
    )  # fmt: skip


def _of_the_job(found: Pods, action: FailureAction, observed: Observed, spec: RLJobSpec) -> Ruled | None:
    """The first pod, or worker by its driver's word, that met a rule which is about the whole job."""
    if (of_pod := found.the_job_is_to(action)) is not None:
        return of_pod
    driver, report = observed.driver_of(_life(observed))
    for ruling in report.rulings if report is not None else ():
        pod = next((p for p in observed.pods if p.name == ruling.failure.pod), driver)
        of_worker = rules.of_worker(ruling, pod, rules=spec.failure_policy.rules) if pod is not None else None
        if of_worker is not None and of_worker.met.action is action:
            found.ruled.append(of_worker)
            return of_worker
    return None


def _suspend_by_rule(
    draft: Draft, spec: RLJobSpec, *, found: Pods, ruled: Ruled, report: DriverReport | None
) -> Decision:
    status.ended(draft, found, report)
    draft.first_failure(ruled.failure)
    draft.knows(restarts=[str(entry) for entry in found.restarts])
    held = SuspendedBy(generation=draft.observed.generation, rule=ruled.met.called, message=ruled.message[:1000])
    draft.fields["suspended_by"] = held
    return _telling(_suspend(draft, spec, held=held), found)


def _restart_job(draft: Draft, spec: RLJobSpec, gate: QueueGate, *, found: Pods, ruled: Ruled, life: int) -> Decision:
    """As another life of the job: all pods are made anew, and go on from the last checkpoint."""
    for failure_ in (*(verdict.failure for _, verdict in found.ended), ruled.failure):
        draft.first_failure(failure_)
    again = restart.of_job(life, at=draft.now, rule=ruled.met.key)
    draft.knows(restarts=[str(entry) for entry in (*found.restarts, again)])
    return _telling(_run(draft, spec, gate), found)


def _write_running(
    draft: Draft,
    spec: RLJobSpec,
    choice: PlanChoice,
    *,
    gate: QueueGate,
    wanted: Wanted,
    found: Pods,
    left_s: float | None,
) -> Decision:
    observed, now, settings = draft.observed, draft.now, draft.settings
    driver, report = observed.driver_of(wanted.life)
    in_force = choice.pods_in_force()
    late = {p for p in found.create if p.pool and p.ordinal >= in_force.get(p.pool, 0)}
    places_ = sorted(found.create, key=lambda place: place in late)
    made = [_render(draft, spec, p, attempt=found.attempt, wanted=wanted, gate=gate) for p in places_[:PER_PASS]]
    policy, unwanted_policy = _network_policy(draft, spec)
    needs_budget = not spec.driver.evictable and not observed.disruption_budget
    budget = disruption.budget(observed.job) if needs_budget else None
    conflicts = tuple(
        Event(type="Warning", reason="TemplateOverridden", message=text)
        for text in sorted({text for rendered in made for text in rendered.conflicts})
    )
    if made and settings.network_policy and (why := network.obstacle(spec)):
        conflicts += (Event(type="Warning", reason="NotIsolated", message=why),)
    expire = observed.config.certificates_expire if observed.config else None
    life = timedelta(seconds=settings.certificate_life_s)
    renew = (expire is not None and now >= expire - life / 3) or _is_of_another_ca(observed)
    config_stale = observed.config is None or observed.config.inputs != config.inputs_hash(spec)
    certified = certificates.parts([p.name for p in spec.pools])
    if not renew and observed.config is not None:
        # A Secret is created again with each replacement: one that exists answers 409, and one that somebody deleted
        # would otherwise leave every new pod of its part waiting for its mount. The job's first pods have theirs.
        first = observed.status.attempt == 0
        replaced = set() if first else {f"pool:{p.pool}" if p.pool else "driver" for p in found.create}
        certified = tuple(part for part in certified if part in replaced)
    renewal_s = (expire - life / 3 - now).total_seconds() if expire is not None and not renew else None
    ready = draft.find(JobCondition.PODS_READY)
    decision = Decision(
        status=observed.status,
        request_plan=choice.request,
        highest_revision=choice.highest_revision,
        plan_within=choice.homed or gate.most(),
        queue=queueing.of_running(
            observed.queue,
            has_pods=bool(_left(draft)),
            ready=ready is not None and ready.status is Status.TRUE,
            lacks=ready.message if ready is not None and ready.reason in HOPELESS else "",
        ),
        service=None if observed.has_service else network.headless(observed.job),
        network_policy=policy,
        delete_network_policy=unwanted_policy,
        disruption_budget=budget,
        delete_disruption_budget=observed.disruption_budget if spec.driver.evictable else "",
        certificates=certified,
        renew_certificates=renew,
        write_config=config_stale or renew,
        create_pods=tuple(r.manifest for r in made),
        later_pods=tuple(_pod_name(observed.job, place, found.attempt) for place in places_[PER_PASS:]),
        late_pods=frozenset(_pod_name(observed.job, place, found.attempt) for place in late),
        delete_pods=tuple(found.delete),
        instruct=plans.instruct(
            choice, report=report, target=plans.target_of(observed.job, driver), switches=observed.status.plan.switches
        ),
        adjust=_adjust(spec, report, target=plans.target_of(observed.job, driver)),
        plan_statuses=plans.statuses(choice, observed, report=report, now=now),
        delete_plans=plans.surplus(choice, observed, spec, report) if choice.current else (),
        events=(*events.of_ended(found.ended), *events.of_rules(found.ruled)),
        ruled=_actions(found),
        events_of_made=conflicts,
        requeue_after_s=times.soonest(left_s, found.look_again_s, renewal_s, *_moments_s(draft, found, driver, report)),
    )
    return status.written(draft, decision)


def _adjust(spec: RLJobSpec, report: DriverReport | None, *, target: Target | None) -> Adjust | None:
    """Where a driver at work goes by another goal than the spec has by now. One that has ended has reached its own."""
    if report is None or report.goal is None or target is None or report.state in plans.ENDED:
        return None
    goal = goal_of(spec)
    return Adjust(target=target, goal=goal, why=goal.since(report.goal)) if goal != report.goal else None


def _render(
    draft: Draft, spec: RLJobSpec, place: PodPlace, *, attempt: int, wanted: Wanted, gate: QueueGate
) -> pods.Rendered:
    job, settings, life = draft.observed.job, draft.settings, wanted.life
    if not place.pool:
        first = wanted.fresh and not any(p.life == life for p in draft.observed.pods)
        made = pods.driver(job, spec, attempt=attempt, life=life, settings=settings, first_of_life=first)
    else:
        made = pods.worker(
            job, spec, pool=place.pool, ordinal=place.ordinal, attempt=attempt, life=life, settings=settings
        )
    if (share := gate.share_of(place.pool)) is not None:
        made = replace(made, manifest=asking.placed(made.manifest, share))
    # Later pods are placed one by one: a group of which some members are gone would wait for these for ever.
    if gate.gang is not None and wanted.fresh and len(wanted.inputs) >= gate.gang.size:
        made = replace(made, manifest=templates.overlay(made.manifest, gate.gang.membership))
    return made


def _pod_name(job: metadata.JobMeta, place: PodPlace, attempt: int) -> str:
    """The name of a pod that is not rendered."""
    if not place.pool:
        return names.driver_pod(job.name, attempt)
    return names.worker_pod(job.name, place.pool, ordinal=place.ordinal, attempt=attempt)


def _is_of_another_ca(observed: Observed) -> bool:
    """The CA's Secret was lost or exchanged: nobody believes the job's certificates any more, nor they anybody. While
    the CA rotates, the one before is trusted, and its certificates end in their own time."""
    config, trusted = observed.config, observed.trusted
    return config is not None and bool(trusted) and config.issuer not in trusted


def _network_policy(draft: Draft, spec: RLJobSpec) -> tuple[Manifest | None, str]:
    """(what to write, uid of what to delete). It follows the settings, unlike pods: who was let in as an operator of
    an earlier release may have gone, and a policy that keeps the present one out would have its drivers replaced."""
    wanted = network.policy(draft.observed.job, spec, settings=draft.settings)
    found = draft.observed.network_policy
    if wanted is None:
        return None, found.uid if found is not None else ""
    same = found is not None and found.inputs == wanted["metadata"]["annotations"][names.ANNOTATION_INPUTS]
    return None if same else wanted, ""


def _wanted(draft: Draft, spec: RLJobSpec, choice: PlanChoice) -> Wanted:
    observed = draft.observed
    inputs: dict[PodPlace, str] = {}
    if choice.current is not None:
        inputs[DRIVER] = metadata.inputs(spec)
        known = {pool.name for pool in spec.pools}  # a plan in force may be older than the spec
        for pool, count in choice.pods().items():
            if pool not in known:
                continue
            own = metadata.inputs(spec, pool)
            for ordinal in range(count):
                inputs[PodPlace(component=names.COMPONENT_WORKER, pool=pool, ordinal=ordinal)] = own
    before = {p.name: p.desired for p in observed.status.pools}
    life = _life(observed)
    earlier = frozenset(p for p in inputs if not p.pool or p.ordinal < before.get(p.pool, 0))
    told, again_s = _told(draft, spec, life=life)
    return Wanted(
        inputs=inputs,
        life=life,
        fresh=observed.is_fresh(life),
        earlier=earlier,
        in_doubt=choice.in_doubt,
        max_restarts=spec.failure_policy.max_restarts,
        window_s=float(spec.failure_policy.reset_after_seconds),
        rules=tuple(spec.failure_policy.rules),
        roles={pool.name: pool.roles for pool in spec.pools},
        told=told,
        told_again_s=again_s,
    )


def _actions(found: Pods) -> tuple[str, ...]:
    """The actions of the rules that were met."""
    return tuple(str(ruled.met.action) for ruled in found.ruled if ruled.met.key != rules.NO_RULE)


def _told(draft: Draft, spec: RLJobSpec, *, life: int) -> tuple[dict[str, Ruled], float | None]:
    """Pods that are to be replaced by their driver's word, by name; in how many seconds there may be another."""
    observed = draft.observed
    _, report = observed.driver_of(life)
    found: dict[str, Ruled] = {}
    again_s = None
    if report is None:
        return found, again_s
    own, roles = spec.failure_policy.rules, {pool.name: pool.roles for pool in spec.pools}
    for pod in observed.pods if report.silent_agents else ():
        if pod.life == life and str(pod.place) in report.silent_agents:
            silent, left_s = rules.of_silent_agent(
                pod, rules=own, roles=roles.get(pod.pool, ()), now=draft.now,
                deadline_s=draft.settings.agent_silent_deadline_s,
            )  # fmt: skip
            found |= {pod.name: silent} if silent is not None else {}
            again_s = times.soonest(again_s, left_s)
    by_name = {pod.name: pod for pod in observed.pods}
    for ruling in report.rulings:
        asked = by_name.get(ruling.failure.pod) if ruling.action == FailureAction.RESTART_POD else None
        if asked is not None and (ruled := rules.of_worker(ruling, asked, rules=own)) is not None:
            found[asked.name] = ruled
    return found, again_s


def _infeasible_before(observed: Observed) -> str | None:
    """The scheduler's answer to this very spec, which an edit may change: a job at work makes a pass each second."""
    valid = conditions.find(observed.status.conditions, JobCondition.VALID)
    same = valid is not None and valid.observed_generation == observed.generation
    return valid.message if valid is not None and same and valid.reason == Reason.INFEASIBLE else None


def _life(observed: Observed) -> int:
    """The life that pods must belong to: one more than before once a suspended job is wanted again."""
    old = conditions.find(observed.status.conditions, JobCondition.SUSPENDED)
    resumed = old is not None and old.status is not Status.FALSE and observed.status.attempt > 0
    restarted = restart.newest_life(restart.read(observed.status.restarts))
    return max(observed.status.life + (1 if resumed else 0), restarted.life if restarted is not None else 0)


def _suspend(
    draft: Draft, spec: RLJobSpec | None, *, held: SuspendedBy | None = None, gate: QueueGate | None = None
) -> Decision:
    """Drain, delete the pods, be suspended. Taken back at any moment, a new life begins: a drained driver is done.
    `spec`: None where the rest of it is not valid. `held`: by a rule of failurePolicy, and not by its user. `gate`: by
    its queue."""
    observed, now, settings = draft.observed, draft.now, draft.settings
    life = observed.status.life
    driver, report = observed.driver_of(life)
    if (ended := finish_by_driver(draft, life=life)) is not None:
        return ended
    if gate is None or gate.reason is not Reason.NOT_PLACED:
        draft.fields["placement"] = None
    left = _left(draft)
    alive = driver is not None and driver.at_work
    unheard_s = draft.unheard_s(driver, report)
    status.last_progress(draft, driver, report)
    step, checkpoint = draft.reached()
    drained = _is_drained(driver, report)
    verdict = suspend.judge(
        condition=draft.find(JobCondition.SUSPENDED),
        pods_left=len(left),
        driver_alive=alive and (report is not None or unheard_s is not None),
        drained=drained,
        step=step,
        checkpoint_step=checkpoint.step if checkpoint is not None else None,
        has_place=spec is None or bool(pods.checkpoint_uri(observed.job, spec, settings=settings)),
        now=now,
        deadline_s=settings.drain_deadline_s,
        why=gate.message if gate else f"{held.message}; edit the spec to go on" if held else "spec.suspend is true",
    )
    told: tuple[Event, ...] = (
        (Event(type="Warning", reason="NoCheckpoint", message=verdict.warning),) if verdict.warning else ()
    )
    reason, message, order = verdict.reason, verdict.message, None
    if held is not None:
        reason = Reason.SUSPENDED_BY_RULE if reason is Reason.SUSPENDED_BY_USER else reason
        message = message if held.message in message else f"{message}; {held.message}"
    elif gate is not None:
        reason = Reason.SUSPENDED_BY_QUEUE if reason is Reason.SUSPENDED_BY_USER else reason
        message = message if gate.message in message else f"{message}; {gate.message}"
    if (order := queueing.leaves(observed.queue, pods_left=bool(left))) is not None:
        draft.set(JobCondition.ADMITTED, Status.FALSE, Reason.STOPPED, "its place in the queue is given back")
    draft.set(JobCondition.SUSPENDED, verdict.status, reason, message)
    draining = verdict.phase is suspend.SuspendPhase.DRAINING
    if not drained:  # then pods end because they should
        found = places.look_on(observed, now=now, settings=settings, stopping=True)
        status.ended(draft, found, report)
        told += events.of_ended(found.ended)
    if not draining:
        draft.stop()
        draft.fields["pools"] = [PoolStatus(name=p.name) for p in (spec.pools if spec else observed.status.pools)]
        draft.fields["start_time"] = None  # time suspended does not count against activeDeadlineSeconds
    deleted = tuple(
        DeletePod(name=p.name, uid=p.uid, why="the job is suspended")
        for p in sorted(left, key=lambda p: p.name)
        if p.deleted_at is None and not draining
    )
    target = plans.target_of(observed.job, driver) if draining and report is not None else None
    drain = Drain(target=target, deadline_s=verdict.drain_left_s) if target is not None else None
    wait_s = settings.finish_grace_s if left else None
    if draining:
        wait_s = times.soonest(verdict.drain_left_s, unheard_s)
    decision = Decision(
        status=observed.status, delete_pods=deleted, drain=drain, requeue_after_s=wait_s, events=told, queue=order,
        plan_statuses=() if draining else plans.statuses_of_stopped(observed, now=now),
    )  # fmt: skip
    return status.written(draft, decision)


def _is_drained(driver: PodView | None, report: DriverReport | None) -> bool:
    if report is not None and report.state is DriverState.DRAINED:
        return True
    return driver is not None and failure.driver_state(driver) is DriverState.DRAINED


def _moments_s(
    draft: Draft, found: Pods, driver: PodView | None, report: DriverReport | None
) -> tuple[float | None, ...]:
    """When pods that start, and a driver that is not heard, will have had their time. A silent one becomes late, then
    lost; after that: what one that is not ready becomes, its pod says."""
    settings, silent_s = draft.settings, draft.observed.silent_s(driver)
    moments = (settings.driver_late_s, settings.driver_silent_deadline_s)
    return (
        None if all(p.ready for p in found.live.values()) else settings.pods_ready_deadline_s,
        next((moment - silent_s for moment in moments if 0 < silent_s < moment), None),
        draft.unheard_s(driver, report),
    )
