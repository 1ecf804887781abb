"""The shape of the repository that tools, images and people rely on."""

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import budget as tools_budget

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rlinf_api", "rlinf_operator", "rlinf_scheduler", "rlinf_worker", "rljob")
REQUIRED = (
    *("operator", "worker_images", "crds", "helm", "rlinf_worker", "tests", "Dockerfile", "pyproject.toml"),
    *("rlinf_api", "rljob", "docs", "examples", "tools", "constraints"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "LICENSE", "Makefile", ".ci/run"),
)


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def committed_files():
    return [name for name in git("ls-files").splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("name", REQUIRED)
def test_the_required_top_level_is_there(name):
    assert (ROOT / name).exists(), f"{name} is missing; the layout is in docs/architecture.md"


def test_operator_is_a_source_root_and_never_a_package():
    assert not (ROOT / "operator" / "__init__.py").exists(), (
        "operator/__init__.py makes `import operator` import this folder and not Python's module; remove it"
    )
    code = "import operator; print(operator.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout.replace(str(ROOT / ".venv"), "")


def test_no_test_folder_is_a_package():
    assert [str(p) for p in (ROOT / "tests").rglob("__init__.py")] == []


def test_nothing_is_called_utils():
    offenders = [n for n in committed_files() if re.search(r"(^|/)(\w+_)?(utils?|helpers?|common|misc)(\.py|/)", n)]
    assert offenders == [], "a helper goes in a file named for its subject"


def test_no_two_classes_of_the_product_have_one_name():
    """Whoever reads it in a log or an error looks in one place. Those with an underscore are their module's alone."""
    product = [ROOT / "rlinf_api", ROOT / "rlinf_worker", ROOT / "rljob", ROOT / "operator"]
    where: dict[str, list[str]] = {}
    for path in (path for folder in product for path in sorted(folder.rglob("*.py")) if "_pb" not in path.parts):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(where) > 400
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_no_docstring_or_comment_of_the_product_begins_with_of():
    """A newcomer learns nothing from "Of one job". "What is known of one job" says it."""
    folders = ("rlinf_api/", "rlinf_worker/", "rljob/", "operator/", "tools/")
    files = [name for name in committed_files() if name.endswith(".py") and name.startswith(folders)]
    found = []
    for name in (name for name in files if "/_pb/" not in name):
        lines = (ROOT / name).read_text().splitlines()
        for number, (before, line) in enumerate(itertools.pairwise(["", *lines]), 1):
            goes_on = before.lstrip().startswith("#")  # a comment, of which this line is not the first
            if re.search(r'""" ?Of\b' if goes_on else r'("""|#) ?Of\b', line):
                found.append(f"{name}:{number}: {line.strip()}")
    assert len(files) > 500
    assert found == [], "say what it is: a short sentence with a subject"


def test_packages_import_from_anywhere(tmp_path):
    code = f"import {', '.join(PACKAGES)}"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_ci_runs_targets_of_the_makefile_and_nothing_else():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    tests = 'tests="make test" tests="make test-slow" tests="make test-cluster"'
    assert commands == [
        "set -euo pipefail", 'cd "$(dirname "$0")/.."', f"exec python3 tools/lanes.py {tests} \\",
        '    programs="make testcluster-programs"',
    ]  # fmt: skip


MARKS_OF_ALL = """
import json

def pytest_collection_finish(session):
    for item in session.items:
        print("@" + json.dumps([item.nodeid, [mark.name for mark in item.iter_markers()]]))
"""


def is_run_by(command, test, marks):
    """Whether pytest with these words runs it: paths, --ignore, -m, and what tests/conftest.py leaves out."""
    words = shlex.split(command)
    if any(name in marks and f"--{name}" not in words for name in ("slow", "long", "cluster")):
        return False
    if any(test.startswith(f"{word.partition('=')[2]}/") for word in words if word.startswith("--ignore=")):
        return False
    paths = [word for word in words if word.startswith("tests/")]
    if paths and not any(test.startswith(f"{path}/") for path in paths):
        return False
    chosen = words[words.index("-m", 1) + 1] if "-m" in words[1:] else "True"
    return eval(chosen, {name: name in marks for name in ("slow", "long", "cluster", "programs")})


@pytest.mark.slow("collects all tests in a process of its own")
@pytest.mark.timeout(600)
def test_every_test_is_run_by_one_command(tmp_path):
    """By what `make --dry-run` says: by one of .ci/run, or by test-long, which has what is marked so. What needs
    programs alone may be run by two: where they are built, and by the command that builds them."""
    commands = []
    for target in ("test", "test-slow", "test-long", "test-cluster"):
        said = subprocess.check_output(["make", "--dry-run", "PYTEST_ARGS=", target], cwd=ROOT, text=True)
        commands += re.findall(r"-m (pytest [^|]*?) *\|\|", said)
    assert len(commands) == 8
    (tmp_path / "told.py").write_text(MARKS_OF_ALL)
    collect = ["--collect-only", "-q", "-s", "-p", "told", "--slow", "--long", "--cluster"]
    words = [sys.executable, "-m", "pytest", *collect]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=True)
    tests = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    assert len(tests) > 3000
    run = {test: sum(is_run_by(command, test, marks) for command in commands) for test, marks in tests}
    programs = {test for test, marks in tests if "programs" in marks}
    assert {test: times for test, times in run.items() if times != 1 and test not in programs} == {}
    assert {test: run[test] for test in programs if run[test] not in (1, 2)} == {}


def test_every_make_target_is_in_the_help_and_the_help_names_no_other():
    listed = set(re.findall(r"^  make ([\w-]+)", subprocess.check_output(["make", "help"], cwd=ROOT, text=True), re.M))
    listed -= {"bench-NAME"}
    texts = [ROOT / "Makefile", ROOT / "tools" / "testcluster" / "Makefile.inc"]
    targets = set()
    for path in texts:
        if path.exists():
            for line in re.findall(r"^\.PHONY:(.*)", path.read_text(), re.M):
                targets |= set(re.sub(r"\$\([^)]*\)", "", line).split())
    assert listed == targets


def test_every_folder_of_tests_has_a_budget():
    budgets = set(yaml.safe_load((ROOT / "tests" / "budget.yaml").read_text()))
    folders = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    without = {folder for folder in folders if tools_budget.entry_of(folder, budgets) not in budgets}
    assert without == set(), "add a line for each to tests/budget.yaml"


def test_no_file_names_a_path_of_a_machine_or_the_host_of_a_registry():
    # Put together here, so that this file does not name them itself.
    paths = "|".join(f"/{name}/" for name in ("work", "root", "home/[a-z]+"))
    hosts = "|".join(
        re.escape(".".join(words))
        for words in (
            *(("pypi", "org"), ("pythonhosted", "org"), ("download.pytorch", "org"), ("proxy.golang", "org")),
            *(("registry.npmjs", "org"), ("index.crates", "io"), ("static.crates", "io"), ("deb.debian", "org")),
        )
    )
    named = re.compile(rf"(?<![\w.$}}-])({paths})|({hosts})")
    found = []
    for name in committed_files():
        if name.endswith((".png", ".svg", ".sum", ".gz")):
            continue
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        found += [f"{name}:{n}: {hit[0]}" for n, line in enumerate(text.splitlines(), 1) if (hit := named.search(line))]
    assert found == []


def closure(extra):
    """Every distribution that `pip install rlinf-operator[extra]` brings, from the metadata of what is installed."""
    seen, todo = set(), [("rlinf-operator", frozenset({extra}))]
    while todo:
        name, extras = todo.pop()
        for text in metadata.requires(name) or []:
            requirement = Requirement(text)
            if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras | {""}):
                continue
            key = canonicalize_name(requirement.name)
            if key not in seen:
                seen.add(key)
                todo.append((requirement.name, frozenset(requirement.extras)))
    return seen


@pytest.mark.parametrize(
    ("extra", "without"),
    [
        ("control", {"torch", "vllm", "numpy", "gymnasium", "typer"}),
        ("worker", {"kopf", "kubernetes", "torch", "vllm", "numpy"}),
        ("env", {"kopf", "torch", "vllm"}),
        ("cli", {"torch", "vllm", "kopf"}),
    ],
)
def test_a_part_installs_without_what_other_parts_need(extra, without):
    brought = closure(extra)
    assert "pydantic" in brought
    assert brought & without == set()


def test_every_requirement_has_a_reason_beside_it():
    text = (ROOT / "pyproject.toml").read_text()
    start, end = text.index("\ndependencies = ["), text.index("[project.scripts]")
    lines = [line for line in text[start:end].splitlines() if line.startswith('  "')]
    assert [line for line in lines if not re.search(r"#\s+\S+", line)] == []
    assert len(lines) > 20


def test_the_wheel_holds_five_packages_and_no_operator_folder(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert tops == set(PACKAGES)


def test_the_commands_of_the_distribution_load():
    scripts = [e for e in metadata.distribution("rlinf-operator").entry_points if e.group == "console_scripts"]
    assert {script.name for script in scripts} == {"rljob", "kubectl-rljob"}
    assert all(callable(script.load()) for script in scripts)


def test_rljob_starts_without_importing_what_its_commands_need():
    heavy = {
        "torch",
        "numpy",
        "kopf",
        "kubernetes",
        "grpc",
        "gymnasium",
        "rlinf_operator",
        "rlinf_scheduler",
        "rlinf_worker",
    }
    code = f"import sys, rljob.__main__; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_names_for_which_the_architecture_sends_a_reader_to_a_file_stand_there():
    """`CYCLES` in [planner/initial.py](../operator/.../initial.py): moved names send newcomers to the wrong room."""
    page = ROOT / "docs/architecture.md"
    sent = re.findall(r"`(\w+)`\s+(?:of|in)\s+\[[^\]]+\]\(([^)#]+\.(?:py|proto))\)", page.read_text())
    assert len(sent) >= 9, sent
    defined = r"^\s*(?:(?:async )?def |class |message )?{}\b\s*[(:={{]"
    lost = [
        f"{name} in {path}" for name, path in sent
        if not re.search(defined.format(name), (page.parent / path).read_text(), re.MULTILINE)
    ]  # fmt: skip
    assert lost == []


def test_every_link_between_documents_leads_somewhere():
    dead = []
    for name in committed_files():
        if name.endswith(".md"):
            for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", (ROOT / name).read_text()):
                if not ((ROOT / name).parent / target).exists():
                    dead.append(f"{name}: {target}")
    assert dead == []
