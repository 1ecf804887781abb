"""A checkpoint that many write: each rank of each role that ends steps closes its part, and the last one commits."""

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest

from rlinf_api.errors import UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints import folder
from rlinf_worker.checkpoints.folder import Folder
from rlinf_worker.checkpoints.store import ALONE, Checkpoints, CheckpointUnreadable, CheckpointUnwritable, Writer
from tests.fakes.lossy_folder import LossyFolder, PowerCut

ROLES = ("actor", "critic")
FIRST, SECOND = Writer(0, 2), Writer(1, 2)
WRITERS = (("actor", FIRST), ("actor", SECOND), ("critic", ALONE))
ALL = {"actor/rank-0.bin": 6, "actor/rank-1.bin": 6, "critic/rank-0.bin": 7, "driver.json": 2}


def store_of(tmp_path, role: str = "actor", *, roles=ROLES, **told) -> Checkpoints:
    return Checkpoints(str(tmp_path), role=role, roles=roles, **told)


def write(store: Checkpoints, number: int, writer: Writer, *, text: str, name: str = "") -> bool:
    version = PolicyVersion(0, number)
    (store.begin(version, writer) / (name or f"rank-{writer.rank}.bin")).write_text(text)
    return store.finish(version, "{}", writer)


@pytest.mark.parametrize("order", list(permutations(WRITERS)))
def test_it_is_there_when_the_last_part_is_whoever_that_is(tmp_path, order):
    saved = []
    for count, (role, writer) in enumerate(order, start=1):
        store = store_of(tmp_path, role, on_saved=lambda version, uri: saved.append((version, uri)))
        is_there = write(store, 20, writer, text=f"{role}{writer.rank}")
        assert is_there is (count == len(order))
        assert (store.latest() is not None) is is_there
    assert saved == [(PolicyVersion(0, 20), str(tmp_path / "b0-20"))], "and the last one alone tells of it"
    words = json.loads((tmp_path / "b0-20" / "COMMIT").read_text())
    assert words == {"format": 2, "version": "b0-20", "roles": list(ROLES), "files": ALL}


def test_each_role_reads_its_own_part_of_all_its_ranks(tmp_path):
    for role, writer in WRITERS:
        write(store_of(tmp_path, role), 20, writer, text=f"{role}{writer.rank}")
    actor, critic = store_of(tmp_path).latest(), store_of(tmp_path, "critic").latest()
    assert actor is not None
    assert critic is not None
    assert actor.files == {"rank-0.bin": 6, "rank-1.bin": 6}
    for name, words in (("rank-0.bin", b"actor0"), ("rank-1.bin", b"actor1")):
        with actor.open(name) as file:
            assert file.read() == words
    with critic.folder() as found:
        assert {path.name: path.read_text() for path in found.iterdir()} == {"rank-0.bin": "critic0"}


def test_two_that_find_all_parts_at_once_write_the_same_words(tmp_path, monkeypatch):
    """Both stand before their rename of COMMIT."""
    saved, both, fsync = [], threading.Barrier(2), folder._fsync
    for role, writer in WRITERS:
        write(store_of(tmp_path, role), 20, writer, text=f"{role}{writer.rank}")
    before = (tmp_path / "b0-20" / "COMMIT").read_text()
    (tmp_path / "b0-20" / "COMMIT").unlink()

    def at_once(path: Path) -> None:
        if path.name.startswith(".new-COMMIT"):
            both.wait(10)
        fsync(path)

    monkeypatch.setattr(folder, "_fsync", at_once)

    def last(role: str, writer: Writer) -> bool:
        store = store_of(tmp_path, role, on_saved=lambda version, uri: saved.append(role))
        (store._place.draft(store._draft(PolicyVersion(0, 20), writer)) / f"rank-{writer.rank}.bin").write_text(
            f"{role}{writer.rank}"
        )
        return store.finish(PolicyVersion(0, 20), "{}", writer)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(last, ("actor", "critic"), (SECOND, ALONE)))
    assert sorted(saved) == ["actor", "critic"], "a driver hears of it twice, which is no news"
    assert (tmp_path / "b0-20" / "COMMIT").read_text() == before
    assert not list((tmp_path / "b0-20").glob(".*"))


def test_a_role_that_writes_no_file_has_a_part_too(tmp_path):
    critic = store_of(tmp_path, "critic")
    critic.begin(PolicyVersion(0, 20))
    critic.finish(PolicyVersion(0, 20), "{}")
    assert write(store_of(tmp_path), 20, ALONE, text="actor0")
    found = critic.latest()
    assert found is not None
    with found.folder() as own:
        assert (found.files, own.is_dir()) == ({}, True)


def test_a_part_that_is_never_closed_is_no_checkpoint_and_goes_with_the_next(tmp_path):
    actor, critic = store_of(tmp_path), store_of(tmp_path, "critic")
    critic.begin(PolicyVersion(0, 20))
    write(actor, 20, ALONE, text="actor0")
    assert actor.latest() is None
    write(critic, 40, ALONE, text="critic0")
    assert (tmp_path / "b0-20").exists(), "a slower gang may still be at it"
    write(actor, 40, ALONE, text="actor0")
    assert [path.name for path in tmp_path.iterdir()] == ["b0-40"]


def test_what_a_faster_gang_has_begun_does_not_go_with_the_one_before(tmp_path):
    actor, critic = store_of(tmp_path), store_of(tmp_path, "critic")
    write(actor, 20, ALONE, text="actor0")
    draft = actor.begin(PolicyVersion(0, 40))
    assert write(critic, 20, ALONE, text="critic0")
    (draft / "rank-0.bin").write_text("actor0")
    actor.finish(PolicyVersion(0, 40), "{}")
    assert write(critic, 40, ALONE, text="critic0")


def test_while_one_gang_fails_again_and_again_the_others_leave_one_part_at_most(tmp_path):
    """On a disk that is full they would fill it for good."""
    actor, critic = store_of(tmp_path), store_of(tmp_path, "critic")
    for number in range(20, 120, 20):
        write(actor, number, ALONE, text="actor0")
        critic.begin(PolicyVersion(0, number))
        critic.failed(PolicyVersion(0, number), "no room")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b0-100", "b0-80"]


def test_a_role_that_fails_takes_its_own_part_and_no_other(tmp_path):
    told = []
    actor = store_of(tmp_path, on_failed=lambda version, problem: told.append(problem))
    critic = store_of(tmp_path, "critic")
    write(critic, 20, ALONE, text="critic0")
    write(actor, 20, FIRST, text="actor0")
    actor.begin(PolicyVersion(0, 20), SECOND)
    actor.failed(PolicyVersion(0, 20), "no room", SECOND)
    assert told == ["no room"]
    assert Folder(tmp_path).sizes("b0-20").keys() == {"critic/rank-0.bin", "critic.0-of-1"}
    assert not write(actor, 20, SECOND, text="actor1"), "all its ranks try again"
    assert write(actor, 20, FIRST, text="actor0")


def test_what_is_closed_in_a_try_before_does_not_count_in_the_next(tmp_path):
    actor = store_of(tmp_path, roles=("actor",))
    write(actor, 20, FIRST, text="actor0")
    actor.begin(PolicyVersion(0, 20), FIRST)
    assert not write(actor, 20, SECOND, text="actor1")
    assert actor.latest() is None


def test_a_failure_takes_nothing_of_a_checkpoint_that_is_whole(tmp_path):
    actor = store_of(tmp_path, roles=("actor",))
    write(actor, 20, ALONE, text="actor0")
    actor.failed(PolicyVersion(0, 20), "told late")
    assert actor.latest() is not None


def test_two_that_put_the_same_file_at_once_both_have_put_it(tmp_path, monkeypatch):
    folder, rename = Folder(tmp_path), Path.rename

    def after_another(path: Path, to: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        folder.put("COMMIT", "whole")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", after_another)
    folder.put("COMMIT", "whole")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"COMMIT": "whole"}


def test_a_part_that_is_closed_stays_where_what_comes_behind_it_could_not_be_written(tmp_path, monkeypatch):
    """Another has found all parts at the same moment, and counts on this one."""
    actor, critic = store_of(tmp_path), store_of(tmp_path, "critic")
    write(critic, 20, ALONE, text="critic0")
    commit = Checkpoints._commit

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "_commit", no_room)
    with pytest.raises(CheckpointUnwritable):
        write(actor, 20, ALONE, text="actor0")
    actor.failed(PolicyVersion(0, 20), "no room")
    monkeypatch.setattr(Checkpoints, "_commit", commit)
    assert write(critic, 20, ALONE, text="critic0")
    found = actor.latest()
    assert found is not None
    with found.folder() as files:
        assert (files / "rank-0.bin").read_text() == "actor0"


def test_one_file_of_two_ranks_is_refused_by_name(tmp_path):
    actor = store_of(tmp_path, roles=("actor",))
    write(actor, 20, FIRST, text="x", name="model.bin")
    with pytest.raises(UserError, match=r"two ranks of role 'actor' .* b0-20: got model.bin.*; name the rank"):
        write(actor, 20, SECOND, text="y", name="model.bin")


def test_a_role_that_has_no_part_is_told_so(tmp_path):
    """A flow that has got a critic since."""
    write(store_of(tmp_path, roles=("actor",)), 20, ALONE, text="actor0")
    with pytest.raises(CheckpointUnreadable, match=r"b0-20: it has no part of role 'critic', only of actor"):
        store_of(tmp_path, "critic").latest()


def test_one_role_marks_a_branch_for_all(tmp_path):
    store_of(tmp_path, "critic").opened(3)
    assert list(tmp_path.iterdir()) == []
    store_of(tmp_path).opened(3)
    assert [path.name for path in tmp_path.iterdir()] == [".b3.opened"]


def test_a_process_that_is_killed_between_two_files_has_closed_nothing(tmp_path):
    """At every operation of the last writer, when the others are through."""
    cut_at, killed = 0, True
    while killed:
        folder = tmp_path / str(cut_at)
        for role, writer in WRITERS[1:]:
            write(store_of(folder, role), 20, writer, text=f"{role}{writer.rank}")
        with LossyFolder(folder, cut_at=cut_at) as disk:
            try:
                write(store_of(disk.root), 20, FIRST, text="actor0")
                killed = False
            except PowerCut:
                cut_at += 1
        for after in disk.survivors(tmp_path / f"after-{cut_at}-{killed}"):
            found = store_of(after).latest()
            assert found is not None or killed
            if found is not None:
                assert Folder(after).sizes("b0-20").items() >= ALL.items()
                assert (after / "b0-20" / "actor" / "rank-0.bin").read_bytes() == b"actor0"
    assert cut_at >= 10, "the fake has not seen the operations"


def test_what_others_are_writing_is_not_listed(tmp_path):
    """It may be gone before anybody has looked at its size."""
    actor = store_of(tmp_path)
    (actor.begin(PolicyVersion(0, 20), FIRST) / "half").write_text("x")
    (tmp_path / "b0-20" / ".new-COMMIT").write_text("{")
    write(actor, 20, SECOND, text="actor1", name=".metadata")
    assert Folder(tmp_path).sizes("b0-20").keys() == {"actor/.metadata", "actor.1-of-2"}


def test_what_was_never_begun_is_not_finished_as_an_empty_one(tmp_path):
    with pytest.raises(CheckpointUnwritable, match=r"checkpoint .*b0-20 cannot be written: got No such file"):
        store_of(tmp_path).finish(PolicyVersion(0, 20), "{}")
