"""What a worker and the driver have agreed on: channels, routes, gang, steps. Turns the driver's words into calls.

For: the uplink (as its Part) and runtime.context (ready, step_done, gang). Synchronous but for the
two waits below; every message may come twice and then changes nothing.

| waits | for | unblocked by |
|---|---|---|
| ready | Begin | the driver, when the gang is whole |
| step_done | StepCommit of the step | the driver, when every rank has done its part |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.errors import InvariantBroken
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import PEER_WAIT_S, Host
from rlinf_worker.channels.protocol import Item, PolicyVersion
from rlinf_worker.checkpoints.store import KEEP
from rlinf_worker.links import frames
from rlinf_worker.links.message import Message
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.channel import QueueChannel
from rlinf_worker.queues.parents import Parents
from rlinf_worker.queues.units import uids_of
from rlinf_worker.roles.protocol import FlowSettings, StepCommit
from rlinf_worker.runtime.accounts import Accounts
from rlinf_worker.runtime.branches import Branches
from rlinf_worker.runtime.facts import Facts
from rlinf_worker.runtime.gang import RosteredGang
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.replans import Replans
from rlinf_worker.runtime.streams import StreamChannel
from rlinf_worker.runtime.tidings import Tidings
from rlinf_worker.weights.channel import CHANNEL as WEIGHTS
from rlinf_worker.weights.channel import WeightsChannel

logger = logging.getLogger(__name__)

COMMITS_KEPT: Final = 16


class WorkerSession:
    """One per worker process; survives every stream and every driver."""

    def __init__(self, identity: WorkerIdentity, host: Host, *, on_stop: Callable[[str], None]) -> None:
        self.identity, self._host, self._on_stop = identity, host, on_stop
        self.streams: dict[str, StreamChannel] = {}
        self.queues: dict[str, QueueChannel] = {}
        self.weights = WeightsChannel(
            host, shm_dir=identity.shm_dir, rank=identity.rank, gang=lambda: self.gang.endpoints
        )
        self.gang = RosteredGang(identity, host)
        self.facts = Facts(host)
        self.tidings = Tidings(host, branch=lambda: self.highest_branch)
        self.parents: Parents[Item] = Parents()
        self.flow: FlowSettings | None = None
        self.checkpoint_uri, self.checkpoint_keep = identity.checkpoint_uri, KEEP
        self.news = host.waits.signal()
        self.highest_driver_attempt = 0
        self.begun: PolicyVersion | None = None
        self._ready: pb.Ready | None = None  # told, and not answered by Begin
        self._steps_done: dict[int, pb.StepDone] = {}  # told, and not answered by StepCommit
        self._commits: dict[int, pb.StepCommit] = {}
        self._accounts = Accounts(host)
        self._committed: PolicyVersion | None = None
        self._last_commit: pb.StepCommit | None = None
        self.branches = Branches()
        self.replans = Replans(host, self.queues, world=identity.world)
        self._newest_roster = 0
        self.stale_instructions = 0  # left out, as they are of an older roster or plan than has been heard of
        peers = host.peers
        peers.handlers[frames.Open] = self._on_open
        peers.handlers[frames.Pull] = self._on_pull
        peers.handlers[frames.Payload] = self._on_payload
        peers.handlers[frames.Missing] = self._on_missing
        peers.on_up.append(self._on_up)
        peers.on_unreachable.append(self._on_unreachable)
        peers.on_superseded.append(self._on_superseded)
        self._on: Mapping[str, Callable[[pb.DriverMessage], None]] = {
            "route": lambda m: self._on_route(m.route),
            "unroute": lambda m: self._on_unroute(m.unroute),
            "assign": lambda m: self._on_assign(m.assign),
            "round": lambda m: self._on_round(m.round),
            "released": lambda m: self._queue(m.released.channel).out.on_released(uids_of(m.released)),
            "held": lambda m: self._queue(m.held.channel).out.on_held(uids_of(m.held)),
            "step_commit": lambda m: self._on_step_commit(m.step_commit),
            "cancel": lambda m: self._on_cancel(m.cancel),
            "roster": lambda m: self.gang.on_roster(m.roster),
            "stop": lambda m: self._on_stop(m.stop.reason or "the driver says so"),
            "begin": lambda m: self._on_begin(m.begin),
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
        self.tidings.disconnected()
        hello = pb.Hello(
            job_uid=identity.job_uid,
            worker=identity.worker,
            attempt=identity.attempt,
            protocol=names.PROTOCOL,
            highest_driver_attempt=highest_driver_attempt,
            endpoint=messages.endpoint_to_pb(self._host.peers.listener.endpoint),
            ready=self.begun is not None,
            produced=[unit for queue in self.queues.values() for unit in queue.out.hello()],
            taken=[unit for queue in self.queues.values() for unit in queue.into.hello()],
            steps_done=[self._fenced(done) for done in self._steps_done.values()],
            committed=messages.version_to_pb(self._committed) if self._committed is not None else None,
            world=identity.world,
            highest_branch=self.highest_branch,
            last_commit=self._last_commit,
        )
        return hello

    def on_welcome(self, welcome: pb.Welcome, *, is_new_driver: bool) -> None:
        self.highest_driver_attempt = welcome.driver_attempt
        if first := self.flow is None:
            self._open_channels(welcome)
            self._host.peers.start()  # not before: a peer's first frame names a channel
        self.replans.on_welcome(welcome, first=first)
        self._host.peers.has_begun |= welcome.switch_number > 1  # a worker of a plan that came later
        if is_new_driver:
            self._newest_roster = 0  # each driver counts for itself
            for stream in self.streams.values():
                stream.on_new_driver()
        for queue in self.queues.values():
            queue.into.on_welcome(is_new_driver=is_new_driver)
        self.facts.on_welcome(welcome.facts)
        if self.gang.join is not None:
            self._host.tell(pb.WorkerMessage(join=self.gang.join))
        if self._ready is not None:
            self._host.tell(pb.WorkerMessage(ready=self._ready))
        self.tidings.connected()
        self.news.notify()

    def _open_channels(self, welcome: pb.Welcome) -> None:
        for spec in welcome.channels:
            if self.identity.role not in (spec.producer, spec.consumer):
                continue
            if spec.name == WEIGHTS:
                continue
            self.replans.opened(spec)
            if spec.mode == "Stream":
                self.streams[spec.name] = StreamChannel(self._host, spec)
            else:
                self.queues[spec.name] = QueueChannel(self._host, spec, self.parents)
        # A pod's own path first: in local mode a volume has another one in each pod, and the driver mounts none.
        self.checkpoint_uri = self.identity.checkpoint_uri or welcome.checkpoint_uri
        self.checkpoint_keep = welcome.checkpoint_keep or self.checkpoint_keep
        fields = json.loads(welcome.flow_json or "{}")
        self.flow = FlowSettings(
            name=fields.get("name", ""),
            steps=int(fields.get("steps", 0)),
            seed=int(fields.get("seed", 0)),
            max_staleness=int(fields.get("max_staleness", 0)),
            order=fields.get("order", "arrival"),
            config=fields.get("config", {}),
        )

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
    def _stream(self, channel: str) -> StreamChannel | WeightsChannel:
        found = self.weights if channel == WEIGHTS else self.streams.get(channel)
        if found is None:
            raise InvariantBroken(f"the driver gave a route of stream {channel!r}", wanted=", ".join(self.streams))
        return found

    def _on_route(self, route: pb.Route) -> None:
        if self._is_stale("roster", route.roster, newest=self._newest_roster):
            return
        self._newest_roster = route.roster
        peer = messages.endpoint_from_pb(route.peer)
        self._stream(route.channel).on_route(peer, outgoing=route.outgoing, credit=route.credit, number=route.number)

    def _on_unroute(self, unroute: pb.Unroute) -> None:
        self._stream(unroute.channel).on_unroute(unroute.worker, unroute.attempt, number=unroute.number)

    def _on_open(self, peer: Peer, frame: frames.Open, message: Message) -> None:
        stream = self.streams.get(frame.channel)
        if stream is None:
            logger.error("a peer opened a stream that is not ours", extra={"channel": frame.channel})
            return
        stream.on_open(peer, frame)

    def _on_up(self, peer: Peer) -> None:
        self.weights.on_up(peer)
        for queue in self.queues.values():
            queue.into.on_up(peer)

    def _on_unreachable(self, peer: Peer, why: str) -> None:
        for queue in self.queues.values():
            queue.into.on_unreachable(peer, why)
        for stream in self.streams.values():
            stream.on_unreachable(peer)

    def _on_superseded(self, peer: Peer) -> None:
        for stream in self.streams.values():
            stream.on_superseded(peer)

    # --- queues -------------------------------------------------------------------------------------------------------
    def _queue(self, channel: str) -> QueueChannel:
        queue = self.queues.get(channel)
        if queue is None:
            raise InvariantBroken(f"the driver spoke of queue {channel!r}", wanted=", ".join(self.queues))
        return queue

    def _on_assign(self, assign: pb.Assign) -> None:
        self._host.peers.has_begun = True
        self._queue(assign.channel).into.on_assign(assign)

    def _on_round(self, message: pb.Round) -> None:
        self._host.peers.has_begun = True
        self._queue(message.channel).into.on_round(message)

    def _on_cancel(self, cancel: pb.Cancel) -> None:
        if (stream := self.streams.get(cancel.channel)) is not None:
            stream.on_cancel(cancel.branch)
        else:
            self._queue(cancel.channel).on_cancel(cancel.branch)

    def _on_pull(self, peer: Peer, frame: frames.Pull, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.out.on_pull(peer, frame)

    def _on_payload(self, peer: Peer, frame: frames.Payload, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.into.on_payload(frame, message)

    def _on_missing(self, peer: Peer, frame: frames.Missing, message: Message) -> None:
        if (queue := self.queues.get(frame.channel)) is not None:
            queue.into.on_missing(peer, frame)

    # --- begin -------------------------------------------------------------------------------------------------------
    def on_device(self) -> None:
        """The role has loaded, and so its GPU may be in use."""
        self._host.peers.on_device()

    async def ready(self, *, version: PolicyVersion | None, highest_branch: int = 0) -> PolicyVersion:
        self.on_device()  # before the word to the driver: links are made again while no step is open
        self._ready = pb.Ready(
            version=messages.version_to_pb(version) if version is not None else None,
            restored=version is not None,
            highest_branch=highest_branch,
        )
        self._host.tell(pb.WorkerMessage(ready=self._ready))
        # Not gated: a rank that is taken off its slots here, as idle, wants them back only when it may begin; a gang
        # whose ranks may begin at different moments would never want its turn whole again.
        await self._host.waits.until(
            lambda: self.begun is not None,
            self.news,
            what=f"the driver's Begin for {self.identity.worker}",
            timeout_s=PEER_WAIT_S,
            missing="a rank of its gang that is not ready, or the driver",
            gated=False,
        )
        assert self.begun is not None
        return self.begun

    def _on_begin(self, begin: pb.Begin) -> None:
        if self._ready is None:
            return
        self._ready = None
        self.begun = messages.version_from_pb(begin.version)
        if self._committed is None:
            self._committed = self.begun
        self.news.notify()

    # --- steps --------------------------------------------------------------------------------------------------------
    def _fenced(self, done: pb.StepDone) -> pb.StepDone:
        done.highest_driver_attempt = self.highest_driver_attempt
        return done

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        done = pb.StepDone(
            step=step,
            branch=branch,
            rank=self.identity.rank,
            keys=keys,
            metrics_json=json.dumps({name: float(value) for name, value in metrics.items()}),
            ended=sorted(key for queue in self.queues.values() for key in queue.into.ended.take(step, branch=branch)),
        )
        self._steps_done[step] = done
        self._host.tell(pb.WorkerMessage(step_done=self._fenced(done)))
        await self._host.waits.until(
            lambda: step in self._commits,
            self.news,
            what=f"the commit of step {step}",
            timeout_s=PEER_WAIT_S,
            missing="another rank of the gang, or the driver",
        )
        commit = self._commits.pop(step)
        return StepCommit(
            step=step,
            version=messages.version_from_pb(commit.version),
            checkpoint=commit.checkpoint,
            state_json=commit.state_json,
            last=commit.last,
        )

    def _on_step_commit(self, commit: pb.StepCommit) -> None:
        self._accounts.close(commit)
        if self._steps_done.pop(commit.step, None) is None:
            return  # told twice, or of another life of this rank
        self._commits[commit.step] = self._last_commit = commit
        self._committed = messages.version_from_pb(commit.version)
        while len(self._commits) > COMMITS_KEPT:
            self._commits.pop(next(iter(self._commits)))
        self.news.notify()

    # --- items --------------------------------------------------------------------------------------------------------
    def spill(self) -> int:
        """This worker's turn on its slots ends: what its queues keep there goes to host memory. Bytes that moved."""
        return sum(queue.out.shelf.spill() for queue in self.queues.values())

    def finish_item(self, item: Item) -> None:
        """An item whose children are all held."""
        channel = self.queues.get(item.channel) or self.streams.get(item.channel)
        if channel is not None:
            channel.finish(item)

    @property
    def unfinished(self) -> int:
        """What others may still need of this worker."""
        return sum(q.unfinished for q in self.queues.values()) + sum(s.unfinished for s in self.streams.values())
