"""What is sent without its defaults is the same when it is read."""

from typing import Any

from rlinf_api import unknown
from rlinf_api.plan import RLPlanSpec

PLAN: dict[str, Any] = {
    "job": {"name": "math", "uid": "u"},
    "revision": 3,
    "basedOn": {"revision": 2},
    "source": "User",
    "pools": [{"name": "gpu", "pods": 1}],
    "workers": [
        {"role": "actor", "count": 1, "slots": "gpu/0/0", "memory": {"resident": "1Gi"}},
        {"role": "rollout", "count": 1, "slots": "gpu/0/0"},
    ],
    "leaseSets": [
        {"name": "all", "slots": "gpu/0/0", "turns": [{"role": "rollout", "until": {"units": 4}}, {"role": "actor"}]}
    ],
    "channels": [{"name": "segments", "mode": "Cycle", "depth": 3, "capacity": {"bytes": "2Gi"}}],
    "cycles": [{"roles": ["env", "rollout"], "stages": 2}],
    "reason": {"code": "Pinned", "message": "by hand"},
}


def test_a_plan_reads_back_and_has_nothing_that_nobody_asked_for():
    plan = RLPlanSpec.model_validate(PLAN)
    assert unknown.compact(plan) == PLAN
    assert RLPlanSpec.model_validate(unknown.compact(plan)) == plan


def test_what_a_later_version_added_is_left_out_of_any_model():
    newer = {**PLAN, "shape": 1, "channels": [{**PLAN["channels"][0], "capacity": {"bytes": "2Gi", "rows": 5}}]}
    found, fields = unknown.pruned(newer, RLPlanSpec, "spec")
    assert found == PLAN
    assert fields == ("spec.shape", "spec.channels[segments].capacity.rows")
