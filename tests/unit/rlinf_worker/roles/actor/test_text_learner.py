"""The update of a language model, in float64, against a forward pass of each sample alone and a plain sum."""

import math
import multiprocessing
import socket
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.losses.tokens import TokenLossConfig
from rlinf_worker.roles.actor import scoring
from rlinf_worker.roles.actor.text_learner import AnswerGroup, TextLearner, TextLearnerConfig

STOPS, LEAST, TEMPERATURE = (2, 3), 2, 0.8
RANKS_S = 90.0  # two processes that import torch and transformers, on a machine that does other things too
CONFIG = TextLearnerConfig(
    loss=TokenLossConfig(), learning_rate=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, max_grad_norm=1e9,
    schedule="constant", warmup_steps=0, token_budget=100, precision="float32", activation_checkpointing=False,
    least=LEAST,
)  # fmt: skip
LOSSES = {
    "sequence-mean": TokenLossConfig(),
    "token-mean": TokenLossConfig(aggregation="token-mean", entropy_coefficient=0.01),
    "sequence-ratio": TokenLossConfig(ratio="sequence"),
}


def model_of(*, seed=0, dtype=torch.float64):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(dtype).train(False)
    for module in model.modules():
        if type(module).__name__ == "Qwen2RMSNorm":  # in float32 else, whose rounding depends on what is beside it
            module.forward = partial(exact_norm, module)
    return model


def exact_norm(module, hidden):
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


def learner_of(*, mesh=None, chunk_numbers=1 << 20, dtype=torch.float64, **changes):
    model = model_of(dtype=dtype)
    scorer = scoring.Scorer(model, temperature=TEMPERATURE, stops=STOPS, chunk_numbers=chunk_numbers)
    return TextLearner(model, scorer, replace(CONFIG, **changes), mesh=mesh)


def groups_of(count=5, *, seed=0, samples=3):
    luck, found = np.random.default_rng(seed), []
    for _ in range(count):
        lengths = luck.integers(1, 7, samples).astype(np.int32)
        tokens = luck.integers(4, 20, lengths.sum()).astype(np.int32)  # no stop token, which the first may not be
        found.append(AnswerGroup(
            prompt=luck.integers(4, 20, luck.integers(1, 9)).astype(np.int32), tokens=tokens, lengths=lengths,
            engine=-luck.uniform(1, 5, len(tokens)).astype(np.float32), advantage_G=luck.normal(size=samples),
        ))  # fmt: skip
    return found


def scored(model, prompt, ids):
    """(log-probabilities, entropies) of one sample, alone."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    barred = torch.zeros_like(logits, dtype=torch.bool)
    barred[:LEAST, list(STOPS)] = True
    logits = torch.where(barred, torch.tensor(-1e9, dtype=logits.dtype), logits)
    logprob = torch.log_softmax(logits, -1)
    return logprob.gather(-1, torch.tensor(ids)[:, None])[:, 0], -(logprob.exp() * logprob).sum(-1)


def samples_of(groups):
    for group in groups:
        ends = np.cumsum(group.lengths)
        for number, (end, length) in enumerate(zip(ends.tolist(), group.lengths.tolist(), strict=True)):
            yield group, number, slice(end - length, end)


def reference(groups, loss):
    """The gradient of a step by its definition."""
    model, total, weight = model_of(), torch.zeros((), dtype=torch.float64), 0
    for group, number, part in samples_of(groups):
        ids = group.tokens[part].tolist()
        logprob, entropy = scored(model, group.prompt.tolist(), ids)
        old = logprob.detach() if group.old is None else group.old[part]
        ratio = (logprob - old).exp()
        if loss.ratio == "sequence":
            ratio = (logprob - old).mean().exp().expand(len(ids))
        advantage = float(group.advantage_G[number])
        term = -torch.minimum(ratio * advantage, ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantage)
        engine = torch.from_numpy(group.engine[part].astype(np.float64))
        term = term * (old - engine).exp().clamp(max=loss.correction_cap) - loss.entropy_coefficient * entropy
        total = total + (term.sum() if loss.aggregation == "token-mean" else term.mean())
        weight += len(ids) if loss.aggregation == "token-mean" else 1
    (total / weight).backward()
    return dict(model.named_parameters())


def gradients(learner):
    weight = learner.totals.sums["weight"]
    return {name: parameter.grad / weight for name, parameter in learner.parameters.items()}


def near(found, wanted):
    """Gradients, each to 1e-12 of its norm."""
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 1e-12 * float(gradient.norm()), name


def same(found, wanted, *, rtol):
    assert set(found) == set(wanted)
    for name, parameter in wanted.items():
        theirs = parameter.grad if parameter.grad is not None else parameter
        torch.testing.assert_close(found[name], theirs, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", [[5], [1, 1, 1, 1, 1], [2, 0, 3]])
def test_any_cut_into_rounds_gives_the_gradient_of_the_definition(name, cut):
    groups, learner = groups_of(), learner_of(loss=LOSSES[name])
    learner.score(groups)
    for group in groups:
        group.old = group.old + 0.3 * torch.sin(torch.arange(len(group.old)))  # the ratio is not 1
    at = 0
    for size in cut:
        learner.add(groups[at : at + size])
        at += size
    near(gradients(learner), {n: p.grad for n, p in reference(groups, LOSSES[name]).items()})


@pytest.mark.parametrize("budget", [16, 60, 10_000])
def test_micro_batches_are_within_the_budget_and_change_nothing(budget):
    groups, learner = groups_of(), learner_of(token_budget=budget)
    batches = list(learner._micro_batches(groups))
    assert len(batches) > 1 or budget == 10_000
    for batch in batches:
        padded = len(batch) * max(sample.positions for sample in batch)
        assert padded <= budget or len(batch) == 1
    assert sum(len(batch) for batch in batches) == 15
    learner.add(groups)
    same(gradients(learner), reference(groups, CONFIG.loss), rtol=1e-9)


def test_an_eighth_of_a_micro_batch_is_padding_at_most_and_few_short_samples_are_one_pass():
    luck = np.random.default_rng(7)
    lengths = np.minimum(luck.lognormal(5.0, 0.8, 64).astype(np.int32), 2000)
    long = AnswerGroup(
        prompt=np.ones(64, np.int32), tokens=np.zeros(lengths.sum(), np.int32), lengths=lengths,
        engine=np.zeros(lengths.sum(), np.float32), advantage_G=np.zeros(64),
    )  # fmt: skip
    batches = list(learner_of(token_budget=16_384)._micro_batches([long]))
    positions = [[sample.positions for sample in batch] for batch in batches]
    assert sorted(chain.from_iterable(positions)) == sorted(64 + lengths)
    padding = [len(batch) * max(batch) - sum(batch) for batch in positions]
    assert all(
        wasted <= max(64, 0.125 * len(batch) * max(batch)) for wasted, batch in zip(padding, positions, strict=True)
    )
    assert len(batches) <= 12  # nor a pass for each: 3 suffice for the budget alone, with 45% padding
    assert len(list(learner_of(token_budget=16_384)._micro_batches(groups_of()))) == 1  # 15 samples, 4 to 14 positions


def test_activations_are_made_again_where_the_config_says_so_and_the_gradient_is_the_same():
    """Kept are those of a layer's input: the backward pass has each layer's forward pass run once more."""
    groups, runs = groups_of(), [0, 0]
    for again in (False, True):
        learner = learner_of(activation_checkpointing=again, token_budget=10_000)

        def counted(*_, again=again):
            runs[again] += 1

        for layer in learner.model.base_model.layers:
            layer.mlp.register_forward_pre_hook(counted)
        learner.add(groups)
        same(gradients(learner), reference(groups, CONFIG.loss), rtol=1e-9)
    assert runs == [2, 4], "two layers, one pass; and again"
    learner.score(groups)
    assert runs == [2, 6], "a pass without gradient is one"


def test_logits_are_made_in_chunks_and_again_in_the_backward_pass():
    groups = groups_of()
    whole, chunked = learner_of(token_budget=10_000), learner_of(token_budget=10_000, chunk_numbers=60)
    most = []
    inner = chunked._scorer._score

    def counted(hidden, *rest):
        most.append(len(hidden))
        return inner(hidden, *rest)

    chunked._scorer._score = counted
    for learner in (whole, chunked):
        learner.add(groups)
    same(gradients(chunked), gradients(whole), rtol=1e-9)
    assert max(most) == 3, "60 numbers over a vocabulary of 20"
    assert len(most) > sum(len(group.tokens) for group in groups) / 3 * 2 - 1, "forward, and again"


def test_old_logprobs_are_what_the_policy_says():
    groups, learner = groups_of(), learner_of()
    learner.score(groups)
    for group, _, part in samples_of(groups):
        found, _ = scored(model_of(), group.prompt.tolist(), group.tokens[part].tolist())
        torch.testing.assert_close(group.old[part], found.detach(), rtol=1e-9, atol=1e-12)
    with_old, without = learner_of(), learner_of()
    with_old.add(groups)
    for group in groups:
        group.old = None
    without.add(groups)
    same(gradients(with_old), gradients(without), rtol=1e-9)


def test_an_update_is_adamws_with_the_gradient_clipped_and_the_rate_of_its_step():
    groups = groups_of()
    bound, steps = 0.05, 10
    learner = learner_of(max_grad_norm=bound, schedule="linear", warmup_steps=1)
    wanted = reference(groups, CONFIG.loss)
    theirs = torch.optim.AdamW(wanted.values(), lr=1.0, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step, rate in ((1, 0.005), (2, 0.01)):
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in wanted.values()))
        assert norm > bound
        torch.nn.utils.clip_grad_norm_(wanted.values(), bound)
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
        learner.add(groups)
        totals, found = learner.update(step, steps=steps)
        assert found == pytest.approx(norm, rel=1e-9)
        assert (totals.sums["tokens"], totals.sums["weight"]) == (sum(len(g.tokens) for g in groups), 15)
        same(
            {n: p.detach() for n, p in learner.parameters.items()},
            {n: p.detach() for n, p in wanted.items()},
            rtol=1e-8,
        )
        if step == 1:
            fresh = learner_of()
            with torch.no_grad():
                for name, parameter in fresh.parameters.items():
                    parameter.copy_(wanted[name])
            fresh.add(groups)
            for name, gradient in gradients(fresh).items():
                wanted[name].grad = gradient


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0, [1, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.5 - 0.5 * math.cos(math.pi / 4)]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(schedule, warmup, factors):
    config = replace(CONFIG, schedule=schedule, warmup_steps=warmup)
    assert [config.factor(step, steps=4) for step in (1, 2, 3, 4)] == pytest.approx(factors)


def test_a_gradient_that_is_no_number_changes_nothing():
    groups, learner = groups_of(), learner_of()
    before = {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}
    groups[1].advantage_G[0] = math.nan
    learner.add(groups)
    _, norm = learner.update(1, steps=3)
    assert math.isnan(norm)
    for name, parameter in learner.parameters.items():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    learner.add(groups_of(seed=1))
    _, norm = learner.update(2, steps=3)
    assert math.isfinite(norm)
    assert any(not torch.equal(parameter, before[name]) for name, parameter in learner.parameters.items())


def test_a_step_without_groups_changes_nothing():
    learner = learner_of()
    before = [parameter.detach().clone() for parameter in learner.parameters.values()]
    learner.add([])
    totals, norm = learner.update(1, steps=3)
    assert (totals.sums["weight"], norm) == (0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters.values(), strict=True))


def test_what_was_added_of_a_void_step_is_forgotten():
    learner = learner_of()
    learner.add(groups_of(seed=4))
    learner.forget()
    learner.add(groups_of())
    same(gradients(learner), reference(groups_of(), CONFIG.loss), rtol=1e-9)


def test_how_far_engine_and_trainer_are_apart_is_counted():
    groups, learner = groups_of(), learner_of()
    learner.score(groups)
    for group in groups:
        group.engine = group.old.numpy().astype(np.float32)
        group.old = None
    groups[2].engine[1] += 0.5
    learner.add(groups)
    assert learner.totals.engine_difference == pytest.approx(0.5, abs=1e-6)
    assert learner.totals.sums["engine_kl"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-6)


def test_bfloat16_trains_float32_weights():
    groups, learner = groups_of(), learner_of(dtype=torch.float32, precision="bfloat16")
    exact = learner_of(dtype=torch.float32)
    for one in (learner, exact):
        one.add(groups)
    assert {parameter.grad.dtype for parameter in learner.parameters.values()} == {torch.float32}
    apart = [(a - b).abs().max() / b.abs().max() for a, b in zip(
        gradients(learner).values(), gradients(exact).values(), strict=True)]  # fmt: skip
    assert 1e-5 < max(apart) < 0.3, "another precision, and the same gradient"


def test_weights_are_published_by_hugging_faces_names_in_the_engines_dtype():
    learner = learner_of(dtype=torch.float32)
    found = learner.shards(torch.bfloat16)
    assert set(found) == {name for name, _ in model_of().named_parameters()}
    assert "lm_head.weight" not in found, "it is the embedding"
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_entropies_have_no_gradient_until_somebody_wants_it():
    """A number of the metrics else, which would keep all logits for the way back."""
    scorer = scoring.Scorer(model_of(), temperature=TEMPERATURE, stops=STOPS)
    where = torch.tensor([0]), torch.tensor([1]), torch.tensor([5]), torch.tensor([False])
    logprob, entropy = scorer(torch.tensor([[4, 6, 5]]), *where)
    assert (logprob.requires_grad, entropy.requires_grad) == (True, False)


def test_a_model_that_caps_its_logits_is_refused():
    model = model_of()
    scoring.check(model, path="/m")
    forward = model.forward

    def capped(**arguments):
        out = forward(**arguments)
        out.logits = torch.tanh(out.logits)
        return out

    model.forward = capped
    with pytest.raises(UserError, match="neither scales nor caps its logits"):
        scoring.check(model, path="/m")


# --- ranks ------------------------------------------------------------------------------------------------------------
ROUNDS = {
    "one-round": [[0, 1, 2, 3, 4]],
    "two-rounds": [[0, 1], [2, 3, 4]],
    "a-round-each": [[0], [1], [2], [3], [4]],
}
CASES = [
    ("sequence-mean", "one-round", False), ("sequence-mean", "two-rounds", True), ("token-mean", "two-rounds", False),
    ("token-mean", "a-round-each", True),
]  # fmt: skip
"""Loss, rounds, whether activations are made again."""


def _own(part, *, rank, world):
    """Of a round's groups those of a rank: it has fewer than others, or none."""
    return part[rank::world]


def _case(groups, mesh, *, name, rounds, again, rank):
    """Gradients of all ranks, and what an update makes of them."""
    world = mesh.size()
    learner = learner_of(
        mesh=mesh, token_budget=40, max_grad_norm=0.05, activation_checkpointing=again, loss=LOSSES[name]
    )
    for part in ROUNDS[rounds]:
        learner.add([groups[index] for index in _own(part, rank=rank, world=world)])
    weight = sum(each.sums["weight"] for each in learner.gathered(learner.totals))
    found = {name: p.grad.full_tensor() * (world / weight) for name, p in learner.parameters.items()}
    totals, norm = learner.update(1, steps=3)
    return {"gradients": found, "whole": dict(learner.whole()), "norm": norm, "sums": totals.sums}


def _no_number(groups, mesh, *, rank, where):
    """In the advantages of the last rank's group, or in its shard of a gradient alone. Of each rank: whether it
    skipped, whether it kept its weights, and whether it takes the next step."""
    learner, is_last = learner_of(mesh=mesh), rank == mesh.size() - 1
    before = [parameter.detach().to_local().clone() for parameter in learner.parameters.values()]

    def has_kept():
        now = [parameter.detach().to_local() for parameter in learner.parameters.values()]
        return all(torch.equal(one, other) for one, other in zip(before, now, strict=True))

    broken = replace(groups[rank], advantage_G=groups[rank].advantage_G.copy())
    if is_last and where == "advantage":
        broken.advantage_G[0] = math.nan
    learner.add([broken])
    if is_last and where == "shard":
        next(iter(learner.parameters.values())).grad.to_local().view(-1)[0] = math.inf
    _, norm = learner.update(1, steps=3)
    skipped, kept = math.isnan(norm), has_kept()
    learner.add([groups[rank]])
    _, norm = learner.update(2, steps=3)
    return learner.gathered((skipped, kept, math.isfinite(norm) and not has_kept()))


def _rank(rank, world, port, folder):
    import datetime
    import os

    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.device_mesh import init_device_mesh

    said = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 2)  # C++ says here why it ends a process
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=RANKS_S)
    store = TCPStore("127.0.0.1", port, world, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    mesh, groups = init_device_mesh("cpu", (world,)), groups_of()
    cases = [_case(groups, mesh, name=name, rounds=rounds, again=again, rank=rank) for name, rounds, again in CASES]
    skipped = [_no_number(groups, mesh, rank=rank, where=where) for where in ("advantage", "shard")]
    if rank == 0:
        torch.save({"cases": cases, "skipped": skipped}, folder / "out.pt")
    dist.barrier()
    os._exit(0)  # as a rank that is killed: its peer has all it needs


@pytest.fixture
def store():
    """The meeting point of the ranks, which outlives them."""
    from torch._C._distributed_c10d import TCPStore

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        yield TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


@pytest.mark.timeout(2 * RANKS_S)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_make_the_update_of_one_and_skip_all_what_is_no_number_for_one(tmp_path, store, world):
    """However a step's groups are dealt out in rounds. Some rank has fewer groups in a round, or none."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, world, store.port, tmp_path)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(RANKS_S)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("said-*")))
    assert [process.exitcode for process in ranks] == [0] * world, said
    out = torch.load(tmp_path / "out.pt")
    for (name, *_), found in zip(CASES, out["cases"], strict=True):
        alone = learner_of(max_grad_norm=0.05, loss=LOSSES[name])
        alone.add(groups_of())
        near(found["gradients"], gradients(alone))
        totals, norm = alone.update(1, steps=3)
        assert found["norm"] == pytest.approx(norm, rel=1e-10)
        assert found["sums"] == pytest.approx(totals.sums, rel=1e-10)
        same(found["whole"], {n: p.detach() for n, p in alone.parameters.items()}, rtol=1e-9)
    assert out["skipped"] == [[(True, True, True)] * world] * 2
