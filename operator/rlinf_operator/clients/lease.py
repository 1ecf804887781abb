"""Who leads: `kubernetes.aio`'s leader election, with what it lacks.

    async with asyncio.TaskGroup() as group:
        election = Election(connection, settings...)
        await election.won()                 # for as long as somebody else leads
        ...                                  # election.lost is set when the Lease could not be kept: end the process
        await election.release()             # the next one leads within a retry, not after a whole lease

What the library (37.0.2) does and what is done about it:

| library | here |
|---|---|
| `create` passes pretty=True, which its own models refuse: the first replica dies | own create |
| a connection error is no ApiException and escapes from run(), and the leader leads on | counts as a refusal |
| no deadline on get and update: a hung API server outlasts the renew deadline | asyncio.timeout on each |
| local time with a Z behind it | the process runs with TZ=UTC (`__main__`) |
| the Lease is kept on exit | release() |
| a leader that reads of another holder tries on until its deadline | it ends at once |
| that deadline is looked at between two tries, so that the last may end after it | a timer, from the last success on |
| the wall clock says when a Lease is over, for the holder and for others | the monotonic one, which nobody sets |

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Election._run | the Lease | retry_s | time; cancel by release() |

Losing is final: there is no way back to follower. A pass that is under way may still write with what it read, so the
process ends at once, and the next leader may not start before the holder's `lease_s` has passed since it saw the last
renewal, which is more than the renew deadline and one try. A process that was stopped for longer ends as it goes on,
before it asks anybody; what it had under way by then is fenced by the RLJob's resourceVersion (docs/limits.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError)


class _Taken(Exception):
    """Somebody else holds the Lease that this candidate had won."""


class _Lock(LeaseLock):
    def __init__(
        self,
        name: str,
        namespace: str,
        *,
        identity: str,
        connection: Any,
        timeout_s: float,
        lease_s: float,
        on_success: Callable[[float], None],
    ) -> None:
        """`on_success`: told of each write that made or kept this candidate the holder, with when it was begun."""
        super().__init__(name, namespace, identity, connection)
        self._timeout_s, self._lease_s, self._on_success = timeout_s, lease_s, on_success
        self._is_holder = False
        self._seen_version = ""
        self._others_until = 0.0
        """By the loop's clock: until when the Lease is another one's."""

    async def get(self, name: str, namespace: str) -> Any:
        try:
            found, record = await self._in_time(super().get(name, namespace))
        except _NO_ANSWER as error:
            return False, client.ApiException(status=0, reason=f"no answer: {type(error).__name__}")
        if found:
            self._judge(record)
        return found, record

    def _judge(self, record: Any) -> None:
        """A Lease that nobody renewed in the holder's own time is shown to the library as one without a holder, which
        it takes. Until then `update` refuses, whatever the library's clock says."""
        if not record.holder_identity or record.holder_identity == self.identity:
            self._others_until = 0.0
            return
        if self._is_holder:
            raise _Taken(record.holder_identity)
        now = asyncio.get_running_loop().time()
        lease = self.lease_reference
        version = str(lease.metadata.resource_version) if lease is not None and lease.metadata is not None else ""
        if version != self._seen_version:
            self._seen_version = version
            self._others_until = now + float(record.lease_duration or self._lease_s)
        if now >= self._others_until:
            record.holder_identity = None

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        began_at = asyncio.get_running_loop().time()
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self._in_time(self.api_instance.create_namespaced_lease(namespace, body))
        except (*_NO_ANSWER, client.ApiException) as error:
            logger.info("lease not created", extra={"lease": f"{namespace}/{name}", "error": type(error).__name__})
            return False
        self._succeeded(began_at)
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        began_at = asyncio.get_running_loop().time()
        if began_at < self._others_until:
            return False
        try:
            done = bool(await self._in_time(super().update(name, namespace, updated_record)))
        except _NO_ANSWER as error:
            logger.info("lease not renewed", extra={"lease": f"{namespace}/{name}", "error": type(error).__name__})
            return False
        if done:
            self._succeeded(began_at)
        return done

    def _succeeded(self, began_at: float) -> None:
        self._is_holder = True
        self._on_success(began_at)

    async def free(self) -> None:
        """Writes an empty holder; a Conflict means that it is somebody else's already."""
        lease = await self._in_time(self.api_instance.read_namespaced_lease(self.name, self.namespace))
        if lease.spec is None or lease.spec.holder_identity != self.identity:
            return
        lease.spec.holder_identity = ""
        lease.spec.lease_duration_seconds = 1
        await self._in_time(self.api_instance.replace_namespaced_lease(self.name, self.namespace, lease))

    async def _in_time(self, call: Awaitable[Answer]) -> Answer:
        async with asyncio.timeout(self._timeout_s):
            return await call


class Election:
    """One candidacy. `won` and `lost` are set once each, in this order, or never; `ended` when it is over."""

    def __init__(
        self,
        connection: Any,
        *,
        name: str,
        namespace: str,
        identity: str,
        lease_s: float,
        renew_deadline_s: float,
        retry_s: float,
    ) -> None:
        self.won, self.lost, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._leads_s = retry_s + renew_deadline_s  # from a success on, after which the next is due in retry_s
        self._deadline: asyncio.TimerHandle | None = None
        self._lock = _Lock(
            name, namespace, identity=identity, connection=connection, timeout_s=retry_s, lease_s=lease_s,
            on_success=self._renewed,
        )  # fmt: skip
        self._config = electionconfig.Config(
            self._lock,
            lease_duration=math.ceil(lease_s),  # whole seconds in the API: never fewer than were said
            renew_deadline=renew_deadline_s,
            retry_period=retry_s,
            onstarted_leading=self._lead,
            onstopped_leading=self._stopped,
        )
        self._task = asyncio.create_task(self._run(), name="operator: leader election")

    async def release(self) -> None:
        """Ends the candidacy, and the leadership, within two tries."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # its calls have deadlines
        if not self.won.is_set() or self.lost.is_set():
            return
        try:
            await self._lock.free()
        except (*_NO_ANSWER, client.ApiException) as error:
            logger.warning("lease not released: it ends by itself", extra={"error": type(error).__name__})

    async def _run(self) -> None:
        try:
            await leaderelection.LeaderElection(self._config).run()
            if self.won.is_set():
                self.lost.set()
        except _Taken as taken:
            logger.error("lease taken", extra={"identity": self._lock.identity, "holder": str(taken)})
            if self.won.is_set():
                self.lost.set()
        except Exception:  # the library may raise anything: whatever it is, this candidacy is over
            logger.exception("leader election broke")
            if self.won.is_set():
                self.lost.set()
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            self.ended.set()

    def _renewed(self, began_at: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_at(began_at + self._leads_s, self._over)

    def _over(self) -> None:
        logger.error("lease not renewed in time", extra={"identity": self._lock.identity, "leads_s": self._leads_s})
        self.lost.set()
        self._task.cancel()

    async def _lead(self) -> None:
        logger.info("leading", extra={"identity": self._lock.identity})
        self.won.set()

    async def _stopped(self) -> None:
        logger.error("lease lost", extra={"identity": self._lock.identity})


async def first(*events: asyncio.Event) -> None:
    """Until one of them is set."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
