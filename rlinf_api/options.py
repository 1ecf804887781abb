"""Which entry of a synthetic role's `options` is in force: a plan's word, or else its config's. Pure, stdlib only: the
role's worker asks here, too, and is spared the import of the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

BASE: Final = "base"
"""None of the list: time and memory as they stand."""


def chosen(config: Mapping[str, Any], option: str) -> Mapping[str, Any] | None:
    """None: time and memory as they stand. `option`: the plan's; empty: it says nothing.

    >>> config = {"options": [{"peak": 4, "perItemMs": 9}], "option": 0}
    >>> [chosen(config, said) for said in ("", "0", "base")]
    [{'peak': 4, 'perItemMs': 9}, {'peak': 4, 'perItemMs': 9}, None]
    """
    listed, number = config.get("options"), config.get("option")
    if option == BASE or not isinstance(listed, list):
        return None
    number = int(option) if option.isdecimal() else number
    if not isinstance(number, int) or not 0 <= number < len(listed):
        return None
    found = listed[number]
    return found if isinstance(found, dict) else None
