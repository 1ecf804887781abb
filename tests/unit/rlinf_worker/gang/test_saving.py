"""What the step loop does where a checkpoint cannot be written: it goes on, and for the last one it waits."""

import asyncio
import time
from pathlib import Path

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints, CheckpointUnwritable
from rlinf_worker.gang import steps
from rlinf_worker.roles.protocol import StepCommit
from rlinf_worker.settings import Settings

VERSION = PolicyVersion(0, 7)


class OwnError(Exception):
    """As safetensors' of a full disk."""


class Disk:
    """Full for so many tries to write."""

    def __init__(self, folder: Path, *, full: int, error: Exception) -> None:
        self.full, self.error, self.told = full, error, list[str]()
        self.store = Checkpoints(str(folder), on_failed=lambda _, problem: self.told.append(problem))

    def write(self, folder: Path) -> None:
        (folder / "model").write_text("half")
        if self.full:
            self.full -= 1
            raise self.error

    async def save(self, *, last: bool = False) -> None:
        commit = StepCommit(step=7, version=VERSION, checkpoint=True, state_json="{}", last=last)
        await steps.save(self.store, commit, self.write, failures=(OwnError,))

    @property
    def latest(self) -> PolicyVersion | None:
        found = self.store.latest()
        return found.version if found is not None else None


@pytest.fixture(params=[OSError(28, "No space left on device"), OwnError("No space left on device")], ids=type)
def disk_of(request, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LAST_SAVE_PAUSE_S", 0.0)
    return lambda full: Disk(tmp_path, full=full, error=request.param)


async def test_training_goes_on_without_a_checkpoint_that_has_no_room(disk_of):
    disk = disk_of(1)
    await disk.save()
    assert disk.latest is None
    assert len(disk.told) == 1
    assert "No space left" in disk.told[0]
    await disk.save()
    assert disk.latest == VERSION


async def test_the_last_checkpoint_is_tried_until_there_is_room(disk_of):
    disk = disk_of(3)
    await disk.save(last=True)
    assert disk.latest == VERSION
    assert len(disk.told) == 3


async def test_the_last_checkpoint_is_not_tried_for_ever(disk_of, monkeypatch):
    disk = disk_of(10**6)
    monkeypatch.setattr(steps, "LAST_SAVE_S", 0.0)
    with pytest.raises(CheckpointUnwritable) as error:
        await disk.save(last=True)
    assert str(error.value) == (
        f"the last checkpoint, b0-7, cannot be written: got {disk.error}, wanted room for it within 0 s; look at the "
        "volume in spec.checkpoint.uri"
    )
    assert error.value.__cause__ is disk.error
    assert len(disk.told) == 1


async def test_what_the_store_itself_says_of_it_is_said_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "LAST_SAVE_S", 0.0)
    disk = Disk(tmp_path, full=1, error=CheckpointUnwritable("a sentence of the store"))
    with pytest.raises(CheckpointUnwritable, match=r"^a sentence of the store$"):
        await disk.save(last=True)


async def test_the_last_checkpoint_is_tried_for_less_than_a_driver_waits_and_a_phase_may_last(disk_of, monkeypatch):
    now, pauses = [100.0], list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += 20.0

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(steps, "LAST_SAVE_PAUSE_S", 0.25)
    disk = disk_of(10**6)
    with pytest.raises(CheckpointUnwritable):
        await disk.save(last=True)
    assert (pauses, len(disk.told)) == ([0.25] * 5, 6)
    assert Settings().load_deadline_s > steps.LAST_SAVE_S


async def test_what_nobody_names_as_a_failure_ends_the_role(disk_of):
    disk = disk_of(1)
    disk.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await disk.save()
