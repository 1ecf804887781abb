"""Small plain values that go by way of the driver: results, facts, a flow's state. As JSON, within a bound. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Final

from rlinf_api.errors import UserError

MAX_BYTES: Final = 64 * 1024
"""As JSON, of one value: the driver keeps it in memory, and tells some of them to each worker."""
FACTS_BYTES: Final = 1 << 20
"""A job has no more of them, names included: each Welcome has all of them, and a message has at most 16 MiB."""


def encoded(value: Any, what: str, *, next: str, error: type[UserError] = UserError) -> str:
    """Numbers of numpy are taken for what they are. Raises `error`, which says of `what` why it cannot be.

    >>> encoded({"reward": 0.5, "kept": True}, "result 'a'", next="pass less")
    '{"kept":true,"reward":0.5}'
    """
    text = as_json(value, what, next=next, error=error)
    if len(text) > MAX_BYTES:  # ASCII alone
        raise error(what, got=f"{len(text)} bytes", wanted=f"at most {MAX_BYTES}", next=next)
    return text


def as_json(value: Any, what: str, *, next: str, error: type[UserError] = UserError) -> str:
    """Likewise, of any size."""
    try:
        return json.dumps(value, default=_number, allow_nan=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as cause:
        raise error(what, got=str(cause), wanted="what JSON can write, without NaN", next=next) from cause


def check_facts(known: Mapping[str, str], *, new: str, who: str) -> None:
    """By name, as JSON. Raises UserError: with the new one `who` has shared more than a job keeps."""
    nbytes = sum(len(name) + len(text) for name, text in known.items())
    if nbytes > FACTS_BYTES:
        raise UserError(
            f"{who} shares more facts than a job keeps, the last is {new[:80]!r}",
            got=f"{nbytes} bytes in {len(known)}", wanted=f"at most {FACTS_BYTES} of all roles",
            next="share once what others need to load; what goes from step to step has channels",
        )  # fmt: skip


def _number(value: Any) -> int | float:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} {ascii(value)[:60]}")
