"""The trainer of language models, for flow grpo: from groups with rewards to an update, weights and checkpoints.

For: the step loop (gang/steps.py), which calls it. Not for: the update itself (text_learner.py), commits, channels.

Where a group's advantage is its own affair and a step is one update, groups are worked on as their rounds come: when
the last one is here, most of the gradient is done. Else the step's groups are worked on together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from rlinf_api import names
from rlinf_api.errors import RLinfError, UserError
from rlinf_worker.algorithms import groups as advantages
from rlinf_worker.algorithms.groups import AdvantageConfig
from rlinf_worker.algorithms.losses.tokens import OwnLoss, TokenBatch, TokenLossConfig
from rlinf_worker.algorithms.offloading import HostCopy
from rlinf_worker.algorithms.sampling import minibatch_order
from rlinf_worker.channels.protocol import Item, PolicyVersion, Round
from rlinf_worker.checkpoints.store import Checkpoint
from rlinf_worker.roles import loading, mesh, models
from rlinf_worker.roles.actor import scoring
from rlinf_worker.roles.actor.event_file import EventFile
from rlinf_worker.roles.actor.schema import TextFsdpConfig
from rlinf_worker.roles.actor.skipped import SkippedSteps
from rlinf_worker.roles.actor.text_learner import AddedUp, AnswerGroup, TextLearner, TextLearnerConfig
from rlinf_worker.roles.protocol import Offloads, RoleContext, Trainer, TrainerStep
from rlinf_worker.roles.samples import REWARD, SAMPLING, is_evaluation
from rlinf_worker.roles.shards import Shards, copied

FOLDER: Final = "huggingface"
"""In the last checkpoint: what transformers loads."""
MOST_SKIPPED: Final = 3
"""Updates in a row whose gradient is no number: of more than an unlucky batch."""


class TextTrainer(Trainer, Offloads):
    inputs = ("rewarded",)
    sharded = True
    failures = (SafetensorError,)

    def __init__(self, moved: Offloads | None = None) -> None:
        """`moved`: the role that the runtime asks to leave its slots."""
        self._moved = moved or self

    async def run(self, ctx: RoleContext) -> None:
        await ctx.train(self)

    async def build(self, ctx: RoleContext) -> None:
        torch.set_num_threads(1)
        self._ctx, self._gang = ctx, ctx.gang
        config = TextFsdpConfig.model_validate(dict(ctx.config))
        self.delta = config.weights_delta
        with ctx.span("load"):
            model = models.language_model(ctx.flow.model, dtype=torch.float32)
            scoring.check(model, path=ctx.flow.model)
        group = await mesh.of_gang(ctx.gang)
        self._shards = await Shards.of_gang(ctx.gang)
        sampling = await ctx.shared(SAMPLING)
        if sampling["tokenizer"] != models.digest_of(ctx.flow.model):
            raise UserError(
                "actor and rollout have two tokenizers", got=f"another one in {ctx.flow.model!r} here",
                wanted="one folder spec.model.path for all pods", next="mount the same folder in the pools of both",
            )  # fmt: skip
        flow = ctx.flow.config
        self._advantage = AdvantageConfig(baseline=flow["loss"]["baseline"], scale=flow["loss"]["scale"])
        self._overlong, self._longest = int(flow["loss"]["overlong_buffer"]), int(sampling["most"])
        self._engine_dtype = getattr(torch, sampling["dtype"])
        self._updates, self._old = int(flow["updates_per_step"]), str(flow["old_logprobs"])
        scorer = scoring.Scorer(model, temperature=float(sampling["temperature"]), stops=sampling["stops"])
        own = _own_loss(flow["loss"]["kind"])
        self._learner = TextLearner(model, scorer, _learner_config(flow, config, sampling), mesh=group, own_loss=own)
        self._skipped_steps = SkippedSteps(os.environ.get(names.ENV_OUTPUT_DIR, ""), rank=ctx.rank)
        self._events = _event_file(config.tensorboard) if ctx.rank == 0 and config.tensorboard else None
        self._moved.host = HostCopy(self._learner.moved)
        self._model_config, self._generation_config = model.config, model.generation_config
        self._step = self._skipped = self._empty = 0
        self._at = (-1, -1)  # branch and step that gradients are of
        self._added: set[str] = set()
        self._began = perf_counter()

    # --- the step -----------------------------------------------------------------------------------------------------
    @property
    def _by_rounds(self) -> bool:
        return self._updates == 1 and self._advantage.scale != "batch"

    async def take(self, part: Round) -> None:
        if not self._by_rounds:
            return
        await self._gang.meet((part.branch, part.step, part.number))
        self._add((part.branch, part.step), [item for item in part.items if not is_evaluation(item.key)])

    def _add(self, at: tuple[int, int], items: Sequence[Item]) -> None:
        if at != self._at:
            self._learner.forget()  # of a step that is void
            self._at, self._added = at, set()
        fresh = [item for item in items if item.key not in self._added]
        self._added.update(item.key for item in fresh)
        tokens = float(sum(len(item.payload["tokens"]) for item in fresh))
        with self._ctx.span("compute", step=at[1], units=len(fresh), tokens=tokens):
            self._learner.add([self._answers(item) for item in fresh])

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        every = [unit[0] for unit in step.units]
        items = [item for item in every if not is_evaluation(item.key)]
        evaluated = self._evaluated([item for item in every if is_evaluation(item.key)])
        if self._by_rounds:
            self._add((step.branch, step.number), items)
            done = [self._learner.update(step.number, steps=self._ctx.flow.steps)]
        else:
            tokens = float(sum(len(item.payload["tokens"]) for item in items))
            with self._ctx.span("compute", step=step.number, units=len(items), tokens=tokens):
                done = self._updated([self._answers(item) for item in items], step.number)
        self._at, self._added, self._step = (-1, -1), set(), step.number
        numbers = self._numbers(done, items) | evaluated
        if self._events is not None:
            self._events.write(step.number, numbers)
        # Each rank says the same of the whole step, and the driver adds up what is called a count.
        numbers = {name: n / self._learner.world if name.endswith("_count") else n for name, n in numbers.items()}
        for _, norm in done:
            self._skipped = self._skipped + 1 if math.isnan(norm) else 0
        if any(math.isnan(norm) for _, norm in done):
            self._skipped_steps.keep((item, self._answers(item)) for item in items)
        if self._skipped >= MOST_SKIPPED:
            kept = f"; their groups are in {self._skipped_steps.where}" if self._skipped_steps.where else ""
            raise UserError(
                f"the gradients of {self._skipped} updates in a row are no numbers", got="NaN or infinity",
                wanted="finite gradients", next=f"lower the learning rate, or write precision: float32{kept}",
            )  # fmt: skip
        return numbers

    def _updated(self, groups: list[AnswerGroup], step: int) -> list[tuple[AddedUp, float]]:
        if self._advantage.scale == "batch":
            every = np.concatenate([group.advantage_G for group in groups]) if groups else np.zeros(0)
            sums = np.sum(self._learner.gathered(advantages.batch_sums(every)), axis=0)
            for group in groups:
                group.advantage_G = advantages.over_batch(group.advantage_G, sums)
        if self._updates > 1 and self._old == "recompute":
            self._learner.score(groups)
        order = minibatch_order(self._ctx.flow.seed, step=step, epoch=0, count=len(groups))
        done = []
        for part in np.array_split(order, self._updates):
            self._learner.add([groups[index] for index in part])
            done.append(self._learner.update(step, steps=self._ctx.flow.steps))
        return done

    def _answers(self, item: Item) -> AnswerGroup:
        payload = item.payload
        lengths = np.array(payload["lengths"])
        reward_G = np.array(payload["reward"], np.float64)
        reward_G += advantages.overlong_penalty(lengths, longest=self._longest, buffer=self._overlong)
        engine = np.array(payload["logprobs"])
        return AnswerGroup(
            prompt=np.array(payload["prompt"]), tokens=np.array(payload["tokens"]), lengths=lengths, engine=engine,
            advantage_G=advantages.of_group(reward_G, self._advantage), fresh=_staleness(item) == 0,
            old=torch.from_numpy(engine) if self._old == "engine" else None,
        )  # fmt: skip

    # --- what people see ----------------------------------------------------------------------------------------------
    def _numbers(self, done: Sequence[tuple[AddedUp, float]], items: Sequence[Item]) -> dict[str, float]:
        own = [_seen(item) for item in items]
        seen = [group for rank in self._learner.gathered(own) for group in rank]
        sums = {name: sum(totals.sums[name] for totals, _ in done) for name in done[0][0].sums}
        tokens, weight = max(1.0, sums["tokens"]), max(1.0, sums["weight"])
        norms = [norm for _, norm in done if not math.isnan(norm)]
        now, began = perf_counter(), self._began
        self._began, self._empty = now, 0 if seen else self._empty + 1
        numbers = {
            "groups_count": float(len(seen)),
            "empty_steps": float(self._empty),
            "policy_loss": sums["loss"] / weight,
            "entropy": sums["entropy"] / tokens,
            "approx_kl": sums["kl"] / tokens,
            "clip_fraction": sums["clipped"] / tokens,
            "capped_fraction": sums["capped"] / tokens,
            "updates_skipped_count": float(len(done) - len(norms)),
            "tokens_count": sums["tokens"],
            "tokens_per_s": sums["tokens"] / max(1e-9, now - began),
        }
        if sums["fresh"]:
            numbers["engine_kl"] = sums["engine_kl"] / sums["fresh"]
            numbers["engine_difference_max"] = max(totals.engine_difference for totals, _ in done)
            weight, squares = sums["likelihood"], sums["likelihood_squares"]
            numbers["engine_sample_fraction"] = weight**2 / max(1e-30, squares * sums["fresh"])
        if norms:
            numbers["grad_norm"] = float(np.mean(norms))
            factor = self._learner.config.factor(self._step, steps=self._ctx.flow.steps)
            numbers["learning_rate"] = self._learner.config.learning_rate * factor
        if not seen:
            return {name: value for name, value in numbers.items() if math.isfinite(value)}
        rewards, lengths = [group["reward"] for group in seen], np.concatenate([group["lengths"] for group in seen])
        numbers |= {
            "reward_mean": float(np.mean(np.concatenate(rewards))),
            "reward_std": float(np.mean([reward.std() for reward in rewards])),
            "same_reward_fraction": float(np.mean([np.ptp(reward) == 0 for reward in rewards])),
            "all_right_fraction": float(np.mean([reward.min() > 0 for reward in rewards])),
            "all_wrong_fraction": float(np.mean([reward.max() <= 0 for reward in rewards])),
            "response_tokens_mean": float(lengths.mean()),
            "response_tokens_max": float(lengths.max()),
            "staleness_mean": float(sum(group["staleness_sum"] for group in seen) / max(1, lengths.sum())),
            "staleness_max": float(max(group["staleness_max"] for group in seen)),
            "truncated_fraction": float(1.0 - np.mean(np.concatenate([group["finished"] for group in seen]))),
        }
        named = [group["parts"] for group in seen if group["parts"].keys() != {REWARD}]
        for name in sorted({name for parts in named for name in parts}):
            values = [number for parts in named for number in parts.get(name, ())]
            numbers[f"reward_{name}_mean"] = float(np.mean(values))
        return {name: value for name, value in numbers.items() if math.isfinite(value)}

    def _evaluated(self, items: Sequence[Item]) -> dict[str, float]:
        """Numbers of groups that nothing is learnt from, where this step has some."""
        seen = [group for rank in self._learner.gathered([_seen(item) for item in items]) for group in rank]
        if not seen:
            return {}
        return {
            "eval_reward_mean": float(np.mean([group["reward"].mean() for group in seen])),
            "eval_pass_fraction": float(np.mean([group["reward"].max() > 0 for group in seen])),
            "eval_response_tokens_mean": float(np.concatenate([group["lengths"] for group in seen]).mean()),
            "eval_groups_count": float(len(seen)),
        }

    # --- weights and checkpoints --------------------------------------------------------------------------------------
    def weights(self, version: PolicyVersion) -> Mapping[str, Any]:
        return self._learner.shards(self._engine_dtype)

    def state(self) -> dict[str, Any]:
        found = copied({**self._learner.tensors(), "skipped": self._skipped})
        if self._step >= self._ctx.flow.steps:
            whole = {name: tensor.clone() for name, tensor in self._learner.whole() if self._ctx.rank == 0}
            found[FOLDER] = whole
        return found

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        self._shards.write(folder, {name: part for name, part in state.items() if name != FOLDER})
        if state.get(FOLDER):
            models.save_folder(
                folder / FOLDER, state[FOLDER], shape=self._model_config, generation=self._generation_config,
                tokens=self._ctx.flow.model,
            )  # fmt: skip

    def read_shards(self, saved: Checkpoint) -> None:
        into: dict[str, Any] = {**self._learner.tensors(), "skipped": 0}
        self._shards.read(saved, into=into)
        self._skipped = int(into["skipped"])


def _learner_config(flow: Mapping[str, Any], config: TextFsdpConfig, sampling: Mapping[str, Any]) -> TextLearnerConfig:
    loss, optimizer = flow["loss"], flow["optimizer"]
    is_corrected = loss["correction"] == "truncated" and flow["old_logprobs"] == "recompute"
    return TextLearnerConfig(
        loss=TokenLossConfig(
            ratio=loss["ratio"], clip_low=loss["clip_low"], clip_high=loss["clip_high"],
            aggregation=loss["aggregation"], constant=int(sampling["most"]),
            entropy_coefficient=loss["entropy_coefficient"],
            correction_cap=loss["correction_cap"] if is_corrected else None,
        ),
        learning_rate=optimizer["learning_rate"], betas=tuple(optimizer["betas"]), eps=optimizer["eps"],
        weight_decay=optimizer["weight_decay"], max_grad_norm=optimizer["max_grad_norm"],
        schedule=optimizer["schedule"], warmup_steps=optimizer["warmup_steps"], token_budget=config.token_budget,
        precision=config.precision, activation_checkpointing=config.activation_checkpointing,
        least=int(sampling["least"]),
    )  # fmt: skip


def _event_file(folder: str) -> EventFile:
    work_dir = os.environ.get(names.ENV_OUTPUT_DIR, "")
    if not Path(folder).is_absolute() and not work_dir:
        raise UserError(
            "spec.roles[actor].config.tensorboard is no folder of this pod", got=folder,
            wanted="an absolute path, as there is no work dir on a cluster",
            next="write one on a volume that the pool mounts",
        )  # fmt: skip
    return EventFile(Path(work_dir, folder))


def _own_loss(kind: str) -> OwnLoss | None:
    """The loss of module:function; None: it is one of ours."""
    if ":" not in kind:
        return None
    function = loading.function(kind, what="loss", field="spec.flow.config.loss.kind")

    def called(batch: TokenBatch) -> Tensor:
        try:
            found: Tensor = function(batch)
        except (RLinfError, OSError, MemoryError):
            raise
        except Exception as error:
            raise UserError(
                f"loss {kind!r} raises", got=loading.told(error), wanted="a term for each token", next=loading.CORRECT
            ) from error
        return found

    return called


def _seen(item: Item) -> dict[str, Any]:
    payload, staleness = item.payload, _staleness(item)
    return {
        "reward": np.array(payload["reward"], np.float64), "lengths": np.array(payload["lengths"]),
        "finished": np.array(payload["finished"], np.float64), "parts": dict(payload["parts"]),
        "staleness_sum": int(staleness.sum()), "staleness_max": int(staleness.max(initial=0)),
    }  # fmt: skip


def _staleness(item: Item) -> NDArray[np.int64]:
    """The staleness of each token: how many updates the policy had seen since, when the step began."""
    return item.step - 1 - np.array(item.payload["versions"], np.int64)[:, 1]
