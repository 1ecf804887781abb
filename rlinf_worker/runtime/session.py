"""What a worker and the driver have agreed on: channels, routes, gang, steps. Turns the driver's words into calls.

For: the uplink (as its Part) and runtime.context. Synchronous but for what `steps` waits for; every message may come
twice and then changes nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import UserError
from rlinf_api.slots import Allotment
from rlinf_worker import memory
from rlinf_worker.channels import messages, plain
from rlinf_worker.channels.host import Host
from rlinf_worker.channels.in_hand import takes_all_itself
from rlinf_worker.checkpoints.store import KEEP
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.consuming import Consuming
from rlinf_worker.queues.units import uids_of
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.runtime.ends import ChannelEnds
from rlinf_worker.runtime.gang import RosteredGang
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.steps import Steps, ToDriver
from rlinf_worker.weights.channel import CHANNEL as WEIGHTS
from rlinf_worker.weights.channel import WeightsChannel

logger = logging.getLogger(__name__)

Settled = Callable[[], None]
AHEAD: Final = "plan"  # who wants a link that is made before its plan is in force


class Facts:
    """Small plain values that one role knows and others need before they load (`ctx.share`, `ctx.shared`). They go
    through the driver, which keeps them for whoever comes later; a new driver is told them again."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._news = host.waits.signal()
        self._known: dict[str, str] = {}
        self._mine: dict[str, str] = {}

    def share(self, name: str, value: Any) -> None:
        next = "share shapes and names; weights and data have channels"
        text = plain.encoded(value, f"fact {name!r} cannot be shared", next=next)
        plain.check_facts(self._known | self._mine | {name: text}, new=name, who=f"role {self._host.role!r}")
        if self._mine.setdefault(name, text) != text:
            raise UserError(f"fact {name!r} was shared before with another value", got=text[:200])
        self._host.tell(pb.WorkerMessage(fact=pb.Fact(name=name, json=text)))

    async def shared(self, name: str) -> Any:
        await self._host.waits.until(
            lambda: name in self._known,
            self._news,
            what=f"fact {name!r}",
            timeout_s=self._host.peer_wait_s,
            missing="a worker of the role that knows it",
        )
        return json.loads(self._known[name])

    def on_welcome(self, facts: Iterable[pb.Fact]) -> None:
        for fact in facts:
            self.on_fact(fact)
        for name, text in self._mine.items():
            self._host.tell(pb.WorkerMessage(fact=pb.Fact(name=name, json=text)))

    def on_fact(self, fact: pb.Fact) -> None:
        self._known[fact.name] = fact.json
        self._news.notify()


class Replans:
    """What a worker keeps of the plan in force: sizes of its channels, stages of its cycles, how many it is one of, its
    allotment. And the links that it makes ahead for the plan to come. Switches are numbered, and an older plan may come
    into force again: a word on plans is overtaken by its switch number, never by its revision."""

    def __init__(
        self,
        host: Host,
        queues: Mapping[str, QueueChannel],
        *,
        world: int,
        settle: Callable[[Settled], None] = lambda then: then(),
    ) -> None:
        """`settle` calls what it is given once the role has left slots that the plan in force does not let it keep."""
        self._host, self._queues, self.world, self._settle = host, queues, world, settle
        self._stages: dict[str, int] = {}  # by channel
        self.allotment = Allotment()
        self._given_anew = host.waits.signal()
        self._linked_ahead: set[Peer] = set()
        self.number = 0  # the newest switch that this worker has heard of from its present driver

    def stages(self, channel: str) -> int:
        return self._stages.get(channel, 0)

    def opened(self, spec: pb.ChannelSpec) -> None:
        """A channel of this worker's role, as the first Welcome has it."""
        self._stages[spec.name] = spec.stages

    def on_welcome(self, welcome: pb.Welcome, *, first: bool) -> None:
        """Another plan may have come into force while the stream was broken; a new driver's number is the one that
        counts, also where it is lower."""
        if not first:
            self._resize(welcome.channels)
        self.world = welcome.world or self.world
        self._allot(welcome.allotment)
        self.number = welcome.switch_number
        self._settle(lambda: None)

    def on_replan(self, replan: pb.Replan) -> None:
        """For a switch that has not been overtaken: the caller has looked at `number`."""
        self.number = replan.switch_number
        self.world = replan.world or self.world
        self._allot(replan.allotment)
        self._resize(replan.channels)
        for peer in self._linked_ahead:
            self._host.peers.unwant(peer, by=AHEAD)  # routes keep what is needed
        self._linked_ahead.clear()
        logger.info("another plan is in force", extra={"plan_revision": replan.plan_revision, "switch": self.number})
        self._settle(lambda: self._answer(replan))

    def _answer(self, replan: pb.Replan) -> None:
        """With the answer the driver forgets the credit that it knew: what is said anew goes behind it."""
        for queue in self._queues.values():
            queue.into.state_credit_anew()
        done = pb.Replanned(switch_number=replan.switch_number)
        self._host.tell(pb.WorkerMessage(replanned=done))

    def on_links(self, links: pb.Links) -> None:
        """Whom this worker will speak with under the plan that is being prepared: no link is made in the pause."""
        for endpoint in links.peers:
            self._linked_ahead.add(self._host.peers.want(messages.endpoint_from_pb(endpoint), by=AHEAD, at_once=True))

    def _allot(self, given: pb.Allotment) -> None:
        self.allotment = messages.allotment_from_pb(given)
        self._given_anew.notify()

    async def other_allotment(self, than: Allotment) -> Allotment:
        await self._host.waits.beside(lambda: self.allotment != than, self._given_anew)
        return self.allotment

    def _resize(self, specs: Iterable[pb.ChannelSpec]) -> None:
        for spec in specs:
            if spec.name in self._stages:
                self._stages[spec.name] = spec.stages
            if (queue := self._queues.get(spec.name)) is not None:
                queue.on_spec(spec)


def branches_of(message: pb.DriverMessage) -> Iterable[int]:
    """The branches of the weights' history that a message names; 0 where it names none."""
    kind = message.WhichOneof("kind")
    if kind in ("begin", "step_commit"):
        return (getattr(message, kind).version.branch,)
    if kind in ("cancel", "round", "released", "held"):
        return (getattr(message, kind).branch,)
    if kind == "assign":
        return [0, *(unit.branch for unit in message.assign.units)]
    return (0,)


class WorkerSession:
    """One per worker process; survives every stream and every driver."""

    def __init__(
        self,
        identity: WorkerIdentity,
        host: Host,
        *,
        driver: Callable[[], ToDriver],
        settle: Callable[[Settled], None] = lambda then: then(),
    ) -> None:
        self.identity, self._host = identity, host
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
        self.gangs: tuple[str, ...] = ()  # the roles that end steps, each with its part of a checkpoint
        self._highest_branch = 0
        self._kept = ""
        self.replans = Replans(host, self.queues, world=identity.world, settle=settle)
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
            "cancel": lambda m: self.ends.queue(m.cancel.channel).on_cancel(m.cancel),
            "roster": lambda m: self.gang.on_roster(m.roster),
            "begin": lambda m: self.steps.on_begin(m.begin),
            "fact": lambda m: self.facts.on_fact(m.fact),
            "replan": lambda m: self._on_replan(m.replan),
            "links": lambda m: self.replans.on_links(m.links),
        }

    @property
    def highest_branch(self) -> int:
        """The highest that this worker has heard of, from anybody: by steps that commit on it, by what is cancelled for
        it, by what it is given to do. A new driver gives the next one a higher number."""
        return max(self._highest_branch, self.weights.highest_branch)

    @property
    def max_staleness(self) -> int:
        """Nothing is put before the first Welcome has said it."""
        return self.flow.max_staleness if self.flow is not None else 0

    # --- the stream to the driver -------------------------------------------------------------------------------------
    def hello(self, *, highest_driver_attempt: int) -> pb.WorkerMessage:
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
        return pb.WorkerMessage(hello=hello)

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
        if self._kept:
            self._host.tell(pb.WorkerMessage(kept=pb.Kept(words=self._kept)))
        if self.gang.join is not None:
            self._host.tell(pb.WorkerMessage(join=self.gang.join))
        self.steps.on_welcome(driver_attempt=welcome.driver_attempt)

    def _open_channels(self, welcome: pb.Welcome) -> None:
        self._host.in_hand.has_all = takes_all_itself(self.identity.role, welcome.channels)
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
        self.gangs = tuple(welcome.gangs)
        self.gang.has_others = self.identity.role in self.gangs and len(self.gangs) > 1
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
        self._highest_branch = max(self._highest_branch, *branches_of(message))
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

    def left_slots(self, kept: int) -> None:
        """So many bytes were seen to stay there: told where that is beyond the plan, and once it is no more."""
        allowed = self.replans.allotment.offloaded_bytes * len(self.identity.slots)
        before, self._kept = self._kept, memory.excess(self.identity.worker, kept=kept, allowed=allowed)
        if bool(before) != bool(self._kept):
            self._host.tell(pb.WorkerMessage(kept=pb.Kept(words=self._kept)))

    def on_device(self) -> None:
        """The role has loaded, and so its GPU may be in use."""
        self._host.peers.on_device()
