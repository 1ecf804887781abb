"""Advantages of groups: numbers by hand, and that each setting is one."""

import numpy as np
import pytest

from rlinf_worker.algorithms import groups
from rlinf_worker.algorithms.groups import AdvantageConfig

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 3.0])  # mean 1, deviation sqrt(6 / 4)


def of(baseline="group-mean", scale="none", rewards=REWARDS):
    return groups.of_group(rewards, AdvantageConfig(baseline=baseline, scale=scale)).tolist()


def test_the_baseline_is_the_mean_of_all_or_of_the_others_or_nothing():
    assert of() == [0.0, -1.0, -1.0, 0.0, 2.0]
    others = [1 - 4 / 4, -5 / 4, -5 / 4, 1 - 4 / 4, 3 - 2 / 4]
    assert of("leave-one-out") == pytest.approx(others)
    assert of("none") == REWARDS.tolist()


def test_a_group_is_divided_by_the_deviation_of_its_samples():
    deviation = (6 / 4) ** 0.5
    assert of(scale="group") == pytest.approx([0, -1 / deviation, -1 / deviation, 0, 2 / deviation], rel=1e-5)
    assert of(scale="batch") == of(), "that is the batch's affair"


def test_a_group_of_one_reward_teaches_nothing():
    same = np.full(4, 0.7)
    for scale in ("group", "none"):
        assert of(scale=scale, rewards=same) == pytest.approx([0.0] * 4, abs=1e-9)
    assert of("leave-one-out", rewards=np.array([1.0])) == [0.0]
    assert of("group-mean", "group", rewards=np.array([1.0])) == [0.0]


def test_a_batch_is_brought_to_mean_0_and_deviation_1_whoever_has_which_part():
    parts = [np.array([1.0, 2.0, 6.0]), np.array([]), np.array([-3.0])]
    sums = np.sum([groups.batch_sums(part) for part in parts], axis=0)
    whole = np.concatenate([groups.over_batch(part, sums) for part in parts])
    assert whole.mean() == pytest.approx(0.0, abs=1e-12)
    assert whole.std() == pytest.approx(1.0, rel=1e-5)
    assert groups.over_batch(np.array([]), np.zeros(3)).tolist() == []
    assert groups.over_batch(np.full(3, 2.0), groups.batch_sums(np.full(3, 2.0))).tolist() == [0.0] * 3


def test_long_answers_lose_up_to_1_over_the_buffer():
    lengths = np.array([0, 12, 16, 18, 20, 21])
    assert groups.overlong_penalty(lengths, longest=20, buffer=8).tolist() == [0, 0, -0.5, -0.75, -1, -1]
    assert not groups.overlong_penalty(lengths, longest=20, buffer=0).any()
