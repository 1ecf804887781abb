"""The operator's side of each running job's driver: one Job.Watch stream, kept, and the calls that move plans.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| _Link._run (one per running job) | Job.Watch | the next status; a pause | the driver; keepalive; _look; close() |
| _look (one for all) | the clock | LOOK_S | forget() of the last link; close() |
| a drain (one per driver attempt at most) | Job.Drain | its answer | the driver; its deadline; close() |

Nothing here decides: a report that changed, or a stream that broke, calls `on_change(key)`, and a pass follows: at
once, or when progress is due again where nothing else changed. There is one connection per driver: a thousand jobs are
a thousand handshakes and sessions.

gRPC answers pings by itself while a driver's own loop hangs in somebody's flow: its stream stands, and nothing comes. A
driver repeats its report, so one whose stream is silent for longer is given up and dialled anew like a broken one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from rlinf_api import names, rpc, unknown, wire
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_api.errors import RLinfError, WorkerUnreachable
from rlinf_api.plan import RLPlanSpec
from rlinf_api.report import REPEATED_S, DriverReport, DriverState, Goal
from rlinf_operator.manifests.metadata import JobKey, Target

logger = logging.getLogger(__name__)
RETRY_MIN_S: Final = 0.1  # the driver's server is usually up within a second of its pod's start
RETRY_MAX_S: Final = 2.0
LAST_WORD_S: Final = 60.0
"""Until a driver that said how it ended is dialled again. It has nothing to add, and when a thousand jobs end at once
their passes take a minute: a dial every 2 s would be half a core of handshakes."""
FIRST_REPORT_S: Final = 60.0
"""From the dial to the first report: a driver that hangs is not dialled more often, and a thousand handshakes of an
operator that begins are not begun again because they take a while. Its silence counts from before the dial."""
LOOK_S: Final = 1.0
"""Between two looks for silent streams, by one task for all: a timer per report would be a thousand a second."""
METHOD_OF: Final = {"Prepare": "PreparePlan", "Commit": "CommitPlan", "Abort": "AbortPlan"}
_LAST_STATES: Final = (DriverState.COMPLETE, DriverState.FAILED, DriverState.DRAINED)
WATCHING: Final = {
    "grpc.keepalive_time_ms": 8_000,
    "grpc.tsi.max_frame_size": 2_048,
    "grpc.enable_retries": 0,
    "grpc.enable_channelz": 0,
}
"""A thousand watches that ping every 2 s are a tenth of a core. With ping_timeout a dead driver is noticed within 10 s,
when it is called late; until then its pod's end says it sooner. The others take a tenth of a channel's 124 KiB: buffers
for TLS records of 16 KiB, which nobody sends, and what gRPC keeps for features that are not used."""
UNHEARD_S: Final = WATCHING["grpc.keepalive_time_ms"] / 1e3
"""A stream that broke because no ping was answered has brought nothing for so long, at least: pings begin then."""
NOT_ANSWERED: Final = "ping timeout"
"""In gRPC's words for that (grpcio 1.85); other ends of a stream say when they come."""


class OnChange(Protocol):
    """Called from the event loop. `progress`: step, version, estimate, metrics, checkpoint moved, or what is said of a
    job that steps; nothing else."""

    def __call__(self, key: JobKey, *, progress: bool = False) -> None: ...


class Drivers(Protocol):
    """Called by the loop and by apply. Every call has a deadline; WorkerUnreachable says which driver and why."""

    def follow(self, key: JobKey, target: Target) -> None:
        """Keeps a watch on this driver attempt; one on an older attempt of the job ends."""
        ...

    def forget(self, key: JobKey) -> None: ...

    def heard(self, key: JobKey) -> tuple[int, DriverReport | None, float] | None:
        """(attempt followed, its last report, seconds of silence: without a connection, or since a report was due on
        one that stands; 0 while it speaks)."""
        ...

    def silent(self, *, for_s: float) -> tuple[int, int]:
        """(drivers silent for so long, drivers followed). One that said its last word is silent by right,
        and counts in neither."""
        ...

    async def apply_plan(self, target: Target, plan: RLPlanSpec, *, step: str, switches: int = 0, uid: str = "") -> str:
        """Prepare, Commit or Abort (whatever is on its way) by the watch's connection; the driver's refusal, if any.
        `uid`: of the plan's object."""
        ...

    async def adjust(self, target: Target, goal: Goal) -> str:
        """Another goal, by the watch's connection; the driver's refusal, if any."""
        ...

    def drain(self, key: JobKey, target: Target, *, deadline_s: float) -> None:
        """Starts a drain, for a suspension, unless one is under way; its end shows in the driver's reports."""
        ...

    async def close(self) -> None: ...


class GrpcDrivers:
    def __init__(
        self,
        *,
        tls: rpc.TlsFolder,
        on_change: OnChange,
        timeout_s: float,
        late_s: float,
        repeat_s: float = REPEATED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`late_s`: how long a repeated report may be overdue before its stream counts as broken."""
        self._tls, self._on_change, self._timeout_s, self._clock = tls, on_change, timeout_s, clock
        self._late_s, self._repeat_s = late_s, repeat_s
        self._looking: asyncio.Task[None] | None = None
        self._links: dict[JobKey, _WatchStream] = {}
        self._drains: dict[JobKey, tuple[Target, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, key: JobKey, target: Target) -> None:
        link = self._links.get(key)
        if link is not None and link.target == target:
            return
        self.forget(key)
        self._links[key] = _WatchStream(
            target, tls=self._tls, clock=self._clock, on_change=partial(self._on_change, key)
        )
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="look for silent drivers")

    def forget(self, key: JobKey) -> None:
        if link := self._links.pop(key, None):
            self._end(link.task)
        if drain := self._drains.pop(key, None):
            self._end(drain[1])

    def heard(self, key: JobKey) -> tuple[int, DriverReport | None, float] | None:
        link = self._links.get(key)
        return (link.target.attempt, link.report, link.silent_s()) if link else None

    def silent(self, *, for_s: float) -> tuple[int, int]:
        at_work = [link for link in self._links.values() if not link.has_ended()]
        return sum(1 for link in at_work if link.silent_s() >= for_s), len(at_work)

    async def apply_plan(self, target: Target, plan: RLPlanSpec, *, step: str, switches: int = 0, uid: str = "") -> str:
        request = job_pb2.PlanRequest(
            plan_json=json.dumps(unknown.compact(plan)), revision=0 if step == "Abort" else plan.revision,
            driver_attempt=target.attempt, plan_switches=switches, plan_uid=uid,
            reason="it is not wanted any more" if step == "Abort" else plan.reason.code,
        )  # fmt: skip
        what = f"{step} of plan revision {plan.revision}"
        return await self._call(target, METHOD_OF[step], request, what=what)

    async def adjust(self, target: Target, goal: Goal) -> str:
        request = job_pb2.AdjustRequest(driver_attempt=target.attempt, goal=wire.goal_to_pb(goal))
        refusal = await self._call(target, "Adjust", request, what=f"goal {goal}")
        link = next((link for link in self._links.values() if link.target == target), None)
        if not refusal and link is not None and link.report is not None:
            link.report = replace(link.report, goal=goal)  # it says so itself within a second
        return refusal

    async def _call(self, target: Target, method: str, request: Any, *, what: str) -> str:
        """One question by the watch's connection; the driver's refusal, if any."""
        channel = next((link.channel for link in self._links.values() if link.target == target), None)
        if channel is None:
            raise _unreachable(target, what, got="no stream of its reports")
        ask = getattr(job_pb2_grpc.JobStub(channel), method)
        try:
            answer = await ask(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise _unreachable(target, what, got=f"{error.code().name} {error.details() or ''}") from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # The watch broke and closed the channel that both used: gRPC cancels what is under way there.
            raise _unreachable(target, what, got="the connection was closed") from None
        return "" if answer.ok else (answer.message or f"the driver refused {what} without a reason")

    def drain(self, key: JobKey, target: Target, *, deadline_s: float) -> None:
        known = self._drains.get(key)
        if known is not None and known[0] == target and not known[1].done():
            return
        if known is not None:
            self._end(known[1])
        request = job_pb2.DrainRequest(deadline_s=deadline_s)
        self._drains[key] = target, asyncio.create_task(self._drain(key, target, request), name=f"drain {key}")

    async def close(self) -> None:
        for key in list(self._links):
            self.forget(key)
        if self._looking is not None:
            self._end(self._looking)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _look(self) -> None:
        """Ends streams on which no report came in time. What this process slept itself is nobody's silence: what came
        meanwhile has not been read yet."""
        pause_s = min(LOOK_S, self._late_s / 4)
        due = self._clock() + pause_s
        while self._links:
            await asyncio.sleep(pause_s)
            late_s, due = self._clock() - due, self._clock() + pause_s
            for link in self._links.values():
                if late_s > pause_s:
                    link.overslept(late_s)
                link.end_if_silent(repeat_s=self._repeat_s, late_s=self._late_s)

    async def _drain(self, key: JobKey, target: Target, request: job_pb2.DrainRequest) -> None:
        try:
            server = names.tls_name("driver", target.job_uid)  # not the watch's: one that breaks must not end it
            channel = await rpc.dial(target.address, tls=self._tls, server=server)
            try:
                stub = job_pb2_grpc.JobStub(channel)
                answer = await stub.Drain(request, timeout=request.deadline_s + self._timeout_s)
                logger.info(
                    "driver drained", extra={"job": str(key), "drained": answer.drained, "words": answer.message}
                )
            finally:
                await channel.close()
        except grpc.aio.AioRpcError as error:
            logger.warning(
                "drain failed", extra={"job": str(key), "error": f"{error.code().name} {error.details() or ''}"}
            )
        except RLinfError as error:
            logger.warning("drain failed", extra={"job": str(key), "error": str(error)})
        self._on_change(key)

    def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _WatchStream:
    """One Watch stream, dialled again for as long as somebody wants this driver attempt."""

    def __init__(
        self, target: Target, *, tls: rpc.TlsFolder, clock: Callable[[], float], on_change: Callable[..., None]
    ) -> None:
        self.target = target
        self.report: DriverReport | None = None
        self.channel: grpc.aio.Channel | None = None
        """While a stream stands on it."""
        self._tls, self._clock, self._on_change = tls, clock, on_change
        self._silent_since: float | None = clock()
        self._sign_at = clock()
        """When the stream was asked for, or brought its last report."""
        self._call: grpc.aio.UnaryStreamCall[job_pb2.WatchRequest, job_pb2.JobStatus] | None = None
        self.task = asyncio.create_task(self._run(), name=f"watch of driver {target.address}")

    def silent_s(self) -> float:
        return 0.0 if self._silent_since is None else max(1e-3, self._clock() - self._silent_since)

    def has_ended(self) -> bool:
        return self.report is not None and self.report.state in _LAST_STATES

    def overslept(self, late_s: float) -> None:
        self._sign_at += late_s
        if self._silent_since is not None:
            self._silent_since += late_s

    def end_if_silent(self, *, repeat_s: float, late_s: float) -> None:
        if self._call is None or self.has_ended():
            return
        waited_s, has_spoken = self._clock() - self._sign_at, self.channel is not None
        if waited_s < (repeat_s + late_s if has_spoken else FIRST_REPORT_S):
            return
        self._call.cancel()
        self._call = None
        if has_spoken:
            logger.info("a driver's stream stands and says nothing", extra={"driver": self.target.address})
            self._silent_since = self._sign_at + repeat_s  # since when a report is due
            self._on_change()

    async def _run(self) -> None:
        pause_s = RETRY_MIN_S
        while True:
            unheard_s = 0.0
            try:
                await self._watch()
                pause_s = RETRY_MIN_S
            except grpc.aio.AioRpcError as error:
                logger.debug("watch broke", extra={"driver": self.target.address, "code": error.code().name})
                unheard_s = UNHEARD_S if NOT_ANSWERED in (error.details() or "") else 0.0
            except RLinfError as error:
                logger.debug("driver not reached", extra={"driver": self.target.address, "error": str(error)})
            if self.has_ended():
                self._silent_since, pause_s = self._silent_since or self._clock(), LAST_WORD_S
            elif self._silent_since is None:
                self._silent_since, pause_s = max(self._sign_at, self._clock() - unheard_s), RETRY_MIN_S
                self._on_change()
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_MAX_S, 2 * pause_s)

    async def _watch(self) -> None:
        server = names.tls_name("driver", self.target.job_uid)
        channel = await rpc.dial(self.target.address, tls=self._tls, server=server, more=WATCHING)
        try:
            call = job_pb2_grpc.JobStub(channel).Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL))
            self._call, self._sign_at = call, self._clock()
            async for message in call:
                self.channel = channel
                self._hear(message)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise _unreachable(self.target, "a watch", got="a stream that stands and says nothing") from None
        finally:
            self.channel = self._call = None
            await channel.close()

    def _hear(self, message: job_pb2.JobStatus) -> None:
        was_silent, self._silent_since, self._sign_at = self._silent_since is not None, None, self._clock()
        report, before = wire.report_from_pb(message), self.report
        self.report = report
        if before is None or was_silent or _without_progress(report) != _without_progress(before):
            self._on_change()
        elif replace(report, sequence=before.sequence) != before:
            self._on_change(progress=True)


def _without_progress(report: DriverReport) -> DriverReport:
    """What must be in the status at once; the rest waits for its interval. So do words about a job that steps: what is
    slow, and since how many seconds. What is wrong has a reason."""
    words = "" if report.state is DriverState.RUNNING else report.message
    return replace(
        report, step=0, steps=0, branch=0, metrics={}, checkpoint_uri="", checkpoint_step=0, step_seconds=0.0,
        plan_steps=0, plan_step_s=0.0, plan_step_spread_s=0.0,
        sequence=0, message=words,
    )  # fmt: skip


def _unreachable(target: Target, what: str, *, got: str) -> WorkerUnreachable:
    return WorkerUnreachable(
        f"{what} did not reach driver attempt {target.attempt} at {target.address}",
        got=got.strip(),
        next="it is tried again",
    )
