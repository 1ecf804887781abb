"""What every worker of tests.fakes.driver_world tells the driver, and when; the roles are driver_roles.

Their ends of channels are the real ones (queues, cycles), over links in memory (memory_links).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.names import WorkerId
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.cycles.answerer import Answerer
from rlinf_worker.cycles.asker import Asker
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.units import uids_of
from rlinf_worker.runtime.session import Replans, branches_of
from rlinf_worker.runtime.steps import Steps
from rlinf_worker.spans import Recorder
from rlinf_worker.uplink.outbox import Kept
from tests.builders_driver import JOB_UID
from tests.fakes.memory_links import MemoryPeer, MemoryPeers, Pauses

if TYPE_CHECKING:
    from tests.fakes.driver_world import World


class SimWorker:
    consumes, produces = "", ""

    def __init__(self, world: World, start: agents_pb2.Start, *, pod: tuple[str, int]) -> None:
        self.world, self.id, self.role, self.pod = world, WorkerId(start.worker), start.role, pod
        self.attempt, self.rank, self.size = start.attempt, start.rank, start.world
        self.outbox: Any = None
        self.to_driver: deque[pb.WorkerMessage] = deque()
        self.doing: deque[Callable[[], None]] = deque([self.connect])  # its own work, in its order
        self.away = self.first_batch = 0
        self.comes_now = False  # back between any two messages, not at a time when nothing else happens
        self.begun: PolicyVersion | None = None
        self.published: PolicyVersion | None = None
        self.unanswered: dict[str, pb.WorkerMessage] = {}  # told after every Welcome, until the answer
        self.driver_attempt = 0
        self.committed: PolicyVersion | None = None
        self.last_commit: pb.StepCommit | None = None
        self.state_json = ""
        self.steps_done: dict[int, pb.StepDone] = {}
        self.links = MemoryPeers(self)
        self.queues: dict[str, QueueChannel] = {}
        self.askers: dict[str, Asker] = {}
        self.answerers: dict[str, Answerer] = {}
        self.marked: dict[Any, None] = {}
        self.host = Host(
            worker=self.id,
            role=self.role,
            peers=cast(Any, self.links),
            waits=cast(Any, Pauses()),
            recorder=Recorder(),
            tell=self._tell,
            mark=lambda source, *, can_wait=False: self.marked.update({source: None}),
            finish_item=lambda item: self.queues[item.channel].finish(item),
            fatal=self._raise,
            max_staleness=lambda: world.driver.job.ledger.max_staleness,
        )
        self.parents: Parents[Item] = Parents()
        self.replans = Replans(self.host, self.queues, world=self.size)
        self.heard_branch = 0
        self.kept: Kept[pb.WorkerMessage] = Kept(limit=10)
        self.checkpoints = Steps(cast(Any, self), self.host, driver=lambda: cast(Any, self))

    @property
    def life(self) -> tuple[str, int]:
        return self.id, self.attempt

    @property
    def highest_branch(self) -> int:
        return max(self.heard_branch, self.published.branch if self.published else 0)

    def _tell(self, message: pb.WorkerMessage) -> None:
        if self.outbox is not None:
            self.to_driver.append(message)

    def _raise(self, error: BaseException) -> None:
        raise error

    # --- the stream -------------------------------------------------------------------------------------------------
    def connect(self) -> None:
        hello = pb.Hello(
            job_uid=JOB_UID,
            worker=self.id,
            attempt=self.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=self.driver_attempt,
            endpoint=pb.Endpoint(worker=self.id, attempt=self.attempt),
            ready=self.begun is not None,
            produced=[unit for queue in self.queues.values() for unit in queue.out.hello()],
            taken=[unit for queue in self.queues.values() for unit in queue.into.hello()],
            steps_done=list(self.steps_done.values()),
            committed=messages.version_to_pb(self.committed) if self.committed is not None else None,
            world=self.size,
            highest_branch=self.highest_branch,
            last_commit=self.last_commit,
            state_json=self.state_json,
        )
        self.to_driver.clear()
        self.world.welcome(self, hello)

    def disconnect(self) -> None:
        self.outbox, self.away = None, self.world.chance.randrange(3)
        self.comes_now = self.world.is_busy and self.away == 0 and self.connect not in self.doing
        self.to_driver.clear()

    def on_time(self) -> None:
        """Every tick in which nothing else happens."""
        self.links.on_time()
        if self.outbox is None and self.connect not in self.doing:
            self.away -= 1
            if self.away < 0:
                self.connect()

    def tell(self, **kind: Any) -> None:
        self._tell(pb.WorkerMessage(**kind))

    def repeat(self, key: str, message: pb.WorkerMessage) -> None:
        self.kept.repeat(key, message)
        self._tell(message)

    def forget(self, key: str) -> None:
        self.kept.forget(key)

    def hear(self, message: pb.DriverMessage) -> None:
        kind = message.WhichOneof("kind")
        self.heard_branch = max(self.heard_branch, *branches_of(message))
        getattr(self, f"on_{kind}", lambda _: None)(getattr(message, str(kind)))

    def on_welcome(self, welcome: pb.Welcome) -> None:
        is_new = welcome.driver_attempt > self.driver_attempt > 0
        first, self.driver_attempt = self.driver_attempt == 0, welcome.driver_attempt
        for spec in welcome.channels if first else ():
            if self.host.role in (spec.producer, spec.consumer) and spec.name != "weights":
                if spec.mode == "Cycle" and spec.producer == self.host.role:
                    self.askers[spec.name] = Asker(self.host, spec)
                elif spec.mode == "Cycle":
                    self.answerers[spec.name] = Answerer(self.host, spec)
                else:
                    self.queues[spec.name] = QueueChannel(self.host, spec, self.parents)
        self.replans.on_welcome(welcome, first=first)
        for queue in self.queues.values():
            queue.into.on_welcome(is_new_driver=is_new)
        for asker in self.askers.values() if is_new else ():
            asker.on_new_driver()
        for message in self.unanswered.values():
            self.to_driver.append(message)
        self.to_driver.extend(told.message for told in self.kept.welcomed([], is_same_driver=not is_new))
        if first:
            self.doing.append(self.load)
        self.work()

    def load(self) -> None:
        self.say_ready()

    def on_replan(self, replan: pb.Replan) -> None:
        if replan.switch_number >= self.replans.number:  # as runtime.session
            self.replans.on_replan(replan)

    def say_ready(self, restored: PolicyVersion | None = None) -> None:
        at = messages.version_to_pb(restored) if restored is not None else None
        self.state_json = self.world.states.get(restored, "") if restored is not None else ""
        ready = pb.Ready(
            version=at, restored=restored is not None, highest_branch=self.world.traces, state_json=self.state_json
        )
        self.unanswered["ready"] = pb.WorkerMessage(ready=ready)
        self.tell(ready=self.unanswered["ready"].ready)

    def on_begin(self, begin: pb.Begin) -> None:
        if self.unanswered.pop("ready", None) is not None:
            self.begun = self.committed = messages.version_from_pb(begin.version)
            self.work()

    # --- channels -----------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        if self.outbox is None:
            return
        marked, self.marked = self.marked, {}
        batch: list[pb.WorkerMessage] = []
        for source in sorted(marked, key=lambda source: source.comes_last):
            source.drain(batch)
        self.to_driver += batch

    def on_frame(self, peer: MemoryPeer, frame: Any, message: Message) -> None:
        if isinstance(frame, frames.Open):
            self.answerers[frame.channel].on_open(peer, frame)
            return
        queue = self.queues[frame.channel]
        if isinstance(frame, frames.Pull):
            queue.out.on_pull(peer, frame)
        elif isinstance(frame, frames.Payload):
            queue.into.on_payload(frame, message)
        else:
            queue.into.on_missing(peer, frame)

    def on_up(self, peer: MemoryPeer) -> None:
        for queue in self.queues.values():
            queue.into.on_up(peer)

    def on_unreachable(self, peer: MemoryPeer) -> None:
        for queue in self.queues.values():
            queue.into.on_unreachable(peer, "gone")
        for asker in self.askers.values():
            asker.on_unreachable(peer)
        self.work()

    def on_assign(self, assign: pb.Assign) -> None:
        self.world.assigned |= {(unit.key, self.id) for unit in assign.units}
        self.queues[assign.channel].into.on_assign(assign)
        self.work()

    def on_round(self, message: pb.Round) -> None:
        self.queues[message.channel].into.on_round(message)
        self.work()

    def on_released(self, keys: pb.Keys) -> None:
        self.queues[keys.channel].out.on_released(uids_of(keys))

    def on_held(self, keys: pb.Keys) -> None:
        self.queues[keys.channel].out.on_held(uids_of(keys))

    def on_cancel(self, cancel: pb.Cancel) -> None:
        if (queue := self.queues.get(cancel.channel)) is not None:
            queue.on_cancel(cancel)
        self.work()

    def on_route(self, route: pb.Route) -> None:
        if route.channel != "weights":
            peer = messages.endpoint_from_pb(route.peer)
            self.askers[route.channel].on_route(peer, credit=route.credit, number=route.number)

    def on_unroute(self, unroute: pb.Unroute) -> None:
        if unroute.channel != "weights":
            asker = self.askers[unroute.channel]
            asker.on_unroute(unroute.worker, unroute.attempt, number=unroute.number)

    def work(self) -> None:
        """Something has come."""

    def go_on(self) -> None:
        """After each message, wherever: what waits looks again."""
