"""How one tensor is divided over the ranks of a mesh, and which box of it each rank has. Pure; imports no torch.

For: planning (what goes where) and tensors (a DTensor is understood by what it says of itself). The rule is
torch's: a dimension of n over k ranks is cut into pieces of ceil(n / k), so that the last ones are shorter or empty.

    >>> [box(Sharding(shape=(5, 3), mesh=(3,), dims=(0,)), rank) for rank in range(3)]
    [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 5), (0, 3))]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import msgspec

from rlinf_api.errors import UserError

Box = tuple[tuple[int, int], ...]
"""(from, to) in each dimension. A plain number has no dimensions, and is a box of one element."""


class Sharding(msgspec.Struct, array_like=True, frozen=True):
    """`shape` of the whole tensor; for each mesh dimension the tensor dimension that it cuts, None where it repeats.

    Ranks are numbered row-major over `mesh`, as torch's init_device_mesh numbers them.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...] = ()
    dims: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        wrong = [d for d in self.dims if d is not None and not 0 <= d < len(self.shape)]
        if len(self.mesh) != len(self.dims) or wrong or any(k < 1 for k in self.mesh) or any(n < 0 for n in self.shape):
            raise UserError(
                "a sharding that cannot be", got=f"shape {self.shape}, mesh {self.mesh}, dims {self.dims}",
                wanted="a dimension of the tensor, or None, for each dimension of the mesh",
            )  # fmt: skip

    @property
    def ranks(self) -> int:
        return prod(self.mesh)


def box(sharding: Sharding, rank: int) -> Box:
    """What `rank` has. Mesh dimensions cut one after the other, each what the one before has left."""
    found = [(0, n) for n in sharding.shape]
    for at, (size, dim) in enumerate(zip(sharding.mesh, sharding.dims, strict=True)):
        index = rank // prod(sharding.mesh[at + 1 :]) % size
        if dim is not None:
            start, end = found[dim]
            piece = -(-(end - start) // size)
            found[dim] = (min(start + index * piece, end), min(start + (index + 1) * piece, end))
    return tuple(found)


def shape_of(found: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in found)


def common(one: Box, other: Box) -> Box | None:
    """What both have; None where nothing."""
    out = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(a >= b for a, b in out) else out


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, of a dense row-major array.

    >>> strides((2, 3, 4))
    (12, 4, 1)
    """
    out = [1]
    for n in reversed(shape[1:]):
        out.append(out[-1] * n)
    return tuple(reversed(out)) if shape else ()


def of_dtensor(tensor: Any) -> Sharding | None:
    """What a torch DTensor says of itself; None for anything else. Recognised by name: nothing is imported for it."""
    if type(tensor).__name__ != "DTensor":
        return None
    dims: list[int | None] = []
    for placement in tensor.placements:
        kind = type(placement).__name__
        if kind not in ("Shard", "Replicate"):
            raise UserError(
                f"weights with placement {placement} cannot be published",
                wanted="Shard(dim) or Replicate() for each dimension of the mesh",
                next="redistribute them first, or publish full_tensor()",
            )
        dims.append(int(placement.dim) if kind == "Shard" else None)
    mesh = tuple(int(n) for n in tensor.device_mesh.shape)
    ranks = [int(r) for r in tensor.device_mesh.mesh.flatten().tolist()]
    if any(b - a != 1 for a, b in pairwise([-1, *ranks])):
        raise UserError(
            "weights on a part of a mesh cannot be published", got=f"ranks {ranks}",
            wanted="all ranks of the gang, in order", next="publish full_tensor()",
        )  # fmt: skip
    return Sharding(shape=tuple(int(n) for n in tensor.shape), mesh=mesh, dims=tuple(dims))
