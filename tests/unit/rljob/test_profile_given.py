"""`rljob run --profile`: of the same job, or a sentence before anything starts."""

from pathlib import Path

import pytest
import yaml

from rlinf_api.profile import key_of
from rljob import run
from tools import workloads
from tools.prove.world import World

ENTRY = workloads.entries()["drawn-14"]


@pytest.fixture
def world():
    found = World.of_entry(ENTRY, steps=60)
    found.run(3)
    return found


def said(tmp_path, given, capsys):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(workloads.job(ENTRY, steps=60)))
    code = run.run(run.Options(file=file, profile=given, work_dir=tmp_path / "work"))
    return code, capsys.readouterr().err


def test_a_profile_of_another_job_is_refused_with_both_keys(tmp_path, world, capsys):
    given = tmp_path / "profiles.jsonl"
    given.write_text("".join(f"{profile.to_json()}\n" for profile in world.profiles))
    code, text = said(tmp_path, given, capsys)
    assert code == run.EXIT_BAD_MANIFEST
    assert f"profile {given} is of another job: got job, key sha256:{'0' * 64}, wanted key {key_of(world.job)}" in text
    assert "leave --profile out" in text
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "yet: got profile.json: No such file"),
        ("{", "a profile is not JSON"),
        ('{"key": 3}', "profile.key"),
        ("\n", "got profiles.jsonl is empty"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, text, sentence, capsys):
    folder = tmp_path / "earlier"
    folder.mkdir()
    if text is not None:
        (folder / "profiles.jsonl").write_text(text)
    code, told = said(tmp_path, folder, capsys)
    assert code == run.EXIT_BAD_MANIFEST
    assert sentence in told


def test_the_command_to_go_on_names_it(world):
    options = run.Options(file=Path("job.yaml"), profile=Path("runs/earlier"))
    assert run.to_go_on(options, world.job, work_dir=Path("w")) == (
        "rljob run job.yaml --work-dir w --profile runs/earlier"
    )
