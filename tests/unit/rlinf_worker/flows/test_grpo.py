"""Flow grpo: its channels, whose turn which row is, and what it says of a manifest that cannot be."""

from typing import Any

import pytest

from rlinf_api.errors import InvalidManifest
from rlinf_api.job import RLJobSpec
from rlinf_worker.flows import registry
from rlinf_worker.flows.grpo import PRESETS, check_config, check_job, grpo
from rlinf_worker.roles.samples import ROWS, is_evaluation
from tests.fakes.flow import FakeFlow


async def put(
    *, rows: int, steps: int = 2, seed: int = 0, evaluated: int = 0, after: FakeFlow | None = None, **config: Any
) -> FakeFlow:
    """`after`: a job that this one goes on from."""
    gone_on: dict[str, Any] = {"first": max(after.put_at) + 1, "state": after.state} if after is not None else {}
    flow = FakeFlow(check_config({"promptsPerStep": 4, **config}), workers=lambda role: 1, steps=steps, **gone_on)
    flow.facts[ROWS] = {"count": rows, "digest": "d", "eval_count": evaluated, "eval_digest": "e"}
    flow.seed = seed
    await grpo(flow)
    return flow


async def test_it_declares_prompts_samples_rewards_and_the_weights():
    flow = await put(rows=10)
    assert flow.declared == [
        ("source", "prompts", "rollout"),
        ("queue", "samples", "rollout", "reward", {}),
        ("queue", "rewarded", "reward", "actor", {"rounds": True}),
        ("weights", "actor", "rollout"),
    ]
    assert all(flow.payloads.values()), "each says what it carries"


async def test_each_pass_has_each_row_once_in_an_order_of_its_own():
    flow = await put(rows=6, steps=6)  # 24 groups: 4 passes
    tickets = [ticket for number in sorted(flow.put_at) for ticket in flow.put_at[number]]
    passes = [[t.payload["index"] for t in tickets if t.payload["pass"] == data_pass] for data_pass in range(4)]
    assert [sorted(rows) for rows in passes] == [list(range(6))] * 4
    assert len({tuple(rows) for rows in passes}) > 1
    assert [t.key for t in tickets] == [f"train:{t.payload['pass']}/{t.payload['index']}/0" for t in tickets]
    assert len({t.key for t in tickets}) == 24


async def test_a_step_has_the_rows_that_it_had_whenever_it_is_made():
    whole, again, other = await put(rows=7, steps=3), await put(rows=7, steps=3), await put(rows=7, steps=3, seed=1)
    assert whole.put_at == again.put_at
    assert whole.put_at != other.put_at


@pytest.mark.parametrize("per_step", [4, 6, 3])
async def test_a_job_that_goes_on_with_more_or_fewer_groups_a_step_goes_on_where_it_stood_in_the_data(per_step):
    begun = await put(rows=20, steps=2)
    rest = await put(rows=20, steps=4, after=begun, promptsPerStep=per_step)
    assert sorted(rest.put_at) == [3, 4]
    whole = await put(rows=20, steps=1, promptsPerStep=20)
    keys = [t.key for flow in (begun, rest) for number in sorted(flow.put_at) for t in flow.put_at[number]]
    assert keys == [t.key for t in whole.put_at[1]][: 8 + 2 * per_step]
    begun.state.clear()
    older = await put(rows=20, steps=3, after=begun)
    assert older.put_at[3] == (await put(rows=20, steps=3)).put_at[3], "a checkpoint of before has no word of it"


async def test_fewer_rows_than_prompts_of_a_step_are_asked_again_in_the_next_pass():
    flow = await put(rows=1, steps=1)
    assert [t.key for t in flow.put_at[1]] == [f"train:{data_pass}/0/0" for data_pass in range(4)]


async def test_the_first_rows_are_evaluated_before_the_first_step_and_after_every_few():
    flow = await put(rows=10, steps=5, evaluated=3, evaluation={"everySteps": 2, "prompts": 2})
    plain = await put(rows=10, steps=5)
    told = {number: [t for t in tickets if is_evaluation(t.key)] for number, tickets in flow.put_at.items()}
    assert {number: [t.key for t in tickets] for number, tickets in told.items()} == {
        1: ["eval:0/0/0", "eval:0/1/0"], 2: [], 3: ["eval:2/0/0", "eval:2/1/0"], 4: [],
        5: ["eval:4/0/0", "eval:4/1/0"],
    }  # fmt: skip
    assert [t.payload["index"] for t in told[3]] == [0, 1]
    assert all(t.rare == is_evaluation(t.key) for tickets in flow.put_at.values() for t in tickets)
    assert {n: [t for t in tickets if not is_evaluation(t.key)] for n, tickets in flow.put_at.items()} == plain.put_at
    all_of_it = await put(rows=10, steps=1, evaluated=3)
    assert len(all_of_it.put_at[1]) == 4 + 3, "no more than there are"


@pytest.mark.parametrize("kind", PRESETS)
def test_a_preset_sets_fields_that_the_config_shows(kind):
    loss = check_config({"loss": {"kind": kind}})["loss"]
    assert {name: loss[name] for name in PRESETS[kind]} == PRESETS[kind]
    assert loss["kind"] == kind


def test_what_is_written_stands_above_the_preset():
    loss = check_config({"loss": {"kind": "dapo", "clipHigh": 0.5, "overlongBuffer": 3, "clipLow": None}})["loss"]
    assert (loss["clip_high"], loss["clip_low"], loss["overlong_buffer"]) == (0.5, None, 3)
    assert loss["aggregation"] == "token-mean", "the rest is the preset's"


def test_a_loss_of_ones_own_has_the_fields_around_it():
    loss = check_config({"loss": {"kind": "my.losses:own", "aggregation": "token-mean", "scale": "none"}})["loss"]
    assert (loss["kind"], loss["aggregation"], loss["scale"]) == ("my.losses:own", "token-mean", "none")
    assert (loss["clip_low"], loss["clip_high"], loss["correction"]) == (None, None, "truncated")


async def test_engine_and_actor_that_disagree_are_watched_and_steps_of_which_nothing_is_left():
    assert (await put(rows=10)).watches == {
        "engine_kl": (0.01, "LogprobMismatch"), "empty_steps": (0, "NothingLearnt"),
    }  # fmt: skip
    assert (await put(rows=10, engineKlBound=0.5)).watches["engine_kl"][0] == 0.5


def test_no_loss_at_all_is_grpo():
    assert check_config({})["loss"] == check_config({"loss": {"kind": "grpo"}})["loss"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"samplesPerPrompt": 1}, "spec.flow.config.samplesPerPrompt: got 1, wanted at least 2"),
        ({"loss": {"kind": "dapoo"}}, "spec.flow.config.loss.kind: got 'dapoo', .*did you mean 'dapo'"),
        (
            {"loss": {"kind": "sgd"}},
            "loss.kind: got 'sgd', wanted one of grpo, .* or module:function; write one of them",
        ),
        ({"loss": {"kind": "my.losses:one:two"}}, "loss.kind: got 'my.losses:one:two'"),
        (
            {"loss": {"kind": "losses:own", "clipHigh": 0.2}},
            "ratio, clipLow and clipHigh are of our losses, and kind 'losses:own' is your own; leave them out",
        ),
        ({"loss": {"kind": "losses:own", "ratio": "sequence"}}, "ratio, clipLow and clipHigh are of our losses"),
        ({"engineKlBound": 0}, "spec.flow.config.engineKlBound: got 0: Input should be greater than 0"),
        ({"loss": {"clip": 1}}, "spec.flow.config.loss.clip: is not a field"),
        ({"promptsPerStep": 2, "updatesPerStep": 3}, "updatesPerStep 3 is above promptsPerStep 2"),
        ({"loss": {"klCoefficient": 0.1}}, "spec.flow.config.loss.klCoefficient: is not a field"),
        ({"optimizer": {"kind": "sgd"}}, "spec.flow.config.optimizer.kind: got 'sgd'"),
        (
            {"evaluation": {"topK": 5}},
            "topK and topP choose among what is drawn, and at temperature 0 nothing is; raise it",
        ),
        ({"evaluation": {"samples": 4}}, "samples 4 at temperature 0 are all the same; raise it, or write samples: 1"),
        ({"evaluation": {"temperature": 0.001}}, "temperature 0.001 is neither 0 nor at least 0.01"),
    ],
)
def test_a_wrong_config_is_one_sentence(config, says):
    with pytest.raises(InvalidManifest, match=says):
        check_config(config)


def spec(**changes: Any) -> RLJobSpec:
    roles = [
        {"name": "rollout", "kind": "transformers"},
        {"name": "reward", "kind": "rule"},
        {"name": "actor", "kind": "fsdp", "config": {"tokenBudget": 64}},
    ]
    whole = {
        "flow": {"name": "grpo"}, "model": {"path": "/m"}, "data": {"train": "/d.jsonl"}, "roles": roles,
        "pools": [{"name": "cpu", "roles": ["rollout", "reward", "actor"]}],
    }  # fmt: skip
    return RLJobSpec.model_validate({**whole, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"model": None}, ["spec.model: is missing; write {path: ...}"]),
        ({"data": None}, ["spec.data.train: is missing; write a .jsonl or .parquet file"]),
        ({"data": {"train": "/saved/dataset", "eval": "/r.parquet"}}, []),
        ({"data": {"train": "/rows.csv"}}, ["spec.data.train: got '/rows.csv', wanted a file whose name ends in"]),
        (
            {"data": {"train": "/r.jsonl", "eval": "/rows.csv"}},
            ["spec.data.eval: got '/rows.csv', wanted a file whose name ends in"],
        ),
    ],
)
def test_model_and_data_are_asked_for(changes, says):
    found = [str(problem) for problem in check_job(spec(**changes))]
    assert len(found) == len(says), found
    assert all(sentence.startswith(wanted) for sentence, wanted in zip(found, says, strict=True)), found


OWN_RATIO = {"loss": {"kind": "losses:own"}, "oldLogprobs": "engine"}


@pytest.mark.parametrize(
    ("staleness", "config", "is_refused"),
    [
        (1, OWN_RATIO, True),
        (0, OWN_RATIO, False),
        (1, {**OWN_RATIO, "loss": {"kind": "losses:own", "correction": "none"}}, False),
        (1, {**OWN_RATIO, "oldLogprobs": "recompute"}, False),
        (1, {**OWN_RATIO, "loss": {"kind": "rloo"}}, False),
    ],
)
def test_staleness_that_nothing_of_ours_corrects_is_refused_unless_that_is_written(staleness, config, is_refused):
    """Ours have the ratio to what the engine said; what a user's own makes of it nobody knows."""
    found = list(check_job(spec(flow={"name": "grpo", "maxStaleness": staleness, "config": config})))
    assert [problem.field for problem in found] == ["spec.flow.config.loss.correction"] * is_refused
    assert all("by your own loss alone; write oldLogprobs: recompute, or correction: none" in str(p) for p in found)


def test_an_actor_of_this_flow_has_a_config_of_its_own():
    assert list(registry.check_job(spec())) == []
    roles = [
        {"name": "rollout", "kind": "transformers", "config": {"minResponseTokens": 9, "maxResponseTokens": 3}},
        {"name": "reward", "kind": "rule", "config": {"function": "sums"}},
        {"name": "actor", "kind": "fsdp", "config": {"tokenBudget": 1}},
    ]
    found = [str(problem) for problem in registry.check_job(spec(roles=roles))]
    assert [line.split(":")[0] for line in found] == [
        "spec.roles[rollout].config", "spec.roles[reward].config", "spec.roles[actor].config.tokenBudget",
    ]  # fmt: skip
    assert "function 'sums' is not known" in found[1]
