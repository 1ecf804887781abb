"""skipped-RANK.jsonl of the work dir: the groups of each step that was skipped, as its gradient was no number.

    {"step": 7, "branch": 0, "key": "train:0/7/0", "prompt": [5, 9], "tokens": [11, 2], "lengths": [1, 1],
     "logprobs": [-0.4, NaN], "reward": [1.0, 0.0], "advantage": [0.7, -0.7]}

For: people who look for the sample that did it; NaN and Infinity stand as Python's json writes and reads them. Each
rank writes its own groups. Nothing is written where there is no work dir (a cluster).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from rlinf_worker.bounded_file import BoundedFile
from rlinf_worker.channels.protocol import Item
from rlinf_worker.roles.actor.text_learner import AnswerGroup

MOST_BYTES: Final = 64 << 20
"""Then it becomes skipped-RANK.jsonl.1 in place of an older one: three steps of 64 groups of 8 x 1,000 tokens."""


class SkippedSteps:
    def __init__(self, output_dir: str, *, rank: int) -> None:
        name = f"skipped-{rank}.jsonl"
        self._file = BoundedFile(Path(output_dir) / name, limit=MOST_BYTES) if output_dir else None

    @property
    def where(self) -> str:
        """Empty: they are not kept."""
        return str(self._file.path) if self._file is not None else ""

    def keep(self, groups: Iterable[tuple[Item, AnswerGroup]]) -> None:
        if self._file is None:
            return
        for item, group in groups:
            arrays = {
                "prompt": group.prompt, "tokens": group.tokens, "lengths": group.lengths, "logprobs": group.engine,
                "reward": np.array(item.payload["reward"]), "advantage": group.advantage_G,
            }  # fmt: skip
            line = {"step": item.step, "branch": item.branch, "key": item.key}
            line |= {name: np.round(array, 6).tolist() for name, array in arrays.items()}
            self._file.write(json.dumps(line).encode() + b"\n")
