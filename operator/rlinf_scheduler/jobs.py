"""What the scheduler knows of running jobs, and the task that decides on their next plans: after each report of a
driver it reads the job and its plans, asks replan/decide.py, and writes what comes of it.

| task | consumes | waits for | unblocked by |
|---|---|---|---|
| Jobs.run | jobs with a new report | a report; the store; a decision in a thread | add(); its deadline; its bound |

It holds nothing that must not be lost. What a decision learnt is kept in the store (kept.py), further profiles come
with the next steps, and which plans were tried, failed or rolled back stands in the plans: a scheduler that is started
again goes on where the one before stood, a search later. What is known of a job that has ended is where the next one
with the same key begins.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rlinf_api import conditions, job, names, runtimes, times
from rlinf_api.conditions import Condition, PlanCondition, Reason
from rlinf_api.errors import InvalidManifest, RLinfError
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import RLPlanSpec
from rlinf_api.profile import Profile, forget, key_of
from rlinf_api.store import AlreadyExists, NotFound
from rlinf_scheduler.kept import OURS, KeptProfiles, Manifest, PlanStore
from rlinf_scheduler.planner.initial import fewest_pods
from rlinf_scheduler.replan.decide import NextPlan, Stay, decide
from rlinf_scheduler.replan.known import NOBODY_KILLED, Case, Known, PlanRecord

logger = logging.getLogger(__name__)
MAX_JOBS: Final = 1_000  # the job whose report is oldest goes first: it has most likely ended
MAX_REPORTS: Final = 100  # one job's; of its last 50 minutes, 10 KB each
MAX_GIVEN: Final = 10  # profiles from files: a run gives one
KEEP_S: Final = 600.0
"""Between two writes of a profile of which no decision has learnt anything: drift, which takes as long."""
UNREAD: Final = "Unread"
"""What a decision is called that could not be made: the store did not answer, or the job is gone."""
BROKE: Final = "Broke"
TOLD: Final = frozenset({"Unfit", "Best", "NotWorthIt", "NoneLeft"})
"""Codes that a person reads at the plan that stays: the others pass by themselves, or stand in the job's spec."""


@dataclass(slots=True)
class _Heard:
    """What is known of one job."""

    namespace: str
    reports: list[Profile] = field(default_factory=list)
    considered: int = 0
    """The last step up to which no better plan was found."""
    settled: int = 0
    """The revision that was in force then."""
    judged_by: tuple[Profile, ...] = ()
    """Its newest reports then; at most those that make five steps."""
    generation: int = 0
    """The generation of the spec that was looked at then."""
    again_at: float = 0.0
    """When all candidates are looked at again, as there may be nodes for more pods."""
    said: Stay | None = None
    told: tuple[int, str] = (0, "")
    """The plan that was told last why it stays, by its revision, and the code that stands at it."""
    keep_at: float = 0.0
    """From when on, by the loop's clock, it is kept although no decision has learnt anything; 0: it never was."""


class Jobs:
    """Profiles that drivers report, by job; at most MAX_JOBS x MAX_REPORTS: charged by add(), freed as forget() does.
    `on_decision(code, seconds)`: for metrics."""

    def __init__(
        self, store: PlanStore, *, on_decision: Callable[[str, float], None] = lambda code, seconds: None
    ) -> None:
        self._store, self._on_decision, self._kept = store, on_decision, KeptProfiles(store)
        self._known: OrderedDict[str, _Heard] = OrderedDict()
        self._killed: OrderedDict[str, tuple[int, Mapping[str, int]]] = OrderedDict()
        self._given: OrderedDict[str, tuple[Profile, ...]] = OrderedDict()
        self._news: OrderedDict[str, None] = OrderedDict()
        self._wake = asyncio.Event()

    # --- what is known ------------------------------------------------------------------------------------------------
    def add(self, profile: Profile, *, namespace: str) -> None:
        uid = profile.job.uid
        reports = self._known.setdefault(uid, _Heard(namespace)).reports
        reports.append(profile)
        forget(reports, most=MAX_REPORTS)
        self._known.move_to_end(uid)
        while len(self._known) > MAX_JOBS:
            gone, _ = self._known.popitem(last=False)
            self._news.pop(gone, None)
            self._killed.pop(gone, None)
        self._news[uid] = None
        self._wake.set()

    def killed(self, of_role: Mapping[str, int], *, revision: int, job_uid: str) -> None:
        """Under which plan's revision workers were killed for memory, and how many of each role. A scheduler that is
        started again may hear it ahead of the job's first report: then it waits for that."""
        self._killed[job_uid] = (revision, dict(of_role))
        self._killed.move_to_end(job_uid)
        while len(self._killed) > MAX_JOBS:
            self._killed.popitem(last=False)
        if job_uid in self._known:
            self._news[job_uid] = None
            self._wake.set()

    def of(self, job_uid: str) -> tuple[Profile, ...]:
        known = self._known.get(job_uid)
        return tuple(known.reports) if known is not None else ()

    async def recall(self, profile: Profile, *, namespace: str) -> None:
        """Ahead of the first report that this process hears of a job: what was kept of that very job."""
        uid = profile.job.uid
        if uid in self._known:
            return
        kept = await self._kept.read(profile.key, namespace=namespace)
        earlier = [one for one in kept if one.job == profile.job and one.last_step < profile.first_step]
        if earlier and uid not in self._known:  # another report of it may have been quicker
            self._known[uid] = _Heard(namespace, earlier)

    async def to_begin(self, spec: RLJobSpec, *, namespace: str, job_uid: str) -> tuple[Profile, ...]:
        """What a plan may begin with: what this process heard, else what was kept."""
        known = self.before(spec, namespace=namespace, job_uid=job_uid)
        return known or await self._kept.read(key_of(spec), namespace=namespace)

    def before(self, spec: RLJobSpec, *, namespace: str, job_uid: str) -> tuple[Profile, ...]:
        """What a plan may begin with: reports with its key, of the job itself, else of the last one of its namespace.
        No other's, as the plan's reason names whose they are."""
        key = key_of(spec)
        if own := self.of(job_uid):
            return tuple(profile for profile in own if profile.key == key)
        known = reversed(self._known.values())
        found = (one.reports for one in known if one.namespace == namespace and one.reports[-1].key == key)
        return tuple(next(found, ())) or self._given.get(key, ())

    def remember(self, profiles: tuple[Profile, ...]) -> None:
        """Keeps the profiles of a job that this process has heard nothing of; one at least, all with one key."""
        self._given[profiles[-1].key] = profiles
        while len(self._given) > MAX_GIVEN:
            self._given.popitem(last=False)

    def knows_plan(self, profile: Profile) -> bool:
        """Whether something was measured under its plan before."""
        return any(known.revision == profile.revision for known in self.of(profile.job.uid))

    def said(self, job_uid: str) -> Stay | None:
        """Why the job keeps its plan, as of the last decision; None: it was given another, or none was made."""
        known = self._known.get(job_uid)
        return known.said if known is not None else None

    # --- deciding -----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            while self._news:
                uid, _ = self._news.popitem(last=False)
                await self.consider(uid)
            self._wake.clear()
            await self._wake.wait()

    async def consider(self, job_uid: str) -> None:
        """One decision. What goes wrong costs this one; the next report brings another."""
        known, begun = self._known.get(job_uid), time.monotonic()
        if known is None:
            return
        try:
            code = await self._decided(known)
        except RLinfError as error:
            logger.warning("no decision on a plan", extra={"job_uid": job_uid, "error": str(error)})
            code = UNREAD
        except Exception:
            logger.exception("a decision on a plan broke; the job keeps its plan", extra={"job_uid": job_uid})
            code = BROKE
        self._on_decision(code, time.monotonic() - begun)

    async def _decided(self, known: _Heard) -> str:
        ref = known.reports[-1].job
        where = f"{known.namespace}/{ref.name}"
        found = await self._store.get("RLJob", ref.name, namespace=known.namespace)
        if found["metadata"].get("uid") != ref.uid:
            raise NotFound(f"RLJob {where} of uid {ref.uid}", got=f"uid {found['metadata'].get('uid')}")
        selector = f"{names.LABEL_JOB}={ref.name}"
        listed = await self._store.list("RLPlan", namespace=known.namespace, label_selector=selector)
        merged = runtimes.of_job(found)
        spec, now = job.RLJobSpec.model_validate(merged["spec"]), time.time()
        generation = int(found["metadata"].get("generation") or 0)
        was_edited = known.generation not in (0, generation)  # it may have more pods, or they may have a price
        case = case_of(
            spec, listed.items, job_uid=ref.uid, profiles=tuple(known.reports), considered=known.considered,
            settled=known.settled, judged_by=known.judged_by, now=now, again=was_edited or 0 < known.again_at <= now,
            killed=self._killed.get(ref.uid, NOBODY_KILLED),
        )  # fmt: skip
        revision = known.reports[-1].revision  # another report may come while it is decided
        decision = await asyncio.to_thread(decide, case)
        await self._keep(known, decision)
        if isinstance(decision, Stay):
            if decision.considered:
                known.generation, known.again_at = generation, decision.again_at
                known.considered, known.settled = decision.considered, revision
                known.judged_by = Known(case).newest
            elif decision.again_at:  # a plan has found no node since then
                known.again_at = known.again_at or decision.again_at
            if known.said is None or known.said.code != decision.code:
                logger.info("the plan stays", extra={"job": where, "code": decision.code, "why": decision.why})
            known.said = decision
            await self._tell(known, ref.name, decision, revision=revision)
            return decision.code
        known.said = None
        plan = decision.plan
        try:
            fewest = await fewest_of(spec, plan, merged)
            await self._store.create(plan_manifest(plan, namespace=known.namespace, fewest=fewest))
        except AlreadyExists:
            logger.info("another took the revision", extra={"job": where, "revision": plan.revision})
            return UNREAD
        known.generation, known.again_at = generation, 0.0
        said = {"job": where, "revision": plan.revision, "code": str(plan.reason.code), "why": plan.reason.message}
        logger.info("plan written", extra=said)
        return str(plan.reason.code)

    async def _keep(self, known: _Heard, decision: Stay | NextPlan) -> None:
        """What a decision learnt something of: a search, or the plan that came of it. Once that was so, further
        reports every KEEP_S."""
        now = asyncio.get_running_loop().time()
        has_learnt = not isinstance(decision, Stay) or bool(decision.considered)
        if not (has_learnt or 0 < known.keep_at <= now):
            return
        if await self._kept.write(tuple(known.reports), namespace=known.namespace):
            known.keep_at = now + KEEP_S

    async def _tell(self, known: _Heard, job_name: str, stay: Stay, *, revision: int) -> None:
        """At the plan that stays, where the operator and `rljob plan explain` read it: once for each search, and for
        each plan that cannot be improved on. Where it cannot be written it is tried again at the next decision.
        `revision`: of the plan that was decided on."""
        if stay.code not in TOLD or (not stay.considered and known.told == (revision, stay.code)):
            return
        patch = {"metadata": {"annotations": {names.ANNOTATION_STAYS: f"{stay.code}: {stay.why}"[: names.MAX_STAYS]}}}
        name = names.plan_name(job_name, revision)
        try:
            await self._store.patch("RLPlan", name, patch=patch, namespace=known.namespace)
        except RLinfError as error:
            logger.warning("why the plan stays cannot be written", extra={"plan": name, "error": str(error)})
            return
        known.told = (revision, stay.code)


def case_of(
    spec: RLJobSpec,
    plans: list[Manifest],
    *,
    job_uid: str,
    profiles: tuple[Profile, ...],
    considered: int = 0,
    settled: int = 0,
    judged_by: tuple[Profile, ...] = (),
    now: float = 0.0,
    again: bool = False,
    killed: tuple[int, Mapping[str, int]] = NOBODY_KILLED,
) -> Case:
    """`plans`: objects as a store has them. Those of another job of the name are none of its; one that cannot be read
    is counted by its name alone."""
    records, highest = [], 0
    for plan in plans:
        name = str(plan["metadata"]["name"])
        said = name.rpartition("-p")[2]
        highest = max(highest, int(said) if said.isdecimal() else 0)
        try:
            found = RLPlanSpec.model_validate(plan.get("spec"))
        except ValueError:
            continue
        if found.job.uid == job_uid:
            highest = max(highest, found.revision)
            known = _conditions(plan)
            failure = conditions.find(known, PlanCondition.FAILED)
            if failure is not None and failure.status != "True":
                failure = None
            no_node = failure is not None and failure.reason == Reason.UNSCHEDULABLE
            applied = conditions.find(known, PlanCondition.APPLIED)
            records.append(
                PlanRecord(
                    spec=found, failed=failure is not None,
                    no_node_at=_seconds(failure) if failure is not None and no_node else 0.0,
                    was_in_force=applied is not None,
                    is_in_force=applied is not None and applied.status == "True",
                )
            )  # fmt: skip
    records.sort(key=lambda record: record.spec.revision)
    return Case(
        job=spec, plans=tuple(records), profiles=profiles, considered=considered, settled=settled, judged_by=judged_by,
        highest=highest, now=now, again=again, killed=killed,
    )  # fmt: skip


def _seconds(condition: Condition) -> float:
    """Since 1970, of when it came about."""
    at = times.parse(condition.last_transition_time)
    return at.timestamp() if at is not None else 0.0


def _conditions(plan: Manifest) -> list[Condition]:
    status: Mapping[str, Any] = plan.get("status") or {}
    try:
        return [Condition.model_validate(condition) for condition in status.get("conditions") or ()]
    except ValueError as error:
        raise InvalidManifest(f"status of RLPlan {plan['metadata']['name']}", got=str(error)) from error


async def fewest_of(spec: RLJobSpec, plan: RLPlanSpec, manifest: Manifest) -> dict[str, int]:
    """How few pods of each pool a job could be given, where it has a queue. It takes some first plans, perhaps of
    thousands of pods: in a thread."""
    if not (manifest["metadata"].get("labels") or {}).get(names.LABEL_QUEUE):
        return {}
    return await asyncio.to_thread(fewest_pods, spec, {pool.name: pool.pods for pool in plan.pools})


def plan_manifest(plan: RLPlanSpec, *, namespace: str, fewest: Mapping[str, int] | None = None) -> Manifest:
    """The object, owned by its job."""
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "RLJob",
        "name": plan.job.name,
        "uid": plan.job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": "RLPlan",
        "metadata": {
            "name": names.plan_name(plan.job.name, plan.revision),
            "namespace": namespace,
            "labels": {
                names.LABEL_JOB: plan.job.name,
                names.LABEL_JOB_UID: plan.job.uid,
                **OURS,
            },
            **({"annotations": {names.ANNOTATION_FEWEST: json.dumps(fewest)}} if fewest else {}),
            "ownerReferences": [owner],
        },
        "spec": job.dump(plan),
    }
