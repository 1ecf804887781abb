"""Pools of a running job that grow and shrink by what was measured, what slots may cost, and who stays on theirs."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_scheduler.planner import spec as plan_spec
from rlinf_scheduler.planner.candidate import shape
from rlinf_scheduler.planner.problem import InRounds
from rlinf_scheduler.planner.search import Found, plan
from rlinf_scheduler.replan.decide import Stay, _Decision
from rlinf_scheduler.replan.known import MOST_NO_NODE_S, NO_NODE_S, Case, PlanRecord
from tools.prove.world import World
from tools.workloads import entries

ENTRIES = entries()


def world(name="drawn-14", *, steps=400, pods=2, **more):
    return World.of_entry(ENTRIES[name], steps=steps, pods=pods, **more)


def pods(found):
    return [tuple(pool.pods for pool in p.pools) for p in found.plans]


def grown(found):
    least = sum(pods(found)[0])
    return [sum(of_plan) > least for of_plan in pods(found)]


def test_a_pool_grows_where_that_makes_steps_shorter_and_no_further_than_it_may():
    job, fixed = world(), world(pods=1)
    job.run()
    fixed.run()
    assert grown(job)[-1]
    for pool, most in zip(job.job.pools, zip(*pods(job), strict=True), strict=True):
        assert max(most) <= pool.pods.max
    assert sum(job.seconds[-20:]) < 0.9 * sum(fixed.seconds[-20:])


def test_slots_that_have_their_price_are_added_only_where_they_pay():
    """A step of half the time on twice the slots costs as much."""
    quick, cheap = world(), world(spec={"objective": "CostPerStep"})
    quick.run()
    cheap.run()

    def cost(of):
        return sum(of.seconds[-20:]) * sum(p.slots.per_pod * n for p, n in zip(of.job.pools, pods(of)[-1], strict=True))

    assert sum(pods(cheap)[-1]) <= sum(pods(quick)[-1])
    assert cost(cheap) <= 1.02 * cost(quick)


def test_a_pool_shrinks_when_slots_get_their_price():
    job = world()
    job.run(200)
    assert grown(job)[-1]
    job.job = job.job.model_copy(update={"min_gain_per_slot": 0.9})
    job.again_at = 1.0  # as the service does after an edit
    job.run(100)
    assert not grown(job)[-1]
    assert job.codes[-2:] == ["Profiled", "CapacityChanged"]
    assert "on 4 slots instead of 8" in job.plans[-1].reason.message


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_further_slot_must_save_what_the_job_says(share):
    job = world(spec={"minGainPerSlot": share})
    job.run()
    assert any(grown(job)) == (share == 0.0)


TWO = {
    "name": "two", "items": 16, "staleness": 0,
    "pools": [{"name": "main", "slots": 2, "memory": 1000, "roles": ["gen", "train"]}],
    "roles": [
        {"name": name, "service": "serial", "time": {"perItemMs": ms, "perBatchMs": 1.0, "sigma": 0.0, "jitter": 0.0},
         "memory": {"resident": 10, "peak": 20, "offloaded": 1}, "loadMs": 1.0, "offloadMs": 1.0, **more}
        for name, ms, more in (("gen", 100.0, {}), ("train", 5.0, {"gang": True, "syncMs": 1.0, "ranks": [1]}))
    ],
    "edges": [{"from": "gen", "to": "train"}, {"from": "train", "to": "gen", "weights": True, "syncMs": 1.0}],
}  # fmt: skip
"""A pod more makes steps half as long, as long as a unit takes the generator longer than the trainer."""


def shrinking(*, steps=2000, factor=0.02, pods=2, **more):
    """From step 100 on a unit takes the generator `factor` of its time."""
    return World.of_entry(TWO, steps=steps, pods=pods, mode="Disaggregated", shift=(100, "gen", factor), **more)


def test_pods_whose_gain_is_gone_are_given_back():
    """Steps are as long without them: no plan is better, and slots that nobody needs are another job's."""
    job = shrinking()
    job.run(90)
    assert grown(job)[-1]
    job.run(60)
    assert not grown(job)[-1]
    assert "slots instead of" in job.plans[-1].reason.message
    assert job.codes[-1] == "Drift"
    written = len(job.plans)
    job.run(400)
    assert len(job.plans) == written, "and stay away"


def test_where_several_plans_give_pods_back_one_is_chosen():
    """In a pool that may have more pods, the search finds several that do."""
    job = shrinking(pods=3)
    job.run(150)
    assert pods(job)[-2:] == [(2,), (1,)]
    assert "on 2 slots instead of 4" in job.plans[-1].reason.message


def test_of_plans_that_give_pods_back_fewer_slots_come_before_quicker_steps():
    job = shrinking(pods=3)
    job.run(90)
    records = tuple(PlanRecord(spec=p) for p in job.plans)
    decision = _Decision(Case(job=job.job, plans=records, profiles=tuple(job.profiles), settled=job.plans[-1].revision))
    now = decision.now.mean
    paid = {"less": 4, "least": 2, "least and quicker": 2, "too slow": 1}
    seconds = {"less": 0.9, "least": 1.01, "least and quicker": 1.0, "too slow": 1.03}
    slots_of = {id(decision.plan): 6}
    others = list[Any]()
    for name, share in seconds.items():
        plan = decision.plan.model_copy()
        slots_of[id(plan)] = paid[name]
        others.append(SimpleNamespace(plan=plan, seconds=share * now, change_s=0.2))
    decision.__dict__["others"] = SimpleNamespace(paid=lambda plan: slots_of[id(plan)], rolled_back=set())
    less, least, quicker, too_slow = others
    assert decision._on_fewer_slots(others) is quicker
    assert decision._on_fewer_slots([less, least]) is least
    assert decision._on_fewer_slots([too_slow]) is None


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_pods_that_make_steps_shorter_stay(factor):
    job = shrinking(factor=factor)
    job.run(300)
    assert grown(job)[-1]


def test_pods_stay_where_the_change_costs_more_than_a_twentieth_of_what_is_left():
    job = shrinking(steps=180)
    job.run()
    assert grown(job)[-1]


def test_pods_are_given_back_once_where_steps_turned_out_longer_without_them():
    """For a reason that no simulator knows. The plan before it comes again, and stays."""
    job = shrinking(slow=lambda plan: 1.5 if plan.revision > 3 and plan.pools[0].pods == 1 else 1.0)
    job.run(600)
    assert [pods(job)[-3], pods(job)[-2], pods(job)[-1]] == [(2,), (1,), (2,)]
    assert job.codes[-2:] == ["Drift", "RolledBack"]


def test_a_pod_without_a_node_is_tried_again_after_ten_minutes_then_twenty():
    """Meanwhile the job may have any other plan. A step takes minutes."""
    job = world(steps=300, slow=lambda plan: 120.0)
    job.homeless = lambda p: sum(pool.pods for pool in p.pools) > sum(pods(job)[0])
    job.interval = 1
    job.run()
    tried = sorted(job.no_node_at.values())
    waits = [later - before for before, later in itertools.pairwise(tried)]
    assert len(waits) >= 5
    for number, wait in enumerate(waits):
        least = min(MOST_NO_NODE_S, NO_NODE_S * 2**number)
        assert wait >= least, waits
    assert not any(p.revision in job.no_node_at for p in job.plans if p.revision == job.profiles[-1].revision)
    said = [d.why for _, d in job.decisions if isinstance(d, Stay) and "as one had no node" in d.why]
    assert said


def test_a_node_that_comes_is_found_after_the_wait():
    job = world(steps=150, slow=lambda plan: 120.0)
    job.homeless = lambda p: len(job.seconds) < 40 and sum(pool.pods for pool in p.pools) > sum(pods(job)[0])
    job.interval = 1
    job.run()
    assert job.no_node_at
    assert grown(job)[-1]
    assert job.plans[-1].revision not in job.failed


# --- who stays --------------------------------------------------------------------------------------------------------
class Unkept(World):
    """Its gang has no checkpoint to begin again on."""

    def profile(self, plan, truth, seconds, *, last):
        return super().profile(plan, truth, seconds, last=last).model_copy(update={"checkpoints": False})


@pytest.mark.parametrize("name", ["drawn-03", "drawn-08", "drawn-13", "drawn-14", "drawn-22"])
def test_a_search_that_keeps_a_gangs_region_finds_no_worse_than_the_plan_in_force(name):
    job = World.of_entry(ENTRIES[name], steps=60)
    job.run(6)
    stands = plan_spec.stands(job.truth, job.plans[0], job.job)
    gangs = {role.name for role in job.truth.roles if isinstance(role.service, InRounds)}
    keep = [standing.region for standing in stands if not gangs.isdisjoint(standing.workers)]
    now = plan_spec.read(job.truth, job.plans[0], job.job)
    answer = plan(job.truth, start=[now], keep=keep)
    assert isinstance(answer, Found)
    for scored in (answer.best, *answer.others):
        assert {shape(region) for region in keep} <= {shape(region) for region in scored.candidate.regions}
    free = plan(job.truth, start=[now])
    assert isinstance(free, Found)
    assert free.best.score <= answer.best.score * (1 + 1e-9)


def test_regions_that_stay_keep_their_slots_and_only_the_others_move():
    job = Unkept.of_entry(ENTRIES["drawn-13"], steps=300)
    job.run()
    first = {w.role: (w.count, w.slots) for w in job.plans[0].workers}
    gangs = {role.name for role in job.truth.roles if isinstance(role.service, InRounds)}
    for later in job.plans[1:]:
        of_gangs = {w.role: (w.count, w.slots) for w in later.workers if w.role in gangs}
        assert of_gangs == {name: first[name] for name in gangs}
