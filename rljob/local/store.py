"""An API server in a dict: what `observe` reads and `apply` writes when there is no cluster.

For: `rljob run`, tests of the operator's loop, the kubelet beside it. Not for: authorisation, server-side apply,
several processes, persistence (`dump.py` writes a view for people; nothing reads it back).

The verbs are those of the operator's ObjectStore, the errors `rlinf_api.store`'s; they mean what they do on a cluster:

* resourceVersion is one counter for all objects; a write that changes nothing changes neither it nor wakes a watch.
* An edit of an RLJob is refused as by the rules of the CRD that look at the old one, word for word.
* generation moves when anything but metadata and status changes; the main endpoint ignores status, the status endpoint
  everything else. Pod and RLPlan specs are immutable; a pod gets its nodeName once, by the binding subresource.
* Of Events the newest MAX_EVENTS are kept, by their last change; a cluster forgets them after an hour.
* A pod that is bound and not finished is deleted gracefully: deletionTimestamp now plus grace, and the kubelet's delete
  with grace 0 removes it. Finalizers hold any object. Owners take their dependents along, as in the background.

All methods run in one event loop and never suspend between reading and writing, so a verb is atomic.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Literal, Self

from pydantic import ValidationError

from rlinf_api import edits, times
from rlinf_api.errors import Conflict, InvariantBroken
from rlinf_api.store import AlreadyExists, Change, Expired, Invalid, Listing, NotFound
from rljob.local.objects import Manifest, clone, merge_patch, meta, ref

Subresource = Literal["", "status", "binding"]

WITHOUT_STATUS = frozenset({"Secret", "ConfigMap", "Event", "Lease", "NetworkPolicy", "PodDisruptionBudget"})
IMMUTABLE_SPEC = frozenset({"Pod", "RLPlan"})
OWNED_BY_SERVER = (
    "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
)  # fmt: skip
MAX_EVENTS = 500  # each is a file of objects/, too: 0.5 MB, which a person can still read
WATCH_CAPACITY = 1024
DEFAULT_GRACE_S = 30
Key = tuple[str, str, str]  # kind, namespace, name


class Watch:
    """Async iterator of Change. Ends only by Expired or when it is closed. One reader, who waits for events; a slow one
    costs `capacity` references and then one Expired, as a real watch cache answers 410, and never holds up a writer."""

    def __init__(self, kind: str, *, namespace: str | None, capacity: int, on_close: Callable[[Watch], None]) -> None:
        self._kind, self._namespace, self._capacity, self._on_close = kind, namespace, capacity, on_close
        self._events: deque[Change] = deque()
        self._expired = self._closed = False
        self._arrived: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        while not self._events:
            if self._expired:
                self.close()
                raise Expired(
                    f"watch of {self._kind}",
                    got=f"more than {self._capacity} unread events",
                    next="list, then watch again",
                )
            if self._closed:
                raise StopAsyncIteration
            if self._arrived is not None:
                raise InvariantBroken(f"two readers of one watch of {self._kind}", next="open a watch for each")
            # No deadline: silence is what a watch of a quiet cluster looks like; callers that need one use wait_for.
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self._events.popleft()

    def offer(self, change: Literal["ADDED", "MODIFIED", "DELETED"], obj: Manifest) -> None:
        """One change of any object; the store calls it, in order."""
        is_of_it = obj["kind"] == self._kind and self._namespace in (None, meta(obj)["namespace"])
        if self._expired or self._closed or not is_of_it:
            return
        if len(self._events) >= self._capacity:
            self._events.clear()
            self._expired = True
        else:
            self._events.append(Change(type=change, object=clone(obj)))
        self._wake()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close(self)
            self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


class MemoryStore:
    def __init__(self, *, clock: Callable[[], datetime] = times.utc_now) -> None:
        self._clock = clock
        self._objects: dict[Key, Manifest] = {}
        self._version = 0
        self._watches: list[Watch] = []

    # --- reads --------------------------------------------------------------------------------------------------------

    async def get(self, kind: str, name: str, *, namespace: str = "default", live: bool = True) -> Manifest:
        """There are no copies here: each answer is live."""
        copy: Manifest = clone(self._find(kind, name, namespace=namespace))
        return copy

    async def list(self, kind: str, *, namespace: str | None = None, label_selector: str = "") -> Listing:
        """`label_selector`: one `label=value`; empty: all."""
        label, _, value = label_selector.partition("=")
        items = [
            clone(obj)
            for (a_kind, a_namespace, _), obj in sorted(self._objects.items())
            if a_kind == kind and namespace in (None, a_namespace)
            if not label or (meta(obj).get("labels") or {}).get(label) == value
        ]
        return Listing(items=items, resource_version=str(self._version))

    def watch(self, kind: str, *, namespace: str | None = None) -> Watch:
        """What exists comes first, as ADDED."""
        watch = Watch(kind, namespace=namespace, capacity=WATCH_CAPACITY, on_close=self._watches.remove)
        for _, obj in sorted(self._objects.items()):
            watch.offer("ADDED", obj)
        self._watches.append(watch)
        return watch

    def snapshot(self) -> Iterator[Manifest]:
        """Every object, not copied: for dump.py, which only reads and does not suspend."""
        yield from (self._objects[key] for key in sorted(self._objects))

    # --- writes -------------------------------------------------------------------------------------------------------

    async def create(self, obj: Manifest) -> Manifest:
        new: Manifest = clone(obj)
        metadata = new.setdefault("metadata", {})
        metadata.setdefault("namespace", "default")
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if not metadata.get("name") or not new.get("kind"):
            raise Invalid("object to create", got=ref(new), wanted="kind and metadata.name")
        for field in OWNED_BY_SERVER:
            metadata.pop(field, None)
        if self._key(new) in self._objects:
            raise AlreadyExists(f"{ref(new)} exists", next="read it and compare its owner's uid")
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = times.text(self._clock())
        if new["kind"] not in WITHOUT_STATUS:
            new["status"] = {"phase": "Pending"} if new["kind"] == "Pod" else {}
            metadata["generation"] = 1
        self._commit(new)
        if new["kind"] == "Event":
            self._forget_an_event()
        created: Manifest = clone(new)
        if metadata.get("ownerReferences"):
            self._collect(new)
        return created

    async def replace(self, obj: Manifest, *, subresource: Subresource = "") -> Manifest:
        metadata = meta(obj)
        old = self._find(obj["kind"], metadata["name"], namespace=metadata.get("namespace", "default"))
        if not metadata.get("resourceVersion"):
            raise Invalid(
                f"{ref(obj)}: metadata.resourceVersion must be specified for an update", next="read the object first"
            )
        return self._update(old, clone(obj), subresource=subresource)

    async def patch(
        self, kind: str, name: str, *, patch: Manifest, namespace: str = "default", subresource: Subresource = ""
    ) -> Manifest:
        old = self._find(kind, name, namespace=namespace)
        return self._update(old, merge_patch(clone(old), patch), subresource=subresource)

    async def delete(
        self, kind: str, name: str, *, namespace: str = "default", grace_period_s: int | None = None, uid: str = ""
    ) -> None:
        old = self._find(kind, name, namespace=namespace)
        if uid and uid != meta(old)["uid"]:
            raise Conflict(
                f"delete of {ref(old)}", got=f"uid {meta(old)['uid']}", wanted=uid, next="it is another object now"
            )
        grace_s = self._grace_s(old, asked_s=grace_period_s)
        sooner = "deletionTimestamp" not in meta(old) or grace_s < meta(old)["deletionGracePeriodSeconds"]
        self._settle(old, self._marked(old, grace_s=grace_s) if sooner else clone(old))

    # --- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(obj: Manifest) -> Key:
        return (obj["kind"], meta(obj).get("namespace", "default"), meta(obj)["name"])

    def _find(self, kind: str, name: str, *, namespace: str) -> Manifest:
        try:
            return self._objects[kind, namespace, name]
        except KeyError:
            raise NotFound(f"{kind} {namespace}/{name} does not exist") from None

    @staticmethod
    def _grace_s(obj: Manifest, *, asked_s: int | None) -> int:
        """As the API server's CheckGracefulDelete: only a pod that a kubelet may be running gets any grace."""
        if obj["kind"] != "Pod":
            return 0
        spec, phase = obj.get("spec", {}), obj.get("status", {}).get("phase")
        if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
            return 0
        return asked_s if asked_s is not None else int(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))

    def _update(self, old: Manifest, new: Manifest, *, subresource: Subresource) -> Manifest:
        self._check_preconditions(old, new)
        wanted = self._merge_endpoint(old, new, subresource=subresource)
        for field in OWNED_BY_SERVER:
            meta(wanted).pop(field, None)
            if field in meta(old):
                meta(wanted)[field] = meta(old)[field]
        if wanted == old:
            unchanged: Manifest = clone(old)
            return unchanged
        moved = subresource != "binding" and self._substance(wanted) != self._substance(old)
        if moved and "generation" in meta(old):
            meta(wanted)["generation"] = meta(old)["generation"] + 1
        return self._settle(old, wanted)

    @staticmethod
    def _check_preconditions(old: Manifest, new: Manifest) -> None:
        for field in ("resourceVersion", "uid"):
            got = meta(new).get(field)
            if got and got != meta(old)[field]:
                raise Conflict(
                    f"write of {ref(old)}",
                    got=f"{field} {got}",
                    wanted=meta(old)[field],
                    next="read it again and decide again",
                )

    def _merge_endpoint(self, old: Manifest, new: Manifest, *, subresource: Subresource) -> Manifest:
        kind = old["kind"]
        if subresource == "binding":
            if kind != "Pod" or old["spec"].get("nodeName"):
                raise Conflict(
                    f"binding of {ref(old)}",
                    got=f"nodeName {old.get('spec', {}).get('nodeName')!r}",
                    wanted="an unbound pod",
                )
            return {**clone(old), "spec": {**clone(old["spec"]), "nodeName": new["spec"]["nodeName"]}}
        if subresource == "status":
            if kind in WITHOUT_STATUS:
                raise NotFound(f"{ref(old)} has no status subresource")
            return {**clone(old), "status": clone(new.get("status", {}))}
        if kind == "RLJob" and (sentence := self._refusal(old, new)):
            raise Invalid(f"{ref(old)}: {sentence}")
        if kind in IMMUTABLE_SPEC and new.get("spec") != old.get("spec"):
            raise Invalid(f"{ref(old)}: spec is immutable", next=f"create another {kind}")
        if kind not in WITHOUT_STATUS:
            new["status"] = clone(old.get("status", {}))
        return new

    @staticmethod
    def _refusal(old: Manifest, new: Manifest) -> str:
        """Why an edit of an RLJob is refused, as by the CRD's rules; empty: it is not. What is no spec is not looked
        at: the operator names it."""
        try:
            return edits.refusal(old.get("spec") or {}, new.get("spec") or {}, status=old.get("status") or {})
        except ValidationError:
            return ""

    @staticmethod
    def _substance(obj: Manifest) -> Manifest:
        return {key: value for key, value in obj.items() if key not in ("metadata", "status")}

    def _settle(self, old: Manifest, new: Manifest) -> Manifest:
        """Writes `new` in place of `old`, or removes it when it is being deleted and nothing holds it any more."""
        metadata = meta(new)
        gone = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if gone and metadata["deletionGracePeriodSeconds"] == 0:
            self._commit(new, gone=True)
            self._collect(new)
        elif new != old:
            self._commit(new)
        result: Manifest = clone(new)
        return result

    def _commit(self, changed: Manifest, *, gone: bool = False) -> None:
        self._version += 1
        meta(changed)["resourceVersion"] = str(self._version)
        known = self._objects.pop(self._key(changed), None)
        if not gone:
            self._objects[self._key(changed)] = changed
        for watch in list(self._watches):
            watch.offer("DELETED" if gone else "ADDED" if known is None else "MODIFIED", changed)

    def _forget_an_event(self) -> None:
        """The oldest goes where there are more than MAX_EVENTS, which one create cannot exceed by more than one."""
        events = [obj for (kind, _, _), obj in self._objects.items() if kind == "Event"]
        if len(events) > MAX_EVENTS:
            oldest = min(events, key=lambda event: int(meta(event)["resourceVersion"]))
            self._commit(clone(oldest), gone=True)

    def _collect(self, changed: Manifest) -> None:
        """The garbage collector, at once (a cluster takes up to seconds: nothing may depend on the delay). What hung on
        `changed` alone, which was removed, goes with it; so does `changed`, whose owners were gone before it came."""
        uids = {meta(obj)["uid"] for obj in self._objects.values()}
        uid = meta(changed)["uid"]
        hanging = [changed] if uid in uids else [obj for obj in self._objects.values() if uid in _owner_uids(obj)]
        for obj in hanging:
            old = self._objects.get(self._key(obj))
            if old is not None and not _owner_uids(old) & uids and "deletionTimestamp" not in meta(old):
                self._settle(old, self._marked(old, grace_s=self._grace_s(old, asked_s=None)))

    def _marked(self, obj: Manifest, *, grace_s: int) -> Manifest:
        """A copy that says when it must be gone."""
        new: Manifest = clone(obj)
        meta(new)["deletionTimestamp"] = times.text(self._clock() + timedelta(seconds=grace_s))
        meta(new)["deletionGracePeriodSeconds"] = grace_s
        return new


def _owner_uids(obj: Manifest) -> set[str]:
    return {reference["uid"] for reference in meta(obj).get("ownerReferences") or []}
