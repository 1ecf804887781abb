"""What a consumer of a queue has to say of units: that it holds them, what it has of them, that it is through. Pure.

Bounded by what is told within `repeat_s`, and by the units of open steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.queues.units import UnitId, UnitInfo, keys_of


class Receipts:
    """A unit that is finished is remembered, and why it was where it was dropped, until the driver has certainly heard
    of it: `repeat_s` after it was told."""

    def __init__(self, channel: str, *, repeat_s: float) -> None:
        self._channel, self._repeat_s = channel, repeat_s
        self._held: list[UnitInfo] = []
        self._sealed: dict[UnitId, UnitInfo] = {}  # until they are finished, as a new driver has to hear of it
        self._news: list[UnitInfo] = []  # of these, not told yet
        self._finished: list[tuple[UnitInfo, str | None]] = []
        self._told: deque[tuple[float, UnitInfo, str | None]] = deque()  # finished, in the order of telling

    def held(self, units: Iterable[UnitInfo]) -> None:
        self._held += units

    def sealed(self, unit: UnitInfo) -> None:
        """Nothing more is made of it; it is finished when all that was made is held."""
        self._sealed[unit.id] = unit
        self._news.append(unit)

    def cancel(self, branch: int) -> None:
        self._sealed = {uid: unit for uid, unit in self._sealed.items() if uid.branch > branch}
        self._news = [unit for unit in self._news if unit.branch > branch]

    def finished(self, unit: UnitInfo, drop_reason: str | None) -> None:
        self._sealed.pop(unit.id, None)
        self._finished.append((unit, drop_reason))

    def hello(self) -> None:
        """The way to the driver broke, or it is another. The Hello itself says what is held."""
        self._held.clear()
        self._news = list(self._sealed.values())
        self._finished[:0] = [(unit, reason) for _, unit, reason in self._told]
        self._told.clear()

    def units(self) -> list[UnitInfo]:
        """Finished; a driver takes an acknowledgement only from whom it knows to hold the unit."""
        return [*(unit for _, unit, _ in self._told), *(unit for unit, _ in self._finished)]

    def drain(self, out: list[pb.WorkerMessage], now: float) -> None:
        """What is new; finished units count as told from now on."""
        while self._told and now - self._told[0][0] > self._repeat_s:
            self._told.popleft()
        held, self._held = self._held, []
        due, self._finished = self._finished, []
        self._told.extend((now, unit, reason) for unit, reason in due)
        news, self._news = self._news, []
        out += [pb.WorkerMessage(held=keys) for keys in keys_of(self._channel, held)]
        out += [pb.WorkerMessage(sealed=keys) for keys in keys_of(self._channel, news)]
        for unit, reason in due:
            if reason is not None:
                drop = pb.Drop(channel=self._channel, key=unit.key, branch=unit.branch, reason=reason)
                out.append(pb.WorkerMessage(drop=drop))
        acked = (unit for unit, reason in due if reason is None)
        out += [pb.WorkerMessage(acked=keys) for keys in keys_of(self._channel, acked)]


class PartialsInHand:
    """What there is of units that a role works on. Each driver is told of all that there is."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._kept: dict[UnitId, bytes] = {}
        self._untold: dict[UnitId, None] = {}  # of these

    def keep(self, uid: UnitId, partial: bytes) -> None:
        self._kept[uid] = partial
        self._untold[uid] = None

    def inherit(self, unit: UnitInfo) -> None:
        """What another has kept of it stands until the role keeps more: the driver has it, and the next one has not."""
        self._kept[unit.id] = unit.partial

    def forget(self, uid: UnitId) -> None:
        self._kept.pop(uid, None)
        self._untold.pop(uid, None)

    def cancel(self, branch: int) -> None:
        for uid in [uid for uid in self._kept if uid.branch <= branch]:
            self.forget(uid)

    def welcomed(self) -> None:
        self._untold = dict.fromkeys(self._kept)

    def drain(self, out: list[pb.WorkerMessage]) -> None:
        for uid in self._untold:
            said = pb.Partial(channel=self._channel, key=uid.key, branch=uid.branch, json=self._kept[uid])
            out.append(pb.WorkerMessage(partial=said))
        self._untold.clear()


class EndedUnits:
    """A rank of a gang's: what filters dropped of its steps, here or, as the driver said, on its way."""

    def __init__(self) -> None:
        self._of_steps: dict[tuple[int, int], dict[str, pb.Ended]] = {}  # by (branch, step) and key

    def add(self, ended: Iterable[pb.Ended], *, step: int, branch: int) -> None:
        for one in ended:
            self._of_steps.setdefault((branch, step), {})[one.key] = one

    def take(self, step: int, *, branch: int) -> list[pb.Ended]:
        """What the step is done without; forgotten, with all before it."""
        found = self._of_steps.get((branch, step), {})
        self._of_steps = {known: ended for known, ended in self._of_steps.items() if known > (branch, step)}
        return list(found.values())

    def cancel(self, branch: int) -> None:
        self._of_steps = {known: ended for known, ended in self._of_steps.items() if known[0] > branch}
