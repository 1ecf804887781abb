"""What is learnt: each row a job, the script beside it, and the bar of both."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.grpo import addition
from tools.learn_reasoning import rewards
from tools.learn_reasoning.plain import Reward

NEAR: Final = 0.03
"""By so much a job may stay behind the script: two seeds of one and the same differ by 0.02."""
OWN: Final = "tools.learn_reasoning.rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    task: str
    steps: int
    learning_rate: float
    seed: int
    last: int = 10
    """Steps whose mean is compared."""
    bar: float = 0.0
    kind: str = "grpo"
    engine: str = "transformers"
    staleness: int = 0
    clip: float = 0.0
    """Above 0: corrected by the clipped ratio to what the engine said (`oldLogprobs: engine`), not by weights."""
    has_script: bool = True
    reward: Mapping[str, Any] = field(default_factory=dict)
    """Config of role reward."""
    metric: str = "reward_mean"
    kills_every: int = 0
    """Steps after which its rollout is killed, again and again; 0: never."""
    falls: bool = False
    """Nothing is to be learnt: the last steps are no better than the first one."""


def rows() -> Iterator[Row]:
    for engine in ("transformers", "vllm"):
        yield Row(
            name=f"sevens-{engine}", task="sevens", steps=30, learning_rate=1e-3, seed=1, last=1, bar=0.95,
            engine=engine, reward={"function": f"{OWN}:sevens"},
        )  # fmt: skip
    plain: dict[str, Any] = {"task": "addition", "reward": {"function": "exact"}}
    for seed in (1, 2, 3):
        for kind in ("grpo", "rloo"):
            yield Row(**_addition, **plain, name=f"addition-{kind}-{seed}", kind=kind, seed=seed, bar=0.93)
    for kind in ("dr-grpo", "dapo", "gspo", "reinforce++"):
        for seed in (1, 2, 3):
            yield Row(**_addition, **plain, name=f"addition-{kind}-{seed}", kind=kind, seed=seed, bar=0.85)
    late: dict[str, Any] = {
        "task": "addition",
        "reward": {"function": "exact"},
        "steps": 150,
        "learning_rate": 2e-4,
        "seed": 1,
    }
    for staleness in (0, 1, 2, 4):
        yield Row(**late, name=f"stale-{staleness}", staleness=staleness)
    yield Row(**late, name="stale-4-behaviour", staleness=4, clip=0.2)
    yield Row(**_addition, **plain, name="killed", seed=1, bar=0.9, kills_every=10)
    yield Row(
        **_addition, task="addition", name="shuffled", seed=1, has_script=False, falls=True,
        metric="reward_right_mean", reward={"function": f"{OWN}:shuffled", "weights": {"right": 0.0}},
    )  # fmt: skip


_addition: Final[dict[str, Any]] = {"steps": 100, "learning_rate": 5e-4}
SIZES: Final = {"sevens": (8, 32, 32), "addition": (8, 4, 0)}
"""The sizes of a task: tokens of a prompt at most, of a response at most, and of a response at least."""
REWARDS: Final[dict[str, Reward]] = {"sevens": rewards.sevens, "addition": rewards.exact}


def make_task(task: str, folder: Path) -> None:
    """The model and its rows, once."""
    if (folder / "train.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if task == "addition":
        addition.make(folder)
        return
    addition.model().save_pretrained(folder / "base")
    addition.tokenizer().save_pretrained(folder / "base")
    luck = random.Random(1)
    lines = [{"prompt": f"{luck.randint(10, 99)}+{luck.randint(10, 99)}=?"} for _ in range(64 * 30)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def manifest(row: Row, folder: Path) -> dict[str, Any]:
    prompt, most, least = SIZES[row.task]
    rollout = {"maxPromptTokens": prompt, "maxResponseTokens": most, "minResponseTokens": least}
    loss = {"kind": row.kind, **({"overlongBuffer": 1} if row.kind == "dapo" else {})}
    config = {
        "promptsPerStep": 64, "samplesPerPrompt": 8, "loss": loss, "optimizer": {"learningRate": row.learning_rate},
        "channels": {"rewarded": {"microBatch": 16}},
    }  # fmt: skip
    if row.clip:
        loss |= {"clipLow": row.clip, "clipHigh": row.clip}
        config["oldLogprobs"] = "engine"
    return {
        "apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": row.name.replace("+", "p")},
        "spec": {
            "seed": row.seed,
            "flow": {"name": "grpo", "steps": row.steps, "maxStaleness": row.staleness, "config": config},
            "model": {"path": str(folder / "base")}, "data": {"train": str(folder / "train.jsonl")},
            "roles": [
                {"name": "rollout", "kind": row.engine, "config": rollout},
                {"name": "reward", "kind": "rule", "config": dict(row.reward)},
                {"name": "actor", "kind": "fsdp", "config": {"tokenBudget": 32768}},
            ],
            "pools": [{"name": "cpu", "roles": ["rollout", "reward", "actor"], "slots": {"perPod": 3, "cpu": "500m"}}],
        },
    }  # fmt: skip
