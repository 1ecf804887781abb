"""Results of numbered problems as lines of a file. What is there is not made again, so that a proof goes on where it
was stopped.

    results(Path("build/prove/exact.jsonl"), one, count=200, until=time.monotonic() + 3600)
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def results(
    path: Path,
    one: Callable[[int], Line],
    *,
    count: int,
    until: float,
    at_once: int = 1,
    again: Callable[[Line], bool] = lambda line: False,
) -> list[Line]:
    """The results of problems 0 to `count`, in order. `until`: begin none after so much of the monotonic clock. Each
    line has its `seed`. `again`: what of the file is made once more, as it counts as not made; of a seed the last line
    counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {line["seed"]: line for line in map(json.loads, lines)}
    path.parent.mkdir(parents=True, exist_ok=True)
    left = [seed for seed in range(count) if seed not in done or again(done[seed])]
    with ThreadPoolExecutor(at_once) as pool:
        under_way = set[Future[Line]]()
        while under_way or (left and time.monotonic() <= until):
            while left and len(under_way) < at_once and time.monotonic() <= until:
                under_way.add(pool.submit(one, left.pop(0)))
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for line in (future.result() for future in ended):
                done[line["seed"]] = line
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return [done[seed] for seed in range(count) if seed in done]
