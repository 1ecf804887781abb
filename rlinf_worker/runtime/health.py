"""Whether a role's engine is well: asked every few seconds, beside the role.

For: runtime.worker, which runs `watch` and ends the worker with what it raises. Not for: the loop's own life (the
agent's marks) and work that does not move (work.py), which notice an engine that is dead too, at a phase's deadline:
after minutes in the first step, and with no word of what is wrong.

| waits | for | unblocked by |
|---|---|---|
| watch | probe_interval_s, then the engine's answer | the engine; probe_deadline_s |
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from rlinf_api.errors import RetryableError
from rlinf_worker import proctree
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import Probed
from rlinf_worker.settings import Settings

TICK_S: Final = 0.5
"""The most seconds of a wait that are counted at once: where the process or its machine stood still, the engine had no
chance."""
UNASKED: Final = frozenset({"start", "load", "compile", "stop"})
"""Phases in which an engine may be busy with itself; each has a deadline of its own."""
CHILDREN_NAMED: Final = 8


class EngineLost(RetryableError):
    """The worker's next life has another engine; what this one had in hand is made again."""


class Health:
    def __init__(self, worker: str, *, phases: Phases, settings: Settings) -> None:
        self._worker, self._phases, self._settings = worker, phases, settings

    async def watch(self, role: object) -> None:
        """Until it is cancelled; at once where the role has nothing to be asked. Raises EngineLost."""
        while isinstance(role, Probed):
            await asyncio.sleep(self._settings.probe_interval_s)
            if self._phases.phase not in UNASKED:
                await self._ask(role)

    async def _ask(self, role: Probed) -> None:
        asked = asyncio.ensure_future(role.check_health())
        try:
            waited_s = 0.0
            while not asked.done():
                tick_s = min(TICK_S, self._settings.probe_deadline_s)
                await asyncio.wait({asked}, timeout=tick_s)
                waited_s = waited_s + tick_s if self._phases.phase not in UNASKED else 0.0
                if waited_s > self._settings.probe_deadline_s and not asked.done():
                    raise self._lost(f"no answer to check_health() for {waited_s:g} s")
            if (error := asked.exception()) is not None:
                raise self._lost(str(error) or type(error).__name__) from error
        finally:
            asked.cancel()

    def _lost(self, got: str) -> EngineLost:
        return EngineLost(
            f"the engine of worker {self._worker} is lost", got="; ".join([got, *_unwell()]),
            next="the worker starts again with another",
        )  # fmt: skip


def _unwell() -> list[str]:
    """Processes that this one has started and that do not run, in words."""
    processes = proctree.table()
    children = sorted(proctree.descendants([os.getpid()], processes) - {os.getpid()})
    still = [processes[pid] for pid in children if processes[pid].stopped or processes[pid].dead]
    return [f"its process {child.name} (pid {child.pid}) is {child.doing()}" for child in still[:CHILDREN_NAMED]]
