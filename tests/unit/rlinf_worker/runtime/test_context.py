"""What a worker says that it does while it stands still: a phase has the deadline of what is done in it."""

import asyncio
import contextlib
import threading
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, call

import pytest

from rlinf_api.errors import UserError
from rlinf_api.names import WorkerId
from rlinf_worker.channels.protocol import ChannelClosed, PolicyVersion
from rlinf_worker.channels.waiting import Waits
from rlinf_worker.checkpoints.folder import Folder
from rlinf_worker.checkpoints.store import Checkpoints
from rlinf_worker.phases import Phases
from rlinf_worker.roles.protocol import FlowSettings
from rlinf_worker.runtime import context as contexts
from rlinf_worker.runtime.context import Context
from rlinf_worker.runtime.identity import WorkerIdentity
from rlinf_worker.runtime.work import Work
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder
from rlinf_worker.sums import Amount


def context_of(phases: Phases, *, uri: str, rank: int = 0) -> Context:
    identity = SimpleNamespace(
        worker=f"actor/{rank}",
        role="actor",
        rank=rank,
        attempt=1,
        config={},
        pool="gpu",
        slots=(1,),
        own_devices=("GPU-2b",),
    )

    async def ready(**said: Any) -> PolicyVersion:
        session.seen.append((phases.phase, said["highest_branch"]))
        return PolicyVersion(4, 0)

    steps = SimpleNamespace(saved=None, not_saved=None, ready=ready, of_job=0, kept=0)
    session = SimpleNamespace(
        flow=SimpleNamespace(),
        checkpoint_uri=uri,
        checkpoint_keep=3,
        gangs=("actor",),
        steps=steps,
        on_device=lambda: None,
        seen=[],
    )
    work = Work(waits=Waits(), phases=phases, moves=lambda: None)
    parts = {
        "phases": phases,
        "work": work,
        "recorder": Recorder(),
        "turns": None,
        "clock": monotonic,
        "stopping": None,
    }
    return Context(cast(Any, identity), cast(Any, session), **cast(Any, parts))


@pytest.fixture
def phases() -> Phases:
    return Phases(Settings())


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_slow_disk_of_checkpoints_has_the_time_of_loading(tmp_path, phases, monkeypatch, rank):
    """And not the 20 s of a worker that only waits: each recovery would end in the next one."""
    names, opened, done = Folder.top, Checkpoints.opened, []

    def slow_names(self: Folder) -> list[str]:
        done.append((phases.phase, phases.deadline_s()))
        return names(self)

    def slow_opened(self: Checkpoints, branch: int) -> None:
        done.append((phases.phase, phases.deadline_s()))
        opened(self, branch)

    monkeypatch.setattr(Folder, "top", slow_names)
    monkeypatch.setattr(Checkpoints, "opened", slow_opened)
    (tmp_path / ".b3.opened").touch()
    ctx = context_of(phases, uri=str(tmp_path), rank=rank)
    ctx.checkpoints.latest()
    done.clear()
    assert await ctx.ready() == PolicyVersion(4, 0)
    assert set(done) == {("load", Settings().load_deadline_s)}
    assert ctx._session.seen == [("ready", 3)]  # type: ignore[attr-defined]
    assert phases.phase == "step"
    marks = [path.name for path in tmp_path.iterdir()]
    assert marks == [".b4.opened" if rank == 0 else ".b3.opened"]


async def test_the_loop_runs_on_while_the_disk_of_checkpoints_is_slow(tmp_path, phases, monkeypatch):
    names, loop, may = Folder.top, asyncio.get_running_loop(), threading.Event()

    def slow_names(self: Folder) -> list[str]:
        loop.call_soon_threadsafe(loop.call_later, 0.01, may.set)
        assert may.wait(10), "the loop stands still"
        may.clear()
        return names(self)

    ctx = context_of(phases, uri=str(tmp_path))
    ctx.checkpoints.latest()
    monkeypatch.setattr(Folder, "top", slow_names)
    assert await ctx.ready() == PolicyVersion(4, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".b4.opened"]


async def test_a_worker_without_checkpoints_goes_from_ready_to_work(phases):
    ctx, seen = context_of(phases, uri=""), list[str]()
    phases.on_change = lambda: seen.append(phases.phase)
    await ctx.ready()
    assert seen == ["ready", "step"]


@pytest.mark.parametrize(
    ("kind", "declared", "phase", "within"),
    [
        ("load", "step", None, "load"),
        ("offload", "step", None, "load"),
        ("compute", "compile", None, "compile"),  # its deadline is later than that of a step
        ("compute", "start", None, "step"),
        ("weights", "load", None, "load"),
        ("other", "step", None, "step"),
        ("other", "step", "load", "load"),
    ],
)
async def test_a_span_says_what_phase_it_is(phases, kind: Any, declared, phase, within):
    """So no role can forget it before something that blocks."""
    ctx = context_of(phases, uri="")
    ctx.phase(declared)
    with ctx.span(kind, step=1, phase=phase):
        assert phases.phase == within
    assert phases.phase == declared


async def test_the_first_span_of_work_has_the_time_to_compile_and_each_its_own_where_it_says_so(phases):
    ctx, settings = context_of(phases, uri=""), Settings()
    ctx.phase("step")
    for deadline_s in (settings.first_step_deadline_s, settings.step_deadline_min_s):
        with ctx.span("compute"):
            assert (phases.phase, phases.deadline_s()) == ("step", deadline_s)
    for kind in ("compute", "other"):
        with ctx.span(kind, deadline_s=700.0):
            assert (phases.phase, phases.deadline_s()) == ("step", 700.0)
    assert phases.deadline_s() == settings.step_deadline_min_s


async def test_a_span_of_work_has_the_deadline_of_the_steps_before_it(phases):
    ctx = context_of(phases, uri="")
    ctx.phase("idle")
    for _ in range(3):
        phases.note_step(60.0)
    with ctx.span("compute", step=4):
        assert (phases.phase, phases.deadline_s()) == ("step", 600.0)
    assert phases.deadline_s() == Settings().idle_deadline_s


class Parts:
    """A session whose parts listen, behind a context."""

    def __init__(self, phases: Phases, *, uri: str = "") -> None:
        self.identity = WorkerIdentity(
            worker=WorkerId("actor/1"), role="actor", kind="fsdp", rank=1, world=2, attempt=3, config={"a": 1},
            pool="gpu", slots=(2,), devices=("GPU-1a", "GPU-2b", "GPU-3c", "GPU-4d"),
        )  # fmt: skip
        self.session: Any = Mock(
            flow=FlowSettings(name="ppo", steps=3, seed=1, max_staleness=0, order="arrival", config={}),
            queues={"units": Mock(), "tasks": Mock()}, askers={"actions": Mock()}, answerers={"calls": Mock()},
            checkpoint_uri=uri, checkpoint_keep=5, highest_branch=4,
        )  # fmt: skip
        self.session.replans = Mock(world=7, stages=lambda name: {"actions": 2}[name])
        self.recorder, self.turns, self.stopping = Recorder(), Mock(), asyncio.Event()
        self.work = Work(waits=Waits(), phases=phases, moves=lambda: None)
        self.ctx = Context(
            self.identity, self.session, phases=phases, work=self.work, recorder=self.recorder, turns=self.turns,
            clock=monotonic, stopping=self.stopping,
        )  # fmt: skip


async def test_a_role_finds_itself_and_its_flow(phases):
    parts = Parts(phases)
    ctx = parts.ctx
    assert (ctx.worker, ctx.role, ctx.rank, ctx.world, ctx.attempt) == ("actor/1", "actor", 1, 7, 3)
    assert (ctx.config, ctx.pool, ctx.slots, ctx.stages("actions")) == ({"a": 1}, "gpu", (2,), 2)
    assert ctx.devices == ("GPU-3c",)
    assert (ctx.flow, ctx.stopping) == (parts.session.flow, parts.stopping)
    assert (ctx.weights, ctx.gang) == (parts.session.weights, parts.session.gang)


async def test_a_role_finds_the_ends_that_its_flow_declares_and_hears_of_those_where_it_does_not(phases):
    parts = Parts(phases)
    ctx, session = parts.ctx, parts.session
    assert ctx.channel("units") is session.queues["units"]
    assert ctx.asking("actions") is session.askers["actions"]
    assert ctx.answering("calls") is session.answerers["calls"]
    for find, words in (
        (ctx.channel, "role 'actor' is at no end of queue 'x': got 'x', wanted one of units, tasks; look at what flow"),
        (ctx.asking, "role 'actor' asks in no cycle 'x': got 'x', wanted one of actions; look at what flow 'ppo'"),
        (ctx.answering, "role 'actor' answers in no cycle 'x': got 'x', wanted one of calls; look at what flow 'ppo'"),
    ):
        with pytest.raises(UserError, match=words):
            find("x")
    session.queues.clear()
    with pytest.raises(UserError, match="wanted a flow that gives it one"):
        ctx.channel("units")


async def test_facts_are_shared_by_the_session(phases):
    parts = Parts(phases)
    parts.session.facts.shared = AsyncMock(return_value=3)
    parts.ctx.share("shape", [1])
    assert await parts.ctx.shared("shape") == 3
    assert parts.session.facts.share.mock_calls == [call("shape", [1])]
    assert parts.session.facts.shared.mock_calls == [call("shape")]


async def test_checkpoints_are_in_the_sessions_place_and_told_to_its_steps(phases, monkeypatch):
    parts, made = Parts(phases, uri="/c"), Mock()
    monkeypatch.setattr(contexts, "Checkpoints", made)
    assert parts.ctx.checkpoints is parts.ctx.checkpoints
    [made_with] = made.mock_calls
    told = {name: made_with.kwargs[name] for name in ("on_saved", "on_failed")}
    assert made_with == call("/c", role="actor", roles=parts.session.gangs, keep=5, moved=parts.ctx.moved, **told)
    steps, order = parts.session.steps, list[Any]()
    steps.saved.side_effect = lambda *said: order.append((threading.current_thread(), *said))
    steps.not_saved.side_effect = steps.saved.side_effect
    for tell, words in (("on_failed", "no room"), ("on_saved", "/c/b0-1")):
        await asyncio.to_thread(told[tell], PolicyVersion(0, 1), words)
    await asyncio.sleep(0)
    here = threading.main_thread()
    assert order == [(here, PolicyVersion(0, 1), "no room"), (here, PolicyVersion(0, 1), "/c/b0-1")]


async def test_readiness_comes_after_the_links_have_seen_the_gpu_and_with_what_was_restored(phases):
    parts, order = Parts(phases), list[Any]()
    parts.session.on_device.side_effect = lambda: order.append("on device")

    async def ready(**said: Any) -> PolicyVersion:
        order.append(said)
        return PolicyVersion(1, 4)

    parts.session.steps.ready = ready
    assert await parts.ctx.ready(version=PolicyVersion(1, 3)) == PolicyVersion(1, 4)
    assert order == ["on device", {"version": PolicyVersion(1, 3), "highest_branch": 0, "state_json": ""}]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_step_is_done_with_what_ended_early_in_all_queues_and_ends_the_turns_term(phases, is_lost):
    parts = Parts(phases)
    for name, ended in (("units", ["a"]), ("tasks", ["b", "c"])):
        parts.session.queues[name].into.ended.take.return_value = ended
    commit: Any = Mock()
    parts.session.steps.done = AsyncMock(return_value=commit, side_effect=ChannelClosed("x") if is_lost else None)
    doing = parts.ctx.step_done(7, branch=2, keys=("k",), metrics={"loss": 1.0})
    if is_lost:
        with pytest.raises(ChannelClosed):
            await doing
    else:
        assert await doing is commit
    told = call(7, branch=2, keys=("k",), metrics={"loss": 1.0}, ended=["a", "b", "c"])
    assert parts.session.steps.done.mock_calls == [told]
    assert parts.session.queues["units"].into.ended.take.mock_calls == [call(7, branch=2)]
    assert [(span.kind, span.step) for span in parts.recorder.flush()] == [("comm", 7)]
    assert parts.turns.step_ended.call_count == (0 if is_lost else 1)


async def test_an_edit_of_the_job_moves_the_flows_steps_and_the_checkpoints_that_are_kept(phases, tmp_path):
    parts = Parts(phases, uri=str(tmp_path))
    parts.session.steps = Mock(of_job=9, kept=2, done=AsyncMock(), ready=AsyncMock(return_value=PolicyVersion(0, 0)))
    parts.session.queues, parts.session.gangs = {}, ()
    assert parts.ctx.checkpoints.keep == 5
    await parts.ctx.ready()
    assert (parts.ctx.flow.steps, parts.ctx.checkpoints.keep) == (9, 2)
    parts.session.steps.of_job, parts.session.steps.kept = 12, 1
    await parts.ctx.step_done(1, branch=0, keys=(), metrics={})
    assert (parts.ctx.flow.steps, parts.ctx.checkpoints.keep) == (12, 1)
    parts.session.steps.of_job = parts.session.steps.kept = 0
    await parts.ctx.step_done(2, branch=0, keys=(), metrics={})
    assert (parts.ctx.flow.steps, parts.ctx.checkpoints.keep) == (12, 1), "a driver from before says nothing"


async def test_numbers_are_reported_on_the_newest_branch(phases):
    parts = Parts(phases)
    parts.ctx.report(step=3, metrics={"a": 1.0}, key="k")
    parts.ctx.report(step=4, metrics={})
    assert parts.session.steps.report.mock_calls == [
        call(step=3, branch=4, metrics={"a": 1.0}, key="k"), call(step=4, branch=4, metrics={}, key=""),
    ]  # fmt: skip


async def test_in_a_turn_the_links_look_for_the_gpu_and_a_safe_point_is_the_turns(phases):
    parts, order = Parts(phases), list[str]()

    @contextlib.asynccontextmanager
    async def turn():
        order.append("taken")
        yield
        order.append("given")

    parts.turns.turn, parts.turns.safe_point = turn, AsyncMock()
    parts.session.on_device.side_effect = lambda: order.append("on device")
    async with parts.ctx.turn():
        order.append("work")
    assert order == ["taken", "on device", "work", "given"]
    await parts.ctx.safe_point()
    assert parts.turns.safe_point.await_count == 1


async def test_a_phase_may_have_a_deadline_of_its_own(phases):
    parts = Parts(phases)
    parts.ctx.phase("compile", deadline_s=77.0)
    assert (phases.phase, phases.deadline_s()) == ("compile", 77.0)


async def test_only_what_computes_counts_for_the_deadline_of_a_step_and_a_span_ends_with_its_error(phases):
    parts, noted = Parts(phases), list[float]()
    phases.note_step = noted.append
    for kind in ("compute", "load"):
        with contextlib.suppress(ValueError), parts.ctx.span(kind, step=2):
            raise ValueError
    assert len(noted) == 1
    assert [(span.kind, span.step) for span in parts.recorder.flush()] == [("compute", 2), ("load", 2)]
    with parts.ctx.span("other"):
        pass
    assert [span.step for span in parts.recorder.flush()] == [-1]
    assert parts.recorder.open == set()


async def test_a_span_tells_how_much_it_worked_on_as_it_is_known_in_the_end(phases):
    parts = Parts(phases)
    with parts.ctx.span("compute", step=2, units=8) as amount:
        amount.tokens = 64
    with parts.ctx.span("compute", step=2):
        pass
    with parts.ctx.span("weights", step=2):
        pass
    assert [span.amount for span in parts.recorder.flush()] == [Amount(units=8, tokens=64), None, None]
    sums = parts.recorder.sums.take(2, 0)
    assert {size: found.tokens for size, found in sums.batches.items()} == {8: 64, 0: 0}
    assert {what: found.count for what, found in sums.moves.items()} == {"publish": 1}


async def test_a_trainer_runs_through_the_step_loop(phases, monkeypatch):
    loop = Mock()
    loop.return_value.run = AsyncMock()
    monkeypatch.setattr(contexts, "StepLoop", loop)
    parts, trainer = Parts(phases), Mock()
    await parts.ctx.train(trainer)
    assert loop.mock_calls[0] == call(trainer, parts.ctx, clock=monotonic)
    assert loop.return_value.run.await_count == 1
