"""The trainer of language models as the step loop calls it: rounds that come, steps that are void, several updates, and
what it says of a step."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from rlinf_api import names
from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.algorithms.losses.tokens import TokenLossConfig
from rlinf_worker.channels.protocol import Item, LineageKey, PolicyVersion, Round
from rlinf_worker.checkpoints.store import Checkpoints
from rlinf_worker.flows import grpo
from rlinf_worker.roles import models
from rlinf_worker.roles.actor.schema import TextFsdpConfig
from rlinf_worker.roles.actor.text import TextTrainer, _learner_config
from rlinf_worker.roles.actor.text_learner import TextLearnerConfig
from rlinf_worker.roles.protocol import FlowSettings, TrainerStep
from rlinf_worker.roles.samples import SAMPLING
from tests.fakes import reasoning
from tests.fakes.context import FakeContext, Stage

SAMPLES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning.make_folder(tmp_path_factory.mktemp("trainer"))


def test_a_model_that_is_read_leaves_no_bar_in_the_log_whose_last_lines_people_are_told(folder, capfd):
    models.language_model(str(folder / "base"), dtype=torch.float32)
    assert capfd.readouterr() == ("", "")


class Seen(TextTrainer):
    context: FakeContext


def fact(folder, **changes):
    plain = {"temperature": 1.0, "dtype": "float32", "stops": [2], "least": 0, "most": 8}
    return {**plain, "tokenizer": models.digest_of(str(folder / "base")), **changes}


async def trainer_of(folder, *, steps=5, sampling=None, config=None, **flow):
    stage = Stage()
    checked = grpo.check_config({"promptsPerStep": 4, "optimizer": {"learningRate": 0.01}, **flow})
    stage.flow = FlowSettings(
        name="grpo", steps=steps, seed=3, max_staleness=0, order="lineage", config=checked,
        model=str(folder / "base"), train_data="",
    )  # fmt: skip
    stage.facts[SAMPLING] = fact(folder, **(sampling or {}))
    trainer = Seen()
    trainer.context = stage.context("actor", **(config or {}))
    await trainer.build(trainer.context)
    return trainer


def item(number, *, step=1, branch=0, reward=None):
    luck = np.random.default_rng([number, step])
    lengths = luck.integers(1, 8, SAMPLES).astype(np.int32)
    count = int(lengths.sum())
    payload = {
        "prompt": luck.integers(4, 40, 5).astype(np.int32), "tokens": luck.integers(4, 40, count).astype(np.int32),
        "logprobs": -luck.uniform(2, 5, count).astype(np.float32), "versions": np.zeros((count, 2), np.int32),
        "lengths": lengths, "finished": np.array([True, True, True, number % 2 == 0]),
        "reward": (luck.normal(size=SAMPLES) if reward is None else np.full(SAMPLES, reward)).astype(np.float32),
        "parts": {"right": [1.0, 0.0, 0.0, 1.0]},
    }  # fmt: skip
    return Item(
        channel="rewarded", key=LineageKey(f"train:0/{number}/0"), payload=payload, step=step, branch=branch,
        source=WorkerId("reward/0"), version=PolicyVersion(branch, step - 1),
    )  # fmt: skip


def round_of(items, *, number, step=1, branch=0, last=False):
    return Round(step=step, branch=branch, number=number, last=last, items=tuple(items), total_weight=1.0)


def step_of(items, *, step=1, branch=0):
    return TrainerStep(number=step, branch=branch, units=tuple((one,) for one in items))


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights(PolicyVersion(0, 1)).items()}


def close(one, other, *, atol=2e-5):
    """AdamW's first step is the sign of a gradient: where that is nearly 0, rounding is seen."""
    assert set(one) == set(other)
    apart = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    return bool((apart < atol).float().mean() > 0.99)


async def test_rounds_are_worked_on_as_they_come_and_a_step_is_the_same(folder):
    items = [item(number) for number in range(4)]
    whole, cut = await trainer_of(folder), await trainer_of(folder)
    numbers = await whole.train(step_of(items))
    await cut.take(round_of(items[:3], number=0))
    assert cut.context.gang.places[-1] == (0, 1, 0), "ranks meet before a pass, which holds collectives"
    assert cut.context.worked[-1][1].units == 3
    again = await cut.train(step_of(items))
    assert cut.context.worked[-1][1].units == 1, "the rest"
    assert close(weights(whole), weights(cut))
    for name in ("grad_norm", "policy_loss", "entropy", "reward_mean", "tokens_count"):
        assert again[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-7), name


async def test_rounds_of_a_void_step_leave_nothing(folder):
    items = [item(number, branch=1) for number in range(4)]
    left_alone, went_back = await trainer_of(folder), await trainer_of(folder)
    await left_alone.train(step_of(items, branch=1))
    await went_back.take(round_of([item(7), item(8)], number=0))
    await went_back.take(round_of(items[:2], number=0, branch=1))
    await went_back.train(step_of(items, branch=1))
    assert close(weights(left_alone), weights(went_back))


@pytest.mark.parametrize(
    ("changes", "is_by_rounds"),
    [({}, True), ({"updatesPerStep": 2}, False), ({"loss": {"kind": "reinforce++"}}, False)],
)
async def test_what_needs_the_whole_step_waits_for_it(folder, changes, is_by_rounds):
    trainer = await trainer_of(folder, **changes)
    await trainer.take(round_of([item(0)], number=0))
    assert bool(trainer.context.worked and trainer.context.worked[-1][1].tokens) == is_by_rounds
    numbers = await trainer.train(step_of([item(number) for number in range(4)]))
    assert numbers["groups_count"] == 4
    assert numbers["grad_norm"] > 0


async def test_several_updates_go_over_a_share_of_the_groups_each_against_one_old_policy(folder):
    one, two = await trainer_of(folder), await trainer_of(folder, updatesPerStep=2)
    items = [item(number) for number in range(4)]
    assert (await one.train(step_of(items)))["approx_kl"] == 0.0, "its ratio is 1"
    numbers = await two.train(step_of(items))
    assert numbers["approx_kl"] > 0, "the second update's policy is not the first one's"
    assert numbers["tokens_count"] == sum(int(each.payload["lengths"].sum()) for each in items)
    states = two._learner.tensors()["updates"]
    assert {float(count) for count in states.values()} == {2.0}


async def test_the_engines_logprobs_are_the_old_ones_where_the_config_says_so(folder):
    items = [item(number) for number in range(4)]
    trainer = await trainer_of(folder, oldLogprobs="engine")
    assert trainer._learner.config.loss.correction_cap is None, "the ratio has it"
    assert (await trainer.train(step_of(items)))["approx_kl"] > 0
    corrected, plain = await trainer_of(folder), await trainer_of(folder, loss={"correction": "none"})
    assert (await corrected.train(step_of(items)))["capped_fraction"] > 0
    assert (await plain.train(step_of(items)))["capped_fraction"] == 0
    assert not close(weights(corrected), weights(plain))


@pytest.mark.parametrize("changes", [{}, {"updatesPerStep": 2}])
async def test_nothing_is_learnt_from_an_evaluation_and_it_is_told_with_its_step(folder, changes):
    items = [item(number) for number in range(4)]
    extra = [
        dataclasses.replace(item(9 + n, reward=reward), key=LineageKey(f"eval:0/{n}/0"))
        for n, reward in ((0, 1.0), (1, 0.0), (2, 0.0))
    ]
    extra[1].payload["reward"][2] = 1.0  # one of its samples is right
    plain, evaluated = await trainer_of(folder, **changes), await trainer_of(folder, **changes)
    wanted = await plain.train(step_of(items))
    await evaluated.take(round_of([extra[0], items[0]], number=0))
    told = await evaluated.train(step_of([*extra, *items]))
    assert close(weights(plain), weights(evaluated))
    for name in ("groups_count", "tokens_count", "reward_mean", "response_tokens_mean"):
        assert told[name] == pytest.approx(wanted[name]), name
    lengths = np.concatenate([one.payload["lengths"] for one in extra])
    assert {name: told[name] for name in told if name.startswith("eval_")} == {
        "eval_reward_mean": pytest.approx(1.25 / 3), "eval_pass_fraction": pytest.approx(2 / 3),
        "eval_groups_count": 3.0,
        "eval_response_tokens_mean": pytest.approx(lengths.mean()),
    }  # fmt: skip
    assert not [name for name in wanted if name.startswith("eval_")]


def aged(one, *, by):
    """Every second token is of weights that are so many updates older than the step's."""
    versions = np.full((len(one.payload["tokens"]), 2), (one.branch, one.step - 1), np.int32)
    versions[::2, 1] -= by
    one.payload["versions"] = versions
    return one


async def test_a_step_says_how_old_its_tokens_are_and_compares_engine_and_actor_by_the_fresh_ones(folder):
    step = 4
    fresh, mixed = ([aged(item(n, step=step), by=by) for n in range(4)] for by in (0, 2))
    for one in mixed:
        one.payload["logprobs"][::2] -= 30.0  # of another policy: no mistake of the engine's
    one, other = await trainer_of(folder), await trainer_of(folder)
    plain, told = await one.train(step_of(fresh, step=step)), await other.train(step_of(mixed, step=step))
    assert (plain["staleness_mean"], plain["staleness_max"]) == (0.0, 0.0)
    old = sum(len(each.payload["tokens"][::2]) for each in mixed)
    assert told["staleness_mean"] == pytest.approx(2 * old / told["tokens_count"])
    assert told["staleness_max"] == 2.0
    assert told["engine_difference_max"] < 30.0, "of fresh tokens alone"
    assert told["engine_difference_max"] <= plain["engine_difference_max"]
    assert told["capped_fraction"] > 0.2, "but the old ones' weights are truncated"


async def test_of_a_step_without_fresh_tokens_nothing_is_said_of_the_engine(folder):
    items = [aged(item(n, step=3), by=0) for n in range(2)]
    for one in items:
        one.payload["versions"][:, 1] = 1
    told = await (await trainer_of(folder)).train(step_of(items, step=3))
    assert told["staleness_mean"] == 1.0
    assert not {"engine_kl", "engine_difference_max"} & set(told)


async def test_long_samples_lose_where_the_loss_says_so(folder):
    items = [item(number, reward=1.0) for number in range(4)]
    plain, shaped = await trainer_of(folder), await trainer_of(folder, loss={"overlongBuffer": 6})
    assert (await plain.train(step_of(items)))["grad_norm"] == pytest.approx(0.0, abs=1e-6)
    assert (await shaped.train(step_of(items)))["grad_norm"] > 0.01


async def test_what_a_step_says(folder):
    items = [item(0), item(1), item(2, reward=1.0)]
    numbers = await (await trainer_of(folder)).train(step_of(items))
    lengths = np.concatenate([each.payload["lengths"] for each in items])
    rewards = [each.payload["reward"].astype(np.float64) for each in items]
    assert numbers["reward_mean"] == pytest.approx(np.mean(rewards), rel=1e-6)
    assert numbers["reward_std"] == pytest.approx(np.mean([reward.std() for reward in rewards]), rel=1e-6)
    assert numbers["same_reward_fraction"] == pytest.approx(1 / 3)
    assert numbers["reward_right_mean"] == 0.5
    assert (numbers["response_tokens_mean"], numbers["response_tokens_max"]) == (lengths.mean(), lengths.max())
    assert numbers["truncated_fraction"] == pytest.approx(1 / 12)
    assert numbers["entropy"] == pytest.approx(np.log(64), rel=0.05), "of a model that knows nothing"


async def test_groups_that_are_all_right_and_all_wrong_are_told_apart(folder):
    """A reward above 0 is right, as in an evaluation."""
    items = [item(0, reward=1.0), item(1, reward=0.0), item(2, reward=-1.0), item(3, reward=0.25), item(4)]
    items[4].payload["reward"] = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
    numbers = await (await trainer_of(folder)).train(step_of(items))
    told = [numbers[name] for name in ("all_right_fraction", "all_wrong_fraction", "same_reward_fraction")]
    assert told == [2 / 5, 2 / 5, 4 / 5]


async def test_the_mean_reward_is_of_what_is_learnt_from_whatever_its_parts_are_called(folder):
    """A function that names one of its parts `reward`; one that failed for a group, which got zeros; a weight."""
    named, failed, weighed = item(0, reward=3.0), item(1, reward=0.0), item(2, reward=0.5)
    named.payload["parts"] = {"reward": [1.0] * SAMPLES, "short": [2.0] * SAMPLES}
    failed.payload["parts"] = {"reward": [0.0] * SAMPLES}
    weighed.payload["parts"] = {"reward": [1.0] * SAMPLES}
    for items, wanted in (
        ([named, failed], {"reward_mean": 1.5, "reward_reward_mean": 1.0, "reward_short_mean": 2.0}),
        ([weighed], {"reward_mean": 0.5}),
    ):
        numbers = await (await trainer_of(folder)).train(step_of(items))
        assert {n: numbers[n] for n in numbers if n.startswith("reward_") and n.endswith("_mean")} == wanted


@pytest.mark.parametrize("apart", [0.0, 0.7, 500.0])
async def test_an_engine_that_says_something_else_is_a_number(folder, apart):
    """Of half of the tokens the actor thinks `apart` nats more."""
    trainer, items = await trainer_of(folder), [item(0), item(1)]
    groups = [trainer._answers(each) for each in items]
    trainer._learner.score(groups)
    for each, group in zip(items, groups, strict=True):
        each.payload["logprobs"] = group.old.numpy().astype(np.float32)
        each.payload["logprobs"][::2] -= apart
    own = np.concatenate([np.where(np.arange(len(group.tokens)) % 2, 0.0, apart) for group in groups])
    numbers = await trainer.train(step_of(items))
    seen = np.minimum(own, 40.0)
    assert numbers["engine_kl"] == pytest.approx(np.mean(np.exp(seen) - 1 - seen), rel=1e-3, abs=1e-6)
    weights = np.exp(seen)
    fraction = weights.sum() ** 2 / (len(own) * (weights**2).sum())
    assert numbers["engine_sample_fraction"] == pytest.approx(fraction, rel=1e-3)


async def test_a_step_is_told_to_tensorboard_by_the_first_rank_where_a_folder_is_named(folder, tmp_path, monkeypatch):
    trainer = await trainer_of(folder, config={"tensorboard": str(tmp_path / "tb")})
    numbers = await trainer.train(step_of([item(0), item(1)]))
    [file] = (tmp_path / "tb").iterdir()
    told = file.read_bytes()
    assert "tfevents" in file.name, "by which TensorBoard finds it"
    assert all(name.encode() in told for name in numbers)
    monkeypatch.setenv(names.ENV_OUTPUT_DIR, str(tmp_path / "work"))
    await (await trainer_of(folder, config={"tensorboard": "tb"})).train(step_of([item(0)]))
    assert len(list((tmp_path / "work" / "tb").iterdir())) == 1
    await (await trainer_of(folder)).train(step_of([item(0)]))
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["tb"], "who names no folder gets none"
    monkeypatch.delenv(names.ENV_OUTPUT_DIR)
    with pytest.raises(UserError, match=r"tensorboard is no folder of this pod: got tb, wanted an absolute path"):
        await trainer_of(folder, config={"tensorboard": "tb"})


async def test_a_step_of_which_all_groups_were_dropped_changes_nothing(folder):
    trainer = await trainer_of(folder)
    before = weights(trainer)
    numbers = await trainer.train(step_of([]))
    assert (numbers["groups_count"], numbers["tokens_count"]) == (0, 0)
    assert all(torch.equal(before[name], after) for name, after in weights(trainer).items())
    told = [await trainer.train(step_of(items, step=step)) for step, items in ((2, []), (3, [item(0)]), (4, []))]
    assert [numbers["empty_steps"], *(each["empty_steps"] for each in told)] == [1, 2, 0, 1]


async def test_three_updates_in_a_row_that_are_no_numbers_end_the_job(folder, monkeypatch):
    monkeypatch.delenv(names.ENV_OUTPUT_DIR, raising=False)
    trainer = await trainer_of(folder, steps=9)
    broken = [item(0)]
    broken[0].payload["logprobs"][0] = np.nan
    for number, items in enumerate((broken, broken, [item(1)], broken, broken), 1):
        numbers = await trainer.train(step_of(items, step=number))
        assert numbers["updates_skipped_count"] == float(items is broken)
        assert all(np.isfinite(value) for value in numbers.values()), "metrics are JSON"
    with pytest.raises(UserError, match=r"the gradients of 3 updates in a row are no numbers.*precision: float32$"):
        await trainer.train(step_of(broken, step=6))


async def test_the_groups_of_a_step_that_is_skipped_are_kept_in_the_work_dir(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(names.ENV_OUTPUT_DIR, str(tmp_path))
    trainer = await trainer_of(folder, steps=9)
    for step, is_broken in ((1, False), (2, True), (3, True)):
        items = [item(number, step=step) for number in range(2)]
        if is_broken:
            items[0].payload["logprobs"][0] = np.nan
        await trainer.train(step_of(items, step=step))
    broken = [item(number, step=4) for number in range(2)]
    broken[1].payload["logprobs"][0] = np.nan
    with pytest.raises(UserError, match=rf"their groups are in {tmp_path}/skipped-0.jsonl"):
        await trainer.train(step_of(broken, step=4))
    lines = [json.loads(line) for line in (tmp_path / "skipped-0.jsonl").read_text().splitlines()]
    assert [(line["step"], line["key"]) for line in lines] == [
        (step, f"train:0/{number}/0") for step in (2, 3, 4) for number in range(2)
    ]
    first, wanted = lines[0], item(0, step=2)
    assert np.isnan(first.pop("logprobs")[0])
    for name in ("prompt", "tokens", "lengths"):
        assert first[name] == wanted.payload[name].tolist()
    assert first["reward"] == pytest.approx(wanted.payload["reward"].tolist(), abs=1e-6)
    assert np.mean(first["advantage"]) == pytest.approx(0.0, abs=1e-5)


async def test_another_tokenizer_at_the_rollout_is_told(folder):
    with pytest.raises(UserError, match="actor and rollout have two tokenizers"):
        await trainer_of(folder, sampling={"tokenizer": "other"})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # there is one rank
async def test_a_state_is_read_back_bit_for_bit(folder, tmp_path):
    items = [item(number) for number in range(4)]
    first, second = await trainer_of(folder), await trainer_of(folder)
    await first.train(step_of(items))
    store, version = Checkpoints(str(tmp_path)), PolicyVersion(0, 1)
    first.write(store.begin(version), first.state())
    assert store.finish(version, "{}")
    await first.train(step_of(items, step=2))
    second.read_shards(store.of("b0-1"))
    await second.train(step_of(items, step=2))
    one, other = weights(first), weights(second)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # there is one rank
async def test_updates_that_were_skipped_before_a_checkpoint_count_behind_it(folder, tmp_path, monkeypatch):
    monkeypatch.delenv(names.ENV_OUTPUT_DIR, raising=False)
    broken = item(0)
    broken.payload["logprobs"][0] = np.nan
    first, second = await trainer_of(folder, steps=9), await trainer_of(folder, steps=9)
    for step in (1, 2):
        await first.train(step_of([broken], step=step))
    store, version = Checkpoints(str(tmp_path)), PolicyVersion(0, 2)
    first.write(store.begin(version), first.state())
    assert store.finish(version, "{}")
    second.read_shards(store.of("b0-2"))
    with pytest.raises(UserError, match="the gradients of 3 updates in a row are no numbers"):
        await second.train(step_of([broken], step=3))


# --- what it takes from where -----------------------------------------------------------------------------------------
async def test_tokens_are_scored_by_the_distribution_that_they_were_drawn_from(folder):
    trainer = await trainer_of(folder, sampling={"temperature": 0.5, "stops": [2, 3], "least": 2})
    group = trainer._answers(item(0))
    trainer._learner.score([group])
    prompt, ends = group.prompt.tolist(), np.cumsum(group.lengths)
    for end, length in zip(ends.tolist(), group.lengths.tolist(), strict=True):
        ids = group.tokens[end - length : end].tolist()
        with torch.no_grad():
            logits = trainer._learner.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logits[:2, [2, 3]] = -torch.inf
        wanted = torch.log_softmax(logits / 0.5, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert group.old is not None
        assert group.old[end - length : end].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


async def test_weights_are_published_in_the_engines_dtype_and_trained_in_float32(folder):
    trainer = await trainer_of(folder, sampling={"dtype": "bfloat16"})
    assert {tensor.dtype for tensor in weights(trainer).values()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in trainer._learner.parameters.values()} == {torch.float32}


def test_what_the_manifest_says_of_an_update_is_what_the_learner_gets():
    flow = grpo.check_config({
        "loss": {
            "kind": "dapo", "ratio": "sequence", "clipLow": 0.1, "clipHigh": 0.4, "aggregation": "constant",
            "entropyCoefficient": 0.02, "correctionCap": 3.0,
        },
        "optimizer": {
            "learningRate": 0.5, "betas": [0.7, 0.8], "eps": 1e-5, "weightDecay": 0.3, "maxGradNorm": 7.0,
            "schedule": "cosine", "warmupSteps": 11,
        },
    })  # fmt: skip
    own = {"precision": "bfloat16", "tokenBudget": 99, "activationCheckpointing": True}
    config = TextFsdpConfig.model_validate(own)
    wanted = TextLearnerConfig(
        loss=TokenLossConfig(
            ratio="sequence", clip_low=0.1, clip_high=0.4, aggregation="constant", constant=17,
            entropy_coefficient=0.02, correction_cap=3.0,
        ),
        learning_rate=0.5, betas=(0.7, 0.8), eps=1e-5, weight_decay=0.3, max_grad_norm=7.0, schedule="cosine",
        warmup_steps=11, token_budget=99, precision="bfloat16", activation_checkpointing=True, least=5,
    )  # fmt: skip
    assert _learner_config(flow, config, {"most": 17, "least": 5}) == wanted


OWN = "tests.fakes.reasoning:"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tests.fakes.nowhere:loss", r"loss 'tests.fakes.nowhere:loss' cannot be imported: got ModuleNotFoundError"),
        (
            f"{OWN}no_loss",
            "loss 'tests.fakes.reasoning:no_loss' is not there: got tests.fakes.reasoning has no function",
        ),
    ],
)
async def test_a_loss_that_is_not_there_is_told_as_the_role_loads(folder, kind, says):
    with pytest.raises(UserError, match=says):
        await trainer_of(folder, loss={"kind": kind})


async def test_a_loss_that_raises_is_told_with_its_place(folder):
    trainer = await trainer_of(folder, loss={"kind": f"{OWN}loss_that_raises"})
    with pytest.raises(
        UserError, match=r"loss .*loss_that_raises' raises: got KeyError: 'beta' \(.*reasoning\.py, line"
    ):
        await trainer.train(step_of([item(0)]))


@pytest.mark.parametrize("kind", [*grpo.PRESETS, f"{OWN}reinforce"])
async def test_every_loss_raises_what_is_rewarded(folder, kind):
    """Of one prompt, some first tokens are worth 1: after some steps they are likelier."""
    trainer = await trainer_of(folder, steps=8, loss={"kind": kind})
    rows = []
    for number in range(1, 9):
        items = [item(index) for index in range(4)]
        for each in items:
            payload = each.payload
            payload["lengths"] = np.full(SAMPLES, 2, np.int32)
            payload["tokens"] = np.array([7, 9, 20, 9, 7, 9, 21, 9], np.int32)
            payload["logprobs"] = np.full(8, np.log(1 / 64), np.float32)
            payload["reward"] = np.array([1, 0, 1, 0], np.float32)
        await trainer.train(step_of(items, step=number))
        model = trainer._learner.model
        with torch.no_grad():
            ids = torch.tensor(np.array([each.payload["prompt"] for each in items]), dtype=torch.int64)
            rows.append(torch.softmax(model(ids).logits[:, -1], -1)[:, 7].mean().item())
    assert rows[-1] > 1.5 * rows[0], rows


async def test_an_actor_that_leaves_its_slots_between_rounds_and_steps_learns_the_same(folder):
    stayed, moved = await trainer_of(folder), await trainer_of(folder)

    async def off_and_on():
        had = moved.memory().now
        await moved.offload()
        assert moved.memory().now == 0
        assert all(p.untyped_storage().nbytes() == 0 for p in moved._learner.parameters.values())
        await moved.load()
        assert moved.memory().now == had
        return had

    for step in (1, 2):
        items = [item(number, step=step) for number in range(4)]
        at_rest = await off_and_on()
        for trainer in (stayed, moved):
            await trainer.take(round_of(items[:3], number=0, step=step))
        assert await off_and_on() > 1.3 * at_rest, "gradients that add up leave, too"
        one, other = [await trainer.train(step_of(items, step=step)) for trainer in (stayed, moved)]
        assert {k: v for k, v in one.items() if k != "tokens_per_s"} == {
            k: v for k, v in other.items() if k != "tokens_per_s"
        }
    assert all(torch.equal(tensor, weights(moved)[name]) for name, tensor in weights(stayed).items())
