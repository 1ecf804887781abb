"""One version of the weights: at its source (`Edition`), and where it arrives (`Assembly`). Pure but for memory.

For: receiver and subscribers, which receive and send. Not for: which bytes go where (planning), memory that others may
map (arena), names and layouts of a model (roles), the order of versions (the driver).

    tensors ──Edition.fill()──► arena ──parts, hashes──► link ──Assembly.add()──► arena ──► {name: array}

Each part has an xxh3 over its bytes, made while they are copied and checked where they arrive; a version's checksum is
over catalog, plain values and all parts' hashes, so it is one number wherever the same view of it is. Whoever has a
part can pass it on: an assembly serves others of its view, finished or not (`Holding`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import xxhash

from rlinf_api.errors import RetryableError, UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.weights import copying, layout, planning, tensors
from rlinf_worker.weights.arena import Arena
from rlinf_worker.weights.planning import RankMemory, TensorEntry, TensorPart

PART_BYTES: Final = 4 << 20
"""Large enough that a message's head costs nothing, small enough that copying, hashing and sending overlap and that
items of other channels wait for one part only (1 ms)."""

DELTA_BYTES: Final = 64 << 10
"""Part of a version that goes as a delta: a changed row of an embedding costs 64 KiB, and a hash per 64 KiB takes a
tenth more time than one per 4 MiB."""

CHUNK_BYTES: Final = copying.PAST_CACHE_BYTES
"""Copied and hashed at a time: the hash reads what the copy has read, from the second-level cache (2 MB per core here).
In the other order it takes a fifth longer: the copy fetches two pages of memory at once, the hash one."""

MAX_RUNS_SENT: Final = 32  # buffers of one part; more are packed first, as each costs 24 bytes and a call

Ranges = Sequence[tuple[int, int]]
"""(offset, bytes) in somebody's arena, in the order in which they travel."""


class SchemaChanged(UserError):
    """Other names, shapes or dtypes than the version before, or than the receiver has room for."""


class WeightsCorrupt(RetryableError):
    """Received bytes are not those that were published."""


Schema = list[tuple[str, str, list[int]]]


def schema_of(catalog: Sequence[TensorEntry]) -> Schema:
    return [(e.name, e.dtype, list(e.sharding.shape)) for e in catalog]


def differences(before: Schema, now: Schema, *, limit: int = 10) -> list[str]:
    """In words; empty where they are the same.

    >>> differences([("w", "float32", [2, 3])], [("w", "float32", [2, 4]), ("b", "float32", [4])])
    ['w is float32[2, 4], was float32[2, 3]', 'b is new']
    """
    old, new = ({name: (dtype, shape) for name, dtype, shape in s} for s in (before, now))
    found = []
    for name, (dtype, shape) in new.items():
        if name not in old:
            found.append(f"{name} is new")
        elif old[name] != (dtype, shape):
            found.append(f"{name} is {dtype}{shape}, was {old[name][0]}{old[name][1]}")
    found += [f"{name} is missing" for name in old if name not in new]
    if not found and [n for n, _, _ in before] != [n for n, _, _ in now]:
        found.append("the order of the names is another")
    rest = len(found) - limit
    return found[:limit] + ([f"and {rest} more"] if rest > 0 else [])


def check_schema(before: Schema, now: Schema, *, version: PolicyVersion) -> None:
    if found := differences(before, now):
        raise SchemaChanged(
            f"weights {version} do not have the tensors of the version before", got="; ".join(found),
            wanted="the same names, dtypes and shapes in every version", next="start a new job for another model",
        )  # fmt: skip


def check_targets(into: Mapping[str, Any], found: Mapping[str, Any], *, version: PolicyVersion) -> None:
    """Whether these tensors can be set to those of the version, before any is."""

    def schema(values: Mapping[str, Any]) -> Schema:
        return [
            (name, tensors.dtype_of(v, name=name)[0].removeprefix(tensors.TORCH), [*getattr(v, "shape", ())])
            for name, v in sorted(values.items())
        ]

    check_schema(schema(into), schema(found), version=version)


def copy_all(into: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, target in into.items():
        tensors.copy_into(target, found[name])


def arrays_over(
    memory: memoryview, entries: Sequence[TensorEntry], lies: RankMemory, plain: Mapping[str, Any]
) -> dict[str, Any]:
    out = dict[str, Any]()
    for entry, box, at in zip(entries, lies.boxes, lies.offsets, strict=True):
        if entry.itemsize:
            tensor = memory[at : at + planning.nbytes_of(entry, box)]
            out[entry.name] = tensors.over(tensor, entry, layout.shape_of(box))
        else:
            out[entry.name] = plain[entry.name]
    return out


def combine(catalog: bytes, plain: Mapping[str, Any], hashes: Sequence[int]) -> int:
    """The checksum of a version."""
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([catalog, sorted(plain.items()), list(hashes)]))


def buffers_of(memory: memoryview, ranges: Ranges) -> list[memoryview]:
    if len(ranges) <= MAX_RUNS_SENT:
        return [memory[at : at + n] for at, n in ranges]
    return [memoryview(b"".join([memory[at : at + n] for at, n in ranges]))]


def hash_ranges(memory: memoryview, ranges: Ranges) -> int:
    if len(ranges) == 1:
        at, n = ranges[0]
        return xxhash.xxh3_64_intdigest(memory[at : at + n])
    digest = xxhash.xxh3_64()
    for at, n in ranges:
        digest.update(memory[at : at + n])
    return digest.intdigest()


class Opened:
    """Bytes on the host of the tensors that are being published, each as long as part of it is still to be copied, for
    the threads that fill an edition. Of a tensor on the host they are a view, of one on a device a copy: of a whole
    model at once that would be its size once more, beside the arena."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values
        self._here: dict[int, memoryview] = {}
        self._left_bytes: dict[int, int] = {}  # what of these is not copied yet
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self._here.values())

    def open(self, number: int) -> memoryview:
        with self._lock:  # two threads come to the same tensor
            source = self._here.get(number)
            if source is None:
                source = self._here[number] = tensors.bytes_of(self._values[number])
                self._left_bytes[number] = source.nbytes
            return source

    def copied(self, nbytes: Mapping[int, int]) -> None:
        """So much of each has been copied."""
        with self._lock:
            for number, size in nbytes.items():
                self._left_bytes[number] -= size
                if not self._left_bytes[number]:
                    self._here.pop(number, None)


class Edition:
    """What one rank publishes of a version: its shards, copied once: `lie_in` an arena, `fill` it, `finish`. What is
    filled can be sent meanwhile."""

    def __init__(self, version: PolicyVersion, values: Mapping[str, Any], *, rank: int, part_bytes: int) -> None:
        entries, locals_, self.plain = [], [], dict[str, Any]()
        for name, value in values.items():
            local, sharding = tensors.open_up(value, rank=rank, name=name)
            dtype, itemsize = tensors.dtype_of(local, name=name)
            entries.append(TensorEntry(name, dtype, itemsize, sharding))
            locals_.append(local)
            if not itemsize:
                self.plain[name] = local
        self.version, self.rank, self.part_bytes = version, rank, part_bytes
        self.entries = tuple(entries)
        self.catalog = msgspec.msgpack.encode(self.entries)
        self._source = planning.source_of(self.catalog, rank, part_bytes=part_bytes)
        self.memory, self.sources, self.is_whole = self._source.memory, self._source.sources, self._source.is_whole
        self.dead = False
        self.arena: Arena | None = None
        self._opened: Opened | None = Opened(locals_)  # None: all of it is in the arena
        self._filled_parts = 0
        self._hashes: dict[bytes, dict[int, int]] = {}
        self._own = self._source.parts
        self._own_hashes: list[int | None] = [None] * len(self._own)
        self._memory = memoryview(b"")

    @property
    def schema(self) -> Schema:
        return schema_of(self.entries)

    @property
    def complete(self) -> bool:
        return self._opened is None

    @property
    def hashes(self) -> list[int]:
        return [h for h in self._own_hashes if h is not None]

    @property
    def _filled(self) -> int:
        """Everything of the memory below this is there."""
        parts = self._filled_parts
        while parts < len(self._own) and self._own_hashes[parts] is not None:
            parts += 1
        self._filled_parts = parts  # set at once: two threads may be asking
        return self._own[parts - 1].source_end if parts else 0

    @property
    def checksum(self) -> int:
        """The checksum of what this rank publishes; where it publishes everything, the version's."""
        return combine(self.catalog, self.plain, self.hashes)

    def lie_in(self, arena: Arena) -> None:
        self.arena, self._memory = arena, arena.lend()

    def fill(self, first: int = 0, step: int = 1, *, filled: Callable[[], None] = lambda: None) -> None:
        """Copies every `step`th part from `first` on into the arena, hashing each as it goes, perhaps in a thread;
        `filled` after each few MiB. Ends early when dead."""
        since = 0
        for index in range(first, len(self._own), step):
            if self.dead:
                return
            self._fill_part(index)
            since += self._own[index].nbytes
            if since >= PART_BYTES:
                since = 0
                filled()
        filled()

    def finish(self) -> None:
        """All parts are there: nothing of the values is kept."""
        self._opened, self._memory = None, memoryview(b"")

    def _fill_part(self, index: int) -> None:
        """Chunk by chunk, so that the hash finds in the cache what the copy has read. It is over what was given: a
        value that changes meanwhile, or a copy gone wrong, is found at the receiver."""
        opened = self._opened
        assert opened is not None
        digest, memory = xxhash.xxh3_64(), self._memory
        done: dict[int, int] = {}
        for at, _, left in self._own[index].runs:
            while left:
                start, tensor = self._source.tensor_at(at)
                source = opened.open(tensor)
                size = min(left, CHUNK_BYTES, start + source.nbytes - at)
                here = source[at - start : at - start + size]
                copying.copy_bytes(memory[at : at + size], here)
                digest.update(here)
                at, left = at + size, left - size
                done[tensor] = done.get(tensor, 0) + size
        self._own_hashes[index] = digest.intdigest()
        opened.copied(done)

    # --- as a Holding -------------------------------------------------------------------------------------------------
    def has_hashes(self, view: bytes) -> bool:
        """Whether there are hashes of what is here. Else they are made when they are asked for, which takes as long as
        reading it."""
        return self.is_whole and view == planning.RAW_WHOLE

    def _parts(self, view: bytes) -> list[TensorPart]:
        return planning.parts_of(self.catalog, view, sources=self.sources, part_bytes=self.part_bytes)

    def numbers(self, view: bytes) -> Sequence[int]:
        """The numbers of the parts that can be had here."""
        return planning.by_source(self._parts(view)).get(self.rank, range(0))

    def hash_of(self, view: bytes, index: int) -> int | None:
        """None: not here yet."""
        if self.has_hashes(view):
            return self._own_hashes[index]
        known = self._hashes.setdefault(view, {})
        found = known.get(index)
        if found is None:
            part = self._parts(view)[index]
            if part.source_end > self._filled:
                return None
            assert self.arena is not None
            found = known[index] = hash_ranges(self.arena.memory, self.ranges(view, index))
        return found

    def ranges(self, view: bytes, index: int) -> Ranges:
        return [(at, n) for at, _, n in self._parts(view)[index].runs]

    def maps_to(self, view: bytes) -> bool:
        """Whether the arena can be read for this view, part by part."""
        return True


class Assembly:
    """A version on its way in, or in. `add` and `end` say when it is whole; then `arrays()`.

    Its memory is of its own, or, where one source has just what is wanted (`adopted`), the source's, mapped.
    """

    rank = -1  # as a Holding: its parts are of every source

    def __init__(
        self, version: PolicyVersion, *, catalog: bytes, view: bytes, plain: dict[str, Any], sources: int,
        part_bytes: int,
    ) -> None:  # fmt: skip
        self.version, self.catalog, self.view, self.plain = version, catalog, view, plain
        self.sources, self.part_bytes = sources, part_bytes
        self.entries = planning.catalog_of(catalog)
        self.parts = planning.parts_of(catalog, view, sources=sources, part_bytes=part_bytes)
        self.memory = planning.view_memory(self.entries, planning.view_of(view))
        self.is_whole = planning.is_identity(self.entries, planning.view_of(view), sources=sources)
        self.arena: Arena | None = None
        self.adopted = False
        self.dead = False
        self.hashes: list[int | None] = [None] * len(self.parts)
        self.left = len(self.parts)
        self.nbytes = 0
        self._ended: set[int] = set()
        self._memory: memoryview | None = None
        self._by_source = planning.by_source(self.parts)

    @property
    def schema(self) -> Schema:
        return schema_of(self.entries)

    @property
    def complete(self) -> bool:
        return not self.left and (-1 in self._ended or all(s in self._ended for s in range(self.sources)))

    @property
    def checksum(self) -> int:
        return combine(self.catalog, self.plain, [h for h in self.hashes if h is not None])

    @property
    def lent(self) -> memoryview:
        """The memory that it writes and reads; lent, so that it is not taken for another version meanwhile."""
        if self._memory is None:
            assert self.arena is not None
            self._memory = self.arena.lend()
        return self._memory

    def add(self, index: int, expected: int, found: Iterator[memoryview]) -> None:
        """Copies one part's bytes to where they belong and checks them there. Raises WeightsCorrupt."""
        part, memory = self.parts[index], self.lent
        piece, at, digest = memoryview(b""), 0, xxhash.xxh3_64()
        for _, here, left in part.runs:
            while left:
                if at == piece.nbytes:
                    piece, at = next(found, memoryview(b"")), 0
                    if not piece.nbytes:
                        raise self._corrupt(index, got=f"fewer than its {part.nbytes} bytes")
                size = min(left, piece.nbytes - at, CHUNK_BYTES)
                found_here = piece[at : at + size]
                copying.copy_bytes(memory[here : here + size], found_here)
                digest.update(found_here)
                here, at, left = here + size, at + size, left - size
        self._found(index, digest.intdigest(), expected)

    def check(self, index: int, expected: int) -> None:
        """The part's bytes are in place. Raises WeightsCorrupt."""
        self._found(index, hash_ranges(self.lent, self.ranges(self.view, index)), expected)

    def _found(self, index: int, got: int, expected: int) -> None:
        if got != expected:
            raise self._corrupt(index, got=f"checksum {got:016x}", wanted=f"{expected:016x}")
        if self.hashes[index] is None:
            self.left -= 1
            self.nbytes += self.parts[index].nbytes
        self.hashes[index] = expected

    def _corrupt(self, index: int, *, got: str, wanted: str = "") -> WeightsCorrupt:
        return WeightsCorrupt(f"part {index} of weights {self.version} is damaged", got=got, wanted=wanted)

    def end(self, source: int, checksum: int) -> None:
        """Raises WeightsCorrupt, also where a part of that source has not come."""
        numbers = range(len(self.parts)) if source < 0 else self._by_source.get(source, range(0))
        hashes = [self.hashes[i] for i in numbers]
        found = combine(self.catalog, self.plain, [h for h in hashes if h is not None])
        if None in hashes or found != checksum:
            raise WeightsCorrupt(
                f"weights {self.version} are not what was published", got=f"checksum {found:016x}",
                wanted=f"{checksum:016x}",
            )  # fmt: skip
        self._ended.add(source)

    def arrays(self) -> dict[str, Any]:
        """Over the memory into which they were received: nothing is copied. Others are served from it."""
        return arrays_over(self.lent, self.entries, self.memory, self.plain)

    def lie_in(self, arena: Arena, *, adopted: bool = False) -> None:
        """In one that was taken for it, or in the source's memory, where that is laid out as this is to be."""
        self.arena, self.adopted = arena, adopted
        arena.held += adopted

    def let_go(self) -> None:
        """Gives the memory back, as far as this object is concerned; arrays over it keep it."""
        self.dead, self._memory = True, None
        if self.arena is not None:
            self.arena.held -= 1

    # --- as a Holding -------------------------------------------------------------------------------------------------
    def has_hashes(self, view: bytes) -> bool:
        return True

    def numbers(self, view: bytes) -> Sequence[int]:
        return range(len(self.parts)) if view == self.view else range(0)

    def hash_of(self, view: bytes, index: int) -> int | None:
        return self.hashes[index]

    def ranges(self, view: bytes, index: int) -> Ranges:
        return [(here, n) for _, here, n in self.parts[index].runs]

    def maps_to(self, view: bytes) -> bool:
        return view == self.view


Holding = Edition | Assembly
"""A version that can be passed on, as far as it is here. By subscribers."""
