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

import statistics
from collections.abc import Callable

from rlinf_api import plan_rules
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.errors import InvalidManifest, InvariantBroken, RLinfError
from rlinf_api.placement import Placement, resolve
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver import changes as planning
from rlinf_worker.driver import stuck, turns
from rlinf_worker.driver.changes import Changes
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import PodKey
from rlinf_worker.driver.pending import HOLDING, AgentPlans, Pending, Phase, WorkerPlans
from rlinf_worker.driver.turns import DriverTurns
from rlinf_worker.driver.workforce import Workforce


class SwitchPause:
    """From the end of the last step under one plan until a unit moves under the next."""

    def __init__(self, job: Job, *, is_held: Callable[[], bool]) -> None:
        """`is_held`: yet another plan is being committed."""
        self._job, self._is_held = job, is_held
        self._since: float | None = None
        self.seconds = 0.0

    def begin(self, at: float) -> None:
        self._since = at

    def unit_moved(self) -> None:
        if self._since is not None and not self._is_held():
            job = self._job
            self.seconds, self._since = job.clock() - self._since, None
            text = f"plan revision {job.revision} is at work after a pause of {self.seconds:.3f} s"
            job.event("plan-switched", text, revision=job.revision, pause_s=round(self.seconds, 4))
            job.mark(Dirty.SHOWN)


class Switch:
    def __init__(
        self, job: Job, exchange: Exchange, workforce: Workforce, commits: Commits, gangs: Gangs, turns: DriverTurns
    ) -> None:
        self._job, self._exchange, self._workforce = job, exchange, workforce
        self._commits, self._gangs, self._turns = commits, gangs, turns
        self.number = 0  # of the switch that brought the plan in force
        self.plan: RLPlanSpec | None = None  # in force
        self.uid = ""  # of its object, where the operator named it
        self.pending: Pending | None = None
        self.failed: tuple[int, str] = (0, "")  # revision, why
        self.failed_uid = ""  # likewise
        self.pause = SwitchPause(job, is_held=lambda: self.phase in HOLDING)
        self.count = 0  # switches of this driver, the first plan not counted
        self.given_up = 0  # of these, for which steps were given up
        self.workers = WorkerPlans(job, exchange)
        self._agents = AgentPlans(job)
        self._stuck = ""  # why the step that the plan waits for can never end
        self._incomplete = False  # not all workers of a plan have been ready since it came into force

    # --- what others ask --------------------------------------------------------------------------------------------
    @property
    def phase(self) -> Phase:
        return self.pending.phase if self.pending is not None else Phase.IDLE

    @property
    def holds(self) -> bool:
        """No step may open now. Not before all workers of a new plan are there either: while no step is open, yet
        another plan can follow it, for instance because a pod of this one finds no node."""
        pending, commits = self.pending, self._commits
        waits = pending is not None and pending.phase is Phase.WAITING and not pending.needs_a_step(self._job, commits)
        return self.phase in HOLDING or self._incomplete or waits

    @property
    def wants_checkpoint(self) -> bool:
        """The step that commits now is the last before a gang is formed anew."""
        return self.pending is not None and self.pending.awaits_gang and not self._commits.rests

    @property
    def preparing(self) -> int:
        return self.pending.plan.revision if self.pending and self.phase is Phase.PREPARING else 0

    @property
    def prepared(self) -> int:
        return self.pending.plan.revision if self.pending and self.phase in (Phase.PREPARED, Phase.WAITING) else 0

    @property
    def pending_uid(self) -> str:
        return self.pending.uid if self.pending and (self.preparing or self.prepared) else ""

    @property
    def message(self) -> str:
        pending = self.pending
        if pending is None:
            return self.failed[1]
        if pending.phase is Phase.PREPARING:
            waits = self._job.members.missing_for_next()
            return f"waiting for {', '.join(waits[:8])}" if waits else "waiting for agents to note it"
        if pending.awaits_gang and (problem := self._commits.problem):
            return f"waiting for a checkpoint on which its gang can begin; the last could not be written: {problem}"
        if pending.phase is Phase.WAITING and self._stuck and self._would_lose_all:
            return f"{self.phase.value}, which cannot come: {self._stuck}; without spec.checkpoint.uri it is waited for"
        if pending.phase is Phase.WAITING and self._incomplete:
            waits = self._job.members.missing()
            return f"{self.phase.value}; plan revision {self._job.revision} waits for {', '.join(waits[:8])}"
        return str(self.phase.value)

    # --- the operator's words ---------------------------------------------------------------------------------------
    def first(self, plan: RLPlanSpec, *, switches: int, uid: str = "") -> None:
        """The plan of a driver that has none. `switches`: plans in force so far, as the operator knows."""
        job = self._job
        job.placement = resolve(plan, job.spec)
        job.members.adopt(job.placement)
        self.plan, self.uid, self.number = plan, uid, max(1, switches, self.number)
        job.event("plan", f"plan revision {plan.revision} is in force", revision=plan.revision)
        job.mark(Dirty.SHOWN)

    def declared(self) -> None:
        """The flow has said its channels: a first plan that a person wrote may name none that it has not. Raises
        InvalidManifest. What a scheduler's plan names beyond them is the flow's own config."""
        plan, job = self.plan, self._job
        if plan is None or plan.source != "User" or job.attempt > 1 or self.count:
            return
        try:
            planning.check(plan, Changes(), topology=job.topology, cycles=(), checkpoint_uri=job.checkpoint_uri)
        except RLinfError as error:
            raise InvalidManifest(f"plan revision {plan.revision} does not fit the flow: {error}") from error

    def prepare(self, plan: RLPlanSpec, *, uid: str = "", finishing: bool = False) -> str:
        """Why it cannot be; empty: it is under way, or done. Told again, nothing changes. `uid`: of its object; another
        one of the revision takes the place of the first."""
        job, pending = self._job, self.pending
        if pending is not None and pending.is_of(plan.revision, uid=uid):
            return ""
        if pending is not None and pending.is_kept:
            return f"revision {pending.plan.revision} is being committed; tell me again after it"
        if not job.declared:
            return "no plan is in force yet; tell me again"
        is_anew = pending is not None and pending.plan.revision == plan.revision
        self.abort(f"revision {plan.revision} is prepared {'anew, as it was written anew' if is_anew else 'instead'}")
        try:
            placement = plan_rules.check(plan, job.spec, counts=False)
            found = self._changes(job.placement, placement)
            planning.check(
                plan, found, topology=job.topology, cycles=job.placement.stages, checkpoint_uri=job.checkpoint_uri
            )
            turns.check(placement, job.topology, self._exchange.measured())
        except RLinfError as error:
            return self.refuse(plan.revision, str(error), uid=uid)
        if self.failed[0] == plan.revision:
            self.failed, self.failed_uid = (0, ""), ""
        self._agents.begin()
        self.pending = Pending(
            plan=plan, placement=placement, changes=found, number=self.number + 1,
            deadline=job.clock() + job.settings.prepare_timeout_s, uid=uid, finishing=finishing,
        )  # fmt: skip
        beside = [w for w in placement.workers if w.id in found.beside]
        job.members.prepare(beside, pods=found.new_pods)
        job.event("plan-prepare", f"plan revision {plan.revision} is prepared: {found}", revision=plan.revision)
        self._agents.greet(job.sessions.agents, self.plan, number=self.number, pending=self.pending)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)
        return ""

    def refuse(self, revision: int, why: str, *, uid: str = "") -> str:
        """What of this revision is on its way was written anew, and is given up."""
        self.abort(why, revision=revision)
        self.failed, self.failed_uid = (revision, why), uid
        self._job.event("plan-failed", f"plan revision {revision} is refused: {why}", revision=revision)
        self._job.mark(Dirty.SHOWN)
        return why

    def commit(self, revision: int, *, uid: str = "") -> str:
        """Why it cannot be; empty: it comes into force at the end of the open steps. Told again, nothing changes."""
        pending = self.pending
        if pending is None or not pending.is_of(revision, uid=uid):
            why = f": {self.failed[1]}" if self.failed[0] == revision else ""
            return f"revision {revision} is not prepared{why}"
        if pending.phase is Phase.PREPARING:
            return f"revision {revision} is not prepared yet: {self.message}"
        if pending.phase is Phase.PREPARED:
            pending.boundary_at = self._job.clock()
            pending.move(Phase.WAITING)
            self._job.mark(Dirty.SHOWN)
        return ""

    def abort(self, why: str, *, failed: bool = False, revision: int = 0) -> None:
        """The old plan stays as it was. Without effect once a commit was told, or where no plan is pending that
        `revision` means; 0: any. `failed`: it could not be prepared or committed, and nobody took it back."""
        pending, job = self.pending, self._job
        if pending is None or pending.is_kept or revision not in (0, pending.plan.revision):
            return
        pending.move(Phase.IDLE)
        self.pending = None
        if failed:
            self.failed, self.failed_uid = (pending.plan.revision, why), pending.uid
        for record in list(job.members.prepared.values()):
            self._workforce.dismiss(record, f"plan revision {pending.plan.revision} was given up")
        job.members.give_up_next()
        self._agents.abort(pending, why)
        text = f"plan revision {pending.plan.revision} is given up: {why}"
        job.event("plan-failed" if failed else "plan-aborted", text, revision=pending.plan.revision)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)

    # --- agents and workers -----------------------------------------------------------------------------------------
    def learn(self, state: agents_pb2.PlanState) -> None:
        """What an agent that attaches holds. A commit that it has seen and a driver with a plan has not is finished."""
        job = self._job
        is_busy = not job.revision or (self.pending is not None and self.pending.is_kept)
        if is_busy or state.committed_switch <= self.number:
            return
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
        self.abort("an agent has seen the commit of another")
        if job.attempt > 1 and not job.begun:  # nothing works yet: at once
            self._agents.begin()
            self.pending = Pending(
                plan=plan, placement=placement, changes=self._changes(job.placement, placement),
                number=state.committed_switch, deadline=0.0, boundary_at=job.clock(), finishing=True,
            )  # fmt: skip
            self.pending.move(Phase.TELLING)  # the driver before has told it: nobody is waited for
            job.mark(Dirty.SHOWN)
        else:
            self.number = state.committed_switch - 1
            self.prepare(plan, finishing=True)

    def attached(self, key: PodKey, state: agents_pb2.PlanState) -> None:
        self._agents.attached(key, state.committed_switch)
        self._agents.greet([key], self.plan, number=self.number, pending=self.pending)
        if self.pending is not None and self.phase is Phase.TELLING and self._job.members.pods[key].wanted:
            self._agents.commit([key], self.pending)

    def answered(self, key: PodKey, instruction: int, error: str) -> None:
        is_ours = self._agents.answered(key, instruction, ok=not error)
        if is_ours and error and self.phase is Phase.PREPARING:
            pod = self._job.members.pods[key].pod
            self.abort(f"the agent of pod {pod} refuses it: {error}", failed=True)

    def is_gang(self, role: str) -> None:
        """A rank that was prepared beside asks for its roster: the others of this role start again with it."""
        if (pending := self.pending) is not None:
            pending.changes = self._changes(self._job.placement, pending.placement)
        for record in [r for r in self._job.members.prepared.values() if r.placed.role == role]:
            self._workforce.dismiss(record, f"role {role} is a gang: it is formed anew by the commit")

    def _changes(self, old: Placement, new: Placement) -> Changes:
        return planning.between(old, new, gang_roles=self._job.topology.gang_roles, gangs=self._gangs.joined)

    def tick(self) -> None:
        """It looks at all workers, so with time alone and not with what each of them says."""
        pending = self.pending
        stuck = self._cannot_end(pending) if pending is not None and pending.phase is Phase.WAITING else ""
        if stuck != self._stuck:
            self._stuck = stuck
            self._job.mark(Dirty.SHOWN)

    # --- going on ---------------------------------------------------------------------------------------------------
    def advance(self) -> None:
        """As far as what is there allows; called with every settling."""
        if self._incomplete and self.phase not in HOLDING and self._job.all_here:
            self._incomplete = False
            self._job.changed.set()  # the flow may go on
        while self.pending is not None and self._goes_on(self.pending):
            pass

    def _goes_on(self, pending: Pending) -> bool:
        job, commits = self._job, self._commits
        match pending.phase:
            case Phase.PREPARING:
                return self._prepare_on(pending)
            case Phase.PREPARED if pending.finishing:
                self.commit(pending.plan.revision)
                return True
            case Phase.WAITING if pending.is_at_boundary(job, commits, switches=self.count):
                self._tell_commit(pending)
                return True
            case Phase.WAITING if self._stuck and self._may_give_up_steps:
                self._give_up_steps(pending, self._stuck)
                return True
            case Phase.WAITING:
                if why := pending.given_up(job, commits):
                    self.abort(why, failed=True)
            case Phase.TELLING if self._agents.all_have_answered or job.clock() > pending.deadline:
                self._put_in_force(pending)
                return True
            case Phase.HANDING_OVER if self.workers.all_have_answered or job.clock() > pending.deadline:
                self._hand_over(pending)
        return False

    def _prepare_on(self, pending: Pending) -> bool:
        job = self._job
        if not job.members.missing_for_next() and self._agents.all_have_answered:
            pending.move(Phase.PREPARED)
            text = f"plan revision {pending.plan.revision} is prepared"
            job.event("plan-prepared", text, revision=pending.plan.revision)
            job.mark(Dirty.SHOWN)
            return True
        if job.clock() > pending.deadline and not pending.finishing:
            limit = job.settings.prepare_timeout_s
            self.abort(f"it was not prepared within {limit:g} s: {self.message}", failed=True)
        return False

    def _cannot_end(self, pending: Pending) -> str:
        """Why the step whose end the plan waits for can never end; empty: it may."""
        job, commits = self._job, self._commits
        waited_s = job.clock() - max(pending.boundary_at, commits.last_at)
        usual_s = statistics.median(commits.step_seconds) if commits.step_seconds else 0.0
        frees_a_pod = not job.placement.places() <= pending.placement.places()
        still = () if frees_a_pod else pending.changes.kept
        return stuck.why(job, waited_s=waited_s, usual_s=usual_s, still=still)

    @property
    def _would_lose_all(self) -> bool:
        """All that was learnt would go with the open steps."""
        return not self._job.checkpoint_uri and self._job.ledger.version.number > 0

    @property
    def _may_give_up_steps(self) -> bool:
        """Not while a checkpoint is written on which to begin, nor in a job that ends behind its open steps."""
        job, is_saving = self._job, self._gangs.is_here and self._commits.is_saving
        return not (job.ending or job.ledger.draining or is_saving or self._would_lose_all)

    def _give_up_steps(self, pending: Pending, why: str) -> None:
        """The plan comes into force now; what was learnt since the newest checkpoint is learnt again under it."""
        pending.is_urgent, self._stuck = True, ""
        self.given_up += 1
        text = f"open steps are given up for plan revision {pending.plan.revision}, as they can never end: {why}"
        self._job.event("steps-given-up", text, revision=pending.plan.revision, step=self._job.ledger.committed + 1)
        self._gangs.give_up_steps()

    def _tell_commit(self, pending: Pending) -> None:
        job = self._job
        pending.boundary_at = max(pending.boundary_at, self._commits.last_at)
        pending.deadline = job.clock() + job.settings.commit_timeout_s
        pending.move(Phase.TELLING)
        self._agents.commit([key for key in job.sessions.agents if job.members.pods[key].wanted], pending)

    def _put_in_force(self, pending: Pending) -> None:
        """The one moment at which the plan changes: nothing of a step is under way."""
        job = self._job
        self.plan, self.uid, self.number = pending.plan, pending.uid, pending.number
        pending.move(Phase.HANDING_OVER)
        self.count += 1
        self._take_over(pending.placement)
        self._agents.greet(job.sessions.agents, self.plan, number=self.number, pending=None)
        pending.deadline = job.clock() + job.settings.commit_timeout_s
        self.workers.tell(self.number)
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
            job.say_recovering(f"plan revision {placement.revision}: waiting for {waits}", unless_said=True)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)

    def _hand_over(self, pending: Pending) -> None:
        """Who has to start or to come again is waited for afterwards, as `_incomplete`."""
        job = self._job
        pending.move(Phase.IDLE)
        self.pause.begin(pending.boundary_at)
        self.pending = None
        self.workers.forget()
        job.members.forget_pods()
        text = f"plan revision {pending.plan.revision} is in force: {pending.changes}"
        job.event("plan", text, revision=pending.plan.revision, step=job.ledger.committed)
        job.mark(Dirty.SHOWN)
