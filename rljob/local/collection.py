"""The garbage collector's decisions: which objects go, or lose a reference, after one object changed.

Pure; `MemoryStore` carries the steps out at once (a cluster takes up to seconds: nothing may depend on the delay).
Background: dependents go after the owner. Foreground: the owner waits, by a finalizer, until no dependent with
blockOwnerDeletion is left. Orphan: dependents lose their reference first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rljob.local.objects import Manifest, meta

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
FINALIZER_OF = {"Foreground": FOREGROUND, "Orphan": ORPHAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionStep:
    """Delete `object`, or write these owner references and finalizers to it."""

    object: Manifest
    delete: bool = False
    foreground: bool = False
    owner_references: list[dict[str, Any]] | None = None
    finalizers: list[str] | None = None


def owner_uids(obj: Manifest) -> set[str]:
    return {reference["uid"] for reference in meta(obj).get("ownerReferences") or []}


def is_deleted_in_foreground(obj: Manifest) -> bool:
    return "deletionTimestamp" in meta(obj) and FOREGROUND in meta(obj).get("finalizers", [])


def is_orphaning(obj: Manifest) -> bool:
    return "deletionTimestamp" in meta(obj) and ORPHAN in meta(obj).get("finalizers", [])


def steps_after(changed: Manifest, objects: Iterable[Manifest]) -> Iterator[CollectionStep]:
    """`changed` was removed, created with owners, or marked for deletion; `objects` is what exists now."""
    existing = list(objects)
    uids = {meta(obj)["uid"] for obj in existing}
    uid = meta(changed)["uid"]
    if uid not in uids:
        for obj in existing:
            if uid in owner_uids(obj) and not owner_uids(obj) & uids:
                yield CollectionStep(object=obj, delete=True)
            elif is_deleted_in_foreground(obj) and meta(obj)["uid"] in owner_uids(changed):
                yield from _release(obj, existing, without=uid)
    elif is_orphaning(changed):
        for obj in existing:
            if uid in owner_uids(obj):
                references = [r for r in meta(obj)["ownerReferences"] if r["uid"] != uid]
                yield CollectionStep(
                    object=obj, owner_references=references, finalizers=list(meta(obj).get("finalizers", []))
                )
        yield _without_finalizer(changed, ORPHAN)
    elif is_deleted_in_foreground(changed):
        for obj in existing:
            if uid in owner_uids(obj) and not (owner_uids(obj) - {uid}) & uids:
                yield CollectionStep(object=obj, delete=True, foreground=True)
        yield from _release(changed, existing, without="")
    elif owner_uids(changed) and not owner_uids(changed) & uids:
        yield CollectionStep(object=changed, delete=True)  # its owners were gone before it came


def _release(owner: Manifest, existing: list[Manifest], *, without: str) -> Iterator[CollectionStep]:
    uid = meta(owner)["uid"]
    blocking = [
        obj
        for obj in existing
        if meta(obj)["uid"] != without
        for reference in meta(obj).get("ownerReferences") or []
        if reference["uid"] == uid and reference.get("blockOwnerDeletion")
    ]
    if not blocking:
        yield _without_finalizer(owner, FOREGROUND)


def _without_finalizer(obj: Manifest, finalizer: str) -> CollectionStep:
    metadata = meta(obj)
    return CollectionStep(
        object=obj,
        owner_references=list(metadata.get("ownerReferences", [])),
        finalizers=[f for f in metadata.get("finalizers", []) if f != finalizer],
    )
