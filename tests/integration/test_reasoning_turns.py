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


@pytest.fixture(scope="module")
def beside(folder):
    """The same with a slot for each role."""
    with Run(folder, file=reasoning.manifest(folder, steps=STEPS), small=False, name="beside") as run:
        assert run.end(timeout_s=120) == 0, run.said
        yield run


LONG = pytest.mark.long(
    "whole jobs with torch and transformers; PPO's roles take turns in make test, vLLM in test-slow"
)


@LONG
@pytest.mark.timeout(300)
def test_in_turns_it_learns_what_it_learns_side_by_side(folder, beside):
    """Placement Auto takes turns, as one slot is too few and memory is declared."""
    job = reasoning.manifest(folder, steps=STEPS)
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


HYBRID = {
    "pools": [{"name": "cpu", "pods": 1}],
    "workers": [
        {"role": "rollout", "count": 1, "slots": "cpu/0/0"},
        {"role": "reward", "count": 1, "slots": "cpu/0/1"},
        {"role": "actor", "count": 1, "slots": "cpu/0/0"},
    ],
    "leaseSets": [{"name": "both", "slots": "cpu/0/0", "turns": [{"role": "rollout"}, {"role": "actor"}]}],
}


@LONG
@pytest.mark.timeout(300)
def test_with_the_reward_beside_two_that_take_turns_it_learns_the_same(folder, beside):
    plan = folder / "hybrid.yaml"
    plan.write_text(yaml.safe_dump({"spec": HYBRID}))
    job = declared(reasoning.manifest(folder, steps=STEPS))
    with Run(
        folder, "spec.pools[cpu].slots.perPod=2", file=job, small=False, name="hybrid", options=("--plan", str(plan))
    ) as run:
        assert run.end(timeout_s=150) == 0, run.said
    assert lineage(run) == lineage(beside)
    for mine, theirs in zip(metrics(run), metrics(beside), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert {(span["role"], span["slot"]) for span in spans(run) if span["role"]} == {
        ("rollout", "cpu/0/0"), ("reward", "cpu/0/1"), ("actor", "cpu/0/0"),
    }  # fmt: skip
    assert {span["role"] for span in spans(run) if span["kind"] == "offload"} == {"rollout", "actor"}


def test_a_pool_too_small_for_what_is_declared_is_told_before_anything_starts(folder):
    job = declared(reasoning.manifest(folder, steps=STEPS, ranks=1))
    with Run(folder, *IN_TURNS, "spec.pools[cpu].slots.memory=512Mi", file=job, small=False, name="small") as run:
        assert run.end() != 0
    assert " and the largest slot that it may have is 512 MiB in pool cpu, which lacks " in run.said
