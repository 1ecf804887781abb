"""A worker that a plan no longer has, over real gRPC: its stream stays open until it ends, and nobody listens."""

import asyncio

import grpc.aio

from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from tests.integration.test_driver_server import JOB, agent_hello, worker_hello
from tests.integration.test_driver_server import authority as authority
from tests.integration.test_driver_server import served as served


async def test_what_a_dismissed_worker_still_says_counts_no_more(served):
    await served.plan()
    await (await served.attach(agent_hello())).read()
    worker = await served.connect(worker_hello("env/1"))
    assert (await worker.read()).messages[0].WhichOneof("kind") == "welcome"
    members = served.driver.job.members
    served.driver.workforce.dismiss(members.workers["env/1"], "another slot under another plan")
    members.adopt(JOB.placement)  # its next life is to be started elsewhere
    report = pb.Report(metrics_json="{no json", step=1)  # that of a member would end the job
    await worker.write(pb.WorkerBatch(messages=[pb.WorkerMessage(report=report)]))
    await worker.done_writing()
    async with asyncio.timeout(20):
        while await worker.read() is not grpc.aio.EOF:
            pass
    assert not served.driver.job.ended.is_set(), served.driver.job.standing.message
