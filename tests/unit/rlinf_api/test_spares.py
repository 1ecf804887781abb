"""spec.roles[].spares: numbers that could never be of use are refused with the remedy."""

from rlinf_api import supported
from tests.builders import ppo_job


def said(spares, *, workers=1, per_pod=4, max_restarts=20):
    manifest = ppo_job().build()
    role = manifest["spec"]["roles"][0]
    role |= {"spares": spares, "workers": workers}
    for pool in manifest["spec"]["pools"]:
        if role["name"] in pool["roles"]:
            pool.setdefault("slots", {})["perPod"] = per_pod
    manifest["spec"]["failurePolicy"] = {"maxRestarts": max_restarts}
    return [str(p) for p in supported.validate(manifest)[1] if "spares" in str(p)], role["name"]


def test_as_many_spares_as_a_pod_runs_workers_are_right():
    assert said(2, workers=2)[0] == []
    assert said(3, workers={"min": 1, "max": 3})[0] == []


def test_more_than_a_pod_runs_workers_are_refused_with_the_number_that_is_right():
    found, role = said(3, workers=2)
    assert found == [
        f"spec.roles[{role}].spares: got 3, but a pod runs at most 2 workers of this role, and a spare takes the place "
        "of one in its own pod; write 2 or less"
    ]
    assert "write 1 or less" in said(2, workers=8, per_pod=1)[0][0]


def test_spares_of_a_job_that_may_lose_nobody_are_refused():
    found, role = said(1, max_restarts=0)
    assert found == [
        f"spec.roles[{role}].spares: got 1, but spec.failurePolicy.maxRestarts is 0, so the first lost worker fails "
        "the job; raise maxRestarts or remove spares"
    ]


def test_a_number_out_of_bounds_is_a_sentence():
    assert "wanted at least 0" in said(-1)[0][0]
    assert "wanted at most 16" in said(17)[0][0]
