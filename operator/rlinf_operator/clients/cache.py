"""The ObjectStore that the operator has on a cluster: children are read from copies that watches keep, the RLJob itself
is read live, writes go to the API server and show in the next read.

    store = CachedStore(api, namespaces=("team-a",), metrics=metrics, on_change=..., inactivity_s=90)
    async with asyncio.TaskGroup() as group:
        store.start(group)
        await store.wait_listed(timeout_s=60)

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| one Reflector per kind (and namespace) | see reflector.py | | |

What a decision may rest on (docs/adr/0004):

* the RLJob: as of now. Its status holds the numbers that fence (attempt, life, restarts), so no copy of it is trusted;
* pods, plans, Service, NetworkPolicy, PodDisruptionBudget, ConfigMap: as of the last watch event, and never older than
  this process' own last write; of an object whose last write failed and may be done all the same, as of now: a pod that
  was made so, and that no watch has brought yet, would pass for one that vanished, and be replaced and counted as a
  loss;
* whether the cluster has kinds of others (Kueue's Workload, PodGroup) at all: as of the last list, half a minute old at
  most;
* what a copy does not have may only be late: `get` asks the API server then, unless the caller is content with the
  copy. What is found so is in the copy from then on. Foreign objects, which lack the label that the copies are
  selected by, are found that way only, or by the 409 that answers a create.

Secrets are written and never read. Of each object only what a pass reads is kept (copies.py), as text; what `list` and
`get` return is the caller's own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from rlinf_api import names
from rlinf_api.errors import Conflict, DeadlineExceeded, InvariantBroken, RLinfError
from rlinf_api.store import Change, Listing, NotFound
from rlinf_operator.clients import api_errors, objects
from rlinf_operator.clients.kube import KubeApi
from rlinf_operator.clients.objects import Subresource
from rlinf_operator.clients.reflector import Reflector
from rlinf_operator.clients.refusals import Refusals
from rlinf_operator.manifests.metadata import Manifest
from rlinf_operator.metrics import Metrics

CACHED: Final = (
    "RLPlan", "Pod", "Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap", "Workload", "PodGroup",
)  # fmt: skip
OPTIONAL: Final = frozenset({"Workload", "PodGroup"})
"""Kinds of others, which a cluster may lack."""
MOST_DOUBTS: Final = 16_384  # all pods of a thousand jobs and half as many; the oldest is of a job that nobody reads
_METADATA_ONLY: Final = frozenset({"Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"})
_INDEXED: Final = {"Pod": (names.LABEL_JOB_UID,), "RLPlan": (names.LABEL_JOB,)}


class CachedStore:
    """Called from one event loop. Implements clients.objects.ObjectStore but `watch`: changes come by `on_change`."""

    def __init__(
        self,
        api: KubeApi,
        *,
        metrics: Metrics,
        on_change: Callable[[Manifest], None],
        inactivity_s: float,
        namespaces: Sequence[str] = (),
        namespace_selector: str = "",
        on_namespace: Callable[[str], None] = lambda namespace: None,
        watches: KubeApi | None = None,
        refusals: Refusals | None = None,
        on_job_written: Callable[[Manifest], None] = lambda job: None,
        on_silent: Callable[[], None] = lambda: None,
    ) -> None:
        """`namespace_selector`: of the namespaces whose jobs are run, where those are not listed; empty: all.
        `on_namespace`: told of each that begins or ceases to be one. `watches`: by whose connections lists and watches
        go, of which each holds one; None: the same. `refusals`: which of the namespaces are refused. `on_job_written`:
        told of the answer to each own write of an RLJob. `on_silent`: of each watch that was given up as it said
        nothing."""
        self._api, self._on_job_written = api, on_job_written
        self._doubts: OrderedDict[tuple[str, str, str], str] = OrderedDict()
        """Kind, namespace and name of what was written, perhaps, and the job by whose label it is listed."""
        self._refusals = refusals or Refusals(metrics=metrics)
        reflector = partial(
            Reflector, api=watches or api, metrics=metrics, inactivity_s=inactivity_s, refusals=self._refusals,
            on_silent=on_silent,
        )  # fmt: skip
        children = [
            reflector(
                kind,
                namespace=namespace,
                metadata_only=kind in _METADATA_ONLY,
                indexed=_INDEXED.get(kind, ()),
                on_change=on_change,
                optional=kind in OPTIONAL,
            )
            for kind in CACHED
            for namespace in (namespaces or (None,))
        ]
        self._selected = (
            reflector(
                "Namespace", namespace=None, metadata_only=True, indexed=(), label_selector=namespace_selector,
                on_change=lambda obj: on_namespace(obj["metadata"]["name"]),
            )
            if namespace_selector
            else None
        )  # fmt: skip
        self.reflectors: tuple[Reflector, ...] = (*children, *([self._selected] if self._selected is not None else ()))

    def start(self, group: asyncio.TaskGroup) -> None:
        for reflector in self.reflectors:
            group.create_task(reflector.run(), name=f"operator: watch of {reflector.kind}")

    async def wait_listed(self, *, timeout_s: float) -> None:
        """Before the first decision: what was not listed yet would be taken for missing. A namespace that is refused is
        not waited for, unless all are: then it is the operator's rights that are missing."""
        try:
            async with asyncio.timeout(timeout_s):
                for reflector in self.reflectors:
                    await reflector.asked.wait()
                while all(self._refusals.refuses(r.namespace) for r in self.reflectors):
                    await self._refusals.changed()
        except TimeoutError:
            missing = sorted({r.kind for r in self.reflectors if not r.listed.is_set() and r.kind not in OPTIONAL})
            raise DeadlineExceeded(
                "the first list of every kind", timeout_s=timeout_s, missing=", ".join(missing),
                next="look at the operator's Role and at the API server",
            ) from None  # fmt: skip

    # --- reads --------------------------------------------------------------------------------------------------------

    async def get(self, kind: str, name: str, *, namespace: str = "default", live: bool = True) -> Manifest:
        self._refusals.check(namespace)
        reflector = self._reflector(kind, namespace)
        if reflector is None:
            return await self._api.get(kind, name, namespace=namespace)
        if (kind, namespace, name) not in self._doubts:
            if (known := reflector.get(namespace, name)) is not None:
                return known
            if not live:
                raise NotFound(f"{kind} {namespace}/{name} is in no copy")
        return await self._look(reflector, name, namespace=namespace)

    async def list(self, kind: str, *, namespace: str, label_selector: str) -> Listing:
        """One job's objects, by one `label=value`."""
        self._refusals.check(namespace)
        label, _, value = label_selector.partition("=")
        reflector = self._reflector(kind, namespace)
        if reflector is None or label not in _INDEXED.get(kind, ()) or not value:
            raise InvariantBroken(f"list of {kind} in {namespace} from the cache", got=label_selector, wanted="a job")
        doubted = [name for (*of, name), job in self._doubts.items() if (*of, job) == (kind, namespace, value)]
        asked = (objects.get_or_none(self, kind, name, namespace=namespace) for name in doubted)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
        return Listing(items=reflector.of(namespace, label, value=value), resource_version="")

    def serves(self, kind: str, namespace: str) -> bool:
        """Whether the API server has this kind, by its last answer to a list."""
        reflector = self._reflector(kind, namespace)
        return reflector is not None and reflector.listed.is_set()

    def runs_jobs_of(self, namespace: str) -> bool:
        """Whether its labels say so; by the last watch event."""
        return self._selected is None or bool(self._selected.uid("", namespace))

    def watch(self, kind: str) -> AsyncIterator[Change]:
        raise InvariantBroken(f"watch of {kind} through the cache", wanted="on_change, or Kopf's handlers")

    def age_s(self) -> dict[str, float]:
        """Per kind, the longest silence of its watches."""
        found: dict[str, float] = {}
        for reflector in self.reflectors:
            kind = reflector.kind
            found[kind] = max(found.get(kind, 0.0), reflector.age_s())
        return found

    def counts(self) -> dict[str, int]:
        found = dict.fromkeys((reflector.kind for reflector in self.reflectors), 0)
        for reflector in self.reflectors:
            found[reflector.kind] += len(reflector)
        return found

    # --- writes -------------------------------------------------------------------------------------------------------

    async def create(self, obj: Manifest) -> Manifest:
        meta = obj["metadata"]
        with self._doubted(obj["kind"], meta.get("name", ""), namespace=meta["namespace"], labels=meta.get("labels")):
            return self._wrote(await self._api.create(obj))

    async def replace(self, obj: Manifest, *, subresource: Subresource = "") -> Manifest:
        meta = obj["metadata"]
        with self._doubted(obj["kind"], meta["name"], namespace=meta["namespace"], labels=meta.get("labels")):
            return self._wrote(await self._api.replace(obj, subresource=subresource))

    async def patch(
        self, kind: str, name: str, *, patch: Manifest, namespace: str = "default", subresource: Subresource = ""
    ) -> Manifest:
        with self._doubted(kind, name, namespace=namespace):
            return self._wrote(
                await self._api.patch(kind, name, patch=patch, namespace=namespace, subresource=subresource)
            )

    async def delete(
        self, kind: str, name: str, *, namespace: str = "default", uid: str = "", grace_period_s: int | None = None
    ) -> None:
        with self._doubted(kind, name, namespace=namespace):
            answer = await self._api.delete(kind, name, namespace=namespace, uid=uid, grace_period_s=grace_period_s)
        reflector = self._reflector(kind, namespace)
        if reflector is None:
            return
        if answer.get("kind") == kind:
            reflector.wrote(answer)
        elif gone := uid or str((answer.get("details") or {}).get("uid") or ""):
            reflector.removed(namespace, name, uid=gone)

    # --- own ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _doubted(
        self, kind: str, name: str, *, namespace: str, labels: Mapping[str, str] | None = None
    ) -> Iterator[None]:
        """Around a write. Where it fails and may be done, or the API server has something else under the name than the
        copy has (404, 409), the copy is not believed until the object was looked at."""
        try:
            yield
        except (RLinfError, asyncio.CancelledError) as error:
            reflector = self._reflector(kind, namespace)
            told = isinstance(error, (Conflict, NotFound, asyncio.CancelledError)) or api_errors.may_be_done(error)
            if reflector is not None and told:
                known = reflector.labels(namespace, name) if labels is None else labels
                of = (known.get(label, "") for label in _INDEXED.get(kind, ()))
                self._doubts[kind, namespace, name] = next(of, "")
                self._doubts.move_to_end((kind, namespace, name))
                if len(self._doubts) > MOST_DOUBTS:
                    self._doubts.popitem(last=False)
            raise

    async def _look(self, reflector: Reflector, name: str, *, namespace: str) -> Manifest:
        """As of now; the copy, which is late, has it from now on."""
        kind, before = reflector.kind, reflector.uid(namespace, name)
        try:
            found = await self._api.get(kind, name, namespace=namespace)
        except NotFound:
            if before:
                reflector.removed(namespace, name, uid=before)
            self._doubts.pop((kind, namespace, name), None)
            raise
        if names.LABEL_JOB in (found["metadata"].get("labels") or {}):
            reflector.saw(found)
        self._doubts.pop((kind, namespace, name), None)
        return found

    def _wrote(self, obj: Manifest) -> Manifest:
        meta = obj["metadata"]
        if obj.get("kind") == "RLJob":
            self._on_job_written(obj)
        reflector = self._reflector(str(obj.get("kind")), str(meta.get("namespace")))
        if reflector is not None and names.LABEL_JOB in (meta.get("labels") or {}):
            reflector.wrote(obj)
        return obj

    def _reflector(self, kind: str, namespace: str) -> Reflector | None:
        for reflector in self.reflectors:
            if reflector.kind == kind and reflector.namespace in (None, namespace):
                return reflector
        return None
