"""The update of a language model on one gang rank: micro-batches, gradients, AdamW. torch; FSDP2 where there are ranks.

    learner.add(groups)      forward and backward pass of groups as they come; gradients add up
    learner.update(step)     divides them by the weight of all ranks, clips, steps

For: the trainer of texts (text.py). Not for: channels, files, advantages' rewards. All ranks call the same methods in
the same order: each holds collectives where world > 1.

Losses are sums, so how a step is cut into rounds, micro-batches and ranks changes nothing but the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rlinf_worker.algorithms.losses.tokens import OwnLoss, TokenBatch, TokenLossConfig, token_loss
from rlinf_worker.roles.actor.scoring import Scorer

Float64 = NDArray[np.float64]
MOST_APART: Final = 40.0
"""Nats by which an actor finds a token likelier, at most, in numbers for people: its exponential and the square of it
are numbers yet."""
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
PADDED: Final = 0.125
"""The largest share of padding in a micro-batch's positions: with lognormal lengths (sigma 0.8), 64 samples and a
budget of 16,384 padding is 11% instead of 45%, in 8 passes instead of 3."""
PASS_POSITIONS: Final = 64
"""Positions of padding for which no further pass is made, as it costs more: 5 ms, in which a model of 0.3 million
parameters computes about so many and a larger one fewer."""
SUMS: Final = (
    "loss", "weight", "entropy", "kl", "clipped", "capped", "tokens", "fresh", "engine_kl", "likelihood",
    "likelihood_squares",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLearnerConfig:
    """flows/grpo.py has units and reasons."""

    loss: TokenLossConfig
    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    schedule: str
    warmup_steps: int
    token_budget: int
    precision: str
    activation_checkpointing: bool
    least: int
    """Tokens of a sample before a stop token could be drawn."""

    def factor(self, step: int, *, steps: int) -> float:
        """The factor on the learning rate in step 1, 2, ..."""
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        done = (step - 1 - self.warmup_steps) / max(1, steps - self.warmup_steps)
        if self.schedule == "linear":
            return max(0.0, 1.0 - done)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))) if self.schedule == "cosine" else 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class AnswerGroup:
    """The samples of one prompt, one after the other. `old`: log-probabilities that the ratio is to; None: the policy's
    own, as it is when they are added."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    engine: NDArray[np.float32]
    advantage_G: Float64
    fresh: NDArray[np.bool_] | None = None
    """Tokens that the policy itself has made, as it is before the step; None: all."""
    old: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Sample:
    group: AnswerGroup
    number: int
    start: int  # of its tokens in the group's
    length: int

    @property
    def positions(self) -> int:
        return len(self.group.prompt) + self.length


@dataclass(slots=True)
class AddedUp:
    """What was added up since the last update."""

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    engine_difference: float = 0.0
    """The largest difference between engine and trainer of one fresh token, in nats."""


class TextLearner:
    def __init__(
        self,
        model: Any,
        scorer: Scorer,
        config: TextLearnerConfig,
        *,
        mesh: DeviceMesh | None = None,
        own_loss: OwnLoss | None = None,
    ) -> None:
        self.model, self.config, self._mesh, self._scorer, self._own_loss = model, config, mesh, scorer, own_loss
        if config.activation_checkpointing:
            for layer in model.base_model.layers:  # inside of what FSDP gathers a layer for: it does so once more
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if mesh is not None:
            for layer in model.base_model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(scorer, mesh=mesh)
        scorer.entropy_has_gradient = bool(config.loss.entropy_coefficient)
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=config.learning_rate, betas=config.betas, eps=config.eps,
            weight_decay=config.weight_decay, foreach=True,
        )  # fmt: skip
        for parameter in self.parameters.values():  # there from the beginning: a checkpoint is read into them
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        self.totals = AddedUp()

    @property
    def world(self) -> int:
        return self._mesh.size() if self._mesh is not None else 1

    # --- gradients ----------------------------------------------------------------------------------------------------
    def add(self, groups: Sequence[AnswerGroup]) -> None:
        """Their part of the step's gradient. With ranks, every rank calls it as often, with no groups too."""
        batches = list(self._micro_batches(groups))
        for batch in self._as_many_on_all_ranks(batches):
            self._backward(batch)

    def score(self, groups: Sequence[AnswerGroup]) -> None:
        """Sets their `old` to what the policy says now."""
        for group in groups:
            group.old = torch.zeros(len(group.tokens), dtype=next(iter(self.parameters.values())).dtype)
        with torch.no_grad():
            for batch in self._as_many_on_all_ranks(list(self._micro_batches(groups))):
                logprob_T, _ = self._scored(batch)
                at = 0
                for sample in batch:
                    if sample.group.old is not None:
                        where = slice(sample.start, sample.start + sample.length)
                        sample.group.old[where] = logprob_T[at : at + sample.length]
                    at += sample.length

    def _micro_batches(self, groups: Sequence[AnswerGroup]) -> Iterator[list[_Sample]]:
        """Micro-batches of like lengths, so that little is padding; the first sample of each is the longest, to which
        the others are padded."""
        samples: list[_Sample] = []
        for group in groups:
            start = 0
            for number, length in enumerate(group.lengths.tolist()):
                samples.append(_Sample(group=group, number=number, start=start, length=length))
                start += length
        samples.sort(key=lambda sample: -sample.positions)
        batch: list[_Sample] = []
        real = 0
        for sample in samples:
            if batch:
                positions = batch[0].positions * (len(batch) + 1)
                padding = positions - real - sample.positions
                if positions > self.config.token_budget or padding > max(PASS_POSITIONS, PADDED * positions):
                    yield batch
                    batch, real = [], 0
            batch.append(sample)
            real += sample.positions
        if batch:
            yield batch

    def _as_many_on_all_ranks(self, batches: list[list[_Sample]]) -> Iterator[list[_Sample]]:
        """A rank that has fewer makes up for it with passes of no weight, as FSDP waits for it in each."""
        most = len(batches)
        if self._mesh is not None:
            found = torch.tensor([most])
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._mesh.get_group())
            most = int(found)
        nothing = np.zeros(0, np.int32)
        empty = AnswerGroup(
            prompt=np.zeros(1, np.int32), tokens=nothing, lengths=nothing, engine=np.zeros(0, np.float32),
            advantage_G=np.zeros(1),
        )  # fmt: skip
        yield from batches
        for _ in range(most - len(batches)):
            yield [_Sample(group=empty, number=-1, start=0, length=0)]

    def _scored(self, batch: list[_Sample]) -> tuple[Tensor, Tensor]:
        ids = np.zeros((len(batch), max(2, max(sample.positions for sample in batch))), np.int64)
        rows, positions, tokens, early = list[Any](), list[Any](), list[Any](), list[Any]()
        for row, sample in enumerate(batch):
            own = sample.group.tokens[sample.start : sample.start + sample.length]
            first = len(sample.group.prompt)
            ids[row, :first] = sample.group.prompt
            ids[row, first : first + sample.length] = own
            rows.append(np.full(sample.length, row))
            positions.append(np.arange(first - 1, first - 1 + sample.length))
            tokens.append(own)
            early.append(np.arange(sample.length) < self.config.least)
        if not any(sample.length for sample in batch):  # the passes are for the other ranks' sake: score something
            rows, positions, tokens, early = [np.zeros(1)], [np.zeros(1)], [np.zeros(1)], [np.zeros(1)]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            whole = (np.concatenate(part).astype(np.int64) for part in (rows, positions, tokens))
            row_T, position_T, token_T = (torch.from_numpy(part) for part in whole)
            early_T = torch.from_numpy(np.concatenate(early).astype(np.bool_))
            found: tuple[Tensor, Tensor] = self._scorer(torch.from_numpy(ids), row_T, position_T, token_T, early_T)
            return found

    def _backward(self, batch: list[_Sample]) -> None:
        logprob_T, entropy_T = self._scored(batch)
        count = sum(sample.length for sample in batch)
        real = [sample for sample in batch if sample.number >= 0]
        if not count:
            (logprob_T.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
            if self.config.loss.aggregation != "token-mean":
                self.totals.sums["weight"] += len(real)
            return
        parts = [slice(sample.start, sample.start + sample.length) for sample in real]
        engine = np.concatenate([s.group.engine[part] for s, part in zip(real, parts, strict=True)])
        advantage = np.concatenate([np.full(s.length, s.group.advantage_G[s.number]) for s in real])
        sequence = np.concatenate([np.full(s.length, number) for number, s in enumerate(real)])
        dtype, now_T = logprob_T.dtype, logprob_T.detach()
        old_T = torch.cat([
            now_T[at : at + s.length] if s.group.old is None else s.group.old[part].to(dtype)
            for s, part, at in zip(real, parts, _offsets(real), strict=True)
        ])  # fmt: skip
        engine_T = torch.from_numpy(engine).to(dtype)
        out = token_loss(
            TokenBatch(
                logprob_T=logprob_T, entropy_T=entropy_T, old_T=old_T, engine_T=engine_T,
                advantage_T=torch.from_numpy(advantage).to(dtype), sequence_T=torch.from_numpy(sequence).long(),
                count=len(real),
            ),
            self.config.loss, self._own_loss,
        )  # fmt: skip
        out.loss_sum.backward()  # type: ignore[no-untyped-call]
        fresh = np.concatenate([
            np.ones(s.length, np.bool_) if s.group.fresh is None else s.group.fresh[part]
            for s, part in zip(real, parts, strict=True)
        ])  # fmt: skip
        apart_T = (now_T - engine_T)[torch.from_numpy(fresh)].clamp(max=MOST_APART)
        found: dict[str, Any] = {
            "loss": out.loss_sum.detach(), "weight": out.weight_sum, "entropy": out.entropy_sum, "kl": out.kl_sum,
            "clipped": out.clipped_sum, "capped": out.capped_sum, "tokens": count,
            "fresh": len(apart_T), "engine_kl": (apart_T.exp() - 1.0 - apart_T).sum(),
            "likelihood": apart_T.exp().sum(), "likelihood_squares": (2.0 * apart_T).exp().sum(),
        }  # fmt: skip
        totals = self.totals
        for name, value in found.items():
            totals.sums[name] += float(value)
        if len(apart_T):
            totals.engine_difference = max(totals.engine_difference, float(apart_T.abs().max()))

    # --- the step -----------------------------------------------------------------------------------------------------
    def update(self, step: int, *, steps: int) -> tuple[AddedUp, float]:
        """(what all ranks have added, the norm of the gradient before it is clipped). A norm that is no number: nothing
        was changed, on any rank."""
        totals = self._of_all_ranks(self.totals)
        self.totals = AddedUp()
        weight = totals.sums["weight"]
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not weight or not gradients:
            self.forget()
            return totals, 0.0
        # FSDP2 averages gradients over ranks; times world makes it the sum, divided once by the weight of all ranks.
        torch._foreach_mul_(gradients, self.world / weight)
        found = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        if math.isfinite(norm) and math.isfinite(totals.sums["loss"]):
            for group in self._optimizer.param_groups:
                group["lr"] = self.config.learning_rate * self.config.factor(step, steps=steps)
            self._optimizer.step()
        else:
            norm = math.nan
        self.forget()
        return totals, norm

    def forget(self) -> None:
        """What was added is of no step."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.totals = AddedUp()

    def _of_all_ranks(self, own: AddedUp) -> AddedUp:
        found: list[AddedUp] = self.gathered(own)
        return AddedUp(
            sums={name: sum(each.sums[name] for each in found) for name in SUMS},
            engine_difference=max(each.engine_difference for each in found),
        )

    def gathered(self, value: Any) -> list[Any]:
        """A small value of each rank, in their order."""
        if self._mesh is None:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._mesh.get_group())
        return found

    # --- what leaves the gang -----------------------------------------------------------------------------------------
    def shards(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """This rank's part of the weights, by Hugging Face's names."""
        return {name: parameter.detach().to(dtype) for name, parameter in self.parameters.items()}

    def tensors(self) -> dict[str, dict[str, Any]]:
        """All that an update changes, by what a checkpoint calls it. Set in place as one is read."""
        states = {name: self._optimizer.state[parameter] for name, parameter in self.parameters.items()}
        return {
            "model": {name: parameter.detach() for name, parameter in self.parameters.items()},
            **{moment: {name: state[moment] for name, state in states.items()} for moment in MOMENTS},
            "updates": {name: state["step"] for name, state in states.items()},
        }

    def moved(self) -> list[Tensor]:
        """What leaves a slot with the role: weights, gradients that add up, moments."""
        own = list(self.parameters.values())
        found = [p.detach() for p in own] + [p.grad for p in own if p.grad is not None]
        return found + [self._optimizer.state[p][moment] for p in own for moment in MOMENTS]

    def whole(self) -> Iterable[tuple[str, Tensor]]:
        """Weights, one after the other; on every rank, as each gathers."""
        for name, parameter in self.parameters.items():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _offsets(samples: Sequence[_Sample]) -> list[int]:
    return [0, *np.cumsum([sample.length for sample in samples]).tolist()][:-1]
