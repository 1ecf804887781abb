"""What was measured, where it outlives scheduler and job: an RLProfile for each key, in the namespace of the jobs.

    kept = KeptProfiles(store)
    await kept.write(reports, namespace="team")         # after a decision that learnt something; the last job's stay
    await kept.read("sha256:77ab...", namespace="team")  # at a first plan, or a first report that this process hears

At most MAX_KEPT in a namespace, of KEPT_REPORTS and MAX_KEPT_BYTES each. Nothing depends on them: where one cannot be
written, or is not what this version wrote, the job measures anew, and the log says why. Also here: what the scheduler
asks of a store (`PlanStore`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol

from pydantic import ValidationError

from rlinf_api import names, sentences, times
from rlinf_api.errors import RLinfError
from rlinf_api.profile import KEPT_REPORTS, Profile, RLProfileSpec, forget
from rlinf_api.store import AlreadyExists, Listing, NotFound

logger = logging.getLogger(__name__)
Manifest = dict[str, Any]
KIND: Final = "RLProfile"
MAX_KEPT: Final = 50  # in a namespace: as many kinds of jobs as a team has in a year
MAX_KEPT_BYTES: Final = 512 * 1024  # of one object: etcd takes 1.5 MiB; eight reports have 20 to 80 KB
READ_S: Final = 2.0  # a first plan waits for it, and its asker waits 10 s
OURS: Final = {"app.kubernetes.io/name": "rlinf", "app.kubernetes.io/managed-by": "rlinf-scheduler"}
SELECTOR: Final = "app.kubernetes.io/managed-by=rlinf-scheduler"


class PlanStore(Protocol):
    """Called from one event loop; an ObjectStore is one."""

    async def create(self, obj: Manifest) -> Manifest:
        """AlreadyExists where the name is taken."""
        ...

    async def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest:
        """NotFound where there is none."""
        ...

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing: ...

    async def patch(self, kind: str, name: str, *, patch: Manifest, namespace: str = "default") -> Manifest: ...

    async def delete(self, kind: str, name: str, *, namespace: str = "default") -> object:
        """NotFound where there is none."""
        ...


class KeptProfiles:
    def __init__(self, store: PlanStore) -> None:
        self._store = store

    async def read(self, key: str, *, namespace: str) -> tuple[Profile, ...]:
        """Empty where nothing was measured, or it cannot be read."""
        name = names.profile_name(key)
        where = {"profile": f"{namespace}/{name}"}
        try:
            async with asyncio.timeout(READ_S):
                found = await self._store.get(KIND, name, namespace=namespace)
            spec = RLProfileSpec.model_validate(found.get("spec"))
        except NotFound:
            return ()
        except ValidationError as error:
            said = "; ".join(map(str, sentences.problems(error, RLProfileSpec, value=found.get("spec"), prefix="spec")))
            logger.warning("a stored profile cannot be used", extra=where | {"error": said[:500]})
            return ()
        except (RLinfError, TimeoutError) as error:
            logger.warning("a stored profile cannot be read", extra=where | {"error": str(error) or "no answer"})
            return ()
        return tuple(spec.reports) if spec.key == key else ()

    async def write(self, reports: Sequence[Profile], *, namespace: str) -> bool:
        """Stores reports of one job, at least one. The newest one's key counts. False: it is not there, and the log
        says why."""
        spec = _fitting(reports)
        name = names.profile_name(reports[-1].key)
        where = {"profile": f"{namespace}/{name}"}
        if spec is None:
            logger.warning("a report is too large to be stored", extra=where | {"most_bytes": MAX_KEPT_BYTES})
            return False
        try:
            try:
                await self._store.patch(KIND, name, patch={"spec": spec}, namespace=namespace)
            except NotFound:
                await self._create(name, spec, namespace=namespace)
        except RLinfError as error:
            logger.warning("a profile cannot be stored", extra=where | {"error": str(error)})
            return False
        return True

    async def _create(self, name: str, spec: Manifest, *, namespace: str) -> None:
        obj = {
            "apiVersion": names.API_VERSION, "kind": KIND,
            "metadata": {"name": name, "namespace": namespace, "labels": {**OURS}},
            "spec": spec,
        }  # fmt: skip
        try:
            await self._store.create(obj)
        except AlreadyExists:  # another scheduler's, a moment ago: as good
            return
        there = (await self._store.list(KIND, namespace=namespace, label_selector=SELECTOR)).items
        there.sort(key=lambda one: str(one["spec"].get("updated", "")))
        for old in there[:-MAX_KEPT]:
            gone = str(old["metadata"]["name"])
            logger.info("an old profile goes", extra={"profile": f"{namespace}/{gone}", "most": MAX_KEPT})
            try:
                await self._store.delete(KIND, gone, namespace=namespace)
            except NotFound:
                continue


def _fitting(reports: Sequence[Profile]) -> Manifest | None:
    """The spec, of as many reports as fit."""
    newest = reports[-1]
    own = [report for report in reports if (report.key, report.job) == (newest.key, newest.job)]
    for most in range(KEPT_REPORTS, 0, -1):
        forget(own, most=most)
        if sum(len(report.to_json()) for report in own) <= MAX_KEPT_BYTES:
            spec = RLProfileSpec(
                key=newest.key, job=newest.job, steps=newest.last_step, updated=times.text(times.utc_now()), reports=own
            )
            return spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return None
