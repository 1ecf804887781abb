"""A name belongs to the machine: what another state root runs under it is not taken for remains."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.testcluster import binaries, cgroups, cluster, images, locks, reaper, requirements, state
from tools.testcluster.cluster import Cluster
from tools.testcluster.errors import ClusterError
from tools.testcluster.layout import Paths
from tools.testcluster.machine import Process


@pytest.fixture(autouse=True)
def cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine on which nothing is done in earnest; the names that were cleared."""
    taken: list[str] = []
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path / "ours"))
    (tmp_path / "ours").mkdir()
    monkeypatch.setattr(locks, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path / "cgroup"])
    monkeypatch.setattr(requirements, "check_root", lambda: None)
    monkeypatch.setattr(requirements, "check", lambda **_: None)
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: None)
    monkeypatch.setattr(binaries, "ready", lambda: tmp_path)
    monkeypatch.setattr(images, "small_images", lambda programs: [])
    monkeypatch.setattr(state, "LEAST_FREE_BYTES", 0)
    monkeypatch.setattr(cluster, "_clear", lambda paths: taken.append(paths.name))
    monkeypatch.setattr(cluster, "_make", lambda paths, **_: paths)
    return taken


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Path]:
    """The state folder of a cluster `dev` that runs from another root: its hub's first process, and its cgroup."""
    folder = tmp_path / "theirs" / "dev"
    (folder / "processes").mkdir(parents=True)
    told = {"RLINF_TESTCLUSTER": "dev", "PID_FILE": f"{folder}/processes/.hub.pid"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **told}) as hub:
        group = tmp_path / "cgroup" / "rlinf-tc-dev" / "hub"
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n{hub.pid}\n")
        try:
            yield folder
        finally:
            hub.kill()


def up() -> None:
    Cluster.up("dev", report=lambda _: None)


@pytest.mark.parametrize("remains", [False, True], ids=["nothing here", "remains here"])
def test_a_start_leaves_a_cluster_of_another_state_root_alone(
    theirs: Path, tmp_path: Path, cleared: list[str], remains: bool
):
    if remains:
        (tmp_path / "ours" / "dev").mkdir()
        owner = Process(name=reaper.OWNER, pid=2**22 - 1, started_ticks=1)
        reaper.keepers(Paths.of("dev")).write(owner)
    with pytest.raises(ClusterError, match=f"'dev' runs on this machine already, with its state in {theirs}, not"):
        up()
    assert cleared == []


def test_a_cluster_whose_folder_was_lost_is_cleared(theirs: Path, cleared: list[str]):
    (theirs / "processes").rmdir()
    theirs.rmdir()
    up()
    assert cleared == ["dev"]


def test_ones_own_cluster_is_not_elsewhere(
    theirs: Path, tmp_path: Path, cleared: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path / "theirs"))
    up()
    assert cleared == ["dev"]


def test_processes_of_another_container_are_left_alone(tmp_path: Path, cleared: list[str]):
    group = tmp_path / "cgroup" / "rlinf-tc-dev" / "hub"
    group.mkdir(parents=True)
    (group / "cgroup.procs").write_text("0\n")  # how the kernel writes a process of another pid namespace
    with pytest.raises(ClusterError, match="a place that only another container sees"):
        up()
    assert cleared == []


def test_the_remains_of_a_removal_belong_to_one_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`down dev` beside `down dev-2`: neither removes what the other is removing."""
    monkeypatch.setattr("tools.testcluster.network.forget", lambda group: None)
    for name in (".removing-dev-0123abcd", ".removing-dev-2-0123abcd"):
        (tmp_path / "ours" / name).mkdir()
    state.clear(Paths.of("dev"))
    assert [path.name for path in (tmp_path / "ours").iterdir()] == [".removing-dev-2-0123abcd"]
