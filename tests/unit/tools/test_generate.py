"""`make verify` runs every generator and fails on what changes."""

import sys

import pytest

from tools import generate


@pytest.fixture
def clone(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate", "--verify"])
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds" / "rljobs.yaml").write_text("current\n")
    return tmp_path


def generator(clone, text):
    (clone / "tools" / "gen_it.py").write_text(f"from pathlib import Path\n{text}\n")


def test_a_current_file_passes(clone):
    generator(clone, "Path('crds/rljobs.yaml').write_text('current\\n')")
    assert generate.main() == 0


def test_a_stale_or_new_file_fails_by_name_and_is_written_again(clone, capsys):
    generator(clone, "Path('crds/rljobs.yaml').write_text('new\\n')\nPath('crds/rlplans.yaml').write_text('new\\n')")
    assert generate.main() == 1
    told = capsys.readouterr().err
    assert "crds/rljobs.yaml" in told
    assert "crds/rlplans.yaml" in told
    assert "read the difference and commit it" in told
    assert generate.main() == 0


def test_a_generator_that_fails_is_named(clone, capsys):
    generator(clone, "raise SystemExit(3)")
    assert generate.main() == 1
    assert "tools/gen_it.py exited with 3" in capsys.readouterr().err
