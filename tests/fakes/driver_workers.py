"""Models of the three roles of ppo for tests.fakes.driver_world: what a worker tells the driver and when, no more.

They keep units with the real halves of a queue (rlinf_worker.channels.queue), as runtime.queues does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.channels.queue import Admitted, Parents, QueueConsumer, QueueProducer, RoundPart
from rlinf_worker.channels.units import INLINE, UnitId, UnitInfo
from rlinf_worker.driver import translate
from tests.builders_driver import JOB_UID

if TYPE_CHECKING:
    from tests.fakes.driver_world import World


class SimWorker:
    consumes, produces = "", ""

    def __init__(self, world: World, start: agents_pb2.Start, *, pod: tuple[str, int]) -> None:
        self.world, self.id, self.pod = world, WorkerId(start.worker), pod
        self.attempt, self.rank, self.size = start.attempt, start.rank, start.world
        self.outbox: Any = None
        self.to_driver: deque[pb.WorkerMessage] = deque()
        self.doing: deque[Callable[[], None]] = deque([self.connect])  # its own work, in its order
        self.away = 0
        self.begun: PolicyVersion | None = None
        self.published: PolicyVersion | None = None
        self.unanswered: dict[str, pb.WorkerMessage] = {}  # told after every Welcome, until the answer
        self.driver_attempt = 0
        self.committed: PolicyVersion | None = None
        self.steps_done: dict[int, pb.StepDone] = {}
        gang = self.consumes == "trajectories"
        self.given: QueueConsumer[UnitInfo] = QueueConsumer(window=2 if gang else 8, rounds=gang)
        self.made: QueueProducer[UnitInfo] = QueueProducer(capacity_units=0, capacity_bytes=0)
        self.parents: Parents[UnitId] = Parents()
        self.finished: dict[UnitId, UnitInfo] = {}
        self.to_announce: list[UnitInfo] = []
        self.to_hold: list[UnitId] = []
        self.to_ack: list[UnitId] = []
        self.to_drop: list[UnitId] = []
        self.pulling: set[UnitId] = set()
        self.endpoints: dict[str, int] = {}

    # --- the stream -------------------------------------------------------------------------------------------------
    def connect(self) -> None:
        self.to_announce.clear()
        self.to_hold.clear()
        self.to_ack = [uid for uid in self.finished if uid not in self.to_drop]
        self.pulling = self.given.pulling()
        self.given.forget_credit()
        held = [*self.given.held_units(), *self.finished.values()]
        hello = pb.Hello(
            job_uid=JOB_UID,
            worker=self.id,
            attempt=self.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=self.driver_attempt,
            endpoint=pb.Endpoint(worker=self.id, attempt=self.attempt),
            ready=self.begun is not None,
            produced=[pb.HeldUnit(channel=self.produces, unit=translate.unit_to_pb(u)) for u in self.made.units()],
            taken=[pb.HeldUnit(channel=self.consumes, unit=translate.unit_to_pb(u)) for u in held],
            steps_done=list(self.steps_done.values()),
            committed=translate.version_to_pb(self.committed) if self.committed is not None else None,
            world=self.size,
        )
        self.to_driver.clear()
        self.world.welcome(self, hello)

    def disconnect(self) -> None:
        self.outbox, self.away = None, self.world.chance.randrange(3)
        self.to_driver.clear()

    def on_time(self) -> None:
        """Every tick in which nothing else happens."""
        if self.outbox is None and self.connect not in self.doing:
            self.away -= 1
            if self.away < 0:
                self.connect()

    def tell(self, **kind: Any) -> None:
        if self.outbox is not None:
            self.to_driver.append(pb.WorkerMessage(**kind))

    def hear(self, message: pb.DriverMessage) -> None:
        kind = message.WhichOneof("kind")
        getattr(self, f"on_{kind}", lambda _: None)(getattr(message, str(kind)))

    def on_welcome(self, welcome: pb.Welcome) -> None:
        is_new = welcome.driver_attempt > self.driver_attempt > 0
        first, self.driver_attempt = self.driver_attempt == 0, welcome.driver_attempt
        if is_new:
            self.given.forget(self.pulling)
        for message in self.unanswered.values():
            self.to_driver.append(message)
        if first:
            self.doing.append(self.load)

    def load(self) -> None:
        self.say_ready()

    def on_replan(self, replan: pb.Replan) -> None:
        self.given.forget_credit()
        self.tell(replanned=pb.Replanned(plan_revision=replan.plan_revision))

    def say_ready(self, restored: PolicyVersion | None = None) -> None:
        at = translate.version_to_pb(restored) if restored is not None else None
        self.unanswered["ready"] = pb.WorkerMessage(ready=pb.Ready(version=at, restored=restored is not None))
        self.tell(ready=self.unanswered["ready"].ready)

    def on_begin(self, begin: pb.Begin) -> None:
        if self.unanswered.pop("ready", None) is not None:
            self.begun = self.committed = translate.version_from_pb(begin.version)
            self.work()

    # --- units ------------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        if self.outbox is None:
            return
        if self.to_announce:
            units = [translate.unit_to_pb(u) for u in self.to_announce]
            self.tell(announce=pb.Announce(channel=self.produces, units=units))
            self.to_announce = []
        for kind, uids in (("held", self.to_hold), ("acked", self.to_ack)):
            for branch in sorted({uid.branch for uid in uids}):
                keys = [uid.key for uid in uids if uid.branch == branch]
                self.tell(**{kind: pb.Keys(channel=self.consumes, keys=keys, branch=branch)})
            uids.clear()
        for uid in self.to_drop:
            self.tell(drop=pb.Drop(channel=self.consumes, key=uid.key, branch=uid.branch, reason="cancelled"))
        self.to_drop = []
        if self.consumes and self.driver_attempt and (credit := self.given.credit_due()) is not None:
            self.tell(credit=pb.Credit(channel=self.consumes, units=credit))

    def fetch(self, admitted: Admitted, producers: Any) -> None:
        self.endpoints.update({p.worker: p.attempt for p in producers})
        self.to_hold += [u.id for u in admitted.again]
        for unit in admitted.absent:
            self.give_up(unit)
        for unit in admitted.to_pull:
            self.doing.append(lambda u=unit: self.arrive(u))  # type: ignore[misc]

    def arrive(self, unit: UnitInfo) -> None:
        attempt = self.endpoints.get(unit.producer, 0)
        if unit.producer == INLINE or self.world.pull(unit.id, unit.producer, attempt):
            if self.given.arrived(unit.id, unit) is not None:
                self.to_hold.append(unit.id)
        elif self.given.lost([unit.id]):
            self.give_up(unit)
        self.work()

    def give_up(self, unit: UnitInfo) -> None:
        attempt = self.endpoints.get(unit.producer, 0)
        keys = pb.Keys(channel=self.consumes, keys=[unit.key], branch=unit.branch)
        self.tell(peer_lost=pb.PeerLost(worker=unit.producer, attempt=attempt, reason="gone", units=keys))

    def on_assign(self, assign: pb.Assign) -> None:
        units = [translate.unit_from_pb(u) for u in assign.units]
        self.world.assigned |= {(unit.key, self.id) for unit in units}
        self.fetch(self.given.assign(units), assign.producers)

    def on_round(self, message: pb.Round) -> None:
        units = [translate.unit_from_pb(u) for u in message.units]
        part = RoundPart(
            step=message.step,
            branch=message.branch,
            number=message.number,
            last=message.last,
            total_weight=message.total_weight,
            units=[u.id for u in units],
        )
        self.fetch(self.given.assign_round(part, units), message.producers)
        self.work()

    def on_released(self, keys: pb.Keys) -> None:
        uids = [UnitId(keys.branch, key) for key in keys.keys]
        self.made.release(uids)
        self.settle(uids)

    def on_held(self, keys: pb.Keys) -> None:
        self.settle([UnitId(keys.branch, key) for key in keys.keys])

    def settle(self, uids: Sequence[UnitId]) -> None:
        for uid in uids:
            for parent in self.parents.held(uid):
                self.finish(parent)

    def finish(self, uid: UnitId, *, drop: bool = False) -> None:
        unit = self.given.finish(uid)
        if unit is not None:
            self.finished[uid] = unit
            (self.to_drop if drop else self.to_ack).append(uid)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        if cancel.channel == self.consumes:
            for uid in self.given.cancel(cancel.branch):
                self.parents.forget(uid)
                self.finish(uid, drop=True)
        if cancel.channel == self.produces:
            self.made.cancel(cancel.branch)
        self.to_announce = [u for u in self.to_announce if u.branch > cancel.branch]

    def work(self) -> None:
        """Something has come."""


class SimEnv(SimWorker):
    consumes, produces = "segments", "trajectories"

    def work(self) -> None:
        while self.begun is not None and (taken := self.given.take()) is not None:
            ticket = taken[0]
            self.waiting = getattr(self, "waiting", [])
            self.waiting.append(ticket)
            self.doing.append(self.collect)

    def on_time(self) -> None:
        super().on_time()
        if getattr(self, "waiting", None) and self.collect not in self.doing:
            self.doing.append(self.collect)

    def collect(self) -> None:
        """With a rollout that has weights which are new enough; without, it is tried again at the next tick."""
        have = self.world.rollout_version()
        for ticket in list(self.waiting):
            if not any(u.id == ticket.id for u in self.given.held_units()):
                self.waiting.remove(ticket)  # cancelled
            elif have is not None and have >= ticket.version:
                self.waiting.remove(ticket)
                made = UnitInfo(
                    key=ticket.key,
                    branch=ticket.branch,
                    step=ticket.step,
                    weight=4.0,
                    version=have,
                    parents=(ticket.key,),
                    producer=self.id,
                )
                if self.made.add(made, made):
                    self.parents.add(made.id, [ticket.id])
                    self.to_announce.append(made)


class SimRollout(SimWorker):
    consumes = ""


class SimActor(SimWorker):
    consumes, produces = "trajectories", ""

    def load(self) -> None:
        self.items: list[UnitInfo] = []
        self.updating: tuple[int, int] | None = None  # (branch, step) told done
        if self.size > 1:
            self.unanswered["join"] = pb.WorkerMessage(join=pb.Join(store_port=9))
            self.tell(join=self.unanswered["join"].join)
        else:
            self.restore()

    def on_roster(self, roster: pb.Roster) -> None:
        if self.unanswered.pop("join", None) is not None:
            self.restore()

    def restore(self) -> None:
        self.say_ready(max(self.world.checkpoints, key=lambda v: v.number, default=None))

    def on_begin(self, begin: pb.Begin) -> None:
        if "ready" in self.unanswered:
            self.published = translate.version_from_pb(begin.version)
        super().on_begin(begin)

    def work(self) -> None:
        while self.begun is not None and self.updating is None and (taken := self.given.take_round()) is not None:
            part, units = taken
            assert self.committed is not None
            if (part.branch, part.step) <= (self.committed.branch, self.committed.number):
                continue
            mine = [u for u in self.items if (u.branch, u.step) == (part.branch, part.step)]
            self.items = [*mine, *(unit for unit, _ in units)]
            if part.last:
                self.updating = (part.branch, part.step)
                self.doing.append(self.update)

    def update(self) -> None:
        """Every unit is of the very weights that are trained: the job has no staleness, or within its bound."""
        assert self.updating is not None
        branch, step = self.updating
        bound = self.world.driver.ledger.max_staleness
        for unit in self.items:
            assert unit.version.branch == branch, f"{unit} trains branch {branch}"
            assert step - 1 - bound <= unit.version.number <= step - 1, f"{unit} trains step {step}"
        keys = [u.key for u in self.items]
        done = pb.StepDone(step=step, branch=branch, rank=self.rank, keys=keys, metrics_json='{"loss": 0.5}')
        done.highest_driver_attempt = self.driver_attempt
        self.steps_done[step] = done
        self.tell(step_done=done)

    def on_step_commit(self, commit: pb.StepCommit) -> None:
        if self.steps_done.pop(commit.step, None) is None:
            return
        assert self.updating is not None
        self.committed = self.published = translate.version_from_pb(commit.version)
        world = self.world
        if self.rank == 0:
            keys = [u.key for w in world.workers.values() if isinstance(w, SimActor) for u in w.items_of(commit.step)]
            world.committed.append((commit.version.branch, commit.step, tuple(sorted(keys))))
            if commit.checkpoint:
                world.checkpoints.append(self.committed)
                saved = pb.Saved(version=commit.version, uri=f"{world.uri}/{self.committed}")
                self.unanswered["saved"] = pb.WorkerMessage(saved=saved)
                self.tell(saved=saved)
        self.trained = {commit.step: list(self.items)}
        for unit in self.items:
            self.finish(unit.id)
        self.items, self.updating = [], None
        self.work()

    def items_of(self, step: int) -> list[UnitInfo]:
        kept = getattr(self, "trained", {}).get(step, [])
        return [*kept, *(u for u in self.items if u.step == step)]


ROLES: dict[str, type[SimWorker]] = {"env": SimEnv, "rollout": SimRollout, "actor": SimActor}
