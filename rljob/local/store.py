"""An API server in a dict: what `observe` reads and `apply` writes when there is no cluster.

For: `rljob run`, tests of the operator's loop, the kubelet beside it. Not for: authorisation, server-side apply,
several processes, persistence (`dump.py` writes a view for people; nothing reads it back).

The `ObjectStore` protocol (object_store.py) says which verbs and errors; here is what they mean, as on a cluster:

* resourceVersion is one counter for all objects; a write that changes nothing changes neither it nor wakes a watch.
* generation moves when anything but metadata and status changes; the main endpoint ignores status, the status endpoint
  everything else. Pod and RLPlan specs are immutable; a pod gets its nodeName once, by the binding subresource.
* Of Events the newest MAX_EVENTS are kept, by their last change; a cluster forgets them after an hour.
* A pod that is bound and not finished is deleted gracefully: deletionTimestamp now plus grace, and the kubelet's delete
  with grace 0 removes it. Finalizers hold any object. Owners take their dependents along (collection.py).

All methods run in one event loop and never suspend between reading and writing, so a verb is atomic.
"""

from __future__ import annotations

import base64
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

from rlinf_api.errors import Conflict
from rlinf_api.store import AlreadyExists, Expired, Invalid, Listing, NotFound
from rljob.local import collection
from rljob.local.object_store import Propagation, Subresource
from rljob.local.objects import Clock, Manifest, clone, label_matcher, merge_patch, meta, ref, timestamp, utc_now
from rljob.local.watches import Watch

Admission = Callable[[Manifest, Manifest | None], Manifest]  # (new, old): defaults and validates one kind, or Invalid

WITHOUT_STATUS = frozenset({"Secret", "ConfigMap", "Event", "Lease", "NetworkPolicy"})
IMMUTABLE_SPEC = frozenset({"Pod", "RLPlan"})
OWNED_BY_SERVER = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)
HISTORY = 4096  # changes that a watch may start behind; a real watch cache keeps about as many
MAX_EVENTS = 500  # each is a file of objects/, too: 0.5 MB, which a person can still read
DEFAULT_GRACE_S = 30

Key = tuple[str, str, str]  # kind, namespace, name


class MemoryStore:
    """Implements ObjectStore. `admission` maps a kind to its defaulting and validation, run on create and replace."""

    def __init__(
        self,
        *,
        clock: Clock = utc_now,
        admission: Mapping[str, Admission] | None = None,
        watch_capacity: int = 1024,
    ) -> None:
        self._clock, self._admission, self._watch_capacity = clock, dict(admission or {}), watch_capacity
        self._objects: dict[Key, Manifest] = {}
        self._version = 0
        self._watches: list[Watch] = []
        self._history: deque[tuple[int, Manifest | None, Manifest | None]] = deque(maxlen=HISTORY)

    # --- reads --------------------------------------------------------------------------------------------------------

    async def get(self, kind: str, name: str, *, namespace: str = "default", live: bool = True) -> Manifest:
        """There are no copies here: each answer is live."""
        copy: Manifest = clone(self._find(kind, name, namespace=namespace))
        return copy

    async def list(self, kind: str, *, namespace: str | None = None, label_selector: str = "") -> Listing:
        matches = label_matcher(label_selector)
        items = [
            clone(obj)
            for (a_kind, a_namespace, _), obj in sorted(self._objects.items())
            if a_kind == kind and namespace in (None, a_namespace) and matches(meta(obj).get("labels") or {})
        ]
        return Listing(items=items, resource_version=str(self._version))

    def watch(
        self, kind: str, *, namespace: str | None = None, label_selector: str = "", resource_version: str = ""
    ) -> Watch:
        watch = Watch(
            kind,
            namespace=namespace,
            label_selector=label_selector,
            capacity=self._watch_capacity,
            on_close=lambda watch: self._watches.remove(watch) if watch in self._watches else None,
        )
        if not resource_version:
            for (a_kind, _, _), obj in sorted(self._objects.items()):
                if a_kind == kind:
                    watch.offer(before=None, after=obj)
        else:
            self._replay(watch, after=int(resource_version))
        self._watches.append(watch)
        return watch

    def snapshot(self) -> Iterator[Manifest]:
        """Every object, not copied: for dump.py, which only reads and does not suspend."""
        yield from (self._objects[key] for key in sorted(self._objects))

    # --- writes -------------------------------------------------------------------------------------------------------

    async def create(self, obj: Manifest) -> Manifest:
        new = self._admit(clone(obj), old=None)
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
        metadata["creationTimestamp"] = timestamp(self._clock())
        if new["kind"] not in WITHOUT_STATUS:
            new["status"] = {"phase": "Pending", "qosClass": "BestEffort"} if new["kind"] == "Pod" else {}
            metadata["generation"] = 1
        self._commit(before=None, after=new)
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
        self,
        kind: str,
        name: str,
        *,
        namespace: str = "default",
        grace_period_s: int | None = None,
        uid: str = "",
        propagation: Propagation = "Background",
    ) -> None:
        old = self._find(kind, name, namespace=namespace)
        if uid and uid != meta(old)["uid"]:
            raise Conflict(
                f"delete of {ref(old)}", got=f"uid {meta(old)['uid']}", wanted=uid, next="it is another object now"
            )
        grace_s = self._grace_s(old, asked_s=grace_period_s)
        new: Manifest = clone(old)
        metadata = meta(new)
        if finalizer := collection.FINALIZER_OF.get(propagation):
            metadata["finalizers"] = [*(f for f in metadata.get("finalizers", []) if f != finalizer), finalizer]
        if "deletionTimestamp" not in metadata or grace_s < metadata["deletionGracePeriodSeconds"]:
            metadata["deletionTimestamp"] = timestamp(self._clock() + timedelta(seconds=grace_s))
            metadata["deletionGracePeriodSeconds"] = grace_s
        self._settle(old, new)

    # --- inside -------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(obj: Manifest) -> Key:
        return (obj["kind"], meta(obj).get("namespace", "default"), meta(obj)["name"])

    def _find(self, kind: str, name: str, *, namespace: str) -> Manifest:
        try:
            return self._objects[kind, namespace, name]
        except KeyError:
            raise NotFound(f"{kind} {namespace}/{name} does not exist") from None

    def _admit(self, obj: Manifest, *, old: Manifest | None) -> Manifest:
        if obj.get("kind") == "Secret" and "stringData" in obj:
            encoded = {key: base64.b64encode(value.encode()).decode() for key, value in obj.pop("stringData").items()}
            obj["data"] = (obj.get("data") or {}) | encoded
        admit = self._admission.get(obj.get("kind", ""))
        return admit(obj, clone(old) if old is not None else None) if admit else obj

    def _replay(self, watch: Watch, *, after: int) -> None:
        oldest = self._history[0][0] if self._history else self._version + 1
        if after + 1 < oldest and after < self._version:
            raise Expired(
                f"watch of {watch.kind} from resourceVersion {after}", got=f"oldest kept is {oldest}", next="list again"
            )
        for version, before, now in self._history:
            changed = now if now is not None else before
            if version > after and changed is not None and changed["kind"] == watch.kind:
                watch.offer(before=before, after=now)

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
        new = self._admit(new, old=old)
        if kind in IMMUTABLE_SPEC and new.get("spec") != old.get("spec"):
            raise Invalid(f"{ref(old)}: spec is immutable", next=f"create another {kind}")
        if kind not in WITHOUT_STATUS:
            new["status"] = clone(old.get("status", {}))
        return new

    @staticmethod
    def _substance(obj: Manifest) -> Manifest:
        return {key: value for key, value in obj.items() if key not in ("metadata", "status")}

    def _settle(self, old: Manifest, new: Manifest) -> Manifest:
        """Writes `new` in place of `old`, or removes it when it is being deleted and nothing holds it any more."""
        metadata = meta(new)
        gone = "deletionTimestamp" in metadata and not metadata.get("finalizers")
        if gone and metadata["deletionGracePeriodSeconds"] == 0:
            self._commit(before=old, after=None, last=new)
            self._collect(new)
        elif new != old:
            self._commit(before=old, after=new)
            if collection.is_deleted_in_foreground(new) or collection.is_orphaning(new):
                self._collect(new)
        result: Manifest = clone(new)
        return result

    def _commit(self, *, before: Manifest | None, after: Manifest | None, last: Manifest | None = None) -> None:
        self._version += 1
        changed = after if after is not None else last
        assert changed is not None
        meta(changed)["resourceVersion"] = str(self._version)
        if after is not None:
            self._objects[self._key(after)] = after
        else:
            del self._objects[self._key(changed)]
        self._history.append((self._version, before if after is not None else changed, after))
        for watch in list(self._watches):
            if watch.kind == changed["kind"]:
                watch.offer(before=before if after is not None else changed, after=after)

    def _forget_an_event(self) -> None:
        """The oldest goes where there are more than MAX_EVENTS, which one create cannot exceed by more than one."""
        events = [obj for (kind, _, _), obj in self._objects.items() if kind == "Event"]
        if len(events) > MAX_EVENTS:
            oldest = min(events, key=lambda event: int(meta(event)["resourceVersion"]))
            self._commit(before=oldest, after=None, last=clone(oldest))

    def _collect(self, *changed: Manifest) -> None:
        """Carries out what the garbage collector decides, until there is nothing more to do."""
        pending = deque(changed)
        while pending:
            cause = pending.pop()
            for step in collection.steps_after(cause, self._objects.values()):
                old = self._objects.get(self._key(step.object))
                if old is None:
                    continue
                new: Manifest = clone(old)
                if step.delete:
                    grace_s = self._grace_s(old, asked_s=None)
                    if "deletionTimestamp" in meta(new):
                        continue
                    meta(new)["deletionTimestamp"] = timestamp(self._clock() + timedelta(seconds=grace_s))
                    meta(new)["deletionGracePeriodSeconds"] = grace_s
                    if step.foreground:
                        meta(new)["finalizers"] = [*meta(new).get("finalizers", []), collection.FOREGROUND]
                else:
                    meta(new)["ownerReferences"] = step.owner_references
                    meta(new)["finalizers"] = step.finalizers
                self._settle(old, new)
