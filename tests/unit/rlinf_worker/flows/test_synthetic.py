"""Flow synthetic: what is wrong with a graph or a role in a sentence; which channels it declares, and tickets."""

from typing import Any

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_worker.flows import registry
from rlinf_worker.flows.synthetic import check_config, synthetic
from tests.fakes.flow import FakeFlow
from tools import workloads

CHAIN = [{"from": "rollout", "to": "train"}, {"from": "train", "to": "rollout", "weights": True, "syncMs": 1}]


def fake(config: dict[str, Any]) -> FakeFlow:
    return FakeFlow(check_config(config), workers=lambda role: 2, steps=1)


async def test_a_unit_with_two_inputs_is_joined_where_the_step_ends():
    entry = workloads.entries()["drawn-15"]
    flow = fake(workloads.job(entry)["spec"]["flow"]["config"])
    await synthetic(flow)
    assert flow.declared == [
        ("source", "tickets", "rollout"),
        ("queue", "rollout-reference", "rollout", "reference", {"rounds": False, "joins": "", "together": False}),
        ("queue", "rollout-reward", "rollout", "reward", {"rounds": False, "joins": "", "together": False}),
        ("queue", "reference-train", "reference", "train", {"rounds": True, "joins": "", "together": False}),
        ("queue", "reward-train", "reward", "train", {"rounds": False, "joins": "reference-train", "together": False}),
        ("weights", "train", "rollout"),
    ]
    assert len(flow.put_at[1]) == entry["items"]
    assert flow.put_at[1][0].affinity is None


async def test_the_units_of_a_cycle_are_shared_out_to_its_front():
    entry = workloads.entries()["drawn-03"]
    flow = fake(workloads.job(entry, items=5)["spec"]["flow"]["config"])
    await synthetic(flow)
    assert flow.declared[:2] == [("source", "tickets", "env"), ("cycle", "cycle-env-rollout", "env", "rollout")]
    assert all(flow.payloads.values()), "each says what it carries"
    shares = [(t.affinity, t.payload["at"], t.payload["of"]) for t in flow.put_at[1]]
    assert shares == [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 2), (1, 1, 2)]
    assert len({t.key for t in flow.put_at[1]}) == 5


def job(**changes: Any) -> RLJobSpec:
    roles = [
        {"name": "rollout", "kind": "synthetic", "config": {"time": {"perItemMs": 1}}},
        {"name": "train", "kind": "synthetic", "config": {"time": {"perItemMs": 1}, "gang": True}},
    ]
    flow = {"name": "synthetic", "config": {"items": 4, "edges": CHAIN}}
    pools = [{"name": "cpu", "roles": ["rollout", "train"], "slots": {"perPod": 2}}]
    return RLJobSpec.model_validate({"flow": flow, "roles": roles, "pools": pools, **changes})


def problems(spec: RLJobSpec) -> list[str]:
    return [str(problem) for problem in registry.check_job(spec)]


def test_a_right_job_has_no_problem():
    assert problems(job()) == []


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"edges": CHAIN}, "spec.flow.config.items: is missing"),
        ({"items": 4, "edges": CHAIN, "itms": 3}, "spec.flow.config.itms: is not a field; did you mean 'items'?"),
        ({"items": 4, "edges": [*CHAIN, {"from": "train", "to": "rollout"}]}, "is a loop; write it as cycle"),
        ({"items": 4, "edges": [*CHAIN, CHAIN[0]]}, "rollout -> train stands there twice"),
        ({"items": 4, "edges": [*CHAIN, {"from": "rollout", "to": "reward"}]}, "nothing takes what 'reward' makes"),
        ({"items": 4, "edges": [{"from": "rollout", "to": "train", "syncMs": 2}]}, "without weights: true"),
        ({"items": 4, "edges": CHAIN, "drift": {"step": 2, "role": "x", "factor": 2}}, "drift.role: 'x' is no role"),
        (
            {"items": 4, "edges": CHAIN, "cycles": [{"roles": ["rollout", "train"]}]},
            "from 'rollout', but units leave the cycle at 'train'",
        ),
        ({"items": 4, "edges": CHAIN, "speeds": {"gpu": 2}}, "'gpu' is no pool, got cpu"),
        (
            {"items": 4, "edges": [{"from": "rollout", "to": "reward"}, {"from": "reward", "to": "train"}]},
            "names role 'reward', got rollout, train",
        ),
    ],
)
def test_a_wrong_graph_is_one_sentence(config, sentence):
    [found] = problems(job(flow={"name": "synthetic", "config": config}))
    assert sentence in found


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"time": {"perItemMs": -1}}, "spec.roles[rollout].config.time.perItemMs: got -1, wanted"),
        ({"tme": {}, "time": {"perItemMs": 1}}, "spec.roles[rollout].config.tme: is not a field; did you mean 'time'?"),
        ({"time": {"perItemMs": 1}, "lanes": 4}, "lanes 4 with service serial; write service: concurrent"),
        ({"time": {"perItemMs": 1}, "memory": {"resident": 5, "peak": 1}}, "peak 1 is below resident 5"),
        ({"time": {"perItemMs": 1}, "ranks": [2]}, "ranks [2] without gang: true"),
        ({"time": {"perItemMs": 1}, "option": 0}, "option 0 of 0 options"),
        ({"time": {"perItemMs": 1}, "gang": True}, "a gang takes rounds, which only 'train' gets"),
        ({"time": {"perItemMs": 1}, "slotsPerWorker": 2}, "got 2, but spec.roles[rollout].slotsPerWorker is 1"),
    ],
)
def test_a_wrong_role_is_one_sentence(config, sentence):
    spec = job()
    role = spec.roles[0].model_copy(update={"config": config})
    [found] = problems(spec.model_copy(update={"roles": [role, spec.roles[1]]}))
    assert sentence in found
