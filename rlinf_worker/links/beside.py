"""The buffers on a GPU that go beside one link: its lane, and the message whose buffers are on their way.

For: `link`, and `meet_gpus`, which brings the lane when both ends have agreed on one; `cuda` and `nccl` are lanes. Not
for: how buffers are split from a message and joined to it (`devices`).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from rlinf_worker.links import devices, frame
from rlinf_worker.links.devices import BuffersBeside, Gpu
from rlinf_worker.links.frame import FrameOut
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import GIB, LinkSettings

HELD_BYTES: Final = 2 * GIB
"""GPU memory that messages offered and not yet taken may keep: two buckets of 1 GB. One message always."""

HELD_MESSAGES: Final = 64
"""So that the notes about them fit in the kernel's buffer of a unix socket (200 of 200 bytes)."""


class Beside:
    """`say` takes a note to the peer's lane, which overtakes messages; `on_room` and `on_arrived` wake who sends and
    who receives; `lost` breaks the link."""

    def __init__(
        self, settings: LinkSettings, *, say: Callable[[bytes], None], on_room: Callable[[], None],
        on_arrived: Callable[[], None], lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.say, self.on_room, self.lost = say, on_room, lost
        self._settings, self._wake_receiver = settings, on_arrived
        self.expected = False
        """Both ends have agreed on a lane. Until it is there, or where it does not come, all goes by the link."""
        self.lane: DeviceLane | None = None
        self.coming = self._ended = False
        self._abandon: Callable[[], None] | None = None
        self._arriving: tuple[Message, BuffersBeside] | None = None
        self._arrived: list[Any] | None = None

    # --- the lane ---

    def expect(self, abandon: Callable[[], None] | None = None) -> None:
        self.expected = self.coming = True
        self._abandon = abandon

    def have(self, lane: DeviceLane | None) -> None:
        self.coming = False
        if lane is not None and self._ended:
            lane.kill()
            return
        self.lane = lane
        self._begin_arrival()

    def end(self) -> None:
        """The link is broken."""
        self._ended, self.coming = True, False
        if self._abandon is not None:
            self._abandon()
        if self.lane is not None:
            self.lane.kill()

    def hear(self, note: bytes | memoryview) -> None:
        if self.lane is not None:
            self.lane.hear(note)

    # --- sending ---

    def framed(self, message: Message, sequence: int) -> FrameOut:
        """Raises PayloadError. Changes nothing: `offer` does, once the frame is on its way."""
        lane = self.lane
        if lane is not None:
            found = devices.device_buffers(message)
            here = all(devices.device_index(part.tensor) == lane.gpu.index for _, part in found)
            if found and here and sum(part.nbytes for _, part in found) >= self._settings.bulk_from_bytes:
                out = frame.of_message(devices.split(message, found, lane.next), sequence & 0xFFFF)
                out.tensors = [devices.bytes_of(part.tensor) for _, part in found]
                return out
        return frame.of_message(message, sequence & 0xFFFF)

    def fits(self, out: FrameOut) -> bool:
        return not out.tensors or self.lane is None or self.lane.has_room(sum(t.nbytes for t in out.tensors))

    def offer(self, tensors: list[Any]) -> None:
        """Their message is on its way by the link."""
        if self.lane is not None:
            self.lane.offer(tensors)

    async def leave(self) -> None:
        """Before a goodbye: what was offered is taken from this process, while it lives."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.linger_s
        while not self._ended and self.lane is not None and self.lane.holds:
            if loop.time() >= deadline:
                self.lost(f"{self.lane.holds} messages on a GPU were not taken within {self._settings.linger_s:g} s")
                return
            await asyncio.sleep(0.002)  # a close is rare; the lane has one listener, and a sender may be it

    # --- receiving ---

    @property
    def arriving(self) -> bool:
        """A message is here but for its buffers on a GPU: these are waited for, not what lies behind it."""
        return self._arriving is not None

    def next(self, pop: Callable[[], Message | None]) -> Message | None:
        """The next message, whole; `pop` gives what came by the link."""
        if self._arriving is None:
            message = pop()
            if message is None:
                return None
            try:
                manifest = devices.manifest_of(message, max_bytes=self._settings.max_message_bytes)
            except ValueError as err:
                self.lost(str(err))
                return None
            if manifest is None:
                return message
            self._arriving = (message, manifest)
            self._begin_arrival()
        if self._arrived is None:
            return None
        (message, manifest), tensors = self._arriving, self._arrived
        self._arriving = self._arrived = None
        return devices.join(message, manifest, tensors)

    def _begin_arrival(self) -> None:
        if self._arriving is None or self._ended or self.coming:
            return
        if self.lane is None:
            self.lost("it announced GPU buffers, and this end has no lane for them")
            return
        manifest = self._arriving[1]
        try:
            self.lane.receive(manifest.number, [size for _, size in manifest.places], self._on_arrived)
        except devices.DEVICE_ERRORS as err:
            self.lost(f"this end has no room for its {manifest.nbytes} bytes on the GPU: {str(err)[:200]}")

    def _on_arrived(self, tensors: list[Any]) -> None:
        if not self._ended:
            self._arrived = tensors
            self._wake_receiver()


Note = tuple[str, int, list[Any]]
_decode_note = msgspec.msgpack.Decoder(Note).decode


class DeviceLane(abc.ABC):
    """GPU buffers of one link, both directions. All calls and callbacks are in the loop's thread."""

    kind = "device"

    def __init__(self, gpu: Gpu, beside: Beside) -> None:
        self.gpu, self.beside = gpu, beside
        self.next = 0
        self._asked = 0  # so many messages, which are asked for in their order
        self._held: dict[int, list[Any]] = {}
        self._held_bytes = 0

    @property
    def holds(self) -> int:
        """Messages that were offered and not yet taken."""
        return len(self._held)

    def is_asked_for(self, number: int) -> bool:
        """It was, and is not let go yet."""
        return number < self._asked and number in self._held

    def has_room(self, nbytes: int) -> bool:
        return not self._held or (len(self._held) < HELD_MESSAGES and self._held_bytes + nbytes <= HELD_BYTES)

    def offer(self, tensors: list[Any]) -> None:
        """The message `next` is on its way by the link; here is what goes beside it."""
        self._held[self.next] = tensors
        self._held_bytes += sum(tensor.nbytes for tensor in tensors)
        self.next += 1

    def let_go(self, number: int) -> None:
        tensors = self._held.pop(number, None)
        if tensors is not None:
            self._held_bytes -= sum(tensor.nbytes for tensor in tensors)
            self.beside.on_room()

    def say(self, word: str, number: int, extra: list[Any] | None = None) -> None:
        self.beside.say(msgspec.msgpack.encode((word, number, extra or [])))

    def hear(self, raw: bytes | memoryview) -> None:
        """A note of the peer. What is none, or comes out of turn, breaks the link."""
        try:
            word, number, extra = _decode_note(raw)
        except msgspec.DecodeError as err:
            self.beside.lost(f"it sent a note on GPU buffers that cannot be read: {err}")
            return
        if word == "go" and number == self._asked and number in self._held:
            self._asked += 1
            self.give(number, self._held[number])
        elif word == "go" or not self.heard(word, number, extra):
            self.beside.lost(f"it sent a note {word[:20]!r} on GPU buffers {number} out of turn")

    @abc.abstractmethod
    def give(self, number: int, tensors: list[Any]) -> None:
        """The receiver waits for `number`: move it; `let_go` when it is over."""

    @abc.abstractmethod
    def heard(self, word: str, number: int, extra: list[Any]) -> bool:
        """Any other note; False: not now."""

    @abc.abstractmethod
    def receive(self, number: int, sizes: list[int], arrived: Callable[[list[Any]], None]) -> None:
        """Ask for `number`; `arrived` gets flat tensors of uint8 on this end's GPU."""

    @abc.abstractmethod
    def kill(self) -> None:
        """The link is at its end. Idempotent, returns at once."""
