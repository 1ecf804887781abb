"""What becomes of the units of one queue: the pure core that the driver keeps. No I/O, no clock, no payload.

    announced by a producer ──match()──> assigned ──held()──> held ──acked()──> gone (released to the producer)
          ▲                                 │                   │
          └──────── consumer lost ──────────┴───────────────────┘        producer lost before held: `lost`

A unit is the same unit by (branch, lineage key), whoever makes it: announcing it again changes nothing. What a dead
producer took along is reported as lost, so that the driver hands its tickets out again. One instance per queue; every
method returns what has to be told to whom. Who is given what: queues.matching, and queues.steps for a gang. Who
goes: queues.departures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from rlinf_api.names import WorkerId
from rlinf_worker.queues import matching
from rlinf_worker.queues.book import Past, UnitBook
from rlinf_worker.queues.departures import Departures
from rlinf_worker.queues.joint import Joint
from rlinf_worker.queues.matching import Consumers, Given
from rlinf_worker.queues.steps import OpenSteps, Order, RoundAssignment
from rlinf_worker.queues.together import Homes
from rlinf_worker.queues.units import COUNTED, GONE, INLINE, Age, UnitId, UnitInfo, UnitState


class Announced(NamedTuple):
    """What was not known before, and what its producers are told at once."""

    news: list[UnitInfo]
    duplicates: list[UnitInfo]  # which they may free
    held: list[UnitInfo]  # a consumer has it from one who is gone; who made it again keeps it for the next


class QueueCore:
    def __init__(
        self,
        *,
        micro_batch: int = 1,
        rounds: bool = False,
        order: Order = "arrival",
        first_round: int = 1,
    ) -> None:
        """`first_round`: of every step; higher in a newer driver, so that its rounds are never taken for older ones."""
        self.micro_batch, self.rounds = micro_batch, rounds
        self.consumers = Consumers()
        self.book = UnitBook(consumer_of=self.consumers.consumer_of)
        self.consumers.on_ranked = self.book.look_at_all
        self.is_end = False
        self.joint = Joint(self.book, knows=self.knows)
        self._finished = Past[bool](by_ticket=True)  # acked or dropped
        self._on_the_way = Past[tuple[UnitInfo, WorkerId]]()
        """Units whose producer died when they had just been handed out: lost, unless their consumer says `held` yet. Of
        a gang, whose ranks must not train on one twice, only this rank may be given it again."""
        self.steps = OpenSteps(
            self.book, self.consumers, on_the_way=self._on_the_way, order=order, first_round=first_round
        )
        self.counts = dict.fromkeys(COUNTED, 0)
        self.departures = Departures(
            self.book, self.consumers, self.steps, on_the_way=self._on_the_way, counts=self.counts
        )
        if rounds:
            self.end_here()

    def end_here(self) -> None:
        """Its units are what a step waits for, and nothing is made of them."""
        self.is_end = self.book.is_last = True
        self._finished.by_ticket = False  # what is made again does not pass it a second time

    # --- units --------------------------------------------------------------------------------------------------------
    def announce(self, units: Iterable[UnitInfo]) -> Announced:
        news, duplicates, held = list[UnitInfo](), list[UnitInfo](), list[UnitInfo]()
        for unit in units:
            known = self.book.get(unit.id)
            if known is not None and known.unit.producer == GONE != unit.producer:
                # Whoever dies with it from now on takes nothing along.
                self.book.change(known, replace(known.unit, producer=unit.producer))
                held.append(known.unit)
                continue
            is_known = unit.id in self._finished.known or (known is not None and known.unit.producer != unit.producer)
            step = self.steps.at(unit.age) if self.is_end and known is None else None
            if is_known or (step is not None and step.is_another_draw(unit)):
                duplicates.append(unit)
            elif known is None:
                self.book.add(unit)
                if step is not None:
                    step.know(unit)
                if len(self._on_the_way) and not self.rounds:
                    self._on_the_way.pop(unit.id)
                news.append(unit)
            elif unit.producer == INLINE:
                self.book.change(known, unit)  # a consumer that restored it could not say its affinity
        self.counts["announced"] += len(news)
        self.counts["duplicates"] += len(duplicates)
        return Announced(news, duplicates, held)

    def _given_here(self, unit: UnitInfo) -> None:
        if self.is_end:
            step = self.steps.at(unit.age)
            step.know(unit)
            step.give(unit.key)

    def rehome(self, units: Iterable[UnitInfo]) -> list[UnitInfo]:
        """With another affinity than before; what is handed out already stays where it is. Returns those that wait."""
        found = [(entry, u) for u in units if (entry := self.book.get(u.id)) and entry.unit.affinity != u.affinity]
        for entry, unit in found:
            self.book.change(entry, replace(entry.unit, affinity=unit.affinity))
        return [entry.unit for entry, _ in found if entry.state is UnitState.WAITING]

    def knows(self, uid: UnitId) -> bool:
        return uid in self.book.entries or uid in self._finished.known

    def restore_held(self, consumer: WorkerId, unit: UnitInfo) -> bool:
        """A reconnecting consumer says that it has this unit, unacknowledged. False: nobody needs it there."""
        entry = self.book.get(unit.id)
        if unit.id in self._finished.known:
            return False
        if entry is not None and entry.consumer not in (None, consumer):
            return True  # another has it: whoever finishes what it makes of it first, wins
        if (homes := self.consumers.homes) is not None:
            if homes.of(unit) not in (None, consumer):
                return False  # another has what it belongs together with: its ticket makes it again, for that one
            homes.settle(unit, consumer)
        if entry is None:
            self.book.add(unit, UnitState.HELD, consumer)
        else:
            self.book.move(entry, UnitState.HELD, consumer=consumer, number=entry.round)
        self._on_the_way.pop(unit.id)
        self._given_here(unit)
        return True

    def sealed(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> None:
        """Its consumer makes no more of these, and keeps them until what it made is held."""
        for entry in map(self.book.get, (UnitId(branch, key) for key in keys)):
            if entry is not None and entry.consumer == consumer and entry.state is UnitState.HELD:
                self.book.seal(entry)

    def assigned_to(self, consumer: WorkerId) -> tuple[list[UnitInfo], list[RoundAssignment]]:
        """What it may not have heard of when its stream broke, to be said again: (units, rounds with its part)."""
        mine = self.book.loads.of(consumer)
        if self.rounds:
            return [], self.steps.told_again(consumer, mine)
        return [e.unit for e in mine if e.state is UnitState.ASSIGNED], []

    def requeue(self, unit: UnitInfo) -> None:
        """Make a finished unit wait again: what was made from it is lost."""
        self._finished.pop(unit.id)
        if unit.id not in self.book.entries:
            self.book.add(unit)
            self.counts["redelivered"] += 1

    def expect_again(self, tickets: Iterable[UnitId]) -> None:
        """They are worked on again: in a chain of queues, what comes of them passes this one a second time."""
        for ticket in tickets:
            for uid in self._finished.pop_ticket(ticket):
                self.joint.tell_first(uid)

    def held(self, consumer: WorkerId, *, branch: int, keys: Iterable[str]) -> list[UnitInfo]:
        """Returns the units that are newly held, so that their producers hear of it."""
        news, entries = [], self.book.entries
        for key in keys:
            entry = entries.get((branch, key))
            if entry is not None and entry.consumer == consumer and entry.state is UnitState.ASSIGNED:
                self.book.hold(entry)
                news.append(entry.unit)
                continue
            way = self._on_the_way.get(uid := UnitId(branch, key))
            if way and way[1] == consumer and (entry is None or entry.state is UnitState.WAITING):
                self._on_the_way.pop(uid)
                if entry is None:
                    self.book.add(way[0], UnitState.HELD, consumer)
                else:
                    self.book.move(entry, UnitState.HELD, consumer=consumer)
                    news.append(entry.unit)
                self._given_here(way[0])
        return news

    def acked(self, consumer: WorkerId, *, branch: int, keys: Iterable[str], count: str = "acked") -> list[UnitInfo]:
        """Returns the units that are finished: released to their producers. `count`: "dropped", by decision."""
        done, entries = [], self.book.entries
        for key in keys:
            entry = entries.get((branch, key))
            if entry is not None and entry.consumer == consumer:
                done.append(self.book.pop(entry.unit.id))
                self._finished.add(entry.unit, False)
        self.counts[count] += len(done)
        return done

    def withdraw(self, uid: UnitId) -> list[UnitInfo]:
        """Nobody needs what is made of it: whoever has it says no more of it that counts."""
        unit = self.book.pop(uid)
        self._finished.add(unit, False)
        self.counts["dropped"] += 1
        return [unit]

    def end(self, unit: UnitInfo) -> list[UnitInfo]:
        """What `unit` would have become is not to come: a filter ended it on its way here. Its step does not wait for
        that, and who makes one of its key all the same makes a duplicate. Returns what waited here under it."""
        entry = self.book.get(unit.id)
        if entry is not None and entry.state is not UnitState.WAITING:
            return []
        step, waited = self.steps.at(unit.age), []
        self._finished.add(unit, True)
        self.joint.tell_first(unit.id)
        if entry is not None:
            self.counts["dropped"] += 1
            waited = [self.book.pop(unit.id)]
            step.forget(unit)
        step.end(unit)
        return waited

    def close(self, upto: Age) -> None:
        """The step has committed: what de-duplication remembered of it may go. Who announces more of it is too late,
        which the caller knows; acknowledgements of it may still come."""
        for memory in (self._finished, self._on_the_way, self.steps):
            memory.close(upto)
        if self.consumers.homes is not None:
            self.consumers.homes.close(upto)
        self.joint.close(upto)

    def forget(self, upto: Age, *, waiting_only: bool = False, count: str = "late") -> list[UnitInfo]:
        """What it was told of these steps, so that producers free it: all of it, where a new driver learns what has
        committed or a branch is void; where a step has just closed, what nobody had expected and waits still."""
        self.close(upto)
        old = [e for e in self.book.entries.values() if e.unit.age <= upto]
        gone = [e.unit for e in old if e.state is UnitState.WAITING or not waiting_only]
        for unit in gone:
            self.book.pop(unit.id)
        self.counts[count] += len(gone)
        return gone

    # --- matching -----------------------------------------------------------------------------------------------------
    def keep_together(self, homes: Homes) -> None:
        """Units of one ticket go to one consumer, here and in the other queues that share `homes`."""
        self.consumers.homes = homes
        homes.share(self.book)

    def match(self) -> Given:
        """Also of a queue that joins another: each part goes to whom that gave the unit, which is the bound of both."""
        if self.joint.first is not None:
            return self.joint.follow(self.joint.first)
        self.joint.look_at_news()
        return matching.hand_out(self.book, self.consumers)

    def match_rounds(self) -> list[RoundAssignment]:
        self.joint.look_at_news()
        return self.steps.form_rounds(self.micro_batch)
