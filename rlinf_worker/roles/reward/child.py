"""The process in which a reward function runs: `python -m rlinf_worker.roles.reward.child`, spoken with by judge.py.

In lines of JSON: first the config, answered by {} or {"failed": why the function cannot be loaded}; then
{"texts": [...], "row": {...}}, each answered by {"parts": {"name": [number, ...]}} or {"error": what it raised}.
What the function prints goes to the log.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rlinf_api.errors import RLinfError
from rlinf_worker.roles import loading
from rlinf_worker.roles.samples import REWARD

Function = Callable[[Sequence[str], Mapping[str, Any]], Any]
EXACT: Final = "exact"
REGEX: Final = "regex"
MATH: Final = "math"
MOST_SAID: Final = 500


def function_of(config: Mapping[str, Any]) -> Function:
    name = str(config["function"])
    if name in (EXACT, REGEX):
        return _comparing(config)
    if name == MATH:
        return _mathematical(config)
    return loading.function(name, what="reward function", field="spec.roles[reward].config.function")


def _comparing(config: Mapping[str, Any]) -> Function:
    column, pattern = str(config["answerColumn"]), re.compile(str(config["pattern"]))

    def found_in(text: str) -> str:
        if config["function"] == EXACT:
            return text.strip()
        last = None
        for last in pattern.finditer(text):  # noqa: B007 - the last one is wanted
            pass
        return "" if last is None else (last[1] if pattern.groups else last[0]) or ""

    def compare(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        answer = _answer(row, column)
        return [float(found_in(text).strip() == answer) for text in texts]

    return compare


def _answer(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        raise KeyError(f"the row has no column {column!r}, only {', '.join(sorted(row))[:200]}")
    return str(row[column]).strip()


def _mathematical(config: Mapping[str, Any]) -> Function:
    """By Math-Verify: the last expression or number of a text is what the answer is, however it is written. Its own
    time-outs are alarms of this process, which has no other thread: a text that takes longer than its share of
    timeoutSeconds is not right."""
    library = loading.module(
        "math_verify", what="reward function 'math'", next="install extra reasoning in this pool's image", ours=True
    )
    column = str(config["answerColumn"])

    def compare(texts: Sequence[str], row: Mapping[str, Any]) -> list[float]:
        share_s = max(1, int(config["timeoutSeconds"]) // (2 * len(texts) + 4))
        answer = _answer(row, column)
        gold = library.parse(f"${answer}$", parsing_timeout=share_s) or library.parse(answer, parsing_timeout=share_s)
        if not gold:
            raise ValueError(f"column {column!r} has no expression: {answer[:200]!r}")
        found = (library.parse(text, parsing_timeout=share_s) for text in texts)
        return [float(library.verify(gold, each, timeout_seconds=share_s)) for each in found]

    return compare


def answered(function: Function, question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        said = function(question["texts"], question["row"])
        named = said if isinstance(said, Mapping) else {REWARD: said}
        return {"parts": {str(name): [float(number) for number in part] for name, part in named.items()}}
    except Exception as error:  # noqa: BLE001 - the user's code
        return {"error": loading.told(error)[:MOST_SAID]}


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints is no answer

    def say(answer: Mapping[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    try:
        function = function_of(json.loads(sys.stdin.readline()))
    except RLinfError as error:
        say({"failed": str(error)})
        return
    say({})
    for line in sys.stdin:
        say(answered(function, json.loads(line)))


if __name__ == "__main__":
    main()
