"""What `make test` has ready before pytest starts, and what it does beside what."""

import os
import re
import subprocess
from pathlib import Path

import pytest

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
    said = would_run("test")
    before, run, _ = said.partition("-m pytest --slow")
    assert run
    for wanted in ("tools.testcluster.binaries all --if-usable", "tools.testcluster base --if-usable"):
        assert wanted in before


def test_only_one_place_skips_cluster_tests_and_it_fails_under_ci():
    skipping = {
        path.name
        for folder in ("cluster", "conformance")
        for path in (ROOT / "tests" / folder).glob("*.py")
        if re.search(r"\bpytest\.skip\(", path.read_text(encoding="utf-8"))
    }
    assert skipping == {"conftest.py"}


@pytest.mark.parametrize(("ci", "status"), [("", 0), ("true", 1)])
def test_no_base_image_is_made_where_no_cluster_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, status: int
):
    from tools.testcluster.__main__ import main

    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["base", "--if-usable"]) == status
    assert "no base image is made" in capsys.readouterr().err
    assert main(["base"]) == 1
