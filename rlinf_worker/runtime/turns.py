"""Turns as a worker sees them: `ctx.turn()`, `ctx.safe_point()`, and the calls of the role's load and offload.

For: runtime.context. Where the plan gives the worker slots of its own, it holds them for its whole life.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """One per worker process."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield

    async def safe_point(self) -> None:
        return
