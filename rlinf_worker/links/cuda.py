"""Buffers on a GPU, to another process on the same GPU: CUDA IPC, by torch's own two calls.

For: `meet_gpus`. Not for: two GPUs (`nccl`), nor one process, which cannot open a handle of its own.

    sender     asked for message n: its buffers in one allocation -> a handle, and an event behind what still computes
    receiver   opens the handle, waits for the event on its stream, copies, waits for the copy, closes, says "done"
    sender     lets go

The receiver copies (1 GB in 1 ms on the device) and keeps no view: what it received outlives the sender and the
sender's turn. The handle is torch's tuple, as plain values in a note that is checked before anything is opened; it is
never pickled. Opening and waiting is in a thread of its own, one message at a time; an event of a stopped process
cannot be interrupted, so nobody waits for that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Callable
from typing import Any, Final

import msgspec

from rlinf_worker.links.beside import Beside, DeviceLane
from rlinf_worker.links.devices import DEVICE_ERRORS, Gpu, place, room_for

MAX_HANDLE_BYTES: Final = 1024
"""The bound of each part of a handle: CUDA's have 64, the name of the reference counter some 40."""


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """What `UntypedStorage._share_cuda_` returns, without the device (which each process numbers), and where in the
    storage the bytes are."""

    memory: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool
    start: int


def share(tensor: Any) -> Handle:
    """The handle of a flat tensor of uint8. Raises RuntimeError where the GPU or the driver cannot."""
    device, memory, size, offset, counter, counter_offset, event, event_sync = tensor.untyped_storage()._share_cuda_()
    del device
    return Handle(memory, size, offset, counter, counter_offset, event, event_sync, tensor.storage_offset())


def check(fields: list[Any], nbytes: int) -> Handle:
    """Raises ValueError for what is no handle of `nbytes`."""
    try:
        handle = msgspec.convert(fields, Handle, builtin_types=(bytes,))
    except msgspec.ValidationError as err:
        raise ValueError(f"it sent a CUDA IPC handle that cannot be read: {err}") from None
    numbers = (handle.storage_bytes, handle.storage_offset, handle.counter_offset, handle.start)
    parts = (handle.memory, handle.counter, handle.event)
    if min(numbers) < 0 or handle.start + nbytes > handle.storage_bytes or max(map(len, parts)) > MAX_HANDLE_BYTES:
        raise ValueError(f"it sent a CUDA IPC handle of {handle.storage_bytes} bytes for {nbytes} at {handle.start}")
    return handle


def copy_out(handle: Handle, into: Any, index: int) -> None:
    """Blocks until the bytes are in `into`. Raises RuntimeError."""
    torch: Any = importlib.import_module("torch")
    device = place(index)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    storage = torch.UntypedStorage._new_shared_cuda(
        index, handle.memory, handle.storage_bytes, handle.storage_offset, handle.counter, handle.counter_offset,
        handle.event, handle.event_sync,
    )  # fmt: skip
    theirs = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, handle.start, (into.nbytes,), (1,))
    into.copy_(theirs)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class IpcLane(DeviceLane):
    """See the module."""

    kind = "ipc"

    def __init__(self, gpu: Gpu, beside: Beside) -> None:
        super().__init__(gpu, beside)
        self._loop = asyncio.get_running_loop()
        self._shared: dict[int, Any] = {}
        self._wanted: tuple[int, Any, list[Any], Callable[[list[Any]], None]] | None = None
        self._killed = False

    # --- sending ---

    def give(self, number: int, tensors: list[Any]) -> None:
        try:
            whole, slots = tensors[0], tensors
            if len(tensors) > 1:
                whole, slots = room_for(self.gpu.index, [tensor.nbytes for tensor in tensors])
                for slot, tensor in zip(slots, tensors, strict=True):
                    slot.copy_(tensor)
            handle = share(whole)
        except DEVICE_ERRORS as err:
            self.beside.lost(f"this end cannot hand over GPU memory (CUDA IPC: {str(err)[:200]})")
            return
        self._shared[number] = whole
        self.say("handles", number, msgspec.to_builtins(handle, builtin_types=(bytes,)))

    def heard(self, word: str, number: int, extra: list[Any]) -> bool:
        if word == "done" and number in self._shared:
            del self._shared[number]
            self.let_go(number)
            return True
        if word != "handles" or self._wanted is None or self._wanted[0] != number:
            return False
        _, whole, buffers, arrived = self._wanted
        self._wanted = None
        try:
            handle = check(extra, whole.nbytes)
        except ValueError as err:
            self.beside.lost(str(err))
            return True
        arguments = (number, handle, whole, buffers, arrived)
        threading.Thread(target=self._copy, args=arguments, name="cuda-ipc", daemon=True).start()
        return True

    # --- receiving ---

    def receive(self, number: int, sizes: list[int], arrived: Callable[[list[Any]], None]) -> None:
        whole, buffers = room_for(self.gpu.index, sizes)
        self._wanted = (number, whole, buffers, arrived)
        self.say("go", number)

    def _copy(
        self, number: int, handle: Handle, whole: Any, buffers: list[Any], arrived: Callable[[list[Any]], None]
    ) -> None:
        why = ""
        try:
            copy_out(handle, whole, self.gpu.index)
        except DEVICE_ERRORS as err:
            why = f"this end cannot open its GPU memory (CUDA IPC: {str(err)[:200]})"
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the link
            self._loop.call_soon_threadsafe(self._copied, number, buffers, arrived, why)

    def _copied(self, number: int, buffers: list[Any], arrived: Callable[[list[Any]], None], why: str) -> None:
        if self._killed:
            return
        if why:
            self.beside.lost(why)
            return
        self.say("done", number)
        arrived(buffers)

    def kill(self) -> None:
        self._killed = True
        self._wanted = None
        self._shared.clear()
        self._held.clear()
