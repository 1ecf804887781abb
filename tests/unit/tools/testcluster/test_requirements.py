"""What a machine lacks is one sentence, and what it can be given is installed or loaded."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.testcluster import cgroups, commands, requirements
from tools.testcluster.errors import CommandFailed, MissingRequirement


def test_a_plain_user_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingRequirement, match="needs root, and this is user 1000"):
        requirements.check()


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A machine that can run clusters, as far as `check` asks; the commands that it was asked to run."""
    asked: list[list[str]] = []
    (tmp_path / "filesystems").write_text("nodev\tproc\nnodev\toverlay\n")
    (tmp_path / "loop0").touch()
    (tmp_path / "bridge").touch()

    def run(words: list[str], **_: object) -> str:
        asked.append(words)
        return f"{tmp_path}/loop0\n" if words[0] == "losetup" else ""

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "FILESYSTEMS", tmp_path / "filesystems")
    monkeypatch.setattr(requirements, "BRIDGE_SETTINGS", tmp_path / "bridge")
    (tmp_path / "mounts").write_text(f"devtmpfs {tmp_path} devtmpfs rw,relatime 0 0\n")
    monkeypatch.setattr(requirements, "DEV", tmp_path)
    monkeypatch.setattr(requirements, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(requirements, "SYS_BLOCK", tmp_path / "block")
    monkeypatch.setattr(requirements, "LOOP_CONTROL", tmp_path / "loop-control")
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path])
    monkeypatch.setattr("tools.testcluster.commands.run", run)
    return asked


def fail(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Of all commands, that one."""
    others: Callable[..., str] = commands.run

    def run(words: list[str], **more: Any) -> str:
        if words[0] == program:
            raise CommandFailed(f"{program}: not permitted")
        return others(words, **more)

    monkeypatch.setattr("tools.testcluster.commands.run", run)


def test_a_machine_that_has_all_is_not_complained_of_and_a_module_of_loops_is_loaded(able: list[list[str]]):
    requirements.check()
    assert [words[0] for words in able] == ["unshare", "modprobe", "losetup"]


def test_a_module_that_is_not_loaded_yet_is_loaded(able: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    requirements.FILESYSTEMS.write_text("nodev\tproc\n")
    with pytest.raises(MissingRequirement, match="needs overlayfs, which this kernel neither has nor can load"):
        requirements.check()
    assert able == [["modprobe", "overlay"]]
    others: Callable[..., str] = commands.run

    def load(words: list[str], **more: Any) -> str:
        if words == ["modprobe", "overlay"]:
            requirements.FILESYSTEMS.write_text("nodev\tproc\nnodev\toverlay\n")
        return others(words, **more)

    monkeypatch.setattr("tools.testcluster.commands.run", load)
    requirements.check()


def test_bridges_that_iptables_does_not_see_are_missed_or_shown_to_it(
    able: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    requirements.BRIDGE_SETTINGS.unlink()
    with pytest.raises(MissingRequirement, match="needs br_netfilter, which this kernel neither has nor can load"):
        requirements.check()
    assert able[-1] == ["modprobe", "br_netfilter"]
    others: Callable[..., str] = commands.run

    def load(words: list[str], **more: Any) -> str:
        if words == ["modprobe", "br_netfilter"]:
            requirements.BRIDGE_SETTINGS.touch()
        return others(words, **more)

    monkeypatch.setattr("tools.testcluster.commands.run", load)
    requirements.check()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [("unshare", "needs mount, network and pid namespaces: .*not permitted"), ("losetup", "needs loop devices: ")],
)
def test_a_machine_that_lacks_an_ability_is_told_in_one_sentence(
    able: list[list[str]], monkeypatch: pytest.MonkeyPatch, program: str, sentence: str
):
    fail(monkeypatch, program)
    with pytest.raises(MissingRequirement, match=sentence):
        requirements.check()


def test_a_loop_device_without_a_file_in_dev_is_missed(able: list[list[str]], tmp_path: Path):
    (tmp_path / "loop0").unlink()
    with pytest.raises(MissingRequirement, match="loop0 is not there; give a container the machine's /dev"):
        requirements.check()


def test_too_few_loop_devices_are_missed_where_the_kernel_cannot_add_any(able: list[list[str]], tmp_path: Path):
    """A container's /dev has those that it was given."""
    for number in (1, 2):
        (tmp_path / f"loop{number}").touch()
    (tmp_path / "block" / "loop1" / "loop").mkdir(parents=True)  # taken
    requirements.check(loops=3)
    (tmp_path / "mounts").write_text(f"tmpfs {tmp_path} tmpfs rw 0 0\ndevtmpfs /elsewhere devtmpfs rw 0 0\n")
    requirements.check(loops=2)
    with pytest.raises(MissingRequirement, match=f"for each of 3 nodes, and 2 of those in {tmp_path} are free"):
        requirements.check(loops=3)


def test_cgroups_that_cannot_be_made_are_told_in_one_sentence(able: list[list[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [Path("/proc")])  # no folder can be made there
    with pytest.raises(MissingRequirement, match="needs to make cgroups, and /proc refuses: "):
        requirements.check()


def test_cgroups_that_give_nothing_on_are_told_in_one_sentence(
    able: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """v2 in a container: folders can be made in its top, which holds processes and so gives no controller on."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "cgroup.subtree_control").touch()
    monkeypatch.setattr(cgroups, "is_v2", lambda: True)
    requirements.check()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory"
    others = Path.write_text

    def busy(path: Path, text: str, **more: Any) -> int:
        if path.name == "cgroup.subtree_control":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return others(path, text, **more)

    monkeypatch.setattr(Path, "write_text", busy)
    with pytest.raises(MissingRequirement, match=f"needs to make cgroups, and {tmp_path} refuses: Device or resource"):
        requirements.check()


def test_a_debian_package_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def refuse(words: list[str], **_: object) -> str:
        asked.append(words[1])
        raise CommandFailed("E: Unable to locate package")

    monkeypatch.setattr("tools.testcluster.commands.run", refuse)
    monkeypatch.setattr("shutil.which", lambda name, path=None: name if name == "apt-get" else None)
    with pytest.raises(MissingRequirement, match="could not be installed: no-such-package"):
        requirements.ensure({"no-such-program": "no-such-package"}, report=lambda _: None)
    assert asked == ["install", "update"]
