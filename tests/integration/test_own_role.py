"""docs/own-role.md as a reader does it: the folder that its blocks make, its commands, its kills, its mistake."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlinf_api import names
from tests.rljob_runs import ROOT, TIMEOUT_S, Run

EXAMPLE = ROOT / "examples" / "own-role"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "own-role.md").read_text(), re.MULTILINE | re.DOTALL)
STEPS, PLAYS = 60, 16


def blocks(label):
    return [text for found, text in BLOCKS if found == label]


# One name each: a block that is added to the page, and not here, is too many to unpack.
VALIDATE, RUN, TAIL, RUN_LONG, PID_OF, KILL_SAMPLER, KILL_LEARNER, RUN_BROKEN = blocks("sh")
RUN_SAYS, TAIL_SAYS, FIRST_DEATH, LAST_DEATH = blocks("text")
[MISTAKE] = blocks("diff")
LONG = " --set spec.flow.steps=2000"
"""What gives a person the time to type; a test needs none of it."""
PACE = f"""
import os, time
time.sleep(1.5 if os.environ.get({names.ENV_WORKER_ATTEMPT!r}) == "2" else 0)
"""
"""Below the module: the life after the first death begins no sooner than a driver's reports are apart (1 s), and
one of them has that death."""


def copied(folder):
    return Path(shutil.copytree(EXAMPLE, folder / "own-role", ignore=shutil.ignore_patterns("__pycache__", "runs")))


def shell(command, *, folder):
    """As in a terminal where .venv is active."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-ec", command], cwd=folder, env=environ, capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(command, *, folder):
    """`rljob run rljob.yaml --work-dir runs/NAME`, in the reader's folder."""
    rljob, run, file, option, work_dir, *others = shlex.split(command)
    assert (rljob, run, option, others) == ("rljob", "run", "--work-dir", [])
    place = folder / work_dir
    place.parent.mkdir(exist_ok=True)
    return Run(place.parent, file=Path(file), name=place.name, small=False, cwd=folder)


def learnt(run):
    [found] = (run.work_dir / "checkpoints").glob(f"*-{STEPS}/learner/preferences.npy")
    return found.read_bytes()


def without_folder(text):
    return re.sub(r"/\S*/(?=bandit\.py)", "", text)


def lines_of(text):
    """Without blank ones: how many there are between two blocks a page cannot say."""
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = copied(tmp_path_factory.mktemp("undisturbed"))
    assert shell(VALIDATE, folder=folder) == "rljob.yaml: RLJob bandit is valid\n"
    with started(RUN, folder=folder) as run:
        assert run.end() == 0, run.said
    return folder, run


def test_the_blocks_of_the_page_make_the_files_of_the_example():
    assert {label for label, _ in BLOCKS} == {"python", "yaml", "sh", "text", "diff", ""}
    assert len(blocks("")) == 1, "the drawing"
    _, module = (EXAMPLE / "bandit.py").read_text().split('"""\n', 1)
    assert lines_of("".join(blocks("python"))) == lines_of(module)
    manifest = (EXAMPLE / "rljob.yaml").read_text()
    assert lines_of("".join(blocks("yaml"))) == [line for line in lines_of(manifest) if not line.startswith("#")]
    assert yaml.safe_load(manifest)["spec"]["flow"]["steps"] == STEPS
    assert f"PLAYS = {PLAYS} " in module


def test_the_job_of_the_page_learns_and_says_what_the_page_says(undisturbed):
    folder, run = undisturbed
    assert RUN_SAYS in run.said
    told = [re.sub(r"[\d.]+", "#", line) for line in shell(TAIL, folder=folder).splitlines() if line.startswith("{")]
    for line, found in zip(lines_of(TAIL_SAYS), told, strict=True):
        parts = [re.escape(re.sub(r"[\d.]+", "#", part.strip())) for part in line.split("...")]
        assert re.match(".*".join(parts), found), f"{line}\n{found}"
    metrics = run.lines("metrics")
    assert metrics[0]["best"] < 0.5 < 0.9 < metrics[-1]["best"], "the machine that pays best"
    assert metrics[-1]["previous"]["won_sum"] == PLAYS * metrics[-2]["reward_mean"], "each play is reported once"


@pytest.mark.slow("a second job of the page; roles of other jobs are killed in make test")
@pytest.mark.timeout(120)
def test_a_kill_of_either_role_changes_nothing_that_is_learnt(undisturbed, tmp_path):
    folder = copied(tmp_path)
    assert LONG in RUN_LONG
    with started(RUN_LONG.replace(LONG, ""), folder=folder) as run:
        run.until_step(6)
        shell(PID_OF + KILL_SAMPLER, folder=folder)
        run.until_step(20)
        shell(PID_OF + KILL_LEARNER, folder=folder)
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete"
    events, lines = run.lines("events"), run.lines("lineage")
    assert [e["worker"] for e in events if e["event"] == "worker-exited"] == ["sampler/0", "learner/0"]
    assert {line["branch"] for line in lines} == {0, 1}
    assert len({(line["branch"], line["step"]) for line in lines}) == len(lines)
    counts = {line["step"]: (line["units"], line["digest"]) for line in lines}  # the last line of a step is the one
    assert sorted(counts) == list(range(1, STEPS + 1))
    assert {units for units, _ in counts.values()} == {PLAYS}
    _, other = undisturbed
    assert counts == {line["step"]: (line["units"], line["digest"]) for line in other.lines("lineage")}
    assert learnt(run) == learnt(other)


def test_the_mistake_of_the_page_is_named_at_the_first_death_and_ends_the_job_at_the_third(tmp_path):
    folder = copied(tmp_path)
    right, wrong = (line[1:] for line in lines_of(MISTAKE))
    lines = (folder / "bandit.py").read_text().splitlines()
    number = lines.index(right) + 1
    (folder / "bandit.py").write_text("\n".join([*lines[: number - 1], wrong, *lines[number:], PACE]))
    with started(RUN_BROKEN, folder=folder) as run:
        assert run.end() == 1, run.said
        assert (run.answer["condition"], run.answer["reason"]) == ("Failed", "UserError"), run.said
    place = f"KeyError: 'preference' ({folder / 'bandit.py'}, line {number})"
    deaths = [line["message"] for line in run.lines("events") if line["event"] == "worker-exited"]
    assert deaths == [f"worker sampler/0 exited with 75: {place}"] * 3
    assert place in run.answer["message"]
    said = without_folder(run.said)
    for line in lines_of(FIRST_DEATH + LAST_DEATH):
        assert without_folder(line) in said
    status = yaml.safe_load((run.work_dir / "objects" / "rljob-default-bandit.yaml").read_text())["status"]
    assert status["firstFailure"]["message"] == place
    assert json.dumps(wrong.strip())[1:-1] in (run.work_dir / "logs/bandit-cpu-0-a1/sampler-0.log").read_text()
