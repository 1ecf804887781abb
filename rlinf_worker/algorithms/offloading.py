"""Takes the storage of torch tensors off a slot and brings it back, bit for bit: the body of an Offloadable role.

For: parameters, gradients and optimizer state (roles/actor), a policy (roles/rollout). Tensors stay the objects that
they are, FSDP's and the optimizer's references too; only the memory behind them comes and goes.

    host = HostCopy(lambda: learner.tensors())
    host.offload()  ──> storages of size 0; the bytes in pinned (GPU) or shared (CPU) host memory
    host.load()     ──> storages of their size again

Not for tensors whose storage somebody else owns (numpy's, shared ones): those stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class _OnHost:
    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor  # uint8


class HostCopy:
    """Called from one thread at a time, never while the tensors are in use."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._kept: list[_OnHost] = []
        self._pinned: dict[int, Tensor] = {}  # by number of bytes and place: pinning costs more than copying

    def bytes_now(self) -> int:
        """On the slot."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        if self._kept:
            return
        devices = set()
        for place, storage in enumerate(self._storages()):
            if not storage.resizable() or not storage.nbytes():
                continue
            nbytes, device = storage.nbytes(), storage.device
            host = self._host_buffer(place, nbytes, pinned=device.type == "cuda")
            host.copy_(_bytes(storage), non_blocking=device.type == "cuda")
            self._kept.append(_OnHost(storage, nbytes, host))
            devices.add(device)
        _wait_for(devices)
        for kept in self._kept:
            kept.storage.resize_(0)
        if any(device.type == "cuda" for device in devices):
            torch.cuda.empty_cache()  # this process's: else another one cannot have what was freed

    def load(self) -> None:
        devices = set()
        for kept in self._kept:
            kept.storage.resize_(kept.nbytes)
            device = kept.storage.device
            _bytes(kept.storage).copy_(kept.host, non_blocking=device.type == "cuda")
            devices.add(device)
        _wait_for(devices)
        self._kept.clear()

    def _host_buffer(self, place: int, nbytes: int, *, pinned: bool) -> Tensor:
        if not pinned:  # the slot's memory is the host's: only another process's view of it makes sense
            shared: Tensor = torch.empty(nbytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
            return shared
        known = self._pinned.get(place)
        if known is None or known.numel() != nbytes:
            known = self._pinned[place] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return known

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Each once, however many tensors look at it."""
        seen: set[int] = set()
        for tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait_for(devices: Iterable[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def of_module(module: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters, their gradients, buffers."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value
