"""Times as Kubernetes writes them: RFC 3339, UTC, whole seconds. Used for conditions, restarts, expiry annotations.

>>> from datetime import UTC, datetime
>>> text(datetime(2026, 11, 21, 8, 5, 0, 999, tzinfo=UTC))
'2026-11-21T08:05:00Z'
"""

from __future__ import annotations

from datetime import UTC, datetime


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
