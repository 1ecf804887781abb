"""One worker's life: connections up, the role run, everything told, connections down.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| run | the first end of: role, uplink, agent link, a fatal error | | any of them |
| role | its channels | | stop; after the grace it is cancelled |
| health | the role's engine | its answer | health.py: no answer is an end |
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any, Final

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import InvariantBroken, RetryableError, RLinfError, UserError
from rlinf_worker import last_words
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import ChannelClosed
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.clock import Clock
from rlinf_worker.links.certificates import LinkCertificates
from rlinf_worker.links.hello import Admit, Identity
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.memory import Footprint
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Role
from rlinf_worker.runtime import numbers
from rlinf_worker.runtime.agent_link import AgentLink
from rlinf_worker.runtime.context import Context
from rlinf_worker.runtime.health import Health
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.memory import OwnMemory
from rlinf_worker.runtime.session import WorkerSession
from rlinf_worker.runtime.work import Stopping, Work
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.threads import in_a_thread
from rlinf_worker.turns.term import Progress
from rlinf_worker.turns.worker import Turns
from rlinf_worker.uplink.dialling import Dial, Dialect, RefusedByDriver, Uplink

logger = logging.getLogger(__name__)

DIALECT: Final[Dialect[pb.WorkerMessage, pb.DriverMessage]] = Dialect(
    call=lambda channel: channels_pb2_grpc.ChannelsStub(channel).Connect(),
    pack=lambda batch: pb.WorkerBatch(messages=batch),
    unpack=lambda frame: frame.messages,
    frame_messages=None,
)
FAREWELL_S: Final = 0.5  # for what was told last to reach the driver; a worker's end is its agent's to tell
LINGER_S: Final = 30.0  # a role that is through waits so long for others to fetch what it made
LINGER_POLL_S: Final = 0.02  # once in a worker's life, over every channel: not worth a signal in each
STOP_SHARE: Final = 0.7  # this share of the grace is the role's, the rest is for hanging up

REPORTS_KEPT: Final = 1000
"""For a driver that is away, one per step and role; all else that counts is in a worker's hello."""


class RoleReturned(RetryableError):
    """Whoever returns early is started again, as whoever raises: the units that it was to make are missing."""


async def _listen(
    me: WorkerIdentity,
    identity: Identity,
    *,
    certificates: LinkCertificates | None,
    settings: LinkSettings,
    admit: Admit,
) -> Listener:
    """At its slot's port; where another worker of the same lease set has that, at any other: peers are told."""
    for port in dict.fromkeys((me.data_port, 0)):
        try:
            return await Listener.open(
                identity,
                pod_uid=me.pod_uid,
                run_dir=me.run_dir,
                shm_dir=me.shm_dir,
                host=me.pod_ip or None,
                port=port,
                tls=certificates.listening() if certificates else None,
                admit=admit,
                settings=settings,
                pool=me.pool,
            )
        except UserError as error:
            if port == 0:
                raise
            logger.debug("port taken, using any", extra={"port": port, "error": str(error)})
    raise InvariantBroken("a worker has no port to listen at")


class Worker:
    """`await Worker(...).run()` returns the exit code, or raises what ended the worker."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        settings: Settings,
        make_role: Callable[[], Role],
        dial_driver: Dial,
        with_agent: bool = True,
        certificates: LinkCertificates | None = None,
        link_settings: LinkSettings | None = None,
    ) -> None:
        self.identity, self._settings = identity, settings
        self._make_role, self._dial_driver, self._with_agent = make_role, dial_driver, with_agent
        self._certificates = certificates
        self._link_settings = link_settings or LinkSettings()
        self.recorder, self.phases = Recorder(), Phases(settings)
        self.clock = Clock(notice_s=settings.oversleep_s)
        self.stopping = Stopping()
        self._grace_s = settings.stop_grace_s
        self._exit_code = names.EXIT_OK
        self._clings = False  # the role does not end, though it is cancelled: it waits for an engine that is lost, say
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.session: WorkerSession
        self.driver: Uplink[pb.WorkerMessage, pb.DriverMessage]
        self.host: Host
        self._agent: AgentLink | None = None
        self._waits = Waits()
        self.work = Work(waits=self._waits, phases=self.phases, moves=self._moves, stopping=self.stopping)
        self.turns = Turns(
            waits=self._waits,
            recorder=self.recorder,
            phases=self.phases,
            settings=settings,
            fatal=self.fail,
            progress=lambda: Progress.of(self.host.accounts),
            has_input=lambda: self.session.ends.has_input,
            say=self._say_turn if with_agent else None,
            spill=lambda: self.session.ends.spill(),
            piece=self.work.piece,
            footprint=Footprint(identity.own_devices),
            left=lambda kept: self.session.left_slots(kept),
            # A role whose memory the plan knows may take turns under another: what they cost is measured at its start.
            tries_moves=lambda: self.session.replans.allotment.peak_bytes > 0,
            stays=lambda: self.session.replans.allotment.stays,
        )

    # --- stopping -----------------------------------------------------------------------------------------------------
    def stop(self, why: str, grace_s: float = 0.0, *, exit_code: int = names.EXIT_OK) -> None:
        """Asked once or more; the role returns at its next safe point, every wait ends."""
        if not self.stopping.is_set():
            logger.info("stopping", extra={"why": why})
            self._grace_s = grace_s or self._grace_s
            self.phases.enter("stop")
        self._exit_code = max(self._exit_code, exit_code)
        self.stopping.set()
        self._waits.stop(why)

    def fail(self, error: BaseException) -> None:
        """From a task that is not the role's."""
        if not self._fatal.done():
            self._fatal.set_exception(error)

    def _moves(self) -> tuple[object, ...]:
        """What the role has taken and given so far."""
        weights = self.session.weights
        return Progress.of(self.host.accounts), weights.version, weights.published

    def _say_turn(self, report: slots_pb2.TurnReport) -> None:
        if self._agent is not None:
            self._agent.turn(report)

    # --- running ------------------------------------------------------------------------------------------------------
    async def run(self) -> int:
        helpers: list[asyncio.Task[Any]] = []
        try:
            await self._start(helpers)
            await self._work(helpers)
        except BaseException as error:
            self._exit_code = await self._say_last_words(error)
            raise
        finally:
            await self._end(helpers)
            if self._clings:
                logger.error("the role does not end, and its process does", extra={"grace_s": self._grace_s})
                os._exit(self._exit_code)  # the loop would wait for it for ever
        return self._exit_code

    async def _start(self, helpers: list[asyncio.Task[Any]]) -> None:
        me, loop = self.identity, asyncio.get_running_loop()
        identity = Identity(job=me.job_uid, worker=me.worker, attempt=me.attempt)
        admitted: list[PeerLinks] = []
        listener = await _listen(
            me, identity, certificates=self._certificates, settings=self._link_settings,
            admit=lambda peer, shown: admitted[0].admit(peer, shown) if admitted else None,
        )  # fmt: skip
        peers = PeerLinks(listener, certificates=self._certificates, on_fatal=self.fail)
        admitted.append(peers)
        self.host = Host(
            worker=me.worker,
            role=me.role,
            peers=peers,
            waits=self._waits,
            recorder=self.recorder,
            tell=lambda message: self.driver.tell(message),
            mark=lambda source, *, can_wait=False: self.driver.mark(source, can_wait=can_wait),
            finish_item=lambda item: self.session.ends.finish_item(item),
            fatal=self.fail,
            taken=self.turns.consider,
            may_begin=lambda: self.session.steps.begun is not None,
            memory=OwnMemory(lambda: self.turns.residence.memory()),
            newest_branch=lambda: self.session.highest_branch,
            weights_version=lambda: self.session.weights.version,
            max_staleness=lambda: self.session.max_staleness,
            link_settings=self._link_settings,
            peer_wait_s=self._settings.peer_wait_s,
            meet_wait_s=self._settings.meet_wait_s,
        )
        self.session = WorkerSession(me, self.host, driver=lambda: self.driver, settle=self.turns.replanned)
        self.driver = Uplink(
            self.session,
            wire=DIALECT,
            dial=self._dial_driver,
            who=f"worker {me.worker}",
            address=me.driver_address,
            settings=self._settings,
            # A driver that is busy for some seconds is no reason to say hello to it a thousandfold.
            write_timeout_s=self._settings.welcome_timeout_s,
            kept=REPORTS_KEPT,
            clock=self.clock,
        )
        if self._with_agent:
            self._agent = AgentLink(
                me,
                phases=self.phases,
                work=self.work,
                recorder=self.recorder,
                numbers=lambda: [
                    *self.turns.numbers(),
                    *numbers.of_worker(
                        self.session,
                        driver=self.driver,
                        peers=peers,
                        recorder=self.recorder,
                        accounts=self.host.accounts,
                    ),
                ],
                on_stop=self.stop,
                on_turn=self.turns.on_order,
                on_membership=self.turns.on_membership,
            )
            await self._agent.open()
            helpers.append(loop.create_task(self._agent.run(), name="orders of the agent"))
        helpers.append(loop.create_task(self.clock.tick(), name="clock"))
        helpers.append(loop.create_task(self.driver.run(), name="the driver"))

    async def _work(self, helpers: list[asyncio.Task[Any]]) -> None:
        role_task = asyncio.get_running_loop().create_task(self._run_role(), name=f"role {self.identity.role}")
        stop_task = asyncio.get_running_loop().create_task(self._enforce_stop(role_task), name="stop after the grace")
        try:
            done, _ = await asyncio.wait([role_task, self._fatal, *helpers], return_when=asyncio.FIRST_COMPLETED)
            for ended in sorted(done, key=lambda task: task is not role_task):
                if ended.cancelled() and self.stopping.is_set():
                    continue
                ended.result()
        finally:
            stop_task.cancel()
            if not role_task.done():
                role_task.cancel()
            _, left = await asyncio.wait([role_task, stop_task], timeout=self._grace_s * STOP_SHARE)
            self._clings = bool(left)

    async def _run_role(self) -> None:
        """Welcome, role, and until others have fetched what it made."""
        session = self.session
        try:
            made = asyncio.wrap_future(in_a_thread(self._make_role, name="import of the role"))
            with self.phases.during("load"):
                await self._unless_stopped(made)
            if not made.done():
                return
            self.turns.residence.role = role = made.result()
            await self._waits.until(
                lambda: session.flow is not None,
                session.steps.news,
                what=f"the driver's Welcome for {self.identity.worker}",
                timeout_s=self._settings.driver_absence_timeout_s,
                missing=f"a driver at {self.identity.driver_address}",
            )
            context = Context(
                self.identity,
                session,
                phases=self.phases,
                work=self.work,
                recorder=self.recorder,
                turns=self.turns,
                clock=self.clock,
                stopping=self.stopping,
            )
            self.phases.enter("load")  # until it says that it is ready
            await self._beside_its_engine(role, context)
            await self._linger()
            if not self.stopping.is_set():
                await self._say_last_words(
                    RoleReturned(
                        f"role {self.identity.role!r} returned, and nobody had told {self.identity.worker} to stop",
                        got=f"the end of its run ({_where(role)})", wanted="work until ctx.stopping is set",
                        next="loop over its inputs: they end as the worker is told to stop",
                    )
                )  # fmt: skip
        except ChannelClosed:
            if not self.stopping.is_set():
                raise

    async def _beside_its_engine(self, role: Role, context: Context) -> None:
        """Until it returns, or its engine is seen to be lost."""
        health = asyncio.ensure_future(
            Health(self.identity.worker, phases=self.phases, settings=self._settings).watch(role)
        )
        health.add_done_callback(self._health_ended)
        try:
            await role.run(context)
        finally:
            health.cancel()

    def _health_ended(self, health: asyncio.Future[None]) -> None:
        if not health.cancelled() and (error := health.exception()) is not None:
            self.fail(error)

    async def _unless_stopped(self, work: asyncio.Future[Any]) -> None:
        """Until it is done, or this worker is to stop, which ends it."""
        stop = asyncio.ensure_future(self.stopping.told())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not work.done():
                work.cancel()

    async def _linger(self) -> None:
        """Payloads that nobody has fetched would be lost with this process."""
        self.phases.enter("idle")
        deadline = self.clock() + LINGER_S
        while self.session.ends.unfinished and not self.stopping.is_set() and self.clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LINGER_POLL_S)
        if left := self.session.ends.unfinished:
            logger.warning("ending with items that nobody fetched", extra={"items": left})

    async def _enforce_stop(self, role_task: asyncio.Task[None]) -> None:
        await self.stopping.told()
        await asyncio.wait([role_task], timeout=self._grace_s * STOP_SHARE)
        if not role_task.done():
            logger.warning("the role did not stop within its grace", extra={"grace_s": self._grace_s})
            role_task.cancel()

    # --- ending -------------------------------------------------------------------------------------------------------
    async def _say_last_words(self, error: BaseException) -> int:
        """The exit code."""
        if isinstance(error, asyncio.CancelledError):
            return self._exit_code
        failure = last_words.of(error, unknown=names.EXIT_RETRYABLE)
        exit_code = error.exit_code if isinstance(error, RefusedByDriver) else failure.exit_code
        level = logging.WARNING if isinstance(error, RLinfError) else logging.ERROR
        logger.log(level, "worker ends", extra={"reason": failure.reason, "error": failure.message, "exit": exit_code})
        if self._agent is not None:
            self._agent.last_words(failure.reason, failure.message, exit_code)
        return exit_code

    async def _end(self, helpers: list[asyncio.Task[Any]]) -> None:
        if hasattr(self, "driver"):
            await self.driver.close(timeout_s=FAREWELL_S)
        if hasattr(self, "session"):
            await self.session.weights.close()
        await self.turns.close()
        if hasattr(self, "host"):
            await self.host.peers.close()
        if self._agent is not None:
            await self._agent.close()
        for task in helpers:
            task.cancel()
        if helpers:
            await asyncio.wait(helpers)
        for task in helpers:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.debug("a helper ended", extra={"task": task.get_name(), "error": str(error)})
        self._fatal.cancel()  # where it holds an error, it is not told as one that nobody saw


def _where(role: Role) -> str:
    """`/roles/my_role.py, line 12`."""
    code = getattr(type(role).run, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code is not None else type(role).__qualname__
