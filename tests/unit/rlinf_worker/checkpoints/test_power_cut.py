"""Checkpoints on a disk that forgets what was not fsynced (tests/fakes/lossy_folder.py): the power is cut at every
operation of a save, of a prune, of the replacement of a damaged one, and what is found afterwards is judged by its
bytes."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints.store import Checkpoints
from tests.fakes.lossy_folder import LossyFolder, PowerCut

FILES = {"model.bin": b"the weights of %d", "optimizer/rank-0.bin": b"the moments of %d"}


@pytest.fixture(autouse=True)
def no_real_disk_is_waited_for(monkeypatch):
    """The fake keeps what was fsynced; the machine's own disk need not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(store: Checkpoints, number: int) -> None:
    version = PolicyVersion(0, number)
    folder = store.begin(version)
    (folder / "optimizer").mkdir()
    for name, words in FILES.items():
        (folder / name).write_bytes(words % number)
    store.finish(version, json.dumps({"step": number}))


def is_whole(folder: Path, number: int) -> bool:
    """By its bytes: a file of zeros has the size that COMMIT lists."""
    files = {f"actor/{name}": words % number for name, words in FILES.items()}
    files["driver.json"] = json.dumps({"step": number}).encode()
    return all((folder / name).is_file() and (folder / name).read_bytes() == words for name, words in files.items())


Act = Callable[[Checkpoints], Iterator[int]]
"""Yields the number of each checkpoint as it is finished."""


def first(store: Checkpoints) -> Iterator[int]:
    save(store, 20)
    yield 20


def three_of_which_two_are_kept(store: Checkpoints) -> Iterator[int]:
    for number in (20, 40, 60):
        save(store, number)
        yield number


def over_a_damaged_one(store: Checkpoints) -> Iterator[int]:
    save(store, 20)
    save(store, 40)
    yield 20
    (store.begin(PolicyVersion(0, 99)).parents[1] / "b0-40" / "actor" / "model.bin").write_bytes(b"torn")
    save(store, 40)
    yield 40


def each_cut(folder: Path, act: Act) -> Iterator[tuple[str, LossyFolder, list[int]]]:
    """(where, the disk, what was finished) for a cut at each operation of the last checkpoint, and for one after it.
    How those before it are saved, `first` tells."""
    with LossyFolder(folder / "uncut") as disk:
        starts = [0, *(len(disk.operations) for _ in act(Checkpoints(str(disk.root), keep=2)))]
    for cut_at in range(starts[-2], 1000):
        finished: list[int] = []
        with LossyFolder(folder / f"{cut_at}" / "disk", cut_at=cut_at) as disk, contextlib.suppress(PowerCut):
            store = Checkpoints(str(disk.root), keep=2)
            for number in act(store):
                finished.append(number)
            cut_at = -1
        yield f"cut at operation {len(disk.operations)}, behind {disk.operations[-3:]}", disk, finished
        if cut_at == -1:
            return
    raise AssertionError("it does not end")


ACTS = [first, three_of_which_two_are_kept, over_a_damaged_one]


@pytest.mark.parametrize("act", ACTS)
def test_a_checkpoint_is_whole_or_not_there_wherever_the_power_is_cut(tmp_path, act):
    cuts = 0
    for where, disk, finished in each_cut(tmp_path, act):
        cuts += 1
        for after in disk.survivors(disk.root.parent / "after"):
            found = Checkpoints(str(after), keep=2).latest()
            if finished:
                assert found is not None, f"{where}: {after} lost all"
                assert found.version.number >= finished[-1], f"{where}: {after} lost {finished[-1]}"
            if found is not None:
                assert is_whole(after / str(found.version), found.version.number), f"{where}: {after} has it in part"
                assert json.loads(found.state_json) == {"step": found.version.number}
    assert cuts >= 15, "the fake has not seen the operations"


def test_what_has_a_commit_has_all_its_files_so_that_half_a_removal_is_no_checkpoint(tmp_path):
    for where, disk, _ in each_cut(tmp_path, three_of_which_two_are_kept):
        for after in disk.survivors(disk.root.parent / "after"):
            for commit in after.glob("b0-*/COMMIT"):
                number = int(commit.parent.name.removeprefix("b0-"))
                assert is_whole(commit.parent, number), f"{where}: {commit.parent} is committed, and not whole"


def test_what_a_cut_left_is_in_nobodys_way_and_goes_with_the_next(tmp_path):
    for where, disk, _ in each_cut(tmp_path, three_of_which_two_are_kept):
        for after in itertools.islice(disk.survivors(disk.root.parent / "after"), 3):
            store = Checkpoints(str(after), keep=2)
            for number in (60, 80):
                save(store, number)
            found = store.latest()
            assert found is not None, where
            assert found.version == PolicyVersion(0, 80), where
            left = {path.name for path in after.iterdir()}
            assert {"b0-60", "b0-80"} <= left, where
            assert not [name for name in left if name.startswith(".")], where


def test_a_branch_that_was_opened_is_known_wherever_the_power_is_cut_later(tmp_path):
    def act(store: Checkpoints) -> Iterator[int]:
        for branch in (1, 3):
            store.opened(branch)
            yield branch
        save(store, 20)

    for where, disk, opened in each_cut(tmp_path, act):
        for after in disk.survivors(disk.root.parent / "after"):
            assert Checkpoints(str(after)).highest_branch >= max(opened, default=0), where


def test_the_folders_on_the_way_are_made_to_last_too(tmp_path):
    """A job's own folder is made with its first checkpoint: what lies in a forgotten folder is forgotten with it."""
    for asked_first in (False, True):
        with LossyFolder(tmp_path / f"disk-{asked_first}") as disk:
            store = Checkpoints(str(disk.root / "jobs" / "ppo"))
            if asked_first:
                assert store.latest() is None
            save(store, 20)
        for after in disk.survivors(tmp_path / f"after-{asked_first}"):
            found = Checkpoints(str(after / "jobs" / "ppo")).latest()
            assert found is not None, "what was finished is forgotten with the folder it lies in"
            assert is_whole(after / "jobs" / "ppo" / "b0-20", 20)


# --- the fake itself -----------------------------------------------------------------------------------------------
def test_the_disk_forgets_what_was_not_fsynced_and_keeps_what_was(tmp_path):
    with LossyFolder(tmp_path / "disk") as disk:
        for name in ("kept", "unnamed", "empty"):
            (disk.root / name).write_bytes(name.encode())
        for name in ("kept", "unnamed"):
            descriptor = os.open(disk.root / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            if name == "kept":
                os.rename(disk.root / "unnamed", disk.root / "other")
                os.rename(disk.root / "other", disk.root / "unnamed")
        descriptor = os.open(disk.root, os.O_RDONLY)
        os.unlink(disk.root / "unnamed")
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(disk.root / "kept", disk.root / "renamed")
    least, most, *_ = [
        {path.name: path.read_bytes() for path in after.iterdir()} for after in disk.survivors(tmp_path / "after")
    ]
    assert least == {"kept": b"kept", "empty": b""}
    assert most == {"renamed": b"kept", "empty": b"empty"}
