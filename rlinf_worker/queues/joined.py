"""Units that have several inputs: one item from each of several channels, all of the same key.

For: the step loop and roles with more than one input. Not for: who gets which unit (matching.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_worker.channels.protocol import Channel, Item


class Joined:
    """Units with all their inputs: taken from the first channel, completed from the others, whichever comes first."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._first, self._others = channels[0], channels[1:]
        self._early: list[dict[tuple[int, str], Item]] = [{} for _ in self._others]

    async def take(self) -> tuple[Item, ...]:
        return await self.complete(await self._first.take())

    async def take_now(self) -> tuple[Item, ...] | None:
        """None where no unit is there; its other inputs are waited for: they are on their way."""
        item = self._first.take_now()
        return None if item is None else await self.complete(item)

    async def complete(self, item: Item) -> tuple[Item, ...]:
        found = [item]
        for channel, early in zip(self._others, self._early, strict=True):
            while (part := early.pop((item.branch, item.key), None)) is None:
                came = await channel.take()
                early[(came.branch, came.key)] = came
            found.append(part)
        return tuple(found)

    def drop(self, items: Sequence[Item], reason: str) -> None:
        for channel, item in zip((self._first, *self._others), items, strict=True):
            channel.drop(item, reason)

    def forget(self, branch: int) -> None:
        """Parts of units of dead branches, whose first part will not come any more."""
        for channel, early in zip(self._others, self._early, strict=True):
            for uid in [uid for uid in early if uid[0] < branch]:
                channel.drop(early.pop(uid), "cancelled")
