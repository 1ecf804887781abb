"""The scratch folders of a backend: short names of their own, and what a dead one left is cleared."""

import os
import tempfile

import pytest

from rlinf_api.errors import UserError
from rljob.local import shim, volumes
from rljob.local.volumes import Scratch


@pytest.fixture
def roots(tmp_path, monkeypatch):
    """(of the disk, of memory), empty."""
    made = tmp_path / "disk", tmp_path / "memory"
    for folder in made:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made[0]))
    monkeypatch.setattr(volumes, "MEMORY_ROOT", made[1])
    return made


def test_a_scratch_folder_has_the_shortest_name_that_tells_whose_it_is(roots):
    """Unix sockets lie below it, whose paths may have 107 bytes."""
    mine = f"rlj-{os.getpid()}-{shim.stat_fields(os.getpid())[19]}-"
    first, second = Scratch.make(), Scratch.make()
    assert first.disk != second.disk
    for made in (first, second):
        assert (made.disk.parent, made.memory.parent) == roots
        for folder in (made.disk, made.memory):
            assert folder.name.startswith(mine)
            assert len(folder.name) <= len(mine) + len("999")
            assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_backend_left_that_died_is_cleared_and_nothing_else(roots):
    alive = Scratch.make()
    dead = f"rlj-{os.getpid()}-1-0"  # this pid, of a process that was there before
    for root in roots:
        for name in (dead, "rlj-other", "rlj-a-b-c"):
            (root / name).mkdir()
    made = Scratch.make()
    left = {alive.disk.name, made.disk.name, "rlj-other", "rlj-a-b-c"}
    assert [{path.name for path in root.iterdir()} for root in roots] == [left, left]


def test_a_machine_without_room_for_them_is_told_the_folder(roots):
    roots[1].rmdir()
    with pytest.raises(UserError, match=rf"folder {roots[1]}/rlj-\S+ cannot be made: got .*; make room or set TMPDIR"):
        Scratch.make()
