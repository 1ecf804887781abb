"""What a worker says that it does while it stands still: a phase has the deadline of what is done in it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import FileCheckpoints
from rlinf_worker.phases import Phases
from rlinf_worker.runtime.context import Context
from rlinf_worker.settings import Settings
from rlinf_worker.spans import Recorder


def context_of(phases: Phases, *, uri: str, rank: int = 0) -> Context:
    identity = SimpleNamespace(
        worker=f"actor/{rank}", role="actor", rank=rank, attempt=1, config={}, pool="gpu", slots=(0,)
    )

    async def ready(**said: Any) -> PolicyVersion:
        session.seen.append((phases.phase, said["highest_branch"]))
        return PolicyVersion(4, 0)

    steps = SimpleNamespace(saved=None, not_saved=None)
    session = SimpleNamespace(
        flow=SimpleNamespace(), checkpoint_uri=uri, checkpoint_keep=3, steps=steps, ready=ready, seen=[]
    )
    parts = {"phases": phases, "recorder": Recorder(), "turns": None, "stopping": None}
    return Context(cast(Any, identity), cast(Any, session), **cast(Any, parts))


@pytest.fixture
def phases() -> Phases:
    return Phases(Settings())


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_slow_disk_of_checkpoints_has_the_time_of_loading(tmp_path, phases, monkeypatch, rank):
    """And not the 20 s of a worker that only waits: each recovery would end in the next one."""
    names, opened, done = FileCheckpoints._names, FileCheckpoints.opened, []

    def slow_names(self: FileCheckpoints) -> list[str]:
        done.append((phases.phase, phases.deadline_s()))
        return names(self)

    def slow_opened(self: FileCheckpoints, branch: int) -> None:
        done.append((phases.phase, phases.deadline_s()))
        opened(self, branch)

    monkeypatch.setattr(FileCheckpoints, "_names", slow_names)
    monkeypatch.setattr(FileCheckpoints, "opened", slow_opened)
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
        ("compute", "start", None, "start"),  # its deadline is later than that of a step
        ("compute", "idle", None, "idle"),
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


async def test_a_span_of_work_has_the_deadline_of_the_steps_before_it(phases):
    ctx = context_of(phases, uri="")
    ctx.phase("idle")
    for _ in range(3):
        phases.note_step(60.0)
    with ctx.span("compute", step=4):
        assert (phases.phase, phases.deadline_s()) == ("step", 600.0)
    assert phases.deadline_s() == Settings().idle_deadline_s
