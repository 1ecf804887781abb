"""Lease sets of a plan: what is expanded, and which plans are refused with which words."""

from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_api.placement import resolve
from rlinf_api.plan import RLPlanSpec

JOB = RLJobSpec.model_validate(
    {
        "flow": {"name": "ppo", "steps": 3, "config": {"env": "x"}},
        "roles": [{"name": "rollout", "kind": "torch", "slotsPerWorker": 2}, {"name": "actor", "kind": "fsdp"}],
        "pools": [
            {
                "name": "gpu",
                "roles": ["rollout", "actor"],
                "pods": 2,
                "slots": {"perPod": 4, "cpu": "1", "memory": "80Gi"},
            }
        ],
    }
)
TURNS = [{"role": "rollout", "until": {"units": 512}}, {"role": "actor"}]


def plan(*sets: dict[str, Any], actor: str = "gpu/0/[0-3]", count: int = 4, **workers: Any) -> RLPlanSpec:
    return RLPlanSpec.model_validate(
        {
            "job": {"name": "j", "uid": "u"},
            "revision": 7,
            "pools": [{"name": "gpu", "pods": 2}],
            "workers": [
                {"role": "rollout", "count": 2, "slots": "gpu/0/[0-3]", **workers.get("rollout", {})},
                {"role": "actor", "count": count, "slots": actor, **workers.get("actor_memory", {})},
            ],
            "leaseSets": list(sets),
            "reason": {"code": "Initial"},
        }
    )


def lease(slots: str = "gpu/0/[0-3]", name: str = "all", turns: Any = None) -> dict[str, Any]:
    return {"name": name, "slots": slots, "turns": TURNS if turns is None else turns}


def test_a_set_knows_its_turns_and_their_workers():
    found = resolve(plan(lease()), JOB).lease_sets[0]
    assert [(t.role, t.workers, t.until_units) for t in found.turns] == [
        ("rollout", ("rollout/0", "rollout/1"), 512),
        ("actor", ("actor/0", "actor/1", "actor/2", "actor/3"), 0),
    ]
    assert not found.spans_pods


def test_roles_load_beside_each_other_where_declared_memory_says_so():
    small, large = {"memory": {"resident": "20Gi", "peak": "50Gi"}}, {"memory": {"resident": "40Gi", "peak": "60Gi"}}
    found = resolve(plan(lease(), rollout=small, actor_memory=large), JOB).lease_sets[0]
    assert [(t.role, t.beside) for t in found.turns] == [("rollout", frozenset()), ("actor", frozenset({"rollout"}))]
    assert all(not t.beside for t in resolve(plan(lease()), JOB).lease_sets[0].turns), "nothing is known"


@pytest.mark.parametrize(("kept", "loads"), [("9Gi", True), ("10Gi", True), ("11Gi", False)])
def test_what_a_third_role_keeps_while_it_is_off_the_slots_counts_for_who_loads_beside_whom(kept, loads):
    """Of 80Gi: the peak of rollout, what actor takes to load, and what critic keeps meanwhile."""
    pool = JOB.pools[0].model_dump(by_alias=True) | {"roles": ["rollout", "actor", "critic"]}
    critic = {"name": "critic", "kind": "my_module:Critic"}
    roles = [*(role.model_dump(by_alias=True) for role in JOB.roles), critic]
    job = RLJobSpec.model_validate(JOB.model_dump(by_alias=True) | {"roles": roles, "pools": [pool]})
    made = plan(
        lease(turns=[*TURNS, {"role": "critic"}]),
        rollout={"memory": {"resident": "30Gi", "peak": "50Gi"}},
        actor_memory={"memory": {"resident": "20Gi", "peak": "50Gi"}},
    )
    workers = [worker.model_dump(mode="json", by_alias=True) for worker in made.workers]
    memory = {"resident": "60Gi", "peak": "60Gi", "offloaded": kept}
    workers.append({"role": "critic", "count": 4, "slots": "gpu/0/[0-3]", "memory": memory})
    made = RLPlanSpec.model_validate(made.model_dump(mode="json", by_alias=True) | {"workers": workers})
    assert resolve(made, job).lease_sets[0].turns[0].beside == (frozenset({"actor"}) if loads else frozenset())


@pytest.mark.parametrize(("kv", "loads"), [("10Gi", True), ("11Gi", False)])
def test_who_loads_beside_another_has_its_cache_there_too(kv, loads):
    engine = {"memory": {"resident": "20Gi", "kv": kv}}
    made = plan(lease(), rollout=engine, actor_memory={"memory": {"resident": "20Gi", "peak": "50Gi"}})
    assert resolve(made, JOB).lease_sets[0].turns[1].beside == (frozenset({"rollout"}) if loads else frozenset())


def test_a_role_that_does_not_say_what_it_takes_to_load_loads_beside_nobody():
    part, whole = {"memory": {"peak": "30Gi"}}, {"memory": {"resident": "20Gi", "peak": "40Gi"}}
    found = resolve(plan(lease(), rollout=part, actor_memory=whole), JOB).lease_sets[0]
    assert [(t.role, t.beside) for t in found.turns] == [("rollout", frozenset({"actor"})), ("actor", frozenset())]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (plan(), "held by role 'rollout' too"),
        (plan(lease("gpu/0/[0-7]")), "lease set 'all': got slot gpu/0/4, which does not exist"),
        (plan(lease(), lease("gpu/0/3", "other")), "slot gpu/0/3, which is in lease set 'all' too"),
        (plan(lease("gpu/0/[0-2]"), actor="gpu/0/[0-2],gpu/1/0"), "worker rollout/1 with slot gpu/0/3 outside of it"),
        (plan(lease(turns=TURNS[:1])), "worker actor/0, whose role has no turn there"),
        (plan(lease(turns=[*TURNS, TURNS[0]])), "role 'rollout' twice in its turns"),
        (
            plan(lease(), lease("gpu/1/0", "other"), actor="gpu/0/[0-3]"),
            "a turn of role 'rollout', which has no worker",
        ),
        (plan(lease("gpu/0/[0-3]"), actor="gpu/0/[0-2],gpu/1/0"), "gang 'actor' does not lie in one lease set"),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(wrong, sentence):
    with pytest.raises(InvalidManifest) as refused:
        resolve(wrong, JOB)
    assert sentence in str(refused.value)


def test_of_several_entries_of_a_role_the_one_that_needs_most_decides_who_loads_beside_whom():
    """Whichever stands last."""
    fits, too_much = {"resident": "20Gi", "peak": "50Gi"}, {"resident": "40Gi", "peak": "60Gi"}
    small = {"memory": {"resident": "10Gi", "peak": "30Gi"}}

    def beside(first: dict[str, Any], second: dict[str, Any]) -> frozenset[str]:
        made = plan(lease(), rollout=small)
        halves = [
            {"role": "actor", "count": 2, "slots": "gpu/0/[0-1]", **first},
            {"role": "actor", "count": 2, "slots": "gpu/0/[2-3]", **second},
        ]
        workers = [made.workers[0].model_dump(mode="json", by_alias=True), *halves]
        both = RLPlanSpec.model_validate(made.model_dump(mode="json", by_alias=True) | {"workers": workers})
        return resolve(both, JOB).lease_sets[0].turns[0].beside

    assert beside({"memory": fits}, {"memory": fits}) == {"actor"}
    assert beside({"memory": {**too_much, "resident": "60Gi"}}, {"memory": fits}) == frozenset()
    assert beside({}, {"memory": fits}) == frozenset(), "of half of the gang nothing is known"
