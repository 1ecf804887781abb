"""TRL's GRPOTrainer over the task of row `sevens`: 64 prompts x 8 samples x 32 tokens a step, one update, on CPUs.

    python -m tools.bench.reasoning_parts.trl_sevens FOLDER --steps 8      prints {"step_s": ..., "curve": [...]}

The same model, rows, reward, learning rate and number of tokens; one process of one thread. Run with TRL on the path
(tools/bench/reasoning.py), and with nothing of ours but the task.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

WARM: Final = 2
LEARNING_RATE: Final = 1e-3


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    torch.set_num_threads(1)
    base = options.folder / "base"
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rows = [json.loads(line) for line in (options.folder / "train.jsonl").read_text().splitlines()]
    curve: list[float] = []
    seconds: list[float] = []

    def sevens(completions: Any, completion_ids: Any = None, **_: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        rewards = [text.count("7") / max(1, len(text)) for text in texts]
        curve.append(statistics.fmean(rewards))
        return rewards

    class Timed(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    with tempfile.TemporaryDirectory(prefix="rlinf-trl-") as out:
        config = trl.GRPOConfig(
            output_dir=out, per_device_train_batch_size=512, gradient_accumulation_steps=1, num_generations=8,
            max_completion_length=32, max_steps=options.steps, learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant", temperature=1.0, generation_kwargs={"min_new_tokens": 32}, use_cpu=True,
            bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
            disable_tqdm=True, seed=1, beta=0.0,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=model, reward_funcs=sevens, args=config, train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Timed()],
        )  # fmt: skip
        trainer.train()
    print(json.dumps({"step_s": statistics.median(seconds[WARM:]), "curve": [round(each, 4) for each in curve]}))


if __name__ == "__main__":
    main(sys.argv[1:])
