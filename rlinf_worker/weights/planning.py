"""Which bytes of which source rank go to which bytes of a receiver. Pure, and the same at both ends.

For: edition, which sends and takes parts by their number. Neither end gathers: a part comes from the one rank that is
to give it, and its runs say where its bytes lie at the source and where they belong.

    catalog (names, dtypes, shardings of the sources) + view (what the receiver wants) ──plan()──> Part, Part, ...

Each rank's tensors lie one behind the other in one memory, each at a multiple of 64, whether it is a source's or a
receiver's (`RankMemory`). Where several ranks hold the same bytes (Replicate), the one gives that has given least so
far.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import Any, Final

import msgspec

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights import layout
from rlinf_worker.weights.layout import Box, Sharding

ALIGN: Final = 64
"""A cache line, and what vector instructions want of an array."""

PLANS_KEPT: Final = 16

Run = tuple[int, int, int]
"""(offset at the source, offset at the receiver, bytes)."""


class TensorEntry(msgspec.Struct, array_like=True, frozen=True):
    """One tensor of a version: all that both ends must agree on."""

    name: str
    dtype: str
    itemsize: int
    sharding: Sharding


class View(msgspec.Struct, array_like=True, frozen=True):
    """What a receiver wants: by name its sharding over the receivers' mesh, and its rank there. A name that is not
    listed is wanted whole.

    >>> View(1, {"w": Sharding(shape=(4, 6), mesh=(2,), dims=(1,))}).box("w", (4, 6))
    ((0, 4), (3, 6))
    """

    rank: int = 0
    shardings: dict[str, Sharding] = {}

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        sharding = self.shardings.get(name)
        if sharding is None:
            return tuple((0, n) for n in shape)
        if sharding.shape != shape:
            raise UserError(
                f"the receiver's view of {name} is of another tensor", got=f"shape {sharding.shape}",
                wanted=f"{shape}, as it is published", next="give the view the shape of the whole tensor",
            )  # fmt: skip
        return layout.box(sharding, self.rank)


WHOLE: Final = View()


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where each tensor of one rank lies: its box and its offset, in the catalog's order."""

    boxes: tuple[Box, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, catalog: tuple[TensorEntry, ...], boxes: tuple[Box, ...]) -> RankMemory:
        offsets, at = [], 0
        for entry, box in zip(catalog, boxes, strict=True):
            offsets.append(at)
            at += nbytes_of(entry, box)
            at += -at % ALIGN
        return cls(boxes, tuple(offsets), at)


def nbytes_of(entry: TensorEntry, box: Box) -> int:
    return prod(layout.shape_of(box)) * entry.itemsize


def source_memory(catalog: tuple[TensorEntry, ...], rank: int) -> RankMemory:
    """A tensor over fewer ranks than the gang has is whole, or repeated, on the others."""
    return RankMemory.of(catalog, tuple(layout.box(e.sharding, rank % e.sharding.ranks) for e in catalog))


def view_memory(catalog: tuple[TensorEntry, ...], view: View) -> RankMemory:
    return RankMemory.of(catalog, tuple(view.box(e.name, e.sharding.shape) for e in catalog))


@dataclass(frozen=True)
class TensorPart:
    """What is hashed, sent and asked for as one: at most `part_bytes` from one source."""

    source: int
    runs: tuple[Run, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(n for _, _, n in self.runs)

    @cached_property
    def source_end(self) -> int:
        """The source must have filled its memory up to here."""
        return max(at + n for at, _, n in self.runs)


def _places(box: Box, within: Box, *, stepped: int, base: int, itemsize: int) -> Iterator[int]:
    """Where `box` begins in the memory of `within`, for each index of its first `stepped` dimensions."""
    strides = [itemsize * s for s in layout.strides(layout.shape_of(within))]
    first = base + sum((lo - start) * s for (lo, _), (start, _), s in zip(box, within, strides, strict=True))
    steps = product(*(range(0, n * s, s) for n, s in zip(layout.shape_of(box)[:stepped], strides, strict=False)))
    return (first + sum(step) for step in steps)


def _runs(box: Box, *, have: Box, want: Box, itemsize: int, bases: tuple[int, int]) -> Iterator[Run]:
    """`box` lies in both `have` and `want`. Dimensions that are whole on both sides melt into one run."""
    shape, there, here = layout.shape_of(box), layout.shape_of(have), layout.shape_of(want)
    dim = len(shape)
    while dim > 0 and shape[dim - 1] == there[dim - 1] == here[dim - 1]:
        dim -= 1
    stepped = max(dim - 1, 0)
    size = itemsize * prod(shape[stepped:])
    sources = _places(box, have, stepped=stepped, base=bases[0], itemsize=itemsize)
    targets = _places(box, want, stepped=stepped, base=bases[1], itemsize=itemsize)
    for at, to in zip(sources, targets, strict=True):
        yield at, to, size


def plan(catalog: tuple[TensorEntry, ...], view: View, *, sources: int, part_bytes: int) -> list[TensorPart]:
    """Every byte of the view exactly once, from whichever source has it: parts in the order in which a source fills its
    memory; at both ends the same, so that a number names one."""
    memories = [source_memory(catalog, rank) for rank in range(sources)]
    wanted = view_memory(catalog, view)
    given = [0] * sources
    runs: list[list[Iterator[Run]]] = [[] for _ in range(sources)]
    for index, entry in enumerate(catalog):
        want = wanted.boxes[index]
        holders: dict[Box, list[int]] = {}
        for rank, memory in enumerate(memories):
            holders.setdefault(memory.boxes[index], []).append(rank)
        for have, ranks in holders.items():
            box = layout.common(have, want)
            if box is None:
                continue
            rank = min(ranks, key=lambda r: (given[r], (r - view.rank) % sources))
            given[rank] += nbytes_of(entry, box)
            bases = memories[rank].offsets[index], wanted.offsets[index]
            runs[rank].append(_runs(box, have=have, want=want, itemsize=entry.itemsize, bases=bases))
    whole = sum(nbytes_of(e, b) for e, b in zip(catalog, wanted.boxes, strict=True))
    if sum(given) != whole:
        raise UserError(
            "the sources do not have all that a receiver wants", got=f"{sum(given)} bytes", wanted=f"{whole}",
            next="publish from every rank that holds a shard",
        )  # fmt: skip
    return [
        part
        for source, found in enumerate(runs)
        for part in _cut(chain.from_iterable(found), source, part_bytes=part_bytes)
    ]


def _cut(runs: Iterable[Run], source: int, *, part_bytes: int) -> Iterator[TensorPart]:
    held: list[Run] = []
    room = part_bytes
    for there, here, left in runs:
        while left:
            size = min(left, room)
            last = held[-1] if held else (-1, -1, 0)
            if last[0] + last[2] == there and last[1] + last[2] == here:
                held[-1] = (last[0], last[1], last[2] + size)
            else:
                held.append((there, here, size))
            there, here, left, room = there + size, here + size, left - size, room - size
            if not room:
                yield TensorPart(source, tuple(held))
                held, room = [], part_bytes
    if held:
        yield TensorPart(source, tuple(held))


def is_identity(catalog: tuple[TensorEntry, ...], view: View, *, sources: int) -> bool:
    """The receiver's memory is the source's, byte for byte."""
    return sources == 1 and view_memory(catalog, view) == source_memory(catalog, 0)


def by_source(parts: list[TensorPart]) -> Mapping[int, range]:
    """The numbers of each source's parts, which follow each other.

    >>> by_source([TensorPart(0, ()), TensorPart(0, ()), TensorPart(1, ())])
    {0: range(0, 2), 1: range(2, 3)}
    """
    found: dict[int, range] = {}
    for index, part in enumerate(parts):
        found[part.source] = range(found[part.source].start if part.source in found else index, index + 1)
    return found


@dataclass(frozen=True)
class RankSource:
    """What one rank publishes, and in which parts of its own memory, which its own checksum is over: the same in
    version after version."""

    memory: RankMemory
    sources: int
    is_whole: bool
    """It is all that a receiver of everything wants, and lies as there."""
    parts: list[TensorPart]
    starts: tuple[int, ...]
    """Where the tensors that have bytes begin; `tensors` is their number in the catalog."""
    tensors: tuple[int, ...]

    def tensor_at(self, offset: int) -> tuple[int, int]:
        """(where the tensor that has this byte starts, its number)."""
        found = bisect_right(self.starts, offset) - 1
        return self.starts[found], self.tensors[found]


# --- as they travel --------------------------------------------------------------------------------------------------
# Catalogs and views are bytes on the way, and the same ones in version after version: what follows from them is kept.


def raw_view(view: View) -> bytes:
    return msgspec.msgpack.encode(view, order="deterministic")


def view_of(raw: bytes) -> View:
    return msgspec.msgpack.decode(raw, type=View)


RAW_WHOLE: Final = raw_view(WHOLE)


@lru_cache(PLANS_KEPT)
def catalog_of(raw: bytes) -> tuple[TensorEntry, ...]:
    """Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(raw, type=tuple[TensorEntry, ...])


@lru_cache(PLANS_KEPT)
def parts_of(catalog: bytes, view: bytes, *, sources: int, part_bytes: int) -> list[TensorPart]:
    return plan(catalog_of(catalog), view_of(view), sources=sources, part_bytes=part_bytes)


@lru_cache(PLANS_KEPT)
def source_of(raw: bytes, rank: int, *, part_bytes: int) -> RankSource:
    catalog = catalog_of(raw)
    memory = source_memory(catalog, rank)
    sources = max([e.sharding.ranks for e in catalog], default=1)
    there = [
        (n, at, nbytes)
        for n, (entry, box, at) in enumerate(zip(catalog, memory.boxes, memory.offsets, strict=True))
        if (nbytes := nbytes_of(entry, box))
    ]
    return RankSource(
        memory, sources, is_identity(catalog, WHOLE, sources=sources),
        list(_cut(((at, at, nbytes) for _, at, nbytes in there), 0, part_bytes=part_bytes)),
        tuple(at for _, at, _ in there), tuple(n for n, _, _ in there),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LentWeights:
    """Where a version lies, and what is where in it: what weights/lending.py hands to child processes. Here, as the
    driver reads the protocol of roles, and has no library of checksums.

    LentWeights(version=PolicyVersion(0, 3), memory=(1203, 17, 25, 88121, 536870912), layout=RankMemory(...), plain={},
                entries=(TensorEntry("w", "torch.bfloat16", 2, Sharding((4096, 65536))),))
    """

    version: PolicyVersion
    memory: tuple[int, int, int, int, int]
    """`arena.Shared`."""
    entries: tuple[TensorEntry, ...]
    layout: RankMemory
    plain: Mapping[str, Any]
