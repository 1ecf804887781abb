"""The verbs that `observe` and `apply` may use on Kubernetes objects: one protocol for the local store and a cluster
client.

For: typing the operator's loop so that it runs on either side. Not for: typed objects, caches, retries, server-side
apply. Implementations: `rljob.local.store.MemoryStore`, and the operator's thin client of a real API server.

Every object is a plain dict as JSON has it (`apiVersion`, `kind`, `metadata`, ...); what a verb returns is the caller's
own copy. `kind` alone names a resource: no two kinds of this product share a name across groups.

| verb | HTTP | raises |
|---|---|---|
| create | POST | AlreadyExists (409), Invalid (422) |
| get | GET | NotFound (404) |
| list | GET, with the collection's resourceVersion for a watch to start from | |
| replace | PUT, metadata.resourceVersion required | NotFound, Conflict (409), Invalid |
| patch | PATCH merge-patch+json; a resourceVersion or uid in it is a precondition | NotFound, Conflict, Invalid |
| delete | DELETE; `uid` is a precondition | NotFound, Conflict |
| watch | GET watch=true; without a resourceVersion what exists comes first, as ADDED | Expired (410): list again |
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from rlinf_api.store import Listing
from rljob.local.objects import Manifest

Propagation: TypeAlias = Literal["Background", "Foreground", "Orphan"]
Subresource: TypeAlias = Literal["", "status", "binding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEvent:
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Manifest


class StoreVerbs(Protocol):
    """Called by the operator's observe and apply, from one event loop. A failed verb has changed nothing."""

    async def create(self, obj: Manifest) -> Manifest: ...

    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest: ...

    async def list(self, kind: str, *, namespace: str | None = None, label_selector: str = "") -> Listing:
        """namespace None: all of them."""
        ...

    async def replace(self, obj: Manifest, *, subresource: Subresource = "") -> Manifest: ...

    async def patch(
        self, kind: str, name: str, *, patch: Manifest, namespace: str = "default", subresource: Subresource = ""
    ) -> Manifest: ...

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
        """Pods: marks the pod and leaves it to the kubelet; grace_period_s=0 takes the object away at once."""
        ...

    def watch(
        self, kind: str, *, namespace: str | None = None, label_selector: str = "", resource_version: str = ""
    ) -> AsyncIterator[WatchEvent]:
        """An object that stops matching the selector is reported DELETED, as the API server does."""
        ...
