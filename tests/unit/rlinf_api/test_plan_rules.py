"""What a plan must keep of its job's bounds, and who may not ask for it."""

import pytest

from rlinf_api import plan_rules
from rlinf_api.errors import InvalidManifest
from rlinf_api.plan import ChannelPlan, PoolPlan, WorkerMemory
from tests.builders_driver import make_job


@pytest.mark.parametrize(("spec_pods", "plan_pods", "sentence"), [(1, 2, "allows 1"), (3, 2, "wants 3")])
def test_counts_are_checked_but_by_a_driver_whose_job_file_may_be_older(spec_pods, plan_pods, sentence):
    """A pool may be lowered under its pods; the driver's stays, and its job file says what the counts were."""
    spec, plan = make_job(pods=spec_pods).spec, make_job(pods=plan_pods).plan
    with pytest.raises(InvalidManifest, match=sentence):
        plan_rules.check(plan, spec)
    assert plan_rules.check(plan, spec, counts=False).pods["sim"] == plan_pods


def changed(**fields):
    job = make_job(elastic=True)
    return plan_rules.check, job.plan.model_copy(update=fields), job.spec


def problem(**fields) -> str:
    check, plan, spec = changed(**fields)
    with pytest.raises(InvalidManifest) as caught:
        check(plan, spec)
    return str(caught.value)


def test_a_channel_that_cannot_hold_what_is_in_flight_is_named():
    channel = ChannelPlan(name="trajectories", micro_batch=64, depth=32)
    assert "'trajectories' holds 1024 units, fewer than microBatch * depth = 2048" in problem(channels=[channel])


def test_a_pool_that_the_plan_forgets_is_named():
    job = make_job(elastic=True)
    pools = [PoolPlan(name="sim", pods=1), PoolPlan(name="gpu", pods=1), PoolPlan(name="cpu", pods=1)]
    assert "pool 'cpu' is not in spec.pools" in problem(pools=pools)
    assert plan_rules.check(job.plan, job.spec).revision == 1


def test_declared_memory_must_fit_into_the_slot():
    job = make_job(elastic=True)
    workers = [
        w.model_copy(update={"memory": WorkerMemory(resident="1Gi", peak="3Gi")}) if w.role == "env" else w
        for w in job.plan.workers
    ]
    said = problem(workers=workers)
    assert "slot sim/0/0 has 2147483648 bytes and env need 3221225472" in said
