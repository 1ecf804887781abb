"""The codec of payloads: a nested value <-> one small header and a list of buffers. Nothing is ever unpickled.

For: `message.Message`, and through it every link. Not for: control messages (protobuf), files (safetensors).

Accepted: None, bool, int (64 bits), float, str, bytes; list, tuple, dict with str or int keys; dataclasses named by
`register`; numpy arrays and scalars of numbers, bools and fixed-width text; torch tensors of every dense dtype, on
the CPU or a GPU.
Everything else is a PayloadError that names the path. A non-contiguous array is packed densely; a tensor loses its
gradient history, a Parameter arrives as a Tensor.

    >>> header, buffers = encode({"obs": numpy.zeros((64, 4096), "f4"), "reward": [0.5, 1.0]})
    >>> len(header) < 100, [b.nbytes for b in buffers]                  # nothing was copied
    (True, [1048576])

Arrays up to INLINE_BYTES are copied into the header, where a copy is cheaper than a buffer's bookkeeping. Larger ones
are views: at the sender of the array, at the receiver of the received memory. A view keeps what it views alive, so a
decoded array is valid as long as it lives; while it lives, its link has that much less room (`message.Message`).
Decoded arrays are writable.

This module imports neither numpy nor torch; what has to do with them is in `payload_arrays`.
"""

from __future__ import annotations

import dataclasses
import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from rlinf_api.errors import InvariantBroken
from rlinf_worker.links import payload_arrays as arrays
from rlinf_worker.links.errors import PayloadError
from rlinf_worker.links.payload_arrays import Part, Unsupported

MAX_DEPTH = 64
"""Deeper nesting is a cycle or a mistake, and would meet Python's recursion limit without a path in the message."""

# First element of every msgpack array in a header. Scalars and dicts stand for themselves.
_LIST, _FLAT_LIST, _TUPLE, _BYTES_BUFFER, _DATACLASS = 0, 1, 2, 3, 4
_PLAIN = frozenset({type(None), bool, int, float, str})
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_Packer = Callable[[Any, list[Part], int], Any]
_C = TypeVar("_C", bound=type)

_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder().decode


def encode(value: object) -> tuple[bytes, list[Part]]:
    """The header and the buffers of `value`. Raises PayloadError; changes nothing."""
    buffers: list[Part] = []
    try:
        tree = value if type(value) in _PLAIN else _pack(value, buffers, 0)
        return _encode_msgpack(tree), buffers
    except Unsupported as err:
        raise err.as_error() from None
    except (OverflowError, UnicodeEncodeError) as err:
        found = _find_unencodable(value)
        raise (found or Unsupported(str(err))).as_error() from None


def decode(header: bytes | memoryview, buffers: Sequence[Part]) -> Any:
    """The value. Arrays above INLINE_BYTES view `buffers`. Raises PayloadError, also for bytes that are no header."""
    try:
        return _unpack(_decode_msgpack(header), buffers)
    except PayloadError:
        raise
    except (msgspec.DecodeError, ValueError, TypeError, LookupError, OverflowError, RuntimeError) as err:  # torch's too
        raise PayloadError(
            "cannot read a payload's header",
            got=f"{len(header)} bytes and {len(buffers)} buffers: {type(err).__name__}: {err}",
            wanted="a header made by rlinf_worker.links.payload.encode of the same version",
            next="check that both ends run the same image",
        ) from err


# --- dataclasses -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Registered:
    cls: type
    name: str
    fields: tuple[str, ...]
    fingerprint: int


_BY_NAME: dict[str, _Registered] = {}


def register(cls: _C, *, name: str | None = None) -> _C:
    """Lets a dataclass travel by name; usable as a decorator. Both ends must have registered the same fields.

    >>> @register
    ... @dataclass(frozen=True)
    ... class Rollout: tokens: numpy.ndarray; version: int
    """
    if not dataclasses.is_dataclass(cls):
        raise InvariantBroken(f"cannot register {cls.__qualname__}", got=str(type(cls)), wanted="a dataclass")
    fields = dataclasses.fields(cls)
    if hidden := [f.name for f in fields if not f.init]:
        raise InvariantBroken(f"cannot register {cls.__qualname__}", got=f"fields with init=False: {hidden}")
    entry = _Registered(
        cls=cls,
        name=name or cls.__qualname__,
        fields=tuple(f.name for f in fields),
        fingerprint=zlib.crc32(",".join(f.name for f in fields).encode()),
    )
    known = _BY_NAME.get(entry.name)
    if known is not None and (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvariantBroken(
            f"two dataclasses are registered as {entry.name!r}",
            got=f"{known.cls.__module__} and {cls.__module__}",
            next="register one with another name=",
        )
    _BY_NAME[entry.name] = entry

    def pack(value: object, buffers: list[Part], depth: int) -> list[Any]:
        out: list[Any] = [_DATACLASS, entry.name, entry.fingerprint]
        for field in entry.fields:
            item = getattr(value, field)
            try:
                out.append(item if type(item) in _PLAIN else _pack(item, buffers, depth + 1))
            except Unsupported as err:
                err.keys.append(f".{field}")
                raise
        return out

    _PACKERS[cls] = pack
    return cls


def _unpack_dataclass(tree: list[Any], buffers: Sequence[Part]) -> Any:
    name, fingerprint = tree[1], tree[2]
    entry = _BY_NAME.get(name)
    if entry is None:
        raise PayloadError(
            f"received a dataclass {name!r} that this process does not know",
            wanted=f"one of {sorted(_BY_NAME)}",
            next="import the module that registers it before receiving",
        )
    if entry.fingerprint != fingerprint or len(tree) != 3 + len(entry.fields):
        raise PayloadError(
            f"received a dataclass {name!r} with other fields than this process has",
            wanted=f"the fields {', '.join(entry.fields)}",
            next="run the same code at both ends",
        )
    return entry.cls(**{field: _unpack(item, buffers) for field, item in zip(entry.fields, tree[3:], strict=True)})


# --- encoding --------------------------------------------------------------------------------------------------------


def _pack(value: Any, buffers: list[Part], depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    pack = _PACKERS.get(kind)
    if pack is None:
        pack = _packer_of_library_type(kind)
    if depth > MAX_DEPTH:
        raise Unsupported(f"more than {MAX_DEPTH} levels", "flatten it, and look for a container that holds itself")
    return pack(value, buffers, depth)


def _pack_dict(value: dict[Any, Any], buffers: list[Part], depth: int) -> dict[Any, Any]:
    out = {}
    for key, item in value.items():
        if type(key) is not str and type(key) is not int:
            raise Unsupported(f"a key {key!r:.80} of type {_name(type(key))}", "use str or int keys")
        try:
            out[key] = item if type(item) in _PLAIN else _pack(item, buffers, depth + 1)
        except Unsupported as err:
            err.keys.append(f"[{key!r:.80}]")
            raise
    return out


def _pack_items(tag: int, value: Sequence[Any], buffers: list[Part], depth: int) -> list[Any]:
    out: list[Any] = [tag]
    for index, item in enumerate(value):
        try:
            out.append(item if type(item) in _PLAIN else _pack(item, buffers, depth + 1))
        except Unsupported as err:
            err.keys.append(f"[{index}]")
            raise
    return out


def _pack_list(value: list[Any], buffers: list[Part], depth: int) -> list[Any]:
    if _PLAIN.issuperset(map(type, value)):  # token ids: 34 ns an element instead of 87
        return [_FLAT_LIST, *value]
    return _pack_items(_LIST, value, buffers, depth)


def _pack_tuple(value: tuple[Any, ...], buffers: list[Part], depth: int) -> list[Any]:
    return _pack_items(_TUPLE, value, buffers, depth)


def _pack_bytes(value: bytes, buffers: list[Part], depth: int) -> Any:
    if len(value) <= arrays.INLINE_BYTES:
        return value
    buffers.append(memoryview(value))
    return [_BYTES_BUFFER, len(buffers) - 1]


_PACKERS: dict[type, _Packer] = {dict: _pack_dict, list: _pack_list, tuple: _pack_tuple, bytes: _pack_bytes}


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _packer_of_library_type(kind: type) -> _Packer:
    """Finds and remembers how to pack a type of numpy or torch. By exact type: a subclass means something by it."""
    pack: _Packer | None = None
    if kind.__module__ == "numpy":
        numpy = importlib.import_module("numpy")
        if kind is numpy.ndarray:
            pack = arrays.pack_array
        elif issubclass(kind, numpy.generic):
            pack = arrays.pack_array_scalar
    elif kind.__module__ in ("torch", "torch.nn.parameter"):
        torch = importlib.import_module("torch")
        if kind in (torch.Tensor, torch.nn.Parameter):
            pack = arrays.pack_tensor
    if pack is None:
        raise Unsupported(f"a {_name(kind)}", _hint(kind))
    _PACKERS[kind] = pack
    return pack


def _hint(kind: type) -> str:
    if dataclasses.is_dataclass(kind):
        return f"call rlinf_worker.links.payload.register({kind.__qualname__}) where the class is defined"
    if kind.__name__ == "DTensor":
        return "send to_local() or full_tensor()"
    if issubclass(kind, (set, frozenset)):
        return "send a sorted list"
    if issubclass(kind, (dict, list, tuple, int, float, str, bytes)):
        return f"send a plain {next(base.__name__ for base in kind.__mro__ if base.__module__ == 'builtins')}"
    return "send its parts"


def _find_unencodable(value: object) -> Unsupported | None:
    """After msgpack refused: which int or str was it? Only then is the value walked a second time."""
    if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX:
        return Unsupported("an int of more than 64 bits", "send it as str or bytes")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return Unsupported("a str with surrogates, which UTF-8 does not have", "send bytes")
        return None
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(f"[{key!r:.80}]", item) for key, item in value.items()]
        items += [(f"[{key!r:.80}]", key) for key in value]
    elif isinstance(value, (list, tuple)):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        items = [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    for key, item in items:
        if found := _find_unencodable(item):
            found.keys.append(key)
            return found
    return None


# --- decoding --------------------------------------------------------------------------------------------------------


def _unpack(tree: Any, buffers: Sequence[Part]) -> Any:
    kind = type(tree)
    if kind is dict:
        for key, item in tree.items():
            inner = type(item)
            if inner is list or inner is dict:
                tree[key] = _unpack(item, buffers)
        return tree
    if kind is list:
        return _UNPACKERS[tree[0]](tree, buffers)
    return tree


def _unpack_flat_list(tree: list[Any], buffers: Sequence[Part]) -> list[Any]:
    del tree[0]
    return tree


def _unpack_list(tree: list[Any], buffers: Sequence[Part]) -> list[Any]:
    del tree[0]
    for index, item in enumerate(tree):
        inner = type(item)
        if inner is list or inner is dict:
            tree[index] = _unpack(item, buffers)
    return tree


def _unpack_tuple(tree: list[Any], buffers: Sequence[Part]) -> tuple[Any, ...]:
    return tuple(_unpack_list(tree, buffers))


def _unpack_bytes(tree: list[Any], buffers: Sequence[Part]) -> bytes:
    return bytes(buffers[tree[1]])


_UNPACKERS: Mapping[int, Callable[[list[Any], Sequence[Part]], Any]] = {
    _LIST: _unpack_list,
    _FLAT_LIST: _unpack_flat_list,
    _TUPLE: _unpack_tuple,
    _BYTES_BUFFER: _unpack_bytes,
    _DATACLASS: _unpack_dataclass,
    arrays.ARRAY: arrays.unpack_array,
    arrays.ARRAY_BUFFER: arrays.unpack_array_buffer,
    arrays.ARRAY_SCALAR: arrays.unpack_array_scalar,
    arrays.TENSOR: arrays.unpack_tensor,
    arrays.TENSOR_BUFFER: arrays.unpack_tensor_buffer,
    arrays.TENSOR_DEVICE: arrays.unpack_tensor_device,
}
