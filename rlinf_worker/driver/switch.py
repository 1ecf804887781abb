"""A change of plan on a running job: prepared beside the plan in force, committed at a step boundary, or aborted.

        prepare()               everybody ready            commit()           no step is open         agents have it
    IDLE ────────> PREPARING ─────────────────> PREPARED ──────────> WAITING ───────────────> TELLING ─────────────┐
      ▲                │ deadline, a worker fails, another plan   │       │                                          │
      ├────────────────┴── abort(): the old plan was never left ──┴───────┘                                          │
      └───────────────────────────────────── workers have answered <── HANDING_OVER <── the plan is in force ────────┘

Up to WAITING the old plan works on, and whatever happens leaves it in force. From the first Commit that is told on, the
switch is finished: by this driver, or by the next, to whom agents show the plan that they were told to commit. Agents
of pods that both plans have are told first, so that whoever knows of a commit is not alone with it. No step opens
before all workers of the new plan are ready or away (presence.py), but another plan may follow it meanwhile.

Called by core.py: the operator's words, what agents and workers say, and `advance` with every settling. It has no task
of its own: `advance` looks at what is there and goes as far as it can, so that nothing depends on the order in which
things come.
"""

from __future__ import annotations

from rlinf_api import plan_rules
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, RLinfError
from rlinf_api.names import WorkerId
from rlinf_api.placement import Placement
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.channels import messages
from rlinf_worker.driver import changes as planning
from rlinf_worker.driver import plan_fit, turns
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import PodKey, WorkerRecord
from rlinf_worker.driver.pending import ABORTABLE, HOLDING, Pending, Phase, Phased, json_of, say
from rlinf_worker.driver.turns import DriverTurns
from rlinf_worker.driver.workforce import Workforce


class Switch(Phased):
    def __init__(
        self,
        job: Job,
        exchange: Exchange,
        workforce: Workforce,
        gangs: Gangs,
        commits: Commits,
        turns: DriverTurns,
    ) -> None:
        self._job, self._exchange, self._workforce = job, exchange, workforce
        self._gangs, self._commits, self._turns = gangs, commits, turns
        self.number = 0  # of the switch that brought the plan in force
        self.plan: RLPlanSpec | None = None  # in force
        self.failed: tuple[int, str] = (0, "")  # revision, why
        self.pause_s = 0.0
        self.count = 0  # switches of this driver, the first plan not counted
        self._moving_since: float | None = None  # committed; no unit has moved yet
        self._incomplete = False  # not all workers of a plan have been ready since it came into force

    # --- what others ask --------------------------------------------------------------------------------------------
    @property
    def holds(self) -> bool:
        """No step may open now. Not before all workers of a new plan are there either: while no step is open, yet
        another plan can follow it, for instance because a pod of this one finds no node."""
        waits = self.phase is Phase.WAITING and not self._needs_a_step
        return self.phase in HOLDING or self._incomplete or waits

    @property
    def wants_checkpoint(self) -> bool:
        """The step that commits now is the last before a gang is formed anew."""
        return self._waits_for_gang and not self._commits.rests

    @property
    def _waits_for_gang(self) -> bool:
        return self.phase is Phase.WAITING and self.pending is not None and self.pending.changes.gang

    @property
    def _needs_a_step(self) -> bool:
        """A gang starts again from a checkpoint, and there is none of what was learnt last: one more step writes it."""
        job = self._job
        if not self._waits_for_gang or job.ledger.open_steps or job.ledger.draining:
            return False
        return job.ledger.version.number > 0 and not self._commits.is_saving and not job.is_saved

    @property
    def preparing(self) -> int:
        return self.pending.plan.revision if self.pending and self.phase is Phase.PREPARING else 0

    @property
    def prepared(self) -> int:
        return self.pending.plan.revision if self.pending and self.phase in ABORTABLE - {Phase.PREPARING} else 0

    @property
    def message(self) -> str:
        if self.pending is None:
            return self.failed[1]
        if self.phase is Phase.PREPARING:
            waits = self._job.members.missing_for_next()
            return f"waiting for {', '.join(waits[:8])}" if waits else "waiting for agents to note it"
        if self._waits_for_gang and (problem := self._commits.problem):
            return f"waiting for a checkpoint on which its gang can begin; the last could not be written: {problem}"
        if self.phase is Phase.WAITING and self._incomplete:
            waits = self._job.members.missing()
            return f"{self.phase.value}; plan revision {self._job.revision} waits for {', '.join(waits[:8])}"
        return str(self.phase.value)

    # --- the operator's words ---------------------------------------------------------------------------------------
    def first(self, plan: RLPlanSpec, *, switches: int) -> None:
        """The plan of a driver that has none. `switches`: plans in force so far, as the operator knows."""
        self.plan, self.number = plan, max(1, switches, self.number)

    def prepare(self, plan: RLPlanSpec, *, finishing: bool = False) -> str:
        """Why it cannot be; empty: it is under way, or done. Told again, nothing changes."""
        job, pending = self._job, self.pending
        if pending is not None and pending.plan.revision == plan.revision:
            return ""
        if self.phase in HOLDING or self.finishes:
            return f"revision {pending.plan.revision if pending else 0} is being committed; tell me again after it"
        if not job.declared:
            return "no plan is in force yet; tell me again"
        self.abort(f"revision {plan.revision} is prepared instead", failed=False)
        try:
            placement = plan_rules.check(plan, job.spec, counts=False)
            found = self._changes(job.placement, placement)
            plan_fit.check(
                plan, found, topology=job.topology, cycles=job.placement.stages,
                gang_role=job.gang_role, checkpoint_uri=job.checkpoint_uri,
            )  # fmt: skip
            turns.check(placement, job.topology, self._exchange.measured())
        except RLinfError as error:
            return self.refuse(plan.revision, str(error))
        self.failed = (0, "") if self.failed[0] == plan.revision else self.failed
        self.pending = Pending(
            plan=plan, placement=placement, changes=found, number=self.number + 1,
            deadline=job.clock() + job.settings.prepare_timeout_s, finishing=finishing,
        )  # fmt: skip
        self.phase = Phase.PREPARING
        beside = [w for w in placement.workers if w.id in found.beside]
        job.members.prepare(beside, pods=found.new_pods)
        job.event("plan-prepare", f"plan revision {plan.revision} is prepared: {say(found)}", revision=plan.revision)
        for key in job.sessions.agents:
            self.greet(key)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)
        return ""

    def refuse(self, revision: int, why: str) -> str:
        self.failed = (revision, why)
        self._job.event("plan-failed", f"plan revision {revision} is refused: {why}", revision=revision)
        self._job.mark(Dirty.SHOWN)
        return why

    def commit(self, revision: int) -> str:
        """Why it cannot be; empty: it comes into force at the end of the open steps. Told again, nothing changes."""
        pending = self.pending
        if pending is None or pending.plan.revision != revision:
            why = f": {self.failed[1]}" if self.failed[0] == revision else ""
            return f"revision {revision} is not prepared{why}"
        if self.phase is Phase.PREPARING:
            return f"revision {revision} is not prepared yet: {self.message}"
        if self.phase is Phase.PREPARED:
            self.phase, pending.boundary_at = Phase.WAITING, self._job.clock()
            self._job.mark(Dirty.SHOWN)
        return ""

    def abort(self, why: str, *, failed: bool) -> None:
        """The old plan stays as it was. Without effect once a commit was told, or where nothing is pending."""
        pending, job = self.pending, self._job
        if pending is None or pending.finishing or self.phase not in ABORTABLE:
            return
        self.pending, self.phase = None, Phase.IDLE
        if failed:
            self.failed = (pending.plan.revision, why)
        for record in list(job.members.prepared.values()):
            self._workforce.dismiss(record, f"plan revision {pending.plan.revision} was given up")
        job.members.give_up_next()
        for pod in job.members.pods.values():
            pod.prepared = 0  # the next preparation bears the same number: nobody has heard of that one
        for key in job.sessions.agents:
            abort = agents_pb2.Abort(reason=why[:1000], switch_number=pending.number)
            self._workforce.instruct(key, plan_revision=pending.plan.revision, abort=abort)
        text = f"plan revision {pending.plan.revision} is given up: {why}"
        job.event("plan-failed" if failed else "plan-aborted", text, revision=pending.plan.revision)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)

    # --- agents -----------------------------------------------------------------------------------------------------
    def learn(self, state: agents_pb2.PlanState) -> None:
        """What an agent that attaches holds. A commit that it has seen and a driver with a plan has not is finished."""
        is_free = self._job.revision > 0 and self.phase not in HOLDING and not self.finishes
        if is_free and state.committed_switch > self.number:
            self._finish_for(state)

    def attached(self, key: PodKey, state: agents_pb2.PlanState) -> None:
        pod = self._job.members.pods[key]
        pod.committed, pod.prepared = state.committed_switch, 0
        self.greet(key)
        if self.phase is Phase.TELLING and self.pending is not None and pod.wanted:
            self._commit_to(self.pending, [key])

    def _finish_for(self, state: agents_pb2.PlanState) -> None:
        job = self._job
        if state.committed_revision == job.revision:
            self.number = state.committed_switch
            return
        try:
            plan = RLPlanSpec.model_validate_json(state.committed_plan_json)
            placement = plan_rules.check(plan, job.spec, counts=False)
        except (ValueError, RLinfError) as error:
            job.event("plan-failed", f"an agent has committed a plan that cannot be read: {error}")
            return
        text = f"plan revision {plan.revision} was committed before this driver began: it is finished"
        job.event("plan", text, revision=plan.revision)
        self.abort("an agent has seen the commit of another", failed=False)
        if job.attempt > 1 and not job.begun:  # nothing works yet: at once
            self.pending = Pending(
                plan=plan, placement=placement, changes=self._changes(job.placement, placement),
                number=state.committed_switch, deadline=0.0, boundary_at=job.clock(), finishing=True,
            )  # fmt: skip
            self.phase = Phase.TELLING  # the driver before has told it: nobody is waited for
            job.mark(Dirty.SHOWN)
        else:
            self.number = state.committed_switch - 1
            self.prepare(plan, finishing=True)

    def greet(self, key: PodKey) -> None:
        """The plan in force and the one that is prepared, to an agent that may not know of them."""
        pod = self._job.members.pods.get(key)
        if pod is None or self.plan is None:
            return
        if pod.committed < self.number and self.phase is not Phase.TELLING:
            text = json_of(self.plan)
            self._tell(key, self.plan.revision, prepare=agents_pb2.Prepare(plan_json=text, switch_number=self.number))
            self._tell(key, self.plan.revision, commit=agents_pb2.Commit(switch_number=self.number))
            pod.committed = self.number
        if (pending := self.pending) is not None and max(pod.prepared, pod.committed) < pending.number:
            prepare = agents_pb2.Prepare(plan_json=pending.text, switch_number=pending.number)
            pod.prepared = pending.number
            pending.told[key] = self._tell(key, pending.plan.revision, prepare=prepare)

    def _tell(self, key: PodKey, revision: int, **kind: object) -> int:
        return self._workforce.instruct(key, plan_revision=revision, **kind)

    def instructed(self, key: PodKey, number: int, error: str) -> None:
        pending = self.pending
        if pending is None or pending.told.get(key) != number:
            return
        del pending.told[key]
        if error and self.phase is Phase.PREPARING:
            pod = self._job.members.pods[key].pod
            self.abort(f"the agent of pod {pod} refuses it: {error}", failed=True)
        elif pending.commits.get(key) == number and not error:
            self._job.members.pods[key].committed = pending.number

    # --- workers ----------------------------------------------------------------------------------------------------
    def prepared_gone(self, record: WorkerRecord, why: str) -> None:
        self.abort(f"worker {record.placed.id}, which it adds, failed: {why}", failed=True)

    def is_gang(self, role: str) -> None:
        """A rank that was prepared beside asks for its roster: the others of this role start again with it."""
        if (pending := self.pending) is not None:
            pending.changes = self._changes(self._job.placement, pending.placement)
        for record in [r for r in self._job.members.prepared.values() if r.placed.role == role]:
            self._workforce.dismiss(record, f"role {role} is a gang: it is formed anew by the commit")

    def _changes(self, old: Placement, new: Placement) -> Changes:
        return planning.between(old, new, gang_role=self._job.gang_role, gangs=self._gangs.joined)

    def prepared_ready(self, record: WorkerRecord) -> None:
        """Whom it will speak with under the new plan: links are made now, not in the pause."""
        job, pending = self._job, self.pending
        if pending is None:
            return
        workers = {wid: r for wid, r in job.members.workers.items() if wid in pending.changes.kept}
        workers |= {r.placed.id: r for r in job.members.prepared.values()}
        streams, queues = job.topology.streams, job.topology.queues
        pairs = [(q.producer, q.consumer) for q in queues]
        peers = routing.partners(streams, pairs, placement=pending.placement, of=record.placed.id)
        endpoints = [r.endpoint for wid in sorted(peers) if (r := workers.get(wid)) is not None and r.endpoint]
        job.sessions.tell(record.placed.id, links=pb.Links(peers=[messages.endpoint_to_pb(e) for e in endpoints]))

    def replanned(self, wid: WorkerId, number: int) -> None:
        """It has resized its channels as switch `number` says, and says its credit anew. Also called for a worker that
        connects anew, as its Welcome had the sizes."""
        pending = self.pending
        if number == self.number and pending is not None and pending.awaited.pop(wid, None) is not None:
            self._exchange.forget_credit(wid)

    def unit_moved(self) -> None:
        if self._moving_since is not None and self.phase not in HOLDING:
            job = self._job
            self.pause_s, self._moving_since = job.clock() - self._moving_since, None
            text = f"plan revision {job.revision} is at work after a pause of {self.pause_s:.3f} s"
            job.event("plan-switched", text, revision=job.revision, pause_s=round(self.pause_s, 4))
            job.mark(Dirty.SHOWN)

    # --- going on ---------------------------------------------------------------------------------------------------
    def advance(self) -> None:
        """As far as what is there allows; called with every settling."""
        if self._incomplete and self.phase not in HOLDING and self._job.all_here:
            self._incomplete = False
            self._job.changed.set()  # the flow may go on
        while self._one():
            pass

    def _one(self) -> bool:
        pending = self.pending
        if pending is None:
            return False
        match self.phase:
            case Phase.PREPARING:
                return self._prepare_on(pending)
            case Phase.PREPARED if pending.finishing:
                self.phase, pending.boundary_at = Phase.WAITING, self._job.clock()
                return True
            case Phase.WAITING if self._at_boundary(pending):
                self._tell_commit(pending)
                return True
            case Phase.WAITING:
                self._lose_patience(pending)
            case Phase.TELLING if self._is_told(pending):
                self._put_in_force(pending)
                return True
            case Phase.HANDING_OVER:
                self._hand_over(pending)
        return False

    def _prepare_on(self, pending: Pending) -> bool:
        job = self._job
        pending.told = {k: n for k, n in pending.told.items() if k in job.sessions.agents}
        if not job.members.missing_for_next() and not pending.told:
            self.phase = Phase.PREPARED
            text = f"plan revision {pending.plan.revision} is prepared"
            job.event("plan-prepared", text, revision=pending.plan.revision)
            job.mark(Dirty.SHOWN)
            return True
        if job.clock() > pending.deadline and not pending.finishing:
            limit = job.settings.prepare_timeout_s
            self.abort(f"it was not prepared within {limit:g} s: {self.message}", failed=True)
        return False

    def _at_boundary(self, pending: Pending) -> bool:
        job = self._job
        if job.ledger.open_steps or self._needs_a_step or job.ending:
            return False
        if pending.changes.gang and job.ledger.version.number > 0 and not job.is_saved:
            return False  # the checkpoint is being written
        return job.begun or job.attempt == 1 or self.count > 0

    def _lose_patience(self, pending: Pending) -> None:
        """A step may take hours; a disk on which no checkpoint can be written does not hold a job for ever."""
        job = self._job
        since, limit = self._commits.failing_since, job.settings.gang_checkpoint_timeout_s
        if since is None or not pending.changes.gang or pending.finishing:
            return
        if job.clock() - max(since, pending.boundary_at) > limit:
            why = f"its gang begins on a checkpoint, none could be written for {limit:g} s: {self._commits.problem}"
            self.abort(why, failed=True)

    def _tell_commit(self, pending: Pending) -> None:
        job = self._job
        self.phase, pending.boundary_at = Phase.TELLING, max(pending.boundary_at, self._commits.last_at)
        pending.deadline = job.clock() + job.settings.commit_timeout_s
        old = {key for key, pod in job.members.pods.items() if pod.wanted}
        self._commit_to(pending, [key for key in job.sessions.agents if key in old])

    def _commit_to(self, pending: Pending, keys: list[PodKey]) -> None:
        commit = agents_pb2.Commit(switch_number=pending.number)
        for key in keys:
            self.greet(key)  # one that came a moment ago has not heard of the preparation
            pending.commits[key] = pending.told[key] = self._tell(key, pending.plan.revision, commit=commit)

    def _is_told(self, pending: Pending) -> bool:
        job = self._job
        pending.told = {k: n for k, n in pending.told.items() if k in job.sessions.agents}
        return not pending.told or job.clock() > pending.deadline

    def _put_in_force(self, pending: Pending) -> None:
        """The one moment at which the plan changes: nothing of a step is under way."""
        job = self._job
        self.plan, self.number, self.phase = pending.plan, pending.number, Phase.HANDING_OVER
        self.count += 1
        self._take_over(pending.placement)
        self._commit_to(pending, [k for k in job.sessions.agents if job.members.pods[k].committed < self.number])
        pending.told.clear()
        pending.deadline = job.clock() + job.settings.commit_timeout_s
        for wid, record in job.members.workers.items():
            if record.present and wid in job.sessions.workers:
                pending.awaited[wid] = record.attempt
                self._exchange.forget_credit(wid)
                world = len(job.members.of_role(record.placed.role))
                specs = self._exchange.channel_specs()
                replan = pb.Replan(
                    plan_revision=pending.plan.revision, channels=specs, world=world, switch_number=self.number
                )
                job.sessions.tell(wid, replan=replan)
        self._incomplete = True

    def _take_over(self, placement: Placement) -> None:
        """Another plan than the one in force, at a moment when no step is open. Who stays is not touched."""
        job = self._job
        before, job.placement = job.placement, placement
        if not before.revision:
            raise InvariantBroken("a plan was to follow one that there is not")
        found = self._changes(before, placement)
        for wid in sorted(found.gone):
            if (record := job.members.workers.get(wid)) is None:
                continue
            self._exchange.gone(wid, record.placed.role)
            self._workforce.dismiss(record, f"not so in plan revision {placement.revision}")
        job.members.adopt(placement)
        if found.resized_roles:  # the flow may have asked for their number, also where it has not begun yet
            job.mark(Dirty.RERUN)
        self._exchange.replan()
        self._turns.adopt(placement, job.topology)
        if not job.members.all_ready():
            waits = ", ".join(job.members.missing()[:8])
            job.lose_somebody(f"plan revision {placement.revision}: waiting for {waits}")
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)

    def _hand_over(self, pending: Pending) -> None:
        """Who has to start or to come again is waited for afterwards, as `_incomplete`."""
        job = self._job
        for wid, attempt in list(pending.awaited.items()):
            session = job.sessions.workers.get(wid)
            if session is None or session.attempt != attempt:
                del pending.awaited[wid]  # it learns it from its next Welcome
        if pending.awaited and job.clock() <= pending.deadline:
            return
        self._moving_since, self.pending, self.phase = pending.boundary_at, None, Phase.IDLE
        job.members.forget_pods()
        text = f"plan revision {pending.plan.revision} is in force: {say(pending.changes)}"
        job.event("plan", text, revision=pending.plan.revision, step=job.ledger.committed)
        job.mark(Dirty.SHOWN)
