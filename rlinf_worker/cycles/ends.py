"""What both ends of a cycle do alike: what has come waits to be taken, what is to go is checked where it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any, Generic, TypeVar

from rlinf_worker.channels import labels
from rlinf_worker.channels.account import Account, Level
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.labels import Labels
from rlinf_worker.channels.payload_type import PayloadType
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.channels.waiting import each
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


class CycleEnd(ABC, Generic[T]):
    """Takes what comes, each a T with its message, and gives what goes."""

    def __init__(
        self, host: Host, name: str, *, gives: PayloadType | None, takes: PayloadType | None, what: str
    ) -> None:
        """`what`: what is waited for, as sentences have it."""
        self._host, self.name, self._gives, self._takes = host, name, gives, takes
        self.declared = gives.fingerprint if gives is not None else 0
        self.account_out, self.account_in = host.account(name, "producer"), host.account(name, "consumer")
        self.account_out.level = self._level_out
        awaited = f"{what} of cycle {name!r} for {host.worker}"
        self.inbox = Inbox[T](host, self.account_in, what=awaited, item=self._item)
        self.take, self.take_now = self.inbox.take, self.inbox.take_now

    @abstractmethod
    def _item(self, entry: T, message: Message) -> Item:
        """As the role takes it."""

    @abstractmethod
    def _level_out(self) -> Level: ...

    def __aiter__(self) -> AsyncIterator[Item]:
        return each(self.take)

    def _checked(
        self, payload: Any, *, key: str, step: int, branch: int, version: PolicyVersion | None
    ) -> tuple[Labels, Message, int]:
        """What is to go, encoded, and its bytes. PayloadError and MessageTooLarge are counted; the cycle goes on."""
        try:
            said = labels.checked(self.name, key=key, step=step, branch=branch, weight=1.0, version=version)
            if self._gives is not None:
                self._gives.check(payload, self.name, said.key)
            message = Message(b"", payload)
            nbytes = message.nbytes
            self._host.check_size(nbytes, channel=self.name, key=said.key)
        except (PayloadError, MessageTooLarge) as error:
            self.account_out.refused[error.reason] += 1
            raise
        return said, message, nbytes
