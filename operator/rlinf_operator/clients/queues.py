"""Queues and schedulers of others, behind one interface: `look` at a job's place, `carry_out` what was decided of it.

Called by observe and apply. kueue.py counts quota, podgroups.py places pods; another (Volcano) is another class.
manifests/asking.py has the words that all share, policies/queueing.py what follows from them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from rlinf_operator.manifests.asking import QueueOrder, QueueView
from rlinf_operator.manifests.metadata import Manifest


class Queues(Protocol):
    """One provider. Called from one event loop."""

    @property
    def name(self) -> str:
        """QueueView.provider of its views."""
        ...

    async def look(self, job: Manifest) -> QueueView | None:
        """observe: in each pass; no more than a look at copies while the job waits. None: the job is none of its
        business."""
        ...

    async def carry_out(self, order: QueueOrder, job: Manifest, *, now: datetime) -> None:
        """apply: an order that was carried out already is none. RLinfError where it was refused."""
        ...


class Providers:
    """The first one whose business a job is has it; one that had it before has it until the job has left."""

    def __init__(self, *providers: Queues) -> None:
        self._providers = providers

    async def look(self, job: Manifest) -> QueueView | None:
        for provider in self._providers:
            if (view := await provider.look(job)) is not None:
                return view
        return None

    def of(self, name: str) -> Queues:
        """By the view that an order answers."""
        return next(provider for provider in self._providers if provider.name == name)
