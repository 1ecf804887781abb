"""What the step loop does where a checkpoint cannot be written: it goes on, and for the last one it waits."""

from pathlib import Path

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import CheckpointUnwritable, FileCheckpoints
from rlinf_worker.gang import saving
from rlinf_worker.roles.protocol import StepCommit

VERSION = PolicyVersion(0, 7)


class OwnError(Exception):
    """As safetensors' of a full disk."""


class Disk:
    """Full for so many tries to write."""

    def __init__(self, folder: Path, *, full: int, error: Exception) -> None:
        self.full, self.error, self.told = full, error, list[str]()
        self.store = FileCheckpoints(str(folder), on_failed=lambda _, problem: self.told.append(problem))

    def write(self, folder: Path) -> None:
        (folder / "model").write_text("half")
        if self.full:
            self.full -= 1
            raise self.error

    async def save(self, *, last: bool = False) -> None:
        commit = StepCommit(step=7, version=VERSION, checkpoint=True, state_json="{}", last=last)
        await saving.save(self.store, commit, self.write, failures=(OwnError,))

    @property
    def latest(self) -> PolicyVersion | None:
        found = self.store.latest()
        return found and found[0]


@pytest.fixture(params=[OSError(28, "No space left on device"), OwnError("No space left on device")], ids=type)
def disk_of(request, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_S", 0.0)
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
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.0)
    with pytest.raises(CheckpointUnwritable, match="No space left"):
        await disk.save(last=True)
    assert len(disk.told) == 1


async def test_what_nobody_names_as_a_failure_ends_the_role(disk_of):
    disk = disk_of(1)
    disk.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await disk.save()
