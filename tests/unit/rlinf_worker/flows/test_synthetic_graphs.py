"""Flow synthetic: each graph that cannot run, by its whole sentence; what of a job does not fit its graph; defaults."""

from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import Problem, RLJobSpec
from rlinf_worker.channels import lineage
from rlinf_worker.flows.synthetic import check_config, check_job, synthetic
from tests.fakes.flow import FakeFlow

TIME = {"time": {"perItemMs": 1}}
BY_TOKENS = {"time": {"perItemMs": 1, "byTokens": True}}


def edges(*pairs: str, weights: str = "") -> list[dict[str, Any]]:
    found = [dict(zip(("from", "to"), pair.split("-"), strict=True)) for pair in pairs]
    ends = weights.split("-") if weights else []
    return found + ([{"from": ends[0], "to": ends[1], "weights": True}] if ends else [])


def config(*pairs: str, weights: str = "", cycle: str = "", **more: Any) -> dict[str, Any]:
    inside = {"cycles": [{"roles": one.split("-")} for one in cycle.split()]} if cycle else {}
    return {"items": 4, "edges": edges(*pairs, weights=weights), **inside, **more}


def sentence(wrong: dict[str, Any]) -> str:
    with pytest.raises(InvalidManifest) as caught:
        check_config(wrong)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (config("a-b", "a-b"), "edges: a -> b stands there twice; remove one"),
        (
            {"items": 1, "edges": [*edges("a-b", weights="b-a"), *edges(weights="b-c")]},
            "edges: two of them have weights: true, and one role publishes; leave one",
        ),
        (config("a-b", "b-a"), "is a loop; write it as cycle, or make one edge weights: true"),
        (config("b-c", cycle="a-a"), "cycles: roles 'a' twice; write two roles"),
        (
            config("a-c", "b-c", cycle="a-b"),
            "edges: from 'a', but units leave the cycle at 'b'; write from: b",
        ),
        (
            config("x-b", "b-c", cycle="a-b"),
            "edges: to 'b', but units enter the cycle at 'a'; write to: a",
        ),
        (
            config("x-a", "y-a", "b-c", cycle="a-b"),
            "edges: two of them to 'a', and who asks in a cycle has one input; leave one",
        ),
        (
            config("b-c", "d-c", cycle="a-b b-d"),
            "cycles: 'b' is in two of them; give each roles of its own",
        ),
        (config("a-b", units={"x": 4}), "units: 'x' is no role of the edges; write one of a, b"),
        (
            config("a-b", units={"b": 6}),
            "units: 'b' has 6, and each of the 4 tickets becomes as many; write a multiple",
        ),
        (
            config("b-c", cycle="a-b", units={"b": 8}),
            "units: of 'b', who answers in a cycle and has those of 'a'; write them there",
        ),
        (
            config("b-c", cycle="a-b", units={"a": 8}),
            "units: 'a' has 8, and who asks in a cycle has its 4 tickets; remove it",
        ),
        (
            config("a-b", "b-c", units={"b": 8, "c": 12}),
            "units: 'b' has 8 and 'c' 12; write multiples of each other",
        ),
        (
            config("x-a", "b-c", cycle="a-b", units={"a": 8}),
            "units: 'b' puts units together, and the units of a group may be at several workers of a cycle;",
        ),
        (
            config("a-b", units={"a": 8}),
            "units: 'a' makes several of each ticket and puts them together; leave the fewer ones out",
        ),
        (
            config("a-b", "b-c", "b-d", "d-c", units={"b": 8, "d": 8}),
            "edges: 'b' puts units together and feeds others, too; add a role for that",
        ),
        (
            config("x-b", "a-b", "b-c", units={"b": 8}),
            "edges: 'b' puts units together and has several inputs; add a role for that",
        ),
        (
            config("b-c", cycle="a-b", weights="b-a"),
            "edges: 'b' is in a cycle and cannot end the step; add a role behind the cycle",
        ),
        (
            config("a-b", "b-c", weights="b-a"),
            "edges: 'b' publishes weights but feeds other roles; the last role publishes",
        ),
        (config("a-b", "a-c", weights="c-a"), "edges: nothing takes what 'b' makes; add an edge to 'c'"),
        (config("a-b", weights="c-a"), "edges: nothing takes what 'b' makes; add an edge to 'c'"),
        (config(weights="c-a"), "edges: nothing takes what 'a' makes; add an edge to 'c'"),
        (
            config("a-b", drift={"step": 1, "role": "x", "factor": 2}),
            "drift.role: 'x' is no role of the edges; write one of a, b",
        ),
        ({"items": 1, "edges": edges("a-a")}, "an edge from 'a' to itself; write a cycle, or another role"),
        (
            {"items": 1, "edges": [{"from": "a", "to": "b", "syncMs": 2.5}]},
            "syncMs 2.5 on an edge without weights: true; remove it",
        ),
    ],
)
def test_a_graph_that_cannot_run_is_told_what_to_write(wrong, says):
    assert says in sentence(wrong)


@pytest.mark.parametrize(
    "right",
    [
        config("a-b"),
        config("a-b", weights="b-a"),
        config("a-b", "a-c", "b-d", "c-d", weights="d-a"),
        config("b-c", cycle="a-b"),
        config("b-c", cycle="a-b", weights="c-b"),
        config("b-d", "e-c", cycle="a-b d-e", weights="c-b", units={"d": 8, "c": 8}),
        config("a-b", "b-c", units={"a": 4, "b": 16, "c": 8}, tokens={"mean": 512}, sealed=True),
        config("a-b", drift={"step": 1, "role": "b", "factor": 1000}),
    ],
)
def test_a_graph_that_runs_is_taken(right):
    assert check_config(right)["edges"][0]["from"] == right["edges"][0]["from"]


def test_what_is_not_written_is_there_with_its_default():
    assert check_config(config("b-c", cycle="a-b", channels={"b-c": {}})) == {
        "workload": "",
        "items": 4,
        "units": {},
        "sealed": False,
        "tokens": None,
        "edges": [{"from": "b", "to": "c", "weights": False, "syncMs": 0.0}],
        "cycles": [{"roles": ["a", "b"], "roundTrips": 1, "hopMs": 0.0, "stages": 1}],
        "drift": None,
        "speeds": {},
        "channels": check_config(config("b-c", channels={"b-c": {}}))["channels"],
    }


CYCLE = {"roles": ["a", "b"]}


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [("items", 1, 1_000_000), ("workload", "", "w" * 200)],
)
def test_the_bounds_of_a_flow_are_inside(field, least, most):
    for value in (least, most):
        assert check_config({**config("a-b"), field: value})[field] == value
    beyond = [0, 1_000_001] if isinstance(most, int) else ["w" * 201]
    for value in beyond:
        assert f"spec.flow.config.{field}: " in sentence({**config("a-b"), field: value})


@pytest.mark.parametrize(("field", "most"), [("roundTrips", 100_000), ("stages", 64)])
def test_the_bounds_of_a_cycle_are_inside(field, most):
    def with_value(value: int) -> dict[str, Any]:
        return {**config("b-c"), "cycles": [{**CYCLE, field: value}]}

    assert [check_config(with_value(value))["cycles"][0][field] for value in (1, most)] == [1, most]
    for value in (0, most + 1):
        assert f"spec.flow.config.cycles[0].{field}: " in sentence(with_value(value))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"drift": {"step": 0, "role": "a", "factor": 1}}, "drift.step"),
        ({"drift": {"step": 1, "role": "a", "factor": 0}}, "drift.factor"),
        ({"drift": {"step": 1, "role": "a", "factor": 1001}}, "drift.factor"),
        ({"tokens": {"mean": 0}}, "tokens.mean"),
        ({"tokens": {"mean": 1, "sigma": 6}}, "tokens.sigma"),
        ({"units": {"a": 0}}, "units"),
        ({"speeds": {"cpu": 0}}, "speeds"),
        ({"speeds": {"cpu": 1001}}, "speeds"),
        ({"channels": {"c" * 64: {}}}, "channels"),
        ({"edges": []}, "edges"),
        ({"cycles": [{"roles": ["a"]}]}, "cycles[0].roles"),
        ({"cycles": [{"roles": ["a", "b", "c"]}]}, "cycles[0].roles"),
    ],
)
def test_what_is_out_of_bounds_is_named_by_its_field(wrong, field):
    assert f"spec.flow.config.{field}" in sentence({**config("a-b"), **wrong})


# --- graph and job ----------------------------------------------------------------------------------------------------
def job(flow: dict[str, Any], **roles: dict[str, Any]) -> RLJobSpec:
    made = [{"name": name, "kind": "synthetic", "config": TIME, **more} for name, more in roles.items()]
    pools = [
        {"name": "cpu", "roles": list(roles), "slots": {"perPod": 8}, "pods": 4},
        {"name": "gpu", "roles": list(roles), "slots": {"perPod": 8}},
    ]
    return RLJobSpec.model_validate({"flow": {"name": "synthetic", "config": flow}, "roles": made, "pools": pools})


def ranks(*allowed: int) -> dict[str, Any]:
    return {**TIME, "gang": True, "ranks": list(allowed)}


@pytest.mark.parametrize(
    ("spec", "problems"),
    [
        (job(config("a-b"), a={}, b={}), []),
        (job(config("a-b", speeds={"cpu": 2, "gpu": 1000}), a={}, b={}), []),
        (
            job(config("a-b", speeds={"cpu": 2, "tpu": 1}), a={}, b={}),
            [("spec.flow.config.speeds", "'tpu' is no pool, got cpu, gpu; write one of these")],
        ),
        (
            job(config("a-b"), b={}),
            [
                (
                    "spec.flow.config.edges",
                    "names role 'a', got b; add it to spec.roles or change the edge",
                )
            ],
        ),
        (
            job(config("a-b"), a={}, b={}, c={"kind": "torch", "config": {}}),
            [("spec.roles[c]", "no edge of spec.flow.config.edges names 'c'; add one or remove the role")],
        ),
        (job(config("a-b"), a={}, b={"config": {**TIME, "gang": True}}), []),
        (
            job(config("a-b"), a={"config": {**TIME, "gang": True}}, b={}),
            [
                (
                    "spec.roles[a].config.gang",
                    "a gang takes rounds, which only 'b' gets, as it ends the steps; write gang: false",
                )
            ],
        ),
        (
            job(config("a-b"), a={"kind": "torch", "config": {"gang": True}}, b={"slotsPerWorker": 2}),
            [
                (
                    "spec.roles[b].config.slotsPerWorker",
                    "got 1, but spec.roles[b].slotsPerWorker is 2; write the same",
                )
            ],
        ),
        (
            job(config("a-b", units={"a": 8, "b": 8}), a={}, b={}),
            [
                (
                    "spec.flow.config.units",
                    "'a' makes 2 units of each ticket, each in a lane; write service: concurrent",
                )
            ],
        ),
        (
            job(config("a-b", tokens={"mean": 512}), a={"config": BY_TOKENS}, b={"config": BY_TOKENS}),
            [],
        ),
        (
            job(config("a-b"), a={"config": BY_TOKENS}, b={}),
            [
                (
                    "spec.roles[a].config.time.byTokens",
                    "true, and the flow says nothing of tokens; write spec.flow.config.tokens: {mean: 512, sigma: 0.8}",
                )
            ],
        ),
        (job(config("a-b"), a={}, b={"workers": {"min": 2, "max": 4}, "config": ranks(1, 2)}), []),
        (job(config("a-b"), a={}, b={"workers": {"min": 2, "max": 4}, "config": ranks(4, 5)}), []),
        (
            job(config("a-b"), a={}, b={"workers": {"min": 2, "max": 4}, "config": ranks(1, 5)}),
            [("spec.roles[b].workers", "none of ranks [1, 5] is within 2 to 4; change spec.roles[b].config.ranks")],
        ),
    ],
)
def test_what_only_graph_and_roles_together_say_is_told_with_its_field(spec, problems):
    assert list(check_job(spec)) == [Problem(field=field, message=message) for field, message in problems]


# --- tickets and channels ---------------------------------------------------------------------------------------------
async def run(flow: dict[str, Any], *, steps: int = 1) -> FakeFlow:
    fake = FakeFlow(check_config(flow), workers=lambda role: {"a": 2}.get(role, 1), steps=steps)
    await synthetic(fake)
    return fake


async def test_a_chain_has_a_queue_per_edge_and_the_last_one_takes_rounds():
    fake = await run(config("a-b", "b-c", weights="c-a"))
    assert fake.declared == [
        ("source", "tickets", "a"),
        ("queue", "a-b", "a", "b", {"rounds": False, "joins": "", "together": False}),
        ("queue", "b-c", "b", "c", {"rounds": True, "joins": "", "together": False}),
        ("weights", "c", "a"),
    ]
    assert fake.payloads == {"tickets": {}, "a-b": {"bytes": "bytes"}, "b-c": {"bytes": "bytes"}}


async def test_a_cycle_says_what_a_hand_over_carries_and_its_tickets_the_place_in_a_share():
    fake = await run(config("b-c", cycle="a-b"))
    assert fake.declared == [
        ("source", "tickets", "a"),
        ("cycle", "cycle-a-b", "a", "b"),
        ("queue", "b-c", "b", "c", {"rounds": True, "joins": "", "together": False}),
    ]
    assert fake.payloads == {
        "tickets": {"at": "int", "of": "int"},
        "cycle-a-b": ({"keys": "list", "tickets": "list", "trip": "int", "sent": "float"}, {"sent": "float"}),
        "b-c": {"bytes": "bytes"},
    }
    assert [t.affinity for t in fake.put_at[1]] == [0, 0, 1, 1]


async def test_a_role_without_an_input_beside_a_cycle_gets_tickets_of_its_own_that_are_pinned_to_nobody():
    fake = await run(config("b-c", "x-c", cycle="a-b"))
    assert ("source", "tickets-x", "x") in fake.declared
    assert fake.payloads["tickets-x"] == {}
    assert {t.affinity for t in fake.put_at[1]} == {None}, "those of the role that is named last"


@pytest.mark.parametrize(("named", "workload"), [({}, "synthetic"), ({"workload": "w"}, "w")])
async def test_a_unit_is_named_by_its_workload_step_and_place(named, workload):
    fake = await run(config("a-b", **named), steps=2)
    keys = {step: [t.key for t in tickets] for step, tickets in fake.put_at.items()}
    assert keys == {step: [lineage.sample(workload, step, index=i, sample=0) for i in range(4)] for step in (1, 2)}
