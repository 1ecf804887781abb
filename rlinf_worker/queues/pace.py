"""How quickly a role goes through units, as its own calls tell: what lies there has to last until more has come. Pure.

For: queues.channel, which tells it of each call, and of how many units may wait at a role that takes turns.
"""

from __future__ import annotations

from typing import Final

REFILL_S: Final = 0.012
"""Work that lies at a role, at least. Credit goes out when half of it is gone, and what it brings is 2 to 6 ms away on
busy cores. Long units are not bound to one of two workers by it: of 20 ms each, one lies there."""
MOST: Final = 48
"""Units, however short they are: a role of 0.25 ms a unit has them for 12 ms, and one that is quicker takes batches."""
_WEIGHT: Final = 0.25  # of the newest call in the mean: a role whose units change is known within four of them


class Pace:
    """
    >>> pace = Pace()
    >>> pace.gave(now=10.0); pace.gave(now=10.0); pace.asks(now=10.001)  # it took half a millisecond for each
    >>> pace.reserve
    24
    """

    def __init__(self) -> None:
        self._unit_s: float | None = None
        self._units, self._since = 0, 0.0

    def gave(self, *, now: float) -> None:
        """One more unit of a call, or of several calls in a row."""
        self._units, self._since = self._units + 1, now

    def asks(self, *, now: float) -> None:
        """For more, as it is through with what it was given. What it then waits for is not its own time."""
        units, self._units = self._units, 0
        if not units:
            return
        unit_s = min((now - self._since) / units, REFILL_S)  # put and safe_point may have waited for another's turn
        self._unit_s = unit_s if self._unit_s is None else self._unit_s + _WEIGHT * (unit_s - self._unit_s)

    @property
    def reserve(self) -> int:
        """Units that last for REFILL_S. 0: nobody knows yet."""
        if self._unit_s is None:
            return 0
        return round(REFILL_S / max(self._unit_s, REFILL_S / MOST))
