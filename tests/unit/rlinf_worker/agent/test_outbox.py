"""What waits for the driver: bounded, and told again to the next one where it matters."""

from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_worker.agent.outbox import Outbox


def exited(worker, attempt=1):
    return agents_pb2.AgentMessage(exited=agents_pb2.WorkerExited(worker=worker, attempt=attempt))


def result(id):
    return agents_pb2.AgentMessage(result=agents_pb2.Result(instruction_id=id, ok=True))


def everything(outbox):
    found = []
    while message := outbox.take():
        found.append(message)
    return found


def test_exits_are_told_again_to_the_next_stream_until_the_worker_runs_again():
    outbox = Outbox(limit=10)
    outbox.put(exited("env/0"))
    outbox.put(exited("env/1"))
    assert len(everything(outbox)) == 2
    outbox.started("env/0")
    outbox.again(same_driver=True)
    assert everything(outbox) == [exited("env/1")]


def test_results_are_for_the_driver_that_asked():
    outbox = Outbox(limit=10)
    outbox.put(result(1))
    outbox.again(same_driver=True)
    assert everything(outbox) == [result(1)]
    outbox.put(result(2))
    outbox.again(same_driver=False)
    assert everything(outbox) == []


def test_it_is_bounded_and_counts_what_it_dropped():
    outbox = Outbox(limit=3)
    for id in range(10):
        outbox.put(result(id))
    assert [m.result.instruction_id for m in everything(outbox)] == [7, 8, 9]
    assert outbox.dropped == 7


def test_waiting_for_it_to_fill():
    outbox = Outbox(limit=3)
    assert not outbox.filled.is_set()
    outbox.put(result(1))
    assert outbox.filled.is_set()
    everything(outbox)
    assert not outbox.filled.is_set()
