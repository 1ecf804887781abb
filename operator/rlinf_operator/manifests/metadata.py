"""Names, labels, owner and hashes of all that the operator creates for one job. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rlinf_api import __version__, names
from rlinf_api.job import RLJobSpec

Manifest: TypeAlias = dict[str, Any]
HASH_LENGTH: Final = 16
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


def native_sidecars(pod: Manifest) -> frozenset[str]:
    """Init containers that go on beside the others and are started again when they end."""
    inits = (pod.get("spec") or {}).get("initContainers") or []
    return frozenset(c["name"] for c in inits if c.get("restartPolicy") == "Always")


def digest(value: object) -> str:
    """A short stable hash of JSON-like data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def inputs_hash(spec: RLJobSpec, pool: str = "") -> str:
    """A hash of what a pod is made from: the driver's (no pool), or a pool's worker pods'.

    Counts of pods, workers and spares, suspend, deadlines, policies are no inputs: they change without replacing a pod.
    Values that equal their defaults are left out, so a newer operator that knows more fields finds the same hash.
    """
    dumped: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    common: Manifest = {key: dumped[key] for key in ("seed", "flow", "model", "data", "checkpoint") if key in dumped}
    roles: list[Manifest] = [
        {k: v for k, v in role.items() if k not in ("workers", "spares")} for role in dumped["roles"]
    ]
    if not pool:
        return digest(common | {"roles": roles})
    own: Manifest = next(p for p in dumped["pools"] if p["name"] == pool)
    return digest(common | {"roles": roles, "pool": {k: v for k, v in own.items() if k != "pods"}})
