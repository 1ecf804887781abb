"""What `make test-cluster` has ready before pytest starts, and what it does beside what."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.testcluster import binaries, images, prometheus, requirements
from tools.testcluster.__main__ import main
from tools.testcluster.errors import BuildFailed, ClusterError, CommandFailed, MissingRequirement

ROOT = Path(__file__).resolve().parents[4]


def would_run(target: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "--dry-run", "--no-print-directory", target]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_that_cluster_tests_need_is_made_before_they_run():
    said = would_run("test-cluster")
    before, run, _ = said.partition("-m pytest -n 2 --dist loadfile tests/cluster")
    assert run
    for wanted in ("tools.testcluster.binaries all --if-usable", "tools.testcluster prepare --if-usable"):
        assert wanted in before


def test_make_test_builds_no_program_and_starts_with_lint():
    said = would_run("test")
    assert "testcluster" not in said
    assert said.index("ruff check") < said.index("-m pytest")


MADE_TEST = {"": 0, "unit": 2, "integration": 2}


@pytest.mark.parametrize("red", MADE_TEST)
def test_both_halves_of_make_test_are_run_and_either_fails_it(tmp_path: Path, red: str):
    """Of the real target; a Python that tells which half it was asked for."""
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nenv lint:\n\t@:\n")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\ncase "$*" in *--ignore=tests/unit*) half=integration;; *) half=unit;; esac\n'
        f'echo "$half"; [ "$half" != "{red}" ]\n'
    )
    (tmp_path / "python").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "--no-print-directory", "test", "VENV=.", "PYTEST_ARGS=", f"-I{ROOT}"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["unit", "integration"]
    assert done.returncode == MADE_TEST[red], done.stderr
    told = {
        "": "",
        "unit": "failed in tests/integration tests/unit tests/shipped;",
        "integration": "failed in the other folders;",
    }[red]
    assert told in done.stderr


def test_programs_are_built_beside_pip_with_live_progress(tmp_path: Path):
    """Of the real targets, with recipes that tell when they are at work."""
    made = tmp_path / "Makefile"
    made.write_text(
        f"include {ROOT}/Makefile\n"
        "env:\n\t@echo env; touch env; until [ -e build ]; do sleep 0.05; done; echo made; touch made\n"
        "testcluster-programs:\n"
        "\t@until [ -e env ]; do sleep 0.05; done; (echo progress >&2) $(PROGRESS); touch build; "
        "until [ -e made ]; do sleep 0.05; done; sleep 0.1\n"
        "testcluster-ready: testcluster-programs env\n\t@echo ready\n"
    )
    words = ["timeout", "60", "make", "test-cluster", "VENV=.", "PYTEST_ARGS=", f"-I{ROOT}", "MAKE=make -f Makefile"]
    pytest_ = tmp_path / "python"
    pytest_.write_text("#!/bin/sh\necho tests\n")
    pytest_.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    said = [line for line in done.stdout.splitlines() if line in ("env", "made", "progress", "ready", "tests")]
    # Each would wait for the other for ever, one after the other; what the build says comes before env's line is over.
    assert said[0] == "progress", done.stdout
    assert said[-1] == "tests", done.stdout
    assert said.index("made") == said.index("env") + 1, "the lines of one recipe stay together"


def test_making_the_environment_tells_what_it_is_at_while_it_is_at_it(tmp_path: Path):
    """Of the real target; a Python that goes on when its reader has read what it said."""
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\ntestcluster-ready: env\n\t@:\n")
    for name, text in (
        ("python", "#!/bin/sh\necho tests\n"),
        (
            "python3",
            '#!/bin/sh\n[ -e done ] && exit 0\necho "env: installing"; echo "Downloading torch" >&2\n'
            "for n in $(seq 200); do [ -e read ] && { touch done; exit 0; }; sleep 0.05; done\n"
            'echo "nobody has read it"; exit 1\n',
        ),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = [
        "timeout",
        "60",
        "make",
        "test-cluster",
        "VENV=.",
        "PYTHON=./python3",
        f"-I{ROOT}",
        "MAKE=make -f Makefile",
    ]
    said: list[str] = []
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as made:
        assert made.stdout is not None
        for line in made.stdout:
            said.append(line.rstrip())
            if {"env: installing", "Downloading torch"} <= set(said):
                (tmp_path / "read").touch()
    assert made.returncode == 0, said
    assert said[-1] == "tests"


def test_only_one_place_skips_cluster_tests_and_it_fails_under_ci():
    skipping = {
        path.name
        for folder in ("cluster", "conformance")
        for path in (ROOT / "tests" / folder).glob("*.py")
        if re.search(r"\bpytest\.skip\(", path.read_text(encoding="utf-8"))
    }
    assert skipping == {"conftest.py"}


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_nothing_is_prepared_where_no_cluster_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, status: int
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["prepare", "--if-usable"]) == status
    assert "nothing is prepared" in capsys.readouterr().err
    assert main(["prepare"]) == 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked for, in order; the machine has it all."""
    order: list[str] = []
    monkeypatch.setattr(requirements, "check", lambda: order.append("check"))
    monkeypatch.setattr(requirements, "ensure", lambda wanted, report: order.extend(sorted(wanted)))
    monkeypatch.setattr(images, "python_base", lambda report: order.append("python base"))
    monkeypatch.setattr(prometheus, "programs", lambda report: order.append("prometheus"))
    monkeypatch.setattr(binaries, "build", lambda what, report, jobs: order.append(what.name))
    return order


PACKAGES = sorted(requirements.FOR_A_CLUSTER)


def test_packages_are_installed_before_programs_are_built_and_before_tests(asked: list[str]):
    assert binaries.main(["all", "--if-usable"]) == 0
    assert asked == ["check", *PACKAGES, "core", "buildkit", "kueue"]
    asked.clear()
    assert main(["prepare", "--if-usable"]) == 0
    assert asked == ["check", *PACKAGES, "python base", "prometheus"]


def refuse(error: ClusterError) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise error

    return refused


@pytest.mark.parametrize("ci", ["", "true"])
def test_what_cannot_be_fetched_costs_the_tests_that_need_it_and_no_others(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str
):
    monkeypatch.setenv("CI", ci)
    mirror = CommandFailed("`debootstrap` ended with 1: Failed getting release file")
    monkeypatch.setattr(images, "python_base", refuse(mirror))
    assert main(["prepare", "--if-usable"]) == (1 if ci else 0)
    assert "Failed getting release file" in (said := capsys.readouterr().err)
    if not ci:
        assert "without Debian's python image the tests that run our own code in pods fail" in said
        assert asked[-1] == "prometheus", "which is another thing"
        asked.clear()
    assert main(["prepare"]) == 1
    assert "prometheus" not in asked


def test_a_missing_prometheus_is_not_told_as_a_machine_without_clusters(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(prometheus, "programs", refuse(MissingRequirement("no package prometheus")))
    assert main(["prepare", "--if-usable"]) == 0
    said = capsys.readouterr().err
    assert "without Prometheus the tests of its figures fail: no package prometheus" in said
    assert "cannot run here" not in said


@pytest.mark.parametrize(
    ("missing", "words", "ci", "status"),
    [
        ("buildkit", ["--if-usable"], "", 0),
        ("buildkit", ["--if-usable"], "true", 1),
        ("buildkit", [], "", 1),
        ("core", ["--if-usable"], "", 1),
    ],
)
def test_only_the_programs_that_every_cluster_test_needs_are_needed_to_begin(
    asked: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
    words: list[str],
    ci: str,
    status: int,
):
    monkeypatch.setenv("CI", ci)

    def build(what: binaries.BuildSet, report: object, jobs: object) -> None:
        if what.name == missing:
            raise BuildFailed("the Go toolchain is not on PATH")

    monkeypatch.setattr(binaries, "build", build)
    assert binaries.main(["all", *words]) == status
    said = capsys.readouterr().err
    assert "the Go toolchain is not on PATH" in said
    assert ("without buildkit the tests that build images fail" in said) is (status == 0)


def test_tests_keep_the_one_variable_that_errors_tell_to_set():
    names = "RLINF_TESTCLUSTER_STATE", "RLINF_LINK_BULK", "https_proxy"
    code = f"import os, tests.conftest; print([name for name in {names} if name in os.environ])"
    environment = {**os.environ, **dict.fromkeys(names, "x")}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['RLINF_TESTCLUSTER_STATE']\n"
