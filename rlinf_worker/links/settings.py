"""Bounds of one link, each with its reason. The worker that makes a link gives them to it; its defaults are here."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


BULK_WAYS = ("plain", "tls")
"""What `LinkSettings.bulk` may be."""

GPU_WAYS = ("direct", "host")
"""What `LinkSettings.gpu` may be."""


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
    """TCP: bytes accepted by `send` and not yet taken by the kernel. One message is
    always accepted when there is none. Three of the largest that weights send (8 MiB): one on its way, one announced,
    one being put together; with 8 MiB the lane stood still between two, a seventh of the time."""

    inbox_bytes: int = 24 * MIB
    """TCP: bytes received and not yet asked for by `recv`; above it the socket is not read, and the peer feels it. As
    many as the sender's."""

    bulk: str = "plain"
    """TCP: where buffers of large messages go. `plain`: a second, unencrypted connection, let in by a secret told over
    the first (adr 17: several times as fast; gloo's and NCCL's collectives are unencrypted too, and the job's
    NetworkPolicy keeps strangers from its pods). `tls`: nowhere else. Where one end says `tls`, that holds.
    RLINF_LINK_BULK sets it."""

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
