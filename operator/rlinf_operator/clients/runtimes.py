"""RLRuntimes by name, from the API server: what stands there, or why it cannot be had.

Called by observe, in each pass over a job that names one. They are neither listed nor watched: the right to read one is
enough, and a job that waits for one looks again by itself (LOOKS_AGAIN_S in decide.py).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from rlinf_api import runtimes
from rlinf_api.runtimes import RuntimeFound
from rlinf_api.store import NotFound
from rlinf_operator.clients.api_errors import Forbidden
from rlinf_operator.clients.objects import ObjectStore

FRESH_S: Final = 1.0
"""How old what a job begins with may be. 1 s: of a thousand jobs that are made at once one asks, and a runtime that
was applied before its job is there."""
OLD_S: Final = 30.0
"""How old it may be where only a change is to be told. 30 s: half of the shortest time between two resyncs."""
MOST: Final = 256  # of the cluster, that jobs name; of more the one asked longest ago is asked again


class Runtimes:
    """Called from one event loop."""

    def __init__(self, store: ObjectStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: OrderedDict[str, tuple[float, RuntimeFound]] = OrderedDict()

    async def look(self, name: str, *, max_age_s: float) -> RuntimeFound:
        """RetryableError where the API server has no answer."""
        known = self._known.get(name)
        if known is not None and self._clock() - known[0] < max_age_s:
            return known[1]
        asked_at = self._clock()
        found = await self._ask(name)
        self._known[name] = (asked_at, found)
        self._known.move_to_end(name)
        if len(self._known) > MOST:
            self._known.popitem(last=False)
        return found

    async def _ask(self, name: str) -> RuntimeFound:
        try:
            return runtimes.read(await self._store.get(runtimes.KIND, name, namespace=""))
        except NotFound:
            return runtimes.missing(name)
        except Forbidden as error:
            return runtimes.refused(name, error.got)
