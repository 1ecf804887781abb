"""A worker pod for tests: the agent as a process of its own, under the pod contract, on its own loopback address."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from tests.fakes.certs import Authority
from tests.fakes.driver import FakeDriver

JOB_UID = "5f2c"
_NUMBERS = itertools.count(1)


class Pod:
    """`start()` .... `stop()`; `settings` are of rlinf_worker.settings."""

    def __init__(self, folder: Path, *, attempt: int = 1, environ: dict[str, str] | None = None, **settings: Any):
        number = next(_NUMBERS)
        pid = os.getpid()
        self.ip = f"127.{64 + pid % 64}.{pid // 64 % 250}.{number}"
        self.folder, self.name = folder, f"math-sim-{number}-a{attempt}"
        self.authority = Authority()
        self.driver_tls = self.authority.folder(folder / "driver-tls", part="driver", job_uid=JOB_UID)
        self.process: subprocess.Popen[bytes] | None = None
        self.driver_address = "127.0.0.1:1"
        self.environ = {
            names.ENV_JOB_NAME: "math",
            names.ENV_JOB_UID: JOB_UID,
            names.ENV_POD_NAME: self.name,
            names.ENV_POD_UID: f"uid-{number}",
            names.ENV_POD_IP: self.ip,
            names.ENV_NODE_NAME: "node-1",
            names.ENV_POOL: "sim",
            names.ENV_ORDINAL: "0",
            names.ENV_ATTEMPT: str(attempt),
            names.ENV_SLOTS: "4",
            names.ENV_RUN_DIR: str(folder / "run"),
            names.ENV_TLS_DIR: str(self.authority.folder(folder / "tls", part="pool:sim", job_uid=JOB_UID)),
            names.ENV_TERMINATION_LOG: str(folder / "termination.json"),
            names.ENV_OUTPUT_DIR: str(folder / "out"),
            names.ENV_WORKER_LOG_DIR: str(folder / "logs"),
            names.ENV_LOG_LEVEL: "DEBUG",
            names.ENV_SETTINGS: json.dumps({"heartbeat_interval_s": 0.05, "watch_interval_s": 0.02, **settings}),
            **(environ or {}),
        }

    def driver(self, **options: Any) -> FakeDriver:
        return FakeDriver(self.driver_tls, host=self.ip, job_uid=JOB_UID, **options)

    def start(self, driver: FakeDriver | None = None, *, module: str = "tests.fakes.agent") -> subprocess.Popen[bytes]:
        self.driver_address = driver.address if driver else self.driver_address
        environ = {**os.environ, **self.environ, names.ENV_DRIVER_ADDRESS: self.driver_address}
        (self.folder / "agent.err").unlink(missing_ok=True)
        with open(self.folder / "agent.err", "wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *(["agent"] if module == "rlinf_worker" else [])],
                env=environ,
                stderr=err,
                cwd=Path(__file__).parents[2],
            )
        return self.process

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def errors(self) -> str:
        return (self.folder / "agent.err").read_text()

    def termination(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.folder / "termination.json").read_bytes())
        return data

    async def exit_code(self, *, within_s: float = 20.0) -> int:
        assert self.process is not None
        deadline = time.monotonic() + within_s
        while (code := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"agent still runs after {within_s} s; {self.errors()[-2000:]}"
            await asyncio.sleep(0.01)
        return code

    async def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await self.exit_code()
            finally:
                self.process.kill()
                self.process.wait()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def gone(processes: list[psutil.Process], *, within_s: float = 15.0) -> float:
    """Seconds until none of them was left."""
    began = time.monotonic()
    while left := alive(processes):
        assert time.monotonic() - began < within_s, f"still there after {within_s} s: {left}"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def start(worker: str = "env/0", attempt: int = 1, **config: Any) -> agents_pb2.Start:
    """An order to start a `tests.fakes.worker` with that config."""
    return agents_pb2.Start(
        worker=worker, role=worker.split("/")[0], kind="fake", attempt=attempt, world=1, slots=[0],
        config_json=json.dumps(config),
    )  # fmt: skip


async def running(driver: FakeDriver, **options: Any) -> None:
    """Starts a worker and waits until it has joined and marked; its counters and spans are there by then."""
    message = start(**options)
    result = await driver.instruct(start=message)
    assert result.ok, result.error
    since = len(driver.seen)  # from here on a heartbeat tells of this attempt, and not of one before
    await driver.wait(
        "heartbeat",
        lambda m: any(p.worker == message.worker and p.phase == "step" for p in m.heartbeat.progress),
        since=since,
    )


async def scrape(host: str) -> str:
    """What the agent there serves to Prometheus."""
    reader, writer = await asyncio.open_connection(host, names.PORT_METRICS)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text.partition("\r\n\r\n")[2]


def samples(text: str, name: str, **labels: str) -> list[float]:
    families = text_string_to_metric_families(text)
    return [s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()]


async def until_metric(pod: Pod, name: str, *, at_least: float, within_s: float = 20.0, **labels: str) -> None:
    deadline = time.monotonic() + within_s
    while not (values := samples(await scrape(pod.ip), name, **labels)) or values[0] < at_least:
        assert time.monotonic() < deadline, f"{name} is {values}, wanted {at_least}"
        await asyncio.sleep(0.02)


def pid_of(pod: Pod, worker: str = "env/0") -> int:
    for process in psutil.Process(pod.pid).children():
        try:
            if process.environ().get(names.ENV_WORKER_ID) == worker:
                return process.pid
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    raise AssertionError(f"no process of {worker}")
