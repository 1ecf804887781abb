"""Kubernetes quantities ("8Gi", "500m", 2) as numbers. Pure; for the manifests, the planner and the local backend."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from rlinf_api.errors import InvalidManifest

_SUFFIX: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "E": Decimal(10) ** 18,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
    "Ei": Decimal(2) ** 60,
}
PATTERN: Final = r"^[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[numkMGTPE]|[KMGTPE]i)?$"
MOST: Final = 2**63 - 1
"""No quantity means more: Kubernetes has none above, and whoever reads one calculates with its digits."""
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:([eE][0-9]{1,2})|([numkMGTPE]|[KMGTPE]i))?")
_MAX_LENGTH: Final = 64  # what is read at all; the models have 24


def parse(quantity: str | int | float, *, field: str = "quantity") -> Decimal:
    """The number a quantity means, in its base unit (bytes, cores). InvalidManifest where it is none.

    >>> parse("8Gi"), parse("500m"), parse(2)
    (Decimal('8589934592'), Decimal('0.500'), Decimal('2'))
    """
    found = _number(str(quantity).strip())
    if found is None:
        raise InvalidManifest(
            f"{field} is not a Kubernetes quantity", got=repr(quantity)[:_MAX_LENGTH],
            wanted=f"a number with an optional suffix, at most {MOST}", next="write for example 2, 500m or 8Gi",
        )  # fmt: skip
    return found


def checked(quantity: str) -> str:
    """The text itself; ValueError with a sentence where it is no quantity."""
    if _number(quantity) is None:
        raise ValueError(f"got {quantity!r}, wanted a quantity of at most {MOST}; write for example 2, 500m or 2Gi")
    return quantity


def is_within(quantity: str, *, least: Decimal, most: int) -> bool:
    """Whether it is a quantity between the two, both included."""
    found = _number(quantity.strip())
    return found is not None and least <= found <= most


def to_bytes(quantity: str | int, *, field: str = "memory") -> int:
    return int(parse(quantity, field=field))


def from_bytes(count: int) -> str:
    """The shortest exact spelling with a binary suffix.

    >>> from_bytes(2 << 30), from_bytes(1536 << 20), from_bytes(1000)
    ('2Gi', '1536Mi', '1000')
    """
    for suffix in ("Gi", "Mi", "Ki"):
        unit = int(_SUFFIX[suffix])
        if count and count % unit == 0:
            return f"{count // unit}{suffix}"
    return str(count)


def _number(text: str) -> Decimal | None:
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LENGTH and text.isascii() else None
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    found = Decimal(number + (exponent or "")) * _SUFFIX[suffix or ""]
    return found if found <= MOST else None
