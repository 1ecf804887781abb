"""What every link owes its user: the `Link` protocol, its settings, its counters and the errors of the data plane.

For: channels and weights (they hold `Link`s and know nothing else of this package), and whoever writes a new link.
Not for: making links (`endpoint`) or saying what is in a message (`message`, `payload`).

A new link (gloo, CUDA IPC, NCCL) subclasses `base.BaseLink`, joins the parametrised suite in
`tests/unit/rlinf_worker/links/test_every_link.py` and takes its place in `endpoint.dial`.

    RetryableError
    ├─ WorkerUnreachable
    │   └─ LinkBroken          the peer died, hung up or is out of reach
    │       └─ LinkClosed          ... or closed in good order, after everything it sent has been received
    └─ Stale
        └─ LinkStale           the dialer, or the one that was dialled, is of an older attempt
    UserError
    ├─ PayloadError            a value that cannot be sent, or a header that cannot be read
    ├─ MessageTooLarge         above `LinkSettings.max_message_bytes`
    ├─ ShmTooSmall             the shared-memory directory has no room for a ring
    ├─ SocketPathTooLong       the run directory is too deep for a unix socket
    └─ Refused
        └─ LinkRefused         other protocol number, other job, other worker than was dialled, not admitted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlinf_api.errors import Refused, Stale, UserError, WorkerUnreachable

if TYPE_CHECKING:
    from rlinf_worker.links.devices import Gpu
    from rlinf_worker.links.hello import Identity
    from rlinf_worker.links.message import Message

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


BULK_WAYS = ("plain", "tls", "gloo")
"""What `LinkSettings.bulk` may be."""

GPU_WAYS = ("direct", "host")
"""What `LinkSettings.gpu` may be."""


class LinkBroken(WorkerUnreachable):
    """The link is of no more use. `peer` says whose, `why` says what happened, in words for a condition."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"the link to worker {peer} is broken: {why}", next="dial its next attempt", delay_s=0.1)
        self.peer, self.why = peer, why


class LinkClosed(LinkBroken):
    """The link was closed in good order, here or by the peer."""


class LinkStale(Stale):
    """One end is of an older attempt than the other end knows of."""


class LinkRefused(Refused):
    """The other end answered the hello with no, or this end did."""

    is_older = False
    """It speaks the protocol before ours, and may be asked again in that."""


class PayloadError(UserError):
    """A value that cannot travel, or a received header that cannot be understood. The link goes on."""


class MessageTooLarge(UserError):
    """One message above the bound. The link goes on."""


class ShmTooSmall(UserError):
    """No room in the shared-memory directory."""


class SocketPathTooLong(UserError):
    """A unix socket's path has at most 107 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Bounds of one link. The dialer and the listener may differ: each setting binds the end that has it."""

    ring_bytes: int = 1 * MIB
    """Shared-memory ring per direction at connect time. A thousand 1 KB messages in flight, sixteen of 64 KB; small,
    because its pages are reserved (and charged to the pod) at once and a job has hundreds of links."""

    max_ring_bytes: int = 256 * MIB
    """How far a ring may grow. It grows (to three times the message) when the first message above half of it is sent:
    three hold one being read, one waiting and one being written. What does not fit even then goes in chunks."""

    copy_out_bytes: int = 64 * KIB
    """Received messages up to this size are copied out of the ring: 3 us at 64 KiB, and nobody has to release them."""

    max_message_bytes: int = 4 * GIB
    """Above it `send` raises MessageTooLarge, and a received frame breaks the link: no peer makes us allocate more."""

    outbox_bytes: int = 24 * MIB
    """TCP and in-process: bytes accepted by `send` and not yet taken by the kernel or the receiver. One message is
    always accepted when there is none. Three of the largest that weights send (8 MiB): one on its way, one announced,
    one being put together; with 8 MiB the lane stood still between two, a seventh of the time."""

    inbox_bytes: int = 24 * MIB
    """TCP: bytes received and not yet asked for by `recv`; above it the socket is not read, and the peer feels it. As
    many as the sender's."""

    bulk: str = "plain"
    """TCP: where buffers of large messages go. `plain`: a second, unencrypted connection, let in by a secret told over
    the first (adr 17: several times as fast; gloo's and NCCL's collectives are unencrypted too, and the job's
    NetworkPolicy keeps strangers from its pods). `tls`: nowhere else. `gloo`: torch's, where both ends have it
    loaded, else `plain`; no faster, and for networks that make it so. Where one end says `tls`, that holds; where the
    ends differ otherwise, `plain`. RLINF_LINK_BULK sets it."""

    gpu: str = "direct"
    """Where buffers on a GPU go. `direct`: beside the link, by CUDA IPC or NCCL, where both ends can; it costs no host
    memory and no copy through it. `host`: by the link, as any other; where one end says so, that holds.
    RLINF_LINK_GPU sets it."""

    bulk_from_bytes: int = 256 * KIB
    """Buffers of one message from which on they take the second way. It costs two changes of thread at each end, some
    0.1 ms on an idle machine and more on a busy one; encrypting 256 KiB takes 0.5 ms."""

    dial_timeout_s: float = 5.0
    """Connecting, TLS and hello together. A TLS handshake takes 2-3 ms; the rest is a loaded machine."""

    hello_timeout_s: float = 5.0
    """How long an accepted connection may keep silent before its hello."""

    lost_after_s: float = 5.0
    """TCP: a node that acknowledges nothing for this long is lost (DESIGN.md: a lost pod is noticed in <= 6 s)."""

    linger_s: float = 5.0
    """How long `close` waits for accepted messages to leave."""


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

    Side and order: made by `endpoint`, then used by one event loop. Any number of tasks may `send`; one task `recv`s
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
