"""What the driver's core takes for thousands of workers, in memory: no connections, no processes, one core's time.

    driver_5000_hellos   every agent and worker says hello, joins and is ready
    driver_5000_loss     one of them dies: until the driver has told whom it concerns
    driver_5000_switch   another plan's sizes: prepared, committed, and taken over by every worker

The job is 4,992 simulators on 78 pods beside one policy and one actor. What the wire takes is scale.py's.

    .venv/bin/python -m tools.bench.runtime_parts.thousands 640
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api.job import RLJobSpec
from rlinf_api.names import WorkerId
from rlinf_api.plan import RLPlanSpec
from rlinf_worker.driver.core import Driver
from rlinf_worker.driver.job import Job
from rlinf_worker.driver.main import flow_settings
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.settings import DriverSettings
from rlinf_worker.driver.topology import CycleSpec, QueueSpec, Topology, WeightsSpec
from rlinf_worker.uplink.outbox import Outbox
from tools.bench.harness import BenchError, Row

PER_POD: Final = 64
PODS: Final = 78
JOB_UID: Final = "5ca1e"
TOPOLOGY: Final = Topology(
    cycles=(CycleSpec(channel="actions", asker="env", answerer="rollout"),),
    queues=(
        QueueSpec(channel="segments", producer="", consumer="env", rounds=False),
        QueueSpec(channel="trajectories", producer="env", consumer="actor", rounds=True),
    ),
    weights=(WeightsSpec(producer="actor", consumer="rollout"),),
)


def spec(pods: int) -> RLJobSpec:
    count = pods * PER_POD
    return RLJobSpec.model_validate(
        {
            "flow": {
                "name": "ppo",
                "steps": 3,
                "config": {"env": "CartPole-v1", "numEnvs": count, "slices": count},
            },
            "roles": [
                {"name": "env", "kind": "gymnasium", "workers": count},
                {"name": "rollout", "kind": "torch"},
                {"name": "actor", "kind": "fsdp"},
            ],
            "pools": [
                {"name": "sim", "roles": ["env"], "pods": pods, "slots": {"perPod": PER_POD}},
                {"name": "gpu", "roles": ["rollout", "actor"], "slots": {"perPod": 2}},
            ],
        }
    )


def plan(pods: int, *, revision: int, micro_batch: int) -> RLPlanSpec:
    return RLPlanSpec.model_validate(
        {
            "job": {"name": "thousands", "uid": JOB_UID},
            "revision": revision,
            "pools": [{"name": "sim", "pods": pods}, {"name": "gpu", "pods": 1}],
            "workers": [
                {"role": "env", "count": pods * PER_POD, "slots": f"sim/[0-{pods - 1}]/[0-{PER_POD - 1}]"},
                {"role": "rollout", "count": 1, "slots": "gpu/0/1"},
                {"role": "actor", "count": 1, "slots": "gpu/0/0"},
            ],
            "channels": [{"name": "trajectories", "microBatch": micro_batch, "depth": 2}],
            "reason": {"code": "Initial"},
        }
    )


class Crowd:
    """Agents and workers that say what real ones do, at once."""

    def __init__(self, pods: int) -> None:
        self.now, self._pods, wanted = 1000.0, pods, spec(pods)
        self.driver = Driver(
            Job(
                wanted,
                flow_settings=flow_settings(wanted),
                uid=JOB_UID,
                attempt=1,
                checkpoint_uri="",
                output=Output(""),
                clock=lambda: self.now,
                settings=DriverSettings(),
            )
        )
        self.job = self.driver.job
        self.driver.switch.first(plan(pods, revision=1, micro_batch=2), switches=0)
        self.driver.declare(TOPOLOGY)

    def come(self) -> None:
        for pool, ordinal in list(self.job.members.pods):
            pod = f"thousands-{pool}-{ordinal}"
            hello = agents_pb2.Hello(
                job_uid=JOB_UID, pod=pod, pool=pool, ordinal=ordinal, attempt=1, protocol=names.PROTOCOL
            )
            self.driver.on_agent_hello(hello, Outbox())
        for worker in list(self.job.members.workers):
            self.hello(worker)
        for worker in list(self.job.members.workers):
            if worker.startswith("actor/"):
                self.driver.on_worker_message(worker, pb.WorkerMessage(join=pb.Join()))
            self.driver.on_worker_message(worker, pb.WorkerMessage(ready=pb.Ready()))
        if not self.job.is_running:
            raise BenchError(f"the job does not run: {self.job.standing.message}")

    def hello(self, worker: WorkerId) -> None:
        record = self.job.members.workers[worker]
        hello = pb.Hello(
            job_uid=JOB_UID,
            worker=worker,
            attempt=record.attempt,
            protocol=names.PROTOCOL,
            world=record.placed.world,
            endpoint=pb.Endpoint(worker=worker, attempt=record.attempt),
        )
        self.driver.on_worker_hello(hello, Outbox())

    def lose(self, worker: WorkerId) -> None:
        record = self.job.members.workers[worker]
        failure = agents_pb2.Failure(role="env", worker=record.placed.rank, exit_code=137, reason="Exited")
        exited = agents_pb2.WorkerExited(worker=worker, attempt=record.attempt, exit_code=137, failure=failure)
        self.driver.on_agent_message(record.placed.pod, agents_pb2.AgentMessage(exited=exited))
        if record.present:
            raise BenchError(f"worker {worker} is still there")

    def come_back(self, worker: WorkerId) -> None:
        self.now += 1.5  # its back-off
        self.driver.tick()
        self.hello(worker)
        self.driver.on_worker_message(worker, pb.WorkerMessage(ready=pb.Ready()))

    def change(self) -> None:
        driver, job = self.driver, self.job
        if refused := driver.settled(driver.switch.prepare(plan(self._pods, revision=2, micro_batch=3))):
            raise BenchError(f"the plan was refused: {refused}")
        self._agents_answer("prepare")
        if refused := driver.settled(driver.switch.commit(2)):
            raise BenchError(f"the plan was not committed: {refused}")
        self._agents_answer("commit")
        for worker in list(job.members.workers):
            for message in self._told(job.sessions.workers[worker].outbox):
                if message.WhichOneof("kind") == "replan":
                    done = pb.Replanned(switch_number=message.replan.switch_number)
                    driver.on_worker_message(worker, pb.WorkerMessage(replanned=done))
        if job.revision != 2 or driver.switch.holds:
            raise BenchError("the plan is not in force")

    def _agents_answer(self, kind: str) -> None:
        for key in list(self.job.members.pods):
            for message in self._told(self.job.sessions.agents[key].outbox):
                if message.WhichOneof("kind") == "instruction" and message.instruction.WhichOneof("kind") == kind:
                    result = agents_pb2.Result(instruction_id=message.instruction.id, ok=True)
                    self.driver.on_agent_message(key, agents_pb2.AgentMessage(result=result))

    @staticmethod
    def _told(outbox: Outbox[Any]) -> list[Any]:
        return outbox.take()


def seconds(act: Callable[[], None]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def measure(pods: int = PODS) -> Mapping[str, float]:
    async def run() -> Mapping[str, float]:
        crowd, lost = Crowd(pods), WorkerId("env/17")
        hellos = seconds(crowd.come)
        loss = seconds(lambda: crowd.lose(lost))
        crowd.come_back(lost)
        return {
            "driver_5000_hellos": hellos,
            "driver_5000_loss": loss * 1e3,
            "driver_5000_switch": seconds(crowd.change),
        }

    return asyncio.run(run())


def rows() -> list[Row]:
    return [
        Row(name="driver_5000_hellos", unit="s", better="lower", bar=20, subject=measure),
        Row(name="driver_5000_loss", unit="ms", better="lower", bar=50, subject=measure),
        Row(name="driver_5000_switch", unit="s", better="lower", bar=3, subject=measure),
    ]


if __name__ == "__main__":
    print(measure(-(-int(sys.argv[1]) // PER_POD)))
