"""One version of the weights as it travels: schema, buckets, checksums; and its assembly at a receiver. Pure.

For: runtime.weights, which sends and receives. Not for: names and layouts of a model (roles), nor the order of versions
(the driver). Imports neither numpy nor torch: a tensor is whatever the payload codec takes and has shape and dtype.

    tensors ──make()──► Edition: [bucket <= 4 MiB, ...] ──link──► Assembly.head(), .bucket() ... ──► {name: tensor}

Checksums are xxh3 over the very bytes that travel: over each bucket as it comes, and over all of them with the schema,
so that a version has one number wherever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import xxhash

from rlinf_api.errors import RetryableError, UserError
from rlinf_worker.channels import frames
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.links import payload

BUCKET_BYTES: Final = 4 << 20
"""Large enough that a bucket's head costs nothing, small enough that copying, hashing and sending overlap and that
items of other channels wait for one bucket only (1 ms)."""

Schema = list[tuple[str, str, list[int]]]


class SchemaChanged(UserError):
    """Other names, shapes or dtypes than the version before."""


class WeightsCorrupt(RetryableError):
    """Received bytes are not those that were sent."""


def schema_of(tensors: Mapping[str, Any]) -> Schema:
    """(name, dtype, shape) of each, in the mapping's order. Plain numbers have no shape."""
    return [
        (name, str(getattr(t, "dtype", type(t).__name__)), [int(n) for n in getattr(t, "shape", ())])
        for name, t in tensors.items()
    ]


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


@dataclass(frozen=True, slots=True)
class Bucket:
    body: bytes
    buffers: Sequence[Any]
    count: int
    checksum: int


def checksum_of(body: bytes | memoryview, buffers: Sequence[Any]) -> int:
    digest = xxhash.xxh3_64(body)
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def _checksum_of_all(schema: Schema, parts: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([schema, list(parts)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edition:
    """A version ready to be sent, any number of times. Views the tensors it was made of."""

    version: PolicyVersion
    schema: Schema
    buckets: tuple[Bucket, ...]
    checksum: int
    nbytes: int

    def head(self) -> frames.WeightsHead:
        return frames.WeightsHead(
            self.version.branch, self.version.number, len(self.buckets), self.checksum, self.schema
        )

    def bucket_head(self, index: int) -> frames.WeightsBucket:
        bucket = self.buckets[index]
        return frames.WeightsBucket(self.version.branch, self.version.number, index, bucket.count, bucket.checksum)


def make(version: PolicyVersion, tensors: Mapping[str, Any], *, bucket_bytes: int = BUCKET_BYTES) -> Edition:
    """Raises PayloadError for what cannot travel."""
    schema = schema_of(tensors)
    groups: list[list[Any]] = []
    room = 0
    for tensor in tensors.values():
        nbytes = int(getattr(tensor, "nbytes", 8))
        if not groups or nbytes > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(tensor)
        room -= nbytes
    buckets = []
    total = 0
    for group in groups:
        body, buffers = payload.encode(group)
        buckets.append(Bucket(body, buffers, len(group), checksum_of(body, buffers)))
        total += len(body) + sum(buffer.nbytes for buffer in buffers)
    checksum = _checksum_of_all(schema, [bucket.checksum for bucket in buckets])
    return Edition(version=version, schema=schema, buckets=tuple(buckets), checksum=checksum, nbytes=total)


class Assembly:
    """One version on its way in, from one sender. A new head begins anew."""

    def __init__(self, head: frames.WeightsHead) -> None:
        self.version = PolicyVersion(head.branch, head.number)
        self.schema, self.checksum = head.schema, head.checksum
        self._expected = head.buckets
        self._parts: list[int] = []
        self._tensors: list[Any] = []
        self.nbytes = 0

    def add(self, frame: frames.WeightsBucket, body: bytes | memoryview, buffers: Sequence[Any]) -> bool:
        """True: the version is complete. Copies, so that nothing of a link's memory is kept. Raises WeightsCorrupt."""
        if PolicyVersion(frame.branch, frame.number) != self.version or frame.index != len(self._parts):
            raise WeightsCorrupt(
                f"bucket {frame.index} of weights b{frame.branch}-{frame.number} is out of order",
                wanted=f"bucket {len(self._parts)} of {self.version}",
            )
        copies = [memoryview(bytearray(buffer)) for buffer in buffers]
        found = checksum_of(body, copies)
        if found != frame.checksum:
            raise WeightsCorrupt(
                f"bucket {frame.index} of weights {self.version} is damaged", got=f"checksum {found:016x}",
                wanted=f"{frame.checksum:016x}",
            )  # fmt: skip
        self._tensors += payload.decode(body, copies)
        self._parts.append(found)
        self.nbytes += len(body) + sum(copy.nbytes for copy in copies)
        return len(self._parts) == self._expected

    def finish(self) -> dict[str, Any]:
        """The tensors by name. Raises WeightsCorrupt."""
        found = _checksum_of_all(self.schema, self._parts)
        if found != self.checksum or len(self._tensors) != len(self.schema):
            raise WeightsCorrupt(
                f"weights {self.version} are not what was published", got=f"checksum {found:016x}",
                wanted=f"{self.checksum:016x}",
            )  # fmt: skip
        return {name: tensor for (name, _, _), tensor in zip(self.schema, self._tensors, strict=True)}
