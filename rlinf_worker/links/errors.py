"""The errors of the data plane.

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

from rlinf_api.errors import Refused, Stale, UserError, WorkerUnreachable


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


class PayloadError(UserError):
    """A value that cannot travel, or a received header that cannot be understood. The link goes on."""


class MessageTooLarge(UserError):
    """One message above the bound. The link goes on."""


class ShmTooSmall(UserError):
    """No room in the shared-memory directory."""


class SocketPathTooLong(UserError):
    """A unix socket's path has at most 107 bytes."""
