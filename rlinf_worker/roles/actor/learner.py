"""The PPO update of one gang rank: network, optimizer, epochs over minibatches. torch; FSDP2 where the gang has ranks.

For: `update(samples)` and the state that a checkpoint keeps. Not for: channels, versions, files (role.py). All ranks
call the same methods in the same order: each holds collectives when world > 1.

Losses are sums: a minibatch's gradient is divided once by its weight over all ranks, then clipped, so that one rank and
four give the same update.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlinf_worker.algorithms import offloading
from rlinf_worker.algorithms.advantage import normalise, sums_of
from rlinf_worker.algorithms.losses.ppo import LossConfig, MicroBatch, ppo_loss
from rlinf_worker.algorithms.policies import ActorCritic
from rlinf_worker.algorithms.policy_spec import Actions, PolicySpec
from rlinf_worker.algorithms.sampling import minibatch_order
from rlinf_worker.roles.actor.batch import Samples
from rlinf_worker.weights import layout
from rlinf_worker.weights.tensors import Shard

Columns = dict[str, Tensor]
"""Columns of samples, by the names of MicroBatch, beside `obs` and `action`."""
FLOAT_COLUMNS: Final = ("logprob", "value", "advantage", "returns")
SMALLEST: Final = PolicySpec(obs_shape=(1,), actions=Actions("discrete", 2), hidden_sizes=(1,))
EPISODE_WINDOW: Final = 100  # episodes in return_mean, as everybody reports CartPole
FULL_ON_RANK_0: Final = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0: Final = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """The flow's config, as far as the update is concerned; see PpoConfig for units and reasons."""

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
    loss: LossConfig

    @classmethod
    def of(cls, config: Mapping[str, Any], *, steps: int, seed: int) -> LearnerConfig:
        loss = LossConfig(**{f.name: config[f.name] for f in fields(LossConfig)})
        same = (f.name for f in fields(cls) if f.name not in ("steps", "seed", "loss"))
        return cls(steps=steps, seed=seed, loss=loss, **{name: config[name] for name in same})

    def remaining(self, step: int) -> float:
        """Factor of learning rate and clip range in step 1, 2, ... of a linear schedule."""
        return 1.0 - (step - 1) / self.steps if self.schedule == "linear" else 1.0

    def epochs_of(self, step: int) -> int:
        """Passes over the data in step 1, 2, ...: from `epochs` to `final_epochs` in even steps."""
        if self.final_epochs is None:
            return self.epochs
        done = (step - 1) / max(1, self.steps - 1)
        return round(self.epochs + (self.final_epochs - self.epochs) * done)


class Learner:
    def __init__(self, spec: PolicySpec, config: LearnerConfig, *, mesh: DeviceMesh | None = None) -> None:
        self.config, self._mesh = config, mesh
        self.model = ActorCritic(spec, seed=config.seed)
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=config.learning_rate, eps=1e-5, fused=mesh is None, foreach=mesh is not None
        )
        self._parameters = list(self.model.parameters())
        self.episodes: deque[float] = deque(maxlen=EPISODE_WINDOW)

    @property
    def world(self) -> int:
        return self._mesh.size() if self._mesh is not None else 1

    def values(self, obs: NDArray[Any]) -> NDArray[np.float32]:
        """The critic, for advantages. With ranks every rank calls it once a step, with no rows too."""
        if not len(obs):
            return self.values(np.zeros((1, *self.model.spec.obs_shape), np.float32))[:0]
        with torch.no_grad():
            rows = torch.from_numpy(np.ascontiguousarray(obs, dtype=np.float32))
            if self._mesh is None:
                return np.asarray(self.model.values(rows).numpy())
            return np.asarray(self.model(rows, torch.from_numpy(self._zero_actions(len(rows))))[2].numpy())

    def _zero_actions(self, count: int) -> NDArray[Any]:
        actions = self.model.spec.actions
        return np.zeros(count, np.int64) if actions.are_discrete else np.zeros((count, actions.size), np.float32)

    def update(self, samples: Samples, *, step: int) -> dict[str, float]:
        """All epochs over one step's samples. Returns the step's numbers."""
        config = self.config
        samples, weight = self._padded(samples)
        sums = self._reduce(torch.from_numpy(sums_of(samples.advantage, weight))).numpy()
        advantage = normalise(samples.advantage, sums) if config.normalise_advantage else samples.advantage
        data = _columns(samples, advantage, weight)
        factor = config.remaining(step)
        for group in self._optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        loss = replace(config.loss, clip_range=max(config.loss.clip_range * factor, 1e-6))
        parts_by_minibatch: list[list[Tensor]] = []
        norms: list[Tensor] = []
        for epoch in range(config.epochs_of(step)):
            order = torch.from_numpy(minibatch_order(config.seed, step=step, epoch=epoch, count=samples.count))
            for batch in _minibatches({name: column[order] for name, column in data.items()}, config.minibatches):
                parts, norm = self._minibatch(batch, loss)
                parts_by_minibatch.append(parts)
                norms.append(norm)
        self.episodes.extend(float(r) for r in samples.episode_returns)
        return self._numbers(self._reduce(_totals(parts_by_minibatch)), norms, samples, factor)

    def _minibatch(self, batch: Columns, loss: LossConfig) -> tuple[list[Tensor], Tensor]:
        logprob, entropy, value = self.model(batch.pop("obs"), batch.pop("action"))
        out = ppo_loss(MicroBatch(logprob_B=logprob, entropy_B=entropy, value_B=value, **batch), loss)
        weight = self._reduce(out.weight_sum.detach().to(torch.float64).reshape(1))
        for parameter in self._parameters:  # the optimizer's zero_grad takes ten times as long over a small network
            parameter.grad = None
        # FSDP2 averages gradients over ranks; times world makes it the sum, divided once by the weight of all ranks.
        (out.loss_sum * (self.world / max(float(weight), 1.0))).backward()  # type: ignore[no-untyped-call]
        norm = self._clip_gradients()
        self._optimizer.step()
        parts = (out.weight_sum, out.policy_sum, out.value_sum, out.entropy_sum, out.kl_sum, out.clipped_sum)
        return [part.detach() for part in parts], norm

    def _clip_gradients(self) -> Tensor:
        """Their norm before. As clip_grad_norm_, which takes twice as long over a small network."""
        if self._mesh is not None:
            sharded = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
            full: Tensor = sharded.full_tensor() if hasattr(sharded, "full_tensor") else sharded
            return full
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _numbers(self, totals: Tensor, norms: list[Tensor], samples: Samples, factor: float) -> dict[str, float]:
        weight, policy, value, entropy, kl, clipped = totals.tolist()
        weight = max(weight, 1.0)
        spread = float(np.var(samples.returns))
        explained = 1.0 - float(np.var(samples.returns - samples.value)) / spread if spread > 0 else math.nan
        numbers = {
            "policy_loss": policy / weight,
            "value_loss": value / weight,
            "entropy": entropy / weight,
            "approx_kl": kl / weight,
            "clip_fraction": clipped / weight,
            "grad_norm": float(torch.stack(norms).mean()) if norms else 0.0,
            "learning_rate": self.config.learning_rate * factor,
            "episodes_count": float(len(samples.episode_returns)),
        }
        if not math.isnan(explained):
            numbers["explained_variance"] = explained
        if self.episodes:
            numbers["return_mean"] = float(np.mean(self.episodes))
        return numbers

    # --- several ranks ------------------------------------------------------------------------------------------------
    def _padded(self, samples: Samples) -> tuple[Samples, NDArray[np.float32] | None]:
        """With ranks, every rank runs the same number of equal minibatches: short ones are filled with weight 0."""
        if self._mesh is None:
            return samples, None
        most = torch.tensor([samples.count])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
        target = max(int(most), self.config.minibatches)
        weight = np.zeros(target, np.float32)
        weight[: samples.count] = 1.0
        fill = target - samples.count
        columns = {name: getattr(samples, name) for name in ("obs", "action", *FLOAT_COLUMNS)}
        if not samples.count:
            columns["obs"] = np.zeros((0, *self.model.spec.obs_shape), np.float32)
            columns["action"] = self._zero_actions(0)
        filled = {
            name: np.concatenate([array, np.zeros((fill, *array.shape[1:]), array.dtype)])
            for name, array in columns.items()
        }
        return replace(samples, **filled), weight

    def _reduce(self, tensor: Tensor) -> Tensor:
        if self._mesh is not None:
            dist.all_reduce(tensor, group=self._mesh.get_group())
        return tensor

    # --- what leaves the gang -----------------------------------------------------------------------------------------
    def shards(self) -> dict[str, NDArray[np.float32] | Shard]:
        """What this rank has of what rollouts need, as views: publish copies. Nothing is gathered. As numpy's arrays,
        so that a rollout needs no torch."""
        parameters = dict(self.model.named_parameters())
        out: dict[str, NDArray[np.float32] | Shard] = {}
        for name in self.model.spec.policy_parameters():
            tensor = parameters[name].detach()
            sharding = layout.of_dtensor(tensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            # numpy() of a tensor fixes the size of its storage for ever, and an offload could not free it.
            array = np.asarray(np.from_dlpack(local.to("cpu", torch.float32)), np.float32)
            out[name] = array if sharding is None else Shard(array, sharding)
        return out

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lies on this rank's slots between two steps."""
        yield from offloading.of_module(self.model)
        yield from offloading.of_optimizer(self._optimizer)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(model, optimizer), whole; on ranks other than 0 empty. Every rank calls it."""
        model: dict[str, Any] = get_model_state_dict(self.model, options=FULL_ON_RANK_0)
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.model, self._optimizer, options=FULL_ON_RANK_0)
        return model, optimizer

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's settings, as its state has them, but for the parameters: no collective."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]

    def restore(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """From rank 0's whole state to every rank's shard. Model and optimizer apart: one call with an empty model
        dict on the other ranks would make them skip collectives (measured with torch 2.13)."""
        options = FROM_RANK_0 if self._mesh is not None else StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, model, options=options)
        set_optimizer_state_dict(self.model, self._optimizer, optimizer, options=options)


def _columns(samples: Samples, advantage: NDArray[np.float32], weight: NDArray[np.float32] | None) -> Columns:
    """An epoch is one gather per column, its minibatches are views of that."""
    arrays = {
        "obs": samples.obs,
        "action": samples.action,
        "old_logprob_B": samples.logprob,
        "old_value_B": samples.value,
        "advantage_B": advantage,
        "return_B": samples.returns,
    }
    if weight is not None:
        arrays["weight_B"] = weight
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _minibatches(data: Columns, count: int) -> Iterator[Columns]:
    """`count` or, of few samples, fewer."""
    for parts in zip(*(column.chunk(count) for column in data.values()), strict=True):
        yield dict(zip(data, parts, strict=True))


def _totals(sums: list[list[Tensor]]) -> Tensor:
    """The sums of all minibatches added up, in float64. At the end of an update: a minibatch costs no conversion."""
    if not sums:
        return torch.zeros(6, dtype=torch.float64)
    columns = [torch.stack([part.reshape(()) for part in column]) for column in zip(*sums, strict=True)]
    return torch.stack([column.to(torch.float64).sum() for column in columns])


def warm(config: LearnerConfig) -> None:
    """What a process pays once: the first optimizer and the first update cost 2 s of CPU that later ones do not. In a
    warm spare; the learner that is made here is thrown away."""
    once = replace(config, epochs=1, final_epochs=None, minibatches=1)
    learner = Learner(SMALLEST, once)
    rows = np.zeros((2, 1), np.float32)
    columns = dict.fromkeys((*FLOAT_COLUMNS, "episode_returns"), rows[:, 0])
    samples = Samples(obs=rows, action=np.zeros(2, np.int64), **columns)
    learner.update(samples, step=1)
    learner.restore(*learner.state())
