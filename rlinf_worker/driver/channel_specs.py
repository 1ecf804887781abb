"""What workers are told of channels, with the sizes of the plan in force."""

from __future__ import annotations

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.quantities import to_bytes
from rlinf_worker.driver.job import Job


def channel_specs(job: Job) -> list[pb.ChannelSpec]:
    """The spec of every channel; a producer's capacity is its share of the channel's."""
    topology, placement = job.topology, job.placement
    specs = []
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
    for queue in (*topology.queues, *topology.results):
        plan = placement.channel(queue.channel)
        producers = max(1, len(job.members.of_role(queue.producer)))
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
                until_commit=not queue.consumer or any(queue in topology.ends_of(gang) for gang in topology.gangs),
            )
        )
    return specs
