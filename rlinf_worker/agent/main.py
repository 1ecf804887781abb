"""`python -m rlinf_worker agent`: wires the parts of an agent and decides with which words it ends.

    driver  <- attach ->  instructions -> supervisor -> worker processes
                 tell, exited  <- (listener) <-     |
    Prometheus <- metrics <- counters <- slots <------------ workers, over the pod's unix socket

| ends by | workers | exit code |
|---|---|---|
| SIGTERM, SIGINT | work until it is handed over, stop order, grace, SIGKILL; at once by a second, later signal | 143 |
| Refusal of the driver | the same; of a stale attempt: SIGKILL at once | the refusal's (0: job finished, 76: stale) |
| no driver for too long (one that says "retryable" instead of a welcome is none) | the same | 75 |
| a bug in the agent | SIGKILL | 70 |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from rlinf_api import names, wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.report import Failure
from rlinf_worker import devices, last_words, memory, settings
from rlinf_worker.agent import leash
from rlinf_worker.agent.attach import Attachment
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.instructions import Book, Instructions
from rlinf_worker.agent.lifecycle import SayExited, SayHung
from rlinf_worker.agent.metrics import AgentMetrics, WorkerCounters
from rlinf_worker.agent.slots import SlotsServer
from rlinf_worker.agent.supervisor import COMMAND, Supervisor
from rlinf_worker.agent.turns import AgentTurns
from rlinf_worker.agent.vacancy import Vacancy
from rlinf_worker.agent.worker_log import SpanStore
from rlinf_worker.clock import Clock
from rlinf_worker.metrics_server import MetricsServer
from rlinf_worker.spans import TURN

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2  # how often a pod that is to end looks whether its driver is still there
_BREAK_S: Final = 1.5  # how long its stream may be broken: then the driver has given it up (DriverSettings)


class Agent:
    """Made and run inside the event loop of the main thread. Plays supervisor's Listener, slots' Hearer and attach's
    Holdings: each of these methods moves one fact from one part to another."""

    def __init__(
        self,
        identity: PodIdentity,
        limits: settings.Settings,
        *,
        environ: Mapping[str, str],
        command: tuple[str, ...],
        metrics_port: int = names.PORT_METRICS,
    ) -> None:
        self._identity, self._limits, self._metrics_port = identity, limits, metrics_port
        self._mark = secrets.token_hex(8)
        self._slots = SlotsServer(self, path=identity.socket_path)
        self._clock = clock = Clock(notice_s=limits.oversleep_s)  # looked at with every watch_interval_s
        self._book = Book(keep=limits.results_kept)
        self._attachment = Attachment(identity, limits, holdings=self, book=self._book, clock=clock)
        self._supervisor = Supervisor(
            identity,
            limits,
            listener=self,
            order=self._slots.order,
            environ=environ,
            mark=self._mark,
            command=command,
            clock=clock,
        )
        probe = memory.Probe()
        self._turns = AgentTurns(
            limits,
            workers=self._supervisor,
            order=self._slots.order,
            tell=self._attachment.tell,
            probe=probe,
            turn_over=self._turn_over,
            timers=clock,
        )
        self._vacancy = Vacancy(workers=self._supervisor, take_turns=self._turns.together, probe=probe, clock=clock)
        self._instructions = Instructions(
            supervisor=self._supervisor,
            turns=self._turns,
            vacancy=self._vacancy,
            book=self._book,
            tell=self._attachment.tell,
        )
        self._counters = WorkerCounters(limit=limits.metric_series)
        self._metrics = MetricsServer(AgentMetrics(self._counters, self._levels).registry)
        self._spans = SpanStore(output_dir=identity.output_dir, pod=identity.pod, file_bytes=limits.spans_file_bytes)
        self._attempts: dict[str, int] = {}  # last started, by worker
        self._first_failure: Failure | None = None
        self._first_signal_at: float | None = None
        self._signalled = asyncio.Event()
        self._is_hurried = False

    # --- life -------------------------------------------------------------------------------------------------------
    async def run(self) -> Failure:
        """What this agent ended by; exit code 0 where its job is done."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGCHLD, self._supervisor.reap)
        leash.start_watchdog(self._mark)
        attached: asyncio.Task[Failure] | None = None
        watch: asyncio.Task[None] | None = None
        try:
            await self._metrics.start(host=self._identity.pod_ip, port=self._metrics_port)
            await self._slots.start()
            watch = asyncio.create_task(self._supervisor.watch())
            attached = asyncio.create_task(self._attachment.run())
            signalled = asyncio.create_task(self._signalled.wait())
            logger.info("agent is up", extra={"pid": os.getpid(), "slots": self._identity.slots})
            ends: list[asyncio.Future[Any]] = [attached, watch, self._supervisor.failed]
            await asyncio.wait([*ends, signalled], return_when=asyncio.FIRST_COMPLETED)
            if not any(end.done() for end in ends):
                await self._hand_over(ends)
            for task in (watch, self._supervisor.failed):
                if task.done():
                    task.result()  # a bug: raises
            ended = attached.result() if attached.done() else self._terminated()
            await self._wind_down(ended)
            return self._with_cause(ended)
        finally:
            # Shielded by being the last: whatever happened above, nothing of ours may stay.
            self._supervisor.kill_all()
            await self._supervisor.stop_all(reason="the agent ends", grace_s=0.0)
            for running in (attached, watch):
                if running is not None:
                    running.cancel()
            await self._instructions.close()
            await self._turns.close()
            await self._slots.stop()
            await self._metrics.stop()
            self._spans.close()

    def _on_signal(self, number: int) -> None:
        logger.info("signal received", extra={"signal": signal.Signals(number).name})
        self._signalled.set()
        if self._first_signal_at is None:
            self._first_signal_at = time.monotonic()
        elif time.monotonic() - self._first_signal_at >= self._limits.hurry_after_s:
            self._is_hurried = True
            self._supervisor.kill_all()

    async def _hand_over(self, ends: Iterable[asyncio.Future[Any]]) -> None:
        """Told to end, it works on until its driver says that it may go: then its successor is there, and what a gang
        has learnt is saved. Each stream hears of it, as one may break and the next be of a new driver. Not without a
        driver, which nobody can wait for, and never beyond the grace. That is the kubelet's, who counts on while this
        process stands still."""
        reserved_s = self._limits.stop_grace_s + self._limits.leave_reserve_s
        deadline = time.monotonic() + self._identity.grace_s - reserved_s
        may_leave, uplink = self._instructions.may_leave, self._attachment.uplink
        if time.monotonic() >= deadline or not self._supervisor.held():
            return
        logger.info("the pod is to end; its work is handed over")
        told = 0  # the stream that has heard of it
        while (within_s := deadline - time.monotonic()) > 0 and not self._is_hurried:
            if may_leave.is_set() or any(end.done() for end in ends):
                return
            if not uplink.is_connected and not 0 < uplink.driverless_s < _BREAK_S:
                return
            if uplink.is_connected and told != uplink.streams:
                told = uplink.streams
                self._attachment.tell(agents_pb2.AgentMessage(leaving=agents_pb2.Leaving(within_s=within_s)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await may_leave.wait()

    def _terminated(self) -> Failure:
        return Failure(
            pod=self._identity.pod,
            node=self._identity.node,
            exit_code=names.EXIT_TERMINATED,
            reason="Terminated",
            message=f"pod {self._identity.pod} was told to stop; its workers were stopped",
        )

    async def _wind_down(self, ended: Failure) -> None:
        grace_s = 0.0 if ended.exit_code == names.EXIT_STALE else self._limits.stop_grace_s
        logger.info("agent ends", extra={"reason": ended.reason, "exit_code": ended.exit_code, "grace_s": grace_s})
        await self._supervisor.stop_all(reason=ended.message, grace_s=grace_s)
        # So that a driver need not wait for what it could know now.
        if left := await self._attachment.uplink.close(timeout_s=self._limits.final_flush_s):
            logger.warning("the driver did not hear everything", extra={"left": left})

    def _with_cause(self, ended: Failure) -> Failure:
        """A driver that gives up on this pod does so because of its first failed worker: its words come too."""
        cause = self._first_failure
        if cause is None or ended.exit_code in (names.EXIT_OK, names.EXIT_STALE, names.EXIT_TERMINATED):
            return ended
        message = ended.message if cause.message in ended.message else f"{ended.message}; {cause.message}"
        return replace(ended, role=cause.role, worker=cause.worker, message=message)

    # --- Listener: what became of processes -------------------------------------------------------------------------
    def started(self, worker: str, attempt: int) -> None:
        self._attachment.started(worker)
        if names.is_spare(worker):
            return
        restarts = 1.0 if worker in self._attempts else 0.0
        self._attempts[worker] = attempt
        self._counters.add(worker, attempt, name="rlinf_worker_restarts_total", value=restarts)

    def hung(self, worker: str, said: SayHung) -> None:
        message = agents_pb2.WorkerHung(
            worker=worker, attempt=said.attempt, phase=said.phase, silent_s=said.silent_s, stacks=said.stacks
        )
        self._attachment.tell(agents_pb2.AgentMessage(hung=message))

    def exited(self, worker: str, said: SayExited, failure: Failure) -> None:
        if not said.asked and self._first_failure is None and not names.is_spare(worker):
            self._first_failure = failure
        message = agents_pb2.WorkerExited(
            worker=worker,
            attempt=said.attempt,
            exit_code=failure.exit_code,
            failure=wire.failure_to_agent_pb(failure),
            asked=said.asked,
        )
        self._attachment.exited(message)
        if names.is_spare(worker):
            return
        self._vacancy.exited(worker, asked=said.asked)
        self._turns.gone(worker, said.attempt)
        labels = (f"reason={'Asked' if said.asked else failure.reason[:60]}",)
        self._counters.add(worker, said.attempt, name="rlinf_worker_exits_total", labels=labels)

    # --- Hearer: what workers say -----------------------------------------------------------------------------------
    def join(self, worker: str, *, attempt: int, pid: int) -> None:
        self._supervisor.join(worker, attempt=attempt, pid=pid)
        if not names.is_spare(worker):
            self._turns.joined(worker, attempt)

    def heard(self, worker: str, attempt: int, report: slots_pb2.WorkerReport) -> None:
        match report.WhichOneof("kind"):
            case "progress":
                said = report.progress
                self._supervisor.mark(worker, attempt=attempt, said=said)
            case "counters":
                values = [(c.name, tuple(c.labels), c.value) for c in report.counters.counters]
                self._counters.report(worker, attempt, values=values)
            case "spans":
                slots = {s.slot: self._full(s.slot.split(",")) for s in report.spans.spans if s.slot}
                spans = [
                    {
                        "slot": slots.get(s.slot, ""), "role": s.role, "worker": s.worker or worker, "kind": s.kind,
                        "step": s.step, "version": s.version, "t0": s.t0, "t1": s.t1, **_subject(s),
                    }
                    for s in report.spans.spans
                ]  # fmt: skip
                self._spans.add(spans, dropped=report.spans.dropped)
            case "last_words":
                words = report.last_words
                failure = Failure(reason=words.reason, message=words.message, exit_code=words.exit_code)
                self._supervisor.last_words(worker, attempt=attempt, words=failure)
            case "turn":
                self._turns.said(worker, attempt, report.turn)
            case kind:
                logger.debug("a report that nobody waits for", extra={"worker": worker, "kind": kind})

    def _full(self, indices: Iterable[object]) -> str:
        """A worker knows its slots' indices; in a plan and on a timeline they have full names."""
        return ",".join(f"{self._identity.pool}/{self._identity.ordinal}/{index}" for index in indices)

    def _turn_over(self, worker: str, began: float, ended: float) -> None:
        start, role = self._supervisor.life(worker).start, worker.partition("/")[0]
        slots = self._full(start.slots) if start is not None else ""
        turn = {"slot": slots, "role": role, "worker": worker, "kind": TURN, "step": -1, "version": -1}
        self._spans.add([turn | {"t0": began, "t1": ended}] if slots else [], dropped=0)

    # --- Holdings: what the driver is told --------------------------------------------------------------------------
    def hello(self, *, highest_driver_attempt: int) -> agents_pb2.Hello:
        who, plan = self._identity, self._instructions.plan
        held = {worker.id: worker.attempt for worker in self._supervisor.held()}
        held |= {worker: start.attempt for worker, start in self._vacancy.waiting.items()}
        return agents_pb2.Hello(
            job_uid=who.job_uid,
            pod=who.pod,
            node=who.node,
            pool=who.pool,
            ordinal=who.ordinal,
            attempt=who.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=highest_driver_attempt,
            workers=[
                agents_pb2.WorkerState(worker=said.worker, attempt=held[said.worker], progress=said)
                for said in self.progress()
            ],
            plan=agents_pb2.PlanState(
                committed_revision=plan.committed,
                committed_switch=plan.committed_switch,
                committed_plan_json=plan.committed_json,
            ),
            turns=list(self._turns.hello()),
            driverless_s=self._attachment.uplink.driverless_s,
        )

    def progress(self) -> list[agents_pb2.Progress]:
        now, waiting = self._clock(), self._vacancy.waiting
        return [
            *(agents_pb2.Progress(worker=worker, phase="waits for its slots") for worker in waiting),
            *(
                agents_pb2.Progress(
                    worker=worker.id,
                    phase=worker.phase,
                    deadline_s=worker.deadline_s,
                    age_s=max(0.0, now - worker.marked_at),
                    still_s=max(0.0, now - worker.moved_at),
                    doing=worker.doing,
                )
                for worker in self._supervisor.held()
                if worker.id not in waiting
            ),
        ]

    def instructed(self, instruction: agents_pb2.Instruction) -> None:
        self._instructions.take(instruction)

    # --- metrics of the agent itself --------------------------------------------------------------------------------
    def _levels(self) -> dict[str, tuple[str, float]]:
        uplink = self._attachment.uplink
        held = self._supervisor.held()
        spares = sum(names.is_spare(worker.id) for worker in held)
        dropped = uplink.dropped + self._counters.dropped + self._spans.dropped
        return {
            "rlinf_agent_driver_connected": ("1 while the driver's stream is open", float(uplink.is_connected)),
            "rlinf_agent_driver_streams_total": ("Streams to drivers that were welcomed", uplink.streams),
            "rlinf_agent_heartbeats_total": ("Heartbeats sent to drivers", self._attachment.heartbeats),
            "rlinf_agent_workers": ("Workers that have a process", len(held) - spares),
            "rlinf_agent_spares": ("Warm spares that have a process", spares),
            "rlinf_agent_slots": ("Slots of this pod", self._identity.slots),
            "rlinf_agent_orphans_reaped_total": ("Dead processes that no worker led", self._supervisor.orphans_reaped),
            "rlinf_agent_instructions_refused_total": ("Instructions refused or failed", self._instructions.refused),
            "rlinf_agent_turns_total": ("Turns that began in lease sets of this pod", self._turns.changes),
            "rlinf_agent_turn_kills_total": ("Workers killed because they did not leave slots", self._turns.kills),
            "rlinf_agent_dropped_total": ("Messages, series and spans that found no room", dropped),
        }


def _subject(span: slots_pb2.Span) -> dict[str, object]:
    """What it worked on or waited for, where it says so: most lines of a file say neither."""
    said = {"units": span.units, "tokens": span.tokens, "channel": span.channel}
    return {name: value for name, value in said.items() if value}


def run(*, command: tuple[str, ...] = COMMAND) -> int:
    """Exit code; sentence and termination message have been written. Raises what is wrong with the pod itself."""
    identity = PodIdentity.read(os.environ)
    limits = settings.load(os.environ)
    found = devices.find(identity.slot_resource, slots=identity.slots, environ=os.environ)
    environ = {**os.environ, names.ENV_DEVICES: ",".join(found)}
    leash.adopt_orphans()

    async def live() -> Failure:
        return await Agent(identity, limits, environ=environ, command=command).run()

    ended = asyncio.run(live())
    if ended.exit_code != names.EXIT_OK:
        last_words.write(ended, identity.termination_log)
        sys.stderr.write(f"{ended.message}\n")
    return ended.exit_code
