"""What a worker and the driver have agreed on: channels, routes, gang, steps. Turns the driver's words into calls.

For: the uplink (as its Part) and runtime.context. Synchronous but for what `steps` waits for; every message may come
twice and then changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import KEEP
from rlinf_worker.queues.consuming import Consuming
from rlinf_worker.queues.units import uids_of
from rlinf_worker.roles.protocol import FlowSettings, StepCommit
from rlinf_worker.runtime.branches import Branches
from rlinf_worker.runtime.ends import ChannelEnds
from rlinf_worker.runtime.facts import Facts
from rlinf_worker.runtime.gang import RosteredGang
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.replans import Replans
from rlinf_worker.runtime.steps import DriverEnd, Steps
from rlinf_worker.weights.channel import CHANNEL as WEIGHTS
from rlinf_worker.weights.channel import WeightsChannel

logger = logging.getLogger(__name__)


class WorkerSession:
    """One per worker process; survives every stream and every driver."""

    def __init__(
        self, identity: WorkerIdentity, host: Host, *, driver: Callable[[], DriverEnd], on_stop: Callable[[str], None]
    ) -> None:
        self.identity, self._host, self._on_stop = identity, host, on_stop
        self.weights = WeightsChannel(
            host, shm_dir=identity.shm_dir, rank=identity.rank, gang=lambda: self.gang.endpoints
        )
        self.ends = ChannelEnds(host, self.weights)
        self.askers, self.answerers, self.queues = self.ends.askers, self.ends.answerers, self.ends.queues
        self.gang = RosteredGang(identity, host)
        self.steps = Steps(identity, host, driver=driver)
        self.facts = Facts(host)
        self.flow: FlowSettings | None = None
        self.checkpoint_uri, self.checkpoint_keep = identity.checkpoint_uri, KEEP
        self.branches = Branches()
        self.replans = Replans(host, self.queues, world=identity.world)
        self._newest_roster = 0
        self.stale_instructions = 0  # left out, as they are of an older roster or plan than has been heard of
        self._on: Mapping[str, Callable[[pb.DriverMessage], None]] = {
            "route": lambda m: self._on_route(m.route),
            "unroute": lambda m: self._on_unroute(m.unroute),
            "assign": lambda m: self._given(m.assign.channel).on_assign(m.assign),
            "round": lambda m: self._given(m.round.channel).on_round(m.round),
            "released": lambda m: self.ends.queue(m.released.channel).out.on_released(uids_of(m.released)),
            "held": lambda m: self.ends.queue(m.held.channel).out.on_held(uids_of(m.held)),
            "step_commit": lambda m: self.steps.on_commit(m.step_commit),
            "cancel": lambda m: self.ends.on_cancel(m.cancel),
            "roster": lambda m: self.gang.on_roster(m.roster),
            "stop": lambda m: self._on_stop(m.stop.reason or "the driver says so"),
            "begin": lambda m: self.steps.on_begin(m.begin),
            "fact": lambda m: self.facts.on_fact(m.fact),
            "replan": lambda m: self._on_replan(m.replan),
            "links": lambda m: self.replans.on_links(m.links),
        }

    @property
    def highest_branch(self) -> int:
        """That this worker has heard of, from anybody."""
        return max(self.branches.highest, self.weights.highest_branch)

    # --- the stream to the driver -------------------------------------------------------------------------------------
    def hello(self, *, highest_driver_attempt: int) -> pb.Hello:
        identity = self.identity
        hello = pb.Hello(
            job_uid=identity.job_uid,
            worker=identity.worker,
            attempt=identity.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=highest_driver_attempt,
            endpoint=messages.endpoint_to_pb(self._host.peers.listener.endpoint),
            produced=[unit for queue in self.queues.values() for unit in queue.out.hello()],
            taken=[unit for queue in self.queues.values() for unit in queue.into.hello()],
            world=identity.world,
            highest_branch=self.highest_branch,
        )
        self.steps.greet(hello)
        return hello

    def on_welcome(self, welcome: pb.Welcome, *, is_new_driver: bool) -> None:
        if first := self.flow is None:
            self._open_channels(welcome)
            self._host.peers.start()  # not before: a peer's first frame names a channel
        self.replans.on_welcome(welcome, first=first)
        self._host.peers.has_begun |= welcome.switch_number > 1  # a worker of a plan that came later
        if is_new_driver:
            self._newest_roster = 0  # each driver counts for itself
            for asker in self.askers.values():
                asker.on_new_driver()
        for queue in self.queues.values():
            queue.into.on_welcome(is_new_driver=is_new_driver)
        self.facts.on_welcome(welcome.facts)
        if self.gang.join is not None:
            self._host.tell(pb.WorkerMessage(join=self.gang.join))
        self.steps.on_welcome(driver_attempt=welcome.driver_attempt)

    def _open_channels(self, welcome: pb.Welcome) -> None:
        for spec in welcome.channels:
            if self.identity.role not in (spec.producer, spec.consumer):
                continue
            if spec.name == WEIGHTS:
                continue
            self.replans.opened(spec)
            self.ends.open(spec)
        # A pod's own path first: in local mode a volume has another one in each pod, and the driver mounts none.
        self.checkpoint_uri = self.identity.checkpoint_uri or welcome.checkpoint_uri
        self.checkpoint_keep = welcome.checkpoint_keep or self.checkpoint_keep
        self.flow = FlowSettings.from_json(welcome.flow_json)

    def _is_stale(self, what: str, number: int, *, newest: int) -> bool:
        if number >= newest:
            return False
        self.stale_instructions += 1
        logger.warning("an instruction that has been overtaken", extra={"what": what, "got": number, "newest": newest})
        return True

    def _on_replan(self, replan: pb.Replan) -> None:
        if not self._is_stale("switch of plans", replan.switch_number, newest=self.replans.number):
            self.replans.on_replan(replan)

    def on_message(self, message: pb.DriverMessage) -> None:
        kind = message.WhichOneof("kind")
        handle = self._on.get(kind or "")
        if handle is None:
            logger.warning("a message of the driver that this version does not know", extra={"kind": kind})
            return
        self.branches.hear(message)
        handle(message)

    # --- routes -------------------------------------------------------------------------------------------------------
    def _on_route(self, route: pb.Route) -> None:
        if self._is_stale("roster", route.roster, newest=self._newest_roster):
            return
        self._newest_roster = route.roster
        peer = messages.endpoint_from_pb(route.peer)
        if route.channel == WEIGHTS:
            self.weights.on_route(peer, outgoing=route.outgoing)
        else:
            self.ends.asker(route.channel).on_route(peer, credit=route.credit, number=route.number)

    def _on_unroute(self, unroute: pb.Unroute) -> None:
        if unroute.channel == WEIGHTS:
            self.weights.on_unroute(unroute.worker, unroute.attempt)
        else:
            self.ends.asker(unroute.channel).on_unroute(unroute.worker, unroute.attempt, number=unroute.number)

    # --- queues -------------------------------------------------------------------------------------------------------
    def _given(self, channel: str) -> Consuming:
        """Where it is told what to do. A worker that is has begun."""
        self._host.peers.has_begun = True
        return self.ends.queue(channel).into

    # --- for the role -------------------------------------------------------------------------------------------------
    def on_device(self) -> None:
        """The role has loaded, and so its GPU may be in use."""
        self._host.peers.on_device()

    async def ready(self, *, version: PolicyVersion | None, highest_branch: int = 0) -> PolicyVersion:
        self.on_device()  # before the word to the driver: links are made again while no step is open
        return await self.steps.ready(version=version, highest_branch=highest_branch)

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        ended = [key for queue in self.queues.values() for key in queue.into.ended.take(step, branch=branch)]
        return await self.steps.done(step, branch=branch, keys=keys, metrics=metrics, ended=ended)

    def report(self, *, step: int, metrics: Mapping[str, float], key: str = "") -> None:
        self.steps.report(step=step, branch=self.highest_branch, metrics=metrics, key=key)
