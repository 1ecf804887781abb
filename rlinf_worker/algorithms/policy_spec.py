"""What an actor-critic network looks like, as plain values, and its policy head in numpy.

For: rollout and actor to agree on the network without sharing code that needs torch; inference in a rollout without a
GPU. Not for: training (`policies`). Called by the rollout role. On one core a batch of 32 through 4-64-64-2 takes 14 us
in numpy and 39 us in torch, and a worker without torch starts seconds sooner.

Shapes: B samples, D flat observation, H hidden, A actions or action dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlinf_api.errors import InvariantBroken

Float32 = NDArray[np.float32]
Activation = Literal["tanh", "relu"]


@dataclass(frozen=True, slots=True)
class Actions:
    """Discrete: one of `size` actions, 0 .. size - 1. Continuous: a vector of `size` numbers; the environment clips
    what it executes to its own bounds."""

    kind: Literal["discrete", "continuous"]
    size: int

    @property
    def are_discrete(self) -> bool:
        return self.kind == "discrete"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """Two separate multi-layer perceptrons, policy and value, with the same hidden sizes."""

    obs_shape: tuple[int, ...]
    actions: Actions
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"

    @property
    def obs_size(self) -> int:
        return math.prod(self.obs_shape)

    def policy_parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the policy head's parameters: what a rollout needs of a published version.

        >>> PolicySpec(obs_shape=(4,), actions=Actions("discrete", 2), hidden_sizes=(8,)).policy_parameters()
        {'policy.0.weight': (8, 4), 'policy.0.bias': (8,), 'policy.2.weight': (2, 8), 'policy.2.bias': (2,)}
        """
        sizes = (self.obs_size, *self.hidden_sizes, self.actions.size)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, (size_in, size_out) in enumerate(itertools.pairwise(sizes)):
            shapes[f"policy.{2 * layer}.weight"] = (size_out, size_in)
            shapes[f"policy.{2 * layer}.bias"] = (size_out,)
        if not self.actions.are_discrete:
            shapes["policy_log_std"] = (self.actions.size,)
        return shapes


def _relu(x: Float32, out: Float32) -> Float32:
    return np.maximum(x, np.float32(0.0), out=out)


_ACTIVATIONS: dict[Activation, Callable[[Float32, Float32], Float32]] = {
    "tanh": lambda x, out: np.tanh(x, out=out),
    "relu": _relu,
}


class NumpyPolicy:
    """The policy head of one policy version. Immutable: a new version is a new object, so a swap is one assignment."""

    def __init__(self, spec: PolicySpec, weights: Mapping[str, NDArray[Any]]) -> None:
        for name, shape in spec.policy_parameters().items():
            if name not in weights or weights[name].shape != shape:
                raise InvariantBroken(
                    f"published weights do not fit the policy: parameter '{name}'",
                    got=str(weights[name].shape) if name in weights else "none of that name",
                    wanted=str(shape),
                    next="rollout and actor must be built from the same PolicySpec",
                )
        count = len(spec.hidden_sizes) + 1
        self._spec = spec
        self._activate = _ACTIVATIONS[spec.activation]
        # Transposed and contiguous: the matrix product then reads both operands in order.
        self._weight_IO = [
            np.ascontiguousarray(weights[f"policy.{2 * layer}.weight"].T, dtype=np.float32) for layer in range(count)
        ]
        self._bias_O = [np.array(weights[f"policy.{2 * layer}.bias"], dtype=np.float32) for layer in range(count)]

    def __call__(self, obs_BD: NDArray[Any]) -> Float32:
        """Logits or means [B, A]."""
        x: Float32 = obs_BD.reshape(len(obs_BD), self._spec.obs_size).astype(np.float32, copy=False)
        for weight_IO, bias_O in zip(self._weight_IO[:-1], self._bias_O[:-1], strict=True):
            x = x @ weight_IO
            x += bias_O
            x = self._activate(x, x)
        out: Float32 = x @ self._weight_IO[-1] + self._bias_O[-1]
        return out
