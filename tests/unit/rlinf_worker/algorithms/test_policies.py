"""One spec, the same network in torch and numpy, in every process."""

import numpy as np
import pytest
import torch

from rlinf_api.errors import InvariantBroken
from rlinf_worker.algorithms import sampling
from rlinf_worker.algorithms.policies import ActorCritic
from rlinf_worker.algorithms.policy_spec import Actions, NumpyPolicy, PolicySpec
from tests.builders_policies import weights_of

SPECS = [
    PolicySpec(obs_shape=(4,), actions=Actions("discrete", 2)),
    PolicySpec(obs_shape=(2, 3), actions=Actions("discrete", 5), hidden_sizes=(16,), activation="relu"),
    PolicySpec(obs_shape=(3,), actions=Actions("continuous", 2), hidden_sizes=(32, 16)),
    PolicySpec(obs_shape=(3,), actions=Actions("discrete", 3), hidden_sizes=()),
]


def observations(spec: PolicySpec, count: int = 17) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, *spec.obs_shape)).astype(np.float32)


@pytest.mark.parametrize("spec", SPECS)
def test_the_rollouts_numpy_policy_says_what_the_actors_network_says(spec: PolicySpec) -> None:
    model = ActorCritic(spec, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # away from the near-zero last layer, in which every network agrees
    obs = observations(spec)

    in_numpy = NumpyPolicy(spec, weights_of(model))(obs)

    in_torch = model.policy(torch.from_numpy(obs).reshape(len(obs), -1)).detach().numpy()
    np.testing.assert_allclose(in_numpy, in_torch, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_the_log_probability_at_sampling_is_the_one_in_training(spec: PolicySpec) -> None:
    model = ActorCritic(spec, seed=5)
    weights, obs = weights_of(model), observations(spec)
    policy = NumpyPolicy(spec, weights)
    key = {"slice_index": 0, "step": 0, "horizon": 1, "num_envs": len(obs)}
    action: np.ndarray
    if not spec.actions.are_discrete:
        noise = sampling.normal_block(0, action_size=spec.actions.size, **key)[0]
        action, logprob = sampling.gaussian_actions(policy(obs), weights["policy_log_std"], noise)
    else:
        action, logprob = sampling.discrete_actions(policy(obs), sampling.uniform_block(0, **key)[0])

    again, _, _ = model(torch.from_numpy(obs), torch.from_numpy(action))

    np.testing.assert_allclose(again.detach().numpy(), logprob, atol=1e-5)


@pytest.mark.parametrize("actions", [Actions("discrete", 4), Actions("continuous", 3)])
def test_log_probability_and_entropy_are_those_of_torch_distributions(actions: Actions) -> None:
    spec = PolicySpec(obs_shape=(4,), actions=actions)
    model = ActorCritic(spec, seed=1)
    obs = torch.from_numpy(observations(spec))
    reference: torch.distributions.Distribution
    if not actions.are_discrete:
        with torch.no_grad():
            model.policy_log_std.copy_(torch.tensor([0.1, -0.5, 0.3]))
        normal = torch.distributions.Normal(model.policy(obs), model.policy_log_std.exp())
        reference = torch.distributions.Independent(normal, 1)
    else:
        reference = torch.distributions.Categorical(logits=model.policy(obs))
    action = reference.sample()

    logprob, entropy, _ = model(obs, action)

    torch.testing.assert_close(logprob, reference.log_prob(action))
    torch.testing.assert_close(entropy, reference.entropy())


def test_the_same_seed_gives_the_same_network_whatever_torch_drew_before() -> None:
    first = ActorCritic(SPECS[0], seed=3).state_dict()
    torch.rand(5)
    second = ActorCritic(SPECS[0], seed=3).state_dict()
    other = ActorCritic(SPECS[0], seed=4).state_dict()

    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["policy.0.weight"], other["policy.0.weight"])


def test_the_first_policy_is_near_uniform() -> None:
    logits = NumpyPolicy(SPECS[0], weights_of(ActorCritic(SPECS[0], seed=0)))(observations(SPECS[0]))

    assert np.abs(logits).max() < 0.1


def test_weights_of_another_network_are_refused() -> None:
    weights = weights_of(ActorCritic(SPECS[0], seed=0))
    with pytest.raises(InvariantBroken, match=r"parameter 'policy.0.weight': got \(64, 4\), wanted \(8, 4\)"):
        NumpyPolicy(PolicySpec(obs_shape=(4,), actions=Actions("discrete", 2), hidden_sizes=(8,)), weights)
    with pytest.raises(InvariantBroken, match=r"parameter 'policy_log_std': got none of that name"):
        NumpyPolicy(PolicySpec(obs_shape=(4,), actions=Actions("continuous", 2)), weights)
