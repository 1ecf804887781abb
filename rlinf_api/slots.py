"""Slots, the unit of placement (`pool/ordinal/index`), and ranges of them, so that 10,000 slots stay a small object.

A range is comma-separated terms `pool/ORDINAL/INDEX`, each part a number or `[a-b]`, expanded in the order written,
the last part fastest.

>>> [str(s) for s in expand("gpu/[0-1]/[2-3],cpu/0/0")]
['gpu/0/2', 'gpu/0/3', 'gpu/1/2', 'gpu/1/3', 'cpu/0/0']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rlinf_api.errors import InvalidManifest
from rlinf_api.names import WorkerId

_PART = re.compile(r"([0-9]{1,9})|\[([0-9]{1,9})-([0-9]{1,9})\]")  # no pool has more pods than nine digits count
MAX_SLOTS: Final = 100_000  # one range: a typing slip must not eat the machine's memory


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    pool: str
    ordinal: int
    index: int

    def __str__(self) -> str:
        return f"{self.pool}/{self.ordinal}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What a plan gives a worker besides its slots: bytes of each of them, which of its ways of working, how many
    tokens at once, whether it stays there while others have the turn. 0 and "": the plan does not say.

    Allotment(resident_bytes=20 << 30, peak_bytes=60 << 30, offloaded_bytes=1 << 30, kv_bytes=30 << 30, option="eager")
    """

    resident_bytes: int = 0
    peak_bytes: int = 0
    offloaded_bytes: int = 0
    kv_bytes: int = 0
    option: str = ""
    tokens: int = 0
    stays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """One worker of a plan. `rank` counts within its role; the roster of a gang is all of a role's workers."""

    id: WorkerId
    role: str
    rank: int
    world: int
    slots: tuple[Slot, ...]
    allotment: Allotment = Allotment()

    @property
    def pod(self) -> tuple[str, int]:
        return self.slots[0].pool, self.slots[0].ordinal


def _numbers(part: str, term: str) -> range:
    match = _PART.fullmatch(part)
    if match is None or (match[2] is not None and int(match[3]) < int(match[2])):
        raise InvalidManifest(
            f"slot range {term!r} has a part that is no number and no [a-b]", got=repr(part),
            wanted="for example gpu/[0-3]/[0-7]", next="write pool/ORDINAL/INDEX",
        )  # fmt: skip
    return range(int(match[1]), int(match[1]) + 1) if match[1] is not None else range(int(match[2]), int(match[3]) + 1)


def expand(text: str) -> tuple[Slot, ...]:
    """All slots of a range, in the order written. A slot named twice is an error."""
    slots: list[Slot] = []
    for term in filter(None, (t.strip() for t in text.split(","))):
        parts = term.split("/")
        if len(parts) != 3 or not parts[0]:
            raise InvalidManifest(
                "slot range has a term that is not pool/ORDINAL/INDEX", got=repr(term),
                wanted="for example gpu/[0-3]/[0-7]", next="separate terms by commas",
            )  # fmt: skip
        ordinals, indices = _numbers(parts[1], term), _numbers(parts[2], term)
        if len(slots) + len(ordinals) * len(indices) > MAX_SLOTS:
            raise InvalidManifest("slot range is too long", got=repr(term), wanted=f"at most {MAX_SLOTS} slots")
        slots.extend(Slot(parts[0], o, i) for o in ordinals for i in indices)
    seen: set[Slot] = set()
    for slot in slots:
        if slot in seen:
            raise InvalidManifest("slot range names a slot twice", got=str(slot), next=f"remove one from {text!r}")
        seen.add(slot)
    return tuple(slots)


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"


def compress(slots: Iterable[Slot]) -> str:
    """A short range that expands to exactly these slots in this order.

    >>> compress(expand("gpu/[0-3]/[0-7],cpu/0/1"))
    'gpu/[0-3]/[0-7],cpu/0/1'
    """
    runs: list[tuple[str, list[int], list[int]]] = []  # pool, ordinals, indices
    for slot in slots:
        last = runs[-1] if runs else None
        if last and last[0] == slot.pool and last[1] == [slot.ordinal] and slot.index == last[2][-1] + 1:
            last[2].append(slot.index)
        else:
            runs.append((slot.pool, [slot.ordinal], [slot.index]))
    merged: list[tuple[str, list[int], list[int]]] = []
    for pool, ordinals, indices in runs:
        last = merged[-1] if merged else None
        if last and last[0] == pool and last[2] == indices and ordinals[0] == last[1][-1] + 1:
            last[1].append(ordinals[0])
        else:
            merged.append((pool, ordinals, indices))
    return ",".join(f"{pool}/{_span(ordinals)}/{_span(indices)}" for pool, ordinals, indices in merged)


def for_workers(text: str, count: int, *, slots_per_worker: int, what: str) -> tuple[tuple[Slot, ...], ...]:
    """The slots of each of `count` workers: consecutive ones, all of one pod. `what` names the plan entry in errors."""
    slots = expand(text)
    if len(slots) != count * slots_per_worker:
        raise InvalidManifest(
            f"{what} needs {count} x {slots_per_worker} slots", got=f"{len(slots)} in {text!r}",
            next="change count or the range",
        )  # fmt: skip
    groups = tuple(slots[i * slots_per_worker : (i + 1) * slots_per_worker] for i in range(count))
    for number, group in enumerate(groups):
        if len({(s.pool, s.ordinal) for s in group}) != 1:
            raise InvalidManifest(
                f"{what}: the slots of worker {number} lie in several pods", got=", ".join(map(str, group)),
                wanted="slots of one pod", next="a worker is one process tree of one pod",
            )  # fmt: skip
    return groups
