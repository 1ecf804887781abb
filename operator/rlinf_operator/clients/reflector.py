"""A copy of all labelled objects of one kind, kept by list and watch. For cache.py; nobody else sees it.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Reflector.run, one per kind | list pages, watch events | an event | the API server; inactivity_s; cancel |
| same, after a failure | - | a pause | time; cancel |

What may happen to a watch, and what follows:

| happens | follows |
|---|---|
| the server ends it (its time is over), the connection breaks | opened again where it stood |
| 410, an ERROR event | listed again, then watched from there |
| silence for `inactivity_s`, though bookmarks come every minute | listed again: it may be fed by a dead cache |
| 429, 5xx, no answer | a pause that doubles, with jitter; Retry-After is the least |
| 404, 403 of a kind that a cluster may lack | it counts as absent, and is looked for each half a minute |
| 403 of a listed namespace | the same; meanwhile nothing of the namespace is read (refusals.py) |
| it had said something, or lived for a while, before that | the next pause is the first again |

A list replaces the copy page by page, and reports what changed and what is gone as if a watch had said so. An object in
the copy is never replaced by an older one: own writes are put in by `wrote`, live reads by `saw`, and the watch's echo
of an earlier state changes nothing. Kept is what a pass reads (copies.py), and nobody is told of a change that no pass
would notice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

from rlinf_api import names
from rlinf_api.errors import RetryableError, RLinfError
from rlinf_api.store import Expired, NotFound
from rlinf_operator.clients import api_errors, copies
from rlinf_operator.clients.copies import Copy
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.clients.refusals import Refusals
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics

logger = logging.getLogger(__name__)
RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 30.0
STEADY_S: Final = 1.0  # a watch that lived so long was well: opened again each second it is no load
SERVER_TIMEOUT_S: Final = 300  # one watch; the server ends it, jittered, so that replicas do not come at once
TOMBSTONES: Final = 4096  # uids of own deletions whose DELETED has not come yet; thousands would take a lost watch

Key = tuple[str, str]  # namespace, name
GONE: Final = {"gone": True}  # beside kind and metadata of an object that is reported for the last time


class Reflector:
    def __init__(
        self,
        kind: str,
        *,
        namespace: str | None,
        metadata_only: bool,
        indexed: tuple[str, ...],
        api: KubeApi,
        metrics: Metrics,
        on_change: Callable[[Manifest], None],
        inactivity_s: float,
        refusals: Refusals,
        label_selector: str = names.LABEL_JOB,
        optional: bool = False,
        on_silent: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`indexed`: labels by which a pass asks for all that its job has of the kind. `label_selector`: which objects
        are kept; one that begins or ceases to fit is told of as made or gone. `optional`: a cluster may lack the kind,
        or the right to it; it is looked for again within the longest pause. `on_silent`: told of each watch that was
        given up as it said nothing."""
        self.kind, self.namespace, self._metadata_only, self._indexed = kind, namespace, metadata_only, indexed
        self._label_selector = label_selector
        self.listed = asyncio.Event()
        self.asked = asyncio.Event()
        """Listed, or refused with its namespace."""
        self._refusals, self._optional, self._on_silent = refusals, optional, on_silent
        self._api, self._metrics, self._on_change = api, metrics, on_change
        self._inactivity_s, self._clock = inactivity_s, clock
        self._objects: dict[Key, Copy] = {}
        self._of_job: dict[tuple[str, str, str], set[str]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._version = ""
        self._heard_at = clock()
        self._opened_at: float | None = None
        self._delivered = False

    # --- reads, and own writes ----------------------------------------------------------------------------------------

    def get(self, namespace: str, name: str) -> Manifest | None:
        known = self._objects.get((namespace, name))
        return None if known is None else known.read()

    def of(self, namespace: str, label: str, *, value: str) -> list[Manifest]:
        """Those with one of the indexed labels, by name."""
        return [
            self._objects[namespace, name].read() for name in sorted(self._of_job.get((namespace, label, value), ()))
        ]

    def uid(self, namespace: str, name: str) -> str:
        """Empty where there is none."""
        known = self._objects.get((namespace, name))
        return "" if known is None else known.uid

    def labels(self, namespace: str, name: str) -> dict[str, str]:
        """Those of the indexed ones that it has."""
        known = self._objects.get((namespace, name))
        return {} if known is None else dict(zip(self._indexed, known.labels, strict=True))

    def __len__(self) -> int:
        return len(self._objects)

    def age_s(self) -> float:
        """Since the API server last said anything about this kind; 0 where it says that the namespace is refused, or
        that there is no such kind."""
        absent = self._optional and not self.listed.is_set()
        return 0.0 if absent or self._refusals.has(self.namespace, self.kind) else self._clock() - self._heard_at

    def wrote(self, obj: Manifest) -> None:
        """An own write's answer: from now on reads show it, however late the watch is."""
        if not self._is_past(obj):
            self._put(copies.trimmed(obj, metadata_only=self._metadata_only))

    def saw(self, obj: Manifest) -> None:
        """A live read's answer: from now on reads show it. Told like a watch event, which it comes before."""
        if not self._is_past(obj):
            self._see(obj)

    def removed(self, namespace: str, name: str, *, uid: str) -> None:
        """An own deletion that took the object away at once. A uid never comes back, whatever the watch says late."""
        self._gone[uid] = None
        while len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)
        known = self._objects.get((namespace, name))
        if known is not None and known.uid == uid:
            self._remove((namespace, name))

    # --- the task -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        why, failures = "Start", 0
        while True:
            self._opened_at, self._delivered = None, False
            try:
                if not self._version:
                    await self._list(why)
                await self._watch()
                failures = 0
                continue
            except Expired as error:
                logger.info("watch expired", extra={"kind": self.kind, "error": str(error)})
                self._version, why, least_s = "", "Expired", 0.0
            except _Silent:
                logger.warning("watch was silent", extra={"kind": self.kind, "inactivity_s": self._inactivity_s})
                self._on_silent()
                self._version, why, least_s = "", "Silent", 0.0
            except RetryableError as error:
                logger.info("watch broke", extra={"kind": self.kind, "error": str(error)})
                least_s = error.delay_s if error.got.startswith("429") else 0.0
            except RLinfError as error:
                absent = self._optional and isinstance(error, NotFound | api_errors.Forbidden)
                least_s = RETRY_MAX_S if absent else RETRY_MIN_S
                self._refused(error, absent=absent)
            if self._was_well():
                failures = 0
            pause_s = min(RETRY_MAX_S, RETRY_MIN_S * 2.0**failures)
            failures = min(failures + 1, 10)
            await asyncio.sleep(max(least_s, pause_s * random.uniform(0.5, 1.0)))

    def _refused(self, error: RLinfError, *, absent: bool) -> None:
        if absent:
            if self.listed.is_set() or not self.asked.is_set():  # not each time that it is looked for
                logger.info("no such kind here", extra={"kind": self.kind, "error": str(error)})
            self.listed.clear()
            self._version = ""
            self.asked.set()
        elif self._refusals.refused(self.namespace, self.kind, error):
            self.asked.set()
        else:
            logger.warning("watch refused", extra={"kind": self.kind, "error": str(error)})

    def _was_well(self) -> bool:
        """Whether the watch that broke had been well. Where a list follows, which is dear, it must have lived as long
        as any pause: lists that each lead to a watch that is too old would come without a pause otherwise."""
        if self._opened_at is None:
            return False
        lived_s = self._clock() - self._opened_at
        return lived_s >= RETRY_MAX_S if not self._version else self._delivered or lived_s >= STEADY_S

    async def _list(self, why: str) -> None:
        seen: set[Key] = set()
        version = ""
        async for page in self._api.pages(
            self.kind, namespace=self.namespace, label_selector=self._label_selector, metadata_only=self._metadata_only
        ):  # fmt: skip
            self._heard_at, version = self._clock(), page.resource_version
            for item in page.items:
                seen.add(_key(item))
                self._see(item)
        self._metrics.relists.labels(kind=self.kind, why=why).inc()
        as_of = copies.number(version)
        for key, known in list(self._objects.items()):
            # Not in the list, and not of an own write that is younger than the list: gone while nobody looked.
            if key not in seen and known.version <= as_of:
                self._remove(key)
                self._on_change(known.read() | GONE)
        self._version = version
        self.listed.set()
        self.asked.set()

    async def _watch(self) -> None:
        async with self._api.open_watch(
            self.kind, resource_version=self._version, server_timeout_s=SERVER_TIMEOUT_S,
            namespace=self.namespace, label_selector=self._label_selector, metadata_only=self._metadata_only,
        ) as events:  # fmt: skip
            self._heard_at = self._opened_at = self._clock()
            self._refusals.served(self.namespace, self.kind)
            async for event in self._unless_silent(events):
                self._heard_at = self._clock()
                self._take(event)
                self._delivered = True

    async def _unless_silent(self, events: AsyncIterator[Manifest]) -> AsyncIterator[Manifest]:
        while True:
            try:
                async with asyncio.timeout(self._inactivity_s):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise _Silent(self.kind) from None
            yield event

    def _take(self, event: Manifest) -> None:
        obj = event.get("object") or {}
        kind = event.get("type")
        if kind == "ERROR":
            status = int(obj.get("code") or 500)
            raise api_errors.of_answer(f"watch of {self.kind}", status=status, body=json.dumps(obj).encode())
        version = str((obj.get("metadata") or {}).get("resourceVersion") or "")
        if kind == "DELETED":
            self._drop(obj)
        elif kind in ("ADDED", "MODIFIED"):
            self._see({**obj, "kind": self.kind})
        if version:
            self._version = version

    # --- the copy -----------------------------------------------------------------------------------------------------

    def _is_past(self, obj: Manifest) -> bool:
        """An answer that comes after the watch has told of the object's end: in the copy, it would never leave it."""
        version = copies.number(obj["metadata"].get("resourceVersion"))
        return _key(obj) not in self._objects and version <= copies.number(self._version)

    def _see(self, obj: Manifest) -> None:
        kept = copies.trimmed(obj, metadata_only=self._metadata_only)
        before = self._objects.get(_key(obj))
        if self._put(kept) and (before is None or copies.is_news(before, kept)):
            self._on_change(kept)

    def _put(self, kept: Manifest) -> bool:
        """Whether it is younger than what was there."""
        key, copy = _key(kept), copies.of(kept, indexed=self._indexed)
        if copy.uid in self._gone:
            return False
        known = self._objects.get(key)
        if known is not None and known.version >= copy.version:
            return False
        self._remove(key)
        self._objects[key] = copy
        for entry in self._index_entries(key, copy):
            self._of_job.setdefault(entry, set()).add(key[1])
        return True

    def _remove(self, key: Key) -> None:
        known = self._objects.pop(key, None)
        for entry in self._index_entries(key, known) if known is not None else ():
            group = self._of_job.get(entry, set())
            group.discard(key[1])
            if not group:
                self._of_job.pop(entry, None)

    def _drop(self, obj: Manifest) -> None:
        """DELETED: gone, or without the label by now; an object that has the name since is another one."""
        key, uid = _key(obj), obj["metadata"]["uid"]
        self._gone.pop(uid, None)
        known = self._objects.get(key)
        if known is not None and known.uid == uid:
            self._remove(key)
        self._on_change({**obj, "kind": self.kind} | GONE)

    def _index_entries(self, key: Key, copy: Copy) -> Iterator[tuple[str, str, str]]:
        for label, value in zip(self._indexed, copy.labels, strict=True):
            if value:
                yield key[0], label, value


class _Silent(Exception):
    """Nothing came for too long."""


def _key(obj: Manifest) -> Key:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
