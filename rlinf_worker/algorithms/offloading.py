"""Takes the storage of torch tensors off a slot and brings it back, bit for bit: the body of an Offloadable role.

For: parameters, gradients and optimizer state (roles/actor), a policy (roles/rollout). Tensors stay the objects that
they are, FSDP's and the optimizer's references too; only the memory behind them comes and goes.

    host = HostCopy(lambda: learner.tensors())
    host.offload()  ──> storages of size 0; the bytes in pinned host memory, or of a CPU in a file without a name
    host.load()     ──> storages of their size again

A CPU's slot is the host's memory, so what leaves it goes to the disk of TMPDIR. `emptied` and `filled` do without a
copy, for what somebody else can bring back.

Not for tensors whose storage somebody else owns (numpy's, shared ones): those stay where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None)


@dataclass(slots=True)
class _Away:
    storage: torch.UntypedStorage
    nbytes: int
    host: Tensor | None = None  # uint8; None: in the file


class HostCopy:
    """Called from one thread at a time, never while the tensors are in use."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[_Away] = []
        self._pinned: dict[int, Tensor] = {}  # by number of bytes and place: pinning costs more than copying
        self._file: FileIO | None = None  # of what was a CPU's, one storage after the other

    def __del__(self) -> None:
        if self._file is not None:  # of a role that ends off its slots
            self._file.close()

    def bytes_now(self) -> int:
        """On the slot."""
        return sum(storage.nbytes() for storage in self._storages())

    def offload(self) -> None:
        """What the disk has no room for stays where it is, and the log says so."""
        if self._away:
            return
        found = [s for s in self._storages() if s.resizable() and s.nbytes()]
        on_cpu, on_gpu = [s for s in found if s.device.type == "cpu"], [s for s in found if s.device.type != "cpu"]
        for place, storage in enumerate(on_gpu):
            host = self._host_buffer(place, storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._away.append(_Away(storage, storage.nbytes(), host))
        _wait_for({storage.device for storage in on_gpu})
        if on_cpu and self._written(on_cpu):
            self._away += [_Away(storage, storage.nbytes()) for storage in on_cpu]
        for away in self._away:
            away.storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()  # this process's: else another one cannot have what was freed
        trim()

    def load(self) -> None:
        file, self._file = self._file, None
        with file or contextlib.nullcontext():  # its room on the disk is free again behind it
            if file is not None:
                file.seek(0)
            for away in self._away:
                away.storage.resize_(away.nbytes)
                into = _bytes(away.storage)
                if away.host is not None:
                    into.copy_(away.host, non_blocking=True)
                else:
                    assert file is not None, "what has no copy on the host was written"
                    _read(file, into)
        _wait_for({away.storage.device for away in self._away})
        self._away.clear()

    def _host_buffer(self, place: int, nbytes: int) -> Tensor:
        known = self._pinned.get(place)
        if known is None or known.numel() != nbytes:
            known = self._pinned[place] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return known

    def _written(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        file: FileIO | None = None
        try:
            file = tempfile.TemporaryFile(prefix="rlinf-off-slot-", buffering=0)  # noqa: SIM115 - until it is back
            for storage in storages:
                _write(file, _bytes(storage))
        except OSError as error:
            if file is not None:
                file.close()
            wanted = sum(storage.nbytes() for storage in storages)
            what = "memory stays on its slot, as its bytes find no room on the disk; free some, or set TMPDIR"
            logger.error(what, extra={"folder": tempfile.gettempdir(), "bytes": wanted, "error": str(error)})
            return False
        self._file = file
        return True

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        return storages_of(self._tensors())


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Each once, however many tensors look at it."""
    seen: set[int] = set()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            yield storage


def emptied(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Their storages without memory, for `filled`: whoever calls it knows what was in them."""
    found = [(storage, storage.nbytes()) for storage in storages_of(tensors) if storage.resizable()]
    for storage, _ in found:
        storage.resize_(0)
    trim()
    return found


def filled(kept: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    """Gives storages their sizes again, with zeros in them."""
    for storage, nbytes in kept:
        storage.resize_(nbytes)
        _bytes(storage).zero_()


def trim() -> None:
    """What was freed goes back to the system: the allocator keeps blocks of up to 32 MiB for itself."""
    if hasattr(_LIBC, "malloc_trim"):  # glibc's
        _LIBC.malloc_trim(0)


def _memory(data: Tensor) -> memoryview:
    """Not by way of numpy: torch never resizes again what numpy has looked at."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def _write(file: FileIO, data: Tensor) -> None:
    left = _memory(data)
    while left:  # one call moves 2 GiB at most
        left = left[file.write(left) :]


def _read(file: FileIO, into: Tensor) -> None:
    left = _memory(into)
    while left:
        if not (count := file.readinto(left)):
            raise OSError(f"the file of what left the slot ends {len(left)} bytes too early; is its disk well?")
        left = left[count:]


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
