"""Reasoning: a language model answers prompts in groups, is rewarded by a rule, and learns from what it gets beyond the
group's mean.

                 prompts (tickets)              samples                 rewarded (rounds)
    driver ───────────────────────> rollout ──────────────> reward ──────────────────────> actor
                                       ▲                                                     │
                                       └────────────────────── weights ──────────────────────┘

The unit is a *group*: all samples of one prompt. A ticket is the index of a row, and the row itself never passes the
driver: rollouts read the data, and share how many rows there are (fact `rows`). Group number g of the job is row
g % rows of pass g // rows, in an order that seed and pass decide, and a checkpoint has g; so a step that is made
again, or gone on with, has the rows that it had, and a retry samples the same tokens.

Runs in the driver. Not for: generation (roles/rollout), rewards (roles/reward), the update (roles/actor).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from rlinf_api.conditions import Reason
from rlinf_api.job import Model, Problem, RLJobSpec
from rlinf_api.plan import Capacity, Depth, MicroBatch
from rlinf_api.sentences import checked, did_you_mean
from rlinf_worker.algorithms.permutation import row_at
from rlinf_worker.channels import lineage
from rlinf_worker.flows.protocol import Flow, Ticket
from rlinf_worker.roles.samples import EVALUATION, PROMPT, REWARDED, ROWS, SAMPLES

GROUPS: Final = "groups"
"""A name in the flow's state in a checkpoint: the groups that were asked for, so that a job that goes on with another
promptsPerStep goes on in the data where it stood."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class GroupChannel(Model):
    """Sizes of one channel that the first plan takes over; later plans choose them."""

    micro_batch: MicroBatch = 1
    depth: Depth = 2
    capacity: Capacity = Capacity()


_GRPO: Final[dict[str, Any]] = {
    "baseline": "group-mean", "scale": "group", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2,
    "aggregation": "sequence-mean", "overlong_buffer": 0,
}  # fmt: skip
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "grpo": _GRPO,
    "dr-grpo": {**_GRPO, "scale": "none", "aggregation": "constant"},
    "dapo": {**_GRPO, "clip_high": 0.28, "aggregation": "token-mean"},
    "gspo": {**_GRPO, "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    "rloo": {
        **_GRPO, "baseline": "leave-one-out", "scale": "none", "clip_low": None, "clip_high": None,
        "aggregation": "sequence-sum",
    },
    "reinforce++": {**_GRPO, "baseline": "none", "scale": "batch", "aggregation": "token-mean"},
}  # fmt: skip
"""What `kind` sets of the fields below it where the manifest does not; algorithms/groups.py and losses/tokens.py say
what each is, and of which paper."""


_OWN: Final[dict[str, Any]] = {"clip_low": None, "clip_high": None}
_OWN_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class LossSpec(Model):
    kind: Annotated[str, Field(min_length=1, max_length=200)] = "grpo"
    """One of PRESETS, which sets the fields below that are not written, and does nothing else. Or module:function of
    the user's own: f(batch) -> the term of each token (losses/tokens.py, OwnLoss) in place of ratio and clip; the other
    fields hold."""
    baseline: Literal["group-mean", "leave-one-out", "none"] = "group-mean"
    scale: Literal["group", "batch", "none"] = "group"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: Positive | None = None
    clip_high: Positive | None = None
    aggregation: Literal["sequence-mean", "token-mean", "sequence-sum", "constant"] = "sequence-mean"
    overlong_buffer: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Tokens before maxResponseTokens over which a reward falls by up to 1. 0: none."""
    entropy_coefficient: NotNegative = 0.0
    correction: Literal["truncated", "none"] = "truncated"
    """Importance weights between the engine that sampled and the trainer; none where `oldLogprobs` is engine."""
    correction_cap: Positive = 2.0
    """2: a token that the trainer finds twice as likely as the engine counts twice, and no more."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        kind = raw.get("kind", "grpo")
        written = {name.lower().replace("_", "") for name in raw}
        preset = PRESETS.get(kind, _OWN) if isinstance(kind, str) else {}
        return {**{k: v for k, v in preset.items() if k.replace("_", "") not in written}, **raw}

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in PRESETS and not _OWN_NAME.fullmatch(kind):
            known = f"wanted one of {', '.join(PRESETS)}, or module:function"
            raise ValueError(f"got {kind!r}, {known};{did_you_mean(kind, list(PRESETS)) or ' write one of them'}")
        return kind

    @model_validator(mode="after")
    def _clips_itself(self) -> LossSpec:
        if self.kind in PRESETS:
            return self
        if self.ratio != "token" or self.clip_low is not None or self.clip_high is not None:
            raise ValueError(
                f"ratio, clipLow and clipHigh are of our losses, and kind {self.kind!r} is your own; leave them out, "
                "and clip in the function"
            )
        return self


class OptimizerSpec(Model):
    kind: Literal["adamw"] = "adamw"
    learning_rate: Positive = 1e-6
    """1e-6: what published work on models of billions of parameters uses; small ones bear a thousand times that."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    """0: there is little to overfit to, and the base model is to be kept."""
    max_grad_norm: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up; linear and cosine: down to 0 behind the job's last step."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0


class EvaluationSpec(Model):
    """How the job is evaluated, where it has spec.data.eval."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """With the first step, as the base model is, and then after so many. 20: a few points of a curve, for a few per
    cent of the time."""
    prompts: Annotated[int, Field(ge=1, le=100_000)] = 256
    """How many prompts an evaluation has at most: the first rows of the file. 256: a share of right answers within
    0.03."""
    samples: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many samples each prompt has: the mean is over them, and so is the share of prompts of which some sample is
    rewarded."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0: always the likeliest token, which chance does not move."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How many tokens are drawn from, the likeliest ones. 0: all. It is for evaluation only: what is learnt from is
    scored by the actor, whose own likeliest tokens may be others."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """How much probability the tokens that are drawn from have together, the likeliest ones; behind topK."""

    @model_validator(mode="after")
    def _differ(self) -> EvaluationSpec:
        if self.samples > 1 and not self.temperature:
            raise ValueError(f"samples {self.samples} at temperature 0 are all the same; raise it, or write samples: 1")
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature} is neither 0 nor at least 0.01; write one of them")
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise ValueError("topK and topP choose among what is drawn, and at temperature 0 nothing is; raise it")
        return self


class GrpoConfig(Model):
    """spec.flow.config of flow grpo."""

    prompts_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Groups of a step. 64: enough that a step's gradient is not one prompt's."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=10_000)] = 8
    """Samples of a group; their mean is the baseline, so two at least. 8: where published curves flatten."""
    updates_per_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """Optimizer steps over a step's groups, each over its share of them. 1: exactly on policy, and no pass for old
    log-probabilities."""
    old_logprobs: Literal["recompute", "engine"] = "recompute"
    """What the ratio is to: the trainer's own before the first update, or what the engine said (one pass less where
    there are several updates, and the engine's numbers in the ratio)."""
    loss: LossSpec = LossSpec.model_validate({})
    optimizer: OptimizerSpec = OptimizerSpec()
    engine_kl_bound: Positive = 0.01
    """Nats per token between engine and actor of one policy, above which the job is Degraded, LogprobMismatch: what is
    learnt from was not drawn from what the actor thinks. 0.01: float32 stays below 0.0001; for bfloat16 it is a guess,
    which real mistakes (another tokenizer, weights that did not arrive) are far above."""
    evaluation: EvaluationSpec = EvaluationSpec()
    channels: dict[Literal["prompts", "samples", "rewarded", "weights"], GroupChannel] = {}
    order: Literal["arrival", "lineage"] = "arrival"
    """lineage: rounds in the order of the groups' keys, whatever is finished first."""

    @model_validator(mode="after")
    def _fits(self) -> GrpoConfig:
        if self.updates_per_step > self.prompts_per_step:
            raise ValueError(
                f"updatesPerStep {self.updates_per_step} is above promptsPerStep {self.prompts_per_step}; "
                "an update needs a group, so lower it"
            )
        return self


def check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """With all defaults, snake_case. InvalidManifest with a sentence per problem."""
    return checked(GrpoConfig, config, prefix="spec.flow.config").model_dump(mode="json")


def check_job(spec: RLJobSpec) -> Iterator[Problem]:
    """What the flow needs besides its own config."""
    if spec.model is None:
        text = "is missing; write {path: ...}, a folder with config.json, *.safetensors and the tokenizer's files"
        yield Problem(field="spec.model", message=text)
    if spec.data is None or not spec.data.train:
        yield Problem(
            field="spec.data.train",
            message="is missing; write a .jsonl or .parquet file or a saved dataset's folder, a prompt per row",
        )
    config = GrpoConfig.model_validate(spec.flow.config)
    is_their_own = config.loss.kind not in PRESETS and config.old_logprobs == "engine"
    if spec.flow.max_staleness and is_their_own and config.loss.correction != "none":
        yield Problem(
            field="spec.flow.config.loss.correction",
            message=f"maxStaleness is {spec.flow.max_staleness}, and with oldLogprobs: engine what older weights made "
            "is corrected by your own loss alone; write oldLogprobs: recompute, or correction: none",
        )
    for name, path in (("train", spec.data.train), ("eval", spec.data.eval)) if spec.data is not None else ():
        if path and PurePath(path).suffix not in (".jsonl", ".parquet", ""):
            got = f"got {path!r}, wanted a file whose name ends in .jsonl or .parquet, or a saved dataset's folder"
            yield Problem(field=f"spec.data.{name}", message=f"{got}; convert it")


async def grpo(flow: Flow) -> None:
    prompts = flow.source("prompts", to="rollout", payload=PROMPT)
    flow.queue("samples", "rollout", "reward", payload=SAMPLES)
    flow.queue("rewarded", "reward", "actor", rounds=True, payload=REWARDED)
    flow.weights("actor", "rollout")
    flow.watch(
        "engine_kl", at_most=float(flow.config["engine_kl_bound"]), reason=Reason.LOGPROB_MISMATCH,
        words="engine and actor disagree on tokens of one policy",
    )  # fmt: skip
    flow.watch("empty_steps", at_most=0, reason=Reason.NOTHING_LEARNT, words="all groups of a step were dropped")

    per_step = int(flow.config["prompts_per_step"])
    async for step in flow.steps():
        rows = await flow.shared(ROWS)
        count = int(rows["count"])
        tickets = _evaluation(flow.config["evaluation"], count=int(rows["eval_count"]), done=step.number - 1)
        begin = int(flow.state.get(GROUPS, (step.number - 1) * per_step))
        flow.state[GROUPS] = begin + per_step
        for place in range(begin, begin + per_step):
            data_pass, at = divmod(place, count)
            index = row_at(at, count=count, seed=flow.seed, data_pass=data_pass)
            key = lineage.sample("train", data_pass, index=index, sample=0)
            tickets.append(Ticket(key=key, payload={"index": index, "pass": data_pass}))
        await prompts.put(tickets, step=step)


def _evaluation(config: Mapping[str, Any], *, count: int, done: int) -> list[Ticket]:
    """The evaluation's tickets of the step behind `done`: they are answered with the weights that it begins with, or by
    staleness older ones."""
    if done % int(config["every_steps"]):
        return []
    numbers = range(min(count, int(config["prompts"])))
    keys = {index: lineage.sample(EVALUATION, done, index=index, sample=0) for index in numbers}
    return [Ticket(key=key, payload={"index": index, "pass": done}, rare=True) for index, key in keys.items()]
