"""What the cache keeps of images, and what a full disk is told as."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.testcluster import binaries, cluster, images, locks, reaper, requirements, state
from tools.testcluster.errors import ClusterError, MissingRequirement

PAUSE = b"\x7fELF a static program"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(locks, "FOLDER", tmp_path / "locks")
    busybox = tmp_path / "busybox"
    busybox.write_text("#!/bin/sh\necho busybox sh wget\n")
    busybox.chmod(0o755)
    monkeypatch.setattr(images, "BUSYBOX", busybox)
    (tmp_path / "pause").write_bytes(PAUSE)
    return binaries.cache_root()


def test_the_last_version_beside_the_present_one_is_kept(cache: Path, tmp_path: Path):
    made = []
    for number in range(4):
        (tmp_path / "pause").write_bytes(PAUSE + bytes([number]))
        made.append(images.small_images(tmp_path)[0].folder.parent)
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, False, True, True]
    (tmp_path / "pause").write_bytes(PAUSE + bytes([2]))
    images.small_images(tmp_path)  # wanted again: it is the youngest now
    (tmp_path / "pause").write_bytes(PAUSE + bytes([4]))
    images.small_images(tmp_path)
    assert [path.exists() for path in made] == [False, False, True, False]


def test_what_a_killed_making_left_is_removed(cache: Path, tmp_path: Path):
    made = images.small_images(tmp_path)[0].folder.parent
    left = cache / f".making-{made.name}-abcdef"
    left.mkdir()
    made.rename(cache / "elsewhere")
    images.small_images(tmp_path)
    assert not left.exists()


def test_an_image_that_a_power_cut_has_torn_is_made_anew(cache: Path, tmp_path: Path):
    layer = images.small_images(tmp_path)[0].folder / "index.json"
    whole = layer.read_bytes()
    layer.write_bytes(b"")
    images.small_images(tmp_path)
    assert layer.read_bytes() == whole


def test_a_base_that_is_made_needs_no_package_any_more(cache: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    def ensure(wanted: Mapping[str, str], report: object) -> None:
        raise MissingRequirement(f"no {' '.join(wanted)}")

    monkeypatch.setattr(requirements, "ensure", ensure)
    with pytest.raises(MissingRequirement, match="no debootstrap"):
        images.python_base(report=said.append)
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: None)
    monkeypatch.setattr("tools.testcluster.commands.run", lambda *_, **__: "")
    monkeypatch.setattr(images, "write_layout", lambda *_, **__: None)
    monkeypatch.setattr(images, "CA_BUNDLE", cache / "none.crt")
    made = images.python_base(report=said.append)
    monkeypatch.setattr(requirements, "ensure", ensure)
    assert images.python_base(report=said.append) == made


def test_a_full_disk_is_told_by_the_folder_that_is_on_it(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(requirements, "check_root", lambda: None)
    monkeypatch.setattr(requirements, "check", lambda loops: None)
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: None)
    monkeypatch.setattr(binaries, "ready", lambda: tmp_path)
    monkeypatch.setattr(reaper, "sweep", lambda report, clear: None)
    monkeypatch.setattr(state, "LEAST_FREE_BYTES", 0)
    cleared = []
    monkeypatch.setattr(cluster, "_clear", lambda paths: cleared.append(paths.name))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def up() -> None:
        cluster.Cluster.up("full", report=lambda _: None)

    monkeypatch.setattr(cluster, "_make", full)
    with pytest.raises(ClusterError, match=rf"the disk that holds {tmp_path}/state/full is full; free some space"):
        up()
    assert cleared == ["full", "full"], "before, and what was made until then"
    monkeypatch.setattr(images, "write_layout", full)
    (tmp_path / "pause").write_bytes(PAUSE + b"another")
    with pytest.raises(ClusterError, match=rf"the disk that holds {cache} is full; free some space"):
        up()
    assert [path.name for path in cache.glob(".making-*")] == []
