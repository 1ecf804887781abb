"""The verbs on Kubernetes objects that the operator uses, so that it runs on a cluster and on the local store alike.

Objects are plain dicts as JSON has them. Errors are those of `rlinf_api.store` and `rlinf_api.errors`, raised by both,
and of a cluster alone:

| error | HTTP | what the caller does |
|---|---|---|
| NotFound | 404 | it is gone, or not there yet |
| AlreadyExists (a Conflict) | 409 on create | reads it and compares its owner's uid |
| Conflict | 409 | reads again, decides again |
| NamespaceTerminating | 403 on create | writes nothing more |
| NamespaceRefused (a RetryableError) | 403 on list or watch | reads nothing there; tries again later |
| Expired | 410 | lists and watches again |
| Invalid, Refused, ... | 4xx | tells the person; tries again later |
| ClusterBusy, ... (RetryableError) | 429, 5xx | tries again later |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from rlinf_api.errors import Conflict, RLinfError
from rlinf_api.store import AlreadyExists, Change, Listing, NotFound
from rlinf_operator.manifests.metadata import Manifest

Subresource = Literal["", "status"]


class ObjectStore(Protocol):
    """Called by observe, apply and the loop, from one event loop. A write that fails may be done all the same,
    where its answer was lost: what is read next shows what became of it."""

    async def create(self, obj: Manifest) -> Manifest: ...

    async def get(self, kind: str, name: str, *, namespace: str = "default", live: bool = True) -> Manifest:
        """`live`: what no copy has is asked for, as copies may be late; False: then it is NotFound."""
        ...

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing: ...

    async def replace(self, obj: Manifest, *, subresource: Subresource = "") -> Manifest: ...

    async def patch(
        self, kind: str, name: str, *, patch: Manifest, namespace: str = "default", subresource: Subresource = ""
    ) -> Manifest: ...

    async def delete(
        self, kind: str, name: str, *, namespace: str = "default", uid: str = "", grace_period_s: int | None = None
    ) -> None:
        """`uid`: of the object that is meant, and not a later one of its name; empty: whichever is there.
        `grace_period_s`: of a pod, other than its own."""
        ...

    def watch(self, kind: str) -> AsyncIterator[Change]:
        """What exists comes first, as ADDED."""
        ...


def is_over_quota(error: RLinfError) -> bool:
    """A ResourceQuota is full, by the words of its admission plugin: the API server gives no reason of its own."""
    return "exceeded quota" in str(error)


async def get_or_none(
    store: ObjectStore, kind: str, name: str, *, namespace: str, live: bool = True
) -> Manifest | None:
    try:
        return await store.get(kind, name, namespace=namespace, live=live)
    except NotFound:
        return None


async def get_owned(
    store: ObjectStore, kind: str, name: str, *, namespace: str, uid: str, live: bool = True
) -> Manifest | None:
    """None, too, where the one of this name is not of the job of this uid."""
    found = await get_or_none(store, kind, name, namespace=namespace, live=live)
    return found if found is not None and uid in owner_uids(found) else None


async def create_owned(store: ObjectStore, wanted: Manifest, *, uid: str) -> None:
    """One that the job of this uid has already is as good."""
    kind, meta = wanted["kind"], wanted["metadata"]
    try:
        await store.create(wanted)
    except AlreadyExists as error:
        existing = await get_or_none(store, kind, meta["name"], namespace=meta["namespace"])
        if existing is not None and uid not in owner_uids(existing):
            raise RLinfError(
                f"{kind} {meta['namespace']}/{meta['name']} exists and does not belong to this job",
                got=f"owners {sorted(owner_uids(existing)) or 'none'}", wanted=f"RLJob uid {uid}", next="delete it",
            ) from error  # fmt: skip


async def delete_if_there(
    store: ObjectStore, kind: str, name: str, *, namespace: str, uid: str, grace_period_s: int | None = None
) -> bool:
    """False: gone already, or another object under its name by now: either way there is nothing left to delete."""
    try:
        await store.delete(kind, name, namespace=namespace, uid=uid, grace_period_s=grace_period_s)
    except (NotFound, Conflict):
        return False
    return True


def owner_uids(obj: Manifest) -> set[str]:
    return {str(o.get("uid")) for o in obj["metadata"].get("ownerReferences") or []}
