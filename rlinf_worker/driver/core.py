"""The driver's core: one job, what it hears and what it does about it. One event loop, no locks: every `on_*` method is
synchronous. It lets the parts change facts (job.py), which mark what has changed, and then settles, in one order:

    gone? ──> gangs begin ──> routes ──> does the job begin? ──> starts ──> matching ──> flow anew ──> plans ──> shown

    server.py ──on_*──> Driver ──> Workforce   pods, processes, restarts
                           ├─────> Exchange    units, routes, matching
                           ├─────> Commits     steps that all ranks have done; StepLedger has the rules
                           ├─────> HandOver    pods that were told to end, and work on until another is there
                           ├─────> Gangs       rosters, what a gang begins on
                           ├─────> DriverTurns lease sets that span pods
                           ├─────> Switch      another plan: its phases; what agents and workers know of it
                           ├─────> Presence    who is away, whether the job may begin
                           ├─────> Stalls      who blocks where nothing moves
                           └─────> Notices     what people are told

Each part knows the job and the parts above it in this list; none knows the driver.

Not for: gRPC (server.py), what others see of it (status.py), files (output.py), the process (main.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from rlinf_api import conditions, names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken, UserError
from rlinf_api.names import WorkerId
from rlinf_api.report import Failure
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import entitled
from rlinf_worker.driver.agents import Agents
from rlinf_worker.driver.channel_specs import channel_specs
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.facts import SharedFacts
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.handover import HandOver
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import PodKey, WorkerRecord, WorkerState
from rlinf_worker.driver.notices import Notices, lost
from rlinf_worker.driver.presence import Presence
from rlinf_worker.driver.profile import ProfileBook
from rlinf_worker.driver.sessions import Refuse, check_hello
from rlinf_worker.driver.stalls import Stalls
from rlinf_worker.driver.switch import Switch
from rlinf_worker.driver.topology import Topology
from rlinf_worker.driver.turns import DriverTurns
from rlinf_worker.driver.workforce import Workforce
from rlinf_worker.queues.expected import Wanted
from rlinf_worker.queues.units import Age, UnitInfo
from rlinf_worker.turns.arbiter import Timers
from rlinf_worker.uplink.outbox import Outbox

MAX_ROUNDS: Final = 64
"""How often one settling goes round. A change of plan marks members anew, which may begin a gang: a handful. More is a
bug of ours."""

LOOKED_AT: Final[dict[str, Dirty]] = {
    "credit": Dirty.UNITS,
    "announce": Dirty.UNITS,
    "held": Dirty.UNITS,
    "sealed": Dirty.UNITS,
    "acked": Dirty.UNITS,
    "account": Dirty.NOTHING,
    "partial": Dirty.NOTHING,
    "drop": Dirty.UNITS | Dirty.SHOWN,
    "peer_lost": Dirty.UNITS | Dirty.SHOWN,
    "step_done": Dirty.UNITS | Dirty.SHOWN,
}
"""What a worker's message has changed, by its kind; others change what people see."""


class Driver:
    def __init__(self, job: Job, *, timers: Timers | None = None) -> None:
        """`timers`: what deadlines of turns are set by; None: the event loop."""
        self.job = job
        self.facts = SharedFacts(job)
        self.exchange = Exchange(job)
        self.workforce = Workforce(job)
        self.agents = Agents(job, self.workforce)
        self.commits = Commits(
            job, self.exchange, self.workforce.recoveries, wants_checkpoint=lambda: self._wants_checkpoint
        )
        self.handover = HandOver(job, self.agents, self.commits)
        self.gangs = Gangs(job, self.exchange, self.workforce, self.commits)
        self.turns = DriverTurns(job, timers=timers)
        self.switch = Switch(job, self.exchange, self.workforce, self.commits, self.gangs, self.turns)
        self.presence = Presence(job, self.exchange, self.workforce, self.commits, self.gangs)
        self.stalls = Stalls(job, self.exchange, self.workforce, self.commits, self.presence)
        self.profiles = ProfileBook(
            job,
            losses=lambda: self.workforce.restarts + self.presence.changes,
            is_away=lambda: bool(self.workforce.recoveries.under_way or job.members.away),
        )
        self.commits.on_committed = self.profiles.committed
        self.workforce.on_killed = self.profiles.killed
        self.notices = Notices(job, self.exchange, self.commits, self.turns, self.presence, self.stalls)
        self.on_rerun: Callable[[], None] = lambda: None  # main.py: run the flow function anew

    # --- settling ---------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Everything follows from the facts by now. Work is proportional to what was marked."""
        job = self.job
        for _ in range(MAX_ROUNDS):
            if not (marks := job.take_marks()):
                return
            moved = job.take_moved()
            if marks is Dirty.UNITS:  # nearly always
                self.exchange.match()
                continue
            if marks & Dirty.MEMBERS:
                for gone in self.workforce.take_gone():
                    self._gone(gone)
                self.gangs.settle()
                self.exchange.routes.update(moved)
                self.presence.settle()
            if marks & (Dirty.MEMBERS | Dirty.TIME) and job.declared and not job.ending:
                self.workforce.start_workers(None if marks & Dirty.TIME else moved)
            if marks & (Dirty.MEMBERS | Dirty.UNITS):
                self.exchange.match()
            if marks & Dirty.RERUN:
                self.on_rerun()
            if marks & ~Dirty.UNITS:
                self.switch.advance()
            if marks & Dirty.SHOWN:
                job.show()
        raise InvariantBroken(f"the driver did not settle within {MAX_ROUNDS} rounds", got=f"marks {marks}")

    def _gone(self, record: WorkerRecord) -> None:
        """Its units go elsewhere, its routes end, a gang is formed anew."""
        job = self.job
        if job.members.workers.get(record.placed.id) is not record:  # it was for the next plan; the old one works on
            self.switch.abort(f"worker {record.placed.id}, which it adds, failed: {record.why}", failed=True)
            return
        if record.placed.role in job.topology.gang_roles and job.ending_at is not None and not job.is_saved:
            job.ending_at = None  # its last weights died with it: their steps are made again
        job.say_recovering(lost(record), unless_said=True)
        pod = job.members.pods.get(record.placed.pod)
        if pod is not None and not pod.attached:
            self.turns.pod_lost(pod.key)
        self.exchange.gone(record.placed.id, record.placed.role)
        if self.gangs.is_gang(record.placed.role):
            self.gangs.gone(record)

    def settled(self, answer: str) -> str:
        """`driver.settled(driver.switch.prepare(plan))`: a part's answer, once what follows from it is so."""
        self.settle()
        return answer

    # --- the flow ---------------------------------------------------------------------------------------------------
    def declare(self, topology: Topology) -> None:
        """The flow has said which channels it has: workers may be started and welcomed."""
        job = self.job
        if job.declared:
            if job.topology != topology:
                raise InvariantBroken("the flow declared other channels when it was run again")
            return
        if not job.revision:
            raise InvariantBroken("a flow was run without a plan")
        job.topology = topology
        self.switch.declared()
        self.exchange.declare()
        self.turns.adopt(job.placement, topology)
        job.mark(Dirty.MEMBERS | Dirty.SHOWN)
        self.settle()

    def open_step(self, number: int) -> PolicyVersion:
        self.job.ledger.open(number, now=self.job.clock())
        return self.job.ledger.version

    def put_tickets(self, channel: str, units: list[UnitInfo], *, step: int, wanted: Wanted, rare: bool) -> None:
        entry = self.job.ledger.get(step)
        if entry is None:
            raise InvariantBroken(f"tickets were put for step {step}, which is not open")
        entry.tickets.update(wanted)
        entry.rare |= rare
        for gang in self.job.topology.gangs_behind(channel):
            entry.part(gang.consumer).wanted.update(wanted)
        self.exchange.put_tickets(channel, units, wanted=wanted)
        self.job.mark(Dirty.UNITS)
        self.settle()

    @property
    def _wants_checkpoint(self) -> bool:
        """Out of turn, of the step that commits now."""
        is_last = self.switch.wants_checkpoint and not self.job.ledger.open_steps  # before a gang is formed anew
        return is_last or self.handover.wants_checkpoint

    def seal_step(self, number: int, *, state: str = "{}") -> None:
        """The flow has put everything that step `number` needs. `state`: its own by then, as JSON."""
        entry = self.job.ledger.get(number)
        if entry is None:
            return
        entry.sealed, entry.flow_state = True, state
        self.exchange.open_step(entry)
        self.commits.hear_early()
        self.commits.try_commit(number)  # every rank may have done its part before the flow had said all
        self.job.mark(Dirty.UNITS | Dirty.SHOWN)
        self.settle()

    # --- agents -----------------------------------------------------------------------------------------------------
    def on_agent_hello(self, hello: agents_pb2.Hello, outbox: Outbox[Any]) -> PodKey:
        self._check_hello(hello.job_uid, hello.highest_driver_attempt, protocol=hello.protocol)
        self.switch.learn(hello.plan)
        self.settle()  # a plan that it has seen committed comes into force before its workers are compared with it
        self.handover.hold_off(hello)
        key = self.agents.attach(hello, outbox)
        self.turns.attached(key, hello)
        self.switch.attached(key, hello.plan)
        self.job.mark(Dirty.MEMBERS | Dirty.SHOWN)
        self.settle()
        return key

    def on_agent_message(self, key: PodKey, message: agents_pb2.AgentMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "turn":
            self.turns.heard(key, message.turn)
        elif kind == "notice":
            self.turns.noticed(key, message.notice)
        elif kind == "leaving":
            self.handover.leaves(key, within_s=message.leaving.within_s)
        elif self.agents.heard(key, message):
            self.job.mark(Dirty.SHOWN)
        if kind == "result" and key in self.job.members.pods:
            result = message.result
            error = "" if result.ok else result.error or "no reason was given"
            self.switch.answered(key, result.instruction_id, error)
            self.turns.answered(key, result.instruction_id)
        self.settle()

    def on_agent_gone(self, key: PodKey, outbox: Outbox[Any]) -> None:
        self.agents.detached(key, outbox)
        self.job.mark(Dirty.SHOWN)
        self.settle()

    # --- workers ----------------------------------------------------------------------------------------------------
    def on_worker_hello(self, hello: pb.Hello, outbox: Outbox[Any]) -> WorkerId:
        job = self.job
        self._check_hello(hello.job_uid, hello.highest_driver_attempt, protocol=hello.protocol)
        if not job.declared:
            raise Refuse("no plan is in force yet; come again", exit_code=names.EXIT_RETRYABLE)
        wid = WorkerId(hello.worker)
        record = self.workforce.welcome(wid, hello.attempt, outbox)
        record.endpoint = messages.endpoint_from_pb(hello.endpoint)
        record.state = WorkerState.READY if hello.ready else WorkerState.CONNECTED
        record.begun = record.begun or hello.ready
        record.kept = ""  # it says so again
        self.gangs.check(record, hello.world)
        job.sessions.tell(wid, welcome=self._welcome(record))
        is_rank = hello.ready and record.placed.role in job.topology.gang_roles
        self.commits.learn(hello, is_rank=is_rank)
        self.exchange.reconnected(wid, record.placed.role, hello, after=job.ledger.version)
        for made in hello.produced:
            self._announced(record, made.channel, [made.unit])
        for done in hello.steps_done:
            self._done(record, done)
        self.gangs.leave_old_roster(record)
        self.switch.workers.answered(wid, self.switch.number)  # its Welcome had the sizes
        job.mark_member(wid)
        self.settle()
        return wid

    def _done(self, record: WorkerRecord, done: pb.StepDone) -> None:
        placed = record.placed
        if _may(self.job, entitled.to_end_a_step(placed, done.step, done.rank, gangs=self.job.topology.gang_roles)):
            self.commits.on_step_done(placed.id, placed.role, done)

    def _announced(self, record: WorkerRecord, channel: str, units: Iterable[pb.Unit]) -> None:
        placed, producer = record.placed, self.exchange.book(channel).spec.producer
        if _may(self.job, entitled.to_announce(placed, channel, producer=producer)):
            self.exchange.announced(channel, units, producer=placed.id, after=Age.at(self.job.ledger.version))

    def _welcome(self, record: WorkerRecord) -> pb.Welcome:
        job = self.job
        return pb.Welcome(
            driver_attempt=job.attempt,
            protocol=names.PROTOCOL,
            switch_number=self.switch.number,
            channels=channel_specs(self.job),
            world=len(job.members.of_role(record.placed.role)),
            allotment=messages.allotment_to_pb(record.placed.allotment),
            flow_json=job.flow_settings.to_json(),
            checkpoint_uri=job.checkpoint_uri,
            checkpoint_keep=job.spec.checkpoint.keep,
            facts=self.facts.all(),
            gangs=job.topology.gang_roles,
        )

    def on_worker_message(self, wid: WorkerId, message: pb.WorkerMessage, *, more: bool = False) -> None:
        """`more` of the same worker follow at once: units are matched when the last of them has been heard."""
        job = self.job
        job.sessions.heard += 1
        if not job.declared:
            raise InvariantBroken(f"worker {wid} was welcomed before there were channels")
        record = job.members.find(wid)
        if record is None:
            return  # another plan has come since, in which it is not
        kind = message.WhichOneof("kind") or ""
        self._hear(record, kind, message)
        job.mark(LOOKED_AT.get(kind, Dirty.SHOWN))
        if not more or job.marks & ~Dirty.UNITS:
            self.settle()

    def _hear(self, record: WorkerRecord, kind: str, message: pb.WorkerMessage) -> None:
        wid = record.placed.id
        match kind:
            case "credit":
                self.exchange.queue(message.credit.channel).core.consumers.credit(wid, message.credit.units)
            case "announce":
                self._announced(record, message.announce.channel, message.announce.units)
            case "held":
                self.exchange.queue(message.held.channel).held(wid, message.held)
                self.switch.pause.unit_moved()
            case "sealed":
                self.exchange.queue(message.sealed.channel).sealed(wid, message.sealed)
            case "acked":
                self.exchange.queue(message.acked.channel).acked(wid, message.acked)
            case "drop":
                self.exchange.dropped(wid, message.drop)
            case "step_done":
                self._done(record, message.step_done)
            case "ready":
                self.job.mark_member(wid)
                if record.state is WorkerState.CONNECTED:
                    self.profiles.started(record.placed.role, seconds=self.job.clock() - record.started_at)
                self.gangs.on_ready(record, message.ready)
                if wid in self.job.members.prepared:
                    self.switch.workers.link_ahead(record, self.switch.pending)
            case "join":
                self.job.mark_member(wid)
                self.gangs.on_join(record)
                if wid in self.job.members.prepared:
                    self.switch.is_gang(record.placed.role)
            case "saved":
                saved, gangs = messages.version_from_pb(message.saved.version), self.job.topology.gang_roles
                if _may(self.job, entitled.to_save(record.placed, saved, gangs=gangs)):
                    self.commits.on_saved(message.saved)
                    self.handover.settle()
            case "account":
                self.commits.on_account(wid, message.account)
                self.profiles.heard(record.placed, message.account)
            case "report":
                self.commits.on_report(message.report)
            case "peer_lost":
                self.notices.peer_lost(wid, message.peer_lost)
                self.exchange.peer_lost(wid, message.peer_lost)
            case "fact":
                self.facts.share(wid, message.fact)
            case "partial":
                self.exchange.queue(message.partial.channel).kept(wid, message.partial)
            case "kept":
                record.kept = message.kept.words
                if record.kept:
                    self.job.event("turns", record.kept, worker=wid)
            case "replanned":
                self.switch.workers.answered(wid, message.replanned.switch_number)

    def on_worker_gone(self, wid: WorkerId, outbox: Outbox[Any]) -> None:
        self.workforce.stream_ended(wid, outbox)

    def _check_hello(self, job_uid: str, highest_driver_attempt: int, *, protocol: int) -> None:
        check_hello(job_uid, protocol, job=self.job.uid)
        if highest_driver_attempt > self.job.attempt:
            self.job.stop(f"a caller has obeyed driver attempt {highest_driver_attempt}", stale=True)
            self.settle()
            raise Refuse(f"driver attempt {self.job.attempt} has been replaced", exit_code=names.EXIT_RETRYABLE)

    # --- time -------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Every 0.2 s: what only the clock tells."""
        job = self.job
        if job.ledger.draining and self._has_nothing and not job.ending:
            job.finish(saved=True)
        elif not job.ended.is_set():
            self.agents.tick()
            self.handover.settle()
            self.workforce.tick()
            self.presence.tick()
            self.stalls.tick()
            self.switch.tick()
            job.mark(Dirty.TIME)
            self.settle()
            if job.ending_at is None:
                self.notices.look(job.clock())
            elif job.is_saved or job.clock() > job.ending_at:
                job.finish(saved=job.is_saved)
        self.settle()

    @property
    def _has_nothing(self) -> bool:
        """Nothing is under way, and nothing would be lost. A newer driver hears first what the gang has learnt."""
        job = self.job
        if job.begun or job.ledger.open_steps:
            return False
        is_kept = job.is_saved or job.ledger.committed == 0
        return job.is_first or not job.revision or (self.gangs.is_here and is_kept)

    # --- ending -----------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Stop behind the steps that are open, with a checkpoint."""
        if not self.job.ledger.draining:
            self.job.event("drain", "stopping at the next step boundary")
            self.job.ledger.drain()
            self.job.mark(Dirty.SHOWN)
            self.settle()

    def fail(self, reason: conditions.Reason, message: str, failure: Failure | None = None) -> None:
        self.job.fail(reason, message, failure)
        self.settle()

    @property
    def first_failure(self) -> Failure | None:
        return self.workforce.toll.first_failure or self.job.failure


def _may(job: Job, problem: UserError | None) -> bool:
    """Whether a worker may say what it said; else the job ends with the problem."""
    if problem is not None:
        job.fail(conditions.Reason.USER_ERROR, str(problem))
    return problem is None
