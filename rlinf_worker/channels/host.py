"""What the channel ends of a worker share: links, the word to the driver, waits, accounts, spans. No behaviour."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_worker.channels.account import Account
from rlinf_worker.channels.in_hand import TicketsInHand
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.links.errors import MessageTooLarge
from rlinf_worker.links.peers import PeerLinks
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import MemoryUse
from rlinf_worker.uplink.dialling import Drainable

HEAD_BYTES: Final = 64 << 10
"""The part of a message's bound that is kept for what travels with a payload: its place, and the numbers of up to 7,000
answers that have come. What a link refused after `put` had returned would be sent again for ever."""


class MarkForDriver(Protocol):
    def __call__(self, source: Drainable[pb.WorkerMessage], *, can_wait: bool = False) -> None: ...


@dataclass(slots=True, kw_only=True)
class Host:
    worker: str
    role: str
    peers: PeerLinks
    waits: Waits
    recorder: Recorder
    tell: Callable[[pb.WorkerMessage], None]
    """Tells the driver. A broken stream loses it, so only what is told again after the next Hello goes this way."""
    mark: MarkForDriver
    """Ask this one to drain in the next batch. `can_wait`: for one that goes for another reason, or a little later."""
    finish_item: Callable[[Item], None]
    """Acknowledge an item of whichever channel it is from."""
    fatal: Callable[[BaseException], None]
    """Ends this worker with that error."""
    taken: Callable[[int], None] = lambda step: None
    """The role has taken something of that step, which its channel's account has; -1: a question of a cycle."""
    may_begin: Callable[[], bool] = lambda: True
    """Whether the role's `ctx.ready()` was answered: all have loaded, and there is work."""
    memory: Callable[[], MemoryUse | None] = lambda: None
    """The memory that this worker has in use; None: it is as it was told last."""
    newest_branch: Callable[[], int] = lambda: 0
    """The newest branch that this worker knows of."""
    weights_version: Callable[[], PolicyVersion | None] = lambda: None
    """The version of the weights that it has pulled or published last; None: it has none."""
    max_staleness: Callable[[], int] = lambda: 0
    """The job's bound of staleness, in policy versions."""
    link_settings: LinkSettings = field(default_factory=LinkSettings)
    peer_wait_s: float = Settings().peer_wait_s
    meet_wait_s: float = Settings().meet_wait_s
    in_hand: TicketsInHand = field(default_factory=TicketsInHand)
    accounts: list[Account] = field(default_factory=list)
    _conversations: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_conversation(self) -> int:
        return next(self._conversations)

    def account(self, channel: str, side: str) -> Account:
        account = Account(channel=channel, side=side, recorder=self.recorder)
        self.accounts.append(account)
        return account

    def check_begun(self, verb: str, channel: str) -> None:
        """For whatever a role does at a channel. Before all are ready nothing comes, and nobody is ready who waits for
        it. One that was told to stop has its end told by the wait."""
        if not self.may_begin() and self.waits.stopped is None:
            raise UserError(
                f"role {self.role!r} cannot {verb} yet in channel {channel!r}", got=f"{verb} before ctx.ready()",
                wanted="a role that has said that it is ready",
                next=f"call await ctx.ready() once it has loaded, before the first {verb}",
            )  # fmt: skip

    def check_size(self, nbytes: int, *, channel: str, key: str) -> None:
        bound = self.link_settings.max_message_bytes - HEAD_BYTES - 4 * len(key)
        if nbytes > bound:
            raise MessageTooLarge(
                f"item {key[:100]!r} of channel {channel!r} cannot be sent", got=f"{nbytes} bytes",
                wanted=f"at most {bound}", next="send it in parts",
            )  # fmt: skip
