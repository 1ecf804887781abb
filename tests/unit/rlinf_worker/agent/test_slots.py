"""The pod's own socket: a worker's hello, its reports in order, orders to it, and whose call ends when."""

import asyncio
import logging
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2_grpc
from rlinf_api.errors import Stale, UserError
from rlinf_worker.agent import slots
from rlinf_worker.agent.slots import SlotsServer

HELLO = pb.WorkerReport(hello=pb.Hello(worker="env/0", attempt=3, pid=77))
STEP = pb.WorkerReport(progress=pb.Progress(phase="step", deadline_s=20.0))
STOP = pb.AgentOrder(stop=pb.Stop(reason="drain", grace_s=2.0))


class Aborted(Exception):
    pass


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code.name, details)


class Call:
    """A worker at the other end: `say` reports, None ends them; `next` order; `gone` breaks the stream."""

    def __init__(self, server: SlotsServer) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.orders = cast(Any, server.Join(self._reports(), cast(Any, Context())))

    async def _reports(self) -> AsyncIterator[pb.WorkerReport]:
        while (said := await self._said.get()) is not None:
            if isinstance(said, Exception):
                raise said
            yield said

    def say(self, *reports: Any) -> None:
        for report in reports:
            self._said.put_nowait(report)

    async def next(self) -> Any:
        """The next order, or None where the call is over."""
        async with asyncio.timeout(10):
            return await anext(self.orders, None)


class Pod:
    """Hears what workers say."""

    def __init__(self, folder: Path) -> None:
        self.joined: list[tuple[str, int, int]] = []
        self.heard_of: list[tuple[str, int, pb.WorkerReport]] = []
        self.refuses, self.breaks = "", False
        self.ordered_at_once: pb.AgentOrder | None = None
        self.server = SlotsServer(self, path=str(folder / "run" / "agent.sock"))

    def join(self, worker: str, *, attempt: int, pid: int) -> None:
        if self.refuses:
            raise Stale(self.refuses)
        self.joined.append((worker, attempt, pid))
        if self.ordered_at_once is not None:
            assert self.server.order(worker, self.ordered_at_once)

    def heard(self, worker: str, attempt: int, report: pb.WorkerReport) -> None:
        if self.breaks:
            raise ZeroDivisionError("of ours")
        self.heard_of.append((worker, attempt, report))


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


async def joined(pod: Pod) -> tuple[Call, "asyncio.Task[Any]"]:
    """A call that waits for its first order."""
    call = Call(pod.server)
    call.say(HELLO)
    waiting = asyncio.create_task(call.next())
    count = len(pod.joined)
    async with asyncio.timeout(10):
        while len(pod.joined) == count:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    return call, waiting


async def test_what_a_worker_says_is_heard_in_order_and_orders_reach_it(pod):
    call, first = await joined(pod)
    assert pod.joined == [("env/0", 3, 77)]
    call.say(STEP, STEP)
    assert pod.server.order("env/0", STOP)
    assert await first == STOP
    membership = pb.AgentOrder(membership=pb.Membership(lease_set="all"))
    assert pod.server.order("env/0", membership)
    assert await call.next() == membership
    assert pod.heard_of == [("env/0", 3, STEP)] * 2
    call.say(None)
    assert await call.next() is None, "the end of its reports is the end of the call"
    assert not pod.server.order("env/0", STOP)


async def test_an_order_that_joining_gives_at_once_is_the_first(pod):
    pod.ordered_at_once = STOP
    _, first = await joined(pod)
    assert await first == STOP


async def test_who_is_not_connected_gets_no_order_and_the_log_says_which(pod, caplog):
    assert not pod.server.order("env/9", STOP)
    [record] = caplog.records
    assert (record.getMessage(), record.__dict__["worker"], record.__dict__["order"]) == (
        "order not delivered", "env/9", "stop",
    )  # fmt: skip


async def test_orders_that_nobody_reads_are_bounded_and_the_end_still_comes(pod):
    call, first = await joined(pod)
    assert pod.server.order("env/0", STOP)
    assert await first == STOP
    delivered = 0
    while pod.server.order("env/0", STOP):
        delivered += 1
    assert delivered == slots._MAX_ORDERS + 1
    await call.orders.aclose()
    assert not pod.server.order("env/0", STOP)


async def test_a_worker_that_connects_again_ends_its_earlier_call_and_keeps_the_new_one(pod):
    _, first = await joined(pod)
    again, second = await joined(pod)
    assert await first is None
    assert pod.server.order("env/0", STOP), "the end of the earlier call takes nothing from the new one"
    assert await second == STOP
    again.say(None)
    assert await again.next() is None


async def test_a_process_that_has_no_place_here_is_told_so(pod):
    pod.refuses = "worker env/0 may not join"
    call = Call(pod.server)
    call.say(HELLO)
    with pytest.raises(Aborted) as error:
        await call.next()
    assert error.value.args == ("FAILED_PRECONDITION", "worker env/0 may not join")
    assert not pod.server.order("env/0", STOP)


@pytest.mark.parametrize(("said", "got"), [(STEP, "progress"), (None, "the end"), (pb.WorkerReport(), "None")])
async def test_the_first_word_is_a_hello(pod, said, got):
    call = Call(pod.server)
    call.say(said)
    with pytest.raises(Aborted) as error:
        await call.next()
    assert error.value.args == ("INVALID_ARGUMENT", f"a worker's first report is: got {got}, wanted hello")
    assert pod.joined == []


async def test_a_worker_that_says_nothing_is_not_waited_for_without_end(pod, monkeypatch):
    monkeypatch.setattr(slots, "HELLO_TIMEOUT_S", 0.01)
    with pytest.raises(Aborted) as error:
        await Call(pod.server).next()
    assert error.value.args[0] == "DEADLINE_EXCEEDED"
    assert "a worker's hello" in error.value.args[1]


async def test_a_stream_that_breaks_is_no_more_than_its_end(pod, caplog):
    call, first = await joined(pod)
    with caplog.at_level(logging.DEBUG):
        call.say(grpc.RpcError("reset"))
        assert await first is None
    assert [record.levelno for record in caplog.records if record.name == slots.__name__] == [logging.DEBUG]


async def test_a_report_that_breaks_the_agent_ends_the_call_with_a_traceback(pod, caplog):
    pod.breaks = True
    call, first = await joined(pod)
    call.say(STEP)
    assert await first is None
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert (record.getMessage(), record.exc_info is not None) == ("a worker's report broke the agent", True)
    assert record.__dict__["worker"] == "env/0"


# --- the socket itself ------------------------------------------------------------------------------------------------
async def test_the_socket_is_this_users_alone_takes_the_place_of_an_old_one_and_goes_with_the_agent(pod, tmp_path):
    path = tmp_path / "run" / "agent.sock"
    path.parent.mkdir(mode=0o755)
    path.write_text("left by an agent that was killed")
    await pod.server.start()
    try:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert [stat.S_IMODE(p.stat().st_mode) for p in (path.parent, path)] == [0o700, 0o600]
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = slots_pb2_grpc.SlotsStub(channel).Join()
            await call.write(HELLO)
            await call.write(STEP)
            async with asyncio.timeout(20):
                while not pod.heard_of:
                    await asyncio.sleep(0.005)
            call.cancel()
    finally:
        await pod.server.stop()
    assert (pod.joined, pod.heard_of) == ([("env/0", 3, 77)], [("env/0", 3, STEP)])
    assert not path.exists()


async def test_a_run_folder_that_cannot_be_one_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    server = SlotsServer(cast(Any, None), path=str(tmp_path / "file" / "agent.sock"))
    with pytest.raises(UserError) as error:
        await server.start()
    assert str(error.value).startswith(f"run directory {tmp_path}/file cannot be used: got [Errno ")
    assert str(error.value).endswith("wanted a writable emptyDir; look at the pod's volume mounts")


async def test_a_server_that_never_began_may_be_stopped(pod):
    await pod.server.stop()
