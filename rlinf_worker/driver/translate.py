"""Between the driver's frozen types and the protobuf of its two streams. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rlinf_api import wire
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.placement import Placement
from rlinf_api.quantities import to_bytes
from rlinf_api.report import Failure
from rlinf_worker.channels import messages
from rlinf_worker.driver.members import Members, PodRecord, WorkerRecord
from rlinf_worker.driver.topology import Topology
from rlinf_worker.queues.rounds import Assignment, RoundAssignment
from rlinf_worker.queues.units import UnitInfo

MIN_CREDIT: Final = 8
"""Questions unanswered on a route of a cycle at least: one with a few stages must not wait for room."""


def _producers(units: tuple[UnitInfo, ...], members: Members) -> list[pb.Endpoint]:
    """Endpoints of everybody who holds one of these units."""
    found = []
    for wid in dict.fromkeys(u.producer for u in units if u.producer):
        record = members.workers.get(wid)
        if record is not None and record.endpoint is not None:
            found.append(messages.endpoint_to_pb(record.endpoint))
    return found


def assign_to_pb(channel: str, given: Assignment, members: Members) -> pb.Assign:
    units = [u.to_pb() for u in given.units]
    return pb.Assign(channel=channel, units=units, producers=_producers(given.units, members))


def round_to_pb(channel: str, formed: RoundAssignment, part: Assignment, members: Members) -> pb.Round:
    return pb.Round(
        channel=channel,
        step=formed.step,
        branch=formed.branch,
        number=formed.number,
        last=formed.last,
        units=[u.to_pb() for u in part.units],
        total_weight=formed.total_weight,
        producers=_producers(part.units, members),
        ended=formed.ended,
    )


def roster_to_pb(gang: list[WorkerRecord], *, number: int) -> pb.Roster:
    return pb.Roster(
        number=number,
        world=len(gang),
        members=[
            pb.Member(rank=r.placed.rank, endpoint=messages.endpoint_to_pb(r.endpoint)) for r in gang if r.endpoint
        ],
    )


def channel_specs(topology: Topology, placement: Placement, *, roles: Mapping[str, int]) -> list[pb.ChannelSpec]:
    """Every channel of the flow, with the plan's sizes; a producer's capacity is its share of the channel's."""
    specs, last = [], topology.committing
    for cycle in topology.cycles:
        plan = placement.channel(cycle.channel)
        specs.append(
            pb.ChannelSpec(
                name=cycle.channel,
                mode="Cycle",
                producer=cycle.asker,
                consumer=cycle.answerer,
                micro_batch=plan.micro_batch,
                depth=plan.depth,
                stages=placement.stages.get(cycle.roles, 0),
                payload=cycle.question,
                answers=cycle.answer,
            )
        )
    for weights in topology.weights:
        name, producer, consumer = weights.channel, weights.producer, weights.consumer
        specs.append(pb.ChannelSpec(name=name, mode="Weights", producer=producer, consumer=consumer))
    for queue in topology.queues:
        plan = placement.channel(queue.channel)
        producers = max(1, roles.get(queue.producer, 1))
        specs.append(
            pb.ChannelSpec(
                name=queue.channel,
                mode="Queue",
                producer=queue.producer,
                consumer=queue.consumer,
                micro_batch=plan.micro_batch,
                depth=plan.depth,
                capacity_units=max(1, plan.capacity.units // producers),
                capacity_bytes=max(1, to_bytes(plan.capacity.bytes) // producers),
                rounds=queue.rounds,
                payload=queue.payload,
                until_commit=last is not None and last.channel in (queue.channel, queue.joins),
            )
        )
    return specs


def failure(exited: agents_pb2.WorkerExited, pod: PodRecord) -> Failure:
    """The agent's words, completed by what the driver knows of the pod."""
    said = wire.failure_from_pb(exited.failure)
    role, _, number = exited.worker.rpartition("/")
    return Failure(
        role=said.role or role,
        worker=said.worker if said.role else int(number),
        pod=said.pod or pod.pod,
        node=said.node or pod.node,
        exit_code=exited.exit_code,
        reason=said.reason or "Exited",
        message=said.message,
    )
