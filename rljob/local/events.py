"""Kubernetes Events of the local kubelet: why a pod does not start. One object for each pod and reason, which counts up
and has the newest words: what is tried twice a second says other numbers and names of temporary files each time."""

from __future__ import annotations

import hashlib

from rlinf_api import times
from rlinf_api.store import AlreadyExists, NotFound
from rljob.local.objects import Manifest, meta
from rljob.local.store import MemoryStore


async def warn(store: MemoryStore, pod: Manifest, *, reason: str, message: str) -> None:
    metadata = meta(pod)
    digest = hashlib.sha256(f"{metadata['uid']}{reason}".encode()).hexdigest()[:10]
    name, now = f"{metadata['name']}.{digest}", times.text(times.utc_now())
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
            patch = {"count": count + 1, "lastTimestamp": now, "message": message}
            await store.patch("Event", name, patch=patch, namespace=metadata["namespace"])
        except NotFound:
            return  # taken away between the two; the next repeat makes it anew
