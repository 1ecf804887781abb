"""Events of Kubernetes: one that is told again counts up, and of many of one reason the first few are told apart.

Called by apply, after the status write. What is told is decided in events.py. An event is for people and may be lost: a
failure is logged and ends nothing.

| of a job | becomes |
|---|---|
| the same words about the same object | the same Event, with a higher count and another lastTimestamp |
| more than TOLD_APART of one reason within WINDOW_S | one Event of the job, with the newest words, that counts them |

So a node pool that goes with 2,000 pods of a job is eleven writes. What was told is remembered by this process: after a
restart it begins to count anew, in another Event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

from rlinf_api import names, times
from rlinf_api.errors import RLinfError
from rlinf_api.store import NotFound
from rlinf_operator.clients.objects import ObjectStore
from rlinf_operator.manifests.metadata import Manifest, digest
from rlinf_operator.reconcile.state import Event, Observed

logger = logging.getLogger(__name__)
TOLD_APART: Final = 10
"""Events of one reason about one job that stand by themselves. 10: what a person reads; the rest is a number."""
WINDOW_S: Final = 600.0
"""How long they count. 600 s, as client-go has it: trouble of an hour ago is no part of this one's."""
KEPT: Final = 4096
"""Events, and reasons of jobs, that are remembered: a thousand jobs' last four. 0.2 KB each."""
COMBINED: Final = "(combined from similar events) "

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An Event that was written."""

    name: str
    count: int


@dataclass(slots=True, kw_only=True)
class _OfReason:
    since: float
    words: set[str] = field(default_factory=set)


class _Latest(Generic[T]):
    """The KEPT entries that were looked at last."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, ...], T] = OrderedDict()

    def get(self, key: tuple[str, ...]) -> T | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: tuple[str, ...], value: T) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._entries)


class EventRecorder:
    """Called from one event loop, for one job by one pass at a time."""

    def __init__(self, store: ObjectStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: _Latest[_Known] = _Latest()
        self._reasons: _Latest[_OfReason] = _Latest()

    async def tell(self, observed: Observed, told: Iterable[Event], *, now: datetime) -> None:
        found: dict[tuple[str, ...], tuple[Event, int]] = {}
        for event in told:
            key, said = self._placed(observed, event)
            found[key] = said, found[key][1] + 1 if key in found else 1
        results = await asyncio.gather(
            *(self._write(key, event, times_, observed, now=now) for key, (event, times_) in found.items()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, RLinfError):
                logger.warning("event lost", extra={"job": str(observed.key), "error": str(result)})
            elif isinstance(result, BaseException):
                raise result

    def _placed(self, observed: Observed, event: Event) -> tuple[tuple[str, ...], Event]:
        """(what it is the same as, how it is told)."""
        reason = (observed.job.uid, event.type, event.reason)
        words, now = digest([event.pod, event.message]), self._clock()
        of_reason = self._reasons.get(reason)
        if of_reason is None or now - of_reason.since > WINDOW_S:
            of_reason = _OfReason(since=now)
            self._reasons.put(reason, of_reason)
        if words in of_reason.words or len(of_reason.words) < TOLD_APART:
            of_reason.words.add(words)
            return (*reason, words), event
        return reason, replace(event, pod="", message=COMBINED + event.message)

    async def _write(
        self, key: tuple[str, ...], event: Event, times_: int, observed: Observed, *, now: datetime
    ) -> None:
        known = self._known.get(key)
        if known is not None:
            count, moment = known.count + times_, times.text(now)
            patch: Manifest = {"count": count, "lastTimestamp": moment, "message": event.message}
            try:
                await self._store.patch("Event", known.name, patch=patch, namespace=observed.job.namespace)
            except NotFound:
                pass  # the API server forgets them after an hour
            else:
                self._known.put(key, replace(known, count=count))
                return
        made = await self._store.create(event_manifest(event, observed, now=now, count=times_))
        name: Any = made["metadata"].get("name")
        if name:
            self._known.put(key, _Known(name=str(name), count=times_))


def event_manifest(event: Event, observed: Observed, *, now: datetime, count: int = 1) -> Manifest:
    pod = next((p for p in observed.pods if event.pod and p.name == event.pod), None)
    about = (
        {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
        if pod is not None
        else {"apiVersion": names.API_VERSION, "kind": "RLJob", "name": observed.job.name, "uid": observed.job.uid}
    )
    moment = times.text(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{observed.job.name}.", "namespace": observed.job.namespace},
        "involvedObject": {**about, "namespace": observed.job.namespace},
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "source": {"component": names.MANAGER},
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": count,
    }
