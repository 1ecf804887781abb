"""CUDA IPC without a GPU: torch's two calls, and tensors of 300 KB and more that pass for ones on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlinf_worker.links import cuda, devices, payload_arrays
from rlinf_worker.links.devices import Gpu

SIZE = 300_000
GPU = Gpu(uuid="gpu-0", index=0)


class FakeIpc:
    """The handle names the storage; opening it twice, or what was never shared, is an error as with CUDA."""

    def __init__(self) -> None:
        self.shared: dict[bytes, Any] = {}
        self.opened: list[bytes] = []

    def share(self, storage: Any) -> tuple[Any, ...]:
        name = b"handle-%d" % len(self.shared)
        self.shared[name] = storage
        return (0, name, storage.nbytes(), 0, b"counter", len(self.shared), b"event", True)

    def open(
        self,
        device: int,
        memory: bytes,
        size: int,
        offset: int,
        counter: bytes,
        counter_offset: int,
        event: bytes,
        event_sync: bool,
    ) -> Any:
        storage = self.shared[memory]
        if memory in self.opened or (size, offset, event_sync) != (storage.nbytes(), 0, True):
            raise RuntimeError(f"cannot open {memory!r} of {size} bytes")
        self.opened.append(memory)
        return storage


def install(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    fake = FakeIpc()
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: fake.share(storage))
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(fake.open))
    monkeypatch.setattr(devices, "here", lambda: GPU)
    monkeypatch.setattr(devices, "device_index", lambda tensor: 0)
    for module in (devices, cuda):
        monkeypatch.setattr(module, "place", lambda index: torch.device("cpu"))
    monkeypatch.setattr(payload_arrays, "device_kind", lambda tensor: "cuda" if tensor.nbytes >= SIZE else "cpu")
    return fake
