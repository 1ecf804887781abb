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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSums:
    """Unnormalised sums of a part of the batch; add those of all parts and ranks, then normalise with the whole.

    >>> part = AdvantageSums.of(np.array([1.0, 3.0], np.float32))
    >>> whole = part + AdvantageSums.of(np.array([5.0], np.float32))
    >>> whole.mean, round(whole.std, 3)
    (3.0, 1.633)
    """

    weight: float
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, advantage: Float32, weight: Float32 | None = None) -> AdvantageSums:
        """Weight 0 is padding (a rank that got less than the others) and counts for nothing."""
        exact = advantage.astype(np.float64).ravel()
        if weight is None:
            return cls(weight=float(exact.size), total=float(exact.sum()), total_of_squares=float(exact @ exact))
        weights = weight.astype(np.float64).ravel()
        return cls(
            weight=float(weights.sum()), total=float(weights @ exact), total_of_squares=float(weights @ (exact * exact))
        )

    @classmethod
    def from_array(cls, array: Float64) -> AdvantageSums:
        weight, total, total_of_squares = array.tolist()
        return cls(weight=weight, total=total, total_of_squares=total_of_squares)

    def to_array(self) -> Float64:
        """The form that a gang adds up in one all-reduce: three float64."""
        return np.array((self.weight, self.total, self.total_of_squares))

    def __add__(self, other: AdvantageSums) -> AdvantageSums:
        return AdvantageSums.from_array(self.to_array() + other.to_array())

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The population's (divided by the weight, not by weight - 1, which means nothing for fractional weights)."""
        if not self.weight:
            return 0.0
        return math.sqrt(max(self.total_of_squares / self.weight - self.mean**2, 0.0))


def normalise(advantage: Float32, sums: AdvantageSums) -> Float32:
    """To mean 0 and deviation 1 over the batch that `sums` covers; a constant advantage becomes 0, not NaN."""
    return ((advantage - sums.mean) / (sums.std + 1e-8)).astype(np.float32)
