"""Workers find bytecode beside the sources where that works, else in the pod's cache folder."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from rlinf_api import names
from rlinf_worker.agent import spawning


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A module of a read-only installation without bytecode."""
    source = tmp_path / "site" / "lib.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    monkeypatch.setattr(spawning, "LOOKED_AT", (SimpleNamespace(__file__=str(source)),))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    return source


def test_a_read_only_installation_without_bytecode_gets_a_folder_that_python_fills(installed, tmp_path):
    found = spawning.bytecode_environment(
        {names.ENV_CACHE_DIR: str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert found == {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{tmp_path}/cache/bytecode"}
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **found}
    subprocess.run([sys.executable, "-c", "import lib"], cwd=installed.parent, env=env, check=True, timeout=30)
    assert [path.suffix for path in (tmp_path / "cache").rglob("lib.*")] == [".pyc"]


def test_bytecode_that_an_image_was_built_with_is_used(installed, tmp_path):
    folder = installed.parent / "__pycache__"
    folder.mkdir()
    (folder / f"lib.{sys.implementation.cache_tag}.pyc").write_bytes(b"")
    assert "PYTHONPYCACHEPREFIX" not in spawning.bytecode_environment({names.ENV_CACHE_DIR: str(tmp_path)})


def test_an_installation_that_can_be_written_keeps_it_beside_the_sources(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert "PYTHONPYCACHEPREFIX" not in spawning.bytecode_environment({names.ENV_CACHE_DIR: str(tmp_path)})


def test_without_a_cache_folder_or_with_a_persons_own_nothing_is_said(installed):
    assert "PYTHONPYCACHEPREFIX" not in spawning.bytecode_environment({})
    own = {names.ENV_CACHE_DIR: "/c", "PYTHONPYCACHEPREFIX": "/mine"}
    assert "PYTHONPYCACHEPREFIX" not in spawning.bytecode_environment(own)
