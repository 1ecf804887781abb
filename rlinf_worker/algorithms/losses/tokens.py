"""The policy losses of language models: one function over tokens, whose settings make grpo, dr-grpo, dapo, gspo, rloo
and reinforce++ of it (flows/grpo.py has the presets), or which is given the terms of a user's own loss.

For: one micro-batch of whole answers with known advantages. Not for: advantages (algorithms/groups.py), the optimizer.
Sums, as in losses/ppo.py: how a step is cut into rounds, micro-batches and ranks does not change its gradient. All
gradients are divided once by the `weight_sum` of the whole step.

Shapes: T tokens of all answers of the micro-batch, one after the other; S answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf_api.errors import UserError

Aggregation = Literal["sequence-mean", "token-mean", "sequence-sum", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLossConfig:
    ratio: Literal["token", "sequence"] = "token"
    """The ratio of new to old probability: of each token (PPO, arXiv 1707.06347, equation 6), or of the answer, as the
    geometric mean over its tokens (GSPO, arXiv 2507.18071, equation 7)."""
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
    """Log-probabilities in the distribution that each token was sampled from."""
    advantage_T: Tensor
    sequence_T: Tensor
    """Which answer each token is of, 0 to S - 1."""
    count: int
    """S. An answer without tokens counts, too."""


OwnLoss = Callable[[TokenBatch], Tensor]
"""A user's own: the term of each token, [T], with a gradient. Whole answers are in a batch, and which ones are together
is chance, so a term may look at its own answer and at no other. What is around it is ours: the importance weight, the
entropy, and how terms are added up.

    def reinforce(batch):
        return -batch.advantage_T * batch.logprob_T
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLossOut:
    """Sums over the micro-batch; `loss_sum` alone has a gradient."""

    loss_sum: Tensor
    weight_sum: Tensor
    """What the step's gradient is divided by: tokens with token-mean, else answers."""
    entropy_sum: Tensor
    kl_sum: Tensor
    """The sum of (ratio - 1) - log ratio over tokens: KL(old, new), never negative (Schulman, "Approximating KL",
    k3)."""
    clipped_sum: Tensor
    """Tokens (of ratio sequence: those of answers) whose loss has no gradient for the clip."""
    capped_sum: Tensor
    """Tokens whose importance weight was truncated."""


def token_loss(batch: TokenBatch, config: TokenLossConfig, own: OwnLoss | None = None) -> TokenLossOut:
    """`own`: instead of ratio and clipping of `config`. UserError for what it returns and is no term for each token."""
    log_ratio_T = batch.logprob_T - batch.old_T
    length_S = _per_answer(torch.ones_like(log_ratio_T.detach()), batch)
    if own is None:
        loss_T, is_clipped_T = _clipped(log_ratio_T, length_S, batch=batch, config=config)
    else:
        loss_T, is_clipped_T = _checked(own(batch), batch), torch.zeros_like(batch.engine_T)
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
    return TokenLossOut(
        loss_sum=loss_T.sum(),
        weight_sum=weight_sum,
        entropy_sum=batch.entropy_T.detach().sum(),
        kl_sum=kl_sum,
        clipped_sum=is_clipped_T.sum(),
        capped_sum=is_capped_T.sum(),
    )


def _clipped(
    log_ratio_T: Tensor, length_S: Tensor, *, batch: TokenBatch, config: TokenLossConfig
) -> tuple[Tensor, Tensor]:
    """Terms, and which of them are without gradient for the clip."""
    used_T = log_ratio_T
    if config.ratio == "sequence":
        mean_S = _per_answer(log_ratio_T, batch) / length_S.clamp(min=1.0)
        used_T = mean_S[batch.sequence_T]
    ratio_T = used_T.exp()
    low = None if config.clip_low is None else 1.0 - config.clip_low
    high = None if config.clip_high is None else 1.0 + config.clip_high
    clipped_T = ratio_T if low is None and high is None else ratio_T.clamp(min=low, max=high)
    plain_T, bounded_T = ratio_T * batch.advantage_T, clipped_T * batch.advantage_T
    with torch.no_grad():
        is_clipped_T = (bounded_T < plain_T).to(plain_T.dtype)
    return -torch.minimum(plain_T, bounded_T), is_clipped_T


def _checked(found: Any, batch: TokenBatch) -> Tensor:
    wanted = f"a tensor of shape [{len(batch.logprob_T)}] that depends on batch.logprob_T"
    if isinstance(found, Tensor) and found.shape == batch.logprob_T.shape and found.requires_grad:
        return found
    got = type(found).__name__
    if isinstance(found, Tensor):
        got = f"a tensor of shape {list(found.shape)}" + ("" if found.requires_grad else " without a gradient")
    raise UserError(
        "the loss of spec.flow.config.loss.kind does not return a term for each token", got=got, wanted=wanted,
        next="return one number per token, not their sum or mean: how they are added up says loss.aggregation",
    )  # fmt: skip


def _per_answer(term_T: Tensor, batch: TokenBatch) -> Tensor:
    return term_T.new_zeros(batch.count).index_add(0, batch.sequence_T, term_T)
