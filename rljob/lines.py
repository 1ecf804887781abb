"""The .jsonl files of a work dir, line by line, each line with the fields that a reader goes by.

For: timeline.py. A line that is being written, or was torn by a crash, is left out; one that is whole and not of a run
is named with its number: what a timeline makes of the rest would be wrong without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlinf_api.errors import UserError
from rljob.local import room

NUMBER: Final = (int, float)
MAX_NUMBER: Final = 1e15  # a clock's, in seconds, by far: more, NaN and infinity have no place on an axis
Fields = Mapping[str, type | tuple[type, ...]]
STEP: Final[Fields] = {"step": int, "branch": int, "time": NUMBER, "step_s": NUMBER}
EVENT: Final[Fields] = {"time": NUMBER}
SPAN: Final[Fields] = {"slot": str, "worker": str, "kind": str, "step": int, "t0": NUMBER, "t1": NUMBER}
TOTALS: Final[Fields] = {"agent_instrument_s": NUMBER}


def read(path: Path, fields: Callable[[Mapping[str, Any]], Fields]) -> Iterator[dict[str, Any]]:
    """Nothing where there is no such file. `fields`: what such a line must have."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(
            f"{path} cannot be read", got=room.told(error, path), next="name a work dir that you may read"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            if wrong := _wrong(found, fields(found)):
                raise UserError(
                    f"{path}, line {number}, is of no run", got=wrong[0], wanted=wrong[1],
                    next="take that line out, or name the work dir of a run of this version",
                )  # fmt: skip
            yield found


def _wrong(line: Mapping[str, Any], fields: Fields) -> tuple[str, str] | None:
    """(got, wanted) of the first field that is not as it must be."""
    for name, kind in fields.items():
        value = line.get(name)
        if isinstance(value, kind) and (not isinstance(value, NUMBER) or abs(value) <= MAX_NUMBER):
            continue
        got = f"no {name!r}" if name not in line else f"{name} {value!r:.60}"
        return got, ("a word" if kind is str else "a number") + f" as {name!r}"
    return None
