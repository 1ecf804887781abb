"""One PPO update in float64, written out: what `roles/actor` must give, by another hand and without its code.

The network is two perceptrons as a dict of tensors, gradients come from torch's autograd over double, and everything
else is spelled: advantages as a backward loop over each environment, the normalisation, the clipped losses, the norm of
the gradient, Adam, the annealing. Only the order of samples is asked of `sampling.minibatch_order`, whose keys are part
of a run's identity.

    reference = Reference(learner.model.state_dict(), moves)
    numbers = reference.update(payloads, step=1)
    reference.parameters["policy.0.weight"]
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_worker.algorithms.sampling import minibatch_order

ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-5
EPISODES = 100


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Names as in spec.flow.config; `steps` and `seed` as in the RLJob."""

    steps: int
    seed: int
    gamma: float
    gae_lambda: float
    epochs: int
    final_epochs: int | None
    minibatches: int
    learning_rate: float
    schedule: str
    max_grad_norm: float
    normalise_advantage: bool
    clip_range: float
    value_clip_range: float | None
    value_coefficient: float
    entropy_coefficient: float


class Reference:
    def __init__(self, parameters: Mapping[str, Tensor], config: Moves, *, activation: str = "tanh") -> None:
        self.config = config
        self.parameters = {k: v.detach().to(torch.float64).clone() for k, v in parameters.items()}
        self._first = {k: torch.zeros_like(v) for k, v in self.parameters.items()}
        self._second = {k: torch.zeros_like(v) for k, v in self.parameters.items()}
        self._optimizer_steps = 0
        self._activation = {"tanh": torch.tanh, "relu": torch.relu}[activation]
        self._episodes: deque[float] = deque(maxlen=EPISODES)

    # --- the network --------------------------------------------------------------------------------------------------
    def _perceptron(self, head: str, x: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        layers = sorted(
            int(name.split(".")[1]) for name in parameters if name.startswith(f"{head}.") and "bias" in name
        )
        for layer in layers:
            x = x @ parameters[f"{head}.{layer}.weight"].T + parameters[f"{head}.{layer}.bias"]
            if layer != layers[-1]:
                x = self._activation(x)
        return x

    def values(self, obs: np.ndarray) -> np.ndarray:
        flat = torch.from_numpy(np.asarray(obs, np.float64)).reshape(len(obs), -1)
        return self._perceptron("value", flat, self.parameters)[:, 0].numpy()

    def _terms(self, obs: Tensor, action: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probability of the action, entropy, value), a row per sample."""
        out = self._perceptron("policy", obs, parameters)
        value = self._perceptron("value", obs, parameters)[:, 0]
        if "policy_log_std" in parameters:
            log_std = parameters["policy_log_std"]
            density = (
                -((action - out) ** 2) / (2 * torch.exp(log_std) ** 2) - log_std - math.log(math.sqrt(2 * math.pi))
            )
            entropy = (0.5 + 0.5 * math.log(2 * math.pi) + log_std).sum()
            return density.sum(dim=1), entropy.repeat(len(out)), value
        probability = torch.exp(out) / torch.exp(out).sum(dim=1, keepdim=True)
        chosen = probability[torch.arange(len(out)), action]
        return torch.log(chosen), -(probability * torch.log(probability)).sum(dim=1), value

    # --- one step -----------------------------------------------------------------------------------------------------
    def update(self, payloads: Sequence[Mapping[str, Any]], *, step: int) -> dict[str, float]:
        config = self.config
        samples = self._samples(payloads)
        left = 1.0 - (step - 1) / config.steps if config.schedule == "linear" else 1.0
        epochs = config.epochs
        if config.final_epochs is not None:
            done = (step - 1) / (config.steps - 1) if config.steps > 1 else 0.0
            epochs = round(config.epochs + done * (config.final_epochs - config.epochs))
        advantage = samples["advantage"]
        if config.normalise_advantage:
            samples["advantage"] = (advantage - advantage.mean()) / (advantage.std(unbiased=False) + 1e-8)
        count, norms = len(advantage), []
        totals = dict.fromkeys(("samples", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction"), 0.0)
        for epoch in range(epochs):
            order = torch.from_numpy(minibatch_order(config.seed, step=step, epoch=epoch, count=count))
            size = math.ceil(count / config.minibatches)
            for start in range(0, count, size):
                rows = {name: column[order[start : start + size]] for name, column in samples.items()}
                norms.append(self._minibatch(rows, totals, left=left))
        seen = totals.pop("samples")
        numbers = {name: total / seen for name, total in totals.items()}
        ended = [float(r) for p in payloads for r in p["episode_returns"]]
        self._episodes.extend(ended)
        returns, value = samples["return"].numpy(), samples["value"].numpy()
        numbers["explained_variance"] = 1.0 - float(np.var(returns - value) / np.var(returns))
        numbers["grad_norm"] = sum(norms) / len(norms)
        numbers["learning_rate"] = config.learning_rate * left
        numbers["episodes_count"] = float(len(ended))
        if self._episodes:
            numbers["return_mean"] = sum(self._episodes) / len(self._episodes)
        return numbers

    def _minibatch(self, rows: Mapping[str, Tensor], totals: dict[str, float], *, left: float) -> float:
        config = self.config
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.parameters.items()}
        logprob, entropy, value = self._terms(rows["obs"], rows["action"], leaves)
        clip = config.clip_range * left
        ratio = torch.exp(logprob - rows["logprob"])
        inside = torch.clip(ratio, 1 - clip, 1 + clip)
        policy_loss = -torch.minimum(ratio * rows["advantage"], inside * rows["advantage"])
        error = (value - rows["return"]) ** 2
        if config.value_clip_range is not None:
            bound = config.value_clip_range
            held = rows["value"] + torch.clip(value - rows["value"], -bound, bound)
            error = torch.maximum(error, (held - rows["return"]) ** 2)
        loss = policy_loss + config.value_coefficient * 0.5 * error - config.entropy_coefficient * entropy
        loss.mean().backward()
        totals["samples"] += len(ratio)
        for name, column in (
            ("policy_loss", policy_loss),
            ("value_loss", 0.5 * error),
            ("entropy", entropy),
            ("approx_kl", ratio - 1 - torch.log(ratio)),
            ("clip_fraction", (torch.abs(ratio - 1) > clip).double()),
        ):
            totals[name] += float(column.detach().sum())
        gradients = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in leaves.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        shrunk = min(1.0, config.max_grad_norm / (norm + 1e-6))
        self._adam({name: gradient * shrunk for name, gradient in gradients.items()}, config.learning_rate * left)
        return norm

    def _adam(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        self._optimizer_steps += 1
        (beta_1, beta_2), t = ADAM_BETAS, self._optimizer_steps
        for name, gradient in gradients.items():
            self._first[name] = beta_1 * self._first[name] + (1 - beta_1) * gradient
            self._second[name] = beta_2 * self._second[name] + (1 - beta_2) * gradient**2
            mean, square = self._first[name] / (1 - beta_1**t), self._second[name] / (1 - beta_2**t)
            self.parameters[name] = self.parameters[name] - learning_rate * mean / (torch.sqrt(square) + ADAM_EPS)

    # --- from segments to samples -------------------------------------------------------------------------------------
    def _samples(self, payloads: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Time step by time step, and in it environment by environment of one payload after the other."""
        columns: dict[str, list[Any]] = {
            name: [] for name in ("obs", "action", "logprob", "value", "advantage", "return")
        }
        advantages = [self._advantages(payload) for payload in payloads]
        values = [self._values_of(payload) for payload in payloads]
        for t in range(len(payloads[0]["reward"])):
            for payload, advantage, value in zip(payloads, advantages, values, strict=True):
                for n in range(payload["reward"].shape[1]):
                    columns["obs"].append(np.ravel(payload["obs"][t, n]))
                    columns["action"].append(payload["action"][t, n])
                    columns["logprob"].append(payload["logprob"][t, n])
                    columns["value"].append(value[t, n])
                    columns["advantage"].append(advantage[t, n])
                    columns["return"].append(advantage[t, n] + value[t, n])
        kinds = {"action": np.asarray(columns["action"]).dtype}
        return {
            name: torch.from_numpy(np.asarray(column, kinds[name] if kinds.get(name) == np.int64 else np.float64))
            for name, column in columns.items()
        }

    def _values_of(self, payload: Mapping[str, Any]) -> np.ndarray:
        return np.stack([self.values(row) for row in payload["obs"]])

    def _advantages(self, payload: Mapping[str, Any]) -> np.ndarray:
        config = self.config
        value, last = self._values_of(payload), self.values(payload["last_obs"])
        final = {(int(t), int(n)): i for i, (t, n) in enumerate(payload["final_index"])}
        horizon, envs = payload["reward"].shape
        advantages = np.zeros((horizon, envs))
        for n in range(envs):
            behind = 0.0  # the advantage of the step behind
            for t in range(horizon - 1, -1, -1):
                following = last[n] if t == horizon - 1 else value[t + 1, n]
                if payload["terminated"][t, n]:
                    following, behind = 0.0, 0.0
                elif payload["truncated"][t, n]:
                    following, behind = self.values(payload["final_obs"][final[t, n]][None])[0], 0.0
                surprise = float(payload["reward"][t, n]) + config.gamma * following - value[t, n]
                behind = surprise + config.gamma * config.gae_lambda * behind
                advantages[t, n] = behind
        return advantages
