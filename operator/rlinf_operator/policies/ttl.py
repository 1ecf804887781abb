"""When a job must end, and when a finished one goes. Pure."""

from __future__ import annotations

from datetime import datetime


def remaining_s(since: datetime | None, limit_s: float | None, *, now: datetime) -> float | None:
    """Seconds left of a limit that began at `since`; at most 0 where it is over, None where there is none."""
    if since is None or limit_s is None:
        return None
    return limit_s - (now - since).total_seconds()


def soonest(*moments: float | None) -> float | None:
    """When to look again: the earliest of several moments, never in the past."""
    given = [max(0.0, m) for m in moments if m is not None]
    return min(given) if given else None
