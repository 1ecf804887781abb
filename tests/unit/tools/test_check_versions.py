"""Versions and pins that drift apart are told with the place and the remedy."""

import shutil

import pytest

from tools import check_versions


@pytest.fixture
def clone(tmp_path):
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(check_versions.ROOT / name, tmp_path / name)
    shutil.copytree(check_versions.ROOT / "constraints", tmp_path / "constraints")
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_repository_agrees_with_itself():
    assert check_versions.version_problems(check_versions.ROOT) == []
    assert check_versions.pin_problems(check_versions.ROOT) == []


def test_a_version_without_a_changelog_entry_is_a_problem(clone):
    edit(clone / "CHANGELOG.md", "\n## 0", "\n## 7")
    [problem] = check_versions.version_problems(clone)
    assert "CHANGELOG.md begins with version 7" in problem


def test_a_chart_of_another_version_is_a_problem(clone):
    (clone / "helm" / "rlinf-operator").mkdir(parents=True)
    (clone / "helm" / "rlinf-operator" / "Chart.yaml").write_text(
        'apiVersion: v2\nversion: 9.9.9\nappVersion: "9.9.9"\n'
    )
    assert len(check_versions.version_problems(clone)) == 2


def test_a_requirement_without_a_pin_says_make_constraints(clone):
    edit(clone / "constraints" / "all.txt", "kopf==", "kopf-gone==")
    assert any("pins kopf to nothing" in p and "run make constraints" in p for p in check_versions.pin_problems(clone))


def test_a_pin_outside_its_requirement_is_a_problem(clone):
    edit(clone / "pyproject.toml", '"kopf>=1.45,<2"', '"kopf>=99"')
    assert any("pins kopf to 1." in problem for problem in check_versions.pin_problems(clone))


def test_two_files_that_pin_differently_are_a_problem(clone):
    edit(clone / "constraints" / "rollout.txt", "\nprotobuf==", "\nprotobuf==7.0.0 # ")
    assert any("constraints disagree on protobuf" in problem for problem in check_versions.pin_problems(clone))


def test_what_the_two_engines_pin_differently_is_no_problem_but_anything_else_of_theirs_is(clone):
    assert check_versions.pin_problems(clone) == []
    edit(clone / "constraints" / "all.txt", "\nxgrammar==", "\nxgrammar==7.0.0 # ")
    assert any("constraints disagree on xgrammar" in problem for problem in check_versions.pin_problems(clone))
