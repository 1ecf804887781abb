"""Names, labels, owner and hashes of all that the operator creates for one job. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rlinf_api import __version__, edits, names
from rlinf_api.job import RLJobSpec

Manifest: TypeAlias = dict[str, Any]
HASH_LENGTH: Final = 16
FIELD_HASH: Final = 8
"""Digits of each field's hash in the annotation of a pod: two values of one field are compared, not thousands."""
MOST_FIELDS: Final = 4  # named in one sentence
MAX_POD_MESSAGE: Final = 500
"""Characters of what a kubelet says of a pod that it ended (an eviction's sentence has 300): the cache may hold ten
thousand of them, and a condition names eight."""


NOT_ALL_READY: Final = "ContainersNotReady"
"""A kubelet's reason of condition Ready=False: some container is not, which need not be ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKey:
    """What queues and watches call a job; a job made again under its name has the same key and another uid."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeta:
    """Whose children are rendered."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where one driver attempt of one job is called."""

    job_uid: str
    attempt: int
    address: str


def labels(
    job: JobMeta, *, component: str = "", pool: str = "", ordinal: int | None = None, attempt: int = 0
) -> dict[str, str]:
    """rlinf.io/* say what it is, app.kubernetes.io/* tell other tools."""
    found = {
        names.LABEL_JOB: job.name,
        names.LABEL_JOB_UID: job.uid,
        "app.kubernetes.io/name": "rlinf",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": names.MANAGER,
        "app.kubernetes.io/version": __version__,
    }
    if component:
        found |= {names.LABEL_COMPONENT: component, "app.kubernetes.io/component": component}
    if pool:
        found[names.LABEL_POOL] = pool
    if ordinal is not None:
        found[names.LABEL_ORDINAL] = str(ordinal)
    if attempt:
        found[names.LABEL_ATTEMPT] = str(attempt)
    return found


def owner(job: JobMeta) -> list[Manifest]:
    """The RLJob owns everything, so that deleting it leaves nothing, without a finalizer."""
    return [
        {
            "apiVersion": names.API_VERSION,
            "kind": "RLJob",
            "name": job.name,
            "uid": job.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def metadata(job: JobMeta, name: str, *, label: dict[str, str], annotations: dict[str, str] | None = None) -> Manifest:
    found: Manifest = {"name": name, "namespace": job.namespace, "labels": label, "ownerReferences": owner(job)}
    if annotations:
        found["annotations"] = annotations
    return found


def is_anothers(job: Mapping[str, Any]) -> bool:
    """Whether another controller looks after this RLJob, and writes its status."""
    return (job.get("spec") or {}).get("managedBy", names.OPERATOR) != names.OPERATOR  # type: ignore[no-any-return]


def native_sidecars(pod: Manifest) -> frozenset[str]:
    """Init containers that go on beside the others and are started again when they end."""
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return frozenset(c["name"] for c in inits if c.get("restartPolicy") == "Always")


def digest(value: object) -> str:
    """A short stable hash of JSON-like data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def inputs(spec: RLJobSpec, pool: str = "") -> str:
    """What a pod is made from (edits.inputs), as its annotation keeps it: each field with a hash, so that what has
    changed can be named. For PPO on one pool that is

        flow.config=0f4c2a91,flow.name=6a1be0c4,pools[cpu].roles=...,roles[env].kind=...
    """
    found = edits.inputs(spec, pool)
    return ",".join(f"{field}={digest(found[field])[:FIELD_HASH]}" for field in sorted(found))


def moved(before: str, after: str) -> str:
    """Which fields two annotations of inputs differ in, as a sentence has it.

    >>> moved("flow.config=0f4c2a91,seed=11aa22bb", "flow.config=99887766,seed=11aa22bb")
    'spec.flow.config changed'
    """
    old, new = (dict(part.rpartition("=")[::2] for part in text.split(",")) for text in (before, after))
    fields = [f"spec.{field}" for field in edits.moved(old, new) if field]
    return f"{', '.join(fields[:MOST_FIELDS]) + (', ...' if len(fields) > MOST_FIELDS else '')} changed"
