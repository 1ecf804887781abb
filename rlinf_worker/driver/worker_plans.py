"""What workers are told of plans: whom they will speak with, before another one is in force; its sizes, once it is.

For: switch.py and core.py. The workers' end is runtime/replans.py.
"""

from __future__ import annotations

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.driver import routes as routing
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.members import WorkerRecord
from rlinf_worker.driver.pending import Pending


class WorkerPlans:
    def __init__(self, job: Job, exchange: Exchange) -> None:
        self._job, self._exchange = job, exchange
        self._number = 0  # of the switch whose sizes were told last
        self._owing: dict[WorkerId, int] = {}  # who has not answered, in which life

    def link_ahead(self, record: WorkerRecord, pending: Pending | None) -> None:
        """One that the next plan adds is ready: its links are made now, not in the pause."""
        job = self._job
        if pending is None:
            return
        workers = {wid: r for wid, r in job.members.workers.items() if wid in pending.changes.kept}
        workers |= {r.placed.id: r for r in job.members.prepared.values()}
        peers = routing.partners(job.topology, placement=pending.placement, of=record.placed.id)
        endpoints = [r.endpoint for wid in sorted(peers) if (r := workers.get(wid)) is not None and r.endpoint]
        job.sessions.tell(record.placed.id, links=pb.Links(peers=[messages.endpoint_to_pb(e) for e in endpoints]))

    def tell(self, number: int) -> None:
        """The sizes of the plan in force, to all that are there."""
        job, self._number = self._job, number
        specs = self._exchange.channel_specs()
        for wid, record in job.members.workers.items():
            if record.present and wid in job.sessions.workers:
                self._owing[wid] = record.attempt
                self._exchange.forget_credit(wid)
                world = len(job.members.of_role(record.placed.role))
                replan = pb.Replan(plan_revision=job.revision, channels=specs, world=world, switch_number=number)
                job.sessions.tell(wid, replan=replan)

    def answered(self, wid: WorkerId, number: int) -> None:
        """It has resized its channels as switch `number` says, and says its credit anew. Also called for a worker that
        connects anew, as its Welcome had the sizes."""
        if number == self._number and self._owing.pop(wid, None) is not None:
            self._exchange.forget_credit(wid)

    @property
    def all_have_answered(self) -> bool:
        """Whoever began another life, or has no stream, learns them from its next Welcome."""
        sessions = self._job.sessions.workers
        self._owing = {w: life for w, life in self._owing.items() if w in sessions and sessions[w].attempt == life}
        return not self._owing

    def forget(self) -> None:
        """Nobody is waited for any more."""
        self._owing.clear()
