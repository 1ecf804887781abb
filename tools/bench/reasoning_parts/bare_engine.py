"""An engine alone, without a job: the requests of one step of `sevens`, again and again.

    python -m tools.bench.reasoning_parts.bare_engine FOLDER --engine vllm --times 5      prints {"tokens_per_s": ...}

It has its own process, as vLLM makes a process its own, and one thread, as in a worker.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.roles import models
from rlinf_worker.roles.rollout import vllm_role
from rlinf_worker.roles.rollout.engine import Engine, Sampling
from rlinf_worker.roles.rollout.generation import Generator
from rlinf_worker.roles.rollout.schema import VllmConfig
from tools.learn_reasoning.rows import SIZES

GROUPS, SAMPLES = 64, 8


def engine_of(name: str, path: str, weights: dict[str, Any]) -> Engine:
    rows, (prompt, most, _) = GROUPS * SAMPLES, SIZES["sevens"]
    if name == "transformers":
        made: Engine = Generator(models.language_model(path, dtype=torch.float32), seed=1, rows=rows)
    else:
        config = VllmConfig(max_prompt_tokens=prompt, max_response_tokens=most)
        kv_bytes = vllm_role.cache_bytes(config, models.config_of(path), kv_bytes=0)
        made = vllm_role._library().VllmEngine(
            path, dtype="float32", seed=1, rows=rows, positions=prompt + most, block=vllm_role.BLOCK, kv_bytes=kv_bytes
        )
    made.load(PolicyVersion(0, 0), weights)
    return made


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = str(options.folder / "base")
    weights = dict(models.language_model(path, dtype=torch.float32).named_parameters())
    engine, tokenizer = engine_of(options.engine, path, weights), models.tokenizer(path)
    texts = [json.loads(line)["prompt"] for line in (options.folder / "train.jsonl").read_text().splitlines()]
    _, most, least = SIZES["sevens"]
    sampling = Sampling(samples=SAMPLES, temperature=1.0, most=most, least=least, stops=(tokenizer.eos_token_id,))
    rates = []
    for number in range(options.times + 1):
        engine.load(PolicyVersion(0, number), weights)
        began, tokens = time.perf_counter(), 0
        for index, text in enumerate(texts[number * GROUPS : (number + 1) * GROUPS]):
            key = f"train:{number}/{index}/0"
            engine.begin(key, key=key, prompt=tokenizer(text)["input_ids"], sampling=sampling)
        while engine.busy:
            tokens += engine.step()
        if number:  # the first warms up
            rates.append(tokens / (time.perf_counter() - began))
    print(json.dumps({"tokens_per_s": statistics.median(rates)}))


if __name__ == "__main__":
    main(sys.argv[1:])
