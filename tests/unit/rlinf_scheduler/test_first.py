"""Plans that a job begins with, by what was measured before: of itself, or of an earlier job with the same key."""

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import Capacity, JobRef, PoolPlan, RLPlanSpec, WorkerMemory
from rlinf_api.profile import key_of
from rlinf_api.store import NotFound
from rlinf_scheduler.jobs import MAX_GIVEN, plan_manifest
from rlinf_scheduler.replan.first import by_profiles
from rlinf_scheduler.service import Planning
from rljob.local.store import MemoryStore
from tools import workloads
from tools.prove.world import World

ENTRY = workloads.entries()["drawn-14"]
FLOW = workloads.job(ENTRY, steps=60)["spec"]["flow"]


def measured(*, steps=8):
    """What a job of the entry has measured, under its own key."""
    world = World.of_entry(ENTRY, steps=60)
    world.run(steps)
    return world, [p.model_copy(update={"key": key_of(world.job)}) for p in world.profiles]


async def asked(planning, store, *, name="again", reason="Initial", highest=0, **spec):
    manifest = workloads.job(ENTRY, steps=60)
    manifest["metadata"]["name"] = name
    manifest["spec"] |= spec
    try:
        job = await store.get("RLJob", name)
    except NotFound:
        job = await store.create(manifest)
    job = {**job, "spec": {**job["spec"], **spec}}
    answer = await planning.request_plan(job, reason=reason, highest_revision=highest)
    found = await store.get("RLPlan", answer.plan)
    return job["metadata"]["uid"], RLPlanSpec.model_validate(found["spec"])


def reporting(planning, profiles, *, uid="earlier", namespace="default"):
    for profile in profiles:
        planning.jobs.add(profile.model_copy(update={"job": JobRef(name="drawn-14", uid=uid)}), namespace=namespace)


async def test_a_job_begins_where_an_earlier_one_with_its_key_had_come():
    store = MemoryStore()
    planning, (world, profiles) = Planning(store), measured()
    _, without = await asked(planning, store, name="first")
    assert without.predicted is None
    assert without.reason.message.endswith("; how long a step takes is not known before steps are measured")
    reporting(planning, profiles)
    _, plan = await asked(planning, store)
    assert (plan.reason.code, plan.source, plan.revision) == ("Initial", "Scheduler", 1)
    assert plan.reason.message.startswith("by steps 8 to 8 of job drawn-14, uid earlier: ")
    assert "; assumed, as nobody has measured it" not in plan.reason.message
    assert plan.based_on.profile == key_of(world.job)
    assert plan.predicted is not None
    assert plan.predicted.period_seconds < 0.5 * world.seconds[0]
    assert f": {1e3 * plan.predicted.period_seconds:.1f} ms a step" in plan.reason.message
    assert plan.lease_sets != without.lease_sets


@pytest.mark.parametrize(
    "spec",
    [
        {"placement": {"profileSteps": 0}},
        {"placement": {"mode": "Pinned", "pin": "again-p1"}},
        {"flow": {**FLOW, "config": {**FLOW["config"], "items": 3}}},
    ],
    ids=["nobody measures", "a person decides", "another job"],
)
async def test_what_was_measured_does_not_count(spec):
    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    reporting(planning, profiles)
    _, plan = await asked(planning, store, **spec)
    assert plan.predicted is None
    assert plan.reason.message.startswith("pools filled in order")


async def test_other_pools_in_the_middle_of_a_job_are_planned_by_what_it_has_measured():
    store = MemoryStore()
    planning, (world, profiles) = Planning(store), measured()
    uid, _ = await asked(planning, store)
    reporting(planning, profiles, uid=uid)
    pools = [{**pool, "pods": 2 * pool["pods"]} for pool in workloads.job(ENTRY)["spec"]["pools"]]
    _, plan = await asked(planning, store, reason="CapacityChanged", highest=4, pools=pools)
    assert (plan.reason.code, plan.revision) == ("CapacityChanged", 5)
    assert [pool.pods for pool in plan.pools] == [2]
    assert f"uid {uid}" in plan.reason.message
    assert plan.predicted is not None
    assert plan.predicted.period_seconds < 0.5 * world.seconds[0]


async def test_other_pools_change_nothing_of_a_role_that_no_candidate_says():
    store = MemoryStore()
    planning, (world, profiles) = Planning(store), measured()
    uid, _ = await asked(planning, store)
    reporting(planning, profiles, uid=uid)
    (of_newest,) = (plan for plan in world.plans if plan.revision == profiles[-1].revision)
    own = {"rollout": {"tokens": 8192, "memory": WorkerMemory(resident="3Gi", kv="2Gi")}, "train": {"option": "0"}}
    by_hand = {
        "job": JobRef(name="again", uid=uid),
        "workers": [entry.model_copy(update=own.get(entry.role)) for entry in of_newest.workers],
        "channels": [c.model_copy(update={"capacity": Capacity(units=77, bytes="4Gi")}) for c in of_newest.channels],
    }
    await store.create(plan_manifest(of_newest.model_copy(update=by_hand), namespace="default"))
    pools = [{**pool, "pods": 2 * pool["pods"]} for pool in workloads.job(ENTRY)["spec"]["pools"]]
    _, plan = await asked(planning, store, reason="CapacityChanged", highest=4, pools=pools)
    assert plan.predicted is not None
    assert {e.role: (e.option, e.tokens) for e in plan.workers} == {
        "rollout": ("", 8192),
        "train": ("0", 0),
        "env": ("", 0),
    }
    assert {e.memory.kv for e in plan.workers if e.role == "rollout" and e.memory} == {"2Gi"}
    assert {(c.capacity.units, c.capacity.bytes) for c in plan.channels} == {(77, "4Gi")}


async def under_a_plan_by_hand(store, planning, **own):
    """A job of which nothing is measured, whose plan in force says more of its workers than a first plan does."""
    uid, first = await asked(planning, store)
    workers = [entry.model_copy(update=own.get(entry.role, {})) for entry in first.workers]
    by_hand = first.model_copy(update={"revision": 2, "workers": workers})
    await store.create(plan_manifest(by_hand, namespace="default"))
    job = await store.get("RLJob", "again")
    return uid, {**job, "status": {"plan": {"current": "again-p2"}}}


async def test_a_role_of_which_nothing_is_measured_works_on_as_it_did_in_other_pods():
    store = MemoryStore()
    planning = Planning(store)
    own = {"rollout": {"tokens": 8192, "memory": WorkerMemory(kv="2Gi")}, "train": {"option": "0"}}
    _, job = await under_a_plan_by_hand(store, planning, **own)
    for current, kept in (("again-p2", True), ("again-p1", False), ("again-p7", False), (None, False)):
        answer = await planning.request_plan(
            {**job, "status": {"plan": {"current": current}}}, reason="CapacityChanged", highest_revision=7
        )
        plan = RLPlanSpec.model_validate((await store.get("RLPlan", answer.plan))["spec"])
        said = {e.role: (e.option, e.tokens, e.memory and e.memory.kv) for e in plan.workers}
        assert said["env"] == ("", 0, "0")
        assert said["rollout"] == (("", 8192, "2Gi") if kept else ("", 0, "0"))
        assert said["train"] == (("0", 0, "0") if kept else ("", 0, "0"))
        assert {e.memory.resident for e in plan.workers if e.role == "rollout" and e.memory} == {"23780Mi"}
        await store.delete("RLPlan", answer.plan)


async def test_what_a_role_had_and_the_job_does_not_allow_any_more_is_left_out_alone():
    store = MemoryStore()
    planning = Planning(store)
    own = {"rollout": {"tokens": 8192, "memory": WorkerMemory(kv="900Gi")}, "train": {"option": "0"}}
    _, job = await under_a_plan_by_hand(store, planning, **own)
    answer = await planning.request_plan(job, reason="CapacityChanged", highest_revision=2)
    plan = RLPlanSpec.model_validate((await store.get("RLPlan", answer.plan))["spec"])
    said = {e.role: (e.option, e.tokens, e.memory and e.memory.kv) for e in plan.workers}
    assert (said["rollout"], said["train"]) == (("", 0, "0"), ("0", 0, "0"))


async def test_a_job_that_begins_has_no_plan_before():
    store = MemoryStore()
    planning = Planning(store)
    _, job = await under_a_plan_by_hand(store, planning, train={"option": "0"})
    answer = await planning.request_plan(job, reason="Initial", highest_revision=2)
    plan = RLPlanSpec.model_validate((await store.get("RLPlan", answer.plan))["spec"])
    assert {e.option for e in plan.workers} == {""}


async def test_fewer_pods_than_the_plan_has_that_was_measured_are_enough():
    store = MemoryStore()
    planning, (world, profiles) = Planning(store), measured()
    uid, _ = await asked(planning, store)
    reporting(planning, profiles, uid=uid)
    (of_newest,) = (plan for plan in world.plans if plan.revision == profiles[-1].revision)
    wider = {"job": JobRef(name="again", uid=uid), "pools": [PoolPlan(name=p.name, pods=3) for p in of_newest.pools]}
    await store.create(plan_manifest(of_newest.model_copy(update=wider), namespace="default"))
    _, plan = await asked(planning, store, reason="CapacityChanged", highest=4)
    assert plan.predicted is not None
    assert [pool.pods for pool in plan.pools] == [1]


async def test_channels_hold_what_the_job_lets_them_where_it_begins_by_profiles_too():
    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    channels = {**FLOW["config"]["channels"], "tickets": {"capacity": {"units": 77, "bytes": "4Gi"}}}
    flow = {**FLOW, "config": {**FLOW["config"], "channels": channels}}
    job = RLJobSpec.model_validate(workloads.job(ENTRY)["spec"] | {"flow": flow})
    planning.jobs.remember(tuple(p.model_copy(update={"key": key_of(job)}) for p in profiles))
    _, plan = await asked(planning, store, flow=flow)
    assert plan.predicted is not None
    (tickets,) = (c for c in plan.channels if c.name == "tickets")
    assert (tickets.capacity.units, tickets.capacity.bytes) == (77, "4Gi")


async def test_a_profile_from_a_file_is_as_good_and_only_the_newest_ones_are_kept():
    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    planning.jobs.remember(tuple(profiles))
    _, plan = await asked(planning, store)
    assert plan.predicted is not None
    for number in range(MAX_GIVEN):
        planning.jobs.remember((profiles[-1].model_copy(update={"key": f"sha256:{number:064x}"}),))
    _, plan = await asked(planning, store, name="later")
    assert plan.predicted is None


def test_what_says_too_little_is_no_plan():
    world, profiles = measured()
    asks = {"job": JobRef(name="j", uid="u"), "revision": 1, "reason": world.plans[0].reason.code}
    assert by_profiles(world.job, [], **asks) is None
    silent = [p.model_copy(update={"channels": []}) for p in profiles]
    assert by_profiles(world.job, silent, **asks) is None
    too_many = [role.model_copy(update={"workers": 100}) for role in world.job.roles]
    assert by_profiles(world.job.model_copy(update={"roles": too_many}), profiles, **asks) is None


async def test_a_planner_that_breaks_on_what_was_measured_costs_no_job_its_first_plan(monkeypatch, caplog):
    def broken(problem, **more):
        raise KeyError("env")

    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    reporting(planning, profiles)
    monkeypatch.setattr("rlinf_scheduler.replan.first.search.plan", broken)
    _, plan = await asked(planning, store)
    assert plan.predicted is None
    assert "a plan by profiles broke; the job gets one without them" in caplog.text


async def test_what_another_namespace_has_measured_stays_there():
    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    reporting(planning, profiles, namespace="others")
    _, plan = await asked(planning, store)
    assert plan.predicted is None


async def test_a_job_that_is_another_by_now_does_not_go_by_what_it_was():
    store = MemoryStore()
    planning, (_, profiles) = Planning(store), measured()
    uid, _ = await asked(planning, store)
    reporting(planning, [p.model_copy(update={"key": "sha256:" + "1" * 64}) for p in profiles], uid=uid)
    _, plan = await asked(planning, store, reason="CapacityChanged", highest=1)
    assert plan.predicted is None
