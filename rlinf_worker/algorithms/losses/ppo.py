"""Proximal policy optimisation: clipped policy loss, value loss with optional clipping, entropy bonus.

For: one micro-batch of samples with known advantages. Not for: advantages (`advantage`), the optimizer step,
collectives. Called by the actor role: `out.loss_sum.backward()` for each micro-batch, then all gradients are divided
once by the weight of the whole minibatch over all ranks, then clipped. So how a minibatch is cut into micro-batches and
ranks does not change its gradient.

Shapes: B samples of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    clip_range: float = 0.2
    """The ratio of new to old probability stops to count outside 1 +- this."""
    value_clip_range: float | None = None
    """The same for the value against the old value, in units of return; None: not clipped."""
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What the network says now (with gradient) beside what was known when the batch was made (without)."""

    logprob_B: Tensor
    entropy_B: Tensor
    value_B: Tensor
    old_logprob_B: Tensor
    old_value_B: Tensor
    advantage_B: Tensor
    """Normalised over the whole batch by the caller, never over the micro-batch: that would make the cut matter."""
    return_B: Tensor
    weight_B: Tensor | None = None
    """0 for padding, which must hold finite numbers (0 * NaN is NaN); None: every sample counts 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOut:
    """Sums over the micro-batch: divide by the `weight_sum` of all that was added. `loss_sum` alone has a gradient."""

    loss_sum: Tensor
    weight_sum: Tensor
    policy_sum: Tensor
    value_sum: Tensor
    entropy_sum: Tensor
    kl_sum: Tensor
    """The sum of (ratio - 1) - log ratio: an estimate of KL(old, new) that is never negative."""
    clipped_sum: Tensor
    """Weight of the samples whose ratio left the clip range."""


def ppo_loss(batch: MicroBatch, config: LossConfig) -> LossOut:
    log_ratio_B = batch.logprob_B - batch.old_logprob_B
    ratio_B = log_ratio_B.exp()
    clipped_ratio_B = ratio_B.clamp(1.0 - config.clip_range, 1.0 + config.clip_range)
    policy_B = -torch.minimum(ratio_B * batch.advantage_B, clipped_ratio_B * batch.advantage_B)
    value_B = (batch.value_B - batch.return_B).square()
    if config.value_clip_range is not None:
        moved_B = (batch.value_B - batch.old_value_B).clamp(-config.value_clip_range, config.value_clip_range)
        value_B = torch.maximum(value_B, (batch.old_value_B + moved_B - batch.return_B).square())

    policy_sum = _weighted_sum(policy_B, batch.weight_B)
    value_sum = 0.5 * _weighted_sum(value_B, batch.weight_B)
    entropy_sum = _weighted_sum(batch.entropy_B, batch.weight_B)
    loss_sum = policy_sum + config.value_coefficient * value_sum
    if config.entropy_coefficient:
        loss_sum = loss_sum - config.entropy_coefficient * entropy_sum
    with torch.no_grad():
        kl_sum = _weighted_sum(ratio_B - 1.0 - log_ratio_B, batch.weight_B)
        clipped_sum = _weighted_sum((ratio_B != clipped_ratio_B).to(ratio_B.dtype), batch.weight_B)
        weight_sum = ratio_B.new_tensor(len(ratio_B)) if batch.weight_B is None else batch.weight_B.sum()
    return LossOut(
        loss_sum=loss_sum,
        weight_sum=weight_sum,
        policy_sum=policy_sum.detach(),
        value_sum=value_sum.detach(),
        entropy_sum=entropy_sum.detach(),
        kl_sum=kl_sum,
        clipped_sum=clipped_sum,
    )


def _weighted_sum(term_B: Tensor, weight_B: Tensor | None) -> Tensor:
    return term_B.sum() if weight_B is None else (term_B * weight_B).sum()
