"""The processes of a pod: which are refused, ordered, taken over from a warm spare, and what is left of them."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import DeadlineExceeded, InvariantBroken, RetryableError, Stale
from rlinf_api.report import Failure
from rlinf_worker import proctree
from rlinf_worker.agent import leash
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited, SayHung, Stage, Start, WorkerLife
from rlinf_worker.agent.supervisor import Supervisor
from rlinf_worker.clock import Clock
from rlinf_worker.settings import Settings


class Pod:
    """Hears its supervisor, and plays the socket."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.folder, self.begun, self.hangs = folder, list[tuple[str, int]](), list[SayHung]()
        self.ended: list[tuple[str, SayExited, Failure]] = []
        self.orders: list[tuple[str, slots_pb2.AgentOrder]] = []
        self.listens = True
        identity = PodIdentity(
            job_uid="j", pod="math-sim-0", pod_ip="", node="", pool="sim", ordinal=0, attempt=1, slots=2,
            driver_address="", run_dir=str(folder), tls_dir="", output_dir="", worker_log_dir=str(folder),
            termination_log="",
        )  # fmt: skip
        settings = Settings(stacks_timeout_s=0.05, reap_timeout_s=0.1, start_deadline_s=44.0, stacks_bytes=6)
        self.supervisor = Supervisor(
            identity, settings, listener=self, order=self.order, environ={}, mark="m", command=command,
            clock=Clock(notice_s=100.0),
        )  # fmt: skip
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.supervisor.reap)

    def started(self, worker: str, attempt: int) -> None:
        self.begun.append((worker, attempt))

    def hung(self, worker: str, said: SayHung) -> None:
        self.hangs.append(said)

    def exited(self, worker: str, said: SayExited, failure: Failure) -> None:
        self.ended.append((worker, said, failure))

    def order(self, worker: str, order: slots_pb2.AgentOrder) -> bool:
        self.orders.append((worker, order))
        return self.listens

    async def start(self, worker: str = "env/0", *, attempt: int = 1, **more: Any) -> WorkerLife:
        await self.supervisor.start(Start(worker=worker, role="env", kind="fake", attempt=attempt, **more))
        return self.supervisor.life(worker)

    async def joined(self, worker: str = "env/0", *, attempt: int = 1, **more: Any) -> WorkerLife:
        life = await self.start(worker, attempt=attempt, **more)
        self.supervisor.join(worker, attempt=attempt, pid=life.pid)
        return self.supervisor.life(worker)

    async def until_ended(self, count: int = 1) -> tuple[str, SayExited, Failure]:
        async with asyncio.timeout(20):
            while len(self.ended) < count:
                await asyncio.sleep(0.002)
        return self.ended[-1]


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    made = Pod(tmp_path, "sleep", "60")
    yield made
    made.supervisor.kill_all()
    await made.supervisor.stop_all(reason="the test ends", grace_s=0.0)


async def test_a_worker_that_runs_is_told_of_and_has_a_deadline_to_join(pod):
    life = await pod.start(slots=(1,))
    assert pod.begun == [("env/0", 1)]
    assert (life.stage, life.attempt, life.deadline_s, life.joined) == (Stage.RUNNING, 1, 44.0, False)
    found = proctree.read(life.pid)
    assert found is not None
    assert found.session == life.pid, "a session of its own"
    assert pod.supervisor.held() == [life]
    assert pod.supervisor.life("env/9") == WorkerLife(id="env/9")


async def test_who_may_not_join_is_told_what_is_wanted(pod):
    life = await pod.start(attempt=3)
    for worker, attempt, pid, why in (
        ("env/9", 1, life.pid, "worker env/9 may not join: got attempt 1, wanted no such worker; exit"),
        ("env/0", 2, life.pid, "worker env/0 may not join: got attempt 2, wanted attempt 3; exit"),
        ("env/0", 3, os.getpid(), f"worker env/0 may not join: got pid {os.getpid()}, wanted pid {life.pid}"),
        ("env/0", 3, 2**22 + 1, f"worker env/0 may not join: got pid {2**22 + 1}, wanted pid {life.pid}"),
    ):
        with pytest.raises(Stale) as error:
            pod.supervisor.join(worker, attempt=attempt, pid=pid)
        assert str(error.value) == why
    await pod.supervisor.stop("env/0", reason="x", grace_s=0.0)
    with pytest.raises(Stale, match="got attempt 3, wanted no such worker"):
        pod.supervisor.join("env/0", attempt=3, pid=life.pid)


async def test_an_attempt_that_has_been_here_is_stale(pod):
    await pod.start(attempt=2)
    with pytest.raises(Stale, match="got attempt 1, wanted more than 2, which is running"):
        await pod.start(attempt=1)
    assert (await pod.start(attempt=2)).attempt == 2, "the one that runs may be asked for again"
    assert pod.begun == [("env/0", 2)]


async def test_a_later_attempt_takes_the_place_of_an_earlier_one(pod):
    first = await pod.start()
    later = await pod.start(attempt=2)
    assert (later.attempt, later.stage, later.pid != first.pid) == (2, Stage.RUNNING, True)
    [(_, said, failure)] = pod.ended
    assert (said.attempt, said.asked, failure.reason) == (1, True, "Killed")


async def test_a_start_that_a_stop_gives_up_is_stale_and_not_waited_for(pod):
    await pod.start()
    later = asyncio.create_task(pod.start(attempt=2))
    await asyncio.sleep(0)
    await pod.supervisor.stop("env/0", reason="enough", grace_s=0.0)
    with pytest.raises(Stale, match="attempt 2 of worker env/0 was given up before it began"):
        await later


async def test_a_program_that_is_not_there_is_told_with_what_to_look_at(tmp_path):
    pod = Pod(tmp_path, str(tmp_path / "missing"))
    with pytest.raises(RetryableError) as error:
        await pod.start()
    words = str(error.value)
    assert words.startswith("worker env/0 cannot be started in pod math-sim-0: [Errno 2] No such file or directory")
    assert words.endswith("; see its disk, memory and process limits")
    [(_, said, failure)] = pod.ended
    assert (failure.reason, failure.exit_code, said.attempt) == ("SpawnFailed", 75, 1)
    assert (pod.begun, pod.supervisor.held()) == ([], [])


async def test_a_stop_is_an_order_with_its_reason_to_one_that_has_joined(pod):
    life = await pod.joined()
    stopping = asyncio.create_task(pod.supervisor.stop("env/0", reason="replaced", grace_s=30.0))
    await asyncio.sleep(0)
    assert pod.orders == [("env/0", slots_pb2.AgentOrder(stop=slots_pb2.Stop(reason="replaced", grace_s=30.0)))]
    os.kill(life.pid, signal.SIGKILL)
    await stopping
    [(worker, said, failure)] = pod.ended
    assert (worker, said.asked, failure.exit_code) == ("env/0", True, 137)


async def test_one_that_has_not_joined_is_told_by_a_signal(pod):
    await pod.start()
    await pod.supervisor.stop("env/0", reason="replaced", grace_s=30.0)
    assert (pod.orders, pod.ended[0][2].exit_code) == ([], 128 + signal.SIGTERM)


async def test_who_is_not_here_is_stopped_already(pod):
    await pod.supervisor.stop("env/9", reason="x", grace_s=30.0)
    pod.supervisor.condemn("env/9", why="x")
    await pod.start()
    await pod.supervisor.stop("env/0", reason="x", grace_s=0.0)
    await pod.supervisor.stop("env/0", reason="x", grace_s=30.0)
    pod.supervisor.condemn("env/0", why="x")
    assert len(pod.ended) == 1


async def test_who_is_condemned_is_killed_and_its_end_says_why(pod):
    await pod.joined()
    pod.supervisor.condemn("env/0", why="its slots not released")
    _, said, failure = await pod.until_ended()
    assert (said.asked, failure.reason) == (False, "Hung")
    assert failure.message == "worker env/0 hung and was killed: its slots not released"


async def test_words_and_marks_of_another_attempt_or_worker_change_nothing(pod):
    life = await pod.joined(attempt=2)
    for worker, attempt in (("env/0", 1), ("env/0", 3), ("env/9", 2)):
        pod.supervisor.mark(worker, attempt=attempt, said=slots_pb2.Progress(phase="load", deadline_s=1.0))
        pod.supervisor.last_words(worker, attempt=attempt, words=Failure(message="no"))
    assert pod.supervisor.life("env/0") == life
    pod.supervisor.mark("env/0", attempt=2, said=slots_pb2.Progress(phase="load", deadline_s=300.0))
    pod.supervisor.last_words("env/0", attempt=2, words=Failure(message="yes"))
    life = pod.supervisor.life("env/0")
    assert (life.phase, life.deadline_s, life.words) == ("load", 300.0, Failure(message="yes"))


async def test_a_hang_is_told_with_the_first_of_its_stacks(pod, monkeypatch):
    monkeypatch.setattr(leash, "STACKS_SIGNAL", signal.SIGCONT)  # which `sleep` survives
    await pod.joined()
    pod.supervisor.mark("env/0", attempt=1, said=slots_pb2.Progress(phase="step", deadline_s=1e-9))
    watch = asyncio.create_task(pod.supervisor.watch())
    await pod.until_ended()
    watch.cancel()
    [hang] = pod.hangs
    assert (hang.attempt, hang.phase, hang.stacks) == (1, "step", "no ans")
    assert "no progress mark for" in pod.ended[0][1].hung


async def test_children_of_nobody_are_reaped_and_counted(pod):
    life = await pod.start()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    child = os.posix_spawnp("true", ("true",), os.environ)  # noqa: ASYNC221 - returns at once
    async with asyncio.timeout(20):
        while not (found := proctree.read(child)) or not found.dead:
            await asyncio.sleep(0.002)
    pod.supervisor.reap()
    assert (pod.supervisor.orphans_reaped, proctree.read(child)) == (1, None)
    assert pod.supervisor.life("env/0") == life
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, pod.supervisor.reap)


# --- warm spares ------------------------------------------------------------------------------------------------------
SPARE = "spare.env/0"


async def test_a_warm_spare_becomes_the_worker_that_asks_for_it(pod):
    spare = await pod.joined(SPARE, attempt=5, spare=True)
    pod.begun.clear()
    life = await pod.start("env/1", attempt=4, rank=1, world=2, slots=(0, 1), config_json='{"a": 2}', from_spare=SPARE)
    place = slots_pb2.Promote(worker="env/1", attempt=4, rank=1, world=2, slots=[0, 1], config_json='{"a": 2}')
    assert pod.orders == [(SPARE, slots_pb2.AgentOrder(promote=place))]
    assert (life.pid, life.stage, life.joined) == (spare.pid, Stage.RUNNING, False)
    assert pod.begun == [("env/1", 4)]
    assert [worker.id for worker in pod.supervisor.held()] == ["env/1"]
    os.kill(life.pid, signal.SIGKILL)
    worker, said, _ = await pod.until_ended()
    assert (worker, said.attempt, len(pod.ended)) == ("env/1", 4, 1), "of the spare no end is told"


@pytest.mark.parametrize("why", ["not joined", "other kind", "does not listen", "dead", "no such"])
async def test_where_the_spare_cannot_a_process_is_started(pod, why):
    if why != "no such":
        made = pod.start if why == "not joined" else pod.joined
        spare = await made(SPARE, spare=True)
        if why == "dead":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
            os.kill(spare.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                while (found := proctree.read(spare.pid)) and not found.dead:
                    await asyncio.sleep(0.002)
    pod.listens = why != "does not listen"
    kind = "other" if why == "other kind" else "fake"
    await pod.supervisor.start(Start(worker="env/1", role="env", kind=kind, from_spare=SPARE))
    life = pod.supervisor.life("env/1")
    assert life.stage is Stage.RUNNING
    assert why == "no such" or life.pid != spare.pid
    assert len(pod.orders) == (1 if why == "does not listen" else 0)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, pod.supervisor.reap)
    pod.supervisor.reap()


# --- what does not end ------------------------------------------------------------------------------------------------
async def test_what_a_kill_leaves_is_named_remembered_and_forgotten_when_it_is_gone(pod, monkeypatch, caplog):
    life = await pod.start()
    entry = proctree.ProcessEntry(pid=4321, ppid=1, session=life.pid, state="D", started=9, name="engine")
    with monkeypatch.context() as stuck:
        stuck.setattr(proctree, "tree", lambda *_, **__: [entry])
        stuck.setattr(proctree, "send", lambda *_: True)
        pod.supervisor.condemn("env/0", why="x")
        os.kill(life.pid, signal.SIGKILL)
        _, said, failure = await pod.until_ended()
    text = "engine (pid 4321) is in an uninterruptible wait (disk or driver)"
    assert said.survivors == (text,)
    assert failure.message.endswith(f"; still there: {text}")
    with monkeypatch.context() as stuck:
        stuck.setattr(proctree, "read", lambda pid: entry if pid == 4321 else None)
        assert pod.supervisor.remains("env/0") == [entry]
    assert pod.supervisor.remains("env/0") == []
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.getMessage(), record.__dict__["processes"]) == ("processes do not die", (text,))


async def test_a_bug_in_a_watching_task_ends_the_agent(pod, monkeypatch):
    await pod.start()
    with monkeypatch.context() as broken:
        broken.setattr(proctree, "tree", lambda *_, **__: 1 / 0)
        pod.supervisor.kill_all()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(asyncio.shield(pod.supervisor.failed), 20)
    os.kill(pod.supervisor.life("env/0").pid, signal.SIGKILL)
    cast(Any, pod.supervisor)._entries.clear()


async def test_a_worker_without_a_process_is_a_bug_where_one_is_needed(pod):
    await pod.start()
    entry = cast(Any, pod.supervisor)._entries["env/0"]
    process, entry.process = entry.process, None
    with pytest.raises(InvariantBroken, match="worker env/0 has no process: got stage running"):
        _ = entry.running
    entry.process = process


async def test_an_end_is_waited_for_as_long_as_the_agent_has_lived(pod):
    await pod.start()
    now = 100.0
    clock = Clock(notice_s=1.0, raw=lambda: now)
    entry = cast(Any, pod.supervisor)._entries["env/0"]
    waiting = asyncio.create_task(entry.until(lambda: False, "end of worker env/0", timeout_s=0.02, clock=clock))
    await asyncio.sleep(0.01)
    now += 500.0  # the loop's own timer is due all the same
    await asyncio.sleep(0.06)
    assert not waiting.done()
    now += 0.03
    with pytest.raises(DeadlineExceeded, match=r"end of worker env/0 .*stage is running"):
        await asyncio.wait_for(waiting, 5)


async def test_one_that_cannot_be_ended_is_said_and_the_others_are(pod, monkeypatch, caplog):
    await pod.start()

    async def late(*_: Any, **__: Any) -> None:
        raise DeadlineExceeded("end of worker env/0", timeout_s=1.0)

    with monkeypatch.context() as stuck:
        stuck.setattr(pod.supervisor, "stop", late)
        await pod.supervisor.stop_all(reason="x", grace_s=0.0)
    assert "a worker could not be ended" in caplog.text
    with pytest.raises(RetryableError, match="worker env/1 cannot start here: got this pod ends: x"):
        await pod.start("env/1")
    with monkeypatch.context() as bug:
        bug.setattr(pod.supervisor, "stop", None)
        with pytest.raises(TypeError):
            await pod.supervisor.stop_all(reason="x", grace_s=0.0)
