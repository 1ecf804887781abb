"""The commands reach what they name, with what they were given, and say what is wrong with a wrong one."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from tools.testcluster import __main__ as commands
from tools.testcluster import binaries, cgroups, state
from tools.testcluster.cluster import Cluster
from tools.testcluster.faults import Faults
from tools.testcluster.layout import Options

main = commands.main


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> object:
    """Of whatever cluster is attached to; it checks that calls fit the real one's signatures."""
    made = create_autospec(Faults, instance=True)
    monkeypatch.setattr(Cluster, "attach", lambda name: SimpleNamespace(name=name, faults=made))
    return made


def test_every_verb_is_a_command():
    verbs = {name for name, _ in inspect.getmembers(Faults, inspect.isfunction) if not name.startswith("_")}
    assert {verb.replace("-", "_") for verb in commands._VERBS} == verbs


@pytest.mark.parametrize("verb", sorted(commands._VERBS))
def test_a_verb_is_called_with_the_names_it_wants(faults: object, verb: str):
    where = [f"name-{number}" for number, _ in enumerate(commands._VERBS[verb].split())]
    assert main(["fault", verb, *where, "--rate-kbit", "500", "--delay-ms", "20"]) == 0
    more = {"rate_kbit": 500, "delay_ms": 20} if verb == "slow" else {}
    getattr(faults, verb.replace("-", "_")).assert_called_once_with(*where, **more)


def test_a_verb_with_too_few_names_says_what_it_wants(faults: object, capsys: pytest.CaptureFixture[str]):
    assert main(["fault", "cut", "node-0"]) == 1
    assert "fault cut wants 2 names (NODE NODE|hub), and got 1" in capsys.readouterr().err


def test_the_options_of_up_reach_the_cluster(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    made: list[tuple[str, Options]] = []

    def up(name: str, options: Options, *, report: object) -> object:
        made.append((name, options))
        return SimpleNamespace(kubeconfig="/k")

    monkeypatch.setattr(Cluster, "up", up)
    words = "--nodes 3 --kwok-nodes 4 --gang-scheduling --feature-gate A=true --feature-gate B=false "
    words += "--runtime-config g/v=true --resource x.example/y=2 --dra-devices 5 --node-disk-gib 6 --node-grace-s 7 "
    words += "--network-policies --prometheus --with kueue --with jobset --with volcano --audit"
    assert main(["up", "--name", "mine", *words.split()]) == 0
    assert capsys.readouterr().out == "/k\n"
    wanted = Options(
        nodes=3,
        kwok_nodes=4,
        gang_scheduling=True,
        feature_gates=("A=true", "B=false"),
        runtime_config=("g/v=true",),
        extended_resources=("x.example/y=2",),
        dra_devices=5,
        node_disk_gib=6,
        node_monitor_grace_period_s=7,
        network_policies=True,
        prometheus=True,
        kueue=True,
        jobset=True,
        gangs=("volcano",),
        audit=True,
    )
    assert all(getattr(wanted, field) != value for field, value in Options().to_json().items()), "all options are given"
    assert made == [("mine", wanted)]
    assert main(["up"]) == 0
    assert made[-1] == ("dev", Options())


@pytest.mark.parametrize(("there", "said"), [(True, "mine is down"), (False, "mine was not there")])
def test_down_says_whether_there_was_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool, said: str
):
    monkeypatch.setattr(Cluster, "down", lambda name: there)
    assert main(["down", "--name", "mine"]) == 0
    assert said in capsys.readouterr().err


def test_list_tells_clusters_from_remains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(Cluster, "running", lambda: ["dev"])
    monkeypatch.setattr(state, "names", lambda: ["dev", "old"])
    assert main(["list"]) == 0
    said = capsys.readouterr()
    assert said.out == "dev\n"
    assert "`down --name old` removes what is left of it" in said.err


def test_list_tells_to_remove_no_cluster_that_runs_from_another_state_root(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(tmp_path / "here"))
    monkeypatch.setattr(cgroups, "hierarchies", lambda: [tmp_path / "cgroup"])
    # 0 is a process that another pid namespace has; the kernel ends no file without a line's end.
    for name, pids in (("theirs", "4711\n"), ("container", "0\n"), ("empty", ""), ("mine", "4712\n")):
        (tmp_path / "cgroup" / f"rlinf-tc-{name}" / "hub").mkdir(parents=True)
        (tmp_path / "cgroup" / f"rlinf-tc-{name}" / "hub" / "cgroup.procs").write_text(pids)
    (tmp_path / "here" / "mine").mkdir(parents=True)
    assert main(["list"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    lines = {line.split()[1]: line for line in said.err.splitlines()}
    for name in ("theirs", "container"):
        assert f"{name} has processes and no folder in {tmp_path / 'here'}" in lines[name]
        assert "RLINF_TESTCLUSTER_STATE" in lines[name]
    for name in ("empty", "mine"):
        assert f"`down --name {name}` removes what is left of it" in lines[name]


def test_an_archive_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["load", str(tmp_path / "none.tar")]) == 1
    assert "none.tar; `make images` writes them" in capsys.readouterr().err


def test_build_builds_the_set_that_is_named(monkeypatch: pytest.MonkeyPatch):
    built: list[str] = []
    monkeypatch.setattr(binaries, "build", lambda what, report, jobs: built.append(what.name))
    assert main(["build"]) == 0
    assert main(["build", "buildkit"]) == 0
    assert built == ["core", "buildkit"]


def test_two_misbehaviours_at_once_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["proxy", "--drop", "--answer", "429"]) == 1
    assert "one of --answer, --delay-s, --cut-watch-s and --drop at a time" in capsys.readouterr().err
