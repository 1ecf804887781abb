"""From segments to samples, against the plainest loop."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rlinf_worker.roles.actor.batch import collect

T, GAMMA, LAMBDA = 5, 0.9, 0.8


def critic(obs: np.ndarray) -> np.ndarray:
    """Any function will do, as long as rows keep apart."""
    return np.asarray(obs.sum(axis=1) * 0.5 + obs[:, 0], np.float32)


def payload(seed: int, envs: int = 2) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    terminated = draw.random((T, envs)) < 0.2
    truncated = (draw.random((T, envs)) < 0.2) & ~terminated
    index = np.argwhere(truncated).astype(np.int32)
    ended = terminated | truncated
    return {
        "obs": draw.normal(size=(T, envs, 3)).astype(np.float32),
        "action": draw.integers(0, 4, (T, envs)),
        "logprob": draw.normal(size=(T, envs)).astype(np.float32),
        "reward": draw.normal(size=(T, envs)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "last_obs": draw.normal(size=(envs, 3)).astype(np.float32),
        "final_index": index,
        "final_obs": draw.normal(size=(len(index), 3)).astype(np.float32),
        "episode_returns": draw.normal(size=int(ended.sum())),
    }


def naive(part: dict[str, np.ndarray], n: int) -> list[float]:
    """Advantages of one environment, from the last step to the first."""
    final = {(int(t), int(e)): part["final_obs"][k] for k, (t, e) in enumerate(part["final_index"])}
    carried, advantages = 0.0, [0.0] * T
    for t in reversed(range(T)):
        value = float(critic(part["obs"][t, n : n + 1])[0])
        if part["terminated"][t, n]:
            following, carried = 0.0, 0.0
        elif part["truncated"][t, n]:
            following, carried = float(critic(final[(t, n)][None])[0]), 0.0
        else:
            later = part["last_obs"] if t == T - 1 else part["obs"][t + 1]
            following = float(critic(later[n : n + 1])[0])
        carried = part["reward"][t, n] + GAMMA * following - value + GAMMA * LAMBDA * carried
        advantages[t] = carried
    return advantages


@given(seeds=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_sample_is_what_the_plainest_loop_makes_of_its_step(seeds):
    parts = [payload(seed, envs=1 + seed % 3) for seed in seeds]
    samples = collect(parts, critic, gamma=GAMMA, gae_lambda=LAMBDA)
    columns = [(part, n) for part in parts for n in range(part["obs"].shape[1])]
    advantage = np.array([naive(part, n) for part, n in columns]).T.reshape(-1)
    np.testing.assert_allclose(samples.advantage, advantage, rtol=1e-4, atol=1e-5)
    for row in range(samples.count):
        part, n = columns[row % len(columns)]
        t = row // len(columns)
        np.testing.assert_array_equal(samples.obs[row], part["obs"][t, n])
        assert samples.action[row] == part["action"][t, n]
        assert samples.logprob[row] == part["logprob"][t, n]
        assert samples.value[row] == pytest.approx(critic(part["obs"][t, n : n + 1])[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(samples.returns, samples.advantage + samples.value, rtol=1e-6)
    assert samples.episode_returns.tolist() == [np.float32(r) for p in parts for r in p["episode_returns"]]


def test_the_critic_is_asked_once_with_or_without_segments():
    """It is a collective where the gang has ranks: one that got nothing must not leave the others waiting."""
    calls: list[int] = []

    def counted(obs: np.ndarray) -> np.ndarray:
        calls.append(len(obs))
        return critic(obs) if len(obs) else np.zeros(0, np.float32)

    collect([payload(1), payload(2)], counted, gamma=GAMMA, gae_lambda=LAMBDA)
    assert len(calls) == 1
    assert collect([], counted, gamma=GAMMA, gae_lambda=LAMBDA).count == 0
    assert len(calls) == 2


def test_actions_of_several_dimensions_keep_them():
    part = payload(3) | {"action": np.zeros((T, 2, 6), np.float32)}
    assert collect([part], critic, gamma=GAMMA, gae_lambda=LAMBDA).action.shape == (T * 2, 6)
