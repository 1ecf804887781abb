"""What roles that end steps do where a checkpoint cannot be written: they go on, and for the last one they wait."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import CheckpointUnwritable, FileCheckpoints
from rlinf_worker.roles import saving
from rlinf_worker.roles.actor import portable
from rlinf_worker.roles.actor.role import FsdpRole
from rlinf_worker.roles.protocol import StepCommit
from rlinf_worker.roles.synthetic.committing import Committing

VERSION = PolicyVersion(0, 7)


class Disk:
    """Full for so many tries to write."""

    def __init__(self, folder, monkeypatch, *, full, kind):
        self.full, self.kind, self.told, self.phases = full, kind, list[str](), list[str]()
        self.store = FileCheckpoints(str(folder), on_failed=lambda _, problem: self.told.append(problem))
        self.context: Any = SimpleNamespace(
            rank=0, checkpoints=self.store, phase=self.phases.append, span=lambda kind, step: nullcontext()
        )
        monkeypatch.setattr(saving, "LAST_SAVE_PAUSE_S", 0.0)
        monkeypatch.setattr(portable, "write", lambda folder, **_: (folder / "model").write_text("half"))
        whole = Path.write_text

        def write_text(path, text, **options):
            if path.parent.name != "actor" or self.full == 0:
                return whole(path, text, **options)
            self.full -= 1
            whole(path, text[:1], **options)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", write_text)

    async def save(self, *, last=False):
        commit = StepCommit(step=7, version=VERSION, checkpoint=True, state_json="{}", last=last)
        role: Any
        if self.kind == "fsdp":
            role = FsdpRole()
            learner = SimpleNamespace(state=lambda: ({}, {}), episodes=[])
            vars(role).update(_learner=learner, _spec=None, _gang=None)
            await role._save(self.context, commit)
        else:
            role = object.__new__(Committing)
            role._desk = SimpleNamespace(ctx=self.context)
            await role._save(commit)

    @property
    def latest(self):
        found = self.store.latest()
        return found and found[0]


@pytest.fixture(params=["fsdp", "synthetic"])
def disk_of(request, tmp_path, monkeypatch):
    return lambda full: Disk(tmp_path, monkeypatch, full=full, kind=request.param)


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
    assert disk.phases == ["load", "step"], "a step's deadline is shorter than the tries last"


async def test_the_last_checkpoint_is_not_tried_for_ever(disk_of, monkeypatch):
    disk = disk_of(10**6)
    monkeypatch.setattr(saving, "LAST_SAVE_S", 0.0)
    with pytest.raises(CheckpointUnwritable, match="No space left"):
        await disk.save(last=True)
    assert len(disk.told) == 1
