"""Advantages without a critic: what a sample's reward is worth beside the others of its prompt, or of its batch.

For: flow grpo. Not for: the losses (losses/tokens.py). Pure, numpy, float64: called by the actor once a group, as it
comes, or once a step where the whole batch has a say.

Shapes: G samples of one prompt, N samples of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
EPSILON: Final = 1e-6  # beside a deviation: of rewards between 0 and 1 far below what one sample moves it by

Baseline = Literal["group-mean", "leave-one-out", "none"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    baseline: Baseline = "group-mean"
    """group-mean: DeepSeekMath (arXiv 2402.03300), section 4.1.2. leave-one-out: RLOO (arXiv 2402.14740), equation 8:
    the mean of the others, which does not depend on the sample itself. none: the batch's own, by `scale`."""
    scale: Scale = "group"
    """group: divided by the group's deviation (2402.03300, section 4.1.2; of samples, G - 1, as is usual in code).
    batch: mean 0 and deviation 1 over the whole step (REINFORCE++, arXiv 2501.03262, section 3). none: Dr. GRPO (arXiv
    2503.20783, section 3.2): a deviation as a divisor weighs prompts by how sure the policy is."""


def of_group(reward_G: Float64, config: AdvantageConfig) -> Float64:
    """The advantages of one prompt's samples. With scale batch the rest is done by `over_batch`.

    >>> of_group(np.array([1.0, 0.0, 0.0, 1.0]), AdvantageConfig(scale="none")).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> of_group(np.array([3.0, 0.0]), AdvantageConfig(baseline="leave-one-out", scale="none")).tolist()
    [3.0, -3.0]
    """
    reward_G = reward_G.astype(np.float64)
    count = len(reward_G)
    if config.baseline == "group-mean":
        advantage_G = reward_G - reward_G.mean()
    elif config.baseline == "leave-one-out":
        advantage_G = (reward_G - reward_G.mean()) * (count / (count - 1)) if count > 1 else np.zeros(count)
    else:
        advantage_G = reward_G
    if config.scale == "group":
        deviation = reward_G.std(ddof=1) if count > 1 else 0.0
        advantage_G = advantage_G / (deviation + EPSILON)
    return np.asarray(advantage_G, np.float64)


def batch_sums(advantage_N: Float64) -> Float64:
    """Number, total, total of squares: those of all ranks are added up."""
    return np.array((len(advantage_N), advantage_N.sum(), advantage_N @ advantage_N))


def over_batch(advantage_N: Float64, sums: Float64) -> Float64:
    """To mean 0 and the population's deviation 1 over what `sums` covers; a constant becomes 0.

    >>> over_batch(np.array([1.0, 3.0]), batch_sums(np.array([1.0, 3.0]))).round(3).tolist()
    [-1.0, 1.0]
    """
    count, total, squares = sums.tolist()
    if not count:
        return advantage_N
    mean = total / count
    deviation = math.sqrt(max(squares / count - mean**2, 0.0))
    return np.asarray((advantage_N - mean) / (deviation + EPSILON), np.float64)


def overlong_penalty(length_G: NDArray[np.int64], *, longest: int, buffer: int) -> Float64:
    """What DAPO (arXiv 2503.14476, equation 13) adds to the rewards of long answers: 0 up to `longest - buffer`, then
    falling to -1 at `longest`. No buffer: 0.

    >>> overlong_penalty(np.array([6, 8, 10]), longest=10, buffer=4).tolist()
    [0.0, -0.5, -1.0]
    """
    if not buffer:
        return np.zeros(len(length_G))
    return np.asarray(-np.clip((length_G - (longest - buffer)) / buffer, 0.0, 1.0), np.float64)
