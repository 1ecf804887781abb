"""The first plan where roles declare their memory: in turns where slots are too few, Infeasible where nothing fits."""

import re

import pytest

from rlinf_api.job import Range, RLJobSpec
from rlinf_api.placement import resolve
from rlinf_api.plan import JobRef, RLPlanSpec
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from tools import workloads

REF = JobRef(name="w", uid="u")
ENTRIES = workloads.entries()


def answer(entry, **options):
    spec = RLJobSpec.model_validate(workloads.job(entry, **options)["spec"])
    return spec, initial(spec, job=REF)


def made(entry, **options):
    spec, plan = answer(entry, **options)
    assert isinstance(plan, RLPlanSpec), str(plan)
    return spec, plan


@pytest.mark.parametrize("mode", ["Auto", "Collocated"])
@pytest.mark.parametrize("name", ENTRIES)
def test_every_workload_has_a_plan_or_a_reason(name, mode):
    entry = ENTRIES[name]
    spec, plan = answer(entry, mode=mode)
    if entry.get("infeasible"):
        assert isinstance(plan, Infeasible)
        assert " MiB and the largest slot that it may have is " in str(plan)
        assert len(plan.reasons) == 1
        return
    assert isinstance(plan, RLPlanSpec)
    placement = resolve(plan, spec)
    for role in entry["roles"]:
        count = len(placement.of_role(role["name"]))
        assert count in role.get("ranks", range(1, 1000))
        memory = {p["name"]: p["memory"] for p in entry["pools"]}
        assert all(role["memory"]["peak"] <= memory[w.slots[0].pool] for w in placement.of_role(role["name"]))


def test_roles_take_turns_where_slots_are_too_few_for_all_of_them():
    _, plan = made(ENTRIES["drawn-02"])
    assert {w.role: (w.count, w.slots) for w in plan.workers} == dict.fromkeys(
        ("rollout", "reward", "critic", "train"), (2, "main/0/[0-1]")
    )
    [lease] = plan.lease_sets
    assert (lease.slots, [t.role for t in lease.turns]) == ("main/0/[0-1]", ["rollout", "reward", "critic", "train"])
    assert plan.workers[0].memory is not None
    assert "in turns" in plan.reason.message


def test_roles_of_language_models_take_turns_where_all_of_them_declare_their_memory():
    def planned(declares):
        memory = {"memory": {"resident": 100, "peak": 200}}
        kinds = {"rollout": "vllm", "reward": "rule", "actor": "fsdp"}
        roles = [{"name": n, "kind": k, "config": memory if n in declares else {}} for n, k in kinds.items()]
        pools = [{"name": "cpu", "roles": [*kinds], "slots": {"perPod": 1, "cpu": "1"}}]
        spec = {"flow": {"name": "grpo", "steps": 1}, "roles": roles, "pools": pools}
        return initial(RLJobSpec.model_validate(spec), job=REF)

    plan = planned({"rollout", "reward", "actor"})
    assert isinstance(plan, RLPlanSpec), str(plan)
    assert [turn.role for turn in plan.lease_sets[0].turns] == ["rollout", "reward", "actor"]
    assert all(entry.memory and entry.memory.peak == "200Mi" for entry in plan.workers)
    refused = planned({"rollout", "actor"})
    assert isinstance(refused, Infeasible), "what the reward needs nobody knows"
    assert "Collocated" in str(refused)


def test_a_pool_with_one_role_needs_no_turns():
    _, plan = made(ENTRIES["drawn-24"])
    assert [lease.slots for lease in plan.lease_sets] == ["main/0/[0-1]"]
    assert {w.role: w.slots for w in plan.workers}["env"] == "cpu/0/[0-7]"


def test_side_by_side_is_not_turned_into_turns():
    _, infeasible = answer(ENTRIES["drawn-02"], mode="Disaggregated")
    assert isinstance(infeasible, Infeasible)
    assert {reason.role for reason in infeasible.reasons} == {"critic", "train"}


def test_what_others_leave_on_a_slot_counts_in_turns():
    entry = ENTRIES["drawn-02"]
    largest = max(role["memory"]["peak"] for role in entry["roles"])
    pools = [{**entry["pools"][0], "memory": largest + 300}]  # the peak alone fits, not beside three times 200 or more
    _, infeasible = answer({**entry, "pools": pools})
    assert isinstance(infeasible, Infeasible)
    said = list(map(str, infeasible.reasons))
    beside, in_turns = (
        [s for s in said if " fits into pool " in s],
        [s for s in said if " peaks at " in s],
    )
    assert beside, "why not side by side"
    assert in_turns, "why not in turns either"
    assert said == beside + in_turns
    for sentence in in_turns:
        needs, room = sentence.split("; ")[0].split(" and the largest slot that it may have is ")
        slot, lacks = map(int, re.findall(r"(\d+) MiB", room))
        assert sum(map(int, re.findall(r"(\d+) MiB", needs))) == slot + lacks, "the numbers add up"
        assert " keeps " in needs


def test_a_role_too_large_for_one_pool_goes_to_the_other():
    entry = ENTRIES["drawn-08"]
    peak = max(role["memory"]["peak"] for role in entry["roles"])
    first, second = entry["pools"]
    pools = [{**first, "memory": peak - 1}, {**second, "memory": peak}]
    _, plan = made({**entry, "pools": pools})
    large = next(role["name"] for role in entry["roles"] if role["memory"]["peak"] == peak)
    assert {w.role: w.slots for w in plan.workers}[large].startswith("slow/")


@pytest.mark.parametrize("mode", ["Auto", "Collocated"])
def test_what_is_resident_counts_where_it_is_more_than_the_peak(mode):
    """A slip that only the driver refuses. By the peak alone a plan would be made that its check refuses."""
    entry = ENTRIES["drawn-02"]
    roles = [{**r, "memory": {**r["memory"], "resident": 10**9}} if r["name"] == "train" else r for r in entry["roles"]]
    _, infeasible = answer({**entry, "roles": roles}, mode=mode)
    assert isinstance(infeasible, Infeasible)
    (reason,) = infeasible.reasons
    assert reason.role == "train"
    room = entry["pools"][0]["memory"]
    assert str(reason) == (
        f"role 'train' peaks at 1000000000 MiB and the largest slot that it may have is {room} MiB in pool main, which "
        f"lacks {10**9 - room} MiB; raise spec.pools[main].slots.memory or lower the role's peak"
    )


def test_an_option_in_force_counts_with_its_own_peak():
    entry = ENTRIES["paper-gpu-simulator"]
    roles = [{**r, "option": 0} if "options" in r else r for r in entry["roles"]]
    small = [{**entry["pools"][0], "memory": 60000}]
    _, plan = answer({**entry, "roles": roles, "pools": small})
    assert isinstance(plan, Infeasible)
    assert isinstance(answer({**entry, "pools": small})[1], RLPlanSpec)


def test_stages_of_a_cycle_are_what_the_flow_asks_for():
    _, plan = made(ENTRIES["drawn-03"])
    assert [(cycle.roles, cycle.stages) for cycle in plan.cycles] == [(["env", "rollout"], 2)]


def with_ranks(*, ranks, workers, pods):
    entry = ENTRIES["drawn-24"]
    roles = [{**role, "ranks": ranks} if role.get("gang") else role for role in entry["roles"]]
    spec = RLJobSpec.model_validate(workloads.job({**entry, "roles": roles})["spec"])
    gang = next(role["name"] for role in roles if role.get("gang"))
    changed = [r.model_copy(update={"workers": workers}) if r.name == gang else r for r in spec.roles]
    pools = [p.model_copy(update={"pods": pods}) for p in spec.pools]
    return gang, initial(spec.model_copy(update={"roles": changed, "pools": pools}), job=REF)


def test_pods_are_opened_for_the_fewest_ranks_that_are_allowed():
    """And not for the fewest that `workers` says: a plan of other ranks would be refused, and asked for again."""
    few, many = Range(min=1, max=1), Range(min=1, max=9)
    gang, alone = with_ranks(ranks=[1], workers=Range(min=1, max=64), pods=few)
    assert isinstance(alone, RLPlanSpec), str(alone)
    gang, found = with_ranks(ranks=[12], workers=Range(min=1, max=64), pods=many)
    assert isinstance(found, RLPlanSpec), str(found)
    assert next(w.count for w in found.workers if w.role == gang) == 12
    assert sum(p.pods for p in found.pools) > sum(p.pods for p in alone.pools)


def test_bounds_that_leave_no_allowed_world_size_are_a_sentence():
    _, infeasible = with_ranks(ranks=[4, 8], workers=Range(min=1, max=3), pods=Range(min=1, max=1))
    assert "may have 4 or 8 workers (its config.ranks) and 1 to 3 (its workers)" in str(infeasible)
