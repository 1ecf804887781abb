"""Actor-critic networks in torch, built from a `PolicySpec`.

For: the actor (training, values) and rollouts that infer with torch. Not for: sampling (`sampling`), losses (`losses`),
moving weights. Called by the actor role. Same spec and seed, same parameters, in every process.

Shapes: B samples, D flat observation, A actions or action dimensions.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from rlinf_worker.algorithms.policy_spec import PolicySpec

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def _linear(size_in: int, size_out: int, *, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(size_in, size_out)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer


def _mlp(spec: PolicySpec, outputs: int, *, last_gain: float, generator: torch.Generator) -> nn.Sequential:
    sizes = (spec.obs_size, *spec.hidden_sizes)
    layers: list[nn.Module] = []
    for size_in, size_out in itertools.pairwise(sizes):
        layers += [_linear(size_in, size_out, gain=math.sqrt(2), generator=generator), _ACTIVATIONS[spec.activation]()]
    layers.append(_linear(sizes[-1], outputs, gain=last_gain, generator=generator))
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """Policy and value networks with nothing shared, so that the value's large gradients do not move the policy."""

    def __init__(self, spec: PolicySpec, *, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        # 0.01: the first policy is near uniform, whatever the observation; 1.0: values start at their natural scale.
        self.policy = _mlp(spec, spec.actions.size, last_gain=0.01, generator=generator)
        self.value = _mlp(spec, 1, last_gain=1.0, generator=generator)
        if not spec.actions.are_discrete:
            self.policy_log_std = nn.Parameter(torch.zeros(spec.actions.size))

    def forward(self, obs_BD: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probability of the action, entropy and value, each [B]. One call: FSDP2 gathers parameters once."""
        flat_BD = obs_BD.reshape(len(obs_BD), -1)
        logprob_B, entropy_B = self._terms(self.policy(flat_BD), action_B)
        return logprob_B, entropy_B, self.value(flat_BD).squeeze(-1)

    def values(self, obs_BD: Tensor) -> Tensor:
        value_B: Tensor = self.value(obs_BD.reshape(len(obs_BD), -1)).squeeze(-1)
        return value_B

    def _terms(self, output_BA: Tensor, action_B: Tensor) -> tuple[Tensor, Tensor]:
        # Not torch.distributions: its argument checks cost more than the whole forward of a small network.
        if not self.spec.actions.are_discrete:
            scaled_BA = (action_B - output_BA) * torch.exp(-self.policy_log_std)
            half_log_2pi = 0.5 * math.log(2 * math.pi)
            logprob_B = (-0.5 * scaled_BA * scaled_BA - self.policy_log_std - half_log_2pi).sum(-1)
            entropy_B = (self.policy_log_std + 0.5 + half_log_2pi).sum().expand(len(output_BA))
            return logprob_B, entropy_B
        logprob_BA = torch.log_softmax(output_BA, dim=-1)
        entropy_B = -(logprob_BA.exp() * logprob_BA).sum(-1)
        return logprob_BA.gather(1, action_B.unsqueeze(1)).squeeze(1), entropy_B
