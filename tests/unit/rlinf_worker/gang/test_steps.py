"""The step loop with a context in memory: what comes before what, and what a stale branch or a restore changes."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import ChannelClosed, Item, PolicyVersion, Round
from rlinf_worker.checkpoints.folder import Folder
from rlinf_worker.checkpoints.store import READ_BYTES_PER_S, Checkpoint, Writer, parse_name
from rlinf_worker.gang import steps as loop
from rlinf_worker.roles.protocol import Place, RoleContext, StepCommit, Trainer, TrainerStep
from tests.fakes.context import FakeChannel, FakeContext, FakeGang, Stage


class Script(FakeChannel):
    """Rounds as a test gives them; then the channel ends. `said` is the context's."""

    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__(name)
        self.rounds: list[Round] = []
        self._said = said

    def round(self, step: int, *keys: str, branch: int = 0, last: bool = False) -> None:
        items = tuple(self.give(key, {"of": key}, step=step, branch=branch) for key in keys)
        number = len(self.rounds) + 1
        self.rounds.append(
            Round(step=step, branch=branch, number=number, last=last, items=items, total_weight=float(len(items)))
        )

    def step(self, step: int, *keys: str, branch: int = 0) -> None:
        """All units in one round, and the end of the step."""
        self.round(step, *keys, branch=branch)
        self.round(step, branch=branch, last=True)

    async def take_round(self) -> Round:
        await asyncio.sleep(0)
        if not self.rounds:
            raise ChannelClosed(self.name)
        return self.rounds.pop(0)

    def ack(self, item: Item) -> None:
        super().ack(item)
        self._said.append(f"ack {item.key}")


class Store:
    def __init__(self, folder: Path, said: list[str]) -> None:
        self._folder, self._said = folder, said
        self.found: Checkpoint | None = None

    def keeps(self, version: PolicyVersion, *, files: Mapping[str, int] | None = None) -> None:
        place, at = Folder(self._folder.parent), self._folder.name
        self.found = Checkpoint(version=version, state_json="", files=files or {}, place=place, at=at)

    def latest(self) -> Checkpoint | None:
        return self.found

    def of(self, name: str) -> Checkpoint:
        version = parse_name(name)
        assert version is not None
        self.keeps(version)
        assert self.found is not None
        return self.found

    def begin(self, version: PolicyVersion, writer: Writer) -> Path:
        return self._folder

    def finish(self, version: PolicyVersion, state_json: str, writer: Writer) -> bool:
        self._said.append(f"saved {version.number}")
        return True

    def failed(self, version: PolicyVersion, problem: str, writer: Writer) -> None:
        raise AssertionError(problem)


class Ranks(FakeGang):
    """One of two; the other comes to every place, unless `held`."""

    rank, world = 0, 2

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said, self.held = said, asyncio.Event()
        self.held.set()

    async def form(self) -> None:
        self._said.append("form")

    async def meet(self, place: Place, value: Any = None) -> list[Any]:
        await super().meet(place, value)
        self._said.append(f"meet {place[:2]}")
        await self.held.wait()
        return [value, value]


class Context(FakeContext):
    """Says in which order all happens. Every third step is saved, and the last one, in which `drain` ends the job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Stage(), "actor", {})
        self.said: list[str] = []
        self.units, self.more = Script("units", self.said), Script("more", self.said)
        self._stage.channels |= {"units": self.units, "more": self.more}
        self.store, self.gang, self.world = Store(folder, self.said), Ranks(self.said), 2
        self.drain_at, self.branch = 0, 0
        self.commits = asyncio.Event()
        self.commits.set()
        self.keys: list[tuple[str, ...]] = []
        self.metrics: list[Mapping[str, float]] = []
        publish = self._stage.weights.publish

        async def said_publish(version: PolicyVersion, tensors: Any, **options: Any) -> None:
            self.said.append(f"publish {version.branch}.{version.number}")
            await publish(version, tensors, **options)

        self._stage.weights.publish = said_publish  # type: ignore[method-assign]

    @property
    def checkpoints(self) -> Any:
        return self.store

    async def ready(self, *, version: PolicyVersion | None = None) -> PolicyVersion:
        self.said.append(f"ready {version}")
        await super().ready()
        return PolicyVersion(self.branch, version.number if version else 0)

    async def step_done(
        self, step: int, *, branch: int, keys: tuple[str, ...], metrics: Mapping[str, float]
    ) -> StepCommit:
        self.said.append(f"done {step}")
        self.keys.append(keys)
        self.metrics.append(metrics)
        await self.commits.wait()
        self.said.append(f"commit {step}")
        last = step == self.drain_at
        if last:
            self.stopping.set()
        save = last or step % 3 == 0
        return StepCommit(step=step, version=PolicyVersion(branch, step), checkpoint=save, state_json="{}", last=last)

    async def safe_point(self, *, oldest: int | None = None) -> None:
        self.said.append("safe")


class Counter(Trainer):
    """Counts units."""

    inputs: Sequence[str] = ("units",)

    def __init__(self, ctx: Context) -> None:
        self._ctx, self.count = ctx, 0
        self.steps: list[TrainerStep] = []
        self.took: list[int] = []
        self.phases: dict[str, str] = {}

    async def build(self, ctx: RoleContext) -> None:
        self.phases["build"] = self._ctx.phases[-1]

    async def take(self, part: Round) -> None:
        self.took.append(len(part.items))

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        self._ctx.said.append(f"train {step.number}")
        self.steps.append(step)
        self.count += len(step.units)
        return {"count": float(self.count)}

    def weights(self, version: PolicyVersion) -> Mapping[str, Any] | None:
        return {"count": self.count}

    async def committed(self, version: PolicyVersion, *, publish_s: float) -> None:
        self._ctx.said.append(f"committed {version.number}")

    def state(self) -> int:
        return self.count

    def write(self, folder: Path, state: int) -> None:
        self.phases["write"] = self._ctx.phases[-1]
        (folder / "count").write_text(str(state))

    def read(self, folder: Path) -> int:
        self._ctx.said.append("read")
        return int((folder / "count").read_text())

    def restore(self, state: int | None) -> None:
        self._ctx.said.append(f"restore {state}")
        self.count = state or 0


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(tmp_path)


async def run(ctx: Context, trainer: Trainer) -> None:
    task = asyncio.ensure_future(ctx.train(trainer))
    async with asyncio.timeout(10):
        while ctx.units.rounds:
            await asyncio.sleep(0)
        ctx.stopping.set()
        await task


async def test_a_step_is_trained_committed_published_saved_acknowledged_in_this_order(ctx):
    ctx.units.step(3, "a:0@3", "b:0@3")
    trainer = Counter(ctx)
    await run(ctx, trainer)
    assert ctx.said == [
        "form", "ready None", "publish 0.0",
        "meet (0, 3)", "train 3", "done 3", "commit 3", "publish 0.3", "committed 3", "meet (0, 3)", "saved 3",
        "ack a:0@3", "ack b:0@3", "safe",
    ]  # fmt: skip
    assert ctx.gang.places == sorted(ctx.gang.places)
    assert trainer.took == [2]


async def test_a_trainer_that_returns_no_numbers_is_told_by_its_class(ctx):
    class Misspelt(Trainer):
        inputs = ("units",)

    ctx.units.step(1, "a:0@1")
    with pytest.raises(UserError, match=r"Misspelt.train returned no numbers: got NoneType None.*; define train, and"):
        await run(ctx, Misspelt())  # type: ignore[abstract]  # what nobody checked
    assert "done 1" not in ctx.said


async def test_nothing_is_shown_or_forgotten_before_every_rank_is_through(ctx):
    ctx.units.step(3, "a:0@3")
    ctx.commits.clear()
    task = asyncio.ensure_future(ctx.train(Counter(ctx)))
    async with asyncio.timeout(10):
        while "done 3" not in ctx.said:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert ctx.said[-1] == "done 3"
        assert ctx.units.acked == []
        ctx.commits.set()
        ctx.stopping.set()
        await task
    assert [item.key for item in ctx.units.acked] == ["a:0@3"]


async def test_an_update_waits_until_all_ranks_are_there(ctx):
    ctx.units.step(1, "a:0@1")
    ctx.gang.held.clear()
    trainer = Counter(ctx)
    task = asyncio.ensure_future(ctx.train(trainer))
    async with asyncio.timeout(10):
        while "meet (0, 1)" not in ctx.said:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert trainer.steps == []
        assert ctx.said[-1] == "meet (0, 1)"
        ctx.gang.held.set()
        ctx.stopping.set()
        await task
    assert len(trainer.steps) == 1


async def test_units_of_a_stale_branch_are_in_no_step(ctx):
    ctx.units.round(1, "a:0@1", "b:0@1")
    ctx.units.step(1, "b:0@1", "c:0@1", branch=1)
    trainer = Counter(ctx)
    await run(ctx, trainer)
    assert ctx.keys == [("b:0@1", "c:0@1")]
    assert {unit[0].branch for step in trainer.steps for unit in step.units} == {1}
    assert [(item.branch, item.key) for item in ctx.units.acked] == [(1, "b:0@1"), (1, "c:0@1")]


async def test_a_round_of_a_step_that_counts_already_is_left_out(ctx):
    """A new driver cannot know that this step's last round had come."""
    ctx.units.step(1, "a:0@1")
    ctx.units.step(1, "a:0@1")
    ctx.units.step(2, "a:0@2")
    await run(ctx, Counter(ctx))
    assert [line for line in ctx.said if line.startswith("commit ")] == ["commit 1", "commit 2"]


async def test_units_are_in_the_order_of_lineage_however_they_come(ctx):
    ctx.units.round(1, "env:2@1", "env:10@1")
    ctx.units.round(1, "env:1@1")
    ctx.units.round(1, last=True)
    trainer = Counter(ctx)
    await run(ctx, trainer)
    assert ctx.keys == [("env:1@1", "env:2@1", "env:10@1")]
    assert [payload["of"] for payload in trainer.steps[0].payloads] == ["env:1@1", "env:2@1", "env:10@1"]
    assert trainer.took == [2, 1]


async def test_a_restore_opens_the_step_after_the_saved_one(ctx, tmp_path):
    (tmp_path / "count").write_text("40")
    ctx.store.keeps(PolicyVersion(0, 6))
    ctx.branch = 1
    ctx.units.step(6, "a:0@6", branch=1)  # it is in the checkpoint
    ctx.units.step(7, "a:0@7", branch=1)
    trainer = Counter(ctx)
    await run(ctx, trainer)
    assert ctx.said[:6] == ["form", "read", "meet (-1, 0)", "restore 40", "ready b0-6", "publish 1.6"]
    assert [step.number for step in trainer.steps] == [7]
    assert trainer.count == 41


@pytest.mark.parametrize("sharded", [False, True])
async def test_the_loop_runs_on_while_a_checkpoint_is_read(ctx, tmp_path, sharded):
    """A worker gives signs of life however slow the place is."""
    may = threading.Event()

    class Slow(Counter):
        def read(self, folder: Path) -> int:
            assert may.wait(10), "the loop stands still"
            return 40

        def read_shards(self, saved: Checkpoint) -> None:
            self.count = self.read(Path())

    ctx.store.keeps(PolicyVersion(0, 6))
    trainer = Slow(ctx)
    trainer.sharded = sharded
    asyncio.get_running_loop().call_later(0.01, may.set)
    ctx.units.step(7, "a:0@7")
    await run(ctx, trainer)
    assert trainer.count == 41


async def test_who_reads_whole_files_by_itself_has_time_by_their_size(ctx, tmp_path):
    """Nobody sees how far it is."""
    (tmp_path / "count").write_text("40")
    ctx.store.keeps(PolicyVersion(0, 6), files={"model.npy": 9 * 10**9, "optimizer.npy": 10**9})
    ctx.units.step(7, "a:0@7")
    await run(ctx, Counter(ctx))
    assert ctx.deadlines == [10**10 / READ_BYTES_PER_S] == [pytest.approx(954, abs=1)]


@pytest.mark.parametrize(("collectives", "restored"), [(True, "restore None"), (False, "restore 40")])
async def test_who_reads_a_checkpoint(ctx, tmp_path, collectives, restored):
    """Rank 0 for all, where collectives spread it; else each for itself."""
    (tmp_path / "count").write_text("40")
    ctx.store.keeps(PolicyVersion(0, 6))
    ctx.rank = 1
    trainer = Counter(ctx)
    trainer.holds_collectives = collectives
    await run(ctx, trainer)
    assert restored in ctx.said
    assert ("read" in ctx.said) is not collectives


async def test_a_checkpoint_is_written_when_the_driver_says_so_and_at_the_drain(ctx):
    for step in range(1, 6):
        ctx.units.step(step, f"a:0@{step}")
    ctx.drain_at = 5
    await run(ctx, Counter(ctx))
    assert [line for line in ctx.said if line.startswith("saved")] == ["saved 3", "saved 5"]
    assert ctx.said[-1] == "ack a:0@5", "after the last step there is no safe point, nor another round"


async def test_only_rank_0_writes(ctx, tmp_path):
    ctx.units.step(3, "a:0@3")
    ctx.rank = 1
    await run(ctx, Counter(ctx))
    assert ctx.said.count("meet (0, 3)") == 2
    assert not (tmp_path / "count").exists()


async def test_loading_and_saving_have_the_deadline_of_loading(ctx):
    ctx.units.step(3, "a:0@3")
    trainer = Counter(ctx)
    await run(ctx, trainer)
    assert trainer.phases == {"build": "load", "write": "load"}
    assert ctx.phases[-1] == "step"


async def test_ranks_without_collectives_do_not_wait_for_each_other(ctx):
    ctx.units.step(3, "a:0@3")
    trainer = Counter(ctx)
    trainer.holds_collectives = False
    await run(ctx, trainer)
    assert ctx.gang.places == []
    assert "saved 3" in ctx.said


async def test_a_unit_of_several_inputs_is_one_unit(ctx):
    ctx.units.step(1, "a:0@1", "b:0@1")
    for key in ("b:0@1", "a:0@1"):
        ctx.more.give(key, {"of": f"more {key}"}, step=1)
    trainer = Counter(ctx)
    trainer.inputs = ("units", "more")
    await run(ctx, trainer)
    assert [[item.payload["of"] for item in unit] for unit in trainer.steps[0].units] == [
        ["a:0@1", "more a:0@1"],
        ["b:0@1", "more b:0@1"],
    ]
    assert [item.key for item in ctx.more.acked] == ["a:0@1", "b:0@1"]


@pytest.mark.parametrize("weights", [None, {}])
async def test_who_has_no_weights_publishes_none(ctx, monkeypatch, weights):
    ctx.units.step(1, "a:0@1")
    trainer = Counter(ctx)
    monkeypatch.setattr(trainer, "weights", lambda version: weights)
    await run(ctx, trainer)
    assert not [line for line in ctx.said if line.startswith("publish")]
    assert "committed 1" in ctx.said


async def test_where_the_time_of_a_step_went_adds_up(ctx, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])
    trainer = Counter(ctx)
    pieces = {"take": 2.0, "train": 4.0, "weights": 8.0}

    def timed(name: str) -> None:
        inner = getattr(trainer, name)

        def call(*args: Any) -> Any:
            now[0] += pieces[name]
            return inner(*args)

        monkeypatch.setattr(trainer, name, call)

    for name in pieces:
        timed(name)
    rounds = ctx.units.take_round

    async def slowly() -> Round:
        now[0] += 1.0
        found: Round = await rounds()
        return found

    monkeypatch.setattr(ctx.units, "take_round", slowly)
    for step in (1, 2):
        ctx.units.step(step, f"a:0@{step}")
    await run(ctx, trainer)
    assert [(m["collect_s"], m["update_s"]) for m in ctx.metrics] == [(2.0, 6.0)] * 2
    assert ctx.metrics[1]["count"] == 2.0


async def test_the_driver_hears_how_long_the_last_publish_took_and_the_trainer_too(ctx, monkeypatch):
    now, told = [100.0], list[float]()
    monkeypatch.setattr(loop, "perf_counter", lambda: now[0])
    trainer = Counter(ctx)

    def weights(version: PolicyVersion) -> Mapping[str, Any]:
        now[0] += 8.0
        return {"count": 1}

    async def committed(version: PolicyVersion, *, publish_s: float) -> None:
        told.append(publish_s)
        now[0] += 0.5

    monkeypatch.setattr(trainer, "weights", weights)
    monkeypatch.setattr(trainer, "committed", committed)
    for step in (1, 2):
        ctx.units.step(step, f"a:0@{step}")
    await run(ctx, trainer)
    assert (told, [m["publish_s"] for m in ctx.metrics]) == ([8.0, 8.0], [8.0, 8.5])


async def test_a_gang_meets_at_places_that_grow_with_the_step(ctx, tmp_path):
    (tmp_path / "count").write_text("40")
    ctx.store.keeps(PolicyVersion(0, 2))
    ctx.units.step(3, "a:0@3")
    await run(ctx, Counter(ctx))
    assert ctx.gang.places == [loop.RESTORE, (0, 3, loop.UPDATE), (0, 3, loop.SAVE)]
    assert loop.BEFORE_RESTORE < loop.RESTORE < (0, 0, 0) < (0, 3, 10**9) < (0, 3, loop.UPDATE) < (0, 3, loop.SAVE)


# --- sharded ----------------------------------------------------------------------------------------------------------
class Sharded(Counter):
    sharded = True

    def read_shards(self, saved: Checkpoint) -> None:
        self._ctx.said.append(f"read shards of {saved.version}")
        self.phases["read"] = self._ctx.phases[-1]

    def read(self, folder: Path) -> int:
        raise AssertionError("Must not be called!")

    def restore(self, state: int | None) -> None:
        raise AssertionError("Must not be called!")


@pytest.mark.parametrize("rank", [0, 1])
async def test_each_rank_reads_its_shards_of_the_checkpoint_on_which_rank_0_begins(ctx, rank):
    ctx.rank = rank
    ctx.store.keeps(PolicyVersion(0, 6))
    trainer = Sharded(ctx)
    await run(ctx, trainer)
    assert ctx.said[:5] == ["form", "meet (-1, 0)", "meet (-1, 0)", "read shards of b0-6", "ready b0-6"]
    assert ctx.gang.places == [loop.BEFORE_RESTORE, loop.RESTORE]
    assert trainer.phases["read"] == "load"


@pytest.mark.parametrize(("of_rank_0", "begun"), [("b0-3", "read shards of b0-3"), ("", "ready None")])
async def test_a_rank_that_has_seen_another_checkpoint_takes_that_of_rank_0(ctx, monkeypatch, of_rank_0, begun):
    """A rank of the gang before may have closed the last part after rank 0 had looked."""
    ctx.rank = 1
    ctx.store.keeps(PolicyVersion(0, 6))

    async def meet(place: Place, value: Any = None) -> list[Any]:
        return [of_rank_0, value]

    monkeypatch.setattr(ctx.gang, "meet", meet)
    await run(ctx, Sharded(ctx))
    assert ctx.said[1] == begun


async def test_every_rank_writes_its_shards_beside_the_steps_that_follow(ctx, tmp_path):
    """The save of step 3 is held up: steps 4 and 5 go by; step 6, the last, waits for it, and for its own."""
    for step in range(1, 7):
        ctx.units.step(step, f"a:0@{step}")
    ctx.rank, ctx.drain_at = 1, 6
    trainer, may = Sharded(ctx), threading.Event()
    write = trainer.write

    def held(folder: Path, state: int) -> None:
        assert may.wait(10)
        write(folder, state)

    trainer.write = held  # type: ignore[method-assign]
    task = asyncio.ensure_future(ctx.train(trainer))
    async with asyncio.timeout(10):
        while "commit 6" not in ctx.said:
            await asyncio.sleep(0)
        assert not [line for line in ctx.said if line.startswith("saved")]
        may.set()
        await task
    assert [line for line in ctx.said if line.startswith("saved")] == ["saved 3", "saved 6"]


async def test_a_bug_in_what_is_written_beside_ends_the_role_before_another_step(ctx):
    for step in range(1, 6):
        ctx.units.step(step, f"a:0@{step}")

    class Wrong(Sharded):
        def write(self, folder: Path, state: int) -> None:
            raise ZeroDivisionError("a bug")

        async def train(self, step: TrainerStep) -> Mapping[str, float]:
            while any(getattr(task.get_coro(), "__name__", "") == "_try" for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
            return await super().train(step)

    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError):
            await ctx.train(Wrong(ctx))
    assert "train 4" in ctx.said
    assert "train 5" not in ctx.said
