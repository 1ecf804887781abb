"""tests/conftest.py itself, over small test files in a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"


@pytest.fixture
def run_tests(tmp_path):
    def run(text, *arguments):
        short = CONFTEST.read_text().replace("EXIT_GRACE_S = 10.0", "EXIT_GRACE_S = 1.0")
        assert short != CONFTEST.read_text()
        (tmp_path / "conftest.py").write_text(short)
        (tmp_path / "test_it.py").write_text(f"import os, socket, subprocess\nimport pytest\n{text}\n")
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    cluster\n    gpu\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "HTTPS_PROXY": "http://proxy:1", "RLINF_X": "1", "KUBECONFIG": "/etc/kube/config"}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)

    return run


def test_an_orphan_of_a_test_is_reported_and_killed(run_tests):
    done = run_tests("def test_it():\n    subprocess.run(['sh', '-c', 'sleep 4321 & exit 0'])")
    assert "the test left 1 process(es) running (killed now)" in done.stdout
    pid = int(done.stdout.partition(": sleep 4321")[0].split()[-1])
    assert not Path(f"/proc/{pid}").exists()
    assert done.returncode == 1


def test_a_process_of_a_module_fixture_may_live_as_long_as_its_module(run_tests):
    done = run_tests(
        "@pytest.fixture(scope='module')\n"
        "def server():\n"
        "    with subprocess.Popen(['sleep', '4321']) as process:\n"
        "        yield process\n"
        "        process.kill()\n"
        "def test_one(server): assert server.poll() is None\n"
        "def test_two(server): assert server.poll() is None\n"
    )
    assert "2 passed" in done.stdout


def test_a_test_reaches_loopback_only(run_tests):
    done = run_tests(
        "def test_near():\n"
        "    with socket.create_server(('127.1.0.3', 0)) as server:\n"
        "        socket.create_connection(server.getsockname()).close()\n"
        "def test_far():\n    socket.create_connection(('192.0.2.1', 80))\n"
    )
    assert "1 failed, 1 passed" in done.stdout
    assert "this one went for 192.0.2.1:80; use a fake, or mark the test cluster" in done.stdout


def test_the_environment_is_clean(run_tests):
    done = run_tests(
        "def test_it():\n"
        "    assert not [n for n in os.environ if 'proxy' in n.lower() or n.startswith('RLINF_')]\n"
        "    assert os.environ['KUBECONFIG'] == os.devnull\n"
    )
    assert "1 passed" in done.stdout


def test_slow_long_and_cluster_tests_are_left_out_unless_asked_for(run_tests):
    text = (
        "def test_quick(): pass\n"
        "@pytest.mark.slow('waits for the moon')\ndef test_slow(): pass\n"
        "@pytest.mark.long('waits for the sun')\ndef test_long(): pass\n"
        "@pytest.mark.cluster\ndef test_cluster(): pass\n"
    )
    assert "1 passed, 3 deselected" in run_tests(text).stdout
    assert "2 passed, 2 deselected" in run_tests(text, "--slow").stdout
    assert "2 passed, 2 deselected" in run_tests(text, "--long").stdout
    assert "4 passed" in run_tests(text, "--slow", "--long", "--cluster").stdout


@pytest.mark.parametrize(
    "mark", ["slow", "slow()", "slow('')", "slow('slow')", "slow(1, 2)", "slow('long work', 3)", "long", "long('long')"]
)
def test_a_slow_or_long_test_says_why_or_nothing_is_run(run_tests, mark):
    done = run_tests(f"def test_quick(): pass\n@pytest.mark.{mark}\ndef test_it(): pass\n")
    name = mark.partition("(")[0]
    assert f"1 test(s) are marked {name} without the reason, test_it.py::test_it the first" in done.stderr
    assert done.returncode != 0
    assert "passed" not in done.stdout
