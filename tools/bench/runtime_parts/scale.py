"""A driver with many agents: what it costs to hear them all.

The driver is the real program in a process of its own, which counts the beats that it hears (heard.py). One more
process plays the agents, each with a connection, a certificate and a stream of its own, that beat once a second, as
real ones do, and a worker of each, that gives credit once a second; and the operator's watch. Nothing is trained: the
actor's pod never comes. A run in which the players did not offer that load is none, and says so.

    .venv/bin/python -m tools.bench.runtime_parts.scale 128      # how it goes with so many, without the harness
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import grpc.aio
import psutil

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2, agents_pb2_grpc
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2_grpc
from rlinf_api._pb.rlinf.job.v1alpha1 import job_pb2, job_pb2_grpc
from rlinf_operator.manifests import certificates
from rlinf_worker.settings import Settings
from tools.bench.harness import ROOT, BenchError, Row
from tools.bench.runtime_parts import heard

AGENTS: Final = 1024
FEW: Final = 16
SECONDS: Final = 10.0  # ten beats of each
BEAT_S: Final = Settings().heartbeat_interval_s
CREDIT_S: Final = 1.0
LEAST: Final = 0.95  # of the load that was to be offered: the rest is the edges of the window
UP_S: Final = 300.0  # for all of them to be attached: two handshakes each, on both sides of one machine
AT_ONCE: Final = 32  # handshakes: more would only wait in the driver's backlog
JOB_UID: Final = "5ca1e"
HOST: Final = "127.8.0.1"  # of loopback; benchmarks run one at a time
BEATS: Final = "beats"  # file of the driver's count
LIFE: Final = datetime.timedelta(hours=1)
OWN_CONNECTION: Final = {"grpc.use_local_subchannel_pool": 1}  # agents of many pods share none


def agents(count: int = AGENTS, *, seconds: float = SECONDS) -> Mapping[str, float]:
    """agents_driver_cpu: cores; agents_missed_beats: those that the driver came to when the next was due, or never,
    agents that it gave up and streams that broke; agents_up: seconds until all were attached; agents_beats,
    agents_credits: offered, per second."""
    with tempfile.TemporaryDirectory(prefix="rlinf-scale-") as folder:
        return asyncio.run(_agents(Path(folder), count, seconds=seconds))


async def _agents(folder: Path, count: int, *, seconds: float) -> Mapping[str, float]:
    (folder / "job.json").write_text(json.dumps(_job(count)), encoding="utf-8")
    _certificates(folder)
    tally = heard.Tally.of(folder / BEATS, new=True)
    driver = await _driver(folder)
    try:
        field = _Field(folder, count)
        watch = asyncio.ensure_future(field.operate())
        began = time.monotonic()
        try:
            await _attach(field, watch)
            found = await field.measure(psutil.Process(driver.pid), tally.numbers, seconds=seconds)
        finally:
            await field.close()
            watch.cancel()
            await asyncio.wait([watch], timeout=5)
        found["agents_up"] = field.up_at - began
        lost = sum('"pod-lost"' in line for line in _lines(folder / "out" / "events.jsonl"))
        found["agents_missed_beats"] += field.broken + lost
        check_offered(found, count)
        return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            driver.send_signal(signal.SIGKILL)
        await driver.wait()


def check_offered(found: Mapping[str, float], count: int) -> None:
    """Figures of a driver that had less to hear are none."""
    for row, wanted, what in (
        ("agents_beats", count / BEAT_S, "beats"),
        ("agents_credits", count / CREDIT_S, "credits"),
    ):
        if found[row] < LEAST * wanted:
            raise BenchError(
                f"{found[row]:.0f} {what} a second were offered, wanted {wanted:.0f} of {count} agents: the process "
                f"that plays them had too little of the machine; run it with less beside it"
            )


async def _attach(field: _Field, watch: asyncio.Future[None]) -> None:
    up = asyncio.ensure_future(field.attach())
    try:
        await asyncio.wait([up, watch], timeout=UP_S, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        if not up.done():
            raise BenchError(f"{len(field.attached)} of {field.count} agents are attached after {UP_S:.0f} s")
        up.result()
    finally:
        up.cancel()


def _job(count: int) -> dict[str, Any]:
    slots = {"perPod": 1}
    return {
        "flow": {"name": "ppo", "steps": 10, "config": {"env": "CartPole-v1", "numEnvs": count, "slices": count}},
        "roles": [
            {"name": "env", "kind": "gymnasium", "workers": count},
            {"name": "rollout", "kind": "torch"},
            {"name": "actor", "kind": "fsdp"},
        ],
        "pools": [
            {"name": "sim", "roles": ["env"], "pods": count, "slots": slots},
            {"name": "learn", "roles": ["rollout", "actor"], "pods": 1, "slots": {"perPod": 2}},
        ],
    }


def _plan(count: int) -> dict[str, Any]:
    slots = f"sim/[0-{count - 1}]/0"
    return {
        "job": {"name": "scale", "uid": JOB_UID},
        "revision": 1,
        "pools": [{"name": "sim", "pods": count}, {"name": "learn", "pods": 1}],
        "workers": [
            {"role": "env", "count": count, "slots": slots},
            {"role": "rollout", "count": 1, "slots": "learn/0/1"},
            {"role": "actor", "count": 1, "slots": "learn/0/0"},
        ],
        "channels": [],
        "reason": {"code": "Initial"},
    }


def _certificates(folder: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority = certificates.make_authority(now=now, life=LIFE)
    for part in ("driver", "pool:sim", "operator"):
        uid = certificates.ANY if part == "operator" else JOB_UID
        leaf = certificates.issue(authority, part=part, job_uid=uid, now=now, life=LIFE)
        place = folder / part
        place.mkdir()
        for name, data in leaf.files().items():
            (place / name).write_bytes(data)


async def _driver(folder: Path) -> asyncio.subprocess.Process:
    environ = {
        **os.environ,
        names.ENV_JOB_FILE: str(folder / "job.json"),
        names.ENV_JOB_UID: JOB_UID,
        names.ENV_ATTEMPT: "1",
        names.ENV_TLS_DIR: str(folder / "driver"),
        names.ENV_POD_IP: HOST,
        names.ENV_OUTPUT_DIR: str(folder / "out"),
        names.ENV_LOG_LEVEL: "WARNING",
    }
    with (folder / "driver.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", heard.__name__, str(folder / BEATS),
            cwd=ROOT, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


class _Field:
    """The agents, their workers, and the operator's watch."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.attached: dict[int, Any] = {}
        self.beats = self.credits = self.broken = 0
        self.up_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._channels: list[grpc.aio.Channel] = []
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._is_planned = asyncio.Event()
        self._closing = False

    async def _dial(self, part: str) -> grpc.aio.Channel:
        address = f"{HOST}:{names.PORT_DRIVER_GRPC}"
        tls, server = rpc.TlsFolder(self.folder / part), names.tls_name(names.COMPONENT_DRIVER, JOB_UID)
        channel = await rpc.dial(address, tls=tls, server=server, more=OWN_CONNECTION)
        self._channels.append(channel)
        return channel

    async def operate(self) -> None:
        """Puts the plan in force, then follows the driver's reports."""
        stub = job_pb2_grpc.JobStub(await self._dial("operator"))
        request = job_pb2.PlanRequest(plan_json=json.dumps(_plan(self.count)), revision=1)
        for call in (stub.PreparePlan, stub.CommitPlan):
            answer = await call(request, timeout=60, wait_for_ready=True)
            if not answer.ok:
                raise BenchError(f"the driver refused the plan: {answer.message}")
        self._is_planned.set()
        async for _ in stub.Watch(job_pb2.WatchRequest(protocol=names.PROTOCOL), timeout=3600):
            if self._closing:
                return
        raise BenchError(f"the driver ended: {(self.folder / 'driver.log').read_text()[-1000:]}")

    async def attach(self) -> None:
        await self._is_planned.wait()
        await asyncio.gather(*(self._one(number) for number in range(self.count)))
        self.up_at = time.monotonic()

    async def _one(self, number: int) -> None:
        async with self._gate:
            agent = agents_pb2_grpc.AgentsStub(await self._dial("pool:sim")).Attach()
            hello = agents_pb2.Hello(
                job_uid=JOB_UID, pod=f"scale-sim-{number}-a1", pool="sim", ordinal=number, attempt=1,
                protocol=names.PROTOCOL,
            )  # fmt: skip
            await agent.write(agents_pb2.AgentMessage(hello=hello))
            started = [message async for message in _until(agent, "instruction")]
            self.attached[number] = agent
            self._tasks.append(asyncio.ensure_future(self._beat(agent, number)))
            assert started, "the driver has welcomed it and starts its worker"
            worker = channels_pb2_grpc.ChannelsStub(await self._dial("pool:sim")).Connect()
            said = pb.Hello(job_uid=JOB_UID, worker=f"env/{number}", attempt=1, protocol=names.PROTOCOL)
            await worker.write(pb.WorkerBatch(messages=[pb.WorkerMessage(hello=said)]))
            first = await worker.read()
            if not isinstance(first, pb.DriverBatch) or first.messages[0].WhichOneof("kind") != "welcome":
                raise BenchError(f"worker env/{number} was not welcomed: {first}")
            self._tasks.append(asyncio.ensure_future(self._credit(worker)))
            self._tasks.append(asyncio.ensure_future(self._listen(agent)))
            self._tasks.append(asyncio.ensure_future(self._listen(worker)))

    async def _beat(self, agent: Any, number: int) -> None:
        progress = [agents_pb2.Progress(worker=f"env/{number}", phase="load", deadline_s=300, age_s=0.1)]
        due = time.monotonic() + BEAT_S * random.random()
        while True:
            due = await _at(due, every=BEAT_S)
            beat = agents_pb2.Heartbeat(sequence=time.monotonic_ns(), progress=progress)
            if not await self._write(agent, agents_pb2.AgentMessage(heartbeat=beat)):
                return
            self.beats += 1

    async def _credit(self, worker: Any) -> None:
        credit = pb.WorkerMessage(credit=pb.Credit(channel="segments", units=1))
        due = await _at(time.monotonic() + CREDIT_S * random.random(), every=CREDIT_S)
        while await self._write(worker, pb.WorkerBatch(messages=[credit])):
            self.credits += 1
            due = await _at(due, every=CREDIT_S)

    async def _write(self, call: Any, message: Any) -> bool:
        try:
            await call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.broken += not self._closing
            return False
        return True

    async def _listen(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while await call.read() is not grpc.aio.EOF:
                pass

    async def measure(self, driver: psutil.Process, told: memoryview, *, seconds: float) -> dict[str, float]:
        """`told`: how many beats the driver has heard, and how many of them too late."""
        await asyncio.sleep(1.0)  # what the last hellos set off is over

        def count() -> list[float]:
            used = driver.cpu_times()
            return [used.user + used.system, self.beats, self.credits, told[heard.HEARD], told[heard.MISSED]]

        before, began = count(), time.monotonic()
        await asyncio.sleep(seconds)
        after, lasted = count(), time.monotonic() - began
        cpu, beats, credits_, _, late = (b - a for a, b in zip(before, after, strict=True))
        await asyncio.sleep(BEAT_S)
        never = max(0.0, after[1] - told[heard.HEARD])
        return {
            "agents_driver_cpu": cpu / lasted,
            "agents_missed_beats": late + never,
            "agents_beats": beats / lasted,
            "agents_credits": credits_ / lasted,
            "agents_driver_memory": driver.memory_info().rss / 2**20,
        }

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for channel in self._channels:
            await channel.close()


async def _at(due: float, *, every: float) -> float:
    """Sleeps until `due`; when the next is due. Who is late catches up one, and has left out the others."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    return max(due + every, time.monotonic() - every)


async def _until(call: Any, kind: str) -> AsyncIterator[Any]:
    """Messages up to the first of that kind, which is the last."""
    while True:
        message = await call.read()
        if message is grpc.aio.EOF:
            return
        yield message
        if message.WhichOneof("kind") == kind:
            return
        if message.WhichOneof("kind") == "refusal":
            raise BenchError(f"the driver refused an agent: {message.refusal.message}")


def rows() -> list[Row]:
    return [
        Row(name="agents_driver_cpu", unit="cores", better="lower", bar=0.25, subject=agents),
        Row(name="agents_missed_beats", unit="beats", better="lower", bar=0.0, subject=agents),
    ]


def small_rows() -> list[Row]:
    return [
        Row(name="agents_driver_cpu", unit="cores", better="lower", subject=few_agents),
        Row(name="agents_missed_beats", unit="beats", better="lower", bar=0.0, subject=few_agents),
    ]


def few_agents() -> Mapping[str, float]:
    return agents(FEW, seconds=3.0)


if __name__ == "__main__":
    found = agents(int(sys.argv[1]) if len(sys.argv) > 1 else AGENTS)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}), f"load {os.getloadavg()[0]:.1f}")
