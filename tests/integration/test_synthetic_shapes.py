"""Real jobs whose roles have other numbers of units, or several cycles: each step has all of its units once, also where
workers are killed, and what they report comes to the problem that the planner knows."""

import hashlib

import pytest

from rlinf_api.job import RLJobSpec
from rlinf_api.profile import Profile
from rlinf_scheduler.planner.problem import InLanes
from rlinf_scheduler.replan.fit import Fit, fit
from rlinf_worker.channels import lineage
from tests.integration.test_synthetic import file_of
from tests.rljob_runs import Run
from tools import workloads

SHAPES = workloads.entries(workloads.WORKLOADS.with_name("shapes.jsonl"))
STEPS = 12
pytestmark = pytest.mark.timeout(120)


def whole_steps(run, name, *, items, of_each):
    """What lineage.jsonl says of steps into which every unit went once."""
    found = []
    for step in range(1, STEPS + 1):
        units = sorted(
            lineage.sample(name, step, index=index, sample=sample)
            for index in range(items)
            for sample in range(of_each)
        )
        found.append((step, len(units), hashlib.sha256("\n".join(units).encode()).hexdigest()[:16]))
    return found


def learnt(run):
    """Of each step what was committed last."""
    return sorted(
        {line["step"]: (line["step"], line["units"], line["digest"]) for line in run.lines("lineage")}.values()
    )


def problem_of(tmp_path, name, *, of_each, killed=()):
    """Runs it, with a worker of each of `killed` killed between steps, and fits what was measured."""
    entry = SHAPES[name]
    job = workloads.job(entry, steps=STEPS)
    job["spec"]["placement"]["apply"] = "OnApproval"
    job["spec"]["failurePolicy"] = {"maxRestarts": 100}
    with Run(tmp_path, file=file_of(tmp_path, job), small=False) as run:
        for number, worker in enumerate(killed):
            run.until_step(2 + number)
            run.kill(worker)
        assert run.end() == 0, run.said
        assert learnt(run) == whole_steps(run, name, items=entry["items"], of_each=of_each)
        profile = Profile.from_json((run.work_dir / "profile.json").read_text())
    found = fit(RLJobSpec.model_validate(job["spec"]), [profile], plan=None)
    assert isinstance(found, Fit), found
    return found.problem


def test_samples_of_a_prompt_become_one_group_again_whoever_is_killed(tmp_path):
    problem = problem_of(tmp_path, "groups", of_each=1, killed=("judge/0", "roll/1"))
    assert problem.units == {"roll": 16, "judge": 16, "train": 4}
    assert problem.role("roll").service == InLanes(lanes=4)
    assert problem.terminal == ("train",)


def test_of_sealed_tickets_nobody_says_beforehand_what_becomes_of_them(tmp_path):
    problem = problem_of(tmp_path, "sealed", of_each=1, killed=("roll/0", "judge/0"))
    assert problem.units == {"roll": 4, "judge": 16, "train": 4}


def test_time_that_goes_by_tokens_is_fitted_by_them_where_it_does(tmp_path):
    problem = problem_of(tmp_path, "tokens", of_each=4)
    engine, trainer = problem.role("roll"), problem.role("train")
    assert engine.tokens == trainer.tokens > 0
    assert trainer.sizes == pytest.approx(engine.sizes, rel=0.25), "what is long for one is long for the other"
    assert problem.role("judge").tokens == 0


def test_units_of_one_cycle_go_round_in_the_next_whoever_is_killed(tmp_path):
    problem = problem_of(tmp_path, "two", of_each=2, killed=("critic/0", "judge/0", "policy/0"))
    assert [(c.front, c.back, c.round_trips, c.is_single) for c in problem.cycles] == [
        ("env", "policy", 3, False), ("judge", "critic", 2, True),
    ]  # fmt: skip
    assert problem.units == {"env": 4, "policy": 4, "judge": 8, "critic": 8, "train": 8}
    assert (problem.first, problem.terminal) == (("env",), ("train",))
