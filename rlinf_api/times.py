"""Times as Kubernetes writes them: RFC 3339, UTC, whole seconds. Used for conditions, restarts, expiry annotations.

>>> from datetime import UTC, datetime
>>> text(datetime(2026, 11, 21, 8, 5, 0, 999, tzinfo=UTC))
'2026-11-21T08:05:00Z'
"""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    return datetime.now(UTC)


def text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(written: object) -> datetime | None:
    """None for an absent time; fractions of a second (MicroTime) are read too.

    >>> parse("2026-11-21T08:05:00.5Z").timestamp() - parse("2026-11-21T08:05:00Z").timestamp()
    0.5
    """
    if not isinstance(written, str) or not written:
        return None
    moment = datetime.fromisoformat(written.replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def remaining_s(since: datetime | None, limit_s: float | None, *, now: datetime) -> float | None:
    """Seconds left of a limit that began at `since`; at most 0 where it is over, None where there is none."""
    if since is None or limit_s is None:
        return None
    return limit_s - (now - since).total_seconds()


def soonest(*moments: float | None) -> float | None:
    """When to look again: the earliest of several moments, never in the past."""
    given = [max(0.0, m) for m in moments if m is not None]
    return min(given) if given else None
