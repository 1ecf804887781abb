"""What the payloads of a channel are: declared by its flow, checked where a role puts, and where versions differ.

A declaration is plain values, so that it travels with the channel's sizes and reads in an error as it does in the flow:

    payload={"obs": "float32[n, ...]", "action": "number[n, ...]", "slice": "int", "note?": "str"}

    bool int float str bytes list tuple dict none any    a plain value; an int will do for a float
    DTYPE[sizes]                                         an array of numpy or a tensor of torch, wherever it lies

DTYPE is a name such as float32, int64, bool, bfloat16, or a family: `floating`, `integer`, `number` (both), `array`
(any). Sizes: a number; a name, which stands for one size throughout a payload; `*` for any; `...` at the end for any
further ones. A field with `?` may be absent. A mapping within a mapping is a dict, or a dataclass, with these fields.
Fields that are not declared are refused. What is in lists is not looked at: a check takes a few microseconds, whatever
the size of the payload.

Imports neither numpy nor torch: what has a dtype and a shape is an array.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any, Final

from rlinf_api.errors import UserError
from rlinf_worker.links.errors import PayloadError

Declared = str | Mapping[str, Any]
"""A type's name, or the fields of a dict or dataclass; fields may be mappings themselves."""

MAX_DEPTH: Final = 16
MAX_TEXT: Final = 64 << 10  # goes to every worker with every change of plan

_PLAIN: Final[dict[str, tuple[type, ...]]] = {
    "bool": (bool,), "int": (int,), "float": (float, int), "str": (str,), "bytes": (bytes,), "list": (list,),
    "tuple": (tuple,), "dict": (dict,), "none": (type(None),),
}  # fmt: skip
_FAMILIES: Final = {
    "floating": re.compile(r"b?float\d+.*"),
    "integer": re.compile(r"u?int\d+"),
    "number": re.compile(r"b?float\d+.*|u?int\d+"),
    "array": re.compile(r".*"),
}
_DTYPE: Final = re.compile(r"bool|u?int(8|16|32|64)|b?float16|float(32|64|128)|float8_\w+|complex(32|64|128|256)")
_ARRAY: Final = re.compile(r"([a-z]\w*)\[([^\]]*)\]")
_SIZE: Final = re.compile(r"\d{1,18}|[a-z_]\w{0,30}|\*")

_Sizes = dict[str, int]
_Check = Callable[[Any, _Sizes], None]


class PayloadMismatch(PayloadError):
    """A payload that can be sent but is not what the flow declares for its channel. The channel goes on."""


class _Mismatch(Exception):
    """Carries the path outwards, one key per level, so that the good case builds no paths."""

    def __init__(self, got: str, wanted: str) -> None:
        super().__init__(got)
        self.got, self.wanted, self.keys = got, wanted, list[str]()


class PayloadType:
    """One channel's declaration, ready to check with."""

    __slots__ = ("_check", "fingerprint", "text")

    def __init__(self, declared: Declared) -> None:
        """UserError where it cannot be understood."""
        self._check = _compile(declared, "the payload", 0)
        self.text = json.dumps(declared, separators=(",", ":"), ensure_ascii=False)
        if len(self.text) > MAX_TEXT:
            raise _bad("the payload", f"{len(self.text)} bytes", wanted=f"at most {MAX_TEXT}")
        self.fingerprint = zlib.crc32(self.text.encode()) or 1
        """0 says: declared nothing."""

    @classmethod
    def of(cls, text: str) -> PayloadType | None:
        """As the driver tells it; None for a channel without a declaration."""
        return cls(json.loads(text)) if text else None

    def check(self, payload: Any, channel: str, key: str) -> None:
        """Raises PayloadMismatch, with the place in the payload."""
        try:
            self._check(payload, {})
        except _Mismatch as found:
            raise PayloadMismatch(
                f"item {key!r} of channel {channel!r} is not what its flow declares: "
                f"payload{''.join(reversed(found.keys))}",
                got=found.got,
                wanted=found.wanted,
                next="convert it first, or change the channel's payload in the flow",
            ) from None


def _bad(where: str, got: str, *, wanted: str) -> UserError:
    return UserError(f"{where} of a channel cannot be understood", got=got, wanted=wanted, next="correct the flow")


def _compile(declared: Any, where: str, depth: int) -> _Check:
    if depth > MAX_DEPTH:
        raise _bad(where, f"more than {MAX_DEPTH} levels", wanted="fewer")
    if isinstance(declared, str):
        return _compile_name(declared, where)
    if isinstance(declared, Mapping) and all(isinstance(name, str) for name in declared):
        return _compile_fields(declared, where, depth)
    raise _bad(where, repr(declared)[:80], wanted="a type's name, or a dict of names and types")


def _compile_name(text: str, where: str) -> _Check:
    if text == "any":
        return lambda value, sizes: None
    if (kinds := _PLAIN.get(text)) is not None:
        return _plain(kinds, text)
    matched = _ARRAY.fullmatch(text)
    if matched is not None:
        dtype, inside = matched[1], matched[2]
        sizes = [part.strip() for part in inside.split(",")] if inside.strip() else []
        is_open = bool(sizes) and sizes[-1] == "..."
        sizes = sizes[:-1] if is_open else sizes
        if (dtype in _FAMILIES or _DTYPE.fullmatch(dtype)) and all(_SIZE.fullmatch(size) for size in sizes):
            return _array(dtype, sizes, is_open, text)
    raise _bad(
        where, repr(text)[:80], wanted=f"{', '.join([*_PLAIN, 'any'])} or DTYPE[sizes] as in 'float32[n, 3, ...]'"
    )


def _plain(kinds: tuple[type, ...], text: str) -> _Check:
    first = kinds[0]

    def check(value: Any, sizes: _Sizes) -> None:
        kind = type(value)
        if kind is not first and kind not in kinds:
            raise _Mismatch(_describe(value), text)

    return check


def _array(dtype: str, sizes: list[str], is_open: bool, text: str) -> _Check:
    family = _FAMILIES.get(dtype)
    count = len(sizes)
    fixed = [(i, int(size)) for i, size in enumerate(sizes) if size.isdigit()]
    named = [(i, size) for i, size in enumerate(sizes) if not size.isdigit() and size != "*"]
    seen: Any = None  # the dtype that was met last, and will do: an object of its library; a name costs 0.3 us

    def fits(found: Any) -> bool:
        nonlocal seen
        name = _dtype_name(found)
        is_fit = name == dtype if family is None else family.fullmatch(name) is not None
        if is_fit:
            seen = found
        return is_fit

    def check(value: Any, met: _Sizes) -> None:
        try:
            found, shape = value.dtype, value.shape
        except AttributeError:
            raise _Mismatch(_describe(value), text) from None
        if found is not seen and not fits(found):
            raise _Mismatch(_describe(value), text)
        if len(shape) != count and not (is_open and len(shape) > count):
            raise _Mismatch(_describe(value), text)
        for i, name in named:
            size = shape[i]
            if met.setdefault(name, size) != size:
                raise _Mismatch(_describe(value), f"{text} where {name} is {met[name]} in a field before it")
        if fixed:
            for i, size in fixed:
                if shape[i] != size:
                    raise _Mismatch(_describe(value), text)

    return check


def _compile_fields(declared: Mapping[str, Any], where: str, depth: int) -> _Check:
    checks = {name.removesuffix("?"): _compile(d, f"{where}[{name!r}]", depth + 1) for name, d in declared.items()}
    needed = [name for name in declared if not name.endswith("?")]
    names, every = ", ".join(declared) or "no fields", len(needed) == len(checks)

    def check(value: Any, sizes: _Sizes) -> None:
        if type(value) is not dict:
            if not is_dataclass(value) or isinstance(value, type):
                raise _Mismatch(_describe(value), f"a dict with {names}")
            value = {f.name: getattr(value, f.name) for f in fields_of(value)}
        for name, its in checks.items():
            try:
                its(value[name], sizes)
            except KeyError:
                if name in needed:
                    raise _Mismatch(f"no {name!r}", names) from None
            except _Mismatch as found:
                found.keys.append(f"[{name!r}]")
                raise
        if len(value) != len(checks) or not every:
            for name in value:
                if name not in checks:
                    raise _Mismatch(f"{name!r:.80}, which is not declared", names)

    return check


def _dtype_name(dtype: Any) -> str:
    """float32 of numpy's dtype and of torch.float32."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _describe(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        return f"{_dtype_name(dtype)}[{', '.join(map(str, shape))}]"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return "None" if value is None else f"{name} {value!r:.60}" if kind in (int, float, bool, str) else f"a {name}"
