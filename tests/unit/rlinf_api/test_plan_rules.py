"""What a plan must keep of its job's bounds, and who may not ask for it."""

from typing import Any

import pytest

from rlinf_api import plan_rules
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.plan import ChannelPlan, PoolPlan, RLPlanSpec, WorkerMemory
from rlinf_worker.channels import messages
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


def synthetic(*, ranks: list[int], count: int, planned: dict[str, str] | None = None, **config: Any) -> Any:
    """A gang that declares what it needs of a slot of 80 MiB, beside nobody or in turn with role gen."""
    declared = {"memory": {"resident": 20, "peak": 60, "offloaded": 5}, "ranks": ranks, "gang": True, **config}
    job = RLJobSpec.model_validate(
        {
            "flow": {
                "name": "synthetic",
                "steps": 3,
                "config": {"items": 8, "edges": [{"from": "gen", "to": "train"}]},
            },
            "roles": [
                {"name": "gen", "kind": "synthetic", "config": {"memory": {"resident": 9, "peak": 40, "offloaded": 9}}},
                {"name": "train", "kind": "synthetic", "workers": {"min": 1, "max": 8}, "config": declared},
            ],
            "pools": [
                {"name": "main", "roles": ["gen", "train"], "slots": {"perPod": 8, "cpu": "1", "memory": "70Mi"}}
            ],
        }
    )
    entry = {"role": "train", "count": count, "slots": f"main/0/[0-{count - 1}]"} | (
        {"memory": planned} if planned else {}
    )
    turns = [{"role": "gen"}, {"role": "train"}]
    plan = RLPlanSpec.model_validate(
        {
            "job": {"name": "j", "uid": "u"},
            "revision": 2,
            "pools": [{"name": "main", "pods": 1}],
            "workers": [{"role": "gen", "count": 1, "slots": "main/0/0"}, entry],
            "leaseSets": [{"name": "all", "slots": f"main/0/[0-{count - 1}]", "turns": turns}],
            "reason": {"code": "Pinned"},
        }
    )
    return plan, job


def refusal(plan: Any, job: Any, **options: bool) -> str:
    with pytest.raises(InvalidManifest) as caught:
        plan_rules.check(plan, job, **options)
    return str(caught.value)


@pytest.mark.parametrize("counts", [True, False])
def test_a_gang_has_a_world_size_that_its_config_allows(counts):
    said = refusal(*synthetic(ranks=[1, 2, 4], count=3), counts=counts)
    assert "it has 3 workers of role 'train', whose config allows ranks 1, 2, 4; write one of these" in said
    assert plan_rules.check(*synthetic(ranks=[1, 2, 4], count=4), counts=counts).of_role("train")[0].world == 4
    assert plan_rules.check(*synthetic(ranks=[], count=3), counts=counts).of_role("train")[0].world == 3


def test_memory_is_what_the_plan_or_the_config_declares_whichever_is_more():
    job = synthetic(ranks=[], count=2)
    assert plan_rules.check(*job).revision == 2, "60 beside the 9 that stay of the other: 69 MiB of 70"
    larger = refusal(*synthetic(ranks=[], count=2, planned={"peak": "62Mi"}))
    assert "slot main/0/0 has 73400320 bytes and gen, train need 74448896" in larger
    by_config: dict[str, Any] = {"memory": {"resident": 20, "peak": 62, "offloaded": 5}}
    assert "need 74448896" in refusal(*synthetic(ranks=[], count=2, **by_config)), "though the plan says nothing"
    assert "need 74448896" in refusal(*synthetic(ranks=[], count=2, planned={"peak": "1Mi"}, **by_config))
    assert "need 83886080" in refusal(*synthetic(ranks=[], count=2, options=[{"peak": 71}], option=0))


def test_memory_is_of_a_slot_however_many_of_them_a_worker_takes():
    plan, job = synthetic(ranks=[], count=1, planned={"peak": "90Mi"})
    wide = [r.model_copy(update={"slots_per_worker": 2}) if r.name == "train" else r for r in job.roles]
    workers = [plan.workers[0], plan.workers[1].model_copy(update={"slots": "main/0/[0-1]"})]
    sets = [plan.lease_sets[0].model_copy(update={"slots": "main/0/[0-1]"})]
    said = refusal(
        plan.model_copy(update={"workers": workers, "lease_sets": sets}), job.model_copy(update={"roles": wide})
    )
    assert "need 103809024" in said


def test_what_an_engine_holds_for_its_cache_counts_beside_its_weights():
    memory = {"resident": "30Mi", "kv": "40Mi"}
    plan, job = synthetic(ranks=[], count=2, planned=memory)
    assert "need 82837504" in refusal(plan, job)
    stays = [w.model_copy(update={"stays": w.role == "train"}) for w in plan.workers]
    assert "need 115343360" in refusal(plan.model_copy(update={"workers": stays}), job), "70 that stay beside 40"


@pytest.mark.parametrize(
    ("config", "option", "need"),
    [(None, "", ""), (None, "0", "need 79691776"), (0, "", "need 79691776"), (0, "base", ""), (0, "1", "")],
)
def test_an_option_that_the_plan_chooses_has_its_own_peak_whatever_the_config_chose(config, option, need):
    """67 MiB is the peak of the first one, and beside the 9 of the other too much for a slot of 70."""
    options = [{"peak": 67, "perItemMs": 1}, {"peak": 40, "perItemMs": 2}]
    plan, job = synthetic(ranks=[], count=2, options=options, option=config)
    workers = [w.model_copy(update={"option": option}) if w.role == "train" else w for w in plan.workers]
    plan = plan.model_copy(update={"workers": workers})
    if need:
        assert need in refusal(plan, job)
    else:
        placed = plan_rules.check(plan, job)
        assert {w.allotment.option for w in placed.of_role("train")} == {option}


@pytest.mark.parametrize("option", ["2", "-1", "eager", "1.0"])
def test_an_option_that_the_config_does_not_list_is_refused(option):
    plan, job = synthetic(ranks=[], count=2, options=[{"peak": 40, "perItemMs": 1}] * 2)
    workers = [w.model_copy(update={"option": option}) for w in plan.workers if w.role == "train"]
    plan = plan.model_copy(update={"workers": [*(w for w in plan.workers if w.role != "train"), *workers]})
    assert f"it chooses option {option!r} of role 'train', whose config has base, 0, 1" in refusal(plan, job)


def test_of_another_kind_the_role_alone_knows_its_options():
    job = make_job(elastic=True)
    workers = [w.model_copy(update={"option": "eager", "tokens": 4096}) for w in job.plan.workers]
    placed = plan_rules.check(job.plan.model_copy(update={"workers": workers}), job.spec)
    assert {(w.allotment.option, w.allotment.tokens) for w in placed.workers} == {("eager", 4096)}
    assert {messages.allotment_from_pb(messages.allotment_to_pb(w.allotment)).tokens for w in placed.workers} == {4096}


@pytest.mark.parametrize(
    ("who", "need"),
    [("train", "need 62914560"), ("gen", ""), ("", "")],
)
def test_what_stays_on_a_slot_counts_as_it_is_loaded_beside_the_peak_of_the_other(who, need):
    """59 of 60: the peak of train beside what gen keeps. gen at its peak beside train, of which 20 stay, takes 60."""
    plan, job = synthetic(ranks=[], count=1, memory={"resident": 20, "peak": 50, "offloaded": 5})
    pools = [p.model_copy(update={"slots": p.slots.model_copy(update={"memory": "59Mi"})}) for p in job.pools]
    workers = [w.model_copy(update={"stays": w.role == who}) for w in plan.workers]
    plan, job = plan.model_copy(update={"workers": workers}), job.model_copy(update={"pools": pools})
    if need:
        assert need in refusal(plan, job)
    else:
        assert {w.role for w in plan_rules.check(plan, job).workers if w.allotment.stays} == ({who} - {""})


def test_of_one_that_stays_and_does_not_say_what_is_resident_its_peak_counts():
    plan, job = synthetic(ranks=[], count=1, memory={"peak": 50, "offloaded": 5})
    workers = [w.model_copy(update={"stays": w.role == "train"}) for w in plan.workers]
    assert "need 94371840" in refusal(plan.model_copy(update={"workers": workers}), job), "40 of gen beside 50"


def test_pods_that_a_plan_puts_together_are_refused_by_name():
    job = make_job(elastic=True)
    pools = [pool.model_copy(update={"together": [[0, 1]]}) if pool.name == "sim" else pool for pool in job.plan.pools]
    said = problem(pools=pools)
    assert "it puts pods of pool 'sim' together, which is not supported yet" in said
    assert "write spec.pools[sim].topology of the job" in said
