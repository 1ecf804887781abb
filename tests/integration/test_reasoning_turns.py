"""A language model learns with rollout, reward and actor on one slot, in turns: what it learns side by side."""

import json

import pytest
import yaml

from tests.fakes import reasoning
from tests.rljob_runs import Run

STEPS = 5
IN_TURNS = ("spec.pools[cpu].slots.perPod=1",)
LEARNT = ("reward_mean", "policy_loss", "grad_norm", "entropy", "tokens_count")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return reasoning.make_folder(tmp_path_factory.mktemp("turns"))


def lineage(run):
    return [(line["step"], line["units"], line["digest"]) for line in run.lines("lineage")]


def metrics(run):
    return [[line[name] for name in LEARNT] for line in run.lines("metrics")]


def spans(run):
    lines = [line for path in (run.work_dir / "spans").iterdir() for line in path.read_text().splitlines()]
    return [span for span in map(json.loads, lines) if "kind" in span]


def declared(job):
    """The same job, whose roles say what they need of a slot."""
    manifest = yaml.safe_load(job.read_text())
    for role in manifest["spec"]["roles"]:
        role["config"]["memory"] = {"resident": 100, "peak": 400, "offloaded": 300}
    path = job.with_name("declared.yaml")
    path.write_text(yaml.safe_dump(manifest))
    return path


@pytest.mark.long("two whole jobs with torch and transformers; PPO's roles take turns in make test, vLLM in test-slow")
@pytest.mark.timeout(300)
def test_in_turns_it_learns_what_it_learns_side_by_side(folder):
    """Placement Auto takes turns, as one slot is too few and memory is declared."""
    job = reasoning.manifest(folder, steps=STEPS)
    with Run(folder, file=job, small=False, name="beside") as beside:
        assert beside.end(timeout_s=120) == 0, beside.said
    with Run(folder, *IN_TURNS, file=declared(job), small=False, name="turns") as turns:
        assert turns.end(timeout_s=150) == 0, turns.said
        assert turns.answer["condition"] == "Complete", turns.said
    assert lineage(turns) == lineage(beside), "the same groups, in the same order"
    for mine, theirs in zip(metrics(turns), metrics(beside), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    moved = [span for span in spans(turns) if span["kind"] in ("load", "offload")]
    assert {span["slot"] for span in spans(turns)} == {"cpu/0/0"}
    for role in ("rollout", "actor"):
        mine = [span["kind"] for span in moved if span["role"] == role]
        assert mine.count("offload") >= STEPS, "each step it leaves the slot"


def test_a_pool_too_small_for_what_is_declared_is_told_before_anything_starts(folder):
    job = declared(reasoning.manifest(folder, steps=STEPS, ranks=1))
    with Run(folder, *IN_TURNS, "spec.pools[cpu].slots.memory=512Mi", file=job, small=False, name="small") as run:
        assert run.end() != 0
    assert "in turn with" in run.said
