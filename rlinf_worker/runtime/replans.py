"""What a worker keeps of the plan in force: sizes of its channels, stages of its cycles, how many it is one of. And the
links that it makes ahead for the plan to come. For runtime.session, which passes on the driver's words.

Switches are numbered, and an older plan may come into force again: a word on plans is overtaken by its switch number,
never by its revision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_worker.channels import messages
from rlinf_worker.channels.host import Host
from rlinf_worker.links.peers import Peer
from rlinf_worker.queues.channel import QueueChannel

logger = logging.getLogger(__name__)

AHEAD: Final = "plan"  # who wants a link that is made before its plan is in force


class Replans:
    def __init__(self, host: Host, queues: Mapping[str, QueueChannel], *, world: int) -> None:
        self._host, self._queues, self.world = host, queues, world
        self._stages: dict[str, int] = {}  # by channel
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
        self.number = welcome.switch_number

    def on_replan(self, replan: pb.Replan) -> None:
        """For a switch that has not been overtaken: the caller has looked at `number`."""
        self.number = replan.switch_number
        self.world = replan.world or self.world
        self._resize(replan.channels)
        for queue in self._queues.values():
            queue.into.state_credit_anew()
        for peer in self._linked_ahead:
            self._host.peers.unwant(peer, by=AHEAD)  # routes keep what is needed
        self._linked_ahead.clear()
        logger.info("another plan is in force", extra={"plan_revision": replan.plan_revision, "switch": self.number})
        done = pb.Replanned(plan_revision=replan.plan_revision, switch_number=replan.switch_number)
        self._host.tell(pb.WorkerMessage(replanned=done))

    def on_links(self, links: pb.Links) -> None:
        """Whom this worker will speak with under the plan that is being prepared: no link is made in the pause."""
        for endpoint in links.peers:
            self._linked_ahead.add(self._host.peers.want(messages.endpoint_from_pb(endpoint), by=AHEAD, at_once=True))

    def _resize(self, specs: Iterable[pb.ChannelSpec]) -> None:
        for spec in specs:
            if spec.name in self._stages:
                self._stages[spec.name] = spec.stages
            if (queue := self._queues.get(spec.name)) is not None:
                queue.on_spec(spec)
