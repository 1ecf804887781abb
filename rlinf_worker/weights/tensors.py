"""Tensors of whatever library as bytes, and back. Imports neither numpy nor torch: a value of theirs proves that they
are loaded, and what a peer's dtype names is imported when its first tensor is made.

For: edition. Not for: nested payloads (links.payload), nor for where bytes lie (planning).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.links import payload_arrays
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.weights import layout
from rlinf_worker.weights.layout import Sharding
from rlinf_worker.weights.planning import TensorEntry

PLAIN: Final = (bool, int, float, str)
TORCH: Final = "torch."
BYTES: Final = "bytes"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a tensor, as whatever kind of array the receivers shall get.

    >>> Shard(local, Sharding(shape=(4096, 4096), mesh=(4,), dims=(0,)))        # local is of shape (1024, 4096)
    """

    local: Any
    sharding: Sharding


def open_up(value: Any, *, rank: int, name: str) -> tuple[Any, Sharding]:
    """(this rank's array, how the whole is divided). Raises UserError where they contradict each other."""
    if isinstance(value, Shard):
        local, sharding = value.local, value.sharding
    elif (found := layout.of_dtensor(value)) is not None:
        local, sharding = value.to_local(), found
    elif isinstance(value, bytes):
        return value, Sharding(shape=(len(value),))
    else:
        return value, Sharding(shape=tuple(int(n) for n in getattr(value, "shape", ())))
    want = layout.shape_of(layout.box(sharding, rank))
    got = tuple(int(n) for n in local.shape)
    if got != want and prod(got) != prod(want):
        raise UserError(
            f"rank {rank}'s shard of {name} has another shape than its sharding says", got=str(got), wanted=str(want),
            next="cut as torch.chunk does, or publish whole tensors",
        )  # fmt: skip
    return local, sharding


def _is_torch(value: Any) -> bool:
    return type(value).__module__ in ("torch", "torch.nn.parameter")


def dtype_of(value: Any, *, name: str) -> tuple[str, int]:
    """("torch.bfloat16", 2), ("float32", 4), ("int", 0). Raises PayloadError for what cannot travel."""
    if isinstance(value, PLAIN):
        return type(value).__name__, 0
    if isinstance(value, bytes):
        return BYTES, 1
    if _is_torch(value):
        if value.is_quantized or str(value.layout) != "torch.strided":
            raise PayloadError(f"cannot publish {name}", got=f"layout {value.layout}", wanted="a dense tensor")
        return str(value.dtype), int(value.element_size())
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        return str(value.dtype), int(value.dtype.itemsize)
    raise PayloadError(
        f"cannot publish {name}", got=f"a {type(value).__module__}.{type(value).__qualname__}",
        wanted="numpy arrays of numbers, torch tensors, DTensors, bytes or plain numbers",
    )  # fmt: skip


def bytes_of(value: Any) -> memoryview:
    """Its bytes, dense. A view where it is dense and on the CPU."""
    if isinstance(value, bytes):
        return memoryview(value)
    if not _is_torch(value):
        numpy = importlib.import_module("numpy")
        return memoryview(numpy.ascontiguousarray(value).reshape(-1).view("u1"))
    value = value.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return payload_arrays.view_of(value) if value.nbytes else memoryview(b"")


def over(memory: memoryview, entry: TensorEntry, shape: tuple[int, ...]) -> Any:
    """The array of `entry` over its bytes; what was published as `bytes` is a memoryview of them."""
    if entry.dtype == BYTES:
        return memory
    if entry.dtype.startswith(TORCH):
        torch = payload_arrays.library("torch")
        dtype = getattr(torch, entry.dtype[len(TORCH) :], None)
        if not isinstance(dtype, torch.dtype):
            raise PayloadError(f"{entry.name} is of a dtype that this torch does not know", got=entry.dtype)
        return torch.frombuffer(memory, dtype=dtype).view(shape) if memory.nbytes else torch.empty(shape, dtype=dtype)
    numpy = payload_arrays.library("numpy")
    return numpy.frombuffer(memory, entry.dtype).reshape(shape) if memory.nbytes else numpy.empty(shape, entry.dtype)


def read_only(value: Any) -> Any:
    """The same memory for who may not write it. torch knows no such tensors: they come as they are."""
    if isinstance(value, memoryview):
        return value.toreadonly()
    if _is_torch(value) or not hasattr(value, "flags"):
        return value
    view = value.view()
    view.flags.writeable = False
    return view


def copy_into(target: Any, source: Any) -> None:
    """In place, on whatever device the target is."""
    if _is_torch(target):
        torch = payload_arrays.library("torch")
        with torch.no_grad():
            target.copy_(source if _is_torch(source) else torch.from_numpy(source))
    elif _is_torch(source):
        target[...] = source.numpy()
    else:
        target[...] = source
