"""What both ends of a cycle do alike: what has come waits to be taken, what is to go is checked where it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar

from rlinf_worker.channels import labels
from rlinf_worker.channels.account import Account, Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.labels import Labels
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.links.errors import MessageTooLarge, PayloadError
from rlinf_worker.links.message import Message

T = TypeVar("T")


class Inbox(Generic[T]):
    """In the order of coming, each with its message. What bounds it is the credit of whoever asks. `item`: of what has
    come, as the role takes it."""

    def __init__(self, host: Host, account: Account, *, what: str, item: Callable[[T, Message], Item]) -> None:
        self._host, self._account, self._what, self._item = host, account, what, item
        self._arrival = host.waits.signal()
        self._entries: deque[tuple[T, Message, float]] = deque()
        account.level = self._level

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: T, message: Message) -> None:
        self._entries.append((entry, message, monotonic()))
        self._arrival.notify()

    def leave_out(self, is_out: Callable[[T], bool]) -> None:
        self._entries = deque(item for item in self._entries if not is_out(item[0]))

    def take_now(self) -> Item | None:
        self._host.waits.raise_if_stopped()
        self._host.check_begun("take", self._account.channel)
        return self._next() if self._entries else None

    async def take(self) -> Item:
        """The wait is a span `wait_data`; ChannelClosed where the worker stops."""
        self._host.check_begun("take", self._account.channel)
        if not self._entries:
            with self._account.waiting():
                has_some, what = (lambda: bool(self._entries)), self._what
                await self._host.waits.until(has_some, self._arrival, what=what, timeout_s=None)
        return self._next()

    def _next(self) -> Item:
        self._host.peers.has_begun = True
        entry, message, _ = self._entries.popleft()
        item = self._item(entry, message)
        self._host.taken(-1)
        self._host.recorder.took(item.step, item.branch, self._account.end)
        return item

    def _level(self) -> Level:
        since = self._entries[0][2] if self._entries else monotonic()
        return Level(len(self._entries), sum(message.nbytes for _, message, _ in self._entries), monotonic() - since)


def checked(
    host: Host,
    account: Account,
    type: PayloadType | None,
    payload: Any,
    *,
    key: str,
    step: int,
    branch: int,
    version: PolicyVersion | None,
) -> tuple[Labels, Message, int]:
    """What is to go, encoded, and its bytes. Raises PayloadError and MessageTooLarge, counted; the cycle goes on."""
    try:
        said = labels.checked(account.channel, key=key, step=step, branch=branch, weight=1.0, version=version)
        if type is not None:
            type.check(payload, account.channel, said.key)
        message = Message(b"", payload)
        nbytes = message.nbytes
        host.check_size(nbytes, channel=account.channel, key=said.key)
    except (PayloadError, MessageTooLarge) as error:
        account.refused[error.reason] += 1
        raise
    return said, message, nbytes
