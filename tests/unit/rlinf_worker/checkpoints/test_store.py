import errno
import json
import os
import re
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_api.errors import NotSupportedYet, UserError
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints import folder as folders
from rlinf_worker.checkpoints.places import folder_of
from rlinf_worker.checkpoints.store import Checkpoints, CheckpointUnreadable, CheckpointUnwritable
from rlinf_worker.driver.steps import StepLedger


def write(store: Checkpoints, number: int, *, branch: int = 0, text: str = "weights") -> None:
    version = PolicyVersion(branch, number)
    (store.begin(version) / "model.bin").write_text(text)
    assert store.finish(version, json.dumps({"step": number}))


def latest(store: Checkpoints):
    """(version, folder, driver.json)"""
    found = store.latest()
    assert found is not None
    with found.folder() as folder:  # stays, as it is of this machine
        return found.version, folder, found.state_json


def test_what_was_finished_is_the_latest(tmp_path):
    saved = []
    store = Checkpoints(f"file://{tmp_path}", on_saved=lambda version, uri: saved.append((version, uri)))
    assert store.latest() is None
    write(store, 20)
    version, folder, state_json = latest(store)
    assert version == PolicyVersion(0, 20)
    assert (folder / "model.bin").read_text() == "weights"
    assert json.loads(state_json) == {"step": 20}
    assert saved == [(version, str(tmp_path / "b0-20"))]


def test_a_newer_branch_is_newer_than_a_higher_number(tmp_path):
    store = Checkpoints(str(tmp_path))
    write(store, 60)
    write(store, 45, branch=1)
    assert latest(store)[0] == PolicyVersion(1, 45)


def test_versions_are_all_that_count_the_newest_first_and_each_is_read_by_its_name(tmp_path):
    store = Checkpoints(str(tmp_path))
    assert store.versions() == []
    for branch, number in ((0, 20), (1, 45), (0, 60), (1, 7)):
        write(store, number, branch=branch, text=f"of {number}")
    store.begin(PolicyVersion(2, 1))
    wanted = [PolicyVersion(1, 45), PolicyVersion(1, 7), PolicyVersion(0, 60)]
    assert Checkpoints(str(tmp_path)).versions() == wanted, "of three that are kept"
    found = store.of("b1-7")
    assert (found.version, json.loads(found.state_json)) == (PolicyVersion(1, 7), {"step": 7})
    with found.folder() as folder:
        assert (folder / "model.bin").read_text() == "of 7"
    assert (store.state_of(PolicyVersion(1, 7)), store.state_of(PolicyVersion(1, 45))) == (found.state_json, "")
    with pytest.raises(CheckpointUnreadable, match="b0-20 cannot be read here"):
        store.of("b0-20")


def test_without_a_place_there_are_no_checkpoints():
    store = Checkpoints("")
    assert (store.latest(), store.versions(), store.state_of(PolicyVersion(0, 0))) == (None, [], "")


def test_what_was_not_finished_does_not_count(tmp_path):
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    store.begin(PolicyVersion(0, 40))
    write(store, 60)
    (tmp_path / "b0-60" / "COMMIT").unlink()
    assert latest(store)[0] == PolicyVersion(0, 20)


def test_only_the_newest_are_kept(tmp_path):
    store = Checkpoints(str(tmp_path), keep=2)
    for number in (1, 2, 3, 10):
        write(store, number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b0-10", "b0-3"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "actor" / "model.bin").write_text("w"),
        lambda f: (f / "actor" / "model.bin").write_text("weights and what was appended"),
        lambda f: (f / "actor" / "model.bin").unlink(),
        lambda f: (f / "COMMIT").write_text("{"),
        lambda f: (f / "COMMIT").write_text('{"format": 9, "files": {}}'),
        lambda f: (f / "COMMIT").write_text((f / "COMMIT").read_text().replace(f.name, "b0-21")),
        lambda f: (f / "COMMIT").write_text((f / "COMMIT").read_text().replace('"format": 2', '"format": 3')),
        lambda f: (f / "COMMIT").write_text("[]"),
        lambda f: (f / "COMMIT").write_text(f'{{"format": 2, "version": "{f.name}"}}'),
        lambda f: (f / "COMMIT").write_text(f'{{"format": 2, "version": "{f.name}", "files": ["actor/model.bin"]}}'),
        lambda f: (f / "driver.json").write_text('{"step"  20'),
        # As long as the whole one, and no object.
        lambda f: (f / "driver.json").write_text("[".ljust(len((f / "driver.json").read_text()) - 1) + "]"),
    ],
)
def test_an_unreadable_one_is_passed_over_and_alone_it_is_an_error(tmp_path, damage):
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    write(store, 40)
    damage(tmp_path / "b0-40")
    assert latest(store)[0] == PolicyVersion(0, 20)
    damage(tmp_path / "b0-20")
    with pytest.raises(CheckpointUnreadable, match=r"b0-40: .*; b0-20: .*restore one from a backup"):
        store.latest()


def test_a_checkpoint_under_another_name_is_refused_with_both_names(tmp_path):
    """Somebody has moved it: what is learnt from here on would be counted from a step that it is not of."""
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    (tmp_path / "b0-20").rename(tmp_path / "b0-40")
    with pytest.raises(CheckpointUnreadable, match=r"b0-40: COMMIT is of version 'b0-20'"):
        store.latest()


def test_the_default_keeps_three(tmp_path):
    store = Checkpoints(str(tmp_path))
    for number in range(1, 6):
        write(store, number)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b0-3", "b0-4", "b0-5"]


def test_names_are_read_strictly(tmp_path):
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    (tmp_path / "b0-20").rename(tmp_path / "b0-020")
    (tmp_path / "b0-99.bak").mkdir()
    assert store.latest() is None


def test_finishing_twice_changes_nothing(tmp_path):
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    store.begin(PolicyVersion(0, 20))
    assert store.finish(PolicyVersion(0, 20), "{}")
    assert not list((tmp_path / "b0-20").glob(".*")), "what was begun anew has gone"
    assert json.loads(latest(store)[2]) == {"step": 20}


def test_a_damaged_one_is_replaced_by_the_next_of_its_name(tmp_path):
    saved = []
    store = Checkpoints(str(tmp_path), on_saved=lambda version, uri: saved.append(str(version)))
    write(store, 20, text="first life")
    (tmp_path / "b0-20" / "actor" / "model.bin").write_text("torn")
    (tmp_path / "b0-20" / "actor" / "of the first life").write_text("x")
    write(store, 20, text="second life")
    _, folder, _ = latest(store)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"model.bin": "second life"}
    assert saved == ["b0-20", "b0-20"]


def test_one_that_cannot_be_read_just_now_is_not_removed_where_nothing_takes_its_place(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    store = Checkpoints(str(tmp_path))
    write(store, 20)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "_read", refuse)
        with pytest.raises(CheckpointUnwritable):
            store.finish(PolicyVersion(0, 20), "{}")
    assert latest(store)[0] == PolicyVersion(0, 20)


def test_what_is_trained_after_falling_back_over_a_damaged_one_is_kept_and_found(tmp_path):
    """By a job that goes on with the first driver of a new run, which has nobody to ask."""
    before = Checkpoints(str(tmp_path))
    write(before, 20)
    write(before, 40, branch=1, text="first life")
    saved = []
    store = Checkpoints(str(tmp_path), keep=1, on_saved=lambda version, uri: saved.append(str(version)))
    (tmp_path / "b1-40" / "actor" / "model.bin").write_text("torn")
    restored = latest(store)[0]
    assert restored == PolicyVersion(0, 20)
    ledger = StepLedger(steps=100, max_staleness=0, checkpoint_every=20)
    ledger.heard_of(store.highest_branch)
    branch = ledger.rewind(restored).branch
    write(store, 40, branch=branch, text="second life")
    version, folder, _ = latest(store)
    assert (str(version), saved[-1]) == ("b2-40", "b2-40")
    assert (folder / "model.bin").read_text() == "second life"


TRACES = {
    "b7-40/COMMIT": 7,
    "b7-40/actor/model.bin": 7,
    "b7-40/.actor.0-of-1/model.bin": 7,
    ".b7.opened": 7,
    "b7": 0,
    "b07-40/COMMIT": 0,
    "b7-40.bak/COMMIT": 0,
    "b9999999999-40/COMMIT": 0,
}


@pytest.mark.parametrize("trace", TRACES)
def test_every_trace_of_a_branch_counts_whether_or_not_it_can_be_read(tmp_path, trace):
    (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / trace).write_text("{")
    assert Checkpoints(str(tmp_path)).highest_branch == TRACES[trace]


def test_the_number_of_a_branch_is_kept_before_it_has_a_checkpoint(tmp_path):
    store = Checkpoints(str(tmp_path))
    write(store, 20)
    store.opened(0)
    assert [p.name for p in tmp_path.iterdir()] == ["b0-20"], "its checkpoint tells of it"
    for branch in (1, 3, 2):
        store.opened(branch)
    assert Checkpoints(str(tmp_path)).highest_branch == 3
    write(store, 40)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b3.opened", "b0-20", "b0-40"]


@pytest.mark.parametrize("uri", ["", "file:///dev/null/ckpt"])
def test_a_number_that_cannot_be_kept_stops_nobody(uri):
    store = Checkpoints(uri)
    store.opened(3)
    assert store.highest_branch == 0


def test_places_that_cannot_be_used_are_named():
    with pytest.raises(
        NotSupportedYet, match=r"az://: got 'az://bucket/x', .* s3://bucket/prefix or gs://bucket/prefix; m"
    ):
        Checkpoints("az://bucket/x")
    with pytest.raises(UserError, match="no absolute path: got 'runs/1'"):
        Checkpoints("runs/1")
    assert Checkpoints("").latest() is None
    with pytest.raises(UserError, match=r"set spec.checkpoint.uri"):
        Checkpoints("").begin(PolicyVersion(0, 1))


NAMES = ["lr#1", "a?b", "50%", "a%2fb", "a b;c", "{job}", "$(A)$$", "\u00fc", os.fsdecode(b"\xff")]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("host", ["", "localhost"])
def test_the_uri_of_a_folder_names_that_folder_and_no_other(tmp_path, name, host):
    folder = tmp_path / name
    assert folder_of(folder.as_uri().replace("file://", f"file://{host}")) == folder
    assert folder_of(str(folder)) == folder, "a path is what it says"


@pytest.mark.parametrize(("uri", "written"), [("file:///w/a#1/c", "%23"), ("file:///a?b", "%3F"), ("file:///#", "%23")])
def test_a_uri_whose_end_would_be_dropped_is_refused(uri, written):
    with pytest.raises(UserError, match=f"got '{re.escape(uri)}', .*; write .*{written}"):
        folder_of(uri)


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnwritable, match="cannot be written: got Not a directory"):
        Checkpoints(str(tmp_path / "file")).begin(PolicyVersion(0, 1))


@pytest.mark.parametrize("place", ["file/ckpt", "file"], ids=["below a file", "a file"])
def test_a_place_that_cannot_be_written_is_known_before_the_first_step(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnwritable, match=r"look at the volume in spec\.checkpoint\.uri") as caught:
        Checkpoints(str(tmp_path / place)).latest()
    assert f"{place} cannot be written: got Not a directory, wanted a folder with room that uid {os.geteuid()}" in str(
        caught.value
    )
    assert caught.value.reason == "CheckpointUnwritable"


def test_a_folder_that_may_be_read_and_not_written_is_unwritable(tmp_path, monkeypatch):
    """Tests run as root, whom no mode stops: a read-only file system is played."""
    write(Checkpoints(str(tmp_path)), 20)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("rlinf_worker.checkpoints.folder.tempfile.mkstemp", refuse)
    sentence = f"the checkpoint folder {tmp_path} cannot be written: got Read-only file system"
    with pytest.raises(CheckpointUnwritable, match=sentence):
        Checkpoints(str(tmp_path)).latest()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_takes_a_file_and_none_of_its_bytes_is_known_before_the_first_step(tmp_path, monkeypatch, call):
    """A full one has room for names, and one over a network says so only as the bytes are to be kept."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(CheckpointUnwritable, match="got No space left on device"):
            Checkpoints(str(tmp_path)).latest()
    assert list(tmp_path.iterdir()) == [], "the try leaves nothing"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_has_become_full_does_not_keep_a_restarted_actor_from_its_last_checkpoint(
    tmp_path, monkeypatch, number
):
    def refuse(*_, **__):
        raise OSError(number, "full")

    monkeypatch.setattr("rlinf_worker.checkpoints.folder.tempfile.mkstemp", refuse)
    with pytest.raises(CheckpointUnwritable):
        Checkpoints(str(tmp_path)).latest()
    write(Checkpoints(str(tmp_path)), 20)
    assert latest(Checkpoints(str(tmp_path)))[0] == PolicyVersion(0, 20)


def test_a_checkpoint_that_failed_is_told_and_leaves_nothing(tmp_path):
    told = []
    store = Checkpoints(str(tmp_path), on_failed=lambda *said: told.append(said))
    (store.begin(PolicyVersion(0, 1)) / "half").write_text("x")
    store.failed(PolicyVersion(0, 1), "no room")
    assert list(tmp_path.iterdir()) == []
    assert told == [(PolicyVersion(0, 1), "no room")]


def test_one_that_failed_before_anything_was_begun_is_told_too(tmp_path):
    told = []
    Checkpoints(str(tmp_path), on_failed=lambda *said: told.append(said)).failed(PolicyVersion(0, 1), "no room")
    assert told == [(PolicyVersion(0, 1), "no room")]


def test_the_try_leaves_nothing_behind_and_makes_the_folder(tmp_path):
    store = Checkpoints(str(tmp_path / "a" / "b"))
    assert store.latest() is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "a" / "b" / ".new-killed").write_text("x")
    write(store, 20)
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["b0-20"]


def test_what_stands_in_commit_is_every_file_with_its_size(tmp_path):
    """The layout is read by later versions."""
    store = Checkpoints(str(tmp_path))
    folder = store.begin(PolicyVersion(1, 20))
    (folder / "deep").mkdir()
    (folder / "deep" / "model.bin").write_text("weights")
    assert store.finish(PolicyVersion(1, 20), "")
    assert json.loads((tmp_path / "b1-20" / "COMMIT").read_text()) == {
        "format": 2, "version": "b1-20", "roles": ["actor"], "files": {"actor/deep/model.bin": 7, "driver.json": 2},
    }  # fmt: skip
    assert latest(store) == (PolicyVersion(1, 20), tmp_path / "b1-20" / "actor", "{}")


def refuses(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def test_a_folder_that_may_not_be_listed_is_unreadable_and_not_empty(tmp_path, monkeypatch):
    write(Checkpoints(str(tmp_path)), 20)
    monkeypatch.setattr(os, "listdir", refuses(errno.EACCES))
    store = Checkpoints(str(tmp_path))
    with pytest.raises(CheckpointUnreadable) as error:
        store.latest()
    assert str(error.value) == (
        f"the checkpoint folder {tmp_path} cannot be read: got Permission denied, wanted a folder that uid "
        f"{os.geteuid()} may read and write; look at the volume in spec.checkpoint.uri"
    )
    store.opened(3)
    assert not (tmp_path / ".b3.opened").exists(), "it stops nobody, and nothing is known to be higher"


def test_of_many_that_cannot_be_read_five_are_named(tmp_path):
    store = Checkpoints(str(tmp_path), keep=9)
    for number in range(1, 8):
        write(store, number)
    for number in range(1, 8):
        (tmp_path / f"b0-{number}" / "actor" / "model.bin").write_text("w")
    with pytest.raises(CheckpointUnreadable) as error:
        store.latest()
    assert str(error.value) == (
        f"no checkpoint in {tmp_path} can be read: got "
        + "; ".join(f"b0-{number}: actor/model.bin has 1 bytes, wanted 7" for number in (7, 6, 5, 4, 3))
        + ", wanted one whose files are those that its COMMIT lists; restore one from a backup, or remove the "
        "folder to start over"
    )


@pytest.mark.parametrize("keep", [0, -1, 1])
def test_one_is_kept_whatever_is_asked_for(tmp_path, keep):
    store = Checkpoints(str(tmp_path), keep=keep)
    for number in (1, 2):
        write(store, number)
    assert [path.name for path in tmp_path.iterdir()] == ["b0-2"]


def test_fewer_are_kept_from_the_next_one_on(tmp_path):
    store = Checkpoints(str(tmp_path), keep=3)
    for number in (1, 2, 3):
        write(store, number)
    store.keep = 2
    assert len(list(tmp_path.iterdir())) == 3
    write(store, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b0-3", "b0-4"]


def test_a_disk_that_fails_while_one_is_finished_is_a_sentence(tmp_path, monkeypatch):
    store = Checkpoints(str(tmp_path))
    store.begin(PolicyVersion(0, 20))
    monkeypatch.setattr(os, "fsync", refuses(errno.EIO))
    with pytest.raises(CheckpointUnwritable) as error:
        store.finish(PolicyVersion(0, 20), "{}")
    assert str(error.value) == (
        f"checkpoint {tmp_path / 'b0-20'} cannot be written: got Input/output error, wanted a folder with room that "
        f"uid {os.geteuid()} may write to; look at the volume in spec.checkpoint.uri"
    )


def test_a_disk_that_breaks_is_not_taken_for_a_full_one(tmp_path, monkeypatch):
    write(Checkpoints(str(tmp_path)), 20)
    monkeypatch.setattr("rlinf_worker.checkpoints.folder.tempfile.mkstemp", refuses(errno.EIO))
    with pytest.raises(CheckpointUnwritable, match="Input/output error"):
        Checkpoints(str(tmp_path)).latest()


@pytest.mark.parametrize("way", ["numpy", "torch", "plain"])
def test_what_is_read_of_an_opened_file_comes_in_pieces_that_count_as_work(tmp_path, monkeypatch, way):
    """The slowest disk moves while one array comes, in one call of a library."""
    monkeypatch.setattr(folders, "PIECE_BYTES", 1000)
    moves, wanted = list[int](), np.arange(10_000, dtype="f4")
    store = Checkpoints(str(tmp_path), moved=lambda: moves.append(1))
    folder = store.begin(PolicyVersion(0, 20))
    if way == "numpy":
        np.save(folder / "array", wanted)
    elif way == "torch":
        torch.save(torch.from_numpy(wanted), folder / "array.npy")
    else:
        (folder / "array.npy").write_bytes(wanted.tobytes())
    store.finish(PolicyVersion(0, 20), "{}")
    found = store.latest()
    assert found is not None
    moves.clear()
    with found.open("array.npy") as stream:
        if way == "plain":
            read: Any = np.frombuffer(stream.read(), dtype="f4")
            assert stream.tell() == stream.seek(0, os.SEEK_END) == wanted.nbytes
        else:
            read = np.load(stream) if way == "numpy" else torch.load(stream, weights_only=True).numpy()
    assert (read == wanted).all()
    assert len(moves) >= wanted.nbytes / 1000
    assert stream.closed
