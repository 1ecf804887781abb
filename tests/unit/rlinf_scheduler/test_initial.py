"""The first plan: pools filled in order, roles side by side, or a sentence that says why not."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlinf_api import slots as slot_ranges
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.job import RLJobSpec, as_range
from rlinf_api.placement import resolve
from rlinf_api.plan import Capacity, JobRef, PlanReason, RLPlanSpec
from rlinf_scheduler.planner.infeasible import Infeasible, NeedSlots
from rlinf_scheduler.planner.initial import initial
from tests.builders import UID, make_job, ppo_job

REF = JobRef(name="math", uid=UID)


def plan(job, **kwargs):
    found = initial(job.parsed(), job=REF, **kwargs)
    assert isinstance(found, RLPlanSpec), str(found)
    return found


def of_slots(found):
    """Reasons of roles that declare no memory: there are no others."""
    assert all(isinstance(reason, NeedSlots) for reason in found.reasons)
    return [reason for reason in found.reasons if isinstance(reason, NeedSlots)]


def placed(job):
    found = plan(job)
    return {w.role: (w.count, w.slots) for w in found.workers}, {p.name: p.pods for p in found.pools}


def test_the_cartpole_shape_gets_a_slot_for_each_role():
    job = make_job().role("env", "gymnasium").role("rollout", "torch").role("actor", "fsdp")
    job.pool("cpu", ["env", "rollout", "actor"], per_pod=3)
    assert placed(job) == ({"env": (1, "cpu/0/0"), "rollout": (1, "cpu/0/1"), "actor": (1, "cpu/0/2")}, {"cpu": 1})


def test_free_slots_of_open_pods_go_to_roles_that_may_grow_and_no_pod_is_opened_for_it():
    job = make_job().role("env", "gymnasium", workers=(2, 16)).role("rollout", "torch").role("actor", "fsdp")
    job.pool("sim", ["env"], pods=(1, 4), per_pod=4).pool("train", ["rollout", "actor"], per_pod=2)
    assert placed(job) == (
        {"env": (4, "sim/0/[0-3]"), "rollout": (1, "train/0/0"), "actor": (1, "train/0/1")},
        {"sim": 1, "train": 1},
    )


def test_pods_are_opened_as_far_as_the_fewest_workers_need():
    job = make_job("m:f").role("env", "m:E", workers=(6, 16)).pool("sim", ["env"], pods=(1, 4), per_pod=4)
    assert placed(job) == ({"env": (8, "sim/[0-1]/[0-3]")}, {"sim": 2})


def test_what_is_left_is_shared_evenly_the_earlier_role_first():
    job = make_job("m:f").role("a", "m:A", workers=(1, 16)).role("b", "m:B", workers=(1, 16))
    job.pool("cpu", ["a", "b"], per_pod=7)
    assert {r: c for r, (c, _) in placed(job)[0].items()} == {"a": 4, "b": 3}


def test_a_role_that_reaches_its_most_leaves_the_rest_to_others():
    job = make_job("m:f").role("a", "m:A", workers=(1, 2)).role("b", "m:B", workers=(1, 16))
    job.pool("cpu", ["a", "b"], per_pod=8)
    assert {r: c for r, (c, _) in placed(job)[0].items()} == {"a": 2, "b": 6}


def test_a_worker_of_several_slots_never_spans_pods():
    job = make_job("m:f").role("a", "m:A", workers=4, slots=2).pool("gpu", ["a"], pods=4, per_pod=3)
    assert placed(job) == ({"a": (4, "gpu/[0-3]/[0-1]")}, {"gpu": 4})


def test_a_role_may_use_several_pools_in_their_order():
    job = make_job("m:f").role("a", "m:A", workers=5).pool("one", ["a"], per_pod=3).pool("two", ["a"], per_pod=4)
    assert placed(job)[0] == {"a": (5, "one/0/[0-2],two/0/[0-1]")}


def test_open_pods_of_every_pool_are_filled_before_a_further_one_of_any_is_opened():
    job = make_job("m:f").role("a", "m:A", workers=4)
    job.pool("one", ["a"], pods=(1, 4), per_pod=2).pool("two", ["a"], per_pod=2)
    assert placed(job) == ({"a": (4, "one/0/[0-1],two/0/[0-1]")}, {"one": 1, "two": 1})


def test_what_does_not_fit_is_named_with_need_place_neighbours_and_remedy():
    job = ppo_job()
    job.spec["pools"][1]["slots"]["perPod"] = 1
    found = initial(job.parsed(), job=REF)
    assert isinstance(found, Infeasible)
    assert str(found) == (
        "role 'actor' needs 1 worker of 1 slot, none fits into pool train beside rollout; "
        "raise spec.pools[train].pods or write spec.placement.mode: Collocated, so that roles take turns"
    )


def test_turns_are_proposed_only_where_they_would_do_and_were_not_ruled_out():
    job = ppo_job()
    job.spec["pools"][1]["slots"]["perPod"] = 1
    collocated = job.with_spec(placement={"mode": "Collocated"}).parsed()
    assert isinstance(initial(collocated, job=REF), RLPlanSpec)
    found = initial(job.with_spec(placement={"mode": "Disaggregated"}).parsed(), job=REF)
    assert str(found).endswith("beside rollout; raise spec.pools[train].pods")
    job.with_spec(placement={}).spec["roles"][2]["workers"] = 2
    found = initial(job.parsed(), job=REF)
    assert str(found).endswith("beside rollout; raise spec.pools[train].pods or lower spec.roles[actor].workers")


def test_each_remedy_is_one_that_helps():
    job = make_job("m:f").role("a", "m:A", workers=2).role("b", "m:B", workers=2).pool("cpu", ["a", "b"], per_pod=2)
    found = initial(job.parsed(), job=REF)
    assert str(found).endswith(
        "; raise spec.pools[cpu].pods, lower spec.roles[b].workers or write spec.placement.mode: Collocated, "
        "so that roles take turns"
    )


def test_every_role_that_does_not_fit_is_named():
    job = make_job("m:f").role("a", "m:A", workers=3).role("b", "m:B", workers=9, slots=2)
    job.pool("x", ["a"], per_pod=2).pool("y", ["b"], pods=2, per_pod=4)
    found = initial(job.parsed(), job=REF)
    assert isinstance(found, Infeasible)
    assert [(r.role, r.need, r.placed) for r in of_slots(found)] == [("a", 3, 2), ("b", 9, 4)]


def test_the_reason_says_what_was_assumed_and_what_stays_idle():
    job = make_job("m:f").role("a", "m:A", workers=2).pool("cpu", ["a"], per_pod=4)
    reason = plan(job).reason
    assert reason.code is PlanReason.INITIAL
    assert "2 a in cpu" in reason.message
    assert "idle slots: 2 of pool cpu" in reason.message
    assert "Assumed, as nothing is measured yet" in reason.message


def test_ppo_has_its_cycle_with_the_stages_that_the_flow_asks_for():
    assert [(c.roles, c.stages) for c in plan(ppo_job()).cycles] == [(["env", "rollout"], 1)]
    job = ppo_job().with_spec(flow={"name": "ppo", "config": {"stages": 2}})
    assert plan(job).cycles[0].stages == 2
    assert plan(make_job("m:f").role("a", "m:A").pool("c", ["a"])).cycles == []


@pytest.mark.parametrize("stages", [0, -1, "two", True, None, 1.5])
def test_stages_that_are_no_number_are_left_to_the_flow_to_refuse(stages):
    job = ppo_job().with_spec(flow={"name": "ppo", "config": {"stages": stages}})
    assert plan(job).cycles[0].stages == 1


def test_channels_that_the_flow_sizes_hold_a_whole_depth():
    job = ppo_job().with_spec(flow={"name": "ppo", "config": {"channels": {"s": {"microBatch": 512, "depth": 4}}}})
    channel = plan(job).channels[0]
    assert (channel.name, channel.micro_batch, channel.depth, channel.capacity.units) == ("s", 512, 4, 2048)


def test_a_flow_sizes_the_capacity_of_its_channels_too():
    wanted = {"microBatch": 8, "depth": 4, "capacity": {"units": 4096, "bytes": "4Gi"}}
    job = ppo_job().with_spec(flow={"name": "ppo", "config": {"channels": {"s": wanted}}})
    capacity = plan(job).channels[0].capacity
    assert (capacity.units, capacity.bytes) == (4096, "4Gi")


@pytest.mark.parametrize("own", [7, "large", {"watts": 3}, {"units": 8, "perWorker": True}])
def test_what_a_flow_of_ones_own_calls_a_capacity_is_left_alone(own):
    config = {"channels": {"s": {"depth": 3, "capacity": own}}}
    channel = plan(ppo_job().with_spec(flow={"name": "mine:flow", "config": config})).channels[0]
    assert (channel.depth, channel.capacity) == (3, Capacity())


def test_the_most_that_a_channel_may_hold_is_a_whole_depth_and_fits_the_wire():
    most = {"microBatch": 1_000_000_000, "depth": 1_000_000}
    channel = plan(ppo_job().with_spec(flow={"name": "ppo", "config": {"channels": {"s": most}}})).channels[0]
    assert pb.ChannelSpec(capacity_units=channel.capacity.units).capacity_units == 10**15


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"channels": {"s": {"capacity": {"units": 0}}}},
            "spec.flow.config.channels.s.capacity.units: got 0, wanted at least 1;",
        ),
        (
            {"channels": {"s": {"capacity": {"units": 2**70}}}},
            "spec.flow.config.channels.s.capacity.units: got 1180591620717411303424, wanted at most 1000000000000000;",
        ),
        ({"channels": {"s": {"depth": 2_000_000}}}, "ChannelPlan.depth: got 2000000, wanted at most 1000000;"),
        ({"channels": {"s" * 64: {}}}, "ChannelPlan.name: got 'sss"),
        ({"cycles": [{"roles": ["env"]}]}, "CyclePlan.roles: got 1, wanted at least 2 entries;"),
    ],
)
def test_what_a_plan_cannot_hold_is_an_answer_and_no_exception(config, sentence):
    """Nobody but an own flow itself checks its config; of a registered flow the driver does, later than the plan."""
    found = initial(ppo_job().with_spec(flow={"name": "mine:flow", "config": config}).parsed(), job=REF)
    assert isinstance(found, Infeasible)
    assert sentence in str(found)
    assert str(found).endswith("change it in spec.flow.config or spec.pools")


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """Small jobs of every shape: several pools, elastic or not, wide workers, roles with several homes."""
    names = [f"r{i}" for i in range(draw(st.integers(1, 4)))]
    pools = [f"p{i}" for i in range(draw(st.integers(1, 3)))]
    job = make_job("m:f")
    for name in names:
        least = draw(st.integers(1, 6))
        job.role(name, "m:K", workers=(least, least + draw(st.integers(0, 6))), slots=draw(st.integers(1, 3)))
    for number, name in enumerate(pools):
        roles = draw(st.sets(st.sampled_from(names), min_size=1))
        if number == 0:
            roles = set(names)
        least = draw(st.integers(0, 3))
        job.pool(
            name, sorted(roles), pods=(least, max(1, least + draw(st.integers(0, 3)))), per_pod=draw(st.integers(1, 6))
        )
    return job


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_a_plan_resolves_and_keeps_every_bound_or_says_who_does_not_fit(job):
    spec = job.parsed()
    found = initial(spec, job=REF)
    if isinstance(found, Infeasible):
        assert found.reasons
        for reason in of_slots(found):
            assert reason.role in {r.name for r in spec.roles}
            assert reason.placed < reason.need
        return
    placement = resolve(found, spec)  # no slot twice, every role placed, slots of pools that may run the role
    for role in spec.roles:
        bounds = as_range(role.workers)
        assert bounds.min <= len(placement.of_role(role.name)) <= bounds.max
    for pool in spec.pools:
        bounds = as_range(pool.pods)
        assert bounds.min <= placement.pods[pool.name] <= bounds.max


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_no_growth_is_left_undone_in_open_pods(job):
    spec = job.parsed()
    found = initial(spec, job=REF)
    assume(isinstance(found, RLPlanSpec))
    assert isinstance(found, RLPlanSpec)
    used = {s for w in found.workers for s in slot_ranges.expand(w.slots)}
    counts = {w.role: w.count for w in found.workers}
    for pool in found.pools:
        known = spec.pool(pool.name)
        for ordinal in range(pool.pods):
            free = sum(1 for i in range(known.slots.per_pod) if slot_ranges.Slot(pool.name, ordinal, i) not in used)
            for role in spec.roles:
                if role.name in known.roles and counts[role.name] < as_range(role.workers).max:
                    assert free < role.slots_per_worker, f"{role.name} could grow in {pool.name}/{ordinal}"


@given(jobs(), st.randoms())
@settings(max_examples=100, deadline=None)
def test_renaming_roles_and_pools_changes_nothing(job, random):
    spec = job.parsed()
    new = [f"n{i}" for i in range(20)]
    random.shuffle(new)
    rename = dict(zip([r.name for r in spec.roles] + [p.name for p in spec.pools], new, strict=False))
    raw = job.build()["spec"]
    for entry in raw["roles"] + raw["pools"]:
        entry["name"] = rename[entry["name"]]
        if "roles" in entry:
            entry["roles"] = [rename[r] for r in entry["roles"]]
    a, b = initial(spec, job=REF), initial(RLJobSpec.model_validate(raw), job=REF)
    if isinstance(a, Infeasible) or isinstance(b, Infeasible):
        assert isinstance(a, Infeasible)
        assert isinstance(b, Infeasible)
        assert [(rename[r.role], r.need, r.placed) for r in of_slots(a)] == [
            (r.role, r.need, r.placed) for r in of_slots(b)
        ]
        return
    renamed = [(rename[w.role], w.count, [(rename[s.pool], s.ordinal, s.index) for s in slot_ranges.expand(w.slots)])
               for w in a.workers]  # fmt: skip
    assert renamed == [
        (w.role, w.count, [(s.pool, s.ordinal, s.index) for s in slot_ranges.expand(w.slots)]) for w in b.workers
    ]


@given(jobs())
@settings(max_examples=50, deadline=None)
def test_the_same_job_gets_the_same_plan(job):
    assert initial(job.parsed(), job=REF) == initial(job.parsed(), job=REF)


def test_a_large_pool_stays_a_small_object():
    job = make_job("m:f").role("a", "m:A", workers=(1, 8000)).role("b", "m:B", workers=(1, 8000))
    job.pool("gpu", ["a", "b"], pods=1250, per_pod=8)
    found = plan(job)
    assert sum(w.count for w in found.workers) == 10_000
    assert max(len(w.slots) for w in found.workers) < 200


def test_the_largest_job_takes_no_look_at_every_pod_for_each_worker():
    """Two minutes of the scheduler's only thread, in which no other job has an answer, if it does."""
    job = make_job("m:f").role("a", "m:A", workers=90_000).pool("cpu", ["a"], pods=100_000, per_pod=1)
    started = time.process_time()
    assert plan(job).workers[0].count == 90_000
    assert time.process_time() - started < 20


def wide(*, workers, slots, pods, mode):
    job = make_job("m:f").role("a", "m:A", workers=workers, slots=slots).role("b", "m:B", workers=workers, slots=slots)
    job.pool("big", ["a", "b"], pods=pods, per_pod=64)
    started = time.process_time()
    found = initial(job.with_spec(placement={"mode": mode}).parsed(), job=REF)
    assert time.process_time() - started < 5, "in the scheduler's only thread"
    return found


@pytest.mark.parametrize("mode", ["Auto", "Collocated"])
def test_more_slots_than_a_plan_can_hold_are_refused_before_they_are_laid_out(mode):
    found = wide(workers=80_000, slots=64, pods=80_000, mode=mode)
    assert str(found).startswith(
        "the fewest workers of role 'a' take 5120000 slots, a plan can hold 100000; lower spec.roles[a].workers; "
    )
    found = wide(workers=1, slots=1, pods=80_000, mode="Collocated")
    assert str(found) == "turns of a, b take 5120000 slots, a plan can hold 100000; lower spec.pools[big].pods"


def test_a_role_grows_to_what_a_plan_can_hold():
    found = wide(workers=(1, 80_000), slots=64, pods=80_000, mode="Auto")
    assert isinstance(found, RLPlanSpec)
    assert [worker.count for worker in found.workers] == [1562, 1562]
    assert [len(slot_ranges.expand(worker.slots)) for worker in found.workers] == [99_968, 99_968]
