"""GRPO and the losses beside it in one process, as plainly as they can be written: what flow grpo is measured by.
Nothing of the product's is imported.

    curve = learn(Path("build/learn-reasoning/addition"), reward=exact, steps=100, learning_rate=5e-4, seed=1)

One step: prompts, samples of each by torch's own generator, a reward for each, the policy gradient of all of them at
once, clipping, AdamW. With `delay` samples are of weights that many updates old. What they are corrected by: an
importance weight of each token, truncated at 2; with `clip` PPO's clipped ratio to the policy that sampled.
"""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

Reward = Callable[[Sequence[str], Mapping[str, Any]], list[float]]
PROMPTS, SAMPLES, CAP = 64, 8, 2.0


def learn(
    folder: Path, *, reward: Reward, steps: int, learning_rate: float, seed: int, most: int, least: int = 0,
    kind: str = "grpo", delay: int = 0, clip: float = 0.0, max_grad_norm: float = 1.0,
) -> list[float]:  # fmt: skip
    """The mean reward of each step."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    luck = random.Random(seed)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder / "base")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    older: deque[Any] = deque([copy.deepcopy(model)] * (delay + 1), maxlen=delay + 1)
    curve: list[float] = []
    queue: list[dict[str, Any]] = []
    for _ in range(steps):
        while len(queue) < PROMPTS:
            queue += luck.sample(rows, len(rows))
        batch, queue = queue[:PROMPTS], queue[PROMPTS:]
        prompt = torch.tensor([tokens(row["prompt"])["input_ids"] for row in batch]).repeat_interleave(SAMPLES, 0)
        ids, is_made, engine = sampled(older[0], prompt, most=most, least=least, stop=tokens.eos_token_id)
        texts = tokens.batch_decode(
            [row[keep].tolist() for row, keep in zip(ids[:, prompt.shape[1] :], is_made, strict=True)],
            skip_special_tokens=True,
        )
        rewards = [reward(texts[SAMPLES * n : SAMPLES * (n + 1)], row) for n, row in enumerate(batch)]
        reward_PG = torch.tensor(rewards)
        worth_PG = reward_PG - too_long(is_made).view_as(reward_PG) if kind == "dapo" else reward_PG
        loss, _ = loss_of(
            model, ids, is_made, advantages(worth_PG, kind=kind).flatten(), engine=engine if delay else None,
            kind=kind, clip=clip, least=least, stop=tokens.eos_token_id,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        older.append(copy.deepcopy(model))
        curve.append(float(reward_PG.mean()))
    return curve


@torch.no_grad()
def sampled(model: Any, prompt: Tensor, *, most: int, least: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """(prompts with what was written, which of it is of a sample, its log-probabilities)."""
    ids, cache = prompt, None
    done = torch.zeros(len(prompt), dtype=torch.bool)
    is_made, logprobs = [], []
    for position in range(most):
        out = model(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if position < least:
            logits[:, stop] = -torch.inf
        logprob = torch.log_softmax(logits, -1)
        drawn = torch.multinomial(logprob.exp(), 1)
        is_made.append(~done)
        logprobs.append(logprob.gather(-1, drawn)[:, 0])
        ids = torch.cat([ids, drawn.masked_fill(done[:, None], 0)], 1)
        done = done | (drawn[:, 0] == stop)
    return ids, torch.stack(is_made, 1), torch.stack(logprobs, 1)


def too_long(is_made: Tensor) -> Tensor:
    """What DAPO takes from a sample that fills all its room, with a buffer of one token: 1."""
    return is_made.all(1).float()


def advantages(reward_PG: Tensor, *, kind: str) -> Tensor:
    if kind == "reinforce++":
        return (reward_PG - reward_PG.mean()) / (reward_PG.std(correction=0) + 1e-6)
    centred = reward_PG - reward_PG.mean(1, keepdim=True)
    if kind == "rloo":
        return centred * (reward_PG.shape[1] / (reward_PG.shape[1] - 1))
    if kind == "dr-grpo":
        return centred
    return centred / (reward_PG.std(1, keepdim=True) + 1e-6)


def loss_of(
    model: Any, ids: Tensor, is_made: Tensor, advantage: Tensor, *, engine: Tensor | None, kind: str = "grpo",
    clip: float = 0.0, least: int = 0, stop: int = 2,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, log-probabilities). `engine`: what samples were drawn by, where it was another policy."""
    most = is_made.shape[1]
    logits = model(ids).logits[:, -most - 1 : -1]
    if least:
        logits = logits.clone()
        logits[:, :least, stop] = -torch.inf
    new = ids[:, -most:]
    logprob = torch.log_softmax(logits, -1).gather(-1, new[..., None])[..., 0]
    log_ratio = logprob - (engine if engine is not None and clip else logprob.detach())
    length = is_made.sum(1, keepdim=True)
    if kind == "gspo":  # the ratio of whole answers: the geometric mean over tokens
        log_ratio = ((log_ratio * is_made).sum(1, keepdim=True) / length).expand_as(logprob)
    worth = log_ratio.exp() * advantage[:, None]
    if clip:
        worth = torch.minimum(worth, log_ratio.exp().clamp(1 - clip, 1 + clip) * advantage[:, None])
    elif engine is not None:
        worth = worth * (logprob.detach() - engine).exp().clamp(max=CAP)
    return -added(worth * is_made, length, kind=kind, most=most), logprob


def added(worth: Tensor, length: Tensor, *, kind: str, most: int) -> Tensor:
    """Over all samples: of their sums (rloo), of these by the longest possible (dr-grpo), of their means (grpo, gspo);
    or over all tokens (dapo, reinforce++)."""
    if kind in ("dapo", "reinforce++"):
        return worth.sum() / length.sum()
    if kind in ("rloo", "dr-grpo"):
        return worth.sum(1).mean() / (most if kind == "dr-grpo" else 1)
    return (worth.sum(1, keepdim=True) / length).mean()
