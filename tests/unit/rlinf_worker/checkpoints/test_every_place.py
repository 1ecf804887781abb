"""What a checkpoint is, in a folder and in a bucket of a real S3 server (tests/fakes/s3_server.py)."""

import itertools
import json
from collections.abc import Iterator

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints import places
from rlinf_worker.checkpoints.store import ALONE, Checkpoints, CheckpointUnreadable, CheckpointUnwritable, Writer
from tests.fakes.s3_server import S3Server

FIRST, SECOND = Writer(0, 2), Writer(1, 2)
BUCKETS = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["folder", "bucket"])
def uri(request, s3, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if request.param == "folder":
        return str(tmp_path / "ckpt")
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    bucket = f"ckpt-{next(BUCKETS)}"
    s3.make_bucket(bucket)
    return f"s3://{bucket}/jobs/ppo"


def names(uri: str) -> set[str]:
    """All files in the folders of a place."""
    place = places.of(uri)
    return {f"{name}/{file}" for name in place.top() if not name.startswith(".") for file in place.sizes(name)}


def write(store: Checkpoints, number: int, *, text: str = "weights", writer: Writer = ALONE, branch: int = 0) -> bool:
    version = PolicyVersion(branch, number)
    (store.begin(version, writer) / f"rank-{writer.rank}.bin").write_text(text)
    return store.finish(version, json.dumps({"step": number}), writer)


def read(store: Checkpoints) -> tuple[str, dict[str, str]]:
    found = store.latest()
    assert found is not None
    with found.folder() as folder:
        return str(found.version), {path.name: path.read_text() for path in folder.iterdir()}


def test_what_was_finished_is_the_latest_and_only_the_newest_are_kept(uri):
    saved = []
    store = Checkpoints(uri, keep=2, on_saved=lambda version, at: saved.append(at))
    assert store.latest() is None
    for number in (20, 40, 60):
        assert write(store, number, text=f"of {number}")
    assert read(Checkpoints(uri)) == ("b0-60", {"rank-0.bin": "of 60"})
    assert {name.partition("/")[0] for name in names(uri)} == {"b0-40", "b0-60"}
    assert saved == [f"{uri}/b0-{number}" for number in (20, 40, 60)]


def test_a_checkpoint_of_many_is_there_with_the_last_part(uri):
    actor = Checkpoints(uri, role="actor", roles=("actor", "critic"))
    critic = Checkpoints(uri, role="critic", roles=("actor", "critic"))
    assert not write(actor, 20, writer=SECOND, text="second")
    assert not write(critic, 20, text="critic")
    assert actor.latest() is None
    assert write(actor, 20, writer=FIRST, text="first")
    assert read(actor) == ("b0-20", {"rank-0.bin": "first", "rank-1.bin": "second"})
    assert read(critic) == ("b0-20", {"rank-0.bin": "critic"})


def test_what_was_never_closed_is_not_seen_and_goes(uri):
    store = Checkpoints(uri)
    write(store, 20, writer=FIRST)
    assert store.latest() is None
    write(store, 40)
    assert {name.partition("/")[0] for name in names(uri)} == {"b0-40"}


def test_one_whose_file_is_not_what_was_written_is_passed_over(uri):
    store = Checkpoints(uri)
    write(store, 20)
    write(store, 40)
    places.of(uri).put("b0-40/actor/rank-0.bin", "torn")
    assert read(store)[0] == "b0-20"
    places.of(uri).remove("b0-20/actor/rank-0.bin")
    with pytest.raises(CheckpointUnreadable, match=r"b0-40: actor/rank-0.bin has 4 bytes, wanted 7; b0-20: .* missing"):
        store.latest()
    write(store, 40, text="anew")
    assert read(store) == ("b0-40", {"rank-0.bin": "anew"}), "a damaged one is replaced"


def test_one_that_failed_leaves_nothing(uri):
    told = []
    store = Checkpoints(uri, on_failed=lambda version, problem: told.append(problem))
    write(store, 20, writer=FIRST)
    (store.begin(PolicyVersion(0, 20), SECOND) / "half").write_text("x")
    store.failed(PolicyVersion(0, 20), "no room", SECOND)
    assert (told, names(uri)) == (["no room"], set())
    with pytest.raises(CheckpointUnwritable):
        store.finish(PolicyVersion(0, 20), "{}", SECOND)


def test_a_branch_leaves_its_number(uri):
    store = Checkpoints(uri)
    assert store.highest_branch == 0
    write(store, 20, branch=2)
    assert store.highest_branch == 2
    for branch in (3, 5):
        store.opened(branch)
    assert Checkpoints(uri).highest_branch == 5
    assert sorted(places.of(uri).top()) == [".b5.opened", "b2-20"]


def test_parts_of_a_file_are_read_without_the_rest(uri):
    store = Checkpoints(uri)
    draft = store.begin(PolicyVersion(0, 20))
    (draft / "deep").mkdir()
    (draft / "deep" / ".metadata").write_bytes(bytes(range(100)))
    (draft / "empty").write_bytes(b"")
    store.finish(PolicyVersion(0, 20), "{}")
    found = store.latest()
    assert found is not None
    assert found.files == {"deep/.metadata": 100, "empty": 0}
    with found.open("deep/.metadata") as file:
        assert (file.seek(-10, 2), file.read(3), file.tell(), file.read()) == (90, b"Z[\\", 93, bytes(range(93, 100)))
        assert (file.seek(1), file.read(2)) == (1, b"\1\2")
    with found.folder() as folder:
        assert (folder / "deep" / ".metadata").read_bytes() == bytes(range(100))
        assert (folder / "empty").read_bytes() == b""
    with pytest.raises(FileNotFoundError):
        found.open("none")
