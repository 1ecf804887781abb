"""Checkpoints in a bucket: large files, uploads that are broken off, and a store that refuses.

A checkpoint in a bucket is what it is in a folder: test_every_place.py.
"""

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.checkpoints import objects, places
from rlinf_worker.checkpoints.objects import Objects
from rlinf_worker.checkpoints.store import Checkpoints, CheckpointsAway, CheckpointUnreadable, CheckpointUnwritable
from rlinf_worker.driver.settings import DriverSettings
from tests.fakes.refusing_store import RefusingStore
from tests.fakes.s3_server import S3Server

WORDS = bytes(range(256)) * 4
URI = "s3://ckpt/ppo"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch) -> Path:
    """Where drafts lie; and a store that is down is given up within a test's time."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(objects, "RETRIES", 1)
    monkeypatch.setattr(objects, "PART_BYTES", 100)
    return tmp_path


@pytest.fixture
def bucket(s3, monkeypatch) -> str:
    """An empty one."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    s3.ask("POST", "moto-api/reset")
    s3.make_bucket("ckpt")
    return "ckpt"


def save(store: Checkpoints, number: int, words: bytes = WORDS) -> None:
    (store.begin(PolicyVersion(0, number)) / "model.bin").write_bytes(words)
    store.finish(PolicyVersion(0, number), "{}")


# --- large files ------------------------------------------------------------------------------------------------------
def test_a_large_file_lies_in_parts_and_is_read_as_one(s3, bucket):
    save(Checkpoints(URI), 20)
    assert [name for name in s3.names(bucket) if "/model.bin" in name] == [
        f"ppo/b0-20/actor/model.bin/.part-{number:05}-of-00011" for number in range(11)
    ]
    found = Checkpoints(URI).latest()
    assert found is not None
    assert found.files == {"model.bin": len(WORDS)}
    with found.folder() as folder:
        assert (folder / "model.bin").read_bytes() == WORDS
    with found.open("model.bin") as file:
        assert (file.seek(95), file.read(210)) == (95, WORDS[95:305])
        assert (file.seek(0, os.SEEK_END), file.read()) == (len(WORDS), b"")


def test_who_reads_some_bytes_fetches_these_and_not_the_file(bucket, monkeypatch):
    monkeypatch.setattr(objects, "BUFFER_BYTES", 16)
    save(Checkpoints(URI), 20)
    fetched = []
    fetch = Objects._range

    def counted(self: Objects, name: str, *, start: int, length: int) -> bytes:
        fetched.append(length)
        return fetch(self, name, start=start, length=length)

    monkeypatch.setattr(Objects, "_range", counted)
    found = Checkpoints(URI).latest()
    assert found is not None
    with found.open("model.bin") as file:
        file.seek(590)
        assert file.read(40) == WORDS[590:630]
    assert 40 <= sum(fetched) <= 80


def test_a_part_that_is_missing_makes_the_file_too_short(bucket):
    save(Checkpoints(URI), 20)
    Objects(URI).remove("b0-20/actor/model.bin/.part-00004-of-00011")
    with pytest.raises(CheckpointUnreadable, match=r"actor/model.bin has 924 bytes, wanted 1024"):
        Checkpoints(URI).latest()


def test_a_store_that_swallows_all_is_given_up_before_the_driver_takes_the_last_checkpoint_for_lost():
    assert DriverSettings().save_timeout_s > 2 * (objects.REQUEST_S + objects.RETRY_S)


def test_at_most_so_many_bytes_are_in_memory_at_once(bucket, monkeypatch):
    sizes = []
    send = Objects._send

    def counted(self: Objects, name: str, words: bytes) -> None:
        sizes.append(len(words))
        send(self, name, words)

    monkeypatch.setattr(Objects, "_send", counted)
    save(Checkpoints(URI), 20)
    assert max(sizes[:11]) == 100
    assert objects.STREAMS * 32 * 2**20 == 128 * 2**20, "what docs/recovery.md says of memory"


def test_bytes_that_go_and_come_are_told_as_work_that_moves(bucket):
    moves = []
    store = Checkpoints(URI, moved=lambda: moves.append(1))
    save(store, 20)
    assert len(moves) >= 11
    moves.clear()
    found = store.latest()
    assert found is not None
    with found.folder():
        assert len(moves) >= 11


# --- broken off -------------------------------------------------------------------------------------------------------
KILLED = textwrap.dedent("""
    import os, signal
    from rlinf_worker.channels.protocol import PolicyVersion
    from rlinf_worker.checkpoints import objects
    from rlinf_worker.checkpoints.store import Checkpoints

    objects.PART_BYTES, sent, send = 100, [], objects.Objects._send

    def until(self, name, words):
        send(self, name, words)
        sent.append(name)
        if name.endswith({last!r}):
            os.kill(os.getpid(), signal.SIGKILL)

    objects.Objects._send = until
    store = Checkpoints({uri!r})
    (store.begin(PolicyVersion(0, 40)) / "model.bin").write_bytes(bytes(range(256)) * 4)
    store.finish(PolicyVersion(0, 40), "{{}}")
""")


@pytest.mark.parametrize("last", [".part-00003-of-00011", "actor.0-of-1", "driver.json"])
def test_an_upload_of_a_killed_process_is_never_seen_and_goes_with_the_next(s3, bucket, here, last):
    store = Checkpoints(URI)
    save(store, 20)
    command = [sys.executable, "-c", KILLED.format(last=last, uri=URI)]
    assert subprocess.run(command, timeout=50, check=False).returncode == -signal.SIGKILL
    found = Checkpoints(URI).latest()
    assert found is not None
    assert found.version == PolicyVersion(0, 20)
    assert any("ppo/b0-40/actor" in name for name in s3.names(bucket)), "it had begun"
    assert s3.unfinished(bucket) == [], "there is nothing that no listing shows"
    save(store, 60)
    assert {name.split("/")[1] for name in s3.names(bucket)} == {"b0-20", "b0-60"}
    left = [path for path in here.glob("rlinf-*/*") if path.name != str(os.getpid())]
    assert left == [], "nor what it had on its own disk"


def test_the_own_disk_is_empty_when_all_is_sent_or_read(bucket, here):
    store = Checkpoints(URI)
    save(store, 20)
    found = store.latest()
    assert found is not None
    with found.folder() as folder:
        assert folder.is_relative_to(here)
    assert [path for path in here.rglob("*") if path.is_file()] == []


def test_a_folder_of_another_user_is_not_written_to(bucket, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CheckpointUnwritable, match=r"belongs to another user.*TMPDIR"):
        Checkpoints(URI).begin(PolicyVersion(0, 20))


def test_a_removal_that_is_broken_off_leaves_no_checkpoint(bucket, monkeypatch):
    save(Checkpoints(URI), 20)
    save(Checkpoints(URI), 40)
    monkeypatch.setattr(Objects, "_below", lambda self, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Objects(URI).remove_all("b0-40")
    assert not Objects(URI).exists("b0-40/COMMIT")


# --- a store that refuses ---------------------------------------------------------------------------------------------
RIGHTS = "give these rights to the pods' service account, or to the key in the pools' templates"
WANTED = "wanted a bucket in which the pods of the job may list, read, write and delete objects"
REFUSALS = {
    (403, "AccessDenied"): ("access denied (403 AccessDenied)", RIGHTS),
    (403, "InvalidAccessKeyId"): ("access denied (403 InvalidAccessKeyId)", RIGHTS),
    (401, "Unauthorized"): ("access denied (401 Unauthorized)", RIGHTS),
    (403, "QuotaExceeded"): ("no room (403 QuotaExceeded)", "raise the bucket's quota or lower spec.checkpoint.keep"),
    (507, "XMinioStorageFull"): ("no room (507 XMinioStorageFull)", "raise the bucket's quota or lower "),
    (503, "SlowDown"): ("an answer of 503 SlowDown", "look at the store; it is tried again"),
    (400, "InvalidRequest"): ("an answer of 400 InvalidRequest", "look at the store, and at spec.checkpoint.uri"),
    (301, "PermanentRedirect"): ("bucket 'ckpt' of another region", "set AWS_REGION in the pools' templates"),
    (0, ""): ("no answer", "look at the pods' network, and at AWS_ENDPOINT_URL where the store is not Amazon's"),
}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal[1] or "cut")
def test_a_store_that_refuses_is_a_sentence_at_the_start_and_in_a_save(refusal, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    status, code = refusal
    got, then = REFUSALS[refusal]
    with RefusingStore(status=status, code=code) as refusing:
        for name, value in refusing.variables.items():
            monkeypatch.setenv(name, value)
        store = Checkpoints(URI)
        with pytest.raises((CheckpointUnreadable, CheckpointsAway)) as at_the_start:
            store.latest()
        with pytest.raises(CheckpointUnwritable) as in_a_save:
            store.begin(PolicyVersion(0, 20))
        store.failed(PolicyVersion(0, 20), str(in_a_save.value))
    assert str(at_the_start.value).startswith(f"the checkpoint place {URI} cannot be read: got {got}, {WANTED}; {then}")
    assert str(in_a_save.value).startswith(f"checkpoint {URI}/b0-20 cannot be written: got {got}, {WANTED}; {then}")
    assert isinstance(at_the_start.value, CheckpointsAway) is (status in (0, 503)), "what passes is tried again"
    told = f"{at_the_start.getrepr(style='long')}{in_a_save.getrepr(style='long')}{caplog.text}"
    assert "made-up" not in told, "no key, and not the id of one"


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("403 <Code>QuotaExceeded</Code>", None),
        ("403 <Code>AccessDenied</Code>", CheckpointUnwritable),
        ("503 <Code>SlowDown</Code>", CheckpointsAway),
    ],
)
def test_a_full_bucket_does_not_keep_a_restarted_actor_from_its_last_checkpoint(bucket, monkeypatch, words, ends):
    save(Checkpoints(URI), 20)

    def refuse(self: Objects, name: str, sent: bytes) -> None:
        raise objects.refused(f"status code: {words}", uri=URI)

    monkeypatch.setattr(Objects, "_send", refuse)
    if ends is None:
        assert Checkpoints(URI).latest() is not None
    else:
        with pytest.raises(ends):
            Checkpoints(URI).latest()


def test_a_store_that_is_away_for_a_moment_is_no_reason_to_go_on_from_an_older_one(bucket, monkeypatch):
    save(Checkpoints(URI), 20)
    save(Checkpoints(URI), 40)

    def away(self: Objects, folder: str) -> dict[str, int]:
        raise objects.refused("status code: 503 <Code>SlowDown</Code>", uri=URI)

    monkeypatch.setattr(Objects, "sizes", away)
    for ask in (lambda store: store.latest(), lambda store: store.of("b0-40")):
        with pytest.raises(CheckpointsAway, match=r"got an answer of 503 SlowDown.*it is tried again"):
            ask(Checkpoints(URI))


def test_a_store_that_takes_all_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(objects, "REQUEST_S", 0.2)
    with RefusingStore(status=None) as silent:
        for name, value in silent.variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match="no answer"):
            Objects(URI).put("b0-20/COMMIT", "{}")
    assert len(silent.asked) == 2, "tried again once"


def test_a_bucket_that_is_not_there_is_named(s3, bucket):
    with pytest.raises(
        CheckpointUnreadable, match=r"got no bucket 'none', wanted .*; make it or correct spec.checkpoi"
    ):
        Checkpoints("s3://none/ppo").latest()
    with pytest.raises(CheckpointUnwritable, match="got no bucket 'none'"):
        Checkpoints("s3://none/ppo").begin(PolicyVersion(0, 20))
    for ask in (lambda place: place.put("b0-20/COMMIT", "{}"), lambda place: place.read("b0-20/COMMIT")):
        with pytest.raises(OSError, match="no bucket 'none'"):  # and not as if it had no such file
            ask(Objects("s3://none/ppo"))


def test_an_endpoint_where_nobody_listens_is_given_up(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(CheckpointsAway, match=r"got no answer, wanted .*; look at the pods' network"):
        Checkpoints(URI).latest()


def test_a_machine_without_credentials_is_told_so():
    text = "Error performing PUT http://169.254.169.254/latest/api/token - status code: 403 Forbidden"
    assert objects.refused(text, uri=URI).owed.got == "no credentials"


def test_after_the_first_part_that_is_refused_the_others_are_not_tried(monkeypatch):
    with RefusingStore(status=403, code="AccessDenied") as refusing:
        for name, value in refusing.variables.items():
            monkeypatch.setenv(name, value)
        place = Objects(URI)
        (place.draft("b0-20/.actor.0-of-1") / "model.bin").write_bytes(bytes(100 * 200))
        with pytest.raises(OSError, match="access denied"):
            place.take_in("b0-20/.actor.0-of-1", "b0-20/actor")
        assert len(refusing.asked) < 50


# --- other schemes ----------------------------------------------------------------------------------------------------
def test_google_s_store_is_asked_for_by_its_own_scheme():
    place = places.of("gs://ckpt/jobs/ppo/")
    assert (place.what, place.at("b0-20")) == ("the checkpoint place gs://ckpt/jobs/ppo", "gs://ckpt/jobs/ppo/b0-20")
    assert repr(place._store) == 'GCSStore(bucket="ckpt", prefix="jobs/ppo")'  # type: ignore[attr-defined]


def test_the_library_of_stores_is_loaded_where_one_is_named():
    """It takes 10 MB, of a worker that has 45."""
    program = "import sys, rlinf_worker.checkpoints.store; assert 'obstore' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True)
