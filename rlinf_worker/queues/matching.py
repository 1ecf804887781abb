"""Who of the consumers of one queue gets which unit: by credit, affinity, age and weight. Pure. For: queues.core; the
rounds of a gang are queues.steps.

What is ready is in lines (queues.lines), and who has room in a heap here: a message costs what it hands out, whatever
waits and however many consumers there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from rlinf_api.names import WorkerId
from rlinf_worker.queues.book import UnitBook
from rlinf_worker.queues.together import Homes
from rlinf_worker.queues.units import Age, UnitEntry, UnitInfo

Given = dict[WorkerId, list[UnitInfo]]
"""What each consumer is given, in the order in which it is to have it."""
_Offer = tuple[float, int, int]  # weight of what it has, -credit, index


class Consumers:
    """The consumers of one queue: all of the roster, present or not, and how much each can take from now on (rounds,
    for a gang)."""

    def __init__(self) -> None:
        self.on_ranked: Callable[[], None] = lambda: None
        self.homes: Homes | None = None  # where units of one ticket go together
        self._ranked: Sequence[WorkerId] = ()
        self._index: dict[WorkerId, int] = {}
        self._credit: dict[WorkerId, int] = {}
        self._news: dict[WorkerId, None] = {}  # whose credit was stated
        self._offers: list[_Offer] = []  # a heap, in which some do not stand any more
        self._offer_of: dict[WorkerId, _Offer] = {}  # those that do

    @property
    def ranked(self) -> Sequence[WorkerId]:
        """Affinity counts over these."""
        return self._ranked

    @ranked.setter
    def ranked(self, consumers: Sequence[WorkerId]) -> None:
        self._ranked, self._index = consumers, {consumer: index for index, consumer in enumerate(consumers)}
        self._offers, self._offer_of = [], {}
        self._news |= dict.fromkeys(self._credit)
        self.on_ranked()

    def consumer_of(self, unit: UnitInfo) -> WorkerId | None:
        """Who alone may have it."""
        if unit.affinity is not None and self._ranked:
            return self._ranked[unit.affinity % len(self._ranked)]
        return self.homes.of(unit) if self.homes is not None else None

    # --- credit -------------------------------------------------------------------------------------------------------
    def credit(self, consumer: WorkerId, units: int) -> None:
        """Stated anew: it is absolute."""
        self._credit[consumer] = max(0, units)
        self._news[consumer] = None

    def credit_of(self, consumer: WorkerId) -> int:
        return self._credit.get(consumer, 0)

    def spend(self, consumer: WorkerId) -> None:
        self._credit[consumer] -= 1

    def remove(self, consumer: WorkerId) -> None:
        self._credit.pop(consumer, None)
        self._offer_of.pop(consumer, None)

    def take_news(self) -> Iterable[WorkerId]:
        news, self._news = self._news, {}
        return news

    # --- who is next --------------------------------------------------------------------------------------------------
    def offer(self, consumer: WorkerId, *, weight: float) -> None:
        """It stands with its credit and what it has to do by now."""
        index, credit = self._index.get(consumer), self.credit_of(consumer)
        self._offer_of.pop(consumer, None)
        if index is None or not credit:
            return
        offer = self._offer_of[consumer] = weight, -credit, index
        if len(self._offers) > 2 * len(self._offer_of) + 8:
            self._offers = sorted(self._offer_of.values())
        else:
            heapq.heappush(self._offers, offer)

    def best(self) -> WorkerId | None:
        """Who has least to do, and of two equals can take more. Credit alone does not say it: it is what is left of a
        number that is stated anew once all of it was used, so that who has used a part seems to have less room."""
        while self._offers:
            consumer = self._ranked[self._offers[0][2]]
            if self._offer_of.get(consumer) is self._offers[0]:
                return consumer
            heapq.heappop(self._offers)
        return None


def hand_out(book: UnitBook, consumers: Consumers) -> Given:
    """What waits and is ready, within credit: the oldest policy version first, then by arrival.

    What only one consumer may have goes first; the rest to whoever has least to do by weight, of two equals to the one
    that can take more.
    """
    given: Given = {}

    def give(entry: UnitEntry, consumer: WorkerId) -> None:
        book.assign(entry, consumer)
        given.setdefault(consumer, []).append(entry.unit)
        consumers.spend(consumer)
        if consumers.homes is not None:
            consumers.homes.settle(entry.unit, consumer)

    def give_own(age: Age, consumer: WorkerId) -> None:
        while consumers.credit_of(consumer) and (entry := book.lines.first_of(age, only=consumer)) is not None:
            give(entry, consumer)

    if not book.lines:
        for consumer in {**dict.fromkeys(consumers.take_news()), **dict.fromkeys(book.loads.take_lighter())}:
            consumers.offer(consumer, weight=book.loads.weight_of(consumer))
        return given
    news = {**dict.fromkeys(consumers.take_news()), **dict.fromkeys(book.lines.take_pinned())}
    for consumer in {**news, **dict.fromkeys(book.loads.take_lighter())}:
        consumers.offer(consumer, weight=book.loads.weight_of(consumer))
    for age in book.lines.ages():
        for consumer in news:
            had = consumers.credit_of(consumer)
            give_own(age, consumer)
            if consumers.credit_of(consumer) != had:
                consumers.offer(consumer, weight=book.loads.weight_of(consumer))
        while (best := consumers.best()) is not None and (entry := book.lines.first_of(age, only=None)) is not None:
            give(entry, best)
            give_own(age, best)  # what goes together with it
            consumers.offer(best, weight=book.loads.weight_of(best))
    return given
