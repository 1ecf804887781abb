"""The rollout role of language models against fake channels: what it makes of a ticket, which it lets go, and the
sentences for what cannot be generated from."""

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_api.slots import Allotment
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.flows import grpo
from rlinf_worker.roles import loading, models
from rlinf_worker.roles.protocol import FlowSettings, Offloadable
from rlinf_worker.roles.rollout import language
from rlinf_worker.roles.rollout.language import TransformersRole
from rlinf_worker.roles.rollout.vllm_role import VllmRole
from rlinf_worker.roles.samples import ROWS, SAMPLES, SAMPLING
from tests.fakes import reasoning
from tests.fakes.context import FakeContext, Stage

FIRST = PolicyVersion(0, 0)
CONFIG = {"maxPromptTokens": 9, "maxResponseTokens": 6, "temperature": 0.9}
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}="


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning.make_folder(tmp_path_factory.mktemp("language"))


class Rollout:
    """One role, from its load until its tickets have ended."""

    def __init__(self, folder, *, rows=None, data="rows.jsonl", config=None, staleness=0, evaluated="", **flow):
        self.stage = Stage()
        if rows is not None:
            data = "own.jsonl"
            (folder / data).write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.stage.flow = FlowSettings(
            name="grpo", steps=3, seed=5, max_staleness=staleness, order="arrival",
            config=grpo.check_config({"samplesPerPrompt": 3, **flow}), model=str(folder / "base"),
            train_data=str(folder / data), eval_data=evaluated,
        )  # fmt: skip
        self.model = models.language_model(str(folder / "base"), dtype=torch.float32)
        self.show(FIRST)
        self.context = FakeContext(self.stage, "rollout", {**CONFIG, **(config or {})})
        self.reported: list[tuple[Any, str]] = []
        self.context.report = self.report  # type: ignore[method-assign]
        self.tickets, self.samples = self.stage.channel("prompts"), self.stage.channel("samples")

    def report(self, *, step, metrics, key=""):
        self.reported.append((metrics, key))

    def show(self, version):
        self.stage.weights.show(version, dict(self.model.named_parameters()))

    def give(self, *indices, **fields):
        return [self.tickets.give(f"train:0/{n}/0", {"index": n, "pass": 0}, version=FIRST, **fields) for n in indices]

    async def run(self):
        self.tickets.end()
        await asyncio.wait_for(TransformersRole().run(self.context), 60)
        return {item.key: item for item in self.samples.all}


async def made(folder, *indices, **options):
    rollout = Rollout(folder, **options)
    rollout.give(*indices)
    return await rollout.run()


def alike(one, other):
    return all(np.allclose(one[name], other[name], atol=1e-5) for name in ("prompt", "tokens", "logprobs", "lengths"))


async def test_a_ticket_becomes_a_group_of_its_rows_prompt(folder):
    rollout = Rollout(folder)
    [ticket] = rollout.give(4)
    [item] = (await rollout.run()).values()
    payload, tokenizer = item.payload, models.tokenizer(str(folder / "base"))
    PayloadType(SAMPLES).check(payload, "samples", item.key)
    assert (item.key, item.version, rollout.tickets.acked) == (ticket.key, FIRST, [ticket])
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[4])
    assert payload["row"] == row
    assert payload["prompt"].tolist() == tokenizer(row["prompt"])["input_ids"]
    ends = np.cumsum(payload["lengths"])
    ids = [payload["tokens"][end - length : end] for end, length in zip(ends, payload["lengths"], strict=True)]
    assert payload["texts"] == [tokenizer.decode(each, skip_special_tokens=True) for each in ids]
    assert [bool(each[-1] == tokenizer.eos_token_id) for each in ids] == payload["finished"].tolist()
    assert payload["versions"].tolist() == [[0, 0]] * int(ends[-1])
    assert item.weight == float(ends[-1])


async def test_the_engine_is_given_as_many_groups_at_once_as_it_can_begin(folder):
    """A group for each step of the engine would fill it half a step's length late."""
    rollout = Rollout(folder, config={"maxSequences": 10})  # three groups of three
    rollout.give(*range(5))
    await rollout.run()
    assert rollout.tickets.rooms[0] == 3
    assert 0 in rollout.tickets.rooms, "said again while it is full: what comes then waits for another engine, too"


async def test_a_stop_string_ends_samples_and_their_texts(folder):
    [whole] = (await made(folder, 4, config={"minResponseTokens": 2})).values()
    text = max(whole.payload["texts"], key=len)
    string = text[2:4]
    config = {"stopStrings": [string], "minResponseTokens": 2}
    [cut] = (await made(folder, 4, config=config)).values()
    [kept] = (await made(folder, 4, config={**config, "keepStopString": True})).values()
    sample = cut.payload["texts"].index(text[:2])
    assert kept.payload["texts"][sample] == text[:4]
    assert cut.payload["finished"][sample]
    assert cut.payload["tokens"].tolist() == kept.payload["tokens"].tolist()
    assert not any(string in each for each in cut.payload["texts"])
    tokenizer = models.tokenizer(str(folder / "base"))
    ends = np.cumsum(cut.payload["lengths"])
    ids = cut.payload["tokens"][ends[sample] - cut.payload["lengths"][sample] : ends[sample]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[:4], "the tokens have it: it was drawn"


async def test_a_stop_string_that_cannot_be_is_told_as_the_role_loads(folder):
    with pytest.raises(UserError, match=r"stop string '<eos>' never stands in a text .* stopTokenIds: \[2\]"):
        await made(folder, 0, config={"stopStrings": ["<eos>"]})


async def test_an_evaluation_may_draw_from_the_likeliest_alone(folder, tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    found = {}
    for name, evaluation in (("one", {"topK": 1}), ("all", {}), ("few", {"topP": 1e-6})):
        asked = {"samples": 4, "temperature": 1, **evaluation}
        rollout = Rollout(folder, evaluated=str(path), evaluation=asked, config={"minResponseTokens": 6})
        rollout.tickets.give("eval:0/0/0", {"index": 0, "pass": 0}, version=FIRST)
        rollout.give(1)
        made = await rollout.run()
        found[name] = len(set(made["eval:0/0/0"].payload["texts"]))
        assert len(set(made["train:0/1/0"].payload["texts"])) == 3, "what is learnt from is drawn from all"
    assert found == {"one": 1, "all": 4, "few": 1}


async def test_an_evaluation_is_of_the_likeliest_tokens_unless_it_says_otherwise(folder, tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    rollout = Rollout(folder, evaluated=str(path), config={"minResponseTokens": 6})
    for step in range(3):  # each of another key, and so of other chances
        rollout.tickets.give(f"eval:{step}/0/0", {"index": 0, "pass": step}, version=FIRST)
    found = await rollout.run()
    assert [len(item.payload["lengths"]) for item in found.values()] == [1, 1, 1]
    [tokens] = {tuple(item.payload["tokens"].tolist()) for item in found.values()}
    prompt = models.tokenizer(str(folder / "base"))("1+1=")["input_ids"]
    with torch.no_grad():
        logits = rollout.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logits[:, 2] = -torch.inf
    assert list(tokens) == logits.argmax(-1).tolist()


async def test_facts_say_what_there_is_and_how_it_is_sampled(folder):
    rollout = Rollout(folder, config={"minResponseTokens": 1, "stopTokenIds": [7, 5], "dtype": "bfloat16"})
    await rollout.run()
    rows = rollout.stage.facts[ROWS]
    assert (rows["count"], rows["eval_count"], rows["eval_digest"]) == (40, 0, "")
    assert rollout.stage.facts[SAMPLING] == {
        "temperature": 0.9, "dtype": "bfloat16", "stops": [5, 7], "least": 1, "most": 6,
        "tokenizer": models.digest_of(str(folder / "base")),
    }  # fmt: skip
    plain = Rollout(folder)
    await plain.run()
    assert plain.stage.facts[SAMPLING]["stops"] == [2], "the model's own"


async def test_a_group_is_the_same_whoever_makes_it_with_whom(folder):
    many, one = await made(folder, *range(12)), await made(folder, 7)
    assert len(many) == 12
    assert alike(many["train:0/7/0"].payload, one["train:0/7/0"].payload)
    few = await made(folder, *range(11, -1, -1), config={"maxSequences": 4})
    assert all(alike(many[key].payload, few[key].payload) for key in many)


async def test_a_ticket_of_an_evaluation_has_a_row_and_a_sampling_of_its_own(folder, tmp_path):
    own = [{"prompt": f"{n}+{n}=", "answer": n} for n in range(3)]
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in own))
    evaluation = {"samples": 5, "temperature": 0.01}
    rollout = Rollout(folder, evaluated=str(path), evaluation=evaluation, config={"maxSequences": 5})
    rollout.give(1)
    rollout.tickets.give("eval:20/1/0", {"index": 1, "pass": 20}, version=FIRST)
    found = await rollout.run()
    evaluated, trained = found["eval:20/1/0"].payload, found["train:0/1/0"].payload
    assert (rollout.stage.facts[ROWS]["eval_count"], len(rollout.stage.facts[ROWS]["eval_digest"])) == (3, 24)
    assert evaluated["row"] == own[1]
    assert (len(evaluated["lengths"]), len(trained["lengths"])) == (5, 3)
    assert trained["row"] != own[1]
    with pytest.raises(UserError, match=r"a group does not fit .* wanted 5, .*or evaluation\.samples"):
        await Rollout(folder, evaluated=str(path), evaluation=evaluation, config={"maxSequences": 4}).run()
    with pytest.raises(UserError, match=r"spec\.data\.eval '/nowhere\.jsonl' is not there"):
        await Rollout(folder, evaluated="/nowhere.jsonl").run()


async def test_a_prompt_that_is_too_long_is_dropped_by_name(folder):
    rollout = Rollout(folder, rows=[{"prompt": "1" * 9}, {"prompt": "1" * 10}])
    _, long = rollout.give(0, 1)
    assert list(await rollout.run()) == ["train:0/0/0"]
    assert rollout.tickets.dropped == [(long, "longer than maxPromptTokens")]
    assert rollout.reported == [({"prompts_too_long_count": 1.0}, long.key)]


async def test_one_that_comes_alone_is_dropped_and_the_next_one_answered(folder):
    rollout = Rollout(folder, rows=[{"prompt": "1" * 9}, {"prompt": "1" * 10}])
    running = asyncio.create_task(TransformersRole().run(rollout.context))
    await asyncio.wait_for(rollout.context.shared(ROWS), 60)
    [long] = rollout.give(1)
    while not rollout.tickets.dropped:
        await asyncio.sleep(0.001)
    rollout.give(0)
    rollout.tickets.end()
    await asyncio.wait_for(running, 60)
    assert [item.key for item in rollout.samples.all] == ["train:0/0/0"]
    assert rollout.tickets.dropped == [(long, "longer than maxPromptTokens")]


async def test_a_context_that_is_just_long_enough_will_do(folder):
    assert len(await made(folder, 0, config={"maxPromptTokens": 506})) == 1


async def test_messages_go_through_the_chat_template(folder, tmp_path):
    reasoning.make_folder(tmp_path)
    (tmp_path / "base" / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "1+1"}]
    [item] = (await made(tmp_path, 0, rows=[{"ask": messages}], config={"promptColumn": "ask"})).values()
    tokenizer = models.tokenizer(str(tmp_path / "base"))
    assert item.payload["prompt"].tolist() == tokenizer("sabu1+1=", add_special_tokens=False)["input_ids"]
    assert models.digest_of(str(tmp_path / "base")) != models.digest_of(str(folder / "base")), "another text, too"


async def test_a_template_that_raises_is_told_with_its_row(folder, tmp_path):
    reasoning.make_folder(tmp_path)
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    rows = [{"prompt": [{"role": "system", "content": "a"}]}]
    with pytest.raises(UserError, match=r"row 0 of spec.data.train makes no prompt: got .*no system here"):
        await made(tmp_path, 0, rows=rows)


@pytest.mark.parametrize(("row", "got"), [({"question": "1"}, "'prompt': None"), ({"prompt": 3}, "'prompt': 3")])
async def test_a_row_without_a_prompt_is_told_with_its_columns(folder, row, got):
    with pytest.raises(UserError, match=f"row 0 of spec.data.train has no prompt: got {got}, .*{next(iter(row))}"):
        await made(folder, 0, rows=[row])


@pytest.mark.parametrize("prompt", ["", [{"role": "user", "content": "1+1"}]])
async def test_a_row_whose_prompt_has_no_tokens_is_told(folder, tmp_path, prompt):
    """Of messages it is the template that leaves all of them out."""
    reasoning.make_folder(tmp_path)
    (tmp_path / "base" / "chat_template.jinja").write_text("")
    with pytest.raises(UserError, match=r"row 0 of spec.data.train has an empty prompt: got 'prompt': .*, no tokens"):
        await made(tmp_path, 0, rows=[{"prompt": prompt}])


async def test_a_stop_token_that_the_model_has_not_is_told_as_the_role_loads(folder):
    assert len(await made(folder, 0, config={"stopTokenIds": [63, 2], "minResponseTokens": 1})) == 1
    with pytest.raises(UserError, match=r"the model never says: got 64, 70, wanted ids below 64"):
        await made(folder, 0, config={"stopTokenIds": [64, 2, 70], "minResponseTokens": 1})


async def test_slots_for_tensor_parallelism_are_refused_by_name(folder):
    rollout = Rollout(folder)
    rollout.context.slots = (0, 1)
    says = r"tensor parallelism is not supported yet in this version: got spec.roles\[rollout\].slotsPerWorker 2"
    with pytest.raises(UserError, match=says):
        await rollout.run()


def test_a_spare_of_kind_vllm_has_imported_vllm(folder, monkeypatch):
    """5 to 15 s, which its place in a pod would wait for. Played: vLLM warns as it is imported."""
    imported = []
    monkeypatch.setattr(loading, "module", lambda name, **_: imported.append(name))
    VllmRole().warm(Rollout(folder).stage.flow, {})
    assert imported == ["rlinf_worker.roles.rollout.vllm_engine"]


async def test_what_nobody_needs_any_more_leaves_and_the_rest_goes_on(folder):
    rollout = Rollout(folder, config={"maxResponseTokens": 300, "minResponseTokens": 300})
    gone, stays = rollout.give(0, 1)
    early = rollout.tickets.give("train:0/2/0", {"index": 2, "pass": 0}, version=FIRST)
    early.cancel()

    async def cancel():
        while gone.key not in {item.key for item, _ in getattr(role, "_working", {}).values()}:
            await asyncio.sleep(0.001)
        gone.cancel()

    role = TransformersRole()
    rollout.tickets.end()
    canceller = asyncio.create_task(cancel())
    await asyncio.wait_for(role.run(rollout.context), 60)
    await canceller
    assert [item.key for item in rollout.samples.all] == [stays.key]
    assert sorted((item.key, why) for item, why in rollout.tickets.dropped) == [
        (gone.key, "cancelled"), (early.key, "cancelled"),
    ]  # fmt: skip


async def test_what_a_worker_leaves_another_goes_on_from(folder, monkeypatch):
    monkeypatch.setattr(language, "KEEP_S", 0.0)
    first = Rollout(folder, config={"minResponseTokens": 6})
    [ticket] = first.give(3)
    whole = (await first.run())[ticket.key]
    left = json.loads(json.dumps(first.tickets.kept[ticket.key]))
    assert 0 < max(map(len, left["ids"])) < 6
    begun = sum(count for spans in left["versions"] for _, _, count in spans)
    left["versions"] = [[[0, 9, len(ids)]] for ids in left["ids"]]  # to be seen again
    second = Rollout(folder, config={"minResponseTokens": 6})
    second.give(3, partial=left)
    again = (await second.run())[ticket.key]
    assert alike(whole.payload, again.payload)
    counts = np.unique(again.payload["versions"][:, 1], return_counts=True)
    assert dict(zip(*(part.tolist() for part in counts), strict=True)) == {
        9: begun,
        0: 18 - begun,
    }


async def test_a_ticket_that_asks_for_newer_weights_gets_them(folder):
    rollout = Rollout(folder, config={"temperature": 1e-3, "minResponseTokens": 6})
    old = rollout.give(0)[0]
    new = rollout.tickets.give("train:1/0/0", {"index": 0, "pass": 1}, version=PolicyVersion(0, 1), step=2)
    rollout.tickets.end()
    running = asyncio.create_task(TransformersRole().run(rollout.context))
    while not rollout.stage.weights.pulls:
        await asyncio.sleep(0.001)
    with torch.no_grad():
        for parameter in rollout.model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    rollout.show(PolicyVersion(0, 1))
    await asyncio.wait_for(running, 60)
    found = {item.key: item for item in rollout.samples.all}
    assert found[new.key].version == PolicyVersion(0, 1)
    assert found[old.key].version <= found[new.key].version
    assert set(found[new.key].payload["versions"][:, 1].tolist()) == {1}


LONG = {"minResponseTokens": 300, "maxResponseTokens": 300}


async def newer_weights_under_way(folder, *, mode, staleness=1):
    """Of a sample of 300 tokens; another ticket of the same step comes behind them."""
    rollout = Rollout(folder, config={**LONG, "onNewWeights": mode}, staleness=staleness, samplesPerPrompt=2)
    first, role = rollout.give(0)[0], TransformersRole()
    running = asyncio.create_task(role.run(rollout.context))
    while len([kind for kind, _ in rollout.context.worked if kind == "compute"]) < 5:
        await asyncio.sleep(0)
    with torch.no_grad():
        for parameter in rollout.model.parameters():
            parameter.mul_(1.1)
    rollout.show(PolicyVersion(0, 1))
    second = rollout.give(1)[0]
    rollout.tickets.end()
    await asyncio.wait_for(running, 60)
    found = {item.key: item for item in rollout.samples.all}
    return rollout, found[first.key], found[second.key]


def by_the_new(rollout, item):
    """How far the new weights' tokens of the first sample are from what these say of the text alone, in nats."""
    prompt, tokens = item.payload["prompt"].tolist(), item.payload["tokens"][:300].tolist()
    is_new = item.payload["versions"][:300, 1] == 1
    with torch.no_grad():
        logits = rollout.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    logits[:, 2] = -torch.inf
    wanted = torch.log_softmax(logits / 0.9, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    return np.abs(item.payload["logprobs"][:300] - wanted)[is_new].max()


def numbers_of(item):
    """The versions of the first sample, in their order."""
    return list(dict.fromkeys(item.payload["versions"][:300, 1].tolist()))


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_what_is_under_way_goes_on_with_newer_weights(folder, mode):
    rollout, first, second = await newer_weights_under_way(folder, mode=mode)
    assert (numbers_of(first), numbers_of(second)) == ([0, 1], [1])
    assert (by_the_new(rollout, first) < 1e-4) == (mode == "recompute"), "over the old keys and values it is a mixture"
    assert by_the_new(rollout, second) < 1e-4
    assert (first.version, second.version) == (PolicyVersion(0, 0), PolicyVersion(0, 1)), (
        "the oldest that made any of it"
    )


@pytest.mark.parametrize("mode", ["recompute", "keep", "drain"])
async def test_weights_that_a_ticket_has_asked_for_are_not_set_once_more_as_news(folder, mode):
    """Each time costs the cache of all that is under way: with 92 million parameters 5 s of a step."""
    rollout = Rollout(folder, config={**LONG, "onNewWeights": mode}, staleness=1, samplesPerPrompt=2)
    rollout.give(0)
    running = asyncio.create_task(TransformersRole().run(rollout.context))
    while len([kind for kind, _ in rollout.context.worked if kind == "compute"]) < 5:
        await asyncio.sleep(0)
    rollout.tickets.give("train:1/0/0", {"index": 0, "pass": 1}, version=PolicyVersion(0, 1), step=2)
    rollout.tickets.end()
    await asyncio.sleep(0.1)  # it waits for them by both ways
    rollout.show(PolicyVersion(0, 1))
    await asyncio.wait_for(running, 60)
    assert [kind for kind, _ in rollout.context.worked].count("weights") == 2
    assert rollout.stage.weights.pulls == 2


async def test_what_drains_ends_with_the_weights_that_it_began_with_and_nothing_begins_before(folder):
    _, first, second = await newer_weights_under_way(folder, mode="drain")
    assert (numbers_of(first), numbers_of(second)) == ([0], [1])


async def test_without_staleness_weights_change_with_the_step_alone(folder):
    rollout, first, second = await newer_weights_under_way(folder, mode="recompute", staleness=0)
    assert (numbers_of(first), numbers_of(second)) == ([0], [0])
    assert rollout.stage.weights.pulls == 1


async def test_what_was_left_by_weights_that_are_too_old_by_now_is_begun_anew(folder):
    rollout = Rollout(folder, config={"minResponseTokens": 6})
    left = {"ids": [[7], [8], [9]], "logprobs": [[-1.0]] * 3, "finished": [False] * 3, "versions": [[[0, 0, 1]]] * 3}
    rollout.show(PolicyVersion(1, 0))
    ticket = rollout.tickets.give(
        "train:0/3/0", {"index": 3, "pass": 0}, version=PolicyVersion(1, 0), branch=1, partial=left
    )
    item = (await rollout.run())[ticket.key]
    assert np.unique(item.payload["versions"], axis=0).tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("config", "kv_bytes", "says"),
    [
        ({"maxPromptTokens": 500, "maxResponseTokens": 13}, 0, "context is too short .* at most 512 together"),
        ({"maxSequences": 2}, 0, "a group does not fit into the engine: got maxSequences 2, so 2 samples at once"),
        ({}, 5000, "a group does not fit into the engine: got kv 5000 bytes of the plan, 1920 for each sample"),
    ],
)
async def test_what_has_no_room_is_told_as_the_role_loads(folder, config, kv_bytes, says):
    rollout = Rollout(folder, config=config)
    rollout.context.allotment = dataclasses.replace(Allotment(), kv_bytes=kv_bytes)
    with pytest.raises(UserError, match=says):
        await rollout.run()


async def test_the_plans_kv_bytes_bound_what_is_generated_at_once(folder):
    rollout = Rollout(folder)
    rollout.context.allotment = dataclasses.replace(Allotment(), kv_bytes=1920 * 4)
    role = TransformersRole()
    rollout.give(*range(5))
    rollout.tickets.end()
    await asyncio.wait_for(role.run(rollout.context), 60)
    assert role._most_rows == 4
    assert len(rollout.samples.all) == 5


# --- folders ----------------------------------------------------------------------------------------------------------
def broken(folder, how):
    base = reasoning.make_folder(folder) / "base"
    if how == "no tokenizer":
        for name in models.TOKENIZER:
            (base / name).unlink(missing_ok=True)
    elif how == "cut in half":
        whole = (base / "model.safetensors").read_bytes()
        (base / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    elif how == "no weights":
        (base / "model.safetensors").unlink()
    elif how == "pickled weights":
        (base / "model.safetensors").unlink()
        torch.save({}, base / "pytorch_model.bin")
    elif how == "sliding":
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"]}))
    elif how == "own code":
        config = json.loads((base / "config.json").read_text())
        config |= {"model_type": "theirs", "auto_map": {"AutoModelForCausalLM": "theirs.Model"}}
        (base / "config.json").write_text(json.dumps(config))
        (base / "theirs.py").write_text("raise SystemExit('their code has run')")
    return str(base)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("cut in half", "has no causal language model that can be read"),
        ("no weights", "has no causal language model that can be read"),
        ("pickled weights", "has no causal language model that can be read"),
        ("own code", "has no causal language model that can be read"),
        ("sliding", "is not supported yet in this version: got layers of sliding_attention"),
    ],
)
def test_a_folder_without_a_model_for_us_is_told(tmp_path, how, says):
    with pytest.raises(UserError, match=says):
        models.language_model(broken(tmp_path, how), dtype=torch.float32)


def test_a_folder_without_a_tokenizer_is_told(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer that can be read"):
        models.tokenizer(broken(tmp_path, "no tokenizer"))
    with pytest.raises(UserError, match=r"is no folder of a model: got no file config\.json"):
        models.tokenizer(str(tmp_path / "nowhere"))


async def test_a_role_that_leaves_its_slots_between_any_two_tokens_writes_the_same_groups(folder):
    """At its safe points, as the runtime would have it: weights and cache are gone, and zeros when it is back."""
    stayed = await made(folder, *range(6))
    rollout, role, moves = Rollout(folder), TransformersRole(), 0
    rollout.give(*range(6))
    await role.offload()
    await role.load()
    assert isinstance(role, Offloadable)
    assert role.memory().now == 0, "nothing is built, so nothing is moved"

    async def safe_point(*, oldest=None):
        nonlocal moves
        moves += 1
        if moves % 2:
            had = role.memory().now
            await role.offload()
            assert (role.memory().now, had > 0) == (0, True)
            await role.load()

    rollout.context.safe_point = safe_point  # type: ignore[method-assign]
    rollout.tickets.end()
    await asyncio.wait_for(role.run(rollout.context), 60)
    found = {item.key: item for item in rollout.samples.all}
    assert moves > 8, "one after each token at least, and one more after new weights"
    assert found.keys() == stayed.keys()
    for key, item in found.items():
        assert alike(item.payload, stayed[key].payload), key


async def test_it_says_of_which_step_the_oldest_group_is_that_it_works_on(folder):
    """So that a turn of a step ends when the step does, and not when something newer is begun beside it."""
    rollout, said = Rollout(folder, staleness=1, config={"maxSequences": 30}), []
    rollout.give(0, 1, step=1)
    rollout.give(2, step=2)

    async def safe_point(*, oldest=None):
        said.append(oldest)

    rollout.context.safe_point = safe_point  # type: ignore[method-assign]
    found = await rollout.run()
    tokens = {item.step: 0 for item in rollout.tickets.all}
    for item in rollout.tickets.all:
        tokens[item.step] = max(tokens[item.step], *map(int, found[item.key].payload["lengths"]))
    assert said == [1] * tokens[1] + [2] * (tokens[2] - tokens[1]), "a safe point for each token of the longest sample"
