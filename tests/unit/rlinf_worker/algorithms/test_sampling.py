"""Draws are a function of their key; actions follow the policy's distribution."""

import math

import numpy as np
import pytest

from rlinf_worker.algorithms import sampling


def test_a_block_is_the_same_whoever_draws_it_and_when() -> None:
    first = sampling.uniform_block(7, slice_index=1, step=40, horizon=32, num_envs=16)
    sampling.uniform_block(7, slice_index=0, step=3, horizon=5, num_envs=2)  # something else happens in between

    np.testing.assert_array_equal(first, sampling.uniform_block(7, slice_index=1, step=40, horizon=32, num_envs=16))


def test_a_block_never_changes_between_versions() -> None:
    """Pinned: a run's identity depends on it."""
    block = sampling.uniform_block(1, slice_index=2, step=3, horizon=1, num_envs=3)

    assert block[0].tolist() == [0.15036669339789144, 0.23754132593399524, 0.2760228492882769]


def test_a_longer_horizon_only_appends_rows() -> None:
    short = sampling.normal_block(7, slice_index=1, step=2, horizon=8, num_envs=3, action_size=2)
    long = sampling.normal_block(7, slice_index=1, step=2, horizon=20, num_envs=3, action_size=2)

    np.testing.assert_array_equal(long[:8], short)


def test_no_two_keys_share_a_draw() -> None:
    blocks = [
        sampling.generator(seed, purpose, index=index, step=step).random(64)
        for seed in (0, 1)
        for purpose in sampling.Purpose
        for index in (0, 1)
        for step in (0, 1)
    ]

    draws = np.concatenate(blocks)
    assert len(np.unique(draws)) == len(draws)


def test_discrete_actions_follow_the_softmax() -> None:
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    count = 20_000
    action, logprob = sampling.discrete_actions(
        np.tile(logits, (count, 1)), (np.arange(count) + 0.5) / count
    )  # evenly spread draws: the frequencies are exact, not statistical

    np.testing.assert_allclose(np.bincount(action) / count, [0.2, 0.5, 0.3], atol=1e-4)
    np.testing.assert_allclose(np.exp(logprob), np.array([0.2, 0.5, 0.3])[action], atol=1e-6)


@pytest.mark.parametrize("logits", [[0.0, 0.0], [1000.0, -1000.0], [-1000.0, 1000.0], [0.0, -np.inf]])
def test_the_largest_draw_still_gives_an_action_that_exists(logits: list[float]) -> None:
    largest = np.array([np.nextafter(1.0, 0.0)])
    action, logprob = sampling.discrete_actions(np.array([logits], np.float32), largest)

    assert action[0] == (0 if logits[1] < logits[0] else 1)
    assert np.isfinite(logprob).all()


def test_gaussian_actions_have_the_density_of_the_normal() -> None:
    mean = np.array([[0.5, -1.0]], np.float32)
    log_std = np.array([0.0, -0.7], np.float32)
    action, logprob = sampling.gaussian_actions(mean, log_std, np.array([[1.0, -2.0]]))

    np.testing.assert_allclose(action, [[1.5, -1.0 - 2.0 * math.exp(-0.7)]], rtol=1e-6)
    expected = -0.5 * (1 + 4) + 0.7 - math.log(2 * math.pi)
    assert logprob[0] == pytest.approx(expected, abs=1e-5)


def test_each_epoch_of_each_step_has_its_own_order() -> None:
    orders = {tuple(sampling.minibatch_order(3, step=s, epoch=e, count=50)) for s in range(4) for e in range(4)}

    assert len(orders) == 16
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_a_slice_that_starts_again_gets_new_episodes() -> None:
    first = sampling.environment_seeds(3, slice_index=0, step=0, num_envs=8)

    assert first == sampling.environment_seeds(3, slice_index=0, step=0, num_envs=8)
    assert not set(first) & set(sampling.environment_seeds(3, slice_index=0, step=12, num_envs=8))
    assert not set(first) & set(sampling.environment_seeds(3, slice_index=1, step=0, num_envs=8))
