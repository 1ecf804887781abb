"""First plans, whole; and what a flow's config makes of channels and stages."""

import pytest

from rlinf_api import job as api
from rlinf_api.plan import JobRef, PlanReason, RLPlanSpec
from rlinf_scheduler.planner.initial import initial
from tests.builders import UID, make_job, ppo_job

REF = JobRef(name="math", uid=UID)
ASSUMED = "every slot holds its role's memory"


def plan(job, **more):
    found = initial(job.parsed(), job=REF, **more)
    assert isinstance(found, RLPlanSpec), str(found)
    return found


def with_config(config, flow="ppo"):
    return ppo_job().with_spec(flow={"name": flow, "config": config})


def test_a_plan_of_roles_side_by_side_is_this():
    channels = {
        "a": {"microBatch": 3, "depth": 5, "capacity": {"units": 4, "bytes": "2Gi"}},
        "b": {"microBatch": 0, "depth": True, "capacity": {"units": 7, "x": 1}},
        "c": 7,
    }
    made = plan(with_config({"channels": channels}), revision=4, reason=PlanReason.CAPACITY_CHANGED)
    default = {"mode": "Queue", "microBatch": 1, "depth": 2, "capacity": {"units": 1024, "bytes": "1Gi"}}
    found = api.dump(made)
    assert found.pop("reason") == {
        "code": "CapacityChanged",
        "message": "pools filled in order, roles side by side: 8 env in sim, 1 rollout in train, 1 actor in train. "
        f"Assumed, as nothing is measured yet: {ASSUMED}, and all workers of a role are equally fast; "
        "how long a step takes is not known before steps are measured",
    }
    assert found == {
        "job": {"name": "math", "uid": UID},
        "revision": 4,
        "basedOn": {"revision": 0, "profile": ""},
        "source": "Scheduler",
        "pools": [{"name": "sim", "pods": 2, "together": []}, {"name": "train", "pods": 1, "together": []}],
        "workers": [
            {"role": "env", "count": 8, "slots": "sim/[0-1]/[0-3]", "option": "", "tokens": 0, "stays": False},
            {"role": "rollout", "count": 1, "slots": "train/0/0", "option": "", "tokens": 0, "stays": False},
            {"role": "actor", "count": 1, "slots": "train/0/1", "option": "", "tokens": 0, "stays": False},
        ],
        "leaseSets": [],
        "channels": [
            {"name": "a", "mode": "Queue", "microBatch": 3, "depth": 5, "capacity": {"units": 15, "bytes": "2Gi"}},
            {"name": "b", **default},
            {"name": "c", **default},
        ],
        "cycles": [{"roles": ["env", "rollout"], "stages": 1}],
        "alternatives": [],
    }


def test_a_plan_of_roles_in_turns_is_this():
    job = ppo_job().with_spec(placement={"mode": "Collocated"})
    job.spec["pools"][1]["slots"]["perPod"] = 1
    found = api.dump(plan(job))
    assert found["reason"] == {
        "code": "Initial",
        "message": "roles share slots in turns: 8 env in sim, 1 rollout in train, 1 actor in train; lease sets set-1 "
        f"(rollout | actor). Assumed, as nothing is measured yet: {ASSUMED} beside what the others keep when they are "
        "off it; how long a step takes is not known before steps are measured",
    }
    assert found["revision"] == 1
    assert found["workers"] == [
        {"role": "env", "count": 8, "slots": "sim/[0-1]/[0-3]", "option": "", "tokens": 0, "stays": False},
        {"role": "rollout", "count": 1, "slots": "train/0/0", "option": "", "tokens": 0, "stays": False},
        {"role": "actor", "count": 1, "slots": "train/0/0", "option": "", "tokens": 0, "stays": False},
    ]
    turns = [{"role": role, "until": {"step": "end"}} for role in ("rollout", "actor")]
    assert found["leaseSets"] == [{"name": "set-1", "slots": "train/0/0", "turns": turns}]


OWN = {"cycles": [{"roles": ["rollout", "actor"]}]}


@pytest.mark.parametrize(
    ("config", "flow", "cycles"),
    [
        ({}, "ppo", [("env", "rollout", 1)]),
        ({"stages": 5}, "ppo", [("env", "rollout", 5)]),
        ({"stages": 1}, "ppo", [("env", "rollout", 1)]),
        ({"stages": 0}, "ppo", [("env", "rollout", 1)]),
        ({"stages": True, "slices": 16}, "ppo", [("env", "rollout", 2)]),
        ({"stages": "5"}, "ppo", [("env", "rollout", 1)]),
        ({"stages": 100}, "ppo", [("env", "rollout", 64)]),
        ({"slices": 16}, "ppo", [("env", "rollout", 2)]),
        ({"slices": 17}, "ppo", [("env", "rollout", 3)]),
        ({"slices": 1000}, "ppo", [("env", "rollout", 64)]),
        (OWN | {"slices": 9}, "ppo", [("rollout", "actor", 9)]),
        ({"cycles": [{"roles": ["rollout", "actor"], "stages": 3}], "stages": 7}, "ppo", [("rollout", "actor", 3)]),
        (
            {"cycles": [{"roles": ["rollout", "actor"]}, {"roles": ["env", "actor"], "stages": 2}]},
            "mine:flow",
            [("rollout", "actor", 1), ("env", "actor", 2)],
        ),
        ({"cycles": [{"roles": ["x"]}]}, "ppo", []),
        ({"cycles": [{"roles": "env"}]}, "ppo", [("env", "rollout", 1)]),
        ({"cycles": 7}, "ppo", [("env", "rollout", 1)]),
        ({}, "mine:flow", []),
        (OWN | {"slices": 9}, "mine:flow", [("rollout", "actor", 1)]),
    ],
)
def test_a_cycle_has_as_many_stages_as_its_first_role_has_slices_for_a_worker_or_as_the_config_says(
    config, flow, cycles
):
    made = plan(with_config(config, flow))
    assert [(*cycle.roles, cycle.stages) for cycle in made.cycles] == cycles


def test_a_flow_that_says_nothing_has_two_slices_for_its_one_worker():
    job = make_job().role("env", "gymnasium").role("rollout", "torch").role("actor", "fsdp")
    made = plan(job.pool("cpu", ["env", "rollout", "actor"], per_pod=3))
    assert [(*cycle.roles, cycle.stages) for cycle in made.cycles] == [("env", "rollout", 2)]


def test_slots_that_stay_idle_are_said_pool_by_pool():
    job = ppo_job()
    job.spec["pools"][0]["slots"]["perPod"] = 5
    job.spec["pools"][1]["slots"]["perPod"] = 4
    job.spec["roles"][0]["workers"] = 8
    assert "; idle slots: 2 of pool sim, 2 of pool train. Assumed" in plan(job).reason.message
