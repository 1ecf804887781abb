"""Which file xdist begins with, and where that is kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.longest_first import in_order

ROOT = Path(__file__).resolve().parents[3]
FILES = {
    "test_many": "".join(f"def test_{n}(): pass\n" for n in range(5)),
    "test_some": "import time\ndef test_first(): pass\ndef test_second(): time.sleep(0.2)\n",
    "test_long": "import time\ndef test_it(): time.sleep(0.6)\n",
}


def test_files_go_by_what_their_tests_took_and_tests_within_one_as_they_were():
    tests = ["a.py::one", "b.py::one", "c.py::one", "b.py::two", "d.py::one"]
    found = [tests[at] for at in in_order(tests, {"b.py::one": 1.0, "b.py::two": 1.5, "c.py::one": 2.0})]
    assert found == ["b.py::one", "b.py::two", "c.py::one", "a.py::one", "d.py::one"]


def test_a_file_counts_for_the_chosen_tests_alone():
    took_s = {"a.py::quick": 1.0, "a.py::slow": 60.0, "b.py::quick": 2.0}
    assert in_order(["a.py::quick", "b.py::quick"], took_s) == [1, 0]


@pytest.fixture
def run(tmp_path: Path):
    """Files in the order in which tests of theirs were begun."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)

    def begun(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "tools.longest_first", *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return list(dict.fromkeys(re.findall(r"(?:PASSED )?(test_\w+)\.py::.*", done.stdout)))

    return begun


def test_what_took_longest_is_begun_first_the_next_time_where_xdist_hands_files_out(run, tmp_path):
    files, one_of_xdist = [f"{name}.py" for name in FILES], ("-n", "1", "--dist", "loadfile")
    for _ in range(2):
        assert run("-p", "no:xdist", *files) == list(FILES), "one process keeps the order that it was asked for"
    assert run(*one_of_xdist, *files) == ["test_long", "test_some", "test_many"]
    (tmp_path / "test_long.py").unlink()
    assert run(*one_of_xdist, *files[:2]) == ["test_some", "test_many"]
    [kept] = tmp_path.glob(".pytest_cache/v/rlinf/*")
    known = json.loads(kept.read_text())
    assert known["test_some.py::test_second"] >= 0.2
    assert "test_long.py::test_it" not in known, "its file is gone"


def test_without_times_a_run_goes_by_its_arguments_and_without_a_cache_too(run):
    files = ["test_some.py", "test_many.py", "test_long.py"]
    assert run("-p", "no:cacheprovider", "-n", "1", "--dist", "loadfile", *files)[0] == "test_many", "as xdist has it"
    assert run("-n", "1", "--dist", "loadfile", *files) == ["test_some", "test_many", "test_long"]
