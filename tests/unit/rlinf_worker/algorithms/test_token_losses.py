"""The losses of language models against a reference in plain Python, and against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlinf_api.errors import UserError
from rlinf_worker.algorithms.losses.tokens import TokenBatch, TokenLossConfig, token_loss
from rlinf_worker.flows.grpo import PRESETS

LENGTHS = [3, 1, 4, 2]
T = sum(LENGTHS)
PLAIN = TokenLossConfig(clip_low=None, clip_high=None, aggregation="token-mean", correction_cap=None)


def columns(seed=0, lengths=LENGTHS):
    luck = np.random.default_rng(seed)
    count = sum(lengths)
    new, old, engine = (-luck.uniform(0.1, 2.0, count) for _ in range(3))
    return {
        "new": new, "old": new + 0.5 * (old + 1), "engine": new + 0.8 * (engine + 1),
        "advantage": np.repeat(luck.normal(size=len(lengths)), lengths), "entropy": luck.uniform(0, 1, count),
        "lengths": lengths,
    }  # fmt: skip


def answers_of(c):
    ends = np.cumsum(c["lengths"])
    return [range(end - length, end) for end, length in zip(ends, c["lengths"], strict=True)]


def reference(c, config):
    """(loss sum, weight sum): as the papers' sums stand there, one term after the other, in float64."""
    total = 0.0
    for tokens in answers_of(c):
        of_answer = 0.0
        mean = sum(c["new"][t] - c["old"][t] for t in tokens) / len(tokens)
        for t in tokens:
            ratio = math.exp(mean if config.ratio == "sequence" else c["new"][t] - c["old"][t])
            low = -math.inf if config.clip_low is None else 1 - config.clip_low
            high = math.inf if config.clip_high is None else 1 + config.clip_high
            term = -min(ratio * c["advantage"][t], min(max(ratio, low), high) * c["advantage"][t])
            if config.correction_cap is not None:
                term *= min(math.exp(c["old"][t] - c["engine"][t]), config.correction_cap)
            of_answer += term - config.entropy_coefficient * c["entropy"][t]
        if config.aggregation == "sequence-mean":
            of_answer /= len(tokens)
        elif config.aggregation == "constant":
            of_answer /= config.constant
        total += of_answer
    return total, float(len(c["new"]) if config.aggregation == "token-mean" else len(c["lengths"]))


def batch_of(c, *, dtype=torch.float64):
    tensors = {name: torch.tensor(c[name], dtype=dtype) for name in ("new", "old", "engine", "advantage", "entropy")}
    tensors["new"].requires_grad_()
    sequence = torch.repeat_interleave(torch.arange(len(c["lengths"])), torch.tensor(c["lengths"]))
    batch = TokenBatch(
        logprob_T=tensors["new"], entropy_T=tensors["entropy"], old_T=tensors["old"], engine_T=tensors["engine"],
        advantage_T=tensors["advantage"], sequence_T=sequence, count=len(c["lengths"]),
    )  # fmt: skip
    return tensors["new"], batch


def loss_config(kind, **changes):
    preset = {name: value for name, value in PRESETS[kind].items() if name in TokenLossConfig.__dataclass_fields__}
    return TokenLossConfig(**{**preset, **changes})


CONFIGS = {
    **{kind: loss_config(kind, constant=7) for kind in PRESETS},
    "ratio": replace(PLAIN, ratio="sequence"),
    "clip_low": replace(PLAIN, clip_low=0.1),
    "clip_high": replace(PLAIN, clip_high=0.1),
    "sequence-mean": replace(PLAIN, aggregation="sequence-mean"),
    "sequence-sum": replace(PLAIN, aggregation="sequence-sum"),
    "constant": replace(PLAIN, aggregation="constant", constant=5),
    "entropy": replace(PLAIN, entropy_coefficient=0.3),
    "cap": replace(PLAIN, correction_cap=1.05),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loss_is_the_papers_sum(name):
    c, config = columns(), CONFIGS[name]
    _, batch = batch_of(c)
    out = token_loss(batch, config)
    loss, weight = reference(c, config)
    assert out.loss_sum.item() == pytest.approx(loss, rel=1e-12)
    assert float(out.weight_sum) == weight


@pytest.mark.parametrize("name", CONFIGS)
def test_its_gradient_is_that_of_the_sum(name):
    c, config = columns(seed=1), CONFIGS[name]
    new, batch = batch_of(c)
    token_loss(batch, config).loss_sum.backward()
    step = 1e-6
    for t in range(T):
        moved = []
        for sign in (1, -1):
            changed = {**c, "new": c["new"].copy()}
            changed["new"][t] += sign * step
            moved.append(reference(changed, config)[0])
        assert float(new.grad[t]) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in PRESETS])
def test_each_setting_changes_the_loss(name):
    """Divided by what a step's gradient is divided by."""
    _, batch = batch_of(columns(seed=1))
    plain, other = token_loss(batch, PLAIN), token_loss(batch, CONFIGS[name])
    mean = plain.loss_sum.item() / plain.weight_sum.item()
    assert other.loss_sum.item() / other.weight_sum.item() != pytest.approx(mean)


def clipped(batch):
    """grpo's terms, as a user would write them."""
    ratio = (batch.logprob_T - batch.old_T).exp()
    return -torch.minimum(ratio * batch.advantage_T, ratio.clamp(0.8, 1.2) * batch.advantage_T)


@pytest.mark.parametrize("name", ["grpo", "dr-grpo", "dapo", "entropy", "cap"])
def test_a_loss_of_ones_own_takes_the_place_of_ratio_and_clip_alone(name):
    """Weights, entropy and how terms are added up are ours: with our terms it is our loss."""
    config = replace(CONFIGS[name], clip_low=0.2, clip_high=0.2)
    (ours, batch), (theirs, other) = batch_of(columns(seed=1)), batch_of(columns(seed=1))
    wanted, found = token_loss(batch, config), token_loss(other, replace(config, clip_low=None, clip_high=9.0), clipped)
    for out in (wanted, found):
        out.loss_sum.backward()
    assert torch.equal(ours.grad, theirs.grad)
    assert (float(found.weight_sum), float(found.kl_sum)) == (float(wanted.weight_sum), float(wanted.kl_sum))
    assert float(wanted.clipped_sum) > 0
    assert float(found.clipped_sum) == 0, "what it clips is its own affair"


@pytest.mark.parametrize(
    ("own", "got"),
    [
        (lambda batch: (batch.logprob_T * batch.advantage_T).sum(), r"got a tensor of shape \[\], wanted .* \[10\]"),
        (lambda batch: batch.logprob_T[:3], r"got a tensor of shape \[3\]"),
        (lambda batch: batch.old_T, r"got a tensor of shape \[10\] without a gradient"),
        (lambda batch: 1.0, "got float"),
        (lambda batch: None, "got NoneType"),
    ],
)
def test_what_is_no_term_for_each_token_is_told(own, got):
    with pytest.raises(UserError, match=f"loss.kind does not return a term for each token: {got}"):
        token_loss(batch_of(columns())[1], PLAIN, own)


def test_numbers_by_hand():
    """Two answers, of two tokens and of one. Ratios 1.5, 1, 0.5; advantages 1, 1, -1."""
    old = np.log([0.2, 0.5, 0.4])
    c = {
        "new": old + np.log([1.5, 1.0, 0.5]), "old": old, "engine": old - np.log([4.0, 1.0, 0.5]),
        "advantage": np.array([1.0, 1.0, -1.0]), "entropy": np.zeros(3), "lengths": [2, 1],
    }  # fmt: skip
    _, batch = batch_of(c)
    grpo = token_loss(batch, loss_config("grpo", correction_cap=None))
    assert grpo.loss_sum.item() == pytest.approx(-(1.2 + 1.0) / 2 + 0.8)  # 1.5 to 1.2, -0.5 to -0.8
    assert (float(grpo.weight_sum), float(grpo.clipped_sum)) == (2.0, 2.0)
    assert float(grpo.kl_sum) == pytest.approx((0.5 - math.log(1.5)) + 0.0 + (-0.5 - math.log(0.5)))
    dapo = token_loss(batch, loss_config("dapo", correction_cap=None))
    assert dapo.loss_sum.item() == pytest.approx(-(1.28 + 1.0) + 0.8)
    assert float(dapo.weight_sum) == 3.0
    dr_grpo = token_loss(batch, loss_config("dr-grpo", correction_cap=None, constant=10))
    assert dr_grpo.loss_sum.item() == pytest.approx((-(1.2 + 1.0) + 0.8) / 10)
    rloo = token_loss(batch, loss_config("rloo", correction_cap=None))
    assert rloo.loss_sum.item() == pytest.approx(-(1.5 + 1.0) + 0.5)
    gspo = token_loss(batch, loss_config("gspo", correction_cap=None))
    assert gspo.loss_sum.item() == pytest.approx(-1.0004 + (1 - 3e-4))  # sqrt(1.5) is clipped, and so is 0.5
    corrected = token_loss(batch, loss_config("grpo"))
    assert corrected.loss_sum.item() == pytest.approx(-(2 * 1.2 + 1.0) / 2 + 0.5 * 0.8)  # 4 counts 2
    assert float(corrected.capped_sum) == 1.0


@pytest.mark.parametrize("kind", PRESETS)
def test_how_answers_are_cut_into_micro_batches_does_not_matter(kind):
    c, config = columns(seed=2), loss_config(kind, constant=4)
    whole, batch = batch_of(c)
    one = token_loss(batch, config)
    one.loss_sum.backward()
    loss = weight = 0.0
    gradient = []
    for start, end in ((0, 1), (1, 3), (3, 4)):
        first, last = sum(LENGTHS[:start]), sum(LENGTHS[:end])
        part = {name: value[first:last] for name, value in c.items()} | {"lengths": LENGTHS[start:end]}
        new, batch = batch_of(part)
        out = token_loss(batch, config)
        out.loss_sum.backward()
        loss, weight = loss + out.loss_sum.item(), weight + float(out.weight_sum)
        gradient.append(new.grad)
    assert loss == pytest.approx(one.loss_sum.item(), rel=1e-12)
    assert weight == float(one.weight_sum)
    torch.testing.assert_close(torch.cat(gradient), whole.grad, rtol=1e-12, atol=0)


def test_an_answer_without_tokens_counts_as_one():
    c = columns(lengths=[2, 0, 3])
    _, batch = batch_of(c)
    out = token_loss(batch, loss_config("grpo"))
    assert float(out.weight_sum) == 3.0
    assert math.isfinite(out.loss_sum.item())
