"""Queues of other people, behind one interface: `look` at a job's place, and `carry_out` what was decided about it.

Called by observe and apply. kueue.py is one provider; another (gangs, Volcano) is another class. manifests/asking.py
has the words that all share, policies/queueing.py what follows from them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from rlinf_operator.manifests.asking import QueueOrder, QueueView
from rlinf_operator.manifests.metadata import Manifest


class Queues(Protocol):
    """Called from one event loop."""

    async def look(self, job: Manifest) -> QueueView | None:
        """observe: in each pass; no more than a look at copies while the job waits."""
        ...

    async def carry_out(self, order: QueueOrder, job: Manifest, *, now: datetime) -> None:
        """apply: an order that was carried out already is none. RLinfError where it was refused."""
        ...
