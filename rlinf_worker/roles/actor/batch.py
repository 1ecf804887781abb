"""From the segments of one step to the flat samples that the update runs over. Pure, numpy.

Shapes: T steps of a segment, N environments of all segments of this rank, B = T * N samples, D... observation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_worker.algorithms.advantage import Segment, gae

Float32 = NDArray[np.float32]
Array = NDArray[Any]
Values = Callable[[Array], Float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    obs: Array  # [B, D...]
    action: Array  # [B] or [B, A]
    logprob: Float32
    value: Float32
    advantage: Float32  # not yet normalised
    returns: Float32
    episode_returns: Float32  # of the episodes that ended in these segments, in lineage order

    @property
    def count(self) -> int:
        return len(self.logprob)


def collect(payloads: Sequence[Mapping[str, Any]], values: Values, *, gamma: float, gae_lambda: float) -> Samples:
    """`values` is the critic over [B, D...]; it is called once for all that needs a value.

    Segments side by side: environments of one payload after those of another, in the order given (lineage order).
    """
    if not payloads:
        return _nothing(values)
    obs_TND = np.concatenate([p["obs"] for p in payloads], axis=1)
    last_obs_ND = np.concatenate([p["last_obs"] for p in payloads])
    final_obs_FD = np.concatenate([p["final_obs"] for p in payloads])
    steps, envs = obs_TND.shape[:2]
    flat_BD = obs_TND.reshape(steps * envs, *obs_TND.shape[2:])
    value_X = values(np.concatenate([flat_BD, last_obs_ND, final_obs_FD]))
    value_TN = value_X[: steps * envs].reshape(steps, envs)
    final_TN = np.zeros((steps, envs), np.float32)
    row, column = _final_positions(payloads)
    final_TN[row, column] = value_X[steps * envs + envs :]
    segment = Segment(
        reward_TN=np.concatenate([p["reward"] for p in payloads], axis=1),
        value_TN=value_TN,
        terminated_TN=np.concatenate([p["terminated"] for p in payloads], axis=1),
        truncated_TN=np.concatenate([p["truncated"] for p in payloads], axis=1),
        final_value_TN=final_TN,
        last_value_N=value_X[steps * envs : steps * envs + envs],
    )
    advantage_TN = gae(segment, gamma=gamma, gae_lambda=gae_lambda)
    action = np.concatenate([p["action"] for p in payloads], axis=1)
    return Samples(
        obs=flat_BD,
        action=action.reshape(steps * envs, *action.shape[2:]),
        logprob=np.concatenate([p["logprob"] for p in payloads], axis=1).reshape(-1),
        value=value_TN.reshape(-1),
        advantage=advantage_TN.reshape(-1),
        returns=(advantage_TN + value_TN).reshape(-1),
        episode_returns=np.concatenate([p["episode_returns"] for p in payloads]).astype(np.float32),
    )


def _final_positions(payloads: Sequence[Mapping[str, Any]]) -> tuple[Array, Array]:
    """(t, n) of every truncated episode, n counted over all payloads."""
    rows, columns, offset = [], [], 0
    for payload in payloads:
        index = np.asarray(payload["final_index"]).reshape(-1, 2)
        rows.append(index[:, 0])
        columns.append(index[:, 1] + offset)
        offset += payload["last_obs"].shape[0]
    return np.concatenate(rows), np.concatenate(columns)


def _nothing(values: Values) -> Samples:
    """A rank without segments in this step still takes part in every collective, and `values` is one."""
    empty = values(np.zeros((0, 0), np.float32))
    return Samples(
        obs=empty,
        action=empty,
        logprob=empty,
        value=empty,
        advantage=empty,
        returns=empty,
        episode_returns=empty,
    )
