"""A worker's life: what its parts are given, how its role comes to run, and everything that may end it."""

import asyncio
import contextlib
import gc
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, PropertyMock

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.channels.v1alpha1 import channels_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2
from rlinf_api.errors import DeadlineExceeded, UserError, WorkerUnreachable
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion
from rlinf_worker.links.listener import Listener
from rlinf_worker.links.settings import LinkSettings
from rlinf_worker.runtime import agent_link
from rlinf_worker.runtime import worker as workers
from rlinf_worker.runtime.ends import ChannelEnds
from rlinf_worker.runtime.health import EngineLost
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.worker import Worker
from rlinf_worker.settings import Settings
from rlinf_worker.turns.term import Progress
from rlinf_worker.uplink.dialling import RefusedByDriver, Uplink
from tests.fakes.channels_driver import FakeDriver
from tests.fakes.slots_agent import SlotsAgent
from tests.fakes.workers import FunctionRole

QUICK = Settings(reconnect_backoff_s=0.01, reconnect_backoff_max_s=0.02, stop_grace_s=60.0)


class Site:
    """One worker; the test is its role, with a driver and, where it asks for one, an agent."""

    def __init__(self, folder, driver: FakeDriver, agent: SlotsAgent | None = None, **options: Any) -> None:
        (folder / "run").mkdir()
        self.identity = WorkerIdentity(
            worker=WorkerId("env/0"), role="env", kind="test", attempt=2, job_uid="j", pod_uid="p", pod_ip="127.0.0.1",
            pool="sim", driver_address="driver:7070", run_dir=str(folder / "run"), shm_dir="/dev/shm",
            slots_socket=agent.socket if agent else "", folder=str(folder), slots=options.pop("slots", ()),
        )  # fmt: skip
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        given: dict[str, Any] = {
            "settings": QUICK, "make_role": lambda: FunctionRole(self.run_role), "dial_driver": driver.dial,
            "with_agent": agent is not None,
        }  # fmt: skip
        self.worker = Worker(self.identity, **(given | options))

    async def run_role(self, ctx: Any) -> None:
        self.began.set()
        await self.may_end.wait()

    @contextlib.asynccontextmanager
    async def running(self):
        """Until its role runs; what is left of it is cancelled."""
        task = asyncio.create_task(self.worker.run())
        beginning = asyncio.create_task(self.began.wait())
        async with asyncio.timeout(20):
            await asyncio.wait({task, beginning}, return_when=asyncio.FIRST_COMPLETED)
        beginning.cancel()
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            return await self.worker.run()


@pytest.fixture
async def driver():
    driver = await FakeDriver.start([])
    yield driver
    await driver.stop()


@pytest.fixture
async def agent(tmp_path):
    async with SlotsAgent(tmp_path) as agent:
        yield agent


# --- what its parts are given -----------------------------------------------------------------------------------------
async def test_turns_hear_of_this_workers_channels_and_speak_with_its_agent(tmp_path, driver, agent, monkeypatch):
    made, given = Mock(close=AsyncMock(), residence=SimpleNamespace(role=None)), dict[str, Any]()
    made.numbers.return_value = [("turns", (), 1.0)]

    def make(**options: Any) -> Mock:
        given.update(options)
        return made

    monkeypatch.setattr(workers, "Turns", make)
    monkeypatch.setattr(ChannelEnds, "has_input", PropertyMock(return_value="some"))
    monkeypatch.setattr(ChannelEnds, "spill", lambda self: 77)
    site = Site(tmp_path, driver, agent)
    worker = site.worker
    async with site.running():
        assert given["recorder"] is worker.recorder is worker.host.recorder
        assert given["waits"] is worker.host.waits
        assert given["phases"] is worker.phases
        assert (given["settings"], given["fatal"]) == (QUICK, worker.fail)
        assert given["progress"]() == Progress.of(worker.host.accounts)
        assert (given["has_input"](), given["spill"]()) == ("some", 77)
        report = slots_pb2.TurnReport(lease_set="s", seen=3)
        given["say"](report)
        turn, membership = slots_pb2.TurnOrder(number=3), slots_pb2.Membership(lease_set="s")
        agent.order(turn=turn)
        agent.order(membership=membership)
        await agent.until(lambda: agent.of("turn") and agent.of("counters"))
        assert agent.of("turn") == [report]
        counters = {counter.name: counter.value for counter in agent.of("counters")[0].counters}
        assert counters["turns"] == 1.0
        assert {"rlinf_worker_dials_total", "rlinf_weights_seconds_total"} <= counters.keys()
        site.may_end.set()
    assert isinstance(made.residence.role, FunctionRole)
    assert made.on_order.mock_calls[0].args == (turn,)
    assert made.on_membership.mock_calls[0].args == (membership,)
    assert made.close.await_count == 1


async def test_turns_of_a_worker_without_an_agent_have_nobody_to_speak_with(tmp_path, driver, monkeypatch):
    made = Mock()
    monkeypatch.setattr(workers, "Turns", made)
    Site(tmp_path, driver)
    assert made.mock_calls[0].kwargs["say"] is None


async def test_a_worker_has_an_agent_unless_a_test_says_otherwise(tmp_path, driver, monkeypatch):
    monkeypatch.setattr(agent_link, "CONNECT_TIMEOUT_S", 0.02)
    worker = Site(tmp_path, driver).worker
    usual = Worker(worker.identity, settings=QUICK, make_role=Mock(), dial_driver=driver.dial)
    usual.turns = Mock(close=AsyncMock())
    with pytest.raises(WorkerUnreachable, match="no agent answers"):
        await usual.run()


async def test_its_links_are_those_of_its_pod_and_of_its_settings(tmp_path, driver, monkeypatch):
    seen, listen, settings = dict[str, Any](), Listener.open, LinkSettings(gpu="host")

    async def watch(identity: Any, **options: Any) -> Listener:
        seen.update(identity=identity, **options)
        return await listen(identity, **{**options, "tls": None})

    monkeypatch.setattr(Listener, "open", watch)
    certificates: Any = Mock(listening=lambda: "tls")
    site = Site(tmp_path, driver, link_settings=settings, certificates=certificates)
    async with site.running():
        host, admit = site.worker.host, seen.pop("admit")
        me = seen.pop("identity")
        assert (me.job, me.worker, me.attempt) == ("j", "env/0", 2)
        assert seen == {
            "pod_uid": "p", "run_dir": str(tmp_path / "run"), "shm_dir": "/dev/shm", "host": "127.0.0.1", "port": 0,
            "tls": "tls", "settings": settings, "pool": "sim",
        }  # fmt: skip
        assert (host.worker, host.role, host.link_settings, host.fatal) == ("env/0", "env", settings, site.worker.fail)
        admitted = Mock()
        monkeypatch.setattr(host.peers, "admit", admitted)
        admit("peer", "certificate")
        assert admitted.mock_calls[0].args == ("peer", "certificate")


async def test_a_worker_without_link_settings_or_certificates_has_the_usual_ones(tmp_path, driver, monkeypatch):
    seen, listen = dict[str, Any](), Listener.open

    async def watch(identity: Any, **options: Any) -> Listener:
        seen.update(options)
        return await listen(identity, **options)

    monkeypatch.setattr(Listener, "open", watch)
    site = Site(tmp_path, driver)
    async with site.running():
        assert (seen["settings"], seen["tls"], site.worker.host.link_settings) == (LinkSettings(), None, LinkSettings())


@pytest.mark.parametrize(
    ("slots", "taken", "ports"),
    [((), 0, [0]), ((3, 4), 0, [names.PORT_DATA_BASE + 3]), ((3, 4), 1, [names.PORT_DATA_BASE + 3, 0])],
)
async def test_a_worker_listens_at_its_slots_port_or_where_that_is_taken_at_any(
    tmp_path, driver, monkeypatch, slots, taken, ports
):
    asked, listen = list[int](), Listener.open

    async def watch(identity: Any, **options: Any) -> Listener:
        asked.append(options["port"])
        if len(asked) <= taken:
            raise UserError("the port is taken")
        return await listen(identity, **{**options, "port": 0})

    monkeypatch.setattr(Listener, "open", watch)
    site = Site(tmp_path, driver, slots=slots)
    async with site.running():
        assert asked == ports


async def test_a_worker_that_can_listen_nowhere_says_why(tmp_path, driver, monkeypatch):
    monkeypatch.setattr(Listener, "open", AsyncMock(side_effect=UserError("the pod has no such address")))
    with pytest.raises(UserError, match="no such address"):
        await Site(tmp_path, driver).ended()


async def test_its_clock_is_looked_at_while_its_role_works(tmp_path, driver, monkeypatch):
    site, look = Site(tmp_path, driver), Mock(return_value=0.0)
    monkeypatch.setattr(site.worker.clock, "_raw", look)
    async with site.running():
        seen = look.call_count
        async with asyncio.timeout(20):
            while look.call_count < seen + 2:
                await asyncio.sleep(0.01)


async def test_its_stream_to_the_driver_is_named_and_bounded(tmp_path, driver, monkeypatch):
    given = dict[str, Any]()

    def make(part: Any, **options: Any) -> Any:
        given.update(part=part, **options)
        return Uplink(part, **options)

    monkeypatch.setattr(workers, "Uplink", make)
    site = Site(tmp_path, driver)
    async with site.running():
        assert given.pop("dial") == driver.dial
        assert given == {
            "part": site.worker.session, "wire": workers.DIALECT, "who": "worker env/0", "address": "driver:7070",
            "settings": QUICK, "write_timeout_s": QUICK.welcome_timeout_s, "kept": 1000,
            "clock": site.worker.clock,
        }  # fmt: skip
        site.worker.host.tell(pb.WorkerMessage(fact=pb.Fact(name="a", json="1")))
        source = Mock(drain=lambda out: out.append(pb.WorkerMessage(fact=pb.Fact(name="b", json="2"))))
        site.worker.host.mark(source)
        await driver.until(lambda: driver.kinds("env/0") == ["fact", "fact"], what="what is told and what is marked")
        site.worker.session.on_message(pb.DriverMessage(begin=pb.Begin(version=pb.PolicyVersion(branch=6))))
        assert site.worker.host.newest_branch() == 6
        assert (site.worker.host.weights_version(), site.worker.host.max_staleness()) == (None, 1)
        site.worker.session.weights._pulled = PolicyVersion(6, 1)
        assert site.worker.host.weights_version() == PolicyVersion(6, 1)
        assert not site.worker.host.may_begin()
        site.worker.session.steps.begun = PolicyVersion(6, 1)
        assert site.worker.host.may_begin()
        finished = Mock()
        monkeypatch.setattr(site.worker.session.ends, "finish_item", finished)
        site.worker.host.finish_item("item")  # type: ignore[arg-type]
        assert finished.mock_calls[0].args == ("item",)


# --- its life ---------------------------------------------------------------------------------------------------------
async def test_a_role_runs_once_the_driver_has_said_which_flow_it_is_and_its_end_is_the_workers(tmp_path, driver):
    site, seen = Site(tmp_path, driver), list[Any]()

    async def run(ctx: Any) -> None:
        seen.append((ctx.flow.name, ctx.worker, ctx.stopping, site.worker.phases.phase))
        with ctx.span("compute", step=1):
            pass

    site.run_role = run  # type: ignore[method-assign]
    assert await site.ended() == names.EXIT_OK
    assert seen == [("test", "env/0", site.worker.stopping, "load")]
    assert [span.kind for span in site.worker.recorder.flush()] == ["compute"]
    assert site.worker.phases.phase == "idle"
    assert [hello.worker for hello in driver.hellos] == ["env/0"]


async def test_a_driver_that_stays_away_is_waited_for_by_name(tmp_path, driver):
    settings = Settings(driver_absence_timeout_s=0.02, connect_timeout_s=60.0, stop_grace_s=60.0)

    async def dial() -> Any:
        await asyncio.Event().wait()

    site = Site(tmp_path, driver, settings=settings, dial_driver=dial)
    with pytest.raises((DeadlineExceeded, WorkerUnreachable), match=r"env/0|driver:7070"):
        await site.ended()


async def test_an_import_that_fails_ends_the_worker_with_its_sentence(tmp_path, driver, agent):
    site = Site(tmp_path, driver, agent, make_role=Mock(side_effect=UserError("no module x")))
    with pytest.raises(UserError, match="no module x"):
        await site.ended()
    words = slots_pb2.LastWords(reason="UserError", message="no module x", exit_code=names.EXIT_USER_ERROR)
    assert agent.of("last_words") == [words]


async def test_an_import_that_goes_on_is_not_waited_for_by_who_is_told_to_end(tmp_path, driver):
    may_end, importing = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def make() -> Any:
        loop.call_soon_threadsafe(importing.set)
        may_end.wait(20)
        return FunctionRole(AsyncMock())

    site = Site(tmp_path, driver, make_role=make)
    running = asyncio.create_task(site.ended())
    await importing.wait()
    site.worker.stop("SIGTERM", exit_code=names.EXIT_TERMINATED)
    assert await running == names.EXIT_TERMINATED
    may_end.set()


@pytest.mark.parametrize(
    ("error", "reason", "exit_code"),
    [
        (ValueError("no floor"), "ValueError", names.EXIT_RETRYABLE),
        (UserError("no such environment"), "UserError", names.EXIT_USER_ERROR),
        (
            RefusedByDriver("the job is over", who="worker env/0", exit_code=names.EXIT_STALE),
            "RefusedByDriver",
            names.EXIT_STALE,
        ),
    ],
)
async def test_a_role_that_fails_ends_the_worker_whose_last_words_the_agent_hears(
    tmp_path, driver, agent, error, reason, exit_code
):
    site = Site(tmp_path, driver, agent)
    site.run_role = AsyncMock(side_effect=error)  # type: ignore[method-assign]
    with pytest.raises(type(error), match=str(error)):
        await site.ended()
    await agent.until(lambda: agent.has_ended)
    (words,) = agent.of("last_words")
    assert (words.reason, words.exit_code) == (reason, exit_code)
    assert str(error) in words.message


class NoFunction:
    async def __call__(self, ctx: Any) -> None: ...


class ElsewhereRole:
    run = NoFunction()


@pytest.mark.parametrize(
    ("role", "place"),
    [
        (FunctionRole(AsyncMock()), f"fakes/workers.py, line {FunctionRole.run.__code__.co_firstlineno})"),
        (ElsewhereRole(), "(ElsewhereRole)"),
    ],
)
async def test_a_role_that_returns_though_nobody_told_it_to_is_named_with_its_place(
    tmp_path, driver, agent, role, place
):
    assert await Site(tmp_path, driver, agent, make_role=lambda: role).ended() == names.EXIT_OK
    await agent.until(lambda: agent.has_ended)
    (words,) = agent.of("last_words")
    assert words.reason == "RoleReturned"
    assert place in words.message


async def test_whoever_is_cancelled_has_no_last_words(tmp_path, driver, agent):
    site = Site(tmp_path, driver, agent)
    async with site.running() as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await agent.until(lambda: agent.has_ended)
    assert agent.of("last_words") == []


async def test_a_part_that_fails_ends_the_worker_with_the_first_of_its_errors(tmp_path, driver):
    site = Site(tmp_path, driver)
    async with site.running() as task:
        site.worker.fail(ValueError("the first"))
        site.worker.fail(ValueError("the second"))
        with pytest.raises(ValueError, match="the first"):
            await task


async def test_a_worker_that_ends_ends_what_sends_and_receives_its_weights(tmp_path, driver, monkeypatch):
    site, close = Site(tmp_path, driver), AsyncMock()
    site.may_end.set()
    async with site.running() as task:
        monkeypatch.setattr(site.worker.session.weights, "close", close)
        assert await task == names.EXIT_OK
    assert close.await_count == 1


class Probed(FunctionRole):
    """Its engine dies as it begins to work."""

    async def check_health(self) -> None:
        raise RuntimeError("EngineCore died")


def probed(site: Site, run: Any) -> Site:
    site.worker._make_role = lambda: Probed(run)
    return site


async def test_a_lost_engine_ends_its_worker_with_its_own_sentence(tmp_path, driver, agent):
    async def run(ctx: Any) -> None:
        ctx.phase("step")
        await asyncio.Event().wait()

    site = probed(Site(tmp_path, driver, agent, settings=replace(QUICK, probe_interval_s=0.01)), run)
    with pytest.raises(EngineLost, match="EngineCore died"):
        await site.ended()
    await agent.until(lambda: bool(agent.of("last_words")))
    [words] = agent.of("last_words")
    assert (words.reason, words.exit_code) == ("EngineLost", names.EXIT_RETRYABLE)
    assert words.message.startswith("the engine of worker env/0 is lost: got EngineCore died")


async def test_a_role_that_clings_to_a_lost_engine_does_not_keep_its_process(tmp_path, driver, agent, monkeypatch):
    codes, let_go = list[int](), asyncio.Event()
    monkeypatch.setattr(os, "_exit", codes.append)

    async def run(ctx: Any) -> None:
        ctx.phase("step")
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()  # for its engine to shut down

    settings = replace(QUICK, probe_interval_s=0.01, stop_grace_s=0.2)
    site = probed(Site(tmp_path, driver, agent, settings=settings), run)
    try:
        with pytest.raises(EngineLost):
            await site.ended()
        assert codes == [names.EXIT_RETRYABLE]
        await agent.until(lambda: bool(agent.of("last_words")))
    finally:
        let_go.set()


async def test_what_follows_of_a_roles_end_is_not_told_as_an_error_that_nobody_saw(tmp_path, driver):
    told = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def live_and_end() -> None:
        site = Site(tmp_path, driver)

        async def run(ctx: Any) -> None:
            site.worker.fail(UserError("what follows"))
            raise ValueError("the cause")

        site.run_role = run  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="the cause"):
            await site.ended()

    await live_and_end()
    gc.collect()
    assert told == []


async def test_a_worker_ends_with_its_agent(tmp_path, driver, agent):
    site = Site(tmp_path, driver, agent)
    async with site.running() as task:
        agent.hang_up()
        with pytest.raises(WorkerUnreachable, match="the agent of this worker is gone"):
            await task


# --- stopping ---------------------------------------------------------------------------------------------------------
async def test_who_is_told_to_stop_says_so_ends_its_waits_and_keeps_the_worst_exit_code(tmp_path, driver):
    site = Site(tmp_path, driver)
    stopped = dict[str, Any]()

    async def run(ctx: Any) -> None:
        site.began.set()
        await ctx.stopping.wait()
        stopped.update(phase=site.worker.phases.phase, why=site.worker.host.waits.stopped)

    site.run_role = run  # type: ignore[method-assign]
    async with site.running() as task:
        site.worker.stop("SIGTERM", exit_code=names.EXIT_TERMINATED)
        site.worker.stop("the driver says so")
        assert await task == names.EXIT_TERMINATED
    assert stopped == {"phase": "stop", "why": "SIGTERM"}


async def test_the_agents_word_stops_a_worker(tmp_path, driver, agent):
    site = Site(tmp_path, driver, agent)

    async def run(ctx: Any) -> None:
        site.began.set()
        await ctx.stopping.wait()

    site.run_role = run  # type: ignore[method-assign]
    async with site.running() as task:
        agent.order(stop=slots_pb2.Stop(reason="not in the plan", grace_s=5.0))
        assert await task == names.EXIT_OK
    assert site.worker.host.waits.stopped == "not in the plan"


@pytest.mark.parametrize("first_s", [0.01, 0.0])
async def test_a_role_that_does_not_stop_is_cancelled_within_the_grace(tmp_path, driver, first_s):
    """Which is that of the first word, or the settings' where it names none."""
    settings = Settings(stop_grace_s=60.0 if first_s else 0.01)
    site = Site(tmp_path, driver, settings=settings)
    async with site.running() as task:
        site.worker.stop("the driver says so", first_s)
        site.worker.stop("once more", 60.0)
        async with asyncio.timeout(10):
            with contextlib.suppress(asyncio.CancelledError):
                assert await task == names.EXIT_OK
        assert task.done()


async def test_the_last_part_of_the_grace_is_for_hanging_up(tmp_path, driver, monkeypatch):
    site, waited = Site(tmp_path, driver), list[float | None]()
    wait = asyncio.wait

    async def watch(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:  # noqa: ASYNC109  as it is called
        if timeout is not None:
            waited.append(timeout)
            timeout = min(timeout, 0.01)
        return await wait(tasks, timeout=timeout, **options)

    async with site.running() as task:
        monkeypatch.setattr(asyncio, "wait", watch)
        site.worker.stop("SIGTERM", 10.0)
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert waited[0] == 7.0


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_a_closed_channel_ends_a_worker_well_only_where_it_stops(tmp_path, driver, is_stopping):
    site = Site(tmp_path, driver)

    async def run(ctx: Any) -> None:
        if is_stopping:
            site.worker.stop("SIGTERM")
        raise ChannelClosed("units")

    site.run_role = run  # type: ignore[method-assign]
    if is_stopping:
        assert await site.ended() == names.EXIT_OK
    else:
        with pytest.raises(ChannelClosed):
            await site.ended()


# --- lingering --------------------------------------------------------------------------------------------------------
async def test_a_role_that_is_through_waits_until_others_have_fetched_what_it_made(tmp_path, driver, monkeypatch):
    left = [3, 2, 1, 0, 0, 0]
    monkeypatch.setattr(workers, "LINGER_POLL_S", 0.001)
    monkeypatch.setattr(ChannelEnds, "unfinished", property(lambda self: left.pop(0)))
    site = Site(tmp_path, driver)
    site.may_end.set()
    assert await site.ended() == names.EXIT_OK
    assert left == [0]


@pytest.mark.parametrize("why", ["time", "stop"])
async def test_it_does_not_wait_for_ever_nor_when_it_is_told_to_end(tmp_path, driver, monkeypatch, why):
    monkeypatch.setattr(workers, "LINGER_S", 0.0 if why == "time" else 600.0)
    monkeypatch.setattr(ChannelEnds, "unfinished", property(lambda self: 1))
    site = Site(tmp_path, driver)
    site.may_end.set()
    async with site.running() as task:
        if why == "stop":
            assert not task.done()
            site.worker.stop("SIGTERM")
        async with asyncio.timeout(10):
            assert await task == names.EXIT_OK


async def test_a_pause_of_the_machine_is_no_time_in_which_others_could_have_fetched(tmp_path, driver, monkeypatch):
    """The process stands still at its first look; the fetch that was under way comes behind that."""
    left = [1, 1, 1, 0, 0, 0]

    def unfinished(_: ChannelEnds) -> int:
        if len(left) == 5:
            time.sleep(1.2)
        return left.pop(0)

    monkeypatch.setattr(workers, "LINGER_POLL_S", 0.001)
    monkeypatch.setattr(workers, "LINGER_S", 1.0)
    monkeypatch.setattr(ChannelEnds, "unfinished", property(unfinished))
    site = Site(tmp_path, driver)
    monkeypatch.setattr(site.worker.clock, "_notice_s", 0.5)
    site.may_end.set()
    assert await site.ended() == names.EXIT_OK
    assert left == [0]
