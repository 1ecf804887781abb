"""What the channel ends of a worker share: links, the word to the driver, waits, accounts, spans. No behaviour.

Made by runtime.worker, read by streams, queues, weights and the gang.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.account import Account
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links.errors import MessageTooLarge
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.spans import Recorder
from rlinf_worker.uplink.dialling import Drainable

if TYPE_CHECKING:
    from rlinf_worker.channels.protocol import Item

HEAD_BYTES: Final = 64 << 10
"""The part of a message's bound that is kept for what travels with a payload: its place, and acknowledgements of up to
4,000 streams. What a link refused after `put` had returned would be sent again for ever."""
MAX_UNANSWERED: Final = 1024  # many times what the credit of all routes lets a role have in hand
ABSENT: Final = object()
PEER_WAIT_S: Final = 1800.0  # for a peer that is being replaced, its model load included, or for room that it makes


@dataclass(slots=True, kw_only=True)
class Host:
    worker: str
    role: str
    peers: PeerLinks
    waits: Waits
    recorder: Recorder
    tell: Callable[[pb.WorkerMessage], None]
    """To the driver; lost with a broken stream, so only what is told again after the next Hello."""
    mark: Callable[[Drainable[pb.WorkerMessage]], None]
    """Ask this one to drain in the next batch."""
    finish_item: Callable[[Item], None]
    """Acknowledge an item of whichever channel it is from."""
    fatal: Callable[[BaseException], None]
    """Ends this worker with that error."""
    link_settings: LinkSettings = field(default_factory=LinkSettings)
    accounts: list[Account] = field(default_factory=list)
    on_routed: list[Callable[[tuple[str, int]], None]] = field(default_factory=list)
    """A life to which answers can go now, told to whoever keeps questions of it."""
    _unanswered: dict[tuple[str, int, str], None] = field(default_factory=dict)
    _streams: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_stream(self) -> int:
        return next(self._streams)

    def account(self, channel: str, side: str) -> Account:
        account = Account(channel=channel, side=side)
        self.accounts.append(account)
        return account

    def note_unanswered(self, worker: str, attempt: int, key: str) -> None:
        """An answer to that life went nowhere. `was_unanswered` is asked once, when the question is acknowledged."""
        self._unanswered[worker, attempt, key] = None
        while len(self._unanswered) > MAX_UNANSWERED:  # questions that nobody acknowledges
            del self._unanswered[next(iter(self._unanswered))]

    def was_unanswered(self, worker: str, attempt: int, key: str) -> bool:
        return bool(self._unanswered) and self._unanswered.pop((worker, attempt, key), ABSENT) is not ABSENT

    def check_size(self, nbytes: int, *, channel: str, key: str) -> None:
        bound = self.link_settings.max_message_bytes - HEAD_BYTES - 4 * len(key)
        if nbytes > bound:
            raise MessageTooLarge(
                f"item {key[:100]!r} of channel {channel!r} cannot be sent", got=f"{nbytes} bytes",
                wanted=f"at most {bound}", next="send it in parts",
            )  # fmt: skip
