"""Advantages: from rewards and values of a segment to what the policy loss multiplies.

For: generalised advantage estimation with exact episode ends, and normalisation that does not depend on how the batch
is cut. Not for: values themselves (the actor's network makes them), losses. Called by the actor role once a step.

Shapes: T time steps of a segment, N environments, B samples in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf_api.errors import InvariantBroken

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """T steps of N environments that restart in the same step in which an episode ends.

    Row t holds V(obs_t), then what acting on obs_t gave. `final_value_TN` is V(final_obs) and is read only where
    `truncated_TN` is true and `terminated_TN` is not; elsewhere it may hold anything, NaN too.
    """

    reward_TN: Float32
    value_TN: Float32
    terminated_TN: Bool
    truncated_TN: Bool
    final_value_TN: Float32
    last_value_N: Float32
    """V of the observation after the last step; read only where the last step did not end an episode."""

    def __post_init__(self) -> None:
        for name in ("value_TN", "terminated_TN", "truncated_TN", "final_value_TN"):
            if getattr(self, name).shape != self.reward_TN.shape:
                raise InvariantBroken(
                    f"{name} does not fit reward_TN",
                    got=str(getattr(self, name).shape),
                    wanted=str(self.reward_TN.shape),
                )
        if self.last_value_N.shape != self.reward_TN.shape[1:]:
            raise InvariantBroken(
                "last_value_N does not fit reward_TN",
                got=str(self.last_value_N.shape),
                wanted=str(self.reward_TN.shape[1:]),
            )


def gae(segment: Segment, *, gamma: float, gae_lambda: float) -> Float32:
    """Advantages [T, N]; the return that the value is trained towards is `advantage + value`.

    A terminated episode has no future (0). A truncated one had, it was only not watched: its future is V(final_obs).
    Taking the time limit for death teaches CartPole that step 499 of perfect balance is worth as little as falling.
    """
    terminated, truncated = segment.terminated_TN, segment.truncated_TN & ~segment.terminated_TN
    value = segment.value_TN.astype(np.float64)
    next_value = np.concatenate((value[1:], segment.last_value_N.astype(np.float64)[None]))
    next_value = np.where(truncated, segment.final_value_TN, np.where(terminated, 0.0, next_value))
    delta = segment.reward_TN + gamma * next_value - value
    decay = np.where(terminated | truncated, 0.0, gamma * gae_lambda)
    advantage = np.empty_like(delta)
    carried = np.zeros(delta.shape[1:])
    for t in range(len(delta) - 1, -1, -1):
        carried = delta[t] + decay[t] * carried
        advantage[t] = carried
    return advantage.astype(np.float32)


def sums_of(advantage: Float32, weight: Float32 | None = None) -> Float64:
    """The sums over a part of the batch: weight, total and total of squares. Those of all parts and ranks are added up,
    and what comes out normalises each part. Weight 0 is padding (a rank that got less than the others) and counts for
    nothing.

    >>> (sums_of(np.array([1.0, 3.0], np.float32)) + sums_of(np.array([5.0], np.float32))).tolist()
    [3.0, 9.0, 35.0]
    """
    exact = advantage.astype(np.float64).ravel()
    if weight is None:
        return np.array((exact.size, exact.sum(), exact @ exact))
    weights = weight.astype(np.float64).ravel()
    return np.array((weights.sum(), weights @ exact, weights @ (exact * exact)))


def normalise(advantage: Float32, sums: Float64) -> Float32:
    """To mean 0 and the population's deviation 1 over the batch that `sums` covers (divided by the weight, not by
    weight - 1, which means nothing for fractional weights); a constant advantage becomes 0, not NaN."""
    weight, total, total_of_squares = sums.tolist()
    if not weight:
        return advantage
    mean = total / weight
    std = math.sqrt(max(total_of_squares / weight - mean**2, 0.0))
    normal: Float32 = ((advantage - mean) / (std + 1e-8)).astype(np.float32)
    return normal
