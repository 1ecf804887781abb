"""`python -m rlinf_worker worker` as a process, between the real Slots server and a driver that is a script."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlinf_api import names, rpc
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_worker import phases
from rlinf_worker.agent.slots import SlotsServer
from tests.fakes.certs import Authority
from tests.fakes.channels_driver import FakeDriver, cycle, queue

JOB_UID = "5f2c"


class Heard:
    """What the agent is told."""

    def __init__(self) -> None:
        self.joined: dict[str, int] = {}
        self.marks: list[tuple[str, float, float]] = []
        self.words: list[slots_pb2.LastWords] = []
        self.counted: dict[str, float] = {}
        self.kinds: list[str] = []

    def join(self, worker: str, *, attempt: int, pid: int) -> None:
        self.joined[worker] = pid

    def heard(self, worker: str, attempt: int, report: slots_pb2.WorkerReport) -> None:
        match report.WhichOneof("kind"):
            case "progress":
                self.marks.append((report.progress.phase, report.progress.deadline_s, time.monotonic()))
            case "last_words":
                self.words.append(report.last_words)
            case "counters":
                self.counted |= {"|".join([c.name, *c.labels]): c.value for c in report.counters.counters}
            case "spans":
                self.kinds += [span.kind for span in report.spans.spans]
            case kind:
                raise AssertionError(f"no lease set was told of, and it says {kind}")


class Bench:
    """A pod without its agent's process: certificates, the Slots server, the driver, workers."""

    def __init__(self, tmp: Path, driver: FakeDriver, heard: Heard, slots: SlotsServer) -> None:
        self.tmp, self.driver, self.heard, self.slots = tmp, driver, heard, slots
        self.processes: list[asyncio.subprocess.Process] = []

    async def worker(self, worker: str, kind: str, *, attempt: int = 1, pod: str = "pod-1", **config: Any):
        path = self.tmp / f"{worker.replace('/', '-')}.json"
        path.write_text(json.dumps(config))
        role, _, rank = worker.rpartition("/")
        environ = {
            **os.environ,
            names.ENV_JOB_NAME: "math",
            names.ENV_JOB_UID: JOB_UID,
            names.ENV_POD_UID: pod,
            names.ENV_POD_IP: "127.0.0.1",
            names.ENV_ATTEMPT: "1",
            names.ENV_RUN_DIR: str(self.tmp / "run"),
            names.ENV_TLS_DIR: str(self.tmp / "tls"),
            names.ENV_DRIVER_ADDRESS: self.driver.address,
            names.ENV_SLOTS_SOCKET: str(self.tmp / "run" / "agent.sock"),
            names.ENV_AGENT_PID: str(os.getpid()),
            names.ENV_WORKER_ID: worker,
            names.ENV_WORKER_ROLE: role,
            names.ENV_WORKER_KIND: f"tests.fakes.toy_roles:{kind}" if kind[0].isupper() else kind,
            names.ENV_WORKER_RANK: rank,
            names.ENV_WORKER_WORLD: "1",
            names.ENV_WORKER_ATTEMPT: str(attempt),
            names.ENV_WORKER_SLOTS: "",
            names.ENV_WORKER_CONFIG: str(path),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlinf_worker", "worker", env=environ, stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self.processes.append(process)
        return process

    async def ended(self, process: asyncio.subprocess.Process) -> tuple[int, str]:
        async with asyncio.timeout(30):
            _, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, err.decode()

    async def reads(self, process: asyncio.subprocess.Process, words: str) -> None:
        """Up to the line of its stderr with these words."""
        assert process.stderr is not None
        async with asyncio.timeout(30):
            while words not in (line := (await process.stderr.readline()).decode()):
                assert line, f"it ended and never said {words!r}"


@pytest.fixture
async def bench(tmp_path):
    authority = Authority()
    authority.folder(tmp_path / "tls", part="pool:sim", job_uid=JOB_UID)
    tls = rpc.TlsFolder(authority.folder(tmp_path / "driver-tls", part="driver", job_uid=JOB_UID))
    driver = await FakeDriver.start([cycle("words", "asker", "echo"), queue("units", "maker", "taker")], tls=tls)
    heard = Heard()
    slots = SlotsServer(heard, path=str(tmp_path / "run" / "agent.sock"))
    await slots.start()
    made = Bench(tmp_path, driver, heard, slots)
    yield made
    for process in made.processes:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    await driver.stop()
    await slots.stop()


async def until(condition, *, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_worker_says_what_it_does_and_ends_when_told(bench):
    process = await bench.worker("taker/0", "Idle")
    await until(lambda: any(phase == "idle" for phase, _, _ in bench.heard.marks))
    assert bench.heard.joined == {"taker/0": process.pid}
    assert [m[0] for m in bench.heard.marks][:1] == ["start"]
    await until(lambda: "compute" in bench.heard.kinds)
    await until(lambda: "rlinf_worker_driver_batches_total" in bench.heard.counted)
    seen = len(bench.heard.marks)
    await until(lambda: len(bench.heard.marks) >= seen + 2)  # each second
    process.send_signal(signal.SIGTERM)
    code, err = await bench.ended(process)
    assert code == names.EXIT_TERMINATED, err
    assert bench.heard.words == []


async def test_a_worker_that_is_told_to_end_does_not_wait_for_an_import(bench):
    process = await bench.worker("taker/0", "tests.fakes.slow_role:Slow")
    await until(lambda: bench.driver.kinds("taker/0"))
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):  # the import takes a minute
        await process.communicate()
    assert process.returncode == names.EXIT_TERMINATED


async def test_an_error_of_the_user_is_a_sentence_and_an_exit_code(bench):
    code, err = await bench.ended(await bench.worker("taker/0", "Wrong"))
    sentence = "environment 'Nowhere-v0' does not exist: wanted one of CartPole-v1; write env: CartPole-v1"
    assert code == names.EXIT_USER_ERROR
    assert err.splitlines()[-1] == sentence
    await until(lambda: bench.heard.words)
    assert [(w.reason, w.message, w.exit_code) for w in bench.heard.words] == [("UserError", sentence, 64)]


async def test_a_kind_that_does_not_exist_is_answered_with_those_that_do(bench):
    code, err = await bench.ended(await bench.worker("taker/0", "gymnasiun"))
    assert code == names.EXIT_USER_ERROR
    assert "there is no role of kind 'gymnasiun': got 'gymnasiun', wanted one of gymnasium" in err.splitlines()[-1]


async def test_a_roles_bug_is_its_workers_death(bench):
    code, _ = await bench.ended(await bench.worker("taker/0", "Buggy"))
    assert code == names.EXIT_RETRYABLE
    await until(lambda: bench.heard.words)
    said = bench.heard.words[0].message
    assert re.fullmatch(r"ValueError: the simulator has no floor \(.*toy_roles\.py, line \d+\)", said)


async def test_a_blocked_loop_gives_no_sign_and_still_writes_its_stacks(bench):
    process = await bench.worker("taker/0", "Blocked")
    await bench.reads(process, "blocking")
    await until(lambda: time.monotonic() - bench.heard.marks[-1][2] > 2.5)  # else there is one each second
    [mark] = map(phases.read, {path.parent for path in bench.tmp.rglob(phases.FILE)})
    assert mark is not None
    assert (mark.phase, mark.deadline_s) == ("step", 20.0), "it blocked as soon as this was declared"
    process.send_signal(signal.SIGUSR1)
    await bench.reads(process, "toy_roles.py")


@pytest.mark.parametrize("pod", ["pod-1", "pod-2"], ids=["shared memory", "mTLS between pods"])
async def test_a_worker_killed_with_9_is_replaced_and_nothing_is_lost(bench, pod):
    await bench.worker("asker/0", "Asker", count=3000)
    echo = await bench.worker("echo/0", "Echo", pod=pod, dies_at=500)
    driver = bench.driver
    await driver.connected("asker/0", "echo/0")
    driver.route("words", "asker/0", "echo/0")

    def answered() -> int:
        reports = [m.report.step for m in driver.messages["asker/0"] if m.WhichOneof("kind") == "report"]
        return max(reports, default=0)

    for attempt, dies_at in ((2, 500), (3, None)):
        assert (await bench.ended(echo))[0] == -signal.SIGKILL
        echo = await bench.worker("echo/0", "Echo", attempt=attempt, pod=pod, dies_at=dies_at)
        await driver.connected("echo/0", attempt=attempt)
        driver.unroute("words", "asker/0", "echo/0", attempt=attempt - 1)
        driver.route("words", "asker/0", "echo/0")
    await until(lambda: answered() == 3000)


async def test_a_worker_whose_agent_is_gone_ends(bench):
    process = await bench.worker("taker/0", "Idle")
    await until(lambda: "ready" in bench.driver.kinds("taker/0"))
    await bench.slots.stop()
    code, err = await bench.ended(process)
    assert code == names.EXIT_RETRYABLE
    assert "the agent of this worker is gone" in err.splitlines()[-1]
