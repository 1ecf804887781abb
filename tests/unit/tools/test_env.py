"""`make env` before there is an environment: what it says on a machine that lacks something."""

import subprocess
import sys

from tools import env


def run_env(prelude):
    code = f"{prelude}\nimport runpy, sys\nsys.argv = ['env.py']\nrunpy.run_path({env.__file__!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_python_without_venv_names_the_package_to_install():
    done = run_env("import sys; sys.modules['ensurepip'] = None")
    assert done.returncode == 1
    assert "has no module 'ensurepip'" in done.stderr
    assert "apt-get install python3-venv, then make env again" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_python_too_old_says_which_is_needed():
    done = run_env("import sys; sys.version_info = (3, 9, 2, 'final', 0)")
    assert done.returncode == 1
    assert "is Python 3.9.2, but 3.11 or newer is needed; install one and name it" in done.stderr


def test_the_stamp_follows_what_is_installed_and_not_tool_settings(tmp_path, monkeypatch):
    pyproject = (env.ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(env, "ROOT", tmp_path)
    monkeypatch.setattr(env, "CONSTRAINTS", tmp_path / "all.txt")
    (tmp_path / "all.txt").write_text("numpy==2.3.5\n")

    def hash_of(text):
        (tmp_path / "pyproject.toml").write_text(text)
        return env.wanted_hash()

    first = hash_of(pyproject)
    assert hash_of(pyproject + "\n[tool.other]\nx = 1\n") == first
    assert hash_of(pyproject.replace('version = "', 'version = "9.')) != first
    (tmp_path / "all.txt").write_text("numpy==2.3.4\n")
    assert hash_of(pyproject) != first


def test_pips_index_is_given_to_uv_and_what_the_person_set_for_uv_wins(tmp_path, monkeypatch):
    pip = tmp_path / "bin" / "python"
    pip.parent.mkdir()
    pip.write_text(
        "#!/bin/sh\n"
        "echo \"global.index-url='https://one.example/simple'\"\n"
        "echo \":env:.index-url='https://two.example/simple'\"\n"
        "echo \"global.find-links='/nonesuch'\"\n"
        "echo \"global.cert='/ca.pem'\"\n"
    )
    pip.chmod(0o755)
    monkeypatch.setattr(env, "VENV", tmp_path)
    for name in ("UV_DEFAULT_INDEX", "SSL_CERT_FILE", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    assert env.index_settings() == {"UV_DEFAULT_INDEX": "https://two.example/simple", "SSL_CERT_FILE": "/ca.pem"}
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine.example/simple")
    assert "UV_DEFAULT_INDEX" not in env.index_settings()


def test_of_two_at_once_one_makes_the_environment_and_the_other_waits_for_it(tmp_path):
    """As both lanes of `.ci/run` ask for it in a fresh clone."""
    made = tmp_path / "made"
    code = f"""
import sys, time
from pathlib import Path
from tools import env

def make():
    time.sleep(0.5)
    (env.VENV / "bin").mkdir(parents=True)
    (env.VENV / "bin" / "python").symlink_to(sys.executable)
    with open({str(made)!r}, "a") as file:
        file.write("made\\n")

env.ROOT = Path({str(tmp_path)!r})
env.VENV, env.STAMP = env.ROOT / ".venv", env.ROOT / ".venv" / "stamp.json"
env.wanted_hash, env.make = lambda: "the same", make
sys.exit(env.main())
"""
    words = [sys.executable, "-c", code]
    both = [subprocess.Popen(words, cwd=env.ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=50)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert made.read_text() == "made\n"
    assert sum("waiting for another make env in this clone" in text for text in told) <= 1
    assert sum("is ready after" in text for text in told) == 1


def test_a_library_that_is_missing_is_said_with_its_package(monkeypatch):
    monkeypatch.setattr(env, "NUMA", "libc.so.6")
    assert env.missing_libraries() == []
    monkeypatch.setattr(env, "NUMA", "libnone.so.1")
    [sentence] = env.missing_libraries()
    assert sentence.startswith("no libnone.so.1, without which role kind `vllm` does not start")
    assert "apt-get install libnuma1" in sentence
