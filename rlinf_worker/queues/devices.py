"""Payloads that lie on an accelerator: how much of a payload does, and the same payload in host memory.

For: queues.shelf, which keeps payloads until their consumers have them. When the producer's turn on its slots ends, or
when a link asks that can only send host memory, they move. Not for: sending (links).

Nothing is imported here: a value of torch's proves that torch is loaded.

    >>> on_device({"logits": cuda_tensor, "step": 3}), on_device({"step": 3})
    (4096, 0)
    >>> to_host({"logits": cuda_tensor, "step": 3})["logits"].device
    device(type='cpu')
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

DEPTH: Final = 64  # as links.payload: deeper is a cycle or a mistake, and is refused there with its path


class Device(Protocol):
    """One kind of memory that is not the host's."""

    def owns(self, value: Any) -> bool:
        """Whether `value`, a leaf of a payload, lies there. Called for every leaf: cheap."""
        ...

    def nbytes(self, value: Any) -> int: ...

    def to_host(self, value: Any) -> Any:
        """A copy in host memory, whole when this returns."""
        ...


class TorchCuda:
    """torch's CUDA tensors. Copied through pinned memory: twice the rate of a copy into pageable memory."""

    def owns(self, value: Any) -> bool:
        return type(value).__module__.startswith("torch") and getattr(value, "is_cuda", False) is True

    def nbytes(self, value: Any) -> int:
        return int(value.numel() * value.element_size())

    def to_host(self, value: Any) -> Any:
        torch = importlib.import_module("torch")
        source = value.detach()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source)
        return host


DEVICES: Final[list[Device]] = [TorchCuda()]


def _plain_host(value: Any) -> bool:
    return type(value) in (int, float, str, bytes, bool, type(None)) or type(value).__module__ == "numpy"


def _walk(value: Any, leaf: Callable[[Any], Any], *, depth: int = 0) -> Any:
    """The same structure with `leaf` of each leaf; itself where no leaf changed."""
    if _plain_host(value) or depth > DEPTH:
        return value
    kind = type(value)
    if kind is dict:
        items = {key: _walk(item, leaf, depth=depth + 1) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if kind in (list, tuple):
        found = [_walk(item, leaf, depth=depth + 1) for item in value]
        return kind(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
    if dataclasses.is_dataclass(kind):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        moved = {name: _walk(item, leaf, depth=depth + 1) for name, item in fields.items()}
        changed = {name: item for name, item in moved.items() if item is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return leaf(value)


def _may_have_any() -> bool:
    return "torch" in sys.modules or len(DEVICES) > 1


def on_device(payload: Any) -> int:
    """Bytes of it that are not in host memory."""
    if not _may_have_any():
        return 0
    found = 0

    def count(value: Any) -> Any:
        nonlocal found
        found += sum(device.nbytes(value) for device in DEVICES if device.owns(value))
        return value

    _walk(payload, count)
    return found


def to_host(payload: Any) -> Any:
    def move(value: Any) -> Any:
        for device in DEVICES:
            if device.owns(value):
                return device.to_host(value)
        return value

    return _walk(payload, move)
