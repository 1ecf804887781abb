"""Gangs: who joins which roster, when those that end steps may begin, and on which weights.

Gangs that end steps (an actor and its critic) stand on the same step: they join, begin and are formed anew together.

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
        return role in self._rosters or role in self._job.topology.gang_roles

    @property
    def _ranks(self) -> list[WorkerRecord]:
        """Those that end steps, gang after gang."""
        return [rank for role in self._job.topology.gang_roles for rank in self._job.members.of_role(role)]

    def _with(self, role: str) -> tuple[str, ...]:
        """The roles that are formed anew together with this one."""
        roles = self._job.topology.gang_roles
        return roles if role in roles else (role,)

    def _all_with(self, role: str) -> list[WorkerRecord]:
        return [record for other in self._with(role) for record in self._job.members.of_role(other)]

    @property
    def is_here(self) -> bool:
        """Every rank that ends steps has been told to begin in its life."""
        return self._job.declared and all(rank.begun for rank in self._ranks)

    def gone(self, besides: WorkerRecord) -> None:
        """A gang is formed anew: what its other ranks had is void too."""
        role = besides.placed.role
        for other in self._all_with(role):
            if other is not besides:
                self._exchange.gone(other.placed.id, other.placed.role)
        self._workforce.restart_gangs(self._with(role), why=f"gang {role!r} is formed anew", besides=besides)

    def give_up_steps(self) -> None:
        """What is open can never end: it is made again, by gangs that begin on the newest checkpoint. As after the loss
        of all ranks, but that nobody has failed."""
        job, roles = self._job, self._job.topology.gang_roles
        for rank in self._ranks:
            self._exchange.gone(rank.placed.id, rank.placed.role)
        self._workforce.restart_gangs(roles, why="the open steps are given up")
        self._exchange.cancel(job.ledger.highest_branch)
        job.ledger.give_up()
        job.begun = False
        job.mark(Dirty.MEMBERS | Dirty.RERUN)

    def check(self, record: WorkerRecord, world: int) -> None:
        """A rank that was started for a gang of another size would commit steps by itself, or wait for ever."""
        if record.placed.role in self._job.topology.gang_roles and world and world != record.placed.world:
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
        if all(other.joined for other in self._all_with(role)):
            for gang in self._with(role):
                self._tell_roster(gang, asking=record)

    def _tell_roster(self, role: str, *, asking: WorkerRecord) -> None:
        job, gang = self._job, self._job.members.of_role(role)
        lives = [r.attempt for r in gang]
        known, roster = self._rosters.get(role, ([], pb.Roster()))
        if known == lives:  # it was lost with a stream
            if asking in gang:
                job.sessions.tell(asking.placed.id, roster=roster)
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
        those ranks' next lives: all join anew. True where this one has been ended for it. A next life is not waited
        for until it joins: where it takes turns it loads in the gang's turn, which its others do not want."""
        gang = self._all_with(record.placed.role)
        old = [r for r in gang if not r.joined and r.state is WorkerState.READY]
        joining = next((r for r in gang if r.joined), None)
        if joining is None and any(self._workforce.is_of_before(r) for r in old):
            begun = (r for r in gang if not self._workforce.is_of_before(r))
            joining = next((r for r in begun if r.state in (WorkerState.STARTING, WorkerState.CONNECTED)), None)
        if joining is None or not old:
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
        if record.placed.role not in self._job.topology.gang_roles or record.begun:
            self._tell_begin(record)  # again, where it was lost with a stream

    def settle(self) -> None:
        """Begin for the ranks that end steps and wait for it."""
        job, gang = self._job, self._ranks
        if gang:
            self.leave_old_roster(gang[0])
        waiting = [r for r in gang if r.state is WorkerState.READY and not r.begun]
        if any(r.begun for r in gang):  # then theirs was lost with the driver before this one
            for record in waiting:
                self._tell_begin(record)
            return
        # A newer driver opens no branch before it has heard from everybody which branches there were.
        heard_all = job.attempt == 1 or all(r.present for r in job.members.workers.values())
        if gang and waiting == gang and heard_all and self._stand_alike(gang):
            self._begin(gang[0].restored, state_json=gang[0].state_json)

    def _stand_alike(self, gang: list[WorkerRecord]) -> bool:
        """All have begun on the same checkpoint; else one of them could not read it, and they try again."""
        first = gang[0]
        other = next((rank for rank in gang if rank.restored != first.restored), None)
        if other is not None:
            why = f"it stands on {other.restored or 'no checkpoint'}, worker {first.placed.id} on "
            self._workforce.give_up(other, why + str(first.restored or "none"))
        return other is None

    def _begin(self, restored: PolicyVersion | None, *, state_json: str) -> None:
        """All stand on restored or fresh weights: these get their name, what was under way is void."""
        job, ledger = self._job, self._job.ledger
        stands_on = restored or PolicyVersion(0, 0)
        # A newer driver cannot know what the one before it had begun; nor can the first one of a job that goes on,
        # but for the traces that were left where checkpoints are.
        first = job.attempt == 1 and ledger.version == PolicyVersion(0, 0) and not job.began
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
        job, version = self._job, messages.version_to_pb(self._job.ledger.version)
        begin = pb.Begin(version=version, steps=job.ledger.steps, checkpoint_keep=job.spec.checkpoint.keep)
        job.sessions.tell(record.placed.id, begin=begin)
