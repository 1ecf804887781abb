"""Gangs: who joins which roster, when the committing gang may begin, and on which weights.

Called by core.py for Join and Ready, and with every settling. Not for: starting and ending ranks (workforce.py),
committing what they have done (commits.py).
"""

from __future__ import annotations

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver.commits import Commits
from rlinf_worker.driver.exchange import Exchange
from rlinf_worker.driver.job import Dirty, Job
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.workforce import Workforce


class Gangs:
    def __init__(self, job: Job, exchange: Exchange, workforce: Workforce, commits: Commits) -> None:
        self._job, self._exchange, self._workforce, self._commits = job, exchange, workforce, commits
        self.joined: set[str] = set()  # roles whose ranks have asked for a roster
        self._rosters: dict[str, tuple[list[int], pb.Roster]] = {}  # by role: of which lives

    def is_gang(self, role: str) -> bool:
        """Its workers compute together: none of them can be replaced by another."""
        return role in self._rosters or any(q.rounds and q.consumer == role for q in self._job.topology.queues)

    @property
    def _ranks(self) -> list[WorkerRecord]:
        """Those that commit steps."""
        return self._job.members.of_role(self._job.topology.gang_role)

    @property
    def is_here(self) -> bool:
        """Every rank that commits steps has been told to begin in its life."""
        return self._job.declared and all(rank.begun for rank in self._ranks)

    def gone(self, besides: WorkerRecord) -> None:
        """A gang is formed anew: what its other ranks had is void too."""
        for other in self._job.members.of_role(besides.placed.role):
            if other is not besides:
                self._exchange.gone(other.placed.id, other.placed.role)
        self._workforce.restart_gang(besides.placed.role, besides=besides)

    def check(self, record: WorkerRecord, world: int) -> None:
        """A rank that was started for a gang of another size would commit steps by itself, or wait for ever."""
        if record.placed.role == self._job.topology.gang_role and world and world != record.placed.world:
            why = f"it is of a gang of {world}, the plan has {record.placed.world}"
            self._workforce.give_up(record, why)
            raise Refuse(f"worker {record.placed.id}: {why}", exit_code=names.EXIT_STALE)

    def on_join(self, record: WorkerRecord) -> None:
        """A rank that waits for its roster. One that is prepared for the next plan waits for its commit."""
        job, role = self._job, record.placed.role
        record.joined = True
        self.joined.add(role)
        if job.members.prepared.get(record.placed.id) is record or self.leave_old_roster(record):
            return
        gang = job.members.of_role(role)
        if not all(r.joined for r in gang):
            return
        lives = [r.attempt for r in gang]
        known, roster = self._rosters.get(role, ([], pb.Roster()))
        if known == lives:  # it was lost with a stream
            job.sessions.tell(record.placed.id, roster=roster)
            return
        job.roster += 1
        here = [(r.placed.rank, r.endpoint) for r in gang if r.endpoint]
        members = [pb.Member(rank=rank, endpoint=messages.endpoint_to_pb(endpoint)) for rank, endpoint in here]
        roster = pb.Roster(number=job.roster, world=len(gang), members=members)
        self._rosters[role] = (lives, roster)
        for member in gang:
            job.sessions.tell(member.placed.id, roster=roster)

    def leave_old_roster(self, record: WorkerRecord) -> bool:
        """A new driver meets ranks that are ready in a roster whose other ranks died with the driver before it, and
        those ranks' next lives: all join anew. True where this one has been ended for it."""
        if record.placed.role not in self.joined:
            return False
        gang = self._job.members.of_role(record.placed.role)
        joining = next((r for r in gang if r.joined), None)
        if joining is None or not any(not r.joined and r.state is WorkerState.READY for r in gang):
            return False
        self.gone(joining)
        return record is not joining

    def on_ready(self, record: WorkerRecord, ready: pb.Ready) -> None:
        self._job.ledger.heard_of(ready.highest_branch)
        record.state, record.failures, record.progress = WorkerState.READY, 0, "ready"
        if self.leave_old_roster(record):
            return
        record.restored = messages.version_from_pb(ready.version) if ready.restored else None
        record.state_json = ready.state_json
        if record.placed.role != self._job.topology.gang_role or record.begun:
            self._tell_begin(record)  # again, where it was lost with a stream

    def settle(self) -> None:
        """Begin for the ranks of the committing gang that wait for it."""
        job, gang = self._job, self._ranks
        waiting = [r for r in gang if r.state is WorkerState.READY and not r.begun]
        if any(r.begun for r in gang):  # then theirs was lost with the driver before this one
            for record in waiting:
                self._tell_begin(record)
            return
        # A newer driver opens no branch before it has heard from everybody which branches there were.
        heard_all = job.attempt == 1 or all(r.present for r in job.members.workers.values())
        if gang and waiting == gang and heard_all:
            self._begin(gang[0].restored, state_json=gang[0].state_json)

    def _begin(self, restored: PolicyVersion | None, *, state_json: str) -> None:
        """The committing gang stands on restored or fresh weights: they get their name, what was under way is void."""
        job, ledger = self._job, self._job.ledger
        stands_on = restored or PolicyVersion(0, 0)
        # A newer driver cannot know what the one before it had begun; nor can the first one of a job that goes on,
        # but for the traces that were left where checkpoints are.
        first = job.attempt == 1 and ledger.version == PolicyVersion(0, 0) and not job.begun
        traces = ledger.highest_branch
        if restored is not None or not first or traces:
            void = ledger.committed - stands_on.number
            self._exchange.cancel(ledger.highest_branch)
            version = ledger.rewind(stands_on, state_json=state_json)
            job.stands_on = version if restored is not None else None
            self._commits.forget()
            text = f"training goes on from {stands_on} as branch {version.branch}"
            if restored is None and first:
                text = f"training begins as branch {version.branch}: branches up to {traces} have left their number "
                text += "where checkpoints are, and there is none to go on from"
            job.event("branch", text + (f"; {void} steps are made again" if void > 0 else ""))
            if job.begun:
                job.begun = False
                job.mark(Dirty.RERUN)
        for record in self._ranks:
            self._tell_begin(record)
        job.mark(Dirty.UNITS | Dirty.SHOWN)
        if ledger.finished:
            job.finish(saved=True, made_before=True)  # the checkpoint is of the last step

    def _tell_begin(self, record: WorkerRecord) -> None:
        record.begun = True
        self._workforce.recoveries.back(
            record.placed.id, started_at=record.started_at, from_spare=bool(record.from_spare)
        )
        version = messages.version_to_pb(self._job.ledger.version)
        self._job.sessions.tell(record.placed.id, begin=pb.Begin(version=version))
