"""The buffers on a GPU that go beside one link: its lane, and the message whose buffers are on their way.

For: `link`, and `meet_gpus`, which brings the lane when both ends have agreed on one. Not for: how buffers are split
from a message and joined to it (`devices`), nor how they move (`cuda`, `nccl`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlinf_worker.links import devices, frame
from rlinf_worker.links.counters import Counters
from rlinf_worker.links.devices import BuffersBeside, DeviceLane
from rlinf_worker.links.frame import FrameOut
from rlinf_worker.links.message import Message
from rlinf_worker.links.settings import LinkSettings


class Beside:
    """`say` takes a note to the peer's lane, which overtakes messages; `on_room` and `on_arrived` wake who sends and
    who receives; `lost` breaks the link."""

    def __init__(
        self, settings: LinkSettings, counters: Counters, *, say: Callable[[bytes], None], on_room: Callable[[], None],
        on_arrived: Callable[[], None], lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.say, self.on_room, self.lost = say, on_room, lost
        self._settings, self._counters, self._wake_receiver = settings, counters, on_arrived
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
                out = frame.of_message(devices.split(message, found, lane.next_number), sequence & 0xFFFF)
                out.tensors = [devices.bytes_of(part.tensor) for _, part in found]
                return out
        return frame.of_message(message, sequence & 0xFFFF)

    def fits(self, out: FrameOut) -> bool:
        return not out.tensors or self.lane is None or self.lane.has_room(sum(t.nbytes for t in out.tensors))

    def offer(self, out: FrameOut) -> None:
        """It is on its way by the link."""
        if out.tensors and self.lane is not None:
            self.lane.offer(out.tensors)
            self._counters.device_messages += 1

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
