"""What of a manifest no API server could keep: numbers and keys that JSON has not, circles, more than fits.

YAML can say more than JSON. `supported.examine` asks this where a spec is not to be had as JSON, `rljob` of every file
that it reads, so that the answer is the field and a remedy and not the encoder's error. A date is none of these: it
means the text that was written.

>>> [str(p) for p in problems({"a": [1.5, float("inf")], "b": {3: True}}, "spec")]
['spec.a[1]: got inf, wanted a number that JSON has; write a finite one']
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from rlinf_api.job import Problem

MAX_SIZE: Final = 3 << 20
"""Characters of a manifest with every alias written out. 3 MiB: what an API server takes of a request at most."""
MAX_DEPTH: Final = 100
"""Levels of lists and mappings. 100: far more than a pod has, and a tenth of what Python's stack carries."""
_SCALARS: Final = (str, int, float, bool, type(None), datetime.date)


def dumps(value: Any) -> str:
    """As JSON; ValueError or TypeError where `problems` has something to say."""
    try:
        return json.dumps(value, default=_text, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def problems(value: Any, field: str) -> list[Problem]:
    """A sentence per place; the first that makes the rest unreadable (a circle, the size) ends the list."""
    found: list[Problem] = []
    left = MAX_SIZE
    for problem, size in _walk(value, field, ()):
        if problem is not None:
            found.append(problem)
        left -= size
        if left < 0:
            message = f"is larger than {MAX_SIZE} characters with its aliases written out; an API server takes no more"
            return [*found, Problem(field=field or "manifest", message=f"{message}, make it smaller")]
    return found


def _walk(value: Any, field: str, above: tuple[int, ...]) -> Iterator[tuple[Problem | None, int]]:
    """(what is wrong there, characters) of each place."""
    if isinstance(value, dict | list):
        if id(value) in above or len(above) >= MAX_DEPTH:
            why = "holds itself" if id(value) in above else f"has more than {MAX_DEPTH} levels"
            yield Problem(field=field or "manifest", message=f"{why}; write it out without the alias, or flatter"), 0
            return
        above = (*above, id(value))
    if isinstance(value, list):
        yield None, 2
        for number, child in enumerate(value):
            yield from _walk(child, f"{field}[{number}]", above)
    elif isinstance(value, dict):
        yield None, 2
        for key, child in value.items():
            below = f"{field}.{key}" if field else str(key)
            if not isinstance(key, str | int | float | None):
                message = f"got the key {key!r}, wanted text; write it in quotes"
                yield Problem(field=field or "manifest", message=message), 0
            yield None, len(str(key)) + 4
            yield from _walk(child, below, above)
    elif not isinstance(value, _SCALARS):
        kind = type(value).__name__
        yield Problem(field=field, message=f"got a value of type {kind}, which JSON has not; write text or numbers"), 0
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(field=field, message=f"got {value}, wanted a number that JSON has; write a finite one"), 0
    else:
        yield None, len(value) + 2 if isinstance(value, str) else 8


def _text(value: object) -> str:
    if isinstance(value, datetime.date):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
