"""Which edits of a job at work are refused, with which sentence, and what a running driver is told of one."""

import copy
from typing import Any

import pytest

from rlinf_api import edits
from rlinf_api.job import RLJobSpec
from rlinf_api.report import Goal

SPEC: dict[str, Any] = {
    "seed": 1,
    "flow": {"name": "mine:flow", "steps": 7, "config": {"gamma": 0.9}},
    "checkpoint": {"uri": "/c", "everySteps": 2, "keep": 4},
    "roles": [{"name": "env", "kind": "gymnasium"}, {"name": "actor", "kind": "torch"}],
    "pools": [{"name": "cpu", "roles": ["env"]}, {"name": "gpu", "roles": ["env", "actor"], "slots": {"perPod": 2}}],
}
AT_WORK = {"attempt": 1, "state": "Running"}
NEVER = " cannot change once the job exists; make a new RLJob"
SUSPENDED = (
    " cannot change while the job is at work, as its pods are made from it; set spec.suspend to true, change it, and "
    "set spec.suspend to false again"
)


def edited(*changes: tuple[str, Any]) -> dict[str, Any]:
    """`edited(("roles.0.config", {"a": 1}))`"""
    spec = copy.deepcopy(SPEC)
    for at, value in changes:
        *path, last = [int(key) if key.isdigit() else key for key in at.split(".")]
        node: Any = spec
        for key in path:
            node = node[key] if isinstance(key, int) else node.setdefault(key, {})
        node[last] = value
    return spec


HIGH = {"spec": {"priorityClassName": "high"}}
REFUSED = {
    "seed": (edited(("seed", 2)), "spec.seed" + NEVER),
    "manager": (edited(("managedBy", "kueue.x-k8s.io/multikueue")), "spec.managedBy" + NEVER),
    "flow": (edited(("flow.name", "my:other")), "spec.flow.name" + NEVER),
    "kind": (edited(("roles.1.kind", "mine:Actor")), "spec.roles: roles and their kinds" + NEVER),
    "runtime": (edited(("runtime", "gpu")), "spec.runtime" + SUSPENDED),
    "config": (edited(("flow.config.gamma", 0.5)), "spec.flow.config" + SUSPENDED),
    "staleness": (edited(("flow.maxStaleness", 2)), "spec.flow.maxStaleness" + SUSPENDED),
    "uri": (edited(("checkpoint.uri", "/d")), "spec.checkpoint.uri" + SUSPENDED),
    "model": (edited(("model", {"path": "/m"})), "spec.model" + SUSPENDED),
    "data": (edited(("data", {"train": "/d"})), "spec.data" + SUSPENDED),
    "a role's config": (edited(("roles.1.config", {"lr": 1})), "spec.roles[*].config" + SUSPENDED),
    "a role's slots": (edited(("roles.0.slotsPerWorker", 2)), "spec.roles[*].slotsPerWorker" + SUSPENDED),
    "pools": (edited(("pools.0.name", "more")), "spec.pools: which pools there are" + SUSPENDED),
    "a pool's roles": (edited(("pools.0.roles", ["env", "actor"])), "spec.pools[*].roles" + SUSPENDED),
    "a pool's slots": (edited(("pools.1.slots.perPod", 4)), "spec.pools[*].slots" + SUSPENDED),
    "slots that are said": (edited(("pools.0.slots", {"perPod": 1})), "spec.pools[*].slots" + SUSPENDED),
    "a pool's image": (edited(("pools.1.image", "a:2")), "spec.pools[*].image" + SUSPENDED),
    "topology": (edited(("placement.topology", {"preferred": "rack"})), "spec.placement.topology" + SUSPENDED),
    "a pool's topology": (edited(("pools.0.topology", {"spread": "rack"})), "spec.pools[*].topology" + SUSPENDED),
    "pods": (edited(("template", HIGH)), "spec.template.spec" + SUSPENDED),
    "the driver's pod": (edited(("driver.template", HIGH)), "spec.driver.template.spec" + SUSPENDED),
    "a pool's pods": (edited(("pools.1.template", HIGH)), "spec.pools[*].template.spec" + SUSPENDED),
    "several": (edited(("model", {"path": "/m"}), ("seed", 2), ("pools.0.image", "a")), "spec.seed" + NEVER),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_pods_are_made_from_changes_while_there_are_none_and_what_makes_another_job_never(case):
    after, sentence = REFUSED[case]
    assert edits.refusal(SPEC, after, status=AT_WORK) == sentence
    always = sentence if sentence.endswith(NEVER) else ""
    assert edits.refusal(SPEC | {"suspend": True}, after, status=AT_WORK) == always
    assert edits.refusal(SPEC, after | {"suspend": True}, status=AT_WORK) == always
    assert edits.refusal(SPEC, after, status={"attempt": 2, "state": "Starting"}) == always


@pytest.mark.parametrize(
    "after",
    [
        SPEC,
        edited(("flow.steps", 9), ("checkpoint.everySteps", 1), ("checkpoint.keep", 1)),
        edited(("roles.0.workers", 3), ("roles.0.spares", 1), ("pools.0.pods", {"min": 1, "max": 3})),
        edited(("placement.mode", "Collocated"), ("failurePolicy", {"maxRestarts": 1}), ("suspend", True)),
        edited(("pools.1.template", {"metadata": {"labels": {"team": "a"}}}), ("pools.1.roles", ["actor", "env"])),
        edited(("roles", SPEC["roles"][::-1]), ("pools", SPEC["pools"][::-1])),
        edited(("flow.maxStaleness", 0), ("roles.0.config", {})),
    ],
    ids=["nothing", "the goal", "bounds", "policies", "metadata and order", "order of entries", "defaults"],
)
def test_what_goes_on_in_place_may_change(after):
    assert edits.refusal(SPEC, after, status=AT_WORK) == ""


def test_roles_that_are_written_out_are_another_spec_though_they_are_the_flows_own():
    none = {"flow": {"name": "ppo", "steps": 7}, "pools": [{"name": "cpu"}]}
    kinds = [{"name": role.name, "kind": role.kind} for role in RLJobSpec.model_validate(none).roles]
    out = none | {"roles": kinds, "pools": [{"name": "cpu", "roles": [role["name"] for role in kinds]}]}
    for before, after in ((none, out), (out, none)):
        assert edits.refusal(before, after, status=AT_WORK) == "spec.roles[*]: whether they are written out" + SUSPENDED


@pytest.mark.parametrize(
    ("status", "free"),
    [
        ({}, True),
        ({"attempt": 0, "state": "Running"}, True),
        ({"attempt": 1}, False),
        *(({"attempt": 1, "state": s}, True) for s in ("Queued", "Starting", "Suspended")),
        *(({"attempt": 1, "state": s}, False) for s in ("Running", "Stalled", "Recovering")),
    ],
)
def test_pods_that_have_done_no_step_may_be_made_anew(status, free):
    assert edits.is_free(status) is free


def test_a_goal_is_what_a_running_driver_is_told():
    spec = RLJobSpec.model_validate(SPEC)
    assert edits.goal_of(spec) == Goal(steps=7, every_steps=2, keep=4)
    other = Goal(steps=9, every_steps=3, keep=1)
    assert edits.goal_of(edits.with_goal(spec, other)) == other
    assert edits.with_goal(edits.with_goal(spec, other), edits.goal_of(spec)) == spec
