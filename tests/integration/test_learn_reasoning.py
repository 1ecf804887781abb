"""A smoke of `make learn-reasoning`: its first rows, and that its script is what the learner does."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from rlinf_api import supported
from rlinf_worker.algorithms import groups
from rlinf_worker.algorithms.groups import AdvantageConfig
from rlinf_worker.flows import grpo
from rlinf_worker.roles import models
from rlinf_worker.roles.actor.schema import TextFsdpConfig
from rlinf_worker.roles.actor.scoring import Scorer
from rlinf_worker.roles.actor.text import _learner_config
from rlinf_worker.roles.actor.text_learner import AnswerGroup, TextLearner
from rlinf_worker.roles.reward.schema import RuleConfig
from tests.fakes import reasoning
from tools.learn_reasoning import plain, report
from tools.learn_reasoning.__main__ import main, one
from tools.learn_reasoning.rows import manifest, rows


@pytest.mark.parametrize(
    ("kind", "clip"),
    [*((kind, 0.0) for kind in grpo.PRESETS), ("grpo", 0.2), ("gspo", 0.02)],
    ids=lambda value: str(value),
)
def test_one_update_of_the_learner_is_that_of_the_script_number_for_number(tmp_path, kind, clip):
    """The same samples: loss, gradient and the weights behind AdamW's first step. With `clip` they are of an older
    policy, and its ratio is clipped."""
    base = reasoning.make_folder(tmp_path) / "base"
    model, tokens = models.language_model(str(base), dtype=torch.float32), models.tokenizer(str(base))
    ours, theirs = model, copy.deepcopy(model)
    prompts = [f"{10 + n}+{n + 20}=" for n in range(24)]
    prompt = torch.tensor([tokens(text)["input_ids"] for text in prompts]).repeat_interleave(8, 0)
    torch.manual_seed(1)
    ids, is_made, engine = plain.sampled(theirs, prompt, most=5, least=2, stop=2)
    if clip:
        engine = engine + 0.3 * torch.randn_like(engine)
    assert len(set(is_made.sum(1).tolist())) > 1, "answers of several lengths"
    reward_PG = torch.tensor(np.random.default_rng(0).integers(0, 2, (24, 8)), dtype=torch.float32)
    worth_PG = reward_PG - plain.too_long(is_made).view_as(reward_PG) if kind == "dapo" else reward_PG
    assert kind != "dapo" or float((worth_PG != reward_PG).float().mean()) > 0.1
    loss, _ = plain.loss_of(
        theirs, ids, is_made, plain.advantages(worth_PG, kind=kind).flatten(), engine=engine if clip else None,
        kind=kind, clip=clip, least=2,
    )  # fmt: skip
    loss.backward()
    wanted = {"kind": kind, **({"clipLow": clip, "clipHigh": clip} if clip else {})}
    wanted |= {"overlongBuffer": 1} if kind == "dapo" else {}
    config = {"loss": wanted, "optimizer": {"learningRate": 5e-4}, "oldLogprobs": "engine" if clip else "recompute"}
    flow = grpo.check_config(config)
    limits = {"most": 5, "temperature": 1.0, "stops": [2], "least": 2}
    learner = TextLearner(
        ours, Scorer(ours, temperature=1.0, stops=[2]), _learner_config(flow, TextFsdpConfig(token_budget=100), limits)
    )
    advantage = AdvantageConfig(baseline=flow["loss"]["baseline"], scale=flow["loss"]["scale"])
    answers = [
        AnswerGroup(
            prompt=prompt[8 * n].numpy().astype(np.int32), lengths=keep.sum(1).numpy().astype(np.int32),
            tokens=ids[8 * n : 8 * n + 8, -5:][keep].numpy().astype(np.int32),
            engine=engine[8 * n : 8 * n + 8][keep].numpy(),
            advantage_G=groups.of_group(
                reward_PG[n].double().numpy()
                + groups.overlong_penalty(keep.sum(1).numpy(), longest=5, buffer=flow["loss"]["overlong_buffer"]),
                advantage,
            ),
            old=engine[8 * n : 8 * n + 8][keep] if clip else None,
        )
        for n, keep in enumerate(is_made.split(8))
    ]  # fmt: skip
    if advantage.scale == "batch":
        sums = groups.batch_sums(np.concatenate([answer.advantage_G for answer in answers]))
        for answer in answers:
            answer.advantage_G = groups.over_batch(answer.advantage_G, sums)
    learner.add(answers)
    weight = float(is_made.sum()) if flow["loss"]["aggregation"] == "token-mean" else 192.0
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert float((mine.grad / weight - other.grad).norm()) <= 2e-5 * float(other.grad.norm()) + 1e-9, name
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=5e-4, weight_decay=0.0)
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()
    totals, found = learner.update(1, steps=100)
    assert found == pytest.approx(float(norm), rel=1e-5)
    assert totals.sums["loss"] / totals.sums["weight"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert (totals.sums["clipped"] > 0) == bool(clip)
    apart = torch.cat([(a - b).abs().flatten() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)])
    assert float((apart < 1e-5).float().mean()) > 0.99, "AdamW's first step is the sign of a gradient"


def test_what_was_run_is_not_run_again_and_says_which_bars_are_missed(tmp_path, capsys):
    met = {"row": "stale-0", "first": 0.4, "last": 0.9, "wanted": 0.8, "ok": True, "curve": [0.4, 0.9], "job_s": 1.0}
    missed = {**met, "row": "stale-1", "ok": False, "script": [0.4, 0.95], "script_last": 0.95}
    (tmp_path / "results.jsonl").write_text(json.dumps(met) + "\n" + json.dumps(missed) + "\n")
    assert main(["--rows", "stale-0"], build=tmp_path) == 0
    assert main(["--rows", "stale-0", "stale-1"], build=tmp_path) == 1
    assert main(["--rows", "stale-0", "stale-2", "--minutes", "0"], build=tmp_path) == 1
    assert "1 of 2 rows were run, not stale-2" in capsys.readouterr().out
    (tmp_path / "reasoning.md").write_text(f"before{report.BEGIN}old{report.END}after")
    order = ["stale-0", "stale-1"]
    report.publish([met, {**missed, "last": 0.5}], at=tmp_path, order=order)
    report.publish([missed, {**met, "row": "gone"}], at=tmp_path, order=order)
    page = (tmp_path / "reasoning.md").read_text()
    assert "| stale-1 | 0.400 | 0.900 | 0.950 | 0.8 | missed | 1 |" in page
    assert "old" not in page
    assert page.endswith("after")
    assert json.loads((tmp_path / "reasoning.json").read_text()) == [met, missed]
    assert (tmp_path / "reasoning.svg").read_text().count("<polyline") == 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["sevens-transformers", "addition-grpo-1"])
def test_a_step_of_a_row_is_run_as_a_job(tmp_path, name):
    from examples.grpo import addition

    (tmp_path / "addition").mkdir()
    addition.make(tmp_path / "addition", steps=1)  # what is learnt is not looked at
    [row] = [row for row in rows() if row.name == name]
    found = one(dataclasses.replace(row, steps=1, has_script=False), build=tmp_path)
    assert found["curve"] == pytest.approx([found["first"]], abs=1e-4)
    assert 0 <= found["first"] < 0.2
    assert found["ok"] is False


@pytest.mark.long("starts a rollout three times, with torch and transformers each time")
@pytest.mark.timeout(600)
def test_a_row_whose_rollout_is_killed_every_few_steps_goes_on(tmp_path):
    from examples.grpo import addition

    (tmp_path / "addition").mkdir()
    addition.make(tmp_path / "addition", steps=1)
    [row] = [row for row in rows() if row.name == "killed"]
    assert row.kills_every == 10
    found = one(dataclasses.replace(row, steps=12, kills_every=4, has_script=False), build=tmp_path)
    assert len(found["curve"]) == 12
    [events] = (tmp_path / "runs").glob("killed-12-*/events.jsonl")
    exits = [line for line in map(json.loads, events.read_text().splitlines()) if line["event"] == "worker-exited"]
    assert len([line for line in exits if "rollout/0" in line["message"]]) >= 2


def test_every_row_is_a_job_that_can_be_run(tmp_path):
    names = [row.name for row in rows()]
    assert len(set(names)) == len(names)
    for row in rows():
        spec, problems = supported.validate(manifest(row, tmp_path))
        assert spec is not None, problems
        grpo.check_config(spec.flow.config)
        RuleConfig.model_validate(dict(row.reward))
