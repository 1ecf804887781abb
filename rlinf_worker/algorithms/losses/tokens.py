"""The policy losses of language models: one function over tokens, whose settings make grpo, dr-grpo, dapo, gspo, rloo
and reinforce++ of it (flows/grpo.py has the presets).

For: one micro-batch of whole answers with known advantages. Not for: advantages (algorithms/groups.py), the optimizer.
Sums, as in losses/ppo.py: how a step is cut into rounds, micro-batches and ranks does not change its gradient. All
gradients are divided once by the `weight_sum` of the whole step.

Shapes: T tokens of all answers of the micro-batch, one after the other; S answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sequence-mean", "token-mean", "sequence-sum", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLossConfig:
    ratio: Literal["token", "sequence"] = "token"
    """Of new to old probability: of each token (PPO, arXiv 1707.06347, equation 6), or of the answer, as the geometric
    mean over its tokens (GSPO, arXiv 2507.18071, equation 7)."""
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    """The ratio stops to count below 1 - clip_low and above 1 + clip_high (clip-higher: DAPO, arXiv 2503.14476,
    equation 8). None: not clipped on that side."""
    aggregation: Aggregation = "sequence-mean"
    """sequence-mean: the mean over an answer's tokens, then over answers (GRPO, arXiv 2402.03300, equation 3).
    token-mean: over all tokens of the step (DAPO, equation 8). sequence-sum: the sum over an answer's tokens, then the
    mean over answers (REINFORCE of whole answers: RLOO, arXiv 2402.14740, equation 8). constant: that sum divided by
    `constant` (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    constant: int = 1
    entropy_coefficient: float = 0.0
    correction_cap: float | None = 2.0
    """Truncated importance weights of each token: min(old / engine, cap) times its loss, where the engine that sampled
    it and the trainer do not say the same of one policy (IMPALA's truncation, arXiv 1802.01561, section 4.1). None:
    none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    logprob_T: Tensor
    """What the policy says now, with gradient."""
    entropy_T: Tensor
    old_T: Tensor
    """What the ratio is to: the policy before the step's first update (the decoupled objective, arXiv 2110.00641,
    equation 2), or what the engine said (behaviour clipping)."""
    engine_T: Tensor
    """Of the distribution that each token was sampled from."""
    advantage_T: Tensor
    sequence_T: Tensor
    """Which answer each token is of, 0 to S - 1."""
    count: int
    """S. An answer without tokens counts, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLossOut:
    """Sums over the micro-batch; `loss_sum` alone has a gradient."""

    loss_sum: Tensor
    weight_sum: Tensor
    """What the step's gradient is divided by: tokens with token-mean, else answers."""
    entropy_sum: Tensor
    kl_sum: Tensor
    """Of (ratio - 1) - log ratio over tokens: KL(old, new), never negative (Schulman, "Approximating KL", k3)."""
    clipped_sum: Tensor
    """Tokens (of ratio sequence: those of answers) whose loss has no gradient for the clip."""
    capped_sum: Tensor
    """Tokens whose importance weight was truncated."""


def token_loss(batch: TokenBatch, config: TokenLossConfig) -> TokenLossOut:
    log_ratio_T = batch.logprob_T - batch.old_T
    length_S = _per_answer(torch.ones_like(log_ratio_T.detach()), batch)
    if config.ratio == "sequence":
        mean_S = _per_answer(log_ratio_T, batch) / length_S.clamp(min=1.0)
        used_T = mean_S[batch.sequence_T]
    else:
        used_T = log_ratio_T
    ratio_T = used_T.exp()
    low = None if config.clip_low is None else 1.0 - config.clip_low
    high = None if config.clip_high is None else 1.0 + config.clip_high
    clipped_T = ratio_T if low is None and high is None else ratio_T.clamp(min=low, max=high)
    plain_T, bounded_T = ratio_T * batch.advantage_T, clipped_T * batch.advantage_T
    loss_T = -torch.minimum(plain_T, bounded_T)
    with torch.no_grad():
        weight_T = (batch.old_T - batch.engine_T).exp()
        is_capped_T = torch.zeros_like(weight_T)
        if config.correction_cap is not None:
            is_capped_T = (weight_T > config.correction_cap).to(weight_T.dtype)
            weight_T = weight_T.clamp(max=config.correction_cap)
    if config.correction_cap is not None:
        loss_T = loss_T * weight_T
    if config.entropy_coefficient:
        loss_T = loss_T - config.entropy_coefficient * batch.entropy_T

    if config.aggregation == "sequence-mean":
        loss_T = loss_T / length_S.clamp(min=1.0)[batch.sequence_T]
    elif config.aggregation == "constant":
        loss_T = loss_T / config.constant
    is_by_token = config.aggregation == "token-mean"
    with torch.no_grad():
        weight_sum = loss_T.new_tensor(len(loss_T) if is_by_token else batch.count)
        kl_sum = (log_ratio_T.exp() - 1.0 - log_ratio_T).sum()
        clipped_sum = (bounded_T < plain_T).to(loss_T.dtype).sum()
    return TokenLossOut(
        loss_sum=loss_T.sum(),
        weight_sum=weight_sum,
        entropy_sum=batch.entropy_T.detach().sum(),
        kl_sum=kl_sum,
        clipped_sum=clipped_sum,
        capped_sum=is_capped_T.sum(),
    )


def _per_answer(term_T: Tensor, batch: TokenBatch) -> Tensor:
    return term_T.new_zeros(batch.count).index_add(0, batch.sequence_T, term_T)
