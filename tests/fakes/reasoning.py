"""What a job of flow grpo needs, made on the spot in a tenth of a second: a model of some thousand random numbers with
a token for each character, some prompts, and reward functions that have been given names.

make_folder(tmp_path)      base/, rows.jsonl
manifest(tmp_path)         a job over them whose reward is the share of sevens: it rises within ten steps
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SEVENS = "tests.fakes.reasoning:sevens"
ROLES = ("rollout", "reward", "actor")


def make_folder(folder: Path, *, rows: int = 40, layers: int = 1, hidden: int = 32) -> Path:
    from examples.grpo import addition

    addition.model(hidden=hidden, layers=layers).save_pretrained(folder / "base")
    addition.tokenizer().save_pretrained(folder / "base")
    luck = random.Random(0)
    lines = [{"prompt": f"{luck.randint(10, 99)}+{luck.randint(10, 99)}=?", "number": n} for n in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def manifest(folder: Path, *, steps: int = 10, ranks: int = 1, kind: str = "transformers", **fields: Any) -> Path:
    path = folder / f"job-{kind}-{ranks}-{steps}.yaml"
    path.write_text(yaml.safe_dump(job(folder, steps=steps, ranks=ranks, kind=kind, **fields)))
    return path


def job(
    folder: Path, *, steps: int = 10, ranks: int = 1, reward: str = SEVENS, kind: str = "transformers", **flow: Any
) -> dict[str, Any]:
    """`flow`: fields of its config."""
    config = {
        "promptsPerStep": 16, "samplesPerPrompt": 8, "order": "lineage", "optimizer": {"learningRate": 0.01},
        "channels": {"rewarded": {"microBatch": 4}}, "evaluation": {"everySteps": 4, "prompts": 8}, **flow,
    }  # fmt: skip
    roles = [
        {"name": "rollout", "kind": kind, "config": {
            "maxPromptTokens": 16, "maxResponseTokens": 8, "minResponseTokens": 2}},
        {"name": "reward", "kind": "rule", "config": {"function": reward, "timeoutSeconds": 20}},
        {"name": "actor", "kind": "fsdp", "workers": ranks, "config": {"tokenBudget": 1024}},
    ]  # fmt: skip
    return {
        "apiVersion": "rlinf.io/v1alpha1", "kind": "RLJob", "metadata": {"name": "sevens"},
        "spec": {
            "seed": 3, "flow": {"name": "grpo", "steps": steps, "config": config},
            "model": {"path": str(folder / "base")}, "roles": roles,
            "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl")},
            "pools": [{"name": "cpu", "roles": list(ROLES), "slots": {"perPod": 2 + ranks, "cpu": "500m"}}],
            "checkpoint": {"everySteps": 4},
        },
    }  # fmt: skip


# --- losses -----------------------------------------------------------------------------------------------------------
def reinforce(batch: Any) -> Any:
    return -batch.advantage_T * batch.logprob_T


def unhurried(batch: Any) -> Any:
    """A learner that is slower than its rollout on any machine."""
    time.sleep(0.2)
    return reinforce(batch)


def paced(batch: Any) -> Any:
    """A learner whose step takes about as long as those of other shapes of tools/chaos."""
    time.sleep(0.05)
    return reinforce(batch)


def loss_that_raises(batch: Any) -> Any:
    raise KeyError("beta")


# --- reward functions -------------------------------------------------------------------------------------------------
def sevens(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return [text.count("7") / max(1, len(text)) for text in texts]


def parts(texts: Sequence[str], row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {"length": [float(len(text)) for text in texts], "number": [float(row["number"])] * len(texts)}


def raises(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    raise KeyError("no such answer")


def hangs(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    time.sleep(3600)
    return []


def dies(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    os._exit(3)


def dies_once_in_three(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return dies(texts, row) if row["number"] % 3 == 0 else sevens(texts, row)


def is_short(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return [1.0] * (len(texts) - 1)


def is_no_number(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    return [float("nan")] * len(texts)


def prints(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    print('{"parts": {"reward": [9, 9]}}', flush=True)
    return [0.25] * len(texts)


def raises_once_in_three(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
    if row["number"] % 3 == 0:
        raise ValueError("a multiple of three")
    return sevens(texts, row)
