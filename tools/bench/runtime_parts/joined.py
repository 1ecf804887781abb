"""What the driver's core takes for a unit of two inputs, in memory: no connections, no processes, one core's time.

    units_joined_100k    a step of 100,000 units, each joined from two queues, before a gang that takes rounds

    driver -- prompts --> rollout x 2 -- answers ─────────┐
       └───── checks ───> reference x 2 -- scores (joins) ┴─> train x 2

All answers are there before the first score, which is the worst case of a join: what waits is as much as can. A unit is
counted once, with all that the driver hears and says of it: two announcements, a round and an assignment, held and
acknowledged twice, and a ticket of each queue per 8 of them. What the wire takes is measured by queue_1kb_units.

    .venv/bin/python -m tools.bench.runtime_parts.joined 20000
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import islice
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
from rlinf_worker.driver.topology import QueueSpec, Topology
from rlinf_worker.queues.units import UnitInfo
from rlinf_worker.uplink.outbox import Outbox
from tools.bench.harness import BenchError, Row

UNITS: Final = 100_000
PER_TICKET: Final = 8
WORKERS: Final = 2
MICRO_BATCH: Final = 16
BATCH: Final = 64
"""Units of one message to the driver."""
JOB_UID: Final = "101ned"


def topology(*, rounds: bool) -> Topology:
    """With rounds the gang joins; without, a role before it."""
    to = "train" if rounds else "judge"
    queues = [
        QueueSpec(channel="prompts", producer="", consumer="rollout"),
        QueueSpec(channel="checks", producer="", consumer="reference"),
        QueueSpec(channel="answers", producer="rollout", consumer=to, rounds=rounds),
        QueueSpec(channel="scores", producer="reference", consumer=to, joins="answers"),
    ]
    if not rounds:
        queues.append(QueueSpec(channel="judged", producer="judge", consumer="train", rounds=True))
    return Topology(queues=tuple(queues))


def _spec(order: str) -> RLJobSpec:
    roles = ("rollout", "reference", "judge", "train")
    return RLJobSpec.model_validate(
        {
            "flow": {"name": "tools.bench:joined", "steps": 3, "config": {"order": order}},
            "roles": [{"name": role, "kind": "tools.bench:Role", "workers": WORKERS} for role in roles],
            "pools": [{"name": "cpu", "roles": list(roles), "slots": {"perPod": WORKERS * len(roles)}}],
        }
    )


def _plan(spec: RLJobSpec) -> RLPlanSpec:
    return RLPlanSpec.model_validate(
        {
            "job": {"name": "joined", "uid": JOB_UID},
            "revision": 1,
            "pools": [{"name": "cpu", "pods": 1}],
            "workers": [
                {"role": role.name, "count": WORKERS, "slots": f"cpu/0/[{WORKERS * n}-{WORKERS * (n + 1) - 1}]"}
                for n, role in enumerate(spec.roles)
            ],
            "channels": [
                {"name": name, "microBatch": MICRO_BATCH, "depth": 4, "capacity": {"units": 2 * UNITS}}
                for name in ("prompts", "checks", "answers", "scores", "judged")
            ],
            "reason": {"code": "Initial"},
        }
    )


class JoinedQueues:
    """The driver, and workers that answer at once: they hold what they are given, and acknowledge with the commit."""

    def __init__(self, *, rounds: bool = True, order: str = "arrival") -> None:
        spec = _spec(order)
        self.driver = Driver(
            Job(
                spec,
                flow_settings=flow_settings(spec),
                uid=JOB_UID,
                attempt=1,
                checkpoint_uri="",
                output=Output(""),
                clock=lambda: 1000.0,
                settings=DriverSettings(),
            )
        )
        self.seconds, self.rounds = 0.0, rounds
        self.joining = "train" if rounds else "judge"
        self.driver.switch.first(_plan(spec), switches=0)
        self.driver.declare(topology(rounds=rounds))
        self._come()
        self._kept: dict[tuple[WorkerId, str], list[str]] = {}
        self.given = 0  # units of both queues, at their consumer

    # --- workers --------------------------------------------------------------------------------------------------
    def _come(self) -> None:
        hello = agents_pb2.Hello(
            job_uid=JOB_UID, pod="joined-cpu-0", pool="cpu", ordinal=0, attempt=1, protocol=names.PROTOCOL
        )
        self.driver.on_agent_hello(hello, Outbox())
        workers = list(self.driver.job.members.workers)
        for worker in workers:
            said = pb.Hello(
                job_uid=JOB_UID, worker=worker, attempt=1, protocol=names.PROTOCOL, world=WORKERS,
                endpoint=pb.Endpoint(worker=worker, attempt=1),
            )  # fmt: skip
            self.driver.on_worker_hello(said, Outbox(limit=10 * UNITS))
        for worker in workers:
            if worker.startswith("train/"):
                self.driver.on_worker_message(worker, pb.WorkerMessage(join=pb.Join()))
            self.driver.on_worker_message(worker, pb.WorkerMessage(ready=pb.Ready()))
        if not self.driver.job.is_running:
            raise BenchError(f"the job does not run: {self.driver.job.standing.message}")

    def say(self, worker: WorkerId, **kind: Any) -> None:
        """The driver's time is counted."""
        message = pb.WorkerMessage(**kind)
        began = time.process_time()
        self.driver.on_worker_message(worker, message)
        self.seconds += time.process_time() - began

    def credit(self, role: str, channel: str, units: int) -> None:
        for n in range(WORKERS):
            self.say(WorkerId(f"{role}/{n}"), credit=pb.Credit(channel=channel, units=units))

    # --- a step ---------------------------------------------------------------------------------------------------
    def open(self, units: int) -> None:
        """All tickets of a step; nobody has made anything of them."""
        step, version = 1, self.driver.open_step(1)
        keys = [f"p:0/{n}/0" for n in range(units // PER_TICKET)]
        wanted: dict[str, int | None] = dict.fromkeys(keys, PER_TICKET)
        began = time.process_time()
        for channel in ("prompts", "checks"):
            tickets = [UnitInfo(key=key, branch=0, step=step, version=version, inline=b"{}") for key in keys]
            self.driver.put_tickets(channel, tickets, step=step, wanted=wanted, rare=False)
        self.driver.seal_step(step)
        self.seconds += time.process_time() - began
        self.keys = keys

    def make(self, role: str, channel: str, units: int, *, answer: bool = False) -> None:
        """`units` of one queue, message by message. `answer`: whoever joins them answers after each."""
        made, tickets = 0, iter(self.keys)
        while made < units:
            worker = WorkerId(f"{role}/{made // BATCH % WORKERS}")
            some = list(islice(tickets, BATCH // PER_TICKET))
            batch = [
                pb.Unit(
                    key=f"{ticket}/{n}", branch=0, step=1, weight=1.0, bytes=1024, version=pb.PolicyVersion(),
                    tickets=[ticket],
                )
                for ticket in some for n in range(PER_TICKET)
            ]  # fmt: skip
            self.say(worker, announce=pb.Announce(channel=channel, units=batch))
            made += len(batch)
            if answer:
                self.answer()

    def work_off(self, role: str, channel: str) -> None:
        """Tickets: taken, held and acknowledged by whoever is given them."""
        left = len(self.keys)
        while left > 0:
            self.credit(role, channel, BATCH)
            for n in range(WORKERS):
                worker = WorkerId(f"{role}/{n}")
                for message in self._told(worker):
                    if message.WhichOneof("kind") == "assign":
                        keys = pb.Keys(channel=channel, keys=[unit.key for unit in message.assign.units])
                        self.say(worker, held=keys)
                        self.say(worker, acked=keys)
                        left -= len(keys.keys)

    def _told(self, worker: WorkerId) -> list[Any]:
        return self.driver.job.sessions.workers[worker].outbox.take()

    def answer(self) -> int:
        """The joining workers hold what they are given, and state their credit anew. How many units of both queues."""
        came = 0
        for n in range(WORKERS):
            worker = WorkerId(f"{self.joining}/{n}")
            for message in self._told(worker):
                kind = message.WhichOneof("kind")
                if kind not in ("assign", "round"):
                    continue
                given = getattr(message, kind)
                keys = [unit.key for unit in given.units]
                if keys:
                    self.say(worker, held=pb.Keys(channel=given.channel, keys=keys))
                self._kept.setdefault((worker, given.channel), []).extend(keys)
                came += len(keys)
                if kind == "round" or given.channel == "answers":
                    self.say(worker, credit=pb.Credit(channel="answers", units=4 if self.rounds else 4 * MICRO_BATCH))
        self.given += came
        return came

    def drain(self, *, until: int) -> None:
        while self.given < until:
            if not self.answer():
                raise BenchError(f"{self.given} of {until} units were handed out")

    def commit(self) -> None:
        """Commits the step of a gang that joins: every rank has learnt."""
        self.answer()  # the last round
        for rank in range(WORKERS):
            worker = WorkerId(f"train/{rank}")
            self.say(worker, step_done=pb.StepDone(step=1, rank=rank, keys=self._kept[worker, "answers"]))
        for (worker, channel), keys in self._kept.items():
            for at in range(0, len(keys), BATCH):
                self.say(worker, acked=pb.Keys(channel=channel, keys=keys[at : at + BATCH]))
        if self.driver.job.ledger.committed != 1:
            raise BenchError(f"the step did not commit: {self.driver.job.standing.message}")


def measure(units: int = UNITS, *, rounds: bool = True, order: str = "arrival", scores: int = UNITS) -> float:
    """Joined units a second. `scores`: at most so many of the second queue are made."""

    async def run() -> float:
        field = JoinedQueues(rounds=rounds, order=order)
        field.open(units)
        field.credit(field.joining, "answers", 4 if rounds else 4 * MICRO_BATCH)
        field.work_off("rollout", "prompts")
        field.work_off("reference", "checks")
        field.make("rollout", "answers", units)
        field.make("reference", "scores", min(units, scores), answer=True)
        field.drain(until=2 * units)
        if rounds:
            field.commit()
        return units / field.seconds

    return asyncio.run(run())


def rows() -> list[Row]:
    return [Row(name="units_joined_100k", unit="units/s", better="higher", bar=20_000, subject=measure)]


if __name__ == "__main__":
    for rounds, order in ((True, "arrival"), (True, "lineage"), (False, "arrival")):
        rate = measure(int(sys.argv[1]), rounds=rounds, order=order)
        print(f"{'rounds of a gang' if rounds else 'single units'}, {order}: {rate:,.0f} units/s", flush=True)
