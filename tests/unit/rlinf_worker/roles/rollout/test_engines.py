"""The suite that every engine of language models passes: tokens follow from weights, prompt, seed and key, whoever else
is in the batch; their log-probabilities are those of the distribution that they were drawn from.

vLLM's has a cache that is too small for all requests at once: some wait, some are computed again."""

import copy
import json
import os

import numpy as np
import pytest
import tokenizers.models
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from rlinf_api.errors import UserError
from rlinf_worker import memory
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles import models
from rlinf_worker.roles.rollout import generation, vllm_role
from rlinf_worker.roles.rollout.endings import StopSearch
from rlinf_worker.roles.rollout.engine import Made, Sampling
from rlinf_worker.roles.rollout.generation import Generator
from rlinf_worker.roles.rollout.schema import VllmConfig
from tests.fakes.vllm_process import VllmProcess

STOPS = (2, 5, 9)
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
FIRST, SECOND = PolicyVersion(0, 3), PolicyVersion(0, 4)
CLOSE = 2e-5  # float32, of a peaked distribution
BLOCK_BYTES = 32 * 2 * 2 * 1 * 32 * 4  # positions, keys and values, layers, heads, width, float32
STARTS_VLLM = [pytest.mark.slow("imports and starts vLLM once, 14 s"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train(False)


def letters():
    """A tokenizer of the model's vocabulary: four special tokens, and 36 characters."""
    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    vocabulary = {token: number for number, token in enumerate((*special, *LETTERS))}
    found = Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(token, special=True) for token in special])
    return found


def of_transformers(model, *, seed=7, rows=512):
    """With a model of its own: it is given weights, and loses them."""
    engine = Generator(copy.deepcopy(model), seed=seed, rows=rows, tokenizer=letters())
    engine.load(FIRST, dict(model.named_parameters()))
    return engine


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    letters().save(str(folder / "tokenizer.json"))
    with VllmProcess(folder, block_bytes=32 * models.kv_bytes_of(model.config, itemsize=4)) as process:
        yield process


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=STARTS_VLLM)])
def engine_of(request, model):
    """An empty engine with the model's weights, by seed."""
    if request.param == "transformers":
        return lambda **options: of_transformers(model, **options)
    process = request.getfixturevalue("vllm")
    weights = dict(model.named_parameters())
    return lambda seed=7: process.engine(seed=seed, version=FIRST, weights=weights)


@pytest.fixture(scope="module")
def prompts():
    luck = np.random.default_rng(0)
    return {f"k{n}": luck.integers(3, 40, luck.integers(2, 90)).tolist() for n in range(12)}


def resident():
    found = memory.of_tree(os.getpid())
    assert found is not None
    return found


def sampling(**changes):
    return Sampling(**{"samples": 3, "temperature": 0.7, "most": 20, "least": 2, "stops": STOPS, **changes})


def run(engine, prompts, *, per_step=3, **changes):
    waiting, answers = dict(prompts), {}
    while waiting or engine.busy:
        for name in list(waiting)[:per_step]:
            answers[name] = engine.begin(name, key=name, prompt=waiting.pop(name), sampling=sampling(**changes))
        engine.step()
    return {name: answer.result() for name, answer in answers.items()}


@pytest.fixture(scope="module")
def made(engine_of, prompts):
    return run(engine_of(), prompts)


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


def test_a_group_is_the_same_alone_and_among_others_in_any_order(engine_of, prompts, made):
    backwards = dict(reversed(list(prompts.items())))
    few = run(engine_of(), backwards, per_step=1)
    for name in prompts:
        same(made[name], few[name])
    name = next(iter(prompts))
    same(made[name], run(engine_of(), {name: prompts[name]})[name])


def test_a_group_is_answered_as_it_ends_and_others_take_its_place(engine_of, prompts):
    engine = engine_of()
    long = engine.begin("long", key="a", prompt=prompts["k0"], sampling=sampling(most=20, least=20))
    short = engine.begin("short", key="b", prompt=prompts["k1"], sampling=sampling(samples=2, most=3, least=3))
    assert engine.rows == 5
    assert [engine.step() for _ in range(3)] == [5, 5, 5]
    assert short.done()
    assert not long.done()
    late = engine.begin("late", key="c", prompt=prompts["k2"], sampling=sampling(samples=1, most=2, least=2))
    assert [engine.step() for _ in range(2)] == [4, 4]
    assert late.done()
    assert not long.done()
    assert engine.rows == 3


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


def test_samples_of_a_group_differ_and_so_do_keys_and_seeds(engine_of, prompts, made):
    name, prompt = next(iter(prompts.items()))
    assert len({tuple(ids) for ids in made[name].ids}) > 1
    for key, seed in (("other", 7), (name, 8)):
        engine = engine_of(seed=seed)
        answer = engine.begin("r", key=key, prompt=prompt, sampling=sampling())
        while engine.busy:
            engine.step()
        assert answer.result().ids != made[name].ids


def test_tokens_are_drawn_as_often_as_they_are_likely(engine_of, model, prompts):
    """Of the first token, over 4,000 samples."""
    prompt = prompts["k3"]
    found = run(engine_of(), {"many": prompt}, samples=4000, most=1, least=1)["many"]
    counts = np.bincount([ids[0] for ids in found.ids], minlength=40) / 4000
    wanted = np.exp([scored(model, prompt, [token], least=1)[0] for token in range(40)])
    assert np.abs(counts - wanted).max() < 4 * (0.25 / 4000) ** 0.5
    assert counts[list(STOPS)].sum() == 0


def test_requests_have_samplings_of_their_own(engine_of, model, prompts):
    engine, prompt = engine_of(), prompts["k1"]
    short = engine.begin("short", key="k", prompt=prompt, sampling=sampling(samples=2, most=3, least=3))
    cold = engine.begin("cold", key="k", prompt=prompt, sampling=sampling(samples=5, temperature=0.01))
    while engine.busy:
        engine.step()
    assert [len(ids) for ids in short.result().ids] == [3, 3]
    for one, temperature, least, close in ((short, 0.7, 3, CLOSE), (cold, 0.01, 2, 70 * CLOSE)):
        for ids, logprobs in zip(one.result().ids, one.result().logprobs, strict=True):
            assert logprobs == pytest.approx(
                scored(model, prompt, ids, temperature=temperature, least=least), abs=close
            )


def test_at_temperature_0_it_is_the_likeliest_token_beside_others_that_are_drawn(engine_of, model, prompts, made):
    engine = engine_of()
    answers = {n: engine.begin(n, key=n, prompt=prompts[n], sampling=sampling()) for n in ("k0", "k2")}
    prompt = prompts["k1"]
    greedy = engine.begin("greedy", key="k1", prompt=prompt, sampling=sampling(samples=1, temperature=0.0, least=20))
    while engine.busy:
        engine.step()
    [ids] = greedy.result().ids
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logits[:, list(STOPS)] = -torch.inf
    assert ids == logits.argmax(-1).tolist()
    for name, answer in answers.items():
        same(answer.result(), made[name])


def words(made):
    return ["".join(LETTERS[token - 4] for token in ids if token >= 4) for ids in made.ids]


def begun(engine, prompts, **strings):
    """Requests of one key and prompt, each with stop strings of its own."""
    return {
        name: engine.begin(name, key="k7", prompt=prompts["k7"], sampling=sampling(stops=(), stop_strings=texts))
        for name, texts in strings.items()
    }


def test_a_stop_string_ends_a_sample_with_the_token_that_completes_it(engine_of, prompts):
    """Of three requests that draw the same: one without strings, one with, one with others."""
    engine = engine_of()
    [plain] = run(engine, {"k7": prompts["k7"]}, stops=()).values()
    texts = words(plain)
    pair, single = texts[0][6:8], texts[1][4]
    answers = begun(engine, prompts, both=(pair, single), one=(pair,))
    while engine.busy:
        engine.step()
    for name, strings in (("both", (pair, single)), ("one", (pair,))):
        made = answers[name].result()
        for mine, text, finished, whole in zip(words(made), texts, made.finished, plain.ids, strict=True):
            ends = [at + len(s) for s in strings for at in range(len(text)) if text.startswith(s, at)]
            first = min((end for end in ends if _tokens(whole, end) > 2), default=None)
            assert finished == (first is not None)
            assert mine == (text if first is None else text[:first])
        for ids, logprobs, versions in zip(made.ids, made.logprobs, made.versions, strict=True):
            assert len(ids) == len(logprobs) == len(versions)
    assert answers["both"].result().finished[:2] == [True, True]
    assert answers["one"].result().ids != answers["both"].result().ids


def _tokens(ids, characters):
    """How many tokens say so many characters."""
    return [sum(token >= 4 for token in ids[: n + 1]) for n in range(len(ids))].index(characters) + 1


def test_a_stop_string_counts_behind_the_least_length_alone_and_in_the_last_token_too(engine_of, prompts):
    engine = engine_of()
    [plain] = run(engine, {"k7": prompts["k7"]}, stops=()).values()
    text, ids = words(plain)[0], plain.ids[0]
    asked = {"samples": 1, "stops": ()}
    early, late = text[1], text[-1]
    at, end = _tokens(ids, 2), _tokens(ids, len(text))
    answers = {
        "early": sampling(**asked, stop_strings=(early,), least=at),
        "just": sampling(**asked, stop_strings=(early,), least=at - 1),
        "last": sampling(**asked, stop_strings=(late,), least=end - 1, most=end),
    }  # fmt: skip
    found = {n: engine.begin(n, key="one", prompt=prompts["k7"], sampling=s) for n, s in answers.items()}
    alone = engine.begin("whole", key="one", prompt=prompts["k7"], sampling=sampling(**asked))
    while engine.busy:
        engine.step()
    whole = alone.result().ids[0]
    for name, one in answers.items():
        ending = StopSearch(letters(), one.stop_strings, least=one.least)
        ends = [n for n, token in enumerate(whole[: one.most], 1) if ending.add(token)]
        made = found[name].result()
        assert made.ids[0] == whole[: min(ends, default=one.most)], name
        assert made.finished == [bool(ends)], name


def test_a_group_with_stop_strings_goes_on_elsewhere_as_it_would_have_here(engine_of, prompts):
    [plain] = run(engine_of(), {"k7": prompts["k7"]}, stops=()).values()
    strings = (words(plain)[0][6:8],)
    asked = sampling(stops=(), stop_strings=strings)
    first = engine_of()
    answer = first.begin("r", key="k7", prompt=prompts["k7"], sampling=asked)
    cut = [n for n, token in enumerate(plain.ids[0], 1) if token >= 4][6]  # the string has begun
    for _ in range(cut):
        first.step()
    left = first.so_far("r")
    while first.busy:
        first.step()
    second = engine_of()
    again = second.begin("r", key="k7", prompt=prompts["k7"], sampling=asked, made=left)
    while second.busy:
        second.step()
    same(again.result(), answer.result())
    assert answer.result().finished[0]


def test_requests_have_stop_tokens_of_their_own(engine_of, prompts, made):
    engine = engine_of()
    mine = engine.begin("mine", key="k0", prompt=prompts["k0"], sampling=sampling(stops=(7,)))
    theirs = engine.begin("theirs", key="k0", prompt=prompts["k0"], sampling=sampling())
    none = engine.begin("none", key="k0", prompt=prompts["k0"], sampling=sampling(stops=()))
    while engine.busy:
        engine.step()
    same(theirs.result(), made["k0"])
    assert not any(none.result().finished)
    for ids, finished in zip(mine.result().ids, mine.result().finished, strict=True):
        assert finished == (7 in ids)
        assert 7 not in ids[:-1]
        assert len(ids) == 20 or ids[-1] == 7


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.6), (6, 0.7), (1, 1.0), (0, 1e-6), (400, 0.9)])
def test_what_is_left_out_is_never_drawn_and_the_rest_has_all_probability(engine_of, model, prompts, top_k, top_p):
    """Beside a request that draws from all."""
    engine, prompt = engine_of(), prompts["k8"]
    cut = engine.begin(
        "cut", key="k8", prompt=prompt, sampling=sampling(samples=20, top_k=top_k, top_p=top_p, stops=())
    )
    whole = engine.begin("whole", key="k8", prompt=prompt, sampling=sampling(stops=()))
    while engine.busy:
        engine.step()
    for ids, logprobs in zip(cut.result().ids, cut.result().logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        for row, token, logprob in zip(logits, ids, logprobs, strict=True):
            order = row.argsort(descending=True)[: top_k or None]
            shares = torch.softmax(row[order], -1)
            kept = order[: int((shares.cumsum(-1) - shares < top_p).sum())]
            assert token in kept.tolist()
            wanted = torch.log_softmax(row[kept], -1)[kept.tolist().index(token)]
            assert logprob == pytest.approx(float(wanted), abs=CLOSE)
    for ids, logprobs in zip(whole.result().ids, whole.result().logprobs, strict=True):
        scaled = scored_without_stops(model, prompt, ids)
        assert logprobs == pytest.approx(scaled, abs=CLOSE), "who asked for no cut has none"


def scored_without_stops(model, prompt, ids):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits / 0.7, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()


def test_what_is_aborted_leaves_what_there_is_and_the_others_alone(engine_of, prompts, made):
    engine = engine_of()
    answers = {n: engine.begin(n, key=n, prompt=prompts[n], sampling=sampling()) for n in ("k0", "k1", "k2")}
    for _ in range(4):
        engine.step()
    partial = engine.abort("k1")
    assert answers["k1"].cancelled()
    for ids, whole in zip(partial.ids, made["k1"].ids, strict=True):
        assert ids == whole[:4]
    assert partial.versions == [[(0, 3)] * 4] * 3
    while engine.busy:
        engine.step()
    same(answers["k0"].result(), made["k0"])
    same(answers["k2"].result(), made["k2"])


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_another_engine_goes_on_from_what_was_left(engine_of, prompts, made, steps):
    first = engine_of()
    first.begin("r", key="k4", prompt=prompts["k4"], sampling=sampling())
    for _ in range(steps):
        first.step()
    left = first.so_far("r")
    first.step()
    assert max(map(len, left.versions)) == steps, "a copy"
    second = engine_of()
    plain = json.loads(json.dumps(left.to_plain()))
    answer = second.begin("r", key="k4", prompt=prompts["k4"], sampling=sampling(), made=Made.from_plain(plain))
    while second.busy:
        second.step()
    same(answer.result(), made["k4"])


@pytest.fixture
def changed(model):
    """The same model with other weights, for one test."""
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def change():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        return dict(model.named_parameters())

    yield change
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)


def test_new_weights_make_the_tokens_behind_them_and_each_says_whose_it_is(engine_of, model, prompts, changed):
    engine, prompt = engine_of(), prompts["k5"]
    answer = engine.begin("r", key="k5", prompt=prompt, sampling=sampling(least=20))
    for _ in range(5):
        engine.step()
    engine.load(SECOND, changed())
    while engine.busy:
        engine.step()
    made = answer.result()
    assert made.versions == [[(0, 3)] * 5 + [(0, 4)] * 15] * 3
    for ids, logprobs in zip(made.ids, made.logprobs, strict=True):
        assert logprobs[5:] == pytest.approx(scored(model, prompt, ids, least=20)[5:], abs=CLOSE), "no old cache"
        assert logprobs[:5] != pytest.approx(scored(model, prompt, ids, least=20)[:5], abs=CLOSE)


def test_what_was_computed_with_the_old_weights_is_kept_where_that_is_wanted(engine_of, model, prompts, changed):
    engine, prompt = engine_of(), prompts["k5"]
    answer = engine.begin("r", key="k5", prompt=prompt, sampling=sampling(least=20))
    for _ in range(5):
        engine.step()
    engine.load(SECOND, changed(), keep=True)
    late = engine.begin("late", key="k6", prompt=prompt, sampling=sampling(least=20))
    while engine.busy:
        engine.step()
    made = answer.result()
    assert made.versions == [[(0, 3)] * 5 + [(0, 4)] * 15] * 3
    for ids, logprobs in zip(made.ids, made.logprobs, strict=True):
        assert logprobs[5:] != pytest.approx(scored(model, prompt, ids, least=20)[5:], abs=CLOSE), "a mixture"
    for ids, logprobs in zip(late.result().ids, late.result().logprobs, strict=True):
        assert logprobs == pytest.approx(scored(model, prompt, ids, least=20), abs=CLOSE), (
            "who came later has the new ones"
        )


def test_a_prompt_that_was_answered_before_is_computed_with_the_new_weights(engine_of, model, prompts, changed):
    """Layers that the engine fuses, the head that is tied to the embedding, and what it has cached of the prompt."""
    name, prompt = max(prompts.items(), key=lambda each: len(each[1]))
    assert len(prompt) > 64, "two whole blocks"
    engine = engine_of()
    run(engine, {name: prompt})
    engine.load(SECOND, changed())
    [made] = run(engine, {name: prompt}).values()
    for ids, logprobs in zip(made.ids, made.logprobs, strict=True):
        assert logprobs == pytest.approx(scored(model, prompt, ids), abs=CLOSE)


def test_a_request_that_was_whole_when_it_was_left_is_answered_at_once(engine_of, prompts, made):
    engine, whole = engine_of(), made["k6"]
    answer = engine.begin("r", key="k6", prompt=prompts["k6"], sampling=sampling(), made=whole.copied())
    engine.step()
    same(answer.result(), whole)
    assert not engine.busy


def test_there_are_never_more_rows_than_it_has_room_for(model, prompts):
    engine = of_transformers(model, rows=7)
    for name, prompt in prompts.items():
        engine.begin(name, key=name, prompt=prompt, sampling=sampling())
    most = 0
    while engine.busy:
        engine.step()
        most = max(most, engine._batch.count)
    assert most == 7, "two groups of three, and the rest of a third"


def test_the_library_computes_prompts_and_scores_in_bounded_pieces_and_few_rows(model, prompts, monkeypatch):
    whole = run(of_transformers(model), prompts)
    few = run(of_transformers(model, rows=7), prompts)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 100)
    monkeypatch.setattr(generation, "SCORED_AT_ONCE", 80)
    pieces = run(of_transformers(model), prompts)
    for name in prompts:
        same(few[name], whole[name])
        same(pieces[name], whole[name])


# --- off the slots ----------------------------------------------------------------------------------------------------
def test_an_engine_that_has_left_its_slots_in_mid_sentence_goes_on_with_the_same_tokens(
    engine_of, model, prompts, made
):
    engine, weights = engine_of(), dict(model.named_parameters())
    waiting, answers = list(prompts), {}
    had = engine.bytes_now()
    assert had >= sum(parameter.nbytes for parameter in weights.values())
    for number in range(60):
        for name in waiting[:3]:
            answers[name] = engine.begin(name, key=name, prompt=prompts[name], sampling=sampling())
        waiting = waiting[3:]
        if number % 5 == 2:
            engine.empty()
            engine.empty()
            assert engine.bytes_now() == 0
            engine.fill()
            engine.fill()
            engine.load(FIRST, weights, keep=True)  # there is nothing to keep
        if not engine.busy:
            break
        engine.step()
    assert not waiting
    for name in prompts:
        same(answers[name].result(), made[name])


def large():
    """52 MiB of weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=256, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train(False)


def test_what_leaves_a_slot_leaves_the_resident_set(prompts):
    engine = Generator(large(), seed=7, rows=64)
    weights = {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    engine.load(FIRST, weights)
    for name in ("k0", "k1"):
        engine.begin(name, key=name, prompt=prompts[name], sampling=sampling(samples=8))
    for _ in range(3):
        engine.step()
    had, before = engine.bytes_now(), resident()
    assert had > sum(tensor.nbytes for tensor in weights.values()) + (16 << 20), "weights and a cache"
    engine.empty()
    left = resident()
    assert before - left >= 0.8 * had, (before - left, had)
    engine.fill()
    engine.load(FIRST, weights)
    engine.step()
    assert resident() - left >= 0.5 * had, "it is back"


# --- vLLM alone -------------------------------------------------------------------------------------------------------
@pytest.mark.slow("imports and starts vLLM once, 14 s")
@pytest.mark.timeout(300)
def test_vllms_weights_and_cache_leave_the_resident_set(prompts, tmp_path):
    model = large()
    model.save_pretrained(tmp_path)
    weights = dict(model.named_parameters())
    block = 32 * models.kv_bytes_of(model.config, itemsize=4)
    with VllmProcess(tmp_path, block_bytes=block, blocks=(32 << 20) // block) as process:
        engine = process.engine(seed=7, version=FIRST, weights=weights)
        wanted = run(engine, prompts)
        engine.empty()
        engine.fill()  # zeros are written: all of the cache is resident, whatever blocks were used
        had, before = engine.bytes_now(), engine.resident()
        assert had > 80 << 20
        engine.empty()
        assert before - engine.resident() >= 0.8 * had
        engine.fill()
        engine.load(FIRST, weights)
        found = run(engine, prompts)
    for name in prompts:
        same(found[name], wanted[name])


@pytest.mark.slow("imports and starts vLLM once, 14 s")
@pytest.mark.timeout(300)
def test_weights_that_leave_a_tensor_of_vllms_as_it_was_are_refused(vllm, model):
    weights = dict(model.named_parameters())
    engine = vllm.engine(seed=7, version=FIRST, weights=weights)
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(RuntimeError, match=r"InvariantBroken: weights .* not model\.norm\.weight"):
        engine.load(SECOND, lacking)


@pytest.mark.slow("imports and starts vLLM once, 14 s")
@pytest.mark.timeout(300)
def test_a_model_that_vllm_lacks_is_told(vllm):
    vllm.call("check_model", ["Qwen2ForCausalLM"], path="/models/base")
    with pytest.raises(RuntimeError, match=r"UserError: vLLM has no model for .*/models/base.*: got OwnForCausalLM"):
        vllm.call("check_model", ["OwnForCausalLM"], path="/models/base")


@pytest.mark.parametrize(
    ("config", "kv_bytes", "wanted"),
    [
        ({"maxSequences": 4}, 0, (4 * 3 + 1) * BLOCK_BYTES),
        ({"maxSequences": 1 << 16, "kvCacheMib": 1}, 0, 1 << 20),
        ({"maxSequences": 4}, 5 * BLOCK_BYTES, 5 * BLOCK_BYTES),
    ],
)
def test_the_cache_is_what_there_is_and_no_more_than_samples_fill(model, config, kv_bytes, wanted):
    config = VllmConfig.model_validate({"maxPromptTokens": 60, "maxResponseTokens": 20, **config})
    assert vllm_role.cache_bytes(config, model.config, kv_bytes=kv_bytes) == wanted


def test_a_cache_too_small_for_one_sample_is_told(model):
    config = VllmConfig.model_validate({"maxPromptTokens": 60, "maxResponseTokens": 20})
    says = f"too small for one sample: got kv 1000 bytes of the plan, wanted {4 * BLOCK_BYTES} bytes at least"
    with pytest.raises(UserError, match=says):
        vllm_role.cache_bytes(config, model.config, kv_bytes=1000)
