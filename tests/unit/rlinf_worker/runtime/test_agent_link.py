"""A worker's stream to its agent: what it says of itself, in what order, and which orders reach whom."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlinf_api._pb.rlinf.slots.v1alpha1 import slots_pb2 as pb
from rlinf_api.errors import WorkerUnreachable
from rlinf_api.names import WorkerId
from rlinf_worker import phases as phase_files
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.phases import Phases
from rlinf_worker.runtime import agent_link
from rlinf_worker.runtime.agent_link import AgentLink, Number
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.work import Work
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import Amount, End
from tests.fakes.slots_agent import SlotsAgent

NEVER_S = 600.0


class Site:
    """One link; the test is the worker behind it. An option that is None is not given."""

    def __init__(self, agent_socket: str, folder: Path, **options: Any) -> None:
        self.identity = WorkerIdentity(
            worker=WorkerId("env/3"), role="env", kind="fake", attempt=4, slots=(1, 2), slots_socket=agent_socket,
            folder=str(folder),
        )  # fmt: skip
        self.phases, self.recorder, self.numbers = Phases(Settings()), Recorder(), list[Number]()
        self.heard = Mock()
        self.work = Work(waits=Waits(), phases=self.phases, moves=lambda: None)
        given = {
            "on_stop": self.heard.stop, "on_turn": self.heard.turn, "on_membership": self.heard.membership,
            "on_promote": self.heard.promote, "flush_s": NEVER_S,
        }  # fmt: skip
        self.link = AgentLink(
            self.identity,
            phases=self.phases,
            work=self.work,
            recorder=self.recorder,
            numbers=lambda: self.numbers,
            **{name: value for name, value in (given | options).items() if value is not None},
        )


@pytest.fixture
async def agent(tmp_path):
    async with SlotsAgent(tmp_path) as agent:
        yield agent


@contextlib.asynccontextmanager
async def opened(agent: SlotsAgent, folder: Path, **options: Any):
    site = Site(agent.socket, folder, **options)
    await site.link.open()
    try:
        yield site
    finally:
        await site.link.close(timeout_s=5.0)


async def test_a_worker_says_who_it_is_and_in_which_phase(agent, tmp_path):
    async with opened(agent, tmp_path):
        await agent.until(lambda: len(agent.said) >= 2)
    assert agent.said[:2] == [
        pb.WorkerReport(hello=pb.Hello(worker="env/3", attempt=4, pid=os.getpid())),
        pb.WorkerReport(progress=pb.Progress(phase="start", deadline_s=Settings().phase_deadline_s("start"))),
    ]


async def test_another_phase_is_in_the_file_at_once_and_is_told_to_the_agent(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        first = phase_files.read(tmp_path)
        assert first is not None
        assert (first.phase, first.deadline_s) == ("start", Settings().phase_deadline_s("start"))
        site.phases.enter("load", deadline_s=77.0)
        mark = phase_files.read(tmp_path)
        assert mark is not None
        assert (mark.phase, mark.deadline_s) == ("load", 77.0)
        assert mark.at >= first.at
        await agent.until(lambda: len(agent.of("progress")) == 2)
    assert agent.of("progress")[1] == pb.Progress(phase="load", deadline_s=77.0)


async def test_phases_that_are_short_are_in_the_file_each_and_share_a_word_to_the_agent(agent, tmp_path):
    """A change of turns has a load and an offload in it, and takes no longer than a message."""
    async with opened(agent, tmp_path) as site:
        for phase in ("load", "step", "load", "step"):
            site.phases.enter(phase, deadline_s=7.0)
            mark = phase_files.read(tmp_path)
            assert mark is not None
            assert mark.phase == phase
        await agent.until(lambda: len(agent.of("progress")) == 2)
        site.phases.enter("stop", deadline_s=3.0)
    await agent.until(lambda: agent.has_ended)
    assert agent.of("progress")[1:] == [
        pb.Progress(phase="step", deadline_s=7.0),
        pb.Progress(phase="stop", deadline_s=3.0),
    ], "the last before the end, too"


async def test_a_phase_that_has_no_room_in_a_file_is_told_all_the_same(agent, tmp_path):
    async with opened(agent, tmp_path / "nowhere") as site:
        site.phases.enter("idle", deadline_s=5.0)
        await agent.until(lambda: len(agent.of("progress")) == 2)
    assert agent.of("progress")[1] == pb.Progress(phase="idle", deadline_s=5.0)


async def test_each_order_reaches_whom_it_is_for_and_one_that_is_not_known_nobody(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        running = asyncio.create_task(site.link.run())
        turn, member = pb.TurnOrder(number=3, kind="finish"), pb.Membership(lease_set="s")
        place = pb.Promote(worker="env/1", attempt=2)
        agent.order()
        agent.order(turn=turn)
        agent.order(membership=member)
        agent.order(promote=place)
        agent.order(stop=pb.Stop(reason="a plan has no place for it", grace_s=3.0))
        agent.order(stop=pb.Stop())
        agent.hang_up()
        with pytest.raises(WorkerUnreachable, match="gone: got its stream ended; this worker ends too"):
            await running
    assert [(name, arguments) for name, arguments, _ in site.heard.mock_calls] == [
        ("turn", (turn,)),
        ("membership", (member,)),
        ("promote", (place,)),
        ("stop", ("a plan has no place for it", 3.0)),
        ("stop", ("the agent says so", 0.0)),
    ]


async def test_orders_that_a_worker_has_no_use_for_change_nothing(agent, tmp_path):
    async with opened(agent, tmp_path, on_turn=None, on_membership=None, on_promote=None) as site:
        running = asyncio.create_task(site.link.run())
        agent.order(turn=pb.TurnOrder(number=1))
        agent.order(membership=pb.Membership())
        agent.order(promote=pb.Promote())
        agent.hang_up()
        with pytest.raises(WorkerUnreachable, match="its stream ended"):
            await running


async def test_an_agent_that_breaks_off_is_named_with_the_cause(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        running = asyncio.create_task(site.link.run())
        await agent.until(lambda: agent.said)
        await agent.__aexit__()
        with pytest.raises(WorkerUnreachable, match=r"gone: got [A-Z]+: "):
            await running


async def test_where_no_agent_listens_the_socket_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_link, "CONNECT_TIMEOUT_S", 0.02)
    site = Site(str(tmp_path / "gone.sock"), tmp_path)
    with pytest.raises(WorkerUnreachable, match=r"no agent answers at .*gone\.sock") as raised:
        await site.link.open()
    assert isinstance(raised.value.__cause__, TimeoutError)
    await site.link.close()
    await site.link._channel.close()  # type: ignore[union-attr]


async def test_numbers_are_told_when_they_have_moved_and_by_their_labels(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        site.numbers = [("items", ("side=a",), 1.0), ("items", ("side=b",), 2.0), ("level", (), 0.0)]
        site.link.flush_numbers()
        site.link.flush_numbers()
        site.numbers = [("items", ("side=a",), 1.0), ("items", ("side=b",), 3.0), ("level", (), 0.0)]
        site.link.flush_numbers()
        await agent.until(lambda: len(agent.of("counters")) == 2)
    assert agent.of("counters") == [
        pb.Counters(
            counters=[
                pb.Counter(name="items", labels=["side=a"], value=1.0),
                pb.Counter(name="items", labels=["side=b"], value=2.0),
                pb.Counter(name="level", value=0.0),
            ]
        ),
        pb.Counters(counters=[pb.Counter(name="items", labels=["side=b"], value=3.0)]),
    ]


async def test_spans_are_told_whole_and_those_that_were_dropped_once(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        site.recorder.add("compute", 10.0, 12.5, step=3, version=2)
        site.recorder.dropped = 5
        site.link.flush_numbers()
        site.link.flush_numbers()
        site.recorder.dropped = 6
        site.link.flush_numbers()
        site.recorder.add("load", 13.0, 14.0, amount=Amount(units=2, tokens=5))
        site.recorder.add("wait_data", 13.0, 14.0, on=End("samples", "consumer"))
        site.link.flush_numbers()
        await agent.until(lambda: len(agent.of("spans")) == 3)
    who: dict[str, Any] = {"slot": "1,2", "role": "env", "worker": "env/3"}
    when: dict[str, Any] = {"step": -1, "version": -1, "t0": 13.0, "t1": 14.0}
    assert agent.of("spans") == [
        pb.Spans(dropped=5, spans=[pb.Span(**who, kind="compute", step=3, version=2, t0=10.0, t1=12.5)]),
        pb.Spans(dropped=6),
        pb.Spans(
            spans=[
                pb.Span(**who, kind="load", units=2, tokens=5, **when),
                pb.Span(**who, kind="wait_data", channel="samples", **when),
            ]
        ),
    ]  # fmt: skip


async def test_turns_and_last_words_are_told_and_what_moved_since_goes_out_before_the_end(agent, tmp_path):
    report = pb.TurnReport(lease_set="s", standing="holds", seen=4)
    async with opened(agent, tmp_path) as site:
        site.link.turn(report)
        site.link.last_words("EnvironmentBroken", "the robot fell over", 75)
        site.numbers = [("items", (), 1.0)]
    await agent.until(lambda: agent.has_ended)
    assert agent.said[2:] == [
        pb.WorkerReport(turn=report),
        pb.WorkerReport(
            last_words=pb.LastWords(reason="EnvironmentBroken", message="the robot fell over", exit_code=75)
        ),
        pb.WorkerReport(counters=pb.Counters(counters=[pb.Counter(name="items", value=1.0)])),
    ]


async def test_a_link_that_was_never_open_is_closed_without_a_word(tmp_path):
    await Site(str(tmp_path / "gone.sock"), tmp_path).link.close()


async def test_a_closed_link_leaves_no_file_open(agent, tmp_path):
    async with opened(agent, tmp_path) as site:
        path = str(tmp_path / phase_files.FILE)
        assert path in files_open()
    assert path not in files_open()
    await site.link.close()


def files_open() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


async def test_life_is_shown_each_second_less_a_little_and_numbers_at_each_beat(agent, tmp_path, monkeypatch):
    """Beats are 0.45 s apart on this clock."""
    beats = 0

    def moved() -> list[Number]:
        nonlocal beats
        beats += 1
        return [("beats", (), float(min(beats, 6)))]

    monkeypatch.setattr(agent_link, "monotonic", lambda: beats * 0.45)
    site = Site(agent.socket, tmp_path, flush_s=0.0)
    monkeypatch.setattr(site.link, "_numbers", moved)
    await site.link.open()
    await agent.until(lambda: len(agent.of("counters")) == 6 and len(agent.of("progress")) >= 4)
    await site.link.close(timeout_s=5.0)
    assert agent.kinds[2:11] == ["counters", "counters", "progress"] * 3


async def test_how_long_a_role_has_been_stuck_is_told_with_each_sign_of_life(agent, tmp_path, monkeypatch):
    """Beats are 1 s apart on this clock, but for one of 40: the process stood still."""
    beats = 0

    def beat() -> list[Number]:
        nonlocal beats
        beats += 1
        return []

    monkeypatch.setattr(agent_link, "monotonic", lambda: beats * 1.0 + 39.0 * (beats > 3))
    site = Site(agent.socket, tmp_path, flush_s=0.0)
    site.phases.enter("step")
    monkeypatch.setattr(site.link, "_numbers", beat)
    await site.link.open()
    await agent.until(lambda: len(agent.of("progress")) >= 10)
    await site.link.close(timeout_s=5.0)
    said = [(p.stuck_s, p.still_s, bool(p.doing)) for p in agent.of("progress")[1:9]]
    assert said == [(float(n), float(n), n >= 5) for n in (1, 2, 3, 5, 6, 7, 8, 9)]
