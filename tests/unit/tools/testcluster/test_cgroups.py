"""Which cgroups of image builds go, and which stay."""

import os
from pathlib import Path

import pytest

from tools.testcluster import cgroups


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path])
    return tmp_path


def test_groups_of_builds_go_whose_process_is_gone(top: Path):
    gone, here = f"{cgroups.FOR_BUILDS}{2**22 - 1}", f"{cgroups.FOR_BUILDS}{os.getpid()}"
    for name in (gone, here, "rlinf-tc-dev"):
        (top / name / "buildkit").mkdir(parents=True)
    cgroups.remove_abandoned()
    assert sorted(path.name for path in top.iterdir()) == [here, "rlinf-tc-dev"]


def test_a_group_in_which_a_process_lives_stays(top: Path):
    (top / "group" / "empty").mkdir(parents=True)
    (top / "group" / "cgroup.procs").write_text("0\n")
    cgroups.remove_empty("group", timeout_s=5)
    assert (top / "group" / "empty").is_dir()


def test_a_group_that_is_not_freed_in_time_is_left(top: Path):
    (top / "group").mkdir()
    (top / "group" / "held").touch()  # what the kernel answers with EBUSY
    cgroups.remove_empty("group", timeout_s=0.05)
    assert (top / "group").is_dir()
