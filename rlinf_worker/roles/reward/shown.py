"""samples.jsonl of the work dir: a few samples of each step with their rewards, for people who want to read them.

    {"step": 3, "key": "train:0/7/0", "sample": 0, "row": {"prompt": "3+4=", "answer": "7"}, "response": "7",
     "reward": 1.0, "parts": {"reward": 1.0}, "tokens": 2, "finished": true, "versions": [[0, 2], [0, 2]]}

Written by the first worker of the role alone, as it goes: what a worker made again stands there again, of the branch
that its versions name. Nothing is written where there is no work dir (a cluster). `versions`: the oldest and the newest
weights that made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlinf_worker.bounded_file import BoundedFile
from rlinf_worker.channels.protocol import Item
from rlinf_worker.roles.samples import is_evaluation

NAME: Final = "samples.jsonl"
MOST_BYTES: Final = 32 << 20
"""Then it becomes samples.jsonl.1 in place of an older one: some 10,000 samples of 3 KB are kept."""
GROUPS: Final = 4
"""How many groups are shown of a step, and of its evaluation; of each the best sample and the worst."""
CHARACTERS: Final = 4000
"""How many characters are shown of a text, from its begin."""
STEPS: Final = 64
"""Counted at a time: more than may be open."""


class Shown:
    def __init__(self, output_dir: str, *, rank: int) -> None:
        self._file = BoundedFile(Path(output_dir) / NAME, limit=MOST_BYTES) if output_dir and not rank else None
        self._groups: dict[tuple[int, int, bool], int] = {}  # by branch, step, whether it is evaluated

    def show(self, item: Item, parts: Mapping[str, list[float]], reward: np.ndarray[Any, Any]) -> None:
        at = (item.branch, item.step, is_evaluation(item.key))
        count = self._groups.get(at, 0)
        if self._file is None or count >= GROUPS:
            return
        self._groups[at] = count + 1
        while len(self._groups) > STEPS:
            del self._groups[min(self._groups)]
        ends = np.cumsum(item.payload["lengths"])
        order = np.argsort(-reward, kind="stable").tolist()
        lines = []
        for sample in dict.fromkeys((order[0], order[-1])):
            made = item.payload["versions"][int(ends[sample]) - int(item.payload["lengths"][sample]) : ends[sample]]
            versions = [tuple(version) for version in np.array(made).tolist()]
            lines.append({
                "step": item.step, "key": item.key, "sample": sample, "row": _cut(item.payload["row"]),
                "response": item.payload["texts"][sample][:CHARACTERS], "reward": float(reward[sample]),
                "parts": {name: part[sample] for name, part in parts.items()},
                "tokens": int(item.payload["lengths"][sample]), "finished": bool(item.payload["finished"][sample]),
                "versions": [min(versions), max(versions)] if versions else [],
            })  # fmt: skip
        self._file.write("".join(json.dumps(line, default=str) + "\n" for line in lines).encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value[:CHARACTERS]
    if isinstance(value, Mapping):
        return {str(name): _cut(part) for name, part in value.items()}
    return [_cut(part) for part in value] if isinstance(value, list) else value
