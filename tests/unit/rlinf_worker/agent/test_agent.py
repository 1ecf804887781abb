"""One agent with its parts around a driver that a test plays: what becomes of a worker, in the words of each reader."""

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import InvariantBroken, Stale
from rlinf_api.report import Failure
from rlinf_worker.agent import leash, main, vacancy
from rlinf_worker.agent.identity import PodIdentity
from rlinf_worker.agent.lifecycle import SayExited, SayHung
from rlinf_worker.agent.main import Agent
from rlinf_worker.metrics_server import MetricsServer
from rlinf_worker.settings import Settings

ENDED = Failure(exit_code=names.EXIT_RETRYABLE, reason="DriverAbsent", message="no driver")


class Line:
    """Plays attachment and uplink: what is told stays here."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.uplink, self.clock = self, clock
        self.told: list[pb.AgentMessage] = []
        self.exits: list[pb.WorkerExited] = []
        self.begun: list[str] = []
        self.is_connected, self.streams, self.dropped, self.driverless_s, self.heartbeats = True, 3, 4, 1.5, 7
        self.ends: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self.closed_within_s: float | None = None

    def tell(self, message: pb.AgentMessage) -> None:
        self.told.append(message)

    def exited(self, said: pb.WorkerExited) -> None:
        self.exits.append(said)

    def started(self, worker: str) -> None:
        self.begun.append(worker)

    async def run(self) -> Failure:
        return await self.ends

    async def close(self, *, timeout_s: float) -> int:
        self.closed_within_s = timeout_s
        return 2

    def results(self) -> dict[int, pb.Result]:
        return {m.result.instruction_id: m.result for m in self.told if m.WhichOneof("kind") == "result"}


@dataclass
class Pod:
    agent: Agent
    line: Line
    folder: Path
    servers: list[MetricsServer]
    marks: list[str]
    number: int = 0
    running: "asyncio.Task[Failure] | None" = field(default=None)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"not within 20 s: {what}") from None

    async def obeyed(self, **kind: Any) -> pb.Result:
        self.number += 1
        self.agent.instructed(pb.Instruction(id=self.number, driver_attempt=1, **kind))
        await self.until(lambda: self.number in self.line.results(), "the result")
        return self.line.results()[self.number]

    async def start(self, worker: str = "env/0", *slots: int, attempt: int = 1, **more: Any) -> int:
        """Its pid."""
        start = pb.Start(worker=worker, role="env", kind="fake", attempt=attempt, slots=slots, **more)
        assert (await self.obeyed(start=start)).ok
        return self.pid_of(worker)

    def pid_of(self, worker: str) -> int:
        [held] = [held for held in self.agent._supervisor.held() if held.id == worker]
        return held.pid

    async def joined(self, worker: str = "env/0", *slots: int, attempt: int = 1) -> None:
        self.agent.join(worker, attempt=attempt, pid=await self.start(worker, *slots, attempt=attempt))

    async def stop(self, worker: str = "env/0") -> pb.WorkerExited:
        await self.obeyed(stop=pb.Stop(worker=worker, reason="enough", grace_s=0.0))
        return self.line.exits[-1]

    @property
    def hello(self) -> pb.Hello:
        return self.agent.hello(highest_driver_attempt=1)

    @property
    def spans(self) -> list[dict[str, Any]]:
        path = self.folder / "out" / "spans" / "math-sim-1.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def page(self) -> str:
        """/metrics, as a scraper has it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.servers[0].port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(20):
            text = await reader.read()
        writer.close()
        return text.decode()

    async def up(self) -> None:
        self.running = asyncio.create_task(self.agent.run())
        await self.until(
            lambda: (self.folder / "agent.sock").exists() and self.servers[0]._server, "an agent that is up"
        )

    async def ended(self) -> Failure:
        assert self.running is not None
        return await asyncio.wait_for(self.running, 20)


SETTINGS = Settings(stop_grace_s=0.1, hurry_after_s=0.02, watch_interval_s=0.005, final_flush_s=0.25)


@pytest.fixture
async def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[Pod]:
    """With the settings of its parameter, where it has one."""
    limits = getattr(request, "param", SETTINGS)
    lines, servers, marks = list[Line](), list[MetricsServer](), list[str]()

    def attachment(
        identity: PodIdentity, limits: Settings, *, holdings: Agent, book: object, clock: Callable[[], float]
    ) -> Line:
        lines.append(Line(clock))
        return lines[-1]

    def server(registry: Any) -> MetricsServer:
        servers.append(MetricsServer(registry))
        return servers[-1]

    monkeypatch.setattr(main, "Attachment", attachment)
    monkeypatch.setattr(main, "MetricsServer", server)
    monkeypatch.setattr(leash, "start_watchdog", marks.append)
    identity = PodIdentity(
        job_uid="job-1", pod="math-sim-1", pod_ip="127.0.0.1", node="node-5", pool="sim", ordinal=1, attempt=2, slots=4,
        driver_address="driver:7070", run_dir=str(tmp_path), tls_dir="", output_dir=str(tmp_path / "out"),
        worker_log_dir=str(tmp_path), termination_log="",
    )  # fmt: skip
    agent = Agent(identity, limits, environ={}, command=("sleep", "60"), metrics_port=0)
    made = Pod(agent, lines[0], tmp_path, servers, marks)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, cast(Any, agent)._supervisor.reap)
    yield made
    if made.running is None:
        made.running = asyncio.create_task(agent.run())
    if not made.line.ends.done():
        made.line.ends.set_result(ENDED)
    await asyncio.wait([made.running], timeout=20)


async def test_the_absence_of_its_driver_is_counted_as_everything_else(pod):
    assert pod.line.clock is cast(Any, pod.agent)._clock


# --- what the driver is told ------------------------------------------------------------------------------------------
async def test_the_hello_names_the_pod_and_what_it_holds(pod):
    await pod.start("env/0", 1)
    hello = pod.agent.hello(highest_driver_attempt=6)
    [state] = hello.workers
    assert state.progress.still_s == state.progress.age_s >= 0.0
    state.progress.age_s = state.progress.still_s = 0.0
    progress = pb.Progress(worker="env/0", phase="start", deadline_s=SETTINGS.start_deadline_s)
    assert hello == pb.Hello(
        job_uid="job-1", pod="math-sim-1", node="node-5", pool="sim", ordinal=1, attempt=2, protocol=names.PROTOCOL,
        highest_driver_attempt=6, driverless_s=1.5, plan=pb.PlanState(),
        workers=[pb.WorkerState(worker="env/0", attempt=1, progress=progress)],
    )  # fmt: skip


async def test_the_hello_names_the_plan_whose_commit_was_seen(pod):
    for kind in ({"prepare": pb.Prepare(plan_json="five", switch_number=2)}, {"commit": pb.Commit(switch_number=2)}):
        assert (await pod.obeyed(plan_revision=5, **kind)).ok
    wanted = pb.PlanState(committed_revision=5, committed_switch=2, committed_plan_json="five")
    assert pod.hello.plan == wanted


async def test_one_that_waits_for_its_slots_is_held_without_a_process(pod):
    await pod.joined("env/0", 1)
    pid = pod.pid_of("env/0")
    pod.agent.instructed(pb.Instruction(id=8, driver_attempt=1, stop=pb.Stop(worker="env/0", grace_s=60.0)))
    start = pb.Start(worker="env/1", kind="fake", attempt=4, slots=[1])
    pod.agent.instructed(pb.Instruction(id=9, driver_attempt=1, start=start))
    await pod.until(lambda: len(pod.hello.workers) == 2, "both")
    states = {state.worker: state for state in pod.hello.workers}
    waits = pb.Progress(worker="env/1", phase="waits for its slots")
    assert states["env/1"] == pb.WorkerState(worker="env/1", attempt=4, progress=waits)
    assert pod.agent.progress()[0] == waits
    os.kill(pid, signal.SIGTERM)
    await pod.until(lambda: 9 in pod.line.results(), "the start")
    assert [(state.worker, state.attempt) for state in pod.hello.workers] == [("env/1", 4)]
    assert pod.pid_of("env/1") > 0


async def test_an_exit_is_told_whole_and_counted(pod):
    await pod.joined()
    assert pod.line.begun == ["env/0"]
    said = await pod.stop()
    failure = pb.Failure(
        role="env", worker=0, pod="math-sim-1", node="node-5", exit_code=137, reason="Killed",
        message="worker env/0 was killed by signal 9 (SIGKILL)",
    )  # fmt: skip
    assert said == pb.WorkerExited(worker="env/0", attempt=1, exit_code=137, failure=failure, asked=True)


async def test_a_hang_is_told_whole(pod):
    pod.agent.hung("env/0", SayHung(attempt=2, phase="step", silent_s=20.5, stacks="File x"))
    wanted = pb.WorkerHung(worker="env/0", attempt=2, phase="step", silent_s=20.5, stacks="File x")
    assert pod.line.told == [pb.AgentMessage(hung=wanted)]


# --- what workers say -------------------------------------------------------------------------------------------------
async def test_a_worker_joins_by_its_attempt_and_its_process(pod):
    pid = await pod.start()
    for attempt, process in ((2, pid), (1, 1)):
        with pytest.raises(Stale, match="worker env/0 may not join"):
            pod.agent.join("env/0", attempt=attempt, pid=process)
    pod.agent.join("env/0", attempt=1, pid=pid)


async def test_progress_and_last_words_are_of_the_attempt_that_said_them(pod):
    await pod.joined()
    for attempt, phase in ((2, "compile"), (1, "load")):
        progress = slots_pb2.Progress(phase=phase, deadline_s=300.0)
        pod.agent.heard("env/0", attempt, slots_pb2.WorkerReport(progress=progress))
        words = slots_pb2.LastWords(reason="Hm", message=f"in {phase}", exit_code=64)
        pod.agent.heard("env/0", attempt, slots_pb2.WorkerReport(last_words=words))
    [progress] = pod.agent.progress()
    assert (progress.worker, progress.phase, progress.deadline_s) == ("env/0", "load", 300.0)
    assert 0.0 <= progress.age_s < 20.0
    said = await pod.stop()
    assert (said.failure.reason, said.failure.message) == ("Hm", "in load")


async def test_a_report_that_this_version_does_not_know_is_passed_over(pod):
    await pod.joined("env/0", 1)
    before = pod.hello
    pod.agent.heard("env/0", 1, slots_pb2.WorkerReport())
    after = pod.hello
    for hello in (before, after):
        for worker in hello.workers:
            worker.progress.age_s = worker.progress.still_s = 0.0
    assert after == before


async def test_seconds_that_a_worker_counts_stand_on_the_pods_page_over_its_attempts(pod):
    await pod.up()
    for attempt, seconds in ((1, 3.0), (1, 4.0), (2, 0.5)):
        counters = [
            slots_pb2.Counter(name="rlinf_worker_seconds_total", labels=["kind=compute"], value=seconds),
            slots_pb2.Counter(name="rlinf_worker_seconds_total", labels=["kind=wait_data"], value=1.0),
        ]
        pod.agent.heard("env/0", attempt, slots_pb2.WorkerReport(counters=slots_pb2.Counters(counters=counters)))
    text = await pod.page()
    assert "# HELP rlinf_worker_seconds_total Seconds that workers spent, by kind of span\n" in text
    assert 'rlinf_worker_seconds_total{kind="compute",role="env",worker="env/0"} 4.5\n' in text
    assert 'rlinf_worker_seconds_total{kind="wait_data",role="env",worker="env/0"} 2.0\n' in text


async def test_spans_get_the_full_names_of_their_slots(pod):
    span: dict[str, Any] = {"role": "env", "kind": "compute", "step": 3, "version": 2, "t0": 1.0, "t1": 2.5}
    spans = [slots_pb2.Span(slot="0,2", worker="env/7", **span), slots_pb2.Span(**span)]
    pod.agent.heard("env/0", 1, slots_pb2.WorkerReport(spans=slots_pb2.Spans(spans=spans, dropped=5)))
    assert pod.spans == [
        {"slot": "sim/1/0,sim/1/2", "worker": "env/7", **span},
        {"slot": "", "worker": "env/0", **span},
    ]


async def test_a_turn_stands_on_the_timeline_from_its_grant_until_the_slots_are_free(pod):
    turn = pb.Turn(role="env", workers=["env/0"])
    assert (await pod.obeyed(lease_sets=pb.LeaseSets(sets=[pb.LeaseSet(name="all", turns=[turn])]))).ok
    await pod.joined("env/0", 0, 3)
    report = slots_pb2.TurnReport(lease_set="all", standing="wants", ripe=True)
    pod.agent.heard("env/0", 1, slots_pb2.WorkerReport(turn=report))
    assert pod.spans == []
    await pod.stop()
    await pod.until(lambda: pod.spans, "the turn")
    [span] = pod.spans
    assert span.pop("t1") >= span.pop("t0") > 0
    assert span == {
        "slot": "sim/1/0,sim/1/3", "role": "env", "worker": "env/0", "kind": "turn", "step": -1, "version": -1,
    }  # fmt: skip


# --- the agent's own numbers ------------------------------------------------------------------------------------------
def exited(attempt: int = 1, *, asked: bool = False) -> SayExited:
    return SayExited(attempt, 137, asked, "", None, ())


async def test_restarts_and_ends_of_workers_are_counted_by_reason(pod):
    await pod.up()
    pod.agent.started("env/0", 1)
    pod.agent.exited("env/0", exited(), Failure(reason="R" * 99))
    pod.agent.started("env/0", 2)
    pod.agent.exited("env/0", exited(2, asked=True), Failure(reason="Killed"))
    pod.agent.started("env/0", 3)
    pod.agent.started("spare.env/0", 1)
    pod.agent.exited("spare.env/0", exited(), Failure(reason="Killed"))
    text = await pod.page()
    assert 'rlinf_worker_restarts_total{role="env",worker="env/0"} 2.0\n' in text
    assert f'rlinf_worker_exits_total{{reason="{"R" * 60}",role="env",worker="env/0"}} 1.0\n' in text
    assert 'rlinf_worker_exits_total{reason="Asked",role="env",worker="env/0"} 1.0\n' in text
    assert "spare.env/0" not in text


async def test_the_page_says_how_the_agent_itself_is(pod):
    await pod.up()
    await pod.start("env/0", 0)
    await pod.start("spare.env/0", spare=True)
    await pod.obeyed()  # of no kind: refused
    pod.agent.heard("env/0", 1, slots_pb2.WorkerReport(spans=slots_pb2.Spans(dropped=5)))
    bad = slots_pb2.Counter(name="not_ours", value=1.0)
    pod.agent.heard("env/0", 1, slots_pb2.WorkerReport(counters=slots_pb2.Counters(counters=[bad])))
    lines = [line for line in (await pod.page()).splitlines() if line.startswith("rlinf_agent_")]
    assert dict(line.split(" ") for line in lines) == {
        "rlinf_agent_driver_connected": "1.0",
        "rlinf_agent_driver_streams_total": "3.0",
        "rlinf_agent_heartbeats_total": "7.0",
        "rlinf_agent_workers": "1.0",
        "rlinf_agent_spares": "1.0",
        "rlinf_agent_slots": "4.0",
        "rlinf_agent_orphans_reaped_total": "0.0",
        "rlinf_agent_instructions_refused_total": "1.0",
        "rlinf_agent_turns_total": "0.0",
        "rlinf_agent_turn_kills_total": "0.0",
        "rlinf_agent_dropped_total": "10.0",
    }


# --- life -------------------------------------------------------------------------------------------------------------
async def test_a_signal_ends_workers_and_agent_with_the_code_of_one_that_was_told_to(pod):
    await pod.up()
    await pod.joined()
    assert len(pod.marks) == 1, "its watchdog was started"
    port = pod.servers[0].port
    signal.raise_signal(signal.SIGTERM)
    assert await pod.ended() == Failure(
        pod="math-sim-1", node="node-5", exit_code=names.EXIT_TERMINATED, reason="Terminated",
        message="pod math-sim-1 was told to stop; its workers were stopped",
    )  # fmt: skip
    [said] = pod.line.exits
    assert (said.worker, said.asked) == ("env/0", True)
    assert pod.line.closed_within_s == SETTINGS.final_flush_s
    assert not (pod.folder / "agent.sock").exists()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_nothing_starts_in_a_pod_that_ends(pod):
    await pod.up()
    pod.line.ends.set_result(ENDED)
    await pod.ended()
    refused = await pod.obeyed(start=pb.Start(worker="env/0", kind="fake", attempt=1))
    assert "worker env/0 cannot start here: got this pod ends: " in refused.error


@pytest.mark.parametrize(("code", "tells"), [(75, True), (70, True), (0, False), (76, False), (143, False)])
async def test_whom_the_driver_gives_up_says_what_failed_first(pod, code, tells):
    await pod.up()
    pod.agent.exited("env/1", exited(asked=True), Failure(role="env", worker=1, message="was asked"))
    pod.agent.exited("env/2", exited(), Failure(role="env", worker=2, message="no memory"))
    pod.agent.exited("env/3", exited(), Failure(role="env", worker=3, message="later"))
    ended = Failure(exit_code=code, reason="R", message="no driver")
    pod.line.ends.set_result(ended)
    wanted = (
        Failure(exit_code=code, reason="R", role="env", worker=2, message="no driver; no memory") if tells else ended
    )
    assert await pod.ended() == wanted


async def test_words_that_the_driver_has_said_already_are_not_said_twice(pod):
    await pod.up()
    pod.agent.exited("env/2", exited(), Failure(role="env", worker=2, message="no memory"))
    pod.line.ends.set_result(Failure(exit_code=75, message="given up: no memory"))
    assert await pod.ended() == Failure(exit_code=75, role="env", worker=2, message="given up: no memory")


async def test_a_bug_ends_the_agent_and_all_that_it_holds(pod):
    await pod.up()
    await pod.start()
    cast(Any, pod.agent)._supervisor.failed.set_exception(InvariantBroken("a bug"))
    with pytest.raises(InvariantBroken, match="a bug"):
        await pod.ended()
    assert [said.worker for said in pod.line.exits] == ["env/0"]


def patient(**fields: Any) -> Settings:
    return dataclasses.replace(SETTINGS, stop_grace_s=600.0, **fields)


@pytest.mark.parametrize("pod", [patient(hurry_after_s=1e-9)], indirect=True)
async def test_a_second_signal_ends_the_grace(pod):
    await pod.up()
    await pod.joined()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED
    assert [said.exit_code for said in pod.line.exits] == [128 + signal.SIGKILL]


@pytest.mark.parametrize("pod", [patient(hurry_after_s=1e9)], indirect=True)
async def test_the_same_word_twice_is_one(pod):
    await pod.up()
    await pod.joined()
    pid = pod.pid_of("env/0")
    for _ in range(3):
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
    assert pod.line.exits == []
    os.kill(pid, signal.SIGTERM)
    await pod.ended()
    assert [said.exit_code for said in pod.line.exits] == [128 + signal.SIGTERM]


# --- work that is handed over ----------------------------------------------------------------------------------------
def with_grace(pod: Pod, grace_s: float) -> Pod:
    agent = cast(Any, pod.agent)
    agent._identity = dataclasses.replace(agent._identity, grace_s=grace_s)
    return pod


def leaving(pod: Pod) -> list[float]:
    return [m.leaving.within_s for m in pod.line.told if m.WhichOneof("kind") == "leaving"]


async def told_to_end(pod: Pod) -> None:
    await pod.up()
    await pod.joined()
    signal.raise_signal(signal.SIGTERM)
    await pod.until(lambda: leaving(pod), "the word that it is to end")


async def test_one_that_is_told_to_end_works_on_until_its_driver_lets_it_go(pod):
    await told_to_end(with_grace(pod, 30.0))
    [within_s] = leaving(pod)
    assert within_s == pytest.approx(30.0 - SETTINGS.stop_grace_s - SETTINGS.leave_reserve_s, abs=1.0)
    await pod.start("env/1")
    await asyncio.sleep(0.05)
    assert pod.line.exits == []
    assert (await pod.obeyed(leave=pb.Leave())).ok
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED
    assert sorted(said.worker for said in pod.line.exits) == ["env/0", "env/1"]


async def test_it_works_on_for_its_grace_at_most(pod):
    await told_to_end(with_grace(pod, SETTINGS.stop_grace_s + SETTINGS.leave_reserve_s + 0.5))
    assert 0.0 < leaving(pod)[0] <= 0.5
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED


async def test_it_does_not_wait_for_a_driver_that_is_gone(pod):
    await told_to_end(with_grace(pod, 3000.0))
    pod.line.is_connected = False
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED


async def test_a_stream_that_breaks_for_a_moment_ends_no_hand_over_and_the_next_one_hears_of_it(pod):
    await told_to_end(with_grace(pod, 3000.0))
    pod.line.is_connected, pod.line.driverless_s = False, 1.4
    await asyncio.sleep(0.5)
    assert pod.line.exits == []
    assert len(leaving(pod)) == 1
    pod.line.is_connected, pod.line.driverless_s, pod.line.streams = True, 0.0, 4
    await pod.until(lambda: len(leaving(pod)) == 2, "the word on the next stream")
    first, second = leaving(pod)
    assert first - 60.0 < second < first, "what is left of its time"
    assert (await pod.obeyed(leave=pb.Leave())).ok
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED


async def test_nor_beyond_what_ends_it_otherwise(pod):
    await told_to_end(with_grace(pod, 3000.0))
    pod.line.ends.set_result(ENDED)
    assert await pod.ended() == ENDED


async def test_nor_beyond_a_second_word_to_end(pod):
    await told_to_end(with_grace(pod, 3000.0))
    await asyncio.sleep(2 * SETTINGS.hurry_after_s)
    signal.raise_signal(signal.SIGTERM)
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED


@pytest.mark.parametrize(("grace_s", "works"), [(0.0, True), (SETTINGS.leave_reserve_s, True), (3000.0, False)])
async def test_what_has_no_time_or_no_worker_ends_at_once(pod, grace_s, works):
    await with_grace(pod, grace_s).up()
    if works:
        await pod.joined()
    signal.raise_signal(signal.SIGTERM)
    assert (await pod.ended()).exit_code == names.EXIT_TERMINATED
    assert leaving(pod) == []


@pytest.mark.parametrize("pod", [patient()], indirect=True)
async def test_a_stale_agent_gives_its_workers_no_grace(pod):
    """Those of the newer one may need the slots."""
    await pod.up()
    await pod.joined()
    pod.line.ends.set_result(Failure(exit_code=names.EXIT_STALE))
    await pod.ended()
    assert [said.exit_code for said in pod.line.exits] == [128 + signal.SIGKILL]


async def test_the_next_worker_of_a_slot_waits_for_the_memory_of_the_one_that_left(pod, monkeypatch):
    used = [0]
    monkeypatch.setattr(cast(Any, pod.agent)._vacancy._probe, "used_bytes", lambda: used[0])
    monkeypatch.setattr(vacancy, "FLAT_S", 600.0)
    await pod.joined("env/0", 1)
    used[0] = 8000
    await pod.stop()
    pod.agent.instructed(pb.Instruction(id=9, driver_attempt=1, start=pb.Start(worker="env/1", kind="f", slots=[1])))
    await pod.until(lambda: pod.hello.workers, "the start")
    await asyncio.sleep(0.05)
    assert [state.progress.phase for state in pod.hello.workers] == ["waits for its slots"]
    used[0] = 0
    await pod.until(lambda: 9 in pod.line.results(), "the result")
    assert pod.pid_of("env/1") > 0


async def test_a_pause_of_the_pod_frees_no_memory(pod, monkeypatch):
    used, ahead, agent = [0], [0.0], cast(Any, pod.agent)
    monkeypatch.setattr(agent._clock, "_raw", lambda: monotonic() + ahead[0])
    monkeypatch.setattr(agent._vacancy._probe, "used_bytes", lambda: used[0])
    monkeypatch.setattr(vacancy, "FLAT_S", 600.0)
    await pod.joined("env/0", 1)
    used[0] = 8000
    await pod.stop()
    pod.agent.instructed(pb.Instruction(id=9, driver_attempt=1, start=pb.Start(worker="env/1", kind="f", slots=[1])))
    await pod.until(lambda: pod.hello.workers, "the start")
    ahead[0] += 300.0  # it was stopped
    await asyncio.sleep(0.05)
    assert [state.progress.phase for state in pod.hello.workers] == ["waits for its slots"]
    for _ in range(40):  # and here it lives
        ahead[0] += 0.8
        pod.agent.progress()
    await pod.until(lambda: 9 in pod.line.results(), "the result")
    assert pod.pid_of("env/1") > 0
