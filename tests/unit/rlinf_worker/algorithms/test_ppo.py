"""The PPO loss against numbers worked out by hand, and its gradient under every cut of the minibatch."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_worker.algorithms.losses.ppo import LossConfig, LossOut, MicroBatch, ppo_loss
from rlinf_worker.algorithms.policies import ActorCritic
from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec


def batch_of(ratios: list[float], advantages: list[float]) -> MicroBatch:
    count = len(ratios)
    return MicroBatch(
        logprob_B=torch.log(torch.tensor(ratios)),
        entropy_B=torch.full((count,), 0.5),
        value_B=torch.zeros(count),
        old_logprob_B=torch.zeros(count),
        old_value_B=torch.zeros(count),
        advantage_B=torch.tensor(advantages),
        return_B=torch.zeros(count),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.1, 2.0, -2.2),  # inside the range: -ratio * advantage
        (1.5, 2.0, -2.4),  # a good action already made likely enough: capped at 1.2
        (0.5, 2.0, -1.0),  # a good action made unlikely: no cap, it must come back
        (0.5, -2.0, 1.6),  # a bad action already made unlikely enough: capped at 0.8
        (1.5, -2.0, 3.0),  # a bad action made likely: no cap
    ],
)
def test_the_policy_loss_is_clipped_only_where_that_is_pessimistic(ratio: float, advantage: float, loss: float) -> None:
    out = ppo_loss(batch_of([ratio], [advantage]), LossConfig(clip_range=0.2))

    assert out.policy_sum.item() == pytest.approx(loss, rel=1e-5)


def test_all_sums_by_hand() -> None:
    batch = replace(
        batch_of([1.0, 1.5], [1.0, 1.0]), value_B=torch.tensor([1.0, 4.0]), return_B=torch.tensor([3.0, 3.0])
    )

    out = ppo_loss(batch, LossConfig(clip_range=0.2, value_coefficient=0.5, entropy_coefficient=0.1))

    assert out.weight_sum.item() == 2.0
    assert out.policy_sum.item() == pytest.approx(-1.0 - 1.2)
    assert out.value_sum.item() == pytest.approx(0.5 * (4.0 + 1.0))
    assert out.entropy_sum.item() == pytest.approx(1.0)
    assert out.kl_sum.item() == pytest.approx(0.5 - math.log(1.5))
    assert out.clipped_sum.item() == 1.0
    assert out.loss_sum.item() == pytest.approx(-2.2 + 0.5 * 2.5 - 0.1 * 1.0)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.1, 0.5 * (3.0 - 1.1) ** 2),  # moved less than 0.2 from the old value 1.0
        (2.5, 0.5 * (3.0 - 1.2) ** 2),  # moved too far towards the return: counts as 1.2
        (9.0, 0.5 * (3.0 - 9.0) ** 2),  # moved too far and past it: the larger of the two errors
    ],
)
def test_a_clipped_value_is_no_better_than_one_a_short_step_away(value: float, expected: float) -> None:
    batch = replace(
        batch_of([1.0], [0.0]),
        value_B=torch.tensor([value]),
        old_value_B=torch.tensor([1.0]),
        return_B=torch.tensor([3.0]),
    )

    assert ppo_loss(batch, LossConfig(value_clip_range=0.2)).value_sum.item() == pytest.approx(expected)


def test_padding_weighs_nothing() -> None:
    real = batch_of([1.1, 0.9], [1.0, -1.0])
    padded = replace(batch_of([1.1, 0.9, 3.0], [1.0, -1.0, 7.0]), weight_B=torch.tensor([1.0, 1.0, 0.0]))

    expected, out = ppo_loss(real, LossConfig()), ppo_loss(padded, LossConfig())

    for field in fields(LossOut):
        torch.testing.assert_close(getattr(out, field.name), getattr(expected, field.name))


COUNT = 96
SPEC = PolicySpec(obs_shape=(4,), actions=Actions("discrete", 2), hidden_sizes=(16, 16))
CONFIG = LossConfig(clip_range=0.1, value_clip_range=0.3, entropy_coefficient=0.01)


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "obs": torch.randn(COUNT, 4, generator=draw),
        "action": torch.randint(0, 2, (COUNT,), generator=draw),
        "old_logprob_B": -0.7 + 0.2 * torch.randn(COUNT, generator=draw),
        "old_value_B": torch.randn(COUNT, generator=draw),
        "advantage_B": torch.randn(COUNT, generator=draw),
        "return_B": torch.randn(COUNT, generator=draw),
    }


def backward(model: ActorCritic, rows: dict[str, Tensor], *, weight_B: Tensor | None = None) -> LossOut:
    logprob_B, entropy_B, value_B = model(rows["obs"], rows["action"])
    known = {name: rows[name] for name in ("old_logprob_B", "old_value_B", "advantage_B", "return_B")}
    batch = MicroBatch(logprob_B=logprob_B, entropy_B=entropy_B, value_B=value_B, weight_B=weight_B, **known)
    out = ppo_loss(batch, CONFIG)
    out.loss_sum.backward()
    return out


def gradient(model: ActorCritic) -> Tensor:
    return torch.cat([parameter.grad.ravel() for parameter in model.parameters() if parameter.grad is not None])


def whole_gradient() -> Tensor:
    model = ActorCritic(SPEC, seed=0)
    out = backward(model, data())
    return gradient(model) / out.weight_sum


@pytest.mark.parametrize("cuts", [[24, 48, 72], [1, 95], [10, 60]])
def test_micro_batches_give_the_gradient_of_the_whole(cuts: list[int]) -> None:
    model = ActorCritic(SPEC, seed=0)
    weight = torch.tensor(0.0)
    for rows in np.split(np.arange(COUNT), cuts):
        out = backward(model, {name: tensor[rows] for name, tensor in data().items()})
        weight = weight + out.weight_sum

    torch.testing.assert_close(gradient(model) / weight, whole_gradient(), rtol=1e-4, atol=1e-6)


def test_two_ranks_of_unequal_share_give_the_gradient_of_one() -> None:
    """Rank 1 has 36 samples of 60 and pads: both ranks must enter the same number of collectives."""
    sums, weights = [], []
    for first, last, size in ((0, 60, 60), (60, 96, 60)):
        model = ActorCritic(SPEC, seed=0)
        part = {name: tensor[first:last] for name, tensor in data().items()}
        padded = {
            name: torch.cat([tensor, torch.zeros(size - len(tensor), *tensor.shape[1:], dtype=tensor.dtype)])
            for name, tensor in part.items()
        }
        weight_B = (torch.arange(size) < last - first).float()
        out = backward(model, padded, weight_B=weight_B)
        sums.append(gradient(model))
        weights.append(out.weight_sum)

    reduced = (sums[0] + sums[1]) / (weights[0] + weights[1])
    torch.testing.assert_close(reduced, whole_gradient(), rtol=1e-4, atol=1e-6)


def test_the_loss_teaches_a_bandit_to_prefer_the_rewarded_action() -> None:
    """Defaults of CleanRL and SB3 (clip 0.2, value 0.5, Adam 2.5e-4 x 10): 40 updates make action 1 nearly certain."""
    model = ActorCritic(SPEC, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-3, eps=1e-5)
    obs = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    action = torch.arange(256) % 2
    for _ in range(40):
        with torch.no_grad():
            old_logprob_B, _, old_value_B = model(obs, action)
        for _ in range(4):
            logprob_B, entropy_B, value_B = model(obs, action)
            batch = MicroBatch(
                logprob_B=logprob_B,
                entropy_B=entropy_B,
                value_B=value_B,
                old_logprob_B=old_logprob_B,
                old_value_B=old_value_B,
                advantage_B=2.0 * action - 1.0,
                return_B=action.float(),
            )
            optimizer.zero_grad()
            (ppo_loss(batch, LossConfig()).loss_sum / len(action)).backward()
            optimizer.step()

    assert model(obs, torch.ones(256, dtype=torch.int64))[0].exp().mean().item() > 0.95
