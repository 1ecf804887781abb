"""The driver's core: one job, what it knows and what it does about each thing it hears. One event loop, no locks: every
`on_*` method is synchronous, changes records and leaves messages in outboxes.

    server.py ──on_*──> Driver ──> Workforce   pods, processes, restarts
                           ├─────> Exchange    units, routes, matching
                           ├─────> Gangs       rosters, what a gang begins on
                           ├─────> Commits     steps that all ranks have done; StepLedger has the rules
                           └─────> DriverTurns lease sets that span pods

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| server.py, per stream | messages | the peer | the peer, or the end of the stream |
| the flow function | steps | `until(...)` | pulse after every change |
| tick (0.2 s) | heartbeat ages, back-offs | the clock | the clock |

Not for: gRPC (server.py), what others see of it (status.py), files (output.py), the process (main.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvariantBroken
from rlinf_api.job import RLJobSpec
from rlinf_api.names import WorkerId
from rlinf_api.plan import Placement
from rlinf_api.report import DriverState, Failure
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.units import UnitInfo
from rlinf_worker.driver import status
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.flow import Topology, settings_dict
from rlinf_worker.driver.gang import Gangs
from rlinf_worker.driver.losses import Losses
from rlinf_worker.driver.members import Members, PodKey, WorkerRecord, WorkerState
from rlinf_worker.driver.outbox import Outbox
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.presence import Presence, lost
from rlinf_worker.driver.sessions import Refuse, Sessions, check_hello
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.driver.steps import StepLedger
from rlinf_worker.driver.switch import Switch
from rlinf_worker.driver.turns import DriverTurns
from rlinf_worker.driver.workforce import Order, Workforce
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.settings import Settings

logger = logging.getLogger(__name__)


class Driver:
    def __init__(
        self,
        spec: RLJobSpec,
        *,
        flow_settings: FlowSettings,
        job_uid: str,
        attempt: int,
        checkpoint_uri: str,
        output: Output,
        clock: Callable[[], float],
        settings: DriverSettings | None = None,
        limits: Settings | None = None,
        first_of_life: bool = False,
    ) -> None:
        self.spec, self.flow_settings, self.job_uid, self.attempt = spec, flow_settings, job_uid, attempt
        self.is_first = attempt == 1 or first_of_life  # of the job, or since it was resumed: nobody knows more
        self.checkpoint_uri, self.output, self.clock = checkpoint_uri, output, clock
        self.settings = settings or DriverSettings()
        self.members, self.sessions, self.losses = Members(), Sessions(), Losses(self, clock)
        self.ledger = StepLedger(
            steps=spec.flow.steps,
            max_staleness=spec.flow.max_staleness,
            checkpoint_every=spec.checkpoint.every_steps,
        )
        limits = limits or Settings()
        self.gangs, self.commits, self.switch = Gangs(self), Commits(self), Switch(self)
        self.presence = Presence(self, rehome_after_s=limits.rehome_after_s)
        self.workforce = Workforce(
            spec,
            members=self.members,
            sessions=self.sessions,
            hooks=self,
            settings=self.settings,
            clock=clock,
            order=lambda: Order(driver_attempt=attempt, plan_revision=self.revision, roster=self.gangs.roster),
            has_begun=lambda: self.presence.has_begun,
            flow_json=json.dumps(settings_dict(flow_settings)),
        )
        self.turns = DriverTurns(
            members=self.members,
            instruct=self._instruct,
            event=self.event,
            settings=limits,
            attempt=attempt,
        )
        self.placement: Placement | None = None
        self.exchange: Exchange | None = None  # once the flow has declared its channels
        self.begun = False  # all workers were ready once in this run of the flow
        self.state, self.reason = DriverState.WAITING, "WaitingForPlan"
        self.message = "the operator has not sent a plan yet"
        self.saved: tuple[PolicyVersion, str] | None = None
        self.on_rerun: Callable[[], None] = lambda: None  # main.py: run the flow function anew
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()
        self._failure: Failure | None = None
        self.sequence = 0
        self._facts: dict[str, str] = {}
        self.ending_at: float | None = None

    # --- small things -----------------------------------------------------------------------------------------------
    @property
    def ending(self) -> bool:
        return self.ended.is_set() or self.ending_at is not None

    @property
    def revision(self) -> int:
        return self.placement.revision if self.placement else 0

    def pulse(self) -> None:
        self.sequence += 1
        self.changed.set()
        self.switch.advance()

    async def until(self, condition: Callable[[], bool], *, what: str) -> None:
        """Wait for a condition over the driver's state. Bounded by the job: tick() names what a step lacks, a job's
        activeDeadlineSeconds ends it, and a driver that ends wakes every waiter."""
        while not condition() and not self.ended.is_set():
            self.changed.clear()
            await self.changed.wait()
        if not condition():
            raise asyncio.CancelledError(f"the driver ended while waiting for {what}")

    async def plan_in_force(self) -> bool:
        """For a hello that comes before the plan: waits, so that agents need not come again and again."""
        try:
            async with asyncio.timeout(self.settings.plan_timeout_s):
                await self.until(lambda: self.exchange is not None, what="a plan")
        except TimeoutError:
            return False
        return True

    def event(self, kind: str, message: str, **fields: Any) -> None:
        logger.info(message, extra={"event": kind, **fields})
        self.output.event(kind, message, **fields)

    # --- plan and flow ----------------------------------------------------------------------------------------------
    def adopt_plan(self, placement: Placement) -> None:
        """The first one; later ones come by a switch."""
        self.placement = placement
        self.members.adopt(placement)
        self.state, self.reason, self.message = DriverState.STARTING, "WaitingForWorkers", ""
        self.event("plan", f"plan revision {placement.revision} is in force", revision=placement.revision)
        self.pulse()

    def declare(self, topology: Topology) -> None:
        """The flow has said which channels it has: workers may be started and welcomed."""
        if self.exchange is not None:
            if self.exchange.topology != topology:
                raise InvariantBroken("the flow declared other channels when it was run again")
            return
        if self.placement is None:
            raise InvariantBroken("a flow was run without a plan")
        self.exchange = Exchange(
            topology,
            self.placement,
            members=self.members,
            sessions=self.sessions,
            order=self.flow_settings.order,
            attempt=self.attempt,
        )
        self.turns.adopt(self.placement, topology)
        self.workforce.start_workers()
        self.pulse()

    def open_step(self, number: int) -> PolicyVersion:
        self.ledger.open(number, now=self.clock())
        return self.ledger.version

    def put_tickets(self, channel: str, units: list[UnitInfo], *, step: int) -> None:
        entry = self.ledger.get(step)
        if entry is None or self.exchange is None:
            raise InvariantBroken(f"tickets were put for step {step}, which is not open")
        entry.keys.update(unit.key for unit in units)
        self.exchange.put_tickets(channel, units)
        self.exchange.match()

    def seal_step(self, number: int) -> None:
        """The flow has put everything that step `number` needs."""
        entry = self.ledger.get(number)
        if entry is None or self.exchange is None:
            return
        entry.sealed = True
        self.exchange.open_step(number, branch=entry.branch, keys=entry.keys)
        self.commits.hear_early()
        self.commits.try_commit(number)  # every rank may have done its part before the flow had said all
        self.exchange.match()
        self.pulse()

    # --- agents -----------------------------------------------------------------------------------------------------
    def on_agent_hello(self, hello: agents_pb2.Hello, outbox: Outbox) -> PodKey:
        self._check_hello(hello.job_uid, hello.highest_driver_attempt, protocol=hello.protocol)
        self.switch.learn(hello.plan)
        key = self.workforce.attach(hello, outbox)
        self.turns.attached(key, hello)
        self.switch.attached(key, hello.plan)
        self._start_workers()
        self.pulse()
        return key

    def on_agent_message(self, key: PodKey, message: agents_pb2.AgentMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "turn":
            self.turns.heard(key, message.turn)
        elif kind == "notice":
            self.turns.noticed(key, message.notice)
        elif self.workforce.heard(key, message):
            self.pulse()

    def on_agent_gone(self, key: PodKey, outbox: Outbox) -> None:
        self.workforce.detached(key, outbox)
        self.pulse()

    def prepared_gone(self, record: WorkerRecord, why: str) -> None:
        self.switch.prepared_gone(record, why)

    def instructed(self, key: PodKey, number: int, error: str) -> None:
        self.switch.instructed(key, number, error)
        self.turns.instructed(key, number)

    def _instruct(self, key: PodKey, **kind: Any) -> int:
        return self.workforce.instruct(key, plan_revision=self.revision, **kind)

    def _start_workers(self) -> None:
        if self.exchange is not None and not self.ending:
            self.workforce.start_workers()

    def worker_gone(self, record: WorkerRecord, why: str) -> None:
        """Hook of the workforce: the units go elsewhere, the routes end, a gang is formed anew."""
        if record.placed.role == self.gangs.role and self.ending_at is not None and not self.is_saved:
            self.ending_at = None  # the last weights died with it: their steps are made again
        if self.state is DriverState.RUNNING and not self.ending:
            self.state, self.reason = DriverState.RECOVERING, "Recovering"
            self.message = lost(record)
        pod = self.members.pods.get(record.placed.pod)
        if pod is not None and not pod.attached:
            self.turns.pod_lost(pod.key)
        if self.exchange is not None:
            if self.exchange.gone(record.placed.id, record.placed.role) or record.placed.role in self.gangs.rosters:
                self.gangs.gone(record)
            self.exchange.update_routes(roster=self.gangs.roster)
            self.exchange.match()
        self.pulse()

    # --- workers ----------------------------------------------------------------------------------------------------
    def on_worker_hello(self, hello: pb.Hello, outbox: Outbox) -> WorkerId:
        self._check_hello(hello.job_uid, hello.highest_driver_attempt, protocol=hello.protocol)
        if self.exchange is None or self.placement is None:
            raise Refuse("no plan is in force yet; come again", exit_code=names.EXIT_RETRYABLE)
        wid = WorkerId(hello.worker)
        record = self.workforce.welcome(wid, hello.attempt, outbox)
        record.endpoint = messages.endpoint_from_pb(hello.endpoint)
        record.state = WorkerState.READY if hello.ready else WorkerState.CONNECTED
        record.begun = record.begun or hello.ready
        self.gangs.check(record, hello.world)
        welcome = pb.Welcome(
            driver_attempt=self.attempt,
            protocol=names.PROTOCOL,
            plan_revision=self.revision,
            switch_number=self.switch.number,
            channels=self.exchange.channel_specs(),
            world=len(self.members.of_role(record.placed.role)),
            flow_json=json.dumps(settings_dict(self.flow_settings)),
            checkpoint_uri=self.checkpoint_uri,
            checkpoint_keep=self.spec.checkpoint.keep,
            facts=[pb.Fact(name=name, json=value) for name, value in self._facts.items()],
        )
        self.sessions.tell(wid, welcome=welcome)
        self.commits.learn(hello, is_rank=hello.ready and record.placed.role == self.gangs.role)
        self.exchange.reconnected(wid, record.placed.role, hello, after=self.ledger.version)
        for done in hello.steps_done:
            self.commits.on_step_done(wid, done)
        self.gangs.leave_old_roster(record)
        self.gangs.settle()
        self.exchange.update_routes(roster=self.gangs.roster)
        self.switch.replanned(wid, self.switch.number)
        self.presence.maybe_begin()
        self.exchange.match()
        self.pulse()
        return wid

    def on_worker_message(self, wid: WorkerId, message: pb.WorkerMessage) -> None:
        exchange, kind = self.exchange, message.WhichOneof("kind")
        self.sessions.heard += 1
        if exchange is None:
            raise InvariantBroken(f"worker {wid} was welcomed before there were channels")
        record = self.members.find(wid)
        if record is None:
            return  # another plan has come since, in which it is not
        if kind == "credit":
            exchange.credit(wid, message.credit)
        elif kind == "announce":
            announce = message.announce
            exchange.announce(announce.channel, announce.units, producer=wid, after=self.ledger.version)
        elif kind == "held":
            exchange.held(wid, message.held)
            self.switch.unit_moved()
        elif kind == "acked":
            exchange.acked(wid, message.acked)
        elif kind == "drop":
            exchange.dropped(wid, message.drop)
        elif kind == "step_done":
            self.commits.on_step_done(wid, message.step_done)
        elif kind == "ready":
            self.gangs.on_ready(record, message.ready)
            if wid in self.members.prepared:
                self.switch.prepared_ready(record)
        elif kind == "join":
            self.gangs.on_join(record, message.join.store_port)
        elif kind == "saved":
            self.commits.on_saved(message.saved)
        elif kind == "account":
            self.commits.on_account(wid, message.account)
        elif kind == "report":
            self.commits.on_report(message.report)
        elif kind == "peer_lost":
            self.losses.heard(wid, message.peer_lost)
        elif kind == "fact":
            self._on_fact(wid, message.fact)
        elif kind == "replanned":
            self.switch.replanned(wid, message.replanned.switch_number)
        elif kind == "last_words":
            self.event("last-words", f"{wid}: {message.last_words.message}")
        exchange.match()
        if kind not in ("credit", "announce", "held", "acked", "receipt", "account"):
            self.pulse()

    def _on_fact(self, wid: WorkerId, fact: pb.Fact) -> None:
        """One role's knowledge for all; a second worker of the role must know the same."""
        known = self._facts.setdefault(fact.name, fact.json)
        if known != fact.json:
            text = f"{wid} says {fact.name} is {fact.json[:200]}, another worker said {known[:200]}"
            self.fail("UserError", text, Failure(role="driver", reason="FactsDiffer", message=text))
        for worker in self.members.everybody():
            self.sessions.tell(worker.placed.id, fact=fact)

    def on_worker_gone(self, wid: WorkerId, outbox: Outbox) -> None:
        self.workforce.stream_ended(wid, outbox)

    # --- time -------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """Every 0.2 s: what only the clock tells."""
        if self.ledger.draining and self._has_nothing and not self.ending:
            self.finish(saved=True)
        elif not self.ended.is_set():
            self.workforce.tick()
            self.presence.tick()
            self.switch.advance()
            self._start_workers()
            if self.ending_at is None:
                self._notice(self.clock())
            elif self.is_saved or self.clock() > self.ending_at:
                self.finish(saved=self.is_saved)

    @property
    def _has_nothing(self) -> bool:
        """Nothing is under way, and nothing would be lost. A newer driver hears first what the gang has learnt."""
        if self.begun or self.ledger.open_steps:
            return False
        is_here = self.exchange is not None and all(rank.begun for rank in self.gangs.ranks)
        is_kept = self.is_saved or self.ledger.committed == 0
        return self.is_first or self.placement is None or (is_here and is_kept)

    @property
    def is_saved(self) -> bool:
        """Whether the committed weights are safe, as far as this job wants them to be: saved, or restored."""
        return not self.checkpoint_uri or self.ledger.version in (self.saved and self.saved[0], self.gangs.stands_on)

    def _notice(self, now: float) -> None:
        """While steps go on, the message says what is unusually slow, and nothing where all is well; else who is
        waited for."""
        if self.state is DriverState.RECOVERING or self.presence.goes_on:
            reason, text = Reason.RECOVERING, self.presence.message(now)
        elif self.state is DriverState.RUNNING:
            reason, text = status.unusual(self, now)
        else:
            return
        if (reason, text) != (self.reason, self.message):
            self.reason, self.message = reason, text
            self.pulse()

    # --- ending -----------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Stop behind the steps that are open, with a checkpoint."""
        if not self.ledger.draining:
            self.event("drain", "stopping at the next step boundary")
            self.ledger.drain()
            self.pulse()

    def finish(self, *, saved: bool, made_before: bool = False) -> None:
        note = "" if saved else "; its last checkpoint was not confirmed in time"
        if self.ledger.finished:
            self.state, self.reason = DriverState.COMPLETE, "FlowFinished"
            self.message = f"{self.ledger.committed} steps are done{note}"
            if made_before:
                self.message = f"the job is complete already: its checkpoint is of step {self.ledger.committed} of "
                self.message += f"{self.ledger.steps}; raise spec.flow.steps to go on"
        else:
            self.state, self.reason = DriverState.DRAINED, "Stopped"
            self.message = f"stopped after step {self.ledger.committed} of {self.ledger.steps}{note}"
        self._end("end")

    def fail(self, reason: str, message: str, failure: Failure | None = None) -> None:
        if not self.ended.is_set():
            self._failure = failure
            self.state, self.reason, self.message = DriverState.FAILED, reason, message
            self._end("failed")

    def stop(self, why: str, *, stale: bool = False) -> None:
        """This driver must not go on: a newer one exists."""
        self.reason, self.message = "Stale" if stale else "Stopped", why
        self._end("stopped")

    def _end(self, kind: str) -> None:
        self.event(kind, self.message, reason=self.reason, state=str(self.state))
        self.output.flush()
        self.ended.set()
        self.pulse()

    def _check_hello(self, job_uid: str, highest_driver_attempt: int, *, protocol: int) -> None:
        check_hello(job_uid, protocol, job=self.job_uid)
        if highest_driver_attempt > self.attempt:
            self.stop(f"a caller has obeyed driver attempt {highest_driver_attempt}", stale=True)
            raise Refuse(f"driver attempt {self.attempt} has been replaced", exit_code=names.EXIT_RETRYABLE)

    @property
    def first_failure(self) -> Failure | None:
        return self.workforce.first_failure or self._failure
