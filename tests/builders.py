"""Builders of what tests of the control plane are about: a job, its plans and pods, a driver's word, what was observed.

    world = make_job("ppo").role("env", "gymnasium", workers=(2, 8)).pool("sim", ["env"], per_pod=4).world()
    world = world.planned().created().all_ready().report(state=DriverState.RUNNING, plan_revision=1)
    decision = world.decide()

A World is changed in place and every method gives it back. Nothing here knows how the operator decides.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from rlinf_api import job as api
from rlinf_api import names, times
from rlinf_api.job import RLJobSpec, RLJobStatus
from rlinf_api.plan import JobRef, RLPlanSpec, RLPlanStatus
from rlinf_api.report import DriverReport, DriverState, Failure
from rlinf_operator.manifests.asking import QueueView
from rlinf_operator.manifests.metadata import JobMeta
from rlinf_operator.policies import pod_view
from rlinf_operator.reconcile.decide import decide
from rlinf_operator.reconcile.state import ConfigView, Decision, DriverView, Observed, PlanView, PolicyView
from rlinf_operator.settings import DEFAULTS, OperatorSettings
from rlinf_scheduler.planner.initial import initial

Manifest = dict[str, Any]
NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
UID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


class JobBuilder:
    def __init__(self, flow: str, *, name: str = "math", namespace: str = "team") -> None:
        self.manifest: Manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "RLJob",
            "metadata": {"name": name, "namespace": namespace, "uid": UID, "generation": 1, "resourceVersion": "1"},
            "spec": {"flow": {"name": flow}, "roles": [], "pools": []},
        }

    @property
    def spec(self) -> Manifest:
        found: Manifest = self.manifest["spec"]
        return found

    def role(self, name: str, kind: str, *, workers: int | tuple[int, int] = 1, slots: int = 1, **more: Any) -> Self:
        entry = {"name": name, "kind": kind, "workers": _range(workers), "slotsPerWorker": slots, **more}
        self.spec["roles"].append(entry)
        return self

    def pool(
        self, name: str, roles: Sequence[str], *, pods: int | tuple[int, int] = 1, per_pod: int = 4, **more: Any
    ) -> Self:
        slots = {"perPod": per_pod, **more.pop("slots", {})}
        self.spec["pools"].append({"name": name, "roles": list(roles), "pods": _range(pods), "slots": slots, **more})
        return self

    def with_spec(self, **fields: Any) -> Self:
        """Further fields of the spec, as the manifest spells them."""
        self.spec.update(fields)
        return self

    def build(self) -> Manifest:
        return copy.deepcopy(self.manifest)

    def parsed(self) -> RLJobSpec:
        return RLJobSpec.model_validate(self.spec)

    def world(self, *, settings: OperatorSettings = DEFAULTS) -> World:
        return World(self.build(), settings=settings)


def _range(value: int | tuple[int, int]) -> Any:
    return value if isinstance(value, int) else {"min": value[0], "max": value[1]}


def make_job(flow: str = "ppo", **kwargs: str) -> JobBuilder:
    """Without roles and pools yet."""
    return JobBuilder(flow, **kwargs)


def ppo_job(**kwargs: str) -> JobBuilder:
    """Two simulator pods with four slots each, one trainer pod with two."""
    return (
        make_job("ppo", **kwargs)
        .role("env", "gymnasium", workers=8)
        .role("rollout", "torch")
        .role("actor", "fsdp")
        .pool("sim", ["env"], pods=2, per_pod=4)
        .pool("train", ["rollout", "actor"], pods=1, per_pod=2)
    )


class World:
    """What exists of one job, and the clock."""

    def __init__(self, manifest: Manifest, *, settings: OperatorSettings = DEFAULTS) -> None:
        self.manifest, self.settings, self.now = manifest, settings, NOW
        meta = manifest["metadata"]
        self.job = JobMeta(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
        self.status = RLJobStatus()
        self.pods: dict[str, Manifest] = {}
        self.plans: list[PlanView] = []
        self.has_service = False
        self.network_policy: PolicyView | None = None
        self.config: ConfigView | None = None
        self.link: DriverView | None = None
        self.queue: QueueView | None = None
        self.progress_due, self.deleting = True, False
        self._uids = 0

    # --- the operator's side ------------------------------------------------------------------------------------------
    def observed(self) -> Observed:
        return Observed(
            job=self.job,
            manifest=self.manifest,
            generation=self.manifest["metadata"]["generation"],
            deleting=self.deleting,
            created_at=NOW,
            status=self.status,
            pods=tuple(pod_view.view(p) for p in self.pods.values()),
            plans=tuple(self.plans),
            has_service=self.has_service,
            network_policy=self.network_policy,
            config=self.config,
            driver=self.link,
            queue=self.queue,
            progress_due=self.progress_due,
        )

    def decide(self) -> Decision:
        return decide(self.observed(), now=self.now, settings=self.settings)

    def step(self) -> Decision:
        """One pass, fully applied."""
        decision = self.decide()
        self.apply(decision)
        return decision

    def apply(self, decision: Decision) -> Self:
        if decision.request_plan:
            self.planned(revision=decision.highest_revision + 1)
        self.has_service = self.has_service or decision.service is not None
        if decision.network_policy is not None:
            inputs = decision.network_policy["metadata"]["annotations"][names.ANNOTATION_INPUTS]
            self.network_policy = PolicyView(uid="policy", inputs=inputs)
        if decision.delete_network_policy:
            self.network_policy = None
        if decision.write_config:
            self._write_config()
        for pod in decision.create_pods:
            if pod["metadata"]["name"] not in self.pods:  # otherwise 409, which is success
                self._add(pod)
        self.status = decision.status
        for deleted in decision.delete_pods:
            if self.pods.get(deleted.name, {}).get("metadata", {}).get("uid") == deleted.uid:
                del self.pods[deleted.name]
        return self

    # --- what happens -------------------------------------------------------------------------------------------------
    def planned(self, *, revision: int = 1) -> Self:
        spec = RLJobSpec.model_validate(self.manifest["spec"])
        plan = initial(spec, job=JobRef(name=self.job.name, uid=self.job.uid), revision=revision)
        assert isinstance(plan, RLPlanSpec), str(plan)
        return self.with_plan(plan)

    def with_plan(self, plan: RLPlanSpec) -> Self:
        name = names.plan_name(self.job.name, plan.revision)
        self.plans.append(PlanView(name=name, revision=plan.revision, generation=1, spec=plan, status=RLPlanStatus()))
        return self

    def created(self) -> Self:
        """Passes until nothing new is created: plan, Service, ConfigMap, pods."""
        for _ in range(5):
            if not (self.step().create_pods or not self.pods):
                return self
        raise AssertionError("still creating pods after five passes")

    def started(self) -> Self:
        """All pods ready and the driver at work under the current plan."""
        self.created().all_ready()
        return self.report(state=DriverState.RUNNING, plan_revision=max(p.revision for p in self.plans))

    def ready(self, name: str, *, node: str = "n1") -> Self:
        pod = self.pods[name]
        pod["spec"]["nodeName"] = node
        pod["status"] |= {
            "phase": "Running",
            "podIP": "10.1.0.7",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {"name": _main(pod), "ready": True, "state": {"running": {"startedAt": times.text(self.now)}}}
            ],
        }
        return self

    def all_ready(self) -> Self:
        for name, pod in self.pods.items():
            if pod["status"]["phase"] == "Pending":
                self.ready(name)
        return self

    def waiting(self, name: str, *, reason: str = "", message: str = "", unschedulable: str = "") -> Self:
        pod = self.pods[name]
        if unschedulable:
            pod["status"]["conditions"] = [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": unschedulable}
            ]
        else:
            state = {"waiting": {"reason": reason, "message": message}}
            pod["status"]["containerStatuses"] = [{"name": _main(pod), "ready": False, "state": state}]
        return self

    def exited(
        self, name: str, code: int, *, reason: str = "", words: Failure | str | None = None, pod_reason: str = ""
    ) -> Self:
        pod = self.pods[name]
        text = json.dumps(dataclasses.asdict(words)) if isinstance(words, Failure) else words or ""
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": text,
            "finishedAt": times.text(self.now),
        }
        pod["status"] |= {
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": [{"type": "Ready", "status": "False"}],
            "containerStatuses": [{"name": _main(pod), "ready": False, "state": {"terminated": ended}}],
            **({"reason": pod_reason} if pod_reason else {}),
        }
        return self

    def ended_by_kubelet(self, name: str, *, reason: str, message: str) -> Self:
        """Before or beside its containers: evicted, or refused by the node."""
        self.pods[name]["status"] |= {"phase": "Failed", "conditions": [], "reason": reason, "message": message}
        return self

    def deleted(self, name: str, *, disruption: str = "", grace_s: int = 30) -> Self:
        """A deletion that a kubelet still has to carry out, or never will."""
        pod = self.pods[name]
        pod["metadata"]["deletionTimestamp"] = times.text(self.now + timedelta(seconds=grace_s))
        if disruption:
            target = {"type": "DisruptionTarget", "status": "True", "reason": disruption}
            pod["status"].setdefault("conditions", []).append(target)
        return self

    def vanished(self, name: str) -> Self:
        del self.pods[name]
        return self

    def report(self, *, attempt: int | None = None, silent_s: float = 0.0, **fields: Any) -> Self:
        drivers = [p for p in self.pods.values() if p["metadata"]["labels"].get(names.LABEL_COMPONENT) == "driver"]
        newest = max((int(p["metadata"]["labels"][names.LABEL_ATTEMPT]) for p in drivers), default=1)
        attempt = newest if attempt is None else attempt
        fields = {"state": DriverState.RUNNING, "job_uid": self.job.uid, "steps": 100, **fields}
        self.link = DriverView(
            attempt=attempt, report=DriverReport(driver_attempt=attempt, **fields), silent_s=silent_s
        )
        return self

    def silent(self, seconds: float) -> Self:
        assert self.link is not None
        self.link = dataclasses.replace(self.link, silent_s=seconds)
        return self

    def later(self, seconds: float) -> Self:
        self.now += timedelta(seconds=seconds)
        return self

    def edit(self, **fields: Any) -> Self:
        """The user changes the spec."""
        self.manifest["spec"].update(fields)
        self.manifest["metadata"]["generation"] += 1
        return self

    # --- looking ------------------------------------------------------------------------------------------------------
    def condition(self, kind: str) -> tuple[str, str]:
        """(status, reason)."""
        found = next(c for c in self.status.conditions if c.type == kind)
        return found.status, found.reason

    def message(self, kind: str) -> str:
        return next(c for c in self.status.conditions if c.type == kind).message

    def names(self) -> list[str]:
        return sorted(self.pods)

    def _add(self, pod: Manifest) -> None:
        self._uids += 1
        new = copy.deepcopy(pod)
        new["metadata"] |= {"uid": f"pod-{self._uids}", "creationTimestamp": times.text(self.now)}
        new["status"] = {"phase": "Pending"}
        self.pods[new["metadata"]["name"]] = new

    def _write_config(self) -> None:
        from rlinf_operator.manifests.config import inputs_hash

        spec = RLJobSpec.model_validate(self.manifest["spec"])
        expire = self.now + timedelta(seconds=self.settings.certificate_life_s)
        self.config = ConfigView(inputs=inputs_hash(spec), certificates_expire=expire)


def _main(pod: Manifest) -> str:
    component = pod["metadata"]["labels"][names.LABEL_COMPONENT]
    return names.CONTAINER_DRIVER if component == names.COMPONENT_DRIVER else names.CONTAINER_AGENT


def plan_of(job: JobBuilder, **fields: Any) -> RLPlanSpec:
    """The first plan of a job, with fields changed."""
    plan = initial(job.parsed(), job=JobRef(name=job.manifest["metadata"]["name"], uid=UID))
    assert isinstance(plan, RLPlanSpec), str(plan)
    return plan.model_copy(update=fields)


def dump_spec(spec: RLJobSpec) -> Manifest:
    return api.dump(spec)
