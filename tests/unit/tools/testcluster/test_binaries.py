"""The cache of built programs: complete or absent, and keyed by what decides what they are."""

import dataclasses
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from tools.testcluster import binaries, jobset, seals
from tools.testcluster.binaries import BuildSet
from tools.testcluster.errors import BuildFailed, NotBuilt
from tools.testcluster.layout import Paths
from tools.testcluster.machine import SYSTEM_PATH, Machine


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildSet:
    """A set of one program and a stand-in for `go` that makes it."""
    module = tmp_path / "module"
    module.mkdir()
    (module / "go.mod").write_text("module m\n")
    (module / "main.go").write_text("package main\n")
    bin = tmp_path / "bin"
    bin.mkdir()
    go = bin / "go"
    go.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        'version) echo "go version go1.99" ;;\n'
        'list) echo "m" ;;\n'
        "build)\n"
        '  for word; do case "$word" in */) out="$word" ;; esac; done\n'
        '  [ -z "$BROKEN" ] || { echo "main.go:1: broken" >&2; exit 1; }\n'
        '  echo compiled >&2; echo program > "$out/main" ;;\n'
        "esac\n"
    )
    go.chmod(go.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return BuildSet(name="small", module=module, programs={"tool": "m/main"})


def test_a_build_is_made_once(small: BuildSet):
    said: list[str] = []
    first = binaries.build(small, report=said.append)
    assert sorted(path.name for path in first.iterdir()) == [seals.SEAL, "tool"]
    assert any("built in" in text for text in said)
    said.clear()
    assert binaries.build(small, report=said.append) == first
    assert said == []


def test_files_of_a_module_lie_beside_the_programs(small: BuildSet, tmp_path: Path):
    source = tmp_path / "module-cache" / "config"
    (source / "crds").mkdir(parents=True)
    (source / "crds" / "a.yaml").write_text("kind: A\n")
    (source / "hooks.yaml").write_text("kind: B\n")
    (source / "crds").chmod(0o555)
    go = tmp_path / "bin" / "go"
    go.write_text(go.read_text().replace('list) echo "m"', f'list) echo "{source.parent}"'))
    wanted = {"crds": "example.org/m:config/crds", "hooks.yaml": "example.org/m:config/hooks.yaml"}
    with_files = dataclasses.replace(small, files=wanted)
    assert binaries.folder(with_files) != binaries.folder(small), "what they are made of decides, too"
    made = binaries.build(with_files, report=lambda text: None)
    assert (made / "crds" / "a.yaml").read_text() == "kind: A\n"
    assert (made / "hooks.yaml").read_text() == "kind: B\n"
    assert (made / "crds").stat().st_mode & 0o200, "or a later build could not remove it"


def test_a_changed_source_is_another_build(small: BuildSet):
    before = binaries.folder(small)
    (small.module / "main.go").write_text("package main // changed\n")
    assert binaries.folder(small) != before


def test_a_build_that_failed_leaves_nothing_and_says_why(small: BuildSet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(BuildFailed, match=r"main\.go:1: broken"):
        binaries.build(small, report=lambda _: None)
    assert [path for path in binaries.cache_root().iterdir() if path.is_dir()] == []
    with pytest.raises(NotBuilt, match="testcluster build small"):
        binaries.ready(small)


def test_what_a_killed_build_left_is_removed(small: BuildSet):
    """Of these sources, of others that nobody builds any more, and of a version that named its scratch otherwise."""
    own = binaries.folder(small).name
    abandoned = [f"{own}-999999", "small-0123456789abcdef-999999", "core-0123456789abcdef-1", "small-999999"]
    for name in abandoned:
        (binaries.cache_root() / f".building-{name}").mkdir(parents=True)
    (binaries.cache_root() / "core-0123456789abcdef.lock").touch()
    binaries.build(small, report=lambda _: None)
    assert list(binaries.cache_root().glob(".building-*")) == []


def test_a_build_leaves_alone_what_another_makes_from_other_sources(
    small: BuildSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Each is at work when the other looks for what was left."""
    scratches: list[str] = []
    compile_ = binaries._compile

    def meanwhile(what: BuildSet, scratch: Path, **more: Any) -> None:
        if not scratches:
            scratches.append(scratch.name)
            another = tmp_path / "another"
            shutil.copytree(small.module, another)
            (another / "main.go").write_text("package main // of another branch\n")
            binaries.build(BuildSet(name="small", module=another, programs=small.programs), report=lambda _: None)
            assert scratch.is_dir()
        else:
            scratches.append(scratch.name)
        compile_(what, scratch, **more)

    monkeypatch.setattr(binaries, "_compile", meanwhile)
    assert (binaries.build(small, report=lambda _: None) / "tool").exists()
    assert len(set(scratches)) == 2


def test_one_other_version_is_kept(small: BuildSet):
    made = []
    for number in range(3):
        (small.module / "main.go").write_text(f"package main // {number}\n")
        made.append(binaries.build(small, report=lambda _: None))
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, True, True]


def other_versions(small: BuildSet, first: int) -> None:
    for number in range(first, first + 3):
        (small.module / "main.go").write_text(f"package main // {number}\n")
        os.utime(binaries.build(small, report=lambda _: None), (number, number))


def test_programs_of_a_cluster_that_runs_stay(small: BuildSet, tmp_path: Path):
    """Its hub's first process inherits the lock, and with it the lock goes."""
    hub = Machine("hub", Paths(name="dev", root=tmp_path / "dev"), programs=tmp_path)
    programs = binaries.build(small, report=lambda _: None)
    os.utime(programs, (1, 1))
    words = ["setsid", "--fork", "sh", "-c", 'echo $$ >"$PID_FILE"; exec sleep 60']
    with binaries.use(programs) as used:
        told = {"PATH": SYSTEM_PATH, "PID_FILE": str(hub.paths.processes / ".hub.pid")}
        first = hub._launch(words, told, name="hub", holding=[used])
    try:
        other_versions(small, 10)
        assert binaries.ready(BuildSet(name="small", module=small.module, programs=small.programs)) != programs
        assert (programs / "tool").exists()
    finally:
        first.end()
    other_versions(small, 20)
    assert not programs.exists()
    assert [path.name for path in binaries.cache_root().glob(f"{programs.name}.[!l]*")] == []


def test_programs_that_were_removed_meanwhile_are_not_used(small: BuildSet):
    programs = binaries.build(small, report=lambda _: None)
    shutil.rmtree(programs)
    with pytest.raises(NotBuilt, match="just removed by a build of another version; try again"):
        binaries.use(programs)


def test_programs_that_are_built_need_no_go_any_more(small: BuildSet, monkeypatch: pytest.MonkeyPatch):
    built = binaries.build(small, report=lambda _: None)

    def gone() -> str:
        raise BuildFailed("the Go toolchain is not on PATH")

    monkeypatch.setattr(binaries, "_go", gone)
    assert binaries.ready(small) == built
    assert binaries.build(small, report=lambda _: None) == built
    (small.module / "main.go").write_text("package main // changed\n")
    with pytest.raises(BuildFailed, match="Go toolchain is not on PATH"):
        binaries.ready(small)


def test_what_is_known_of_a_version_goes_with_it(small: BuildSet):
    for number in range(4):
        (small.module / "main.go").write_text(f"package main // {number}\n")
        os.utime(binaries.build(small, report=lambda _: None), (number, number))
    root = binaries.cache_root()
    assert {path.stem for path in root.glob("*.toolchain")} == {path.name for path in root.iterdir() if path.is_dir()}


def test_every_set_names_its_own_module():
    for build in binaries.SETS.values():
        assert (build.module / "go.mod").exists()
        assert (build.module / "go.sum").exists()


def test_kueue_is_made_for_the_jobset_that_runs_beside_it():
    text = (binaries.KUEUE_MODULE / "go.mod").read_text(encoding="utf-8")
    assert f"sigs.k8s.io/jobset {jobset.version()}\n" in text


@pytest.mark.parametrize("damage", ["empty", "short", "lost", "no seal and empty", "torn seal"])
def test_programs_that_a_power_cut_has_torn_are_built_anew(small: BuildSet, damage: str):
    where = binaries.build(small, report=lambda _: None)
    tool, seal = where / "tool", where / seals.SEAL
    whole = tool.read_bytes()
    if damage == "lost":
        tool.unlink()
    elif damage == "torn seal":
        seal.write_bytes(b"")
    else:
        tool.write_bytes(whole[:3] if damage == "short" else b"")
    if damage.startswith("no seal"):
        seal.unlink()
    with pytest.raises(NotBuilt, match="are not all in"):
        binaries.ready(small)
    assert binaries.build(small, report=lambda _: None) == where
    assert tool.read_bytes() == whole
    assert binaries.ready(small) == where


def test_programs_of_a_version_that_sealed_nothing_are_taken(small: BuildSet):
    where = binaries.build(small, report=lambda _: None)
    (where / seals.SEAL).unlink()
    assert binaries.ready(small) == where
    (where / "tool").write_bytes(b"")
    with pytest.raises(NotBuilt):
        binaries.ready(small)


def test_all_is_on_the_disk_before_it_has_its_name(small: BuildSet, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    rename = Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))

    def replace(path: Path, target: Path) -> Path:
        done.append(f"{Path(target).name}")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    where = binaries.build(small, report=lambda _: None)
    named = done.index(where.name)
    assert {Path(path).name for path in done[:named]} >= {"tool", seals.SEAL}
    assert done[named + 1] == str(where.parent)
