"""What one end of a link has carried: kept by the link, added up by `tally`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """One link end's account since it was made. Waits are the time that a caller spent suspended."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0
    send_wait_s: float = 0.0
    recv_wait_s: float = 0.0
    doorbells: int = 0
    """Shared memory: wake-ups of the peer, each a system call. None while the peer is awake."""
    chunked_messages: int = 0
    """Shared memory: messages that did not fit in any ring."""
    refused_messages: int = 0
    """PayloadError and MessageTooLarge at `send`; nothing of these left."""
    bulk_messages: int = 0
    """TCP: messages whose buffers went by the lane."""
    device_messages: int = 0
    """Messages whose buffers went from GPU to GPU."""

    def count_sent(self, nbytes: int) -> None:
        self.sent_messages += 1
        self.sent_bytes += nbytes
