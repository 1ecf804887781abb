"""A task that a model of 0.3 million parameters learns in minutes: `a+b=`, a and b from 0 to 9.

    python addition.py FOLDER       makes FOLDER/base (a model that is right in half of its samples), FOLDER/train.jsonl

Nothing is downloaded: the tokenizer has a token for each character, the model begins with random weights. The base is
trained as a base model is, on text that somebody wrote: half of its answers are drawn from 0 to 18, the rest are right.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-*=() ?abcdefghijklmnopqrstuvwxyz\n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
STEPS, BATCH, RATE = 400, 256, 2e-3


def tokenizer() -> Any:
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)  # type: ignore[no-untyped-call]


def model(*, hidden: int = 128, layers: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


def rows() -> list[dict[str, str]]:
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def supervised(found: Any, tokens: Any, *, steps: int, seed: int = 0) -> None:
    """On texts such as `3+4=7<eos>`, loss on the answer alone."""
    luck = random.Random(seed)
    optimizer = torch.optim.AdamW(found.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        ids, labels = [], []
        for _ in range(BATCH):
            a, b = luck.randrange(10), luck.randrange(10)
            answer = a + b if luck.random() < 0.5 else luck.randrange(19)
            prompt = tokens(f"{a}+{b}=")["input_ids"]
            whole = [*prompt, *tokens(str(answer))["input_ids"], tokens.eos_token_id]
            fill = 8 - len(whole)
            ids.append(whole + [0] * fill)
            labels.append([-100] * len(prompt) + whole[len(prompt) :] + [-100] * fill)
        loss = found(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(found.parameters(), 1.0)  # else some sums are never learnt
        optimizer.step()
        schedule.step()


def make(folder: Path, *, steps: int = STEPS, hidden: int = 128, layers: int = 2) -> None:
    tokens, found = tokenizer(), model(hidden=hidden, layers=layers)
    supervised(found, tokens, steps=steps)
    found.save_pretrained(folder / "base")
    tokens.save_pretrained(folder / "base")
    lines = "".join(json.dumps(row) + "\n" for row in rows())
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]))
