"""What a role writes on what it puts: key, step, branch, weight and version, checked where it puts. Pure.

These go into the head of a message to a peer and into what the driver is told: what cannot be written there would break
a link, or the stream to the driver, long after `put` has returned.

Integers and numbers of numpy are taken for what they are; nothing else is guessed at.
"""

from __future__ import annotations

from math import inf
from numbers import Integral, Real
from typing import Any, Final, NamedTuple

from rlinf_worker.channels.protocol import FIRST_VERSION, PolicyVersion
from rlinf_worker.links.errors import PayloadError

MAX_KEY_CHARS: Final = 4096
"""The driver keeps the key of each unit, and tells it some five times. The longest of the roles here has 40."""

_INT32, _INT64 = 1 << 31, 1 << 63


class LabelError(PayloadError):
    """An item whose payload can be sent, but not what is written on it. The channel goes on."""


class StaleVersion(LabelError):
    """A unit that was made with older weights than its step may be trained on."""


class Labels(NamedTuple):
    key: str
    step: int
    branch: int
    weight: float
    version: PolicyVersion


def checked(channel: str, *, key: Any, step: Any, branch: Any, weight: Any, version: PolicyVersion | None) -> Labels:
    """As plain values. Raises LabelError, with the place.

    >>> checked("units", key="a", step=3, branch=0, weight=2, version=None).weight
    2.0
    """
    version = FIRST_VERSION if version is None else version
    if type(key) is not str or not key.isascii() or len(key) > MAX_KEY_CHARS:
        key = _key(channel, key)
    if type(step) is not int or not -_INT64 <= step < _INT64:
        step = _integer(channel, key, "step", step, bits=64)
    if type(branch) is not int or not -_INT32 <= branch < _INT32:
        branch = _integer(channel, key, "branch", branch, bits=32)
    if type(weight) is not float or not 0.0 <= weight < inf:
        weight = _weight(channel, key, weight)
    if version is not FIRST_VERSION:
        version = _version(channel, key, version)
    return Labels(key, step, branch, weight, version)


def check_age(channel: str, *, key: str, step: int, version: PolicyVersion, oldest: PolicyVersion) -> None:
    """Raises StaleVersion. `oldest`: that may have made a unit of this step."""
    if version < oldest:
        raise StaleVersion(
            f"unit {ascii(key)[:80]} of channel {channel!r} is made with weights that are too old for step {step}",
            got=f"version {version}", wanted=f"{oldest} or newer, by spec.flow.maxStaleness",
            next="make it with await ctx.weights.pull(ticket.version); where other weights made it, say version=...",
        )  # fmt: skip


def _key(channel: str, key: Any) -> str:
    wanted, next = f"a str of at most {MAX_KEY_CHARS} characters", "name the item by less"
    if not isinstance(key, str):
        raise _refusal(channel, key, "key", key, wanted=wanted, next="use str(...)")
    plain = str.__str__(key)  # also where it is of a subclass: what decodes a head gives a str
    if len(plain) > MAX_KEY_CHARS:
        raise _refusal(channel, key, "key", key, wanted=wanted, next=next, got=f"{len(key)} characters")
    try:
        plain.encode()
    except UnicodeEncodeError as err:
        got = f"{ascii(key)[:80]}, whose character {err.start} is half of a pair"
        next = "decode its bytes with another error handler"
        raise _refusal(channel, key, "key", key, wanted="text that UTF-8 can write", next=next, got=got) from None
    return plain


def _integer(channel: str, key: str, place: str, value: Any, *, bits: int) -> int:
    bound = 1 << bits - 1
    if not isinstance(value, bool) and isinstance(value, Integral) and -bound <= int(value) < bound:
        return int(value)
    raise _refusal(channel, key, place, value, wanted=f"an int of {bits} bits", next=f"pass {place}=int(...)")


def _weight(channel: str, key: str, value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            if 0.0 <= (number := float(value)) < inf:
                return number
        except OverflowError:
            pass  # above the largest float: told as all others are
    raise _refusal(
        channel, key, "weight", value, wanted="a number from 0 on, neither infinite nor NaN",
        next="pass what the unit counts, as its tokens that are trained on; 0 for none",
    )  # fmt: skip


def _version(channel: str, key: str, value: Any) -> PolicyVersion:
    if not isinstance(value, PolicyVersion):
        raise _refusal(channel, key, "version", value, wanted="a PolicyVersion", next="pass the version that made it")
    return PolicyVersion(
        _integer(channel, key, "version.branch", value.branch, bits=32),
        _integer(channel, key, "version.number", value.number, bits=64),
    )


def _refusal(channel: str, key: Any, place: str, value: Any, *, wanted: str, next: str, got: str = "") -> LabelError:
    what = f"the {place} of item {ascii(key)[:80]} of channel {channel!r} cannot be sent"
    return LabelError(what, got=got or f"{type(value).__name__} {ascii(value)[:80]}", wanted=wanted, next=next)
