"""Tickets of which a role has something in hand, over all queues of its worker: what it may make units of. Pure.

    take(item) ── put(key of a ticket of it) ── end(item)

A role may also make units of what its partners in cycles take, or the other ranks of its gang, whom it hears of in ways
of its own. Only where it has neither is every ticket that it knows of here (`has_all`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels.protocol import Item


class TicketsInHand:
    def __init__(self) -> None:
        self._items: dict[str, int] = {}  # by ticket
        self.has_all = False
        """No other ticket can be known to this role."""

    def take(self, item: Item) -> None:
        for ticket in item.tickets:
            self._items[ticket] = self._items.get(ticket, 0) + 1

    def end(self, item: Item) -> None:
        """The role is through with it."""
        for ticket in item.tickets:
            if (left := self._items.pop(ticket, 1) - 1) > 0:
                self._items[ticket] = left

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._items

    def __len__(self) -> int:
        return len(self._items)


def takes_all_itself(role: str, specs: Iterable[pb.ChannelSpec]) -> bool:
    """Whether it takes from queues, and nobody could tell it of tickets that others take. `specs`: of all channels."""
    specs = list(specs)
    taken = [spec for spec in specs if spec.mode == "Queue" and spec.consumer]
    partners = _partners(role, [spec for spec in specs if spec.mode == "Cycle"])
    mine = [spec for spec in taken if spec.consumer == role]
    return bool(mine) and not any(spec.rounds for spec in mine) and all(s.consumer not in partners for s in taken)


def _partners(role: str, cycles: Sequence[pb.ChannelSpec]) -> set[str]:
    """Whom it asks or answers, and theirs, without itself."""
    found, left = {role}, [role]
    while left:
        one = left.pop()
        ends = [{cycle.producer, cycle.consumer} for cycle in cycles]
        fresh = set[str]().union(*(pair for pair in ends if one in pair)) - found
        found |= fresh
        left += fresh
    return found - {role}
