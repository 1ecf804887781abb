"""A machine that cannot run a cluster skips the cluster tests with one sentence; under CI=true it fails them."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
CONFTEST = Path(__file__).parents[3] / "cluster" / "conftest.py"


OWN_CLUSTER = """
import pytest
from tools.testcluster.cluster import Cluster

@pytest.fixture(scope="module")
def cluster():
    return Cluster.up("of-this-file", report=print)

def test_one(cluster): pass
def test_another(cluster): pass
"""
NO_FIXTURE = """
from tools.testcluster.cluster import Cluster

def test_one(): Cluster.attach("nobody")
def test_another(): Cluster.up("full", report=print)
"""
SHARED = """
def test_one(cluster): pass
def test_another(cluster): pass
"""


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 2}), ("true", {"errors": 2})])
@pytest.mark.parametrize("tests", [SHARED, OWN_CLUSTER, NO_FIXTURE], ids=["shared", "own cluster", "no fixture"])
def test_a_missing_requirement(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tests: str, ci: str, outcome: dict[str, int]
):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("RLINF_TESTCLUSTER_STATE", str(pytester.path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(tests)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rsE")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*a test cluster needs root, and this is user 1000; run it with sudo*"])
