"""What every link owes its user: the `Link` protocol and its counters.

For: channels and weights (they hold `Link`s and know nothing else of this package), and whoever writes a new link.
Not for: making links (`listener`), saying what is in a message (`message`, `payload`), nor for the ways in which a link
fails (`errors`) and its bounds (`settings`).

A new link subclasses `base.BaseLink`, joins the parametrised suite in
`tests/unit/rlinf_worker/links/test_every_link.py` and takes its place in `listener.dial`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlinf_worker.links.devices import Gpu
from rlinf_worker.links.errors import LinkBroken
from rlinf_worker.links.hello import Identity
from rlinf_worker.links.message import Message


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


class Link(Protocol):
    """A bidirectional, ordered connection between two workers; one message is one unit of everything.

    Side and order: made by `listener`, then used by one event loop. Any number of tasks may `send`; one task `recv`s
    (the layer above has one pump per link, which hands messages to routes). `close` may be called at any time.
    """

    @property
    def kind(self) -> str:
        """`inproc`, `shm` or `tcp`."""
        ...

    @property
    def me(self) -> Identity: ...

    @property
    def peer(self) -> Identity: ...

    @property
    def counters(self) -> Counters: ...

    def could_gain(self, now: Gpu | None) -> bool:
        """Made again, with `now` as this process's GPU, it could have a lane that it has not: a process says of its GPU
        in the hello, and may have begun to use it only after that."""
        ...

    @property
    def broken(self) -> LinkBroken | None:
        """Why the link is of no more use (LinkClosed after a close), or None. Messages may still wait in `recv`."""
        ...

    async def wait_broken(self) -> LinkBroken:
        """Returns (does not raise) the reason once there is one. Cancellable."""
        ...

    async def send(self, message: Message) -> None:
        """Hand over a message; waits while the link is full.

        Returns when the link has accepted it: it will be received, in order, unless the link breaks. The value must not
        be changed afterwards, ever: in the same process the receiver gets the very objects. Raises PayloadError,
        MessageTooLarge (the link goes on) and LinkBroken. Cancelled: accepted whole or not at all; callers that must
        know number their messages. Callers are served in the order in which they called.
        """
        ...

    def send_nowait(self, message: Message) -> bool:
        """As `send`, but False where `send` would wait. Overtakes nobody."""
        ...

    async def recv(self) -> Message:
        """The next message. One caller at a time. Cancelled: no message is lost.

        Raises LinkBroken, after everything that arrived whole has been returned. Large messages may view the link's
        memory: whoever takes the message out of `recv` lets go of it and of all arrays decoded from it (or calls
        `Message.release` and lets go of the arrays); until then the sender has that much less room, and nothing is ever
        overwritten under a living view.
        """
        ...

    async def close(self) -> None:
        """Send what was accepted (at most `linger_s`), say goodbye, give everything back. Idempotent."""
        ...

    def abort(self, why: str) -> None:
        """Break the link now, for example on the control plane's word that the peer's node is lost."""
        ...
