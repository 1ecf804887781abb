"""Kubernetes Events of the local kubelet: why a pod does not start. Repeats count up in one object."""

from __future__ import annotations

import hashlib

from rljob.local.object_store import AlreadyExists, NotFound, ObjectStore
from rljob.local.objects import Manifest, meta, timestamp, utc_now


async def warn(store: ObjectStore, pod: Manifest, *, reason: str, message: str) -> None:
    metadata = meta(pod)
    digest = hashlib.sha256(f"{metadata['uid']}{reason}{message}".encode()).hexdigest()[:10]
    name, now = f"{metadata['name']}.{digest}", timestamp(utc_now())
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": "rljob"},
    }
    try:
        await store.create(event)
    except AlreadyExists:
        try:
            count = (await store.get("Event", name, namespace=metadata["namespace"]))["count"]
            patch = {"count": count + 1, "lastTimestamp": now}
            await store.patch("Event", name, patch=patch, namespace=metadata["namespace"])
        except NotFound:
            return  # taken away between the two; the next repeat makes it anew
