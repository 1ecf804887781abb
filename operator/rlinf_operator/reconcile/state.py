"""What `decide` reads (Observed) and what it answers (Decision): frozen, no I/O, no memory of earlier passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from rlinf_api import names
from rlinf_api.job import RLJobStatus
from rlinf_api.plan import RLPlanSpec, RLPlanStatus
from rlinf_api.report import DriverReport, Goal
from rlinf_operator.manifests.asking import QueueOrder, QueueView
from rlinf_operator.manifests.metadata import JobKey, JobMeta, Manifest, Target
from rlinf_operator.policies.pod_view import PodView
from rlinf_operator.policies.runtime import RuntimeView


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    name: str
    revision: int
    uid: str = ""
    generation: int
    spec: RLPlanSpec | None
    """None: it cannot be read; `problem` says why."""
    status: RLPlanStatus
    problem: str = ""
    approved_by: str = ""
    """By its annotation."""
    stays: str = ""
    """By its annotation: why the scheduler writes no other, as `Best: revision 3 takes 0.1 s a step, ...`."""
    fewest: Mapping[str, int] = field(default_factory=dict)
    """By its annotation: pods of a pool below which the scheduler would have no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigView:
    inputs: str
    certificates_expire: datetime | None
    issuer: str = ""
    """Fingerprint of the CA that signed them; empty: an operator that did not write it down yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """The job's NetworkPolicy; `inputs` is the hash of what it was told to say."""

    uid: str
    inputs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverView:
    """The operator's connection to the driver of `attempt`."""

    attempt: int
    report: DriverReport | None = None
    silent_s: float = 0.0
    """Seconds without a connection: since it broke, or since the operator began to dial; 0 while it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    job: JobMeta
    manifest: Manifest
    """The RLJob as read, without `unknown`, and as if it had written itself what its runtime says."""
    generation: int
    deleting: bool
    created_at: datetime
    status: RLJobStatus
    pods: tuple[PodView, ...] = ()
    plans: tuple[PlanView, ...] = ()
    has_service: bool = False
    network_policy: PolicyView | None = None
    disruption_budget: str = ""
    """Uid of the one that keeps its driver from evictions; empty: there is none."""
    config: ConfigView | None = None
    driver: DriverView | None = None
    unknown: tuple[str, ...] = ()
    """Fields of the spec that this version does not have, where that is no reason to stop."""
    trusted: tuple[str, ...] = ()
    """Fingerprints of the CAs that count now."""
    runtime: RuntimeView | None = None
    """None: it names none, or has ended."""
    queue: QueueView | None = None
    """None: no queue has to do with it."""
    progress_due: bool = True
    """Whether step, progress and metrics may be written although nothing else changed."""

    @property
    def key(self) -> JobKey:
        return JobKey(namespace=self.job.namespace, name=self.job.name)

    def driver_of(self, life: int) -> tuple[PodView | None, DriverReport | None]:
        """The newest driver pod of this life, and what that very attempt reported; a report of another one is stale."""
        own = [p for p in self.pods if p.component == names.COMPONENT_DRIVER and p.life == life]
        driver = max(own, key=lambda p: p.attempt, default=None)
        report = self.driver.report if self.driver is not None else None
        if driver is None or report is None:
            return driver, None
        fitting = report.job_uid == self.job.uid and report.driver_attempt == driver.attempt
        return driver, report if fitting else None

    def is_fresh(self, life: int) -> bool:
        """No pod of this life was made yet."""
        status = self.status
        return status.attempt == 0 or life != status.life or not any(p.desired for p in status.pools)

    def silent_s(self, driver: PodView | None) -> float:
        """How long this very attempt has been silent. After a replacement the link is the old driver's for one pass."""
        link = self.driver
        return link.silent_s if driver is not None and link is not None and link.attempt == driver.attempt else 0.0


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    name: str
    uid: str
    """Precondition: the pod that was seen, not a later one of its name."""
    why: str
    for_successor: bool = False
    """Its successor is made in this pass; where that is refused it stays."""
    makes_room: str = ""
    """A live pod whose inputs changed counts in the quota that may refuse its successor. This is the entry of
    status.restarts under which it then goes all the same."""
    grace_period_s: int | None = None
    """Instead of the pod's own; None: its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruct:
    """Prepare, then Commit a plan. Idempotent by (driver attempt, revision)."""

    target: Target
    plan: RLPlanSpec
    steps: tuple[str, ...]
    """Some of Prepare, Commit, Abort; Abort is for whatever is on its way."""
    switches: int = 0
    """Plans put in force so far, as the status says."""
    uid: str = ""
    """The uid of the plan's object: another may bear its revision after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjust:
    """Tell the driver another goal. Idempotent."""

    target: Target
    goal: Goal
    why: str
    """What the spec says by now, and said before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    target: Target
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    pod: str = ""
    """Name of the pod that it is about; empty: the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Everything one pass writes. apply.py says in which order."""

    status: RLJobStatus
    request_plan: str = ""
    """Reason of RequestPlan ("Initial"); empty: none is needed."""
    highest_revision: int = 0
    plan_within: Mapping[str, int] | None = None
    """Most pods per pool that the plan may want; None: as many as the spec says."""
    queue: QueueOrder | None = None
    service: Manifest | None = None
    network_policy: Manifest | None = None
    """Missing, or it says something else: created, or patched."""
    delete_network_policy: str = ""
    """Uid of one that is not wanted any more."""
    disruption_budget: Manifest | None = None
    delete_disruption_budget: str = ""
    """Uid of one that is not wanted any more."""
    certificates: tuple[str, ...] = ()
    """Parts that must have a certificate; one that exists is kept."""
    renew_certificates: bool = False
    write_config: bool = False
    create_pods: tuple[Manifest, ...] = ()
    """Those of this pass, in the order in which they are made."""
    later_pods: tuple[str, ...] = ()
    """Names of those that the next pass makes."""
    late_pods: frozenset[str] = frozenset()
    """Names of those among all of them that only the plan on its way needs."""
    delete_pods: tuple[DeletePod, ...] = ()
    instruct: Instruct | None = None
    adjust: Adjust | None = None
    drain: Drain | None = None
    plan_statuses: tuple[tuple[str, RLPlanStatus], ...] = ()
    delete_plans: tuple[tuple[str, str], ...] = ()
    """(name, uid) of plans that nobody needs any more."""
    delete_job: bool = False
    ruled: tuple[str, ...] = ()
    """Actions of the rules of failurePolicy that were met in this pass."""
    events: tuple[Event, ...] = ()
    """Beyond those that the status' own changes become (events.of_transition)."""
    events_of_made: tuple[Event, ...] = ()
    """About what is made in this pass: told only where nothing of it was refused."""
    requeue_after_s: float | None = None
