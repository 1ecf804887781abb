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

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Election._run | the Lease | retry_s | time; cancel by release() |

Losing is final: there is no way back to follower. A pass that is under way may still write with what it read, so the
process ends at once, and the next leader may not start before `lease_s` has passed since the last renewal, which is
more than the renew deadline and one try.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.leaderelection import electionconfig, leaderelection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError)


class _Lock(LeaseLock):
    def __init__(self, name: str, namespace: str, *, identity: str, connection: Any, timeout_s: float) -> None:
        super().__init__(name, namespace, identity, connection)
        self._timeout_s = timeout_s

    async def get(self, name: str, namespace: str) -> Any:
        try:
            return await self._in_time(super().get(name, namespace))
        except _NO_ANSWER as error:
            return False, client.ApiException(status=0, reason=f"no answer: {type(error).__name__}")

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        body = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self._in_time(self.api_instance.create_namespaced_lease(namespace, body))
        except (*_NO_ANSWER, client.ApiException) as error:
            logger.info("lease not created", extra={"lease": f"{namespace}/{name}", "error": type(error).__name__})
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        try:
            return bool(await self._in_time(super().update(name, namespace, updated_record)))
        except _NO_ANSWER as error:
            logger.info("lease not renewed", extra={"lease": f"{namespace}/{name}", "error": type(error).__name__})
            return False

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
        self._lock = _Lock(name, namespace, identity=identity, connection=connection, timeout_s=retry_s)
        self._config = electionconfig.Config(
            self._lock,
            lease_duration=max(1, round(lease_s)),
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
        except Exception:  # of the library: whatever it is, this candidacy is over
            logger.exception("leader election broke")
            if self.won.is_set():
                self.lost.set()
        finally:
            self.ended.set()

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
