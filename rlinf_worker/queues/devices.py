"""Payloads that lie on an accelerator: how much of a payload does, and the same payload in host memory.

For: queues.shelf. They move when the producer's turn on its slots ends, or a link asks that can only send host memory.

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
from typing import Any, Final

DEPTH: Final = 64  # as links.payload: deeper is a cycle or a mistake, and is refused there with its path


class TorchCuda:
    """torch's CUDA tensors. Copied through pinned memory: twice the rate of a copy into pageable memory."""

    def may_be_used(self) -> bool:
        return "torch" in sys.modules

    def owns(self, value: Any) -> bool:
        """Whether `value`, a leaf of a payload, lies there. Called for every leaf: cheap."""
        return type(value).__module__.startswith("torch") and getattr(value, "is_cuda", False) is True

    def nbytes(self, value: Any) -> int:
        return int(value.numel() * value.element_size())

    def to_host(self, value: Any) -> Any:
        """A copy in host memory, whole when this returns."""
        torch = importlib.import_module("torch")
        source = value.detach()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source)
        return host


DEVICE = TorchCuda()


def _walk(value: Any, act: Callable[[Any], Any], *, depth: int = 0) -> Any:
    """The same structure with `act` of each leaf that lies on the device; itself where none did, or none changed."""
    kind = type(value)
    if kind in (int, float, str, bytes, bool, type(None)) or kind.__module__ == "numpy" or depth > DEPTH:
        return value
    if kind is dict:
        items = {key: _walk(item, act, depth=depth + 1) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if kind in (list, tuple):
        found = [_walk(item, act, depth=depth + 1) for item in value]
        return kind(found) if any(a is not b for a, b in zip(found, value, strict=True)) else value
    if dataclasses.is_dataclass(kind):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        moved = {name: _walk(item, act, depth=depth + 1) for name, item in fields.items()}
        changed = {name: item for name, item in moved.items() if item is not fields[name]}
        return dataclasses.replace(value, **changed) if changed else value
    return act(value) if DEVICE.owns(value) else value


def on_device(payload: Any) -> int:
    """Bytes of it that are not in host memory."""
    sizes: list[int] = []

    def count(value: Any) -> Any:
        sizes.append(DEVICE.nbytes(value))
        return value

    if DEVICE.may_be_used():
        _walk(payload, count)
    return sum(sizes)


def to_host(payload: Any) -> Any:
    return _walk(payload, DEVICE.to_host)
