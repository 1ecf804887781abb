"""A machine that cannot run a cluster skips the cluster tests with one sentence; under CI=true it fails them."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parents[3] / "cluster" / "conftest.py"


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_a_missing_requirement(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(pytester.path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile("def test_it(cluster): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rsE")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*a test cluster needs root, and this is user 1000; run it with sudo*"])
