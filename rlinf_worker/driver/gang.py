"""Gangs: who joins which roster, when the committing gang may begin, and on which weights.

Called by core.py for Join and Ready, and whenever somebody comes. Not for: starting and ending ranks (workforce.py),
committing what they have done (commits.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import translate
from rlinf_worker.driver.members import WorkerRecord, WorkerState
from rlinf_worker.driver.sessions import Refuse

if TYPE_CHECKING:
    from rlinf_worker.driver.core import Driver


class Gangs:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.roster = 0  # the highest number given out
        self.joined: set[str] = set()  # roles whose ranks have asked for a roster
        self.stands_on: PolicyVersion | None = None  # the weights that a checkpoint was restored as
        self.rosters: dict[str, tuple[list[tuple[int, int | None]], pb.Roster]] = {}  # by role: of which lives

    @property
    def role(self) -> str:
        """The role that commits steps."""
        exchange = self._driver.exchange
        committing = exchange.topology.committing if exchange else None
        return committing.consumer if committing else ""

    @property
    def ranks(self) -> list[WorkerRecord]:
        """Of the role that commits steps."""
        return self._driver.members.of_role(self.role)

    def gone(self, besides: WorkerRecord) -> None:
        """A gang is formed anew: what its other ranks had is void too."""
        driver = self._driver
        for other in driver.members.of_role(besides.placed.role):
            if driver.exchange is not None and other is not besides:
                driver.exchange.gone(other.placed.id, other.placed.role)
        driver.workforce.restart_gang(besides.placed.role, besides=besides)

    def check(self, record: WorkerRecord, world: int) -> None:
        """A rank that was started for a gang of another size would commit steps by itself, or wait for ever."""
        if record.placed.role == self.role and world and world != record.placed.world:
            why = f"it is of a gang of {world}, the plan has {record.placed.world}"
            self._driver.workforce.give_up(record, why)
            raise Refuse(f"worker {record.placed.id}: {why}", exit_code=names.EXIT_STALE)

    def on_join(self, record: WorkerRecord, store_port: int) -> None:
        driver, role = self._driver, record.placed.role
        record.joined_port = store_port
        self.joined.add(role)
        if driver.members.prepared.get(record.placed.id) is record:
            driver.switch.is_gang(role)
            return
        if self.leave_old_roster(record):
            return
        gang = driver.members.of_role(role)
        if not all(r.joined_port is not None for r in gang):
            return
        lives = [(r.attempt, r.joined_port) for r in gang]
        known, roster = self.rosters.get(role, ([], pb.Roster()))
        if known == lives:  # it was lost with a stream
            driver.sessions.tell(record.placed.id, roster=roster)
            return
        self.roster += 1
        roster = translate.roster_to_pb(gang, number=self.roster)
        self.rosters[role] = (lives, roster)
        for member in gang:
            driver.sessions.tell(member.placed.id, roster=roster)

    def leave_old_roster(self, record: WorkerRecord) -> bool:
        """A new driver meets ranks that are ready in a roster whose other ranks died with the driver before it, and
        those ranks' next lives: all join anew. True where this one has been ended for it."""
        gang = self._driver.members.of_role(record.placed.role)
        joining = [r for r in gang if r.joined_port is not None]
        old = [r for r in gang if r.joined_port is None and r.state is WorkerState.READY]
        if not joining or not old:
            return False
        self.gone(joining[0])
        return record is not joining[0]

    def on_ready(self, record: WorkerRecord, ready: pb.Ready) -> None:
        self._driver.ledger.heard_of(ready.highest_branch)
        record.state, record.failures, record.progress = WorkerState.READY, 0, "ready"
        if self.leave_old_roster(record):
            return
        record.restored = messages.version_from_pb(ready.version) if ready.restored else None
        if record.placed.role != self.role or record.begun:
            self._tell_begin(record)  # again, where it was lost with a stream
        else:
            self.settle()
        self._driver.presence.maybe_begin()

    def settle(self) -> None:
        """Begin for the ranks of the committing gang that wait for it."""
        driver, gang = self._driver, self.ranks
        waiting = [r for r in gang if r.state is WorkerState.READY and not r.begun]
        if any(r.begun for r in gang):  # then theirs was lost with the driver before this one
            for record in waiting:
                self._tell_begin(record)
            return
        # A newer driver opens no branch before it has heard from everybody which branches there were.
        heard_all = driver.attempt == 1 or all(r.present for r in driver.members.workers.values())
        if waiting == gang and heard_all:
            self._begin(gang[0].restored)

    def _begin(self, restored: PolicyVersion | None) -> None:
        """The committing gang stands on restored or fresh weights: they get their name, what was under way is void."""
        driver, ledger = self._driver, self._driver.ledger
        stands_on = restored or PolicyVersion(0, 0)
        # A newer driver cannot know what the one before it had begun; nor can the first one of a job that goes on,
        # but for the traces that were left where checkpoints are.
        first = driver.attempt == 1 and ledger.version == PolicyVersion(0, 0) and not driver.begun
        traces = ledger.highest_branch
        if restored is not None or not first or traces:
            void = ledger.committed - stands_on.number
            if driver.exchange is not None:
                driver.exchange.cancel(ledger.highest_branch)
            version = ledger.rewind(stands_on)
            self.stands_on = version if restored is not None else None
            driver.commits.forget()
            text = f"training goes on from {stands_on} as branch {version.branch}"
            if restored is None and first:
                text = f"training begins as branch {version.branch}: branches up to {traces} have left their number "
                text += "where checkpoints are, and there is none to go on from"
            driver.event("branch", text + (f"; {void} steps are made again" if void > 0 else ""))
            rerun, driver.begun = driver.begun, False
            if rerun:
                driver.on_rerun()
        for record in self.ranks:
            self._tell_begin(record)
        if ledger.finished:
            driver.finish(saved=True, made_before=True)  # the checkpoint is of the last step

    def _tell_begin(self, record: WorkerRecord) -> None:
        record.begun = True
        self._driver.workforce.recoveries.back(
            record.placed.id, started_at=record.started_at, from_spare=bool(record.from_spare)
        )
        version = messages.version_to_pb(self._driver.ledger.version)
        self._driver.sessions.tell(record.placed.id, begin=pb.Begin(version=version))
