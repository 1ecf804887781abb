"""A plan expanded: several entries of one role, and names that may stand there once."""

from typing import Any

import pytest

from rlinf_api import slots
from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.placement import resolve
from rlinf_api.plan import RLPlanSpec

JOB = RLJobSpec.model_validate(
    {
        "flow": {"name": "ppo", "steps": 3, "config": {"env": "x"}},
        "roles": [
            {"name": "env", "kind": "gymnasium", "workers": {"min": 1, "max": 8}},
            {"name": "rollout", "kind": "torch"},
            {"name": "actor", "kind": "fsdp", "workers": {"min": 1, "max": 4}},
        ],
        "pools": [
            {"name": "sim", "roles": ["env"], "pods": {"min": 1, "max": 2}, "slots": {"perPod": 4}},
            {"name": "gpu", "roles": ["rollout", "actor"], "slots": {"perPod": 4, "memory": "80Gi"}},
        ],
    }
)
ENVS = [{"role": "env", "count": 2, "slots": "sim/0/[0-1]"}, {"role": "env", "count": 1, "slots": "sim/1/0"}]
ROLLOUT = {"role": "rollout", "count": 1, "slots": "gpu/0/0"}
ACTORS = [{"role": "actor", "count": 1, "slots": "gpu/0/0"}, {"role": "actor", "count": 1, "slots": "gpu/0/1"}]
TURNS = {"name": "all", "slots": "gpu/0/[0-1]", "turns": [{"role": "rollout"}, {"role": "actor"}]}


def plan(**fields: Any) -> RLPlanSpec:
    return RLPlanSpec.model_validate(
        {
            "job": {"name": "j", "uid": "u"},
            "revision": 7,
            "pools": [{"name": "sim", "pods": 2}, {"name": "gpu", "pods": 1}],
            "workers": [*ENVS, ROLLOUT, *ACTORS],
            "leaseSets": [TURNS],
            "reason": {"code": "Pinned"},
            **fields,
        }
    )


def test_entries_of_one_role_are_one_role_ranks_go_on_from_one_to_the_next():
    placement = resolve(plan(), JOB)
    placed = [(w.id, w.rank, w.world, str(w.slots[0])) for w in placement.of_role("env")]
    assert placed == [("env/0", 0, 3, "sim/0/0"), ("env/1", 1, 3, "sim/0/1"), ("env/2", 2, 3, "sim/1/0")]
    assert [(w.rank, w.world) for w in placement.of_role("actor")] == [(0, 2), (1, 2)]
    assert [turn.workers for turn in placement.lease_sets[0].turns] == [("rollout/0",), ("actor/0", "actor/1")]


def test_entries_of_one_role_are_what_one_entry_over_all_their_slots_is():
    together = [{"role": "env", "count": 3, "slots": "sim/0/[0-1],sim/1/0"}, ROLLOUT]
    together.append({"role": "actor", "count": 2, "slots": "gpu/0/[0-1]"})
    assert resolve(plan(), JOB) == resolve(plan(workers=together), JOB)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"workers": [*ENVS, ROLLOUT, ACTORS[0], ACTORS[0]]},
            "workers of role 'actor': got slot gpu/0/0, which another worker of the role holds",
        ),
        (
            {"pools": [{"name": "sim", "pods": 1}, {"name": "gpu", "pods": 1}, {"name": "sim", "pods": 2}]},
            "plan revision 7: pools: got 'sim' twice, wanted each name once; remove one of the entries",
        ),
        ({"channels": [{"name": "t", "depth": 4}, {"name": "t"}]}, "channels: got 't' twice"),
        ({"leaseSets": [TURNS, {**TURNS, "slots": "gpu/0/3"}]}, "leaseSets: got 'all' twice"),
        ({"cycles": [{"roles": ["env", "rollout"]}, {"roles": ["rollout", "env"], "stages": 2}]}, "cycles: got"),
    ],
)
def test_what_is_said_twice_is_refused(fields, sentence):
    with pytest.raises(InvalidManifest) as refused:
        resolve(plan(**fields), JOB)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("slot", ["gpu/0/2", "other/0/0"])
def test_a_worker_has_a_slot_of_a_pool_that_is_there_and_may_run_its_role(slot):
    misplaced = {"role": "env", "count": 1, "slots": slot}
    with pytest.raises(InvalidManifest, match=f"got slot {slot}, wanted a slot of a pool that may run the role"):
        resolve(plan(workers=[misplaced, ROLLOUT, *ACTORS]), JOB)


@pytest.mark.parametrize("part", ["[0-99999999999999999999]", "9" * 4000, "[1-2]\n", "1\n", "\u0663", "[0-\u0663]"])
def test_a_slot_range_counts_with_few_digits_and_nothing_behind_them(part):
    with pytest.raises(InvalidManifest, match="has a part that is no number and no"):
        slots.expand(f"gpu/{part}/0,gpu/0/0")
