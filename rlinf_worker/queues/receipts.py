"""What a consumer of a queue has to say of units: that it holds them, that it is through with them. Pure.

For: queues.consuming, and with DroppedKeys runtime.session. Bounded by what is told within `repeat_s`, and by the units
of open steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.queues.units import UnitInfo, keys_of


class Receipts:
    """A unit that is finished is remembered, and why it was where it was dropped, until the driver has certainly heard
    of it: `repeat_s` after it was told."""

    def __init__(self, channel: str, *, repeat_s: float) -> None:
        self._channel, self._repeat_s = channel, repeat_s
        self._held: list[UnitInfo] = []
        self._finished: list[tuple[UnitInfo, str | None]] = []
        self._told: deque[tuple[float, UnitInfo, str | None]] = deque()  # finished, in the order of telling

    def held(self, units: Iterable[UnitInfo]) -> None:
        self._held += units

    def finished(self, unit: UnitInfo, drop_reason: str | None) -> None:
        self._finished.append((unit, drop_reason))

    def hello(self) -> None:
        """The way to the driver broke, or it is another. The Hello itself says what is held."""
        self._held.clear()
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
        out += [pb.WorkerMessage(held=keys) for keys in keys_of(self._channel, held)]
        for unit, reason in due:
            if reason is not None:
                drop = pb.Drop(channel=self._channel, key=unit.key, branch=unit.branch, reason=reason)
                out.append(pb.WorkerMessage(drop=drop))
        acked = (unit for unit, reason in due if reason is None)
        out += [pb.WorkerMessage(acked=keys) for keys in keys_of(self._channel, acked)]


class DroppedKeys:
    """A rank of a gang's: keys of its steps that filters dropped, here or, as the driver said, on their way."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, int], set[str]] = {}  # by (branch, step)

    def add(self, keys: Iterable[str], *, step: int, branch: int) -> None:
        for key in keys:
            self._keys.setdefault((branch, step), set()).add(key)

    def take(self, step: int, *, branch: int) -> set[str]:
        """What the step is done without; forgotten, with all before it."""
        found = self._keys.get((branch, step), set())
        self._keys = {known: keys for known, keys in self._keys.items() if known > (branch, step)}
        return found

    def cancel(self, branch: int) -> None:
        self._keys = {known: keys for known, keys in self._keys.items() if known[0] > branch}
