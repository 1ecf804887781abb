"""Generalised advantage estimation and normalisation, against formulas written a second time, differently."""

import math

import numpy as np
import pytest

from rlinf_api.errors import InvariantBroken
from rlinf_worker.algorithms.advantage import Segment, gae, normalise, sums_of


def random_segment(seed: int, *, horizon: int = 23, num_envs: int = 5) -> Segment:
    draw = np.random.default_rng(seed)
    terminated = draw.random((horizon, num_envs)) < 0.15
    truncated = draw.random((horizon, num_envs)) < 0.15  # both at once happens too

    def values(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape).astype(np.float32)

    return Segment(
        reward_TN=values(horizon, num_envs),
        value_TN=values(horizon, num_envs),
        terminated_TN=terminated,
        truncated_TN=truncated,
        final_value_TN=np.where(truncated & ~terminated, values(horizon, num_envs), np.float32(np.nan)),
        last_value_N=values(num_envs),
    )


def by_definition(segment: Segment, t: int, env: int, *, gamma: float, gae_lambda: float) -> float:
    """Sum of (gamma lambda)^k delta_{t+k} to the end of the episode or segment: the paper's formula, forwards."""
    total, weight = 0.0, 1.0
    horizon = len(segment.reward_TN)
    for k in range(t, horizon):
        if segment.terminated_TN[k, env]:
            future = 0.0
        elif segment.truncated_TN[k, env]:
            future = float(segment.final_value_TN[k, env])
        elif k == horizon - 1:
            future = float(segment.last_value_N[env])
        else:
            future = float(segment.value_TN[k + 1, env])
        total += weight * (float(segment.reward_TN[k, env]) + gamma * future - float(segment.value_TN[k, env]))
        if segment.terminated_TN[k, env] or segment.truncated_TN[k, env]:
            break
        weight *= gamma * gae_lambda
    return total


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.98, 0.8), (0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_sum_of_the_paper(gamma: float, gae_lambda: float) -> None:
    segment = random_segment(seed=1)

    advantage = gae(segment, gamma=gamma, gae_lambda=gae_lambda)

    for t, env in np.ndindex(*advantage.shape):
        expected = by_definition(segment, t, env, gamma=gamma, gae_lambda=gae_lambda)
        assert advantage[t, env] == pytest.approx(expected, abs=1e-5)


def one_step(*, terminated: bool, truncated: bool) -> float:
    segment = Segment(
        reward_TN=np.array([[1.0]], np.float32),
        value_TN=np.array([[10.0]], np.float32),
        terminated_TN=np.array([[terminated]]),
        truncated_TN=np.array([[truncated]]),
        final_value_TN=np.array([[20.0]], np.float32),
        last_value_N=np.array([30.0], np.float32),
    )
    return float(gae(segment, gamma=0.5, gae_lambda=0.9)[0, 0])


def test_a_terminated_episode_has_no_future() -> None:
    assert one_step(terminated=True, truncated=False) == 1.0 - 10.0


def test_a_truncated_episode_goes_on_from_its_own_last_observation() -> None:
    assert one_step(terminated=False, truncated=True) == 1.0 + 0.5 * 20.0 - 10.0


def test_an_episode_that_falls_at_the_time_limit_has_fallen() -> None:
    assert one_step(terminated=True, truncated=True) == 1.0 - 10.0


def test_an_episode_that_goes_on_is_worth_what_comes_next() -> None:
    assert one_step(terminated=False, truncated=False) == 1.0 + 0.5 * 30.0 - 10.0


def test_balancing_up_to_the_time_limit_is_no_worse_at_its_end() -> None:
    """CartPole with a perfect value function: every advantage is 0, at the limit too, and not -V."""
    gamma, horizon = 0.98, 20
    forever = np.full((horizon, 1), 1 / (1 - gamma), np.float32)
    limit = np.zeros((horizon, 1), bool)
    limit[7] = True
    segment = Segment(
        reward_TN=np.ones((horizon, 1), np.float32),
        value_TN=forever,
        terminated_TN=np.zeros((horizon, 1), bool),
        truncated_TN=limit,
        final_value_TN=forever,
        last_value_N=forever[0],
    )

    assert np.abs(gae(segment, gamma=gamma, gae_lambda=0.8)).max() < 1e-4


def test_arrays_of_different_segments_are_refused() -> None:
    whole = random_segment(seed=2)
    with pytest.raises(InvariantBroken, match=r"value_TN does not fit reward_TN: got \(22, 5\), wanted \(23, 5\)"):
        Segment(
            reward_TN=whole.reward_TN,
            value_TN=whole.value_TN[1:],
            terminated_TN=whole.terminated_TN,
            truncated_TN=whole.truncated_TN,
            final_value_TN=whole.final_value_TN,
            last_value_N=whole.last_value_N,
        )


@pytest.mark.parametrize("cuts", [[500], [1, 999], [250, 500, 750]])
def test_ranks_that_add_their_sums_normalise_as_one(cuts: list[int]) -> None:
    advantage = np.random.default_rng(3).normal(40.0, 3.0, 1000).astype(np.float32)
    parts = np.split(advantage, cuts)

    reduced = np.sum([sums_of(part) for part in parts], axis=0)  # what an all-reduce does
    together = np.concatenate([normalise(part, reduced) for part in parts])

    np.testing.assert_allclose(together, normalise(advantage, sums_of(advantage)), atol=1e-6)
    assert together.mean() == pytest.approx(0.0, abs=1e-5)
    assert together.std() == pytest.approx(1.0, abs=1e-5)


def test_padding_does_not_move_mean_or_deviation() -> None:
    advantage = np.array([1.0, 2.0, 6.0, 99.0], np.float32)
    padded = sums_of(advantage, np.array([1, 1, 1, 0], np.float32))

    assert padded.tolist() == sums_of(advantage[:3]).tolist() == [3.0, 9.0, 41.0]
    np.testing.assert_allclose(normalise(advantage[:3], padded) * math.sqrt(14 / 3) + 3.0, [1.0, 2.0, 6.0], rtol=1e-6)


def test_a_constant_advantage_becomes_zero() -> None:
    constant = np.full(8, 2.5, np.float32)

    assert normalise(constant, sums_of(constant)).tolist() == [0.0] * 8


def test_an_empty_part_is_worth_nothing() -> None:
    nothing, ones = np.zeros(0, np.float32), np.ones(3, np.float32)

    assert normalise(nothing, sums_of(nothing)).tolist() == []
    assert (sums_of(nothing) + sums_of(ones)).tolist() == sums_of(ones).tolist()
