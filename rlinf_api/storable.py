"""What of a manifest no API server could keep: numbers, keys and text that JSON has not, circles, more than fits.

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
from typing import Any, Final

from rlinf_api.job import Problem

MAX_SIZE: Final = 3 << 20
"""Characters of a manifest with every alias written out. 3 MiB: what an API server takes of a request at most."""
MAX_DEPTH: Final = 100
"""Levels of lists and mappings. 100: far more than a pod has, and a tenth of what Python's stack carries."""
MAX_TOLD: Final = 20
"""Places that are named. 20: a screen of them; who repairs these sees the next."""
_SCALARS: Final = (str, int, float, bool, type(None), datetime.date)

_HALF: Final = "has half a character (a surrogate), which no JSON has; write the character itself"


def dumps(value: Any) -> str:
    """As JSON; ValueError or TypeError where `problems` has something to say."""
    try:
        text = json.dumps(value, default=_text, allow_nan=False, ensure_ascii=False)
        text.encode()  # UnicodeEncodeError, a ValueError, where it has half a character
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return text


def problems(value: Any, field: str) -> list[Problem]:
    """A sentence per place; the size ends the list, as there may be no end to what is behind an alias."""
    walk = _Walk()
    if not walk.is_done(value, field, ()):
        message = f"is larger than {MAX_SIZE} characters with its aliases written out; an API server takes no more"
        walk.found.append(Problem(field=field or "manifest", message=f"{message}, make it smaller"))
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found: list[Problem] = []
        self._left = MAX_SIZE

    def is_done(self, value: Any, field: str, above: tuple[int, ...]) -> bool:
        """False: it is too large to go on. `above`: the lists and mappings around it."""
        if isinstance(value, dict | list):
            return self._is_done_below(value, field, above)
        self._left -= len(value) + 2 if isinstance(value, str) else 8
        if not isinstance(value, _SCALARS):
            kind = type(value).__name__
            self._wrong(field, f"got a value of type {kind}, which JSON has not; write text or numbers")
        elif isinstance(value, float) and not math.isfinite(value):
            self._wrong(field, f"got {value}, wanted a number that JSON has; write a finite one")
        elif isinstance(value, str) and _is_half(value):
            self._wrong(field, _HALF)
        return self._left >= 0

    def _is_done_below(self, value: dict[Any, Any] | list[Any], field: str, above: tuple[int, ...]) -> bool:
        if id(value) in above or len(above) >= MAX_DEPTH:
            why = "holds itself" if id(value) in above else f"has more than {MAX_DEPTH} levels"
            self._wrong(field, f"{why}; write it out without the alias, or flatter")
            return True
        above = (*above, id(value))
        self._left -= 2
        if isinstance(value, list):
            return all(self.is_done(child, f"{field}[{number}]", above) for number, child in enumerate(value))
        for key, child in value.items():
            self._left -= len(str(key)) + 4
            if not isinstance(key, str | int | float | None):
                self._wrong(field, f"got the key {key!r}, wanted text; write it in quotes")
            below = f"{field}.{key}" if field else str(key)
            if isinstance(key, str) and _is_half(key):
                below = below.encode(errors="backslashreplace").decode()
                self._wrong(below, _HALF)
            if not self.is_done(child, below, above):
                return False
        return True

    def _wrong(self, field: str, message: str) -> None:
        if len(self.found) < MAX_TOLD:
            self.found.append(Problem(field=field or "manifest", message=message))


def _is_half(text: str) -> bool:
    """Half of a pair that UTF-16 has for one character: YAML's "\\ud800" makes it, and nothing can store it."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _text(value: object) -> str:
    if isinstance(value, datetime.date):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
