"""The state root stays small: locks, failures and clusters that nobody looks after go."""

import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.testcluster import binaries, cgroups, cluster, commands, locks, network, reaper, requirements, state
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError, MissingRequirement, NoSuchCluster, Overdue, StartFailed
from tools.testcluster.layout import Options, Paths
from tools.testcluster.machine import Process, Record

GONE = Process(name=reaper.OWNER, pid=2**22 - 1, started_ticks=1)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(locks, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(cgroups, "remove_abandoned", lambda: None)  # not this machine's
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "state"


def locked(name: str) -> AbstractContextManager[None]:
    return state.locked(Paths.of(name), report=print)


def listing(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_lock_leaves_no_file():
    with locked("a"):
        assert listing(locks.FOLDER) == ["a.lock"]
    with pytest.raises(ValueError, match="no luck"), locked("a"):
        raise ValueError("no luck")
    assert listing(locks.FOLDER) == []


def test_a_name_is_locked_for_every_state_root(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Its cgroups are the machine's: a start under another root would take the cluster of this one for remains."""
    monkeypatch.setattr(locks, "TIMEOUT_S", 0.05)
    said: list[str] = []
    with locked("dev"):
        monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(root / "another"))
        with (
            pytest.raises(Overdue, match=r"waited .* for another `up` or `down` of dev to end"),
            state.locked(Paths.of("dev"), report=said.append),
        ):
            pytest.fail("two hold it")
    assert said == ["waiting for another `up` or `down` of dev to end"]


def test_only_one_at_a_time_holds_a_lock_that_comes_and_goes():
    inside: list[int] = []
    most: list[int] = []

    def often() -> None:
        for _ in range(50):
            with locked("a"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert max(most) == 1
    assert len(most) == 200
    assert listing(locks.FOLDER) == []


def test_logs_of_the_newest_failures_are_kept(root: Path):
    said: list[str] = []
    for number in range(5):
        paths = Paths.of(f"run-{number}")
        paths.logs.mkdir(parents=True)
        (paths.logs / "etcd.log").write_text(str(number))
        state.keep_logs(paths, said.append)
        os.utime(root / f".failed-run-{number}", (number, number))
    kept = [name for name in listing(root) if name.startswith(".failed-")]
    assert kept == [".failed-run-2", ".failed-run-3", ".failed-run-4"]
    assert (root / ".failed-run-4" / "etcd.log").read_text() == "4"
    assert len(said) == 5


def test_a_removal_that_was_cut_short_is_finished_later_and_one_in_progress_is_left_alone(root: Path):
    for name, age_s in ((".removing-old-1", state.ABANDONED_AFTER_S + 60), (".removing-new-1", 0)):
        (root / name / "disks").mkdir(parents=True)
        then = time.time() - age_s
        os.utime(root / name, (then, then))
    state.remove_abandoned()
    assert listing(root) == [".removing-new-1"]


def test_locks_of_those_who_were_killed_go_and_others_stay():
    with locked("held"):
        for name in ("killed.lock", ".SUBNET.lock"):
            (locks.FOLDER / name).touch()
        state.remove_abandoned()
        assert listing(locks.FOLDER) == [".SUBNET.lock", "held.lock"]


@pytest.mark.parametrize("record", ["", "[]", '{"options": {"nodes": 0}, "net": 64, "programs": "/p"}'])
def test_a_record_that_no_cluster_can_have_written_is_no_cluster(root: Path, record: str):
    (root / "dev").mkdir()
    (root / "dev" / "cluster.json").write_text(record)
    assert "dev" in state.names()
    assert Cluster.running() == []
    with pytest.raises(NoSuchCluster):
        Cluster.attach("dev")


@pytest.fixture
def no_loops_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine as it is once clusters hold all its loop devices; nothing of it is asked in earnest."""

    def run(words: list[str], **_: object) -> str:
        return "/dev/loop-there-is-none" if words[0] == "losetup" else ""

    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(requirements, "_knows_overlay", lambda: True)
    monkeypatch.setattr(requirements, "BRIDGE_SETTINGS", Path("/"))
    monkeypatch.setattr(cgroups, "check", lambda: None)
    monkeypatch.setattr(cgroups, "hierarchies", list)  # a cluster of this machine that bears the name is not touched
    monkeypatch.setattr(network, "forget", lambda group: None)
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: None)
    monkeypatch.setattr(binaries, "ready", lambda: Path("/programs"))
    with pytest.raises(MissingRequirement, match="needs loop devices"):
        requirements.check()


@pytest.mark.usefixtures("no_loops_left")
def test_what_would_free_a_loop_device_asks_for_none(root: Path):
    (root / "dev").mkdir()
    with pytest.raises(NoSuchCluster):
        Cluster.attach("dev")
    assert Cluster.down("dev") is True
    assert listing(root) == []


@pytest.mark.usefixtures("no_loops_left")
def test_a_start_first_frees_what_was_left_and_leaves_alone_what_holds_the_last_loop_device(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    reaper.keepers(Paths.of("orphan")).write(GONE)
    with pytest.raises(MissingRequirement, match="needs loop devices"):
        Cluster.up("dev", report=lambda _: None)
    assert listing(root) == [], "what was left is gone, although there is no device for another"
    running: Any = SimpleNamespace(options=Options())
    monkeypatch.setattr(cluster, "_running", lambda paths, programs: running)
    monkeypatch.setattr(state, "loop_devices", lambda paths: ["loop0", "loop1"])
    assert Cluster.up("dev", report=lambda _: None) is running


def test_no_clusters_name_takes_the_lock_of_the_subnets():
    with locked("net"), locks.held(locks.SUBNET, what="a choice", report=print):
        assert listing(locks.FOLDER) == [".SUBNET.lock", "net.lock"]
    with pytest.raises(ClusterError, match="wanted up to 24"):
        Paths.of(locks.SUBNET)


@pytest.mark.parametrize("owner", ["ended", "lives", "none"])
def test_a_cluster_that_runs_is_returned_unless_it_is_about_to_be_taken_down(
    root: Path, monkeypatch: pytest.MonkeyPatch, owner: str
):
    """Its reaper waits for the very lock that `up` holds."""
    paths = Paths.of("dev")
    if owner != "none":
        reaper.keepers(paths).write(GONE if owner == "ended" else Process.of_pid(reaper.OWNER, os.getpid()))
    runs: Any = SimpleNamespace(programs=root, missing=list, well=lambda: True, name="dev")
    monkeypatch.setattr(cluster, "_read", lambda paths: runs)
    assert cluster._running(paths, root) is (None if owner == "ended" else runs)
    fate = f"it ends with process {os.getpid()}" if owner == "lives" else "it stays until `down`"
    assert reaper.fate(paths) == fate


def test_what_nobody_looks_after_is_taken_down_and_nothing_else(root: Path):
    me = Process.of_pid(reaper.OWNER, os.getpid())
    mine = Process.of_pid(reaper.REAPER, os.getpid())
    for name, keepers in (
        ("orphan", [GONE]),
        ("owned", [me]),
        ("reaped", [GONE, mine]),
        ("dev", []),
        ("Not-a-name", [GONE]),
    ):
        folder = root / name
        folder.mkdir()
        for process in keepers:
            Record(folder / "keepers").write(process)
    taken: list[str] = []
    said: list[str] = []

    def clear(paths: Paths) -> None:
        taken.append(paths.name)
        assert "orphan.lock" in listing(locks.FOLDER), "nobody makes it meanwhile"
        raise Overdue("it does not end")

    reaper.sweep(said.append, clear=clear)
    assert taken == ["orphan"]
    assert "it does not end" in said[-1], "and it is no reason not to start another"


def test_a_cluster_that_was_made_anew_while_its_lock_was_waited_for_stays(root: Path, monkeypatch: pytest.MonkeyPatch):
    reaper.keepers(Paths.of("again")).write(GONE)
    taken: list[str] = []
    said: list[str] = []
    lock = state.locked

    @contextmanager
    def late(paths: Paths, **more: Any) -> Iterator[None]:
        with lock(paths, **more):
            reaper.keepers(paths).write(Process.of_pid(reaper.OWNER, os.getpid()))
            yield

    monkeypatch.setattr(state, "locked", late)
    reaper.sweep(said.append, clear=lambda paths: taken.append(paths.name))
    assert (taken, said) == ([], [])


def test_a_reaper_tries_again_and_logs_why(root: Path):
    failures: list[Exception] = [Overdue("3 processes did not end"), OSError(5, "input/output error")]
    asked: list[str] = []

    def down(name: str) -> None:
        asked.append(name)
        if failures:
            raise failures.pop(0)

    reaper.take_down(Paths.of("run-7"), down=down, every_s=0.01)
    assert asked == ["run-7"] * 3
    logged = (root / ".failed-run-7" / "reaper.log").read_text().splitlines()
    assert len(logged) == 2
    assert logged[0].endswith("run-7 could not be taken down: 3 processes did not end")
    assert "input/output error" in logged[1]


@pytest.mark.parametrize("fault", ["full disk", "pruned by another"])
def test_a_reaper_goes_on_where_its_failures_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    failures: list[Exception] = [Overdue("3 processes did not end"), Overdue("1 process did not end")]
    kept = state.failures

    def refuse(paths: Paths) -> Path:
        if fault == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        folder = kept(paths)
        folder.rmdir()
        return folder

    def down(name: str) -> None:
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(state, "failures", refuse)
    reaper.take_down(Paths.of("run-7"), down=down, every_s=0.01)
    assert failures == []


def test_failures_that_another_prunes_meanwhile_are_no_failure(root: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(5):
        (root / f".failed-run-{number}").mkdir()
        os.utime(root / f".failed-run-{number}", (number, number))
    age = Path.stat

    def late(path: Path, **more: Any) -> os.stat_result:
        if path.name == ".failed-run-0" and os.path.isdir(path):
            path.rmdir()
        return age(path, **more)

    monkeypatch.setattr(Path, "stat", late)
    assert state.failures(Paths.of("mine")).is_dir()
    assert listing(root) == [".failed-mine", ".failed-run-3", ".failed-run-4"]


def test_a_start_that_failed_is_cleared_and_told_where_its_logs_cannot_be_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = Paths.of("dev")
    said: list[str] = []
    cleared: list[str] = []

    def make(paths: Paths, **_: object) -> None:
        paths.logs.mkdir(parents=True)
        (paths.logs / "etcd.log").write_text("...")
        raise StartFailed("etcd ended at once")

    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("etcd.log", "kept", "[Errno 28] No space left on device")])

    monkeypatch.setattr(requirements, "check", lambda loops: None)
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: None)
    monkeypatch.setattr(binaries, "ready", lambda: root)
    monkeypatch.setattr("tools.testcluster.images.small_images", lambda programs: [])
    monkeypatch.setattr(state, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(cluster, "_make", make)
    monkeypatch.setattr(cluster, "_clear", lambda paths: cleared.append(paths.name))
    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(StartFailed, match="etcd ended at once"):
        Cluster.up("dev", report=said.append)
    assert cleared == ["dev", "dev"], "before, and what was made until then"
    assert said[-1] == "the logs of the start that failed could not all be kept: [Errno 28] No space left on device"

    def broken(*_: object) -> None:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(state, "keep_logs", broken)
    shutil.rmtree(paths.root)
    with pytest.raises(KeyError):
        Cluster.up("dev", report=said.append)
    assert len(cleared) == 4, "whatever becomes of the logs"


def test_a_reaper_gives_up_in_the_end_and_the_next_start_tries_again(root: Path):
    paths = Paths.of("run-7")
    reaper.keepers(paths).write(GONE)
    asked: list[str] = []

    def down(name: str) -> None:
        asked.append(name)
        raise Overdue("3 processes did not end")

    with pytest.raises(Overdue):
        reaper.take_down(paths, down=down, patience_s=0.05, every_s=0.01)
    assert len(asked) > 1
    asked.clear()
    reaper.sweep(lambda _: None, clear=lambda paths: down(paths.name))
    assert asked == ["run-7"]


def test_a_reaper_leaves_a_cluster_alone_that_another_looks_after(root: Path):
    paths = Paths.of("run-7")
    asked: list[str] = []
    assert reaper.follow(paths, GONE, down=asked.append) is False, "its state folder is gone"
    with subprocess.Popen(["sleep", "60"]) as another:
        reaper.keepers(paths).write(Process.of_pid(reaper.REAPER, another.pid))
        assert reaper.follow(paths, GONE, down=asked.append) is False
        another.kill()
    assert asked == []
    reaper.keepers(paths).write(Process.of_pid(reaper.REAPER, os.getpid()))
    assert reaper.follow(paths, GONE, down=asked.append) is True
    assert asked == ["run-7"]
