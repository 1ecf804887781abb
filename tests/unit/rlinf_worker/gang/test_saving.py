"""What becomes of a save: one that has no room costs itself, the last one is waited for, a sharded one goes beside."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints, CheckpointUnwritable, Writer
from rlinf_worker.clock import Clock
from rlinf_worker.gang import saving
from rlinf_worker.gang.saving import Saving
from rlinf_worker.roles.protocol import RoleContext, StepCommit, Trainer, TrainerStep
from rlinf_worker.settings import Settings
from tests.fakes.context import FakeContext, FakeGang, Stage

AT = 1 << 40


class OwnError(Exception):
    """As safetensors' of a full disk."""


class Context(FakeContext):
    """`told`: the problems; `saved`: the versions."""

    def __init__(self, folder: Path, *, rank: int = 0, world: int = 1) -> None:
        super().__init__(Stage(), "actor", {})
        self.rank, self.world = rank, world
        self.told, self.saved = list[str](), list[str]()
        self.store = Checkpoints(
            str(folder),
            on_saved=lambda version, _: self.saved.append(str(version)),
            on_failed=lambda _, problem: self.told.append(problem),
        )

    @property
    def checkpoints(self) -> Checkpoints:
        return self.store


class Disk(Trainer):
    """Full for so many tries to write. `threads`: where it wrote."""

    failures = (OwnError,)

    def __init__(self, *, full: int = 0, error: Exception | None = None) -> None:
        self.full, self.error = full, error or OSError(28, "No space left on device")
        self.threads = list[threading.Thread]()

    async def build(self, ctx: RoleContext) -> None: ...

    async def train(self, step: TrainerStep) -> Mapping[str, float]:
        return {}

    def write(self, folder: Path, state: Any) -> None:
        self.threads.append(threading.current_thread())
        (folder / "model").write_text("half")
        if self.full:
            self.full -= 1
            raise self.error


def commit(step: int = 7, *, last: bool = False) -> StepCommit:
    return StepCommit(step=step, version=PolicyVersion(0, step), checkpoint=True, state_json="{}", last=last)


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    return Context(tmp_path)


@pytest.fixture(params=[OSError(28, "No space left on device"), OwnError("No space left on device")], ids=type)
def disk_of(request, monkeypatch) -> Callable[[int], Disk]:
    monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_S", 0.0)
    return lambda full: Disk(full=full, error=request.param)


async def test_training_goes_on_without_a_checkpoint_that_has_no_room(ctx, disk_of):
    saves = Saving(disk_of(1), ctx, at=AT, clock=monotonic)
    await saves.save(commit())
    assert ctx.store.latest() is None
    assert len(ctx.told) == 1
    assert "No space left" in ctx.told[0]
    await saves.save(commit())
    assert ctx.saved == ["b0-7"]


async def test_the_last_checkpoint_is_tried_until_there_is_room(ctx, disk_of):
    await Saving(disk_of(3), ctx, at=AT, clock=monotonic).save(commit(last=True))
    assert (ctx.saved, len(ctx.told)) == (["b0-7"], 3)


async def test_the_last_checkpoint_is_not_tried_for_ever(ctx, disk_of, monkeypatch):
    disk = disk_of(10**6)
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.0)
    with pytest.raises(CheckpointUnwritable) as error:
        await Saving(disk, ctx, at=AT, clock=monotonic).save(commit(last=True))
    assert str(error.value) == (
        f"the last checkpoint, b0-7, cannot be written: got {disk.error}, wanted room for it within 0 s; look at the "
        "place in spec.checkpoint.uri"
    )
    assert error.value.__cause__ is disk.error
    assert len(ctx.told) == 1


async def test_what_the_store_itself_says_of_it_is_said_as_it_is(ctx, monkeypatch):
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.0)
    disk = Disk(full=1, error=CheckpointUnwritable("a sentence of the store"))
    with pytest.raises(CheckpointUnwritable, match=r"^a sentence of the store$"):
        await Saving(disk, ctx, at=AT, clock=monotonic).save(commit(last=True))


async def test_the_last_checkpoint_is_tried_for_less_than_a_driver_waits_and_a_phase_may_last(
    ctx, disk_of, monkeypatch
):
    now, pauses = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 20.0

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_S", 0.25)
    with pytest.raises(CheckpointUnwritable):
        await Saving(disk_of(10**6), ctx, at=AT, clock=lambda: now[0]).save(commit(last=True))
    assert (pauses, len(ctx.told)) == ([0.25] * 5, 6)
    assert Settings().load_deadline_s > saving.LAST_SAVE_S


async def test_a_pause_of_the_machine_is_no_time_for_trying(ctx, disk_of, monkeypatch):
    now, pauses = 100.0, [0.5, saving.LAST_SAVE_S]

    async def sleep(_: float) -> None:
        nonlocal now
        now += pauses.pop()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await Saving(disk_of(2), ctx, at=AT, clock=Clock(notice_s=1.0, raw=lambda: now)).save(commit(last=True))
    assert (ctx.saved, len(ctx.told)) == (["b0-7"], 2)


async def test_what_nobody_names_as_a_failure_ends_the_role(ctx):
    with pytest.raises(ZeroDivisionError):
        await Saving(Disk(full=1, error=ZeroDivisionError("a bug")), ctx, at=AT, clock=monotonic).save(commit())


async def test_the_event_loop_goes_on_while_a_disk_is_written_to(ctx):
    disk = Disk()
    await Saving(disk, ctx, at=AT, clock=monotonic).save(commit())
    assert disk.threads != [threading.main_thread()]
    assert disk.threads[0].daemon, "nobody who has to end waits for it"


# --- sharded ----------------------------------------------------------------------------------------------------------
class Shards(Disk):
    """Writes when it may. `busy`: how many write at once, at most."""

    sharded = True
    holds_collectives = False

    def __init__(self, *, rank: int = 0, **disk: Any) -> None:
        super().__init__(**disk)
        self.rank, self.value, self.busy, self._now = rank, 0, 0, 0
        self.begun, self.may = threading.Event(), threading.Event()

    def state(self) -> dict[str, int]:
        return {"value": self.value}

    def write(self, folder: Path, state: dict[str, int]) -> None:
        self._now += 1
        self.busy = max(self.busy, self._now)
        self.begun.set()
        assert self.may.wait(10)
        self._now -= 1
        super().write(folder, state)
        (folder / "model").rename(folder / f"rank-{self.rank}").write_text(str(state["value"]))


async def test_a_sharded_one_is_written_beside_the_steps_as_it_was_in_its_own(ctx, tmp_path):
    trainer = Shards()
    trainer.value = 7
    saves = Saving(trainer, ctx, at=AT, clock=monotonic)
    await saves.save(commit())
    await asyncio.to_thread(trainer.begun.wait, 10)
    trainer.value = 8  # the next step
    saves.look()
    assert ctx.saved == []
    trainer.may.set()
    await saves.save(commit(8, last=True))
    assert ctx.saved == ["b0-7", "b0-8"]
    assert [(tmp_path / f"b0-{n}" / "actor" / "rank-0").read_text() for n in (7, 8)] == ["7", "8"]


async def test_one_is_under_way_at_most_and_the_next_waits_for_it(ctx):
    trainer = Shards()
    saves = Saving(trainer, ctx, at=AT, clock=monotonic)
    await saves.save(commit())
    second = asyncio.ensure_future(saves.save(commit(8)))
    await asyncio.to_thread(trainer.begun.wait, 10)
    await asyncio.sleep(0.02)
    assert not second.done()
    trainer.may.set()
    await second
    await saves.save(commit(9, last=True))
    assert (ctx.saved, trainer.busy) == (["b0-7", "b0-8", "b0-9"], 1)
    assert ctx.phases[-1] == "load", "and all of that is in the phase whose deadline is for it"


async def test_a_sharded_one_that_has_no_room_is_told_and_costs_itself(ctx):
    trainer = Shards(full=1)
    trainer.may.set()
    saves = Saving(trainer, ctx, at=AT, clock=monotonic)
    for step in (7, 8):
        await saves.save(commit(step))
    await saves.save(commit(9, last=True))
    assert (ctx.saved, [problem[-24:] for problem in ctx.told]) == (["b0-8", "b0-9"], [" No space left on device"])


async def test_a_bug_in_what_is_beside_ends_the_role_at_the_next_step(ctx):
    trainer = Shards(full=1, error=ZeroDivisionError("a bug"))
    trainer.may.set()
    saves = Saving(trainer, ctx, at=AT, clock=monotonic)
    await saves.save(commit())
    assert saves._beside is not None
    await asyncio.wait([saves._beside], timeout=10)
    with pytest.raises(ZeroDivisionError):
        saves.look()


async def test_a_role_that_ends_waits_for_no_disk(ctx):
    trainer = Shards()
    saves = Saving(trainer, ctx, at=AT, clock=monotonic)
    await saves.save(commit())
    await asyncio.to_thread(trainer.begun.wait, 10)
    async with asyncio.timeout(5):
        await saves.leave()
    assert ctx.saved == []
    trainer.may.set()


class Meeting(FakeGang):
    """Of two ranks in one event loop."""

    world = 2

    def __init__(self, rank: int, words: dict[Any, dict[int, Any]]) -> None:
        super().__init__()
        self.rank, self._words = rank, words

    async def meet(self, place: Any, value: Any = None) -> list[Any]:
        self.places.append(place)
        said = self._words.setdefault(place, {})
        said[self.rank] = value
        async with asyncio.timeout(10):
            while len(said) < self.world:
                await asyncio.sleep(0)
        return [said[0], said[1]]


def two(folder: Path, *, full: int, of: int) -> list[tuple[Saving, Context]]:
    words: dict[Any, dict[int, Any]] = {}
    found = []
    for rank in (0, 1):
        ctx, trainer = Context(folder, rank=rank, world=2), Shards(rank=rank, full=full if rank == of else 0)
        ctx.gang = Meeting(rank, words)
        trainer.may.set()
        found.append((Saving(trainer, ctx, at=AT, clock=monotonic), ctx))
    return found


@pytest.mark.parametrize("of", [0, 1])
async def test_all_ranks_try_the_last_one_again_where_one_has_no_room(tmp_path, monkeypatch, of):
    monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_S", 0.0)
    ranks = two(tmp_path, full=2, of=of)
    await asyncio.gather(*(saves.save(commit(last=True)) for saves, _ in ranks))
    saved = [version for _, ctx in ranks for version in ctx.saved]
    assert saved in (["b0-7"], ["b0-7"] * 2), "who closed the last part tells of it, or both who did so at once"
    problem = "[Errno 28] No space left on device"
    assert [ctx.told for _, ctx in ranks] == [[problem] * 2] * 2, "in the same words, which is one event"
    places = [place for place in ranks[0][1].gang.places if place is not None]
    assert places == sorted(set(places)), "each comes behind the one before"
    found = ranks[0][1].store.latest()
    assert found is not None
    assert found.files == {"rank-0": 1, "rank-1": 1}


async def test_ranks_of_which_one_finds_no_room_in_time_all_give_up(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.0)
    ranks = two(tmp_path, full=10**6, of=1)
    ended = await asyncio.gather(*(saves.save(commit(last=True)) for saves, _ in ranks), return_exceptions=True)
    assert all(isinstance(error, CheckpointUnwritable) for error in ended)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_rank_of_several_writes_its_own_part(ctx):
    ctx.rank, ctx.world = 1, 3
    assert Saving(Shards(), ctx, at=AT, clock=monotonic)._writer == Writer(1, 3)
    assert Saving(Disk(), ctx, at=AT, clock=monotonic)._writer == Writer(0, 1)
