"""No field of an RLJob is ignored: each is read somewhere."""

import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from rlinf_api import supported
from rlinf_api.job import Range, RLJobSpec
from tests.builders import ppo_job

ROOT = Path(__file__).resolve().parents[3]
DRIVER, PODS = "rlinf_worker/driver/main.py", "operator/rlinf_operator/manifests/pods.py"
DECIDE, INITIAL = "operator/rlinf_operator/reconcile/decide.py", "operator/rlinf_scheduler/planner/initial.py"
TOPOLOGY = "operator/rlinf_operator/manifests/topology.py"
RULES = "rlinf_api/failure_rules.py"
READ = {
    "runtime": ("rlinf_api/runtimes.py", 'spec.get("runtime")'),
    "seed": (DRIVER, "spec.seed"),
    "flow.name": (DRIVER, "spec.flow.name"),
    "flow.steps": (DRIVER, "spec.flow.steps"),
    "flow.maxStaleness": (DRIVER, "spec.flow.max_staleness"),
    "flow.config": (DRIVER, "spec.flow.config"),
    "model.path": (DRIVER, "spec.model.path"),
    "data.train": (DRIVER, "spec.data.train"),
    "data.eval": (DRIVER, "spec.data.eval"),
    "roles.name": (INITIAL, "role.name"),
    "roles.kind": ("rlinf_worker/driver/workforce.py", "kind=role.kind"),
    "roles.slotsPerWorker": (INITIAL, "role.slots_per_worker"),
    "roles.workers": ("operator/rlinf_scheduler/planner/allowed.py", "role.workers"),
    "roles.spares": ("rlinf_worker/driver/spares.py", ".spares"),
    "roles.config": ("rlinf_worker/flows/registry.py", "role.config"),
    "pools.name": (INITIAL, "p.spec.name"),
    "pools.roles": (INITIAL, "p.spec.roles"),
    "pools.pods": (INITIAL, "as_range(p.pods)"),
    "pools.slots.perPod": (INITIAL, "slots.per_pod"),
    "pools.slots.resource": (PODS, "slots.resource"),
    "pools.slots.cpu": (PODS, "slots.cpu"),
    "pools.slots.memory": ("operator/rlinf_scheduler/planner/memory.py", "slots.memory"),
    "pools.slots.hostMemory": (PODS, "slots.host_memory"),
    "pools.image": (PODS, "pool.image"),
    "pools.topology.required": (TOPOLOGY, "said.required"),
    "pools.topology.preferred": (TOPOLOGY, "said.preferred"),
    "pools.topology.spread": (TOPOLOGY, "said.spread"),
    "placement.topology.required": (TOPOLOGY, "spec.placement.topology"),
    "placement.topology.preferred": (TOPOLOGY, "spec.placement.topology"),
    "placement.topology.spread": (TOPOLOGY, "spec.placement.topology"),
    "pools.template": (PODS, "pool.template"),
    "template": (PODS, "spec.template"),
    "driver.template": (PODS, "spec.driver.template"),
    "driver.evictable": ("operator/rlinf_operator/reconcile/decide.py", "spec.driver.evictable"),
    "placement.mode": (INITIAL, "spec.placement.mode"),
    "placement.pin": ("operator/rlinf_operator/reconcile/plans.py", "spec.placement.pin"),
    "checkpoint.uri": (PODS, "spec.checkpoint.uri"),
    "checkpoint.everySteps": ("rlinf_worker/driver/job.py", "spec.checkpoint.every_steps"),
    "checkpoint.keep": ("rlinf_worker/driver/core.py", "spec.checkpoint.keep"),
    "placement.apply": ("operator/rlinf_operator/reconcile/plans.py", "spec.placement.apply"),
    "placement.profileSteps": ("rlinf_worker/driver/profile.py", "spec.placement.profile_steps"),
    "failurePolicy.maxRestarts": (DECIDE, "spec.failure_policy.max_restarts"),
    "failurePolicy.resetAfterSeconds": (DECIDE, "spec.failure_policy.reset_after_seconds"),
    "objective": ("operator/rlinf_scheduler/replan/fit.py", "job.objective"),
    "minGainPerSlot": ("operator/rlinf_scheduler/replan/fit.py", "job.min_gain_per_slot"),
    "failurePolicy.rules.name": (RULES, "rule.name or"),
    "failurePolicy.rules.role": (RULES, "rule.role in roles"),
    "failurePolicy.rules.pool": (RULES, "rule.pool == pool"),
    "failurePolicy.rules.exitCodes": (RULES, "exit_code in rule.exit_codes"),
    "failurePolicy.rules.reasons": (RULES, "kind in rule.reasons"),
    "failurePolicy.rules.action": ("rlinf_worker/driver/toll.py", "met.action is FailureAction.FAIL_JOB"),
    "failurePolicy.rules.maxRestarts": ("rlinf_worker/driver/rules.py", "met.rule.max_restarts"),
    "failurePolicy.rules.backOffSeconds": (RULES, "rule.back_off_seconds"),
    "failurePolicy.rules.afterSeconds": (RULES, "rule.after_seconds"),
    "allOrNothing.timeoutSeconds": (DECIDE, "spec.all_or_nothing.timeout_seconds"),
    "managedBy": ("operator/rlinf_operator/manifests/metadata.py", '.get("managedBy"'),
    "suspend": (DECIDE, "spec.suspend"),
    "ttlSecondsAfterFinished": ("operator/rlinf_operator/reconcile/ending.py", "spec.ttl_seconds_after_finished"),
    "activeDeadlineSeconds": (DECIDE, "spec.active_deadline_seconds"),
}
"""Field: who reads it, and how that looks there."""


def model_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_in, typing.get_args(annotation))), None)


def fields(model, above=""):
    for name, field in model.model_fields.items():
        path = above + (field.alias or name)
        inner = model_in(field.annotation)
        if inner is None or inner is Range:
            yield path
        else:
            yield from fields(inner, f"{path}.")


def test_every_field_is_read():
    assert sorted(fields(RLJobSpec)) == sorted(READ)


@pytest.mark.parametrize("field", READ)
def test_who_is_said_to_read_a_field_does(field):
    file, how = READ[field]
    assert how in (ROOT / file).read_text(encoding="utf-8"), f"{file} does not read spec.{field} any more"


@pytest.mark.parametrize("flow", ["ppo", "mine.flows:train"])
def test_a_field_at_its_default_is_refused_by_nobody(flow):
    """As the API server writes them into every object."""
    spec = ppo_job().with_spec(flow={"name": flow}, placement={"profileSteps": 3, "apply": "Auto"})
    spec.with_spec(objective="StepTime", minGainPerSlot=0.0)
    assert supported.validate(spec.build())[1] == []


def test_a_pin_that_no_mode_looks_at_is_refused():
    found = supported.examine(ppo_job().with_spec(placement={"mode": "Auto", "pin": "math-p1"}).build())
    assert [str(p) for p in found.wrong] == [
        "spec.placement.pin: got 'math-p1', but mode is Auto, which looks at no pin; write mode: Pinned or remove pin"
    ]
