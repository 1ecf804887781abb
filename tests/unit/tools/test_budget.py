"""The table of each folder's time, and the run it fails."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import budget

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("took_s", "verdict"), [(9.9, ""), (10.1, "WARNING"), (20.1, "FAILED")])
def test_above_its_budget_a_folder_warns_and_at_twice_it_fails(took_s, verdict):
    [line] = budget.lines({"tests/unit/a": took_s}, {"tests/unit/a": 10})
    assert line.verdict.partition(":")[0] == verdict


def test_a_folder_counts_for_the_nearest_entry_above_it():
    entries = {"tests/unit/a": 1.0, "tests/unit/a/deep": 1.0}
    assert budget.entry_of("tests/unit/a/b/c", entries) == "tests/unit/a"
    assert budget.entry_of("tests/unit/a/deep/c", entries) == "tests/unit/a/deep"
    assert budget.entry_of("tests/unit/ab", entries) == "tests/unit/ab"


def test_a_folder_without_a_budget_is_told_where_to_get_one():
    assert "add a line to tests/budget.yaml" in budget.table(budget.lines({"tests/new": 1.0}, {}))[0]


TAKES_0_1_S = "import time\ndef test_it():\n    time.sleep(0.1)\n"


def run_tests(folder, budget_s, *arguments, **files):
    (folder / "tests").mkdir()
    (folder / "tests" / "budget.yaml").write_text(f"tests: {{budget_s: {budget_s}}}\n")
    for name, text in files.items():
        (folder / "tests" / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tools.budget", *arguments, "tests"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "--dist", "loadfile")], ids=["one process", "two"])
@pytest.mark.parametrize(("budget_s", "status"), [(20, 0), (0.01, 1)])
def test_a_run_at_twice_its_budget_fails_although_its_tests_passed(tmp_path, budget_s, status, arguments):
    done = run_tests(tmp_path, budget_s, *arguments, test_it=TAKES_0_1_S)
    assert done.returncode == status, done.stdout
    assert "1 passed" in done.stdout
    assert ("FAILED: more than 2 times its budget" in done.stdout) is bool(status)


def test_times_of_all_processes_add_up_and_imports_count_once(tmp_path):
    slow_to_import = "import time\ntime.sleep(1)\n"
    files = {"test_one": slow_to_import + TAKES_0_1_S.replace("0.1", "2"), "test_two": TAKES_0_1_S.replace("0.1", "2")}
    done = run_tests(tmp_path, 60, "-n", "2", "--dist", "loadfile", **files)
    assert done.returncode == 0, done.stdout
    [took_s] = re.findall(r"^tests +([\d.]+) s of +60 s$", done.stdout, re.MULTILINE)
    assert 5.0 <= float(took_s) < 6.0, "2 s in each of the two processes, and one import of the two"
