"""What the actor does where a checkpoint cannot be written: it goes on, and for the last one it waits."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import FileCheckpoints
from rlinf_worker.roles.actor import portable
from rlinf_worker.roles.actor import role as actor
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import StepCommit

VERSION = PolicyVersion(0, 7)


class Disk:
    """Full for so many tries to write."""

    def __init__(self, folder, monkeypatch, *, full):
        self.full, self.told = full, list[str]()
        self.role: Any = FsdpRole()
        learner = SimpleNamespace(state=lambda: ({}, {}), episodes=[])
        vars(self.role).update(_learner=learner, _spec=None)
        self.store = FileCheckpoints(str(folder), on_failed=lambda _, problem: self.told.append(problem))
        self.context = SimpleNamespace(
            rank=0, checkpoints=self.store, phase=lambda _: None, span=lambda kind, step: nullcontext()
        )
        monkeypatch.setattr(portable, "write", self._write)
        monkeypatch.setattr(actor, "LAST_SAVE_PAUSE_S", 0.0)

    def _write(self, folder, **_):
        (folder / "model").write_text("half")
        if self.full > 0:
            self.full -= 1
            raise OSError(28, "No space left on device")

    async def save(self, *, last=False):
        commit = StepCommit(step=7, version=VERSION, checkpoint=True, state_json="{}", last=last)
        await self.role._save(self.context, commit)

    @property
    def latest(self):
        found = self.store.latest()
        return found and found[0]


async def test_training_goes_on_without_a_checkpoint_that_has_no_room(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch, full=1)
    await disk.save()
    assert disk.latest is None
    assert len(disk.told) == 1
    assert "No space left" in disk.told[0]
    await disk.save()
    assert disk.latest == VERSION


async def test_the_last_checkpoint_is_tried_until_there_is_room(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch, full=3)
    await disk.save(last=True)
    assert disk.latest == VERSION
    assert len(disk.told) == 3


async def test_the_last_checkpoint_is_not_tried_for_ever(tmp_path, monkeypatch):
    disk = Disk(tmp_path, monkeypatch, full=10**6)
    monkeypatch.setattr(actor, "LAST_SAVE_S", 0.0)
    with pytest.raises(OSError, match="No space left"):
        await disk.save(last=True)
