"""How arrays of numpy and tensors of torch go into a payload's header and buffers, and come out of them.

For: `payload`, which walks the rest of a value. Imports neither library: a value of theirs proves that it is loaded,
and decoding imports the one that a header names.

A tensor on an accelerator becomes a `DeviceBuffer` among the buffers. A link that can hand over device memory (`ipc`)
takes its tensor; any other takes its bytes by way of the host, and the receiver puts them on its own device, where it
has one, or leaves them on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Sequence
from typing import Any

from rlinf_worker.links.errors import PayloadError

INLINE_BYTES = 4096
"""Measured, encode to decode with the copies of a ring: 256 bytes cost 2.2 us inline and 3.0 us as a buffer, 8 KB 3.1
and 4.8 us, 16 KB 4.5 and 3.9 us."""

DTYPES_KEPT = 256
"""Names of dtypes that are looked up once: all of numbers, and as many widths of text."""

ACCEPTED = (
    "None, bool, int of 64 bits, float, str, bytes, list, tuple, dict with str or int keys, registered dataclasses, "
    "numpy arrays of numbers, torch tensors on the CPU or a GPU"
)

# Tags, the first element of a msgpack array in a header; those below 5 are of `payload`.
ARRAY, ARRAY_BUFFER, ARRAY_SCALAR, TENSOR, TENSOR_BUFFER, TENSOR_DEVICE = 5, 6, 7, 8, 9, 10

Buffer = memoryview


class DeviceBuffer:
    """A dense tensor on an accelerator, in its place among the buffers of a message."""

    __slots__ = ("_staged", "nbytes", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.nbytes = tensor, int(tensor.nbytes)
        self._staged: Buffer | None = None

    def host(self) -> Buffer:
        """Its bytes in host memory, copied once; waits for what the device still computes into it."""
        if self._staged is None:
            self._staged = view_of(self.tensor.cpu())
        return self._staged


Part = memoryview | DeviceBuffer
"""What the buffers of a message may be; on the wire there are only bytes."""


def on_host(parts: Sequence[Part]) -> Sequence[Buffer]:
    """For a link that moves bytes only."""
    return [part if isinstance(part, memoryview) else part.host() for part in parts]


class Unsupported(Exception):
    """Carries the path outwards, one key per level, so that the good case builds no paths."""

    def __init__(self, found: str, hint: str = "") -> None:
        super().__init__(found)
        self.found, self.hint, self.keys = found, hint, list[str]()

    def as_error(self) -> PayloadError:
        path = "payload" + "".join(reversed(self.keys))
        return PayloadError(f"cannot send {path}", got=self.found, wanted=ACCEPTED, next=self.hint)


@functools.lru_cache(DTYPES_KEPT)
def array_name(dtype: Any) -> str:
    if dtype.kind not in "biufcSU" or dtype.hasobject:
        hint = "send it as a torch tensor" if dtype.kind == "V" else "convert it to numbers first"
        raise Unsupported(f"a numpy array of dtype {dtype}", hint)
    return str(dtype.str)


def pack_array(value: Any, buffers: list[Part], depth: int) -> list[Any]:
    name = array_name(value.dtype)
    if value.nbytes <= INLINE_BYTES:
        return [ARRAY, name, value.shape, value.tobytes()]
    if not value.flags.c_contiguous:
        value = value.copy(order="C")
    try:
        view = value.data.cast("B")
    except (ValueError, TypeError):  # half, complex, text, other byte order: memoryview cannot cast these
        view = memoryview(value.reshape(-1).view("u1"))
    buffers.append(view)
    return [ARRAY_BUFFER, name, value.shape, len(buffers) - 1]


def pack_array_scalar(value: Any, buffers: list[Part], depth: int) -> list[Any]:
    return [ARRAY_SCALAR, array_name(value.dtype), value.tobytes()]


def device_kind(tensor: Any) -> str:
    """`cpu`, `cuda`, or what no link can move. A function, so that a test without a GPU can say otherwise."""
    return str(tensor.device.type)


def pack_tensor(value: Any, buffers: list[Part], depth: int) -> list[Any]:
    if value.is_quantized or value.layout is not importlib.import_module("torch").strided:
        raise Unsupported(f"a tensor of layout {value.layout} and dtype {value.dtype}", "call .to_dense()")
    kind = device_kind(value)
    if kind not in ("cpu", "cuda"):
        raise Unsupported(f"a tensor on {value.device}", "call .cpu()")
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    name, shape, nbytes = str(value.dtype)[6:], tuple(value.shape), value.nbytes
    if kind != "cpu" and nbytes:
        buffers.append(DeviceBuffer(value))
        return [TENSOR_DEVICE, name, shape, len(buffers) - 1]
    if nbytes <= INLINE_BYTES:
        return [TENSOR, name, shape, ctypes.string_at(value.data_ptr(), nbytes) if nbytes else b""]
    buffers.append(view_of(value))
    return [TENSOR_BUFFER, name, shape, len(buffers) - 1]


def view_of(tensor: Any) -> Buffer:
    """The bytes of a dense CPU tensor. Not .numpy(): it has no bf16, and a worker may have torch without numpy."""
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # keeps the storage as long as anything views it
    return memoryview(memory).cast("B")


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise PayloadError(
            f"received arrays of {name}, which this process cannot import",
            got=str(err),
            next=f"install {name} in this role's image, or send plain values to it",
        ) from err


@functools.lru_cache(DTYPES_KEPT)
def _array_dtype(name: str) -> tuple[Any, Any]:
    numpy = library("numpy")
    dtype = numpy.dtype(name)
    if dtype.kind not in "biufcSU":
        raise ValueError(f"dtype {name!r}")
    return numpy.ndarray, dtype


@functools.lru_cache(DTYPES_KEPT)
def _tensor_dtype(name: str) -> tuple[Any, Any]:
    torch = library("torch")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype torch.{name!r:.80}")
    return torch, dtype


def unpack_array(tree: list[Any], buffers: Sequence[Part]) -> Any:
    ndarray, dtype = _array_dtype(tree[1])
    return ndarray(tree[2], dtype, bytearray(tree[3]))


def unpack_array_buffer(tree: list[Any], buffers: Sequence[Part]) -> Any:
    ndarray, dtype = _array_dtype(tree[1])
    return ndarray(tree[2], dtype, buffers[tree[3]])


def unpack_array_scalar(tree: list[Any], buffers: Sequence[Part]) -> Any:
    ndarray, dtype = _array_dtype(tree[1])
    return ndarray((), dtype, tree[2])[()]


def unpack_tensor(tree: list[Any], buffers: Sequence[Part]) -> Any:
    torch, dtype = _tensor_dtype(tree[1])
    if not tree[3]:
        return torch.empty(tree[2], dtype=dtype)
    return torch.frombuffer(bytearray(tree[3]), dtype=dtype).view(tree[2])


def unpack_tensor_buffer(tree: list[Any], buffers: Sequence[Part]) -> Any:
    torch, dtype = _tensor_dtype(tree[1])
    buffer: Any = buffers[tree[3]]
    if buffer.readonly:  # torch has no read-only tensors and would warn
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=dtype).view(tree[2])


def unpack_tensor_device(tree: list[Any], buffers: Sequence[Part]) -> Any:
    torch, dtype = _tensor_dtype(tree[1])
    part = buffers[tree[3]]
    if isinstance(part, DeviceBuffer):
        return part.tensor.view(dtype).view(tree[2])
    tensor = unpack_tensor_buffer(tree, buffers)
    return tensor.to("cuda") if torch.cuda.is_available() else tensor
