"""How buffers on a GPU travel beside a link without passing the host: what each end has, which way is taken, the rules.

For: `beside`, which splits and joins messages by this, and the two lanes, `nccl` and `cuda`. Imports no torch: where a
process has not loaded it and used its GPU, there is nothing to say and everything goes by way of the host.

    link               sender                                       receiver
    in its order       message n: head, payload, host buffers,      -> taken from the inbox at its turn; memory for it
                       and of each GPU buffer place and size
    beside it, notes   <- "go" n                                       nothing moves before: a GPU never spins for a
                       "handles" n (CUDA IPC) ->                       consumer that is busy
                       <- "done" n                                  the buffers are here: the message is received

One message at a time and direction, so both ends keep one order and a receiver holds one message's memory. The sender
keeps what it offered, within bounds (`beside`), until it is taken; a further `send` waits.
"""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rlinf_worker.links.message import Message
from rlinf_worker.links.payload_arrays import DeviceBuffer, Part
from rlinf_worker.links.settings import LinkSettings

MARK: Final = b"\xc1"
"""Before a body whose message has buffers on a GPU: the one byte that no msgpack, and so no other body, begins with."""

DEVICE_ERRORS: Final = (RuntimeError, ValueError, TypeError, AssertionError, OSError)
"""What torch raises of a device, by call and version: a kernel that failed and a full GPU are RuntimeErrors, a torch
without CUDA is an AssertionError, what it cannot open a ValueError, a TypeError or the system's own."""

_ALIGN: Final = 256
"""Each buffer begins so in the receiver's memory, as CUDA's own allocations do."""

_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The GPU of one end: what it says in its hello."""

    uuid: str
    index: int
    """In its own process; another process may number the same GPU otherwise."""
    nccl: str = ""
    """Version; empty: torch has no NCCL, or torch.distributed is not loaded."""

    @classmethod
    def from_hello(cls, fields: object) -> Gpu | None:
        """None also for what is no such thing: the link then goes by way of the host."""
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError:
            return None


def here() -> Gpu | None:
    """The GPU that this process uses now. Asking makes no CUDA context: a process that has none yet says nothing."""
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)  # absent, or with little in it, while another thread still imports torch
    if not getattr(cuda, "is_initialized", bool)():
        return None
    index = int(torch.cuda.current_device())
    distributed: Any = sys.modules.get("torch.distributed")
    has_nccl = getattr(distributed, "is_nccl_available", bool)()
    return Gpu(
        uuid=str(torch.cuda.get_device_properties(index).uuid),
        index=index,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
    )


def of(settings: LinkSettings) -> Gpu | None:
    """What this end offers: `here`, unless it was told to use the host."""
    return here() if settings.gpu == "direct" else None


def is_news(said: Gpu | None, now: Gpu | None) -> bool:
    """Whether a link whose hello had `said` could have a lane if it were made again. Another GPU is none: what this
    process calls its current one may change by the call."""
    if now is None or said is None:
        return now is not None
    return said.uuid == now.uuid and not said.nccl and bool(now.nccl)


def choose(ours: Gpu | None, theirs: Gpu | None, *, same_pod: bool, may_be_plain: bool) -> str:
    """`ipc`, `nccl` or `host`. `may_be_plain`: both ends allow bulk data that is not encrypted."""
    if ours is None or theirs is None:
        return "host"
    if ours.uuid == theirs.uuid:  # NCCL refuses two ranks on one GPU
        return "ipc" if same_pod else "host"
    if ours.nccl and ours.nccl == theirs.nccl and (same_pod or may_be_plain):
        return "nccl"
    return "host"


# --- messages --------------------------------------------------------------------------------------------------------


class BuffersBeside(msgspec.Struct, array_like=True, frozen=True):
    """What is told of buffers that go beside the link: the lane's number of the message, and place and size of each.

    BuffersBeside(number=7, places=((1, 4_194_304), (3, 1_048_576)))    # the second and the fourth of its buffers
    """

    number: int
    places: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.places)


_decode_manifest = msgspec.msgpack.Decoder(BuffersBeside).decode


def device_index(tensor: Any) -> int:
    """A function, so that a test without a GPU can say otherwise."""
    return int(tensor.device.index)


def place(index: int) -> Any:
    """As `device_index`."""
    return importlib.import_module("torch").device("cuda", index)


def device_buffers(message: Message) -> list[tuple[int, DeviceBuffer]]:
    """With their places. Raises PayloadError."""
    return [(at, part) for at, part in enumerate(message.encoded()[1]) if isinstance(part, DeviceBuffer)]


def split(message: Message, buffers: Sequence[tuple[int, DeviceBuffer]], number: int) -> Message:
    """What goes by the link itself. Changes nothing."""
    body, parts = message.encoded()
    manifest = msgspec.msgpack.encode(BuffersBeside(number, tuple((at, part.nbytes) for at, part in buffers)))
    on_host = [part for part in parts if isinstance(part, memoryview)]
    return Message(message.head, body=b"".join((MARK, _LENGTH.pack(len(manifest)), manifest, body)), buffers=on_host)


def manifest_of(message: Message, *, max_bytes: int) -> BuffersBeside | None:
    """None for a message that is whole. Raises ValueError for a manifest that cannot be."""
    body, parts = message.encoded()
    if not body.startswith(MARK):
        return None
    try:
        (length,) = _LENGTH.unpack_from(body, 1)
        manifest = _decode_manifest(body[1 + _LENGTH.size : 1 + _LENGTH.size + length])
    except (struct.error, msgspec.DecodeError) as err:
        raise ValueError(f"it announced GPU buffers in a way that cannot be read: {err}") from None
    at = [place for place, _ in manifest.places]
    if not at or at != sorted(set(at)) or at[0] < 0 or at[-1] >= len(parts) + len(at):
        raise ValueError(f"it announced GPU buffers at places {at[:20]} among {len(parts)} others")
    if min(size for _, size in manifest.places) < 1 or manifest.nbytes > max_bytes:
        raise ValueError(f"it announced GPU buffers of {manifest.nbytes} bytes, wanted 1 to {max_bytes}")
    return manifest


def join(message: Message, manifest: BuffersBeside, tensors: Sequence[Any]) -> Message:
    """The message as it was sent."""
    body, parts = message.encoded()
    whole: list[Part] = list(parts)
    for (at, _), tensor in zip(manifest.places, tensors, strict=True):
        whole.insert(at, DeviceBuffer(tensor))
    (length,) = _LENGTH.unpack_from(body, 1)
    return Message(message.head, body=body[1 + _LENGTH.size + length :], buffers=whole)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each buffer begins in one allocation, and how large that is."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end + -end % _ALIGN)
        end = starts[-1] + size
    return starts, end


def bytes_of(tensor: Any) -> Any:
    """A dense tensor as a flat one of uint8, over the same memory."""
    torch: Any = importlib.import_module("torch")
    return tensor.reshape(-1).view(torch.uint8)


def room_for(index: int, sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """One allocation on the GPU and the buffers in it. Raises RuntimeError where the GPU is full."""
    torch: Any = importlib.import_module("torch")
    starts, total = layout(sizes)
    whole = torch.empty(total, dtype=torch.uint8, device=place(index))
    return whole, [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
