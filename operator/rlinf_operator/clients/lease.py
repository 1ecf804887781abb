"""Who leads: the holder of a Lease, which it renews, and which another candidate takes when nobody does.

    election = Election(api, settings...)
    await election.won.wait()            # for as long as somebody else leads
    ...                                  # election.ended is set when the Lease could not be kept: end the process
    await election.release()             # the next one leads within a retry, not after a whole lease

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Election._run | the Lease | retry_s; an answer, at most as long | time; cancel by release() and by _over() |

Losing is final: there is no way back to follower. A pass that is under way may still write with what it read, so the
process ends at once, and the next leader may not start before the holder's `lease_s` has passed since it saw the last
renewal, which is more than the renew deadline and one try. A process that was stopped for longer ends as it goes on,
before it asks anybody; what it had under way by then is fenced by the RLJob's resourceVersion (docs/limits.md).

Nobody's wall clock counts, as it may be set: a candidate measures by its own how long the Lease has stood unchanged.
kubernetes.aio's own election (37.0.2) does not do so, has no deadline on its calls and keeps the Lease on exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import Any

from rlinf_api import times
from rlinf_api.errors import RLinfError
from rlinf_api.store import NotFound
from rlinf_operator.clients.kube import KubeApi

logger = logging.getLogger(__name__)


class Election:
    """One candidacy. `won` is set once or never; `ended` when it is over: given away, lost, or broken."""

    def __init__(
        self,
        api: KubeApi,
        *,
        name: str,
        namespace: str,
        identity: str,
        lease_s: float,
        renew_deadline_s: float,
        retry_s: float,
    ) -> None:
        """`api`: its calls end within `retry_s`."""
        self.won, self.ended = asyncio.Event(), asyncio.Event()
        self._api, self._name, self._namespace, self._identity = api, name, namespace, identity
        self._lease_s, self._retry_s = math.ceil(lease_s), retry_s  # whole seconds in the API: never fewer than said
        self._leads_s = retry_s + renew_deadline_s  # from a success on, after which the next is due in retry_s
        self._deadline: asyncio.TimerHandle | None = None
        self._seen_version = ""
        self._others_until = 0.0
        """By the loop's clock: until when the Lease is another one's."""
        self._task = asyncio.create_task(self._run(), name="operator: leader election")

    async def release(self) -> None:
        """Ends the candidacy, and the leadership, within two tries."""
        leads = self.won.is_set() and not self.ended.is_set()
        self.ended.set()
        self._task.cancel()  # a call whose own time is over at this moment may answer it with its error
        await asyncio.gather(self._task, return_exceptions=True)  # its calls have deadlines
        if not leads:
            return
        try:
            lease = await self._api.get("Lease", self._name, namespace=self._namespace)
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") == self._identity:
                await self._api.replace({**lease, "spec": spec | {"holderIdentity": "", "leaseDurationSeconds": 1}})
        except RLinfError as error:
            logger.warning("lease not released: it ends by itself", extra={"error": str(error)})

    async def _run(self) -> None:
        try:
            while True:
                try:
                    await self._try()
                except RLinfError as error:
                    logger.info("lease not written", extra={"identity": self._identity, "error": str(error)})
                if self.ended.is_set():  # without a pause: release() ends within two tries
                    return
                await asyncio.sleep(self._retry_s)
        except Exception:  # whatever it is, this candidacy is over
            logger.exception("leader election broke")
        finally:
            if self._deadline is not None:
                self._deadline.cancel()
            self.ended.set()

    async def _try(self) -> None:
        """Takes or renews the Lease, unless it is another one's. A Conflict: it was written a moment ago."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            lease = await self._api.get("Lease", self._name, namespace=self._namespace)
        except NotFound:
            meta = {"name": self._name, "namespace": self._namespace}
            await self._api.create({"kind": "Lease", "metadata": meta, "spec": self._spec({})})
        else:
            spec = lease.get("spec") or {}
            if (holder := spec.get("holderIdentity") or self._identity) != self._identity:
                if self.won.is_set():
                    self._over(f"lease taken by {holder}")
                    return
                if lease["metadata"]["resourceVersion"] != self._seen_version:
                    self._seen_version = lease["metadata"]["resourceVersion"]
                    self._others_until = loop.time() + float(spec.get("leaseDurationSeconds") or self._lease_s)
                if loop.time() < self._others_until:
                    return
            await self._api.replace({**lease, "spec": self._spec(spec)})
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = loop.call_at(began_at + self._leads_s, self._over, "lease not renewed in time")
        if not self.won.is_set():
            logger.info("leading", extra={"identity": self._identity})
            self.won.set()

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        moment = times.utc_now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # the API takes microseconds and no fewer digits
        spec = before | {
            "holderIdentity": self._identity, "leaseDurationSeconds": self._lease_s, "renewTime": moment,
        }  # fmt: skip
        if before.get("holderIdentity") == self._identity:
            return spec
        return spec | {"acquireTime": moment, "leaseTransitions": int(before.get("leaseTransitions") or 0) + 1}

    def _over(self, why: str) -> None:
        logger.error(why, extra={"identity": self._identity, "leads_s": self._leads_s})
        self.ended.set()
        self._task.cancel()  # a call whose own time is over at this moment may answer it with its error


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
