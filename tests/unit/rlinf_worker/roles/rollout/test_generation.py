"""The engine of kind transformers: tokens follow from weights, prompt, seed and key, whoever else is in the batch;
their log-probabilities are those of the distribution that they were drawn from."""

import numpy as np
import pytest
import torch

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles.rollout import generation
from rlinf_worker.roles.rollout.generation import Generator, Sampling

STOPS = (2, 5, 9)
FIRST, SECOND = PolicyVersion(0, 3), PolicyVersion(0, 4)
CLOSE = 2e-5  # float32, of a peaked distribution


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train(False)


@pytest.fixture(scope="module")
def prompts():
    luck = np.random.default_rng(0)
    return {f"k{n}": luck.integers(3, 40, luck.integers(2, 90)).tolist() for n in range(12)}


def sampling(**changes):
    return Sampling(**{"samples": 3, "temperature": 0.7, "most": 20, "least": 2, **changes})


def engine_of(model, *, rows=512, stops=STOPS, seed=7):
    engine = Generator(model, stops=stops, seed=seed, rows=rows)
    engine.load(FIRST)
    return engine


def run(model, prompts, *, rows=512, per_step=3, **changes):
    engine, waiting, answers = engine_of(model, rows=rows), dict(prompts), {}
    while waiting or engine.busy:
        for name in list(waiting)[:per_step]:
            answers[name] = engine.begin(name, key=name, prompt=waiting.pop(name), sampling=sampling(**changes))
        engine.step()
    return {name: answer.result() for name, answer in answers.items()}


@pytest.fixture(scope="module")
def made(model, prompts):
    return run(model, prompts)


def same(one, other):
    assert one.ids == other.ids
    assert one.finished == other.finished
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE)


def scored(model, prompt, ids, *, temperature=0.7, least=2):
    """By a forward pass over the whole text, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    logits[:least, list(STOPS)] = -torch.inf
    return torch.log_softmax(logits / temperature, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_a_group_is_the_same_alone_and_among_others_and_in_a_small_engine(model, prompts, made):
    backwards = dict(reversed(list(prompts.items())))
    few = run(model, backwards, rows=7, per_step=1)
    for name in prompts:
        same(made[name], few[name])
    name = next(iter(prompts))
    same(made[name], run(model, {name: prompts[name]})[name])


def test_a_logprob_is_that_of_the_distribution_that_was_drawn_from(model, prompts, made):
    for name, prompt in prompts.items():
        for ids, logprobs in zip(made[name].ids, made[name].logprobs, strict=True):
            assert logprobs == pytest.approx(scored(model, prompt, ids), abs=CLOSE)


def test_a_sample_ends_with_a_stop_token_and_not_before_its_least_length(made):
    every = [(ids, finished) for one in made.values() for ids, finished in zip(one.ids, one.finished, strict=True)]
    assert {finished for _, finished in every} == {True, False}, "some end, and some have no room"
    for ids, finished in every:
        assert finished == (ids[-1] in STOPS)
        assert not set(ids[:-1]) & set(STOPS)
        assert (2 < len(ids) <= 20) if finished else len(ids) == 20


def test_samples_of_a_group_differ_and_so_do_keys_and_seeds(model, prompts, made):
    name, prompt = next(iter(prompts.items()))
    assert len({tuple(ids) for ids in made[name].ids}) > 1
    for key, seed in (("other", 7), (name, 8)):
        engine = engine_of(model, seed=seed)
        answer = engine.begin("r", key=key, prompt=prompt, sampling=sampling())
        while engine.busy:
            engine.step()
        assert answer.result().ids != made[name].ids


def test_tokens_are_drawn_as_often_as_they_are_likely(model, prompts):
    """Of the first token, over 4,000 samples."""
    prompt = prompts["k3"]
    found = run(model, {"many": prompt}, rows=4000, samples=4000, most=1, least=1)["many"]
    counts = np.bincount([ids[0] for ids in found.ids], minlength=40) / 4000
    wanted = np.exp([scored(model, prompt, [token], least=1)[0] for token in range(40)])
    assert np.abs(counts - wanted).max() < 4 * (0.25 / 4000) ** 0.5
    assert counts[list(STOPS)].sum() == 0


def test_requests_have_samplings_of_their_own(model, prompts):
    engine, prompt = engine_of(model), prompts["k1"]
    short = engine.begin("short", key="k", prompt=prompt, sampling=sampling(samples=2, most=3, least=3))
    cold = engine.begin("cold", key="k", prompt=prompt, sampling=sampling(samples=5, temperature=1e-5))
    while engine.busy:
        engine.step()
    assert [len(ids) for ids in short.result().ids] == [3, 3]
    assert len({tuple(ids) for ids in cold.result().ids}) == 1, "at a low temperature all are the likeliest"


def test_what_is_aborted_leaves_what_there_is_and_the_others_alone(model, prompts, made):
    engine = engine_of(model)
    answers = {n: engine.begin(n, key=n, prompt=prompts[n], sampling=sampling()) for n in ("k0", "k1", "k2")}
    for _ in range(4):
        engine.step()
    partial = engine.abort("k1")
    assert answers["k1"].cancelled()
    for ids, whole in zip(partial.ids, made["k1"].ids, strict=True):
        assert ids == whole[:4]
    assert partial.versions == [(0, 3)] * 4
    while engine.busy:
        engine.step()
    same(answers["k0"].result(), made["k0"])
    same(answers["k2"].result(), made["k2"])


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_another_engine_goes_on_from_what_was_left(model, prompts, made, steps):
    first = engine_of(model)
    first.begin("r", key="k4", prompt=prompts["k4"], sampling=sampling())
    for _ in range(steps):
        first.step()
    left = first.so_far("r")
    first.step()
    assert len(left.versions) == steps, "a copy"
    second = engine_of(model)
    answer = second.begin("r", key="k4", prompt=prompts["k4"], sampling=sampling(), made=left)
    while second.busy:
        second.step()
    same(answer.result(), made["k4"])


def test_new_weights_make_the_tokens_behind_them_and_each_says_whose_it_is(model, prompts):
    engine, prompt = engine_of(model), prompts["k5"]
    answer = engine.begin("r", key="k5", prompt=prompt, sampling=sampling(least=20))
    for _ in range(5):
        engine.step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        engine.load(SECOND)
        while engine.busy:
            engine.step()
        made = answer.result()
        assert made.versions == [(0, 3)] * 5 + [(0, 4)] * 15
        for ids, logprobs in zip(made.ids, made.logprobs, strict=True):
            assert logprobs[5:] == pytest.approx(scored(model, prompt, ids, least=20)[5:], abs=CLOSE), "no old cache"
            assert logprobs[:5] != pytest.approx(scored(model, prompt, ids, least=20)[:5], abs=CLOSE)
    finally:
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)


def test_there_are_never_more_rows_than_it_has_room_for(model, prompts):
    engine = engine_of(model, rows=7)
    for name, prompt in prompts.items():
        engine.begin(name, key=name, prompt=prompt, sampling=sampling())
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine._batch.count)
    assert most == 7, "two groups of three, and the rest of a third"


def test_prompts_and_scores_are_computed_in_bounded_pieces(model, prompts, made, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 100)
    monkeypatch.setattr(generation, "SCORED_AT_ONCE", 80)
    found = run(model, prompts)
    for name in prompts:
        same(found[name], made[name])
