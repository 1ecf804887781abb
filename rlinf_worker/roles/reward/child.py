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
MOST_SAID: Final = 500


def function_of(config: Mapping[str, Any]) -> Function:
    name = str(config["function"])
    if name in (EXACT, REGEX):
        return _comparing(config)
    module_name, _, attribute = name.partition(":")
    remedy = "put it into this pool's image, or its folder on PYTHONPATH"
    module = loading.module(module_name, what=f"reward function {name!r}", next=remedy)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise loading.LoadFailed(
            f"reward function {name!r} is not there", got=f"{module_name} has no function {attribute!r}",
            next="correct spec.roles[reward].config.function",
        )  # fmt: skip
    found: Function = function
    return found


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
        if column not in row:
            raise KeyError(f"the row has no column {column!r}, only {', '.join(sorted(row))[:200]}")
        answer = str(row[column]).strip()
        return [float(found_in(text).strip() == answer) for text in texts]

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
