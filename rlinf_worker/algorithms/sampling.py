"""Randomness by key: the same draw for the same (seed, purpose, slice, step, t), whichever worker makes it, and when.

For: action noise of the rollout, tokens of a language model, order of minibatches in the actor, seeds of environments.
Not for: initial weights (torch's own generator, in `policies`). Called by the rollout, actor and env roles. A worker
that takes over a slice draws exactly what the dead one would have drawn, because nothing is carried from draw to draw:
a counter-based generator (Philox) is opened at the key, not advanced to it.

Shapes: T time steps of a step, N environments of a slice, A actions or action dimensions.
"""

from __future__ import annotations

import hashlib
import math
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


class Purpose(IntEnum):
    """Keeps streams apart that share seed, index and step. Numbers are part of a run's identity: never renumber."""

    ACTION = 1
    MINIBATCH = 2
    ENVIRONMENT = 3
    TOKEN = 4


def generator(seed: int, purpose: Purpose, *, index: int, step: int) -> np.random.Generator:
    """The generator of one key. `index` is a slice or an epoch, by purpose."""
    key = np.array((seed % 2**64, (int(purpose) << 48) | index), dtype=np.uint64)
    counter = np.array((0, 0, step, 0), dtype=np.uint64)  # words 0 and 1 count draws: keys never run into each other
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniform_block(seed: int, *, slice_index: int, step: int, horizon: int, num_envs: int) -> Float64:
    """[T, N] in [0, 1). Row t is the same for every horizon > t, so a plan may change the horizon between steps."""
    return generator(seed, Purpose.ACTION, index=slice_index, step=step).random((horizon, num_envs))


def normal_block(seed: int, *, slice_index: int, step: int, horizon: int, num_envs: int, action_size: int) -> Float64:
    """[T, N, A] standard normals; like `uniform_block`, a longer horizon only appends rows."""
    shape = (horizon, num_envs, action_size)
    return generator(seed, Purpose.ACTION, index=slice_index, step=step).standard_normal(shape)


def token_uniforms(seed: int, key: str, *, tokens: int, samples: int) -> Float64:
    """[T, G] in [0, 1): of token t of sample g of the unit `key`, whoever samples it, beside whatever else. More tokens
    only append rows.

    >>> bool((token_uniforms(3, "train:0/7/0", tokens=9, samples=2)[:4] == token_uniforms(
    ...     3, "train:0/7/0", tokens=4, samples=2)).all())
    True
    """
    index = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big")
    return generator(seed, Purpose.TOKEN, index=index, step=0).random((tokens, samples))


def discrete_actions(logits_NA: Float32, uniform_N: Float64) -> tuple[Int64, Float32]:
    """Inverse of the cumulative softmax. Returns actions [N] and their log-probabilities [N].

    >>> discrete_actions(np.zeros((2, 2), np.float32), np.array([0.49, 0.51]))[0].tolist()
    [0, 1]
    """
    shifted = logits_NA.astype(np.float64) - logits_NA.max(axis=1, keepdims=True)
    mass = np.exp(shifted)
    cumulative = np.cumsum(mass, axis=1)
    threshold_N = uniform_N * cumulative[:, -1]
    # The last column is left out: with it, rounding could choose an action that does not exist.
    action_N = (threshold_N[:, None] >= cumulative[:, :-1]).sum(axis=1)
    logprob_N = shifted[np.arange(len(action_N)), action_N] - np.log(cumulative[:, -1])
    return action_N, logprob_N.astype(np.float32)


def gaussian_actions(mean_NA: Float32, log_std_A: Float32, normal_NA: Float64) -> tuple[Float32, Float32]:
    """Diagonal Gaussian. The log-probability is of the action as returned, whatever the environment clips it to."""
    action_NA = (mean_NA + np.exp(log_std_A) * normal_NA).astype(np.float32)
    exact = (action_NA.astype(np.float64) - mean_NA) / np.exp(log_std_A)  # after rounding: the actor sees float32
    logprob_N = (-0.5 * exact**2 - log_std_A - 0.5 * math.log(2 * math.pi)).sum(axis=1)
    return action_NA, logprob_N.astype(np.float32)


def minibatch_order(seed: int, *, step: int, epoch: int, count: int) -> Int64:
    """The permutation of `count` samples for one epoch of one step."""
    return generator(seed, Purpose.MINIBATCH, index=epoch, step=step).permutation(count)


def environment_seeds(seed: int, *, slice_index: int, step: int, num_envs: int) -> list[int]:
    """One seed per environment of a slice that starts (or starts again, after its worker died) at `step`."""
    draws = generator(seed, Purpose.ENVIRONMENT, index=slice_index, step=step).integers(0, 2**31, size=num_envs)
    return [int(draw) for draw in draws]
