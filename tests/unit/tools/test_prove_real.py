"""Proofs that run jobs: what is drawn, and that a run which is not as it should be is told."""

import json
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from rlinf_api.job import RLJobSpec
from rlinf_api.plan import JobRef, PlanReasonModel, Predicted
from rlinf_scheduler.planner.infeasible import Infeasible
from rlinf_scheduler.planner.initial import initial
from tools import workloads
from tools.prove import placements, runs, schedules, whole_jobs
from tools.prove.schedules import ITEMS, STEPS, Schedule, Strike
from tools.running_job import RunningJob


# --- schedules --------------------------------------------------------------------------------------------------------
def test_a_seed_draws_the_same_schedule_and_another_one_another(tmp_path):
    one, again, other = (Schedule.drawn(seed, tmp_path) for seed in (3, 3, 4))
    assert (one.strikes, one.manifest) == (again.strikes, again.manifest)
    assert (one.strikes, one.manifest) != (other.strikes, other.manifest)


def test_schedules_strike_everybody_in_every_phase_and_begin_with_a_plan(tmp_path):
    drawn = [Schedule.drawn(seed, tmp_path) for seed in range(40)]
    strikes = [strike for one in drawn for strike in one.strikes]
    assert {strike.phase for strike in strikes} == {"", *schedules.PHASES}
    assert {strike.what for strike in strikes} == {*dict(schedules.ACTS), "approve"}
    assert {"agent", "driver", "rollout", "train"} <= {strike.target for strike in strikes}
    assert all(strike.lasts_s > 0 for strike in strikes if strike.what.startswith("pause"))
    for one in drawn:
        spec = RLJobSpec.model_validate(one.manifest["spec"])
        assert not isinstance(initial(spec, job=JobRef(name="any", uid="u")), Infeasible)
    assert {one.manifest["spec"]["placement"].get("apply") for one in drawn} == {None, "OnApproval"}
    assert any("drift" in one.manifest["spec"]["flow"]["config"] for one in drawn)


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A run that is over, as a good one leaves it."""
    monkeypatch.setattr(RunningJob, "_start", lambda self: subprocess.Popen([sys.executable, "-c", ""]))
    file = tmp_path / "job.yaml"
    file.write_text("metadata: {name: job}\n")
    run = RunningJob(file, tmp_path)
    run.process.wait(30)
    run.starts = 1
    (run.work_dir / "objects").mkdir(parents=True)
    (tmp_path / "out").write_text('{"condition": "Complete"}\n')
    (tmp_path / "err").write_text("")
    write(run, steps=range(1, STEPS + 1))
    applied = {"conditions": [{"type": "Applied", "status": "True"}]}
    put(run, "rlplan-default-job-p1", {"metadata": {"name": "job-p1"}, "spec": {"revision": 1}, "status": {}})
    put(run, "rlplan-default-job-p2", {"metadata": {"name": "job-p2"}, "spec": {"revision": 2}, "status": applied})
    put(run, "rljob-default-job", {"metadata": {"name": "job"}, "status": {"plan": {"current": "job-p2"}}})
    (run.work_dir / "events.jsonl").write_text('{"event": "plan", "revision": 1}\n{"event": "plan", "revision": 2}\n')
    return run


def test_steps_made_again_on_their_branch_are_of_a_run_that_was_started_again(ended):
    again = [*range(1, 4), *range(1, STEPS + 1)]
    write(ended, steps=again)
    assert schedules.problems(ended) == ["steps were made again on their branch 1 times in 1 starts"]
    ended.starts = 2
    assert schedules.problems(ended) == []


def write(run, *, steps, units=ITEMS):
    lines = [{"step": step, "branch": 0, "units": units} for step in steps]
    (run.work_dir / "lineage.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def put(run, name, obj):
    (run.work_dir / "objects" / f"{name}.yaml").write_text(yaml.safe_dump(obj))


def test_a_run_with_all_steps_and_one_plan_is_good(ended):
    assert schedules.problems(ended) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda run: write(run, steps=range(2, STEPS + 1)), "the surviving history has steps [2, 3"),
        (lambda run: write(run, steps=range(1, STEPS + 1), units=15), "steps with other than 16 units: [(1, 15)"),
        (
            lambda run: put(run, "rljob-default-job", {"status": {"plan": {"current": "job-p1"}}}),
            "plans ['job-p2'] are in force, and the job names job-p1",
        ),
        (
            lambda run: put(run, "rlplan-default-job-p2", {"metadata": {"name": "job-p2"}, "spec": {}}),
            "plans [] are in force, and the job names job-p2",
        ),
        (
            lambda run: (run.work_dir / "events.jsonl").write_text('{"event": "plan", "revision": 1}\n'),
            "the driver said last that revision 1 is in force, and the job names job-p2",
        ),
        (
            lambda run: (run.folder / "out").write_text('{"condition": "Failed"}\n'),
            "exit code 0, {'condition': 'Failed'}",
        ),
    ],
    ids=["step", "units", "named", "applied", "driver", "failed"],
)
def test_what_must_hold_at_the_end_is_told_where_it_does_not(ended, spoil, said):
    spoil(ended)
    assert said in "; ".join(schedules.problems(ended))


def test_a_run_that_does_not_end_is_told_and_ended(ended, monkeypatch):
    ended.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert schedules.problems(ended)[0].startswith("the job has not ended within 240 s; it said last [")
    child = psutil.Process(ended.process.pid)
    assert ended.close() == []
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_strike_says_where_it_was():
    strike = Strike(what="kill", target="driver", at=2, phase="plan-prepared", after_s=0.25)
    assert str(strike) == "kill driver at plan-prepared 2 + 0.25 s"


def test_schedules_are_summed_up():
    good = {"seed": 1, "ok": True, "strikes": ["a", "b"], "plans": ["Initial", "Profiled"], "starts": 2}
    assert schedules.summary([good, {**good, "seed": 2, "ok": False}]) == (
        "1 of 2 schedules end in one plan with all steps (not: [2]); 4 strikes, 2 further plans, 2 starts anew"
    )


# --- placements and whole jobs ----------------------------------------------------------------------------------------
def test_errors_and_regret_are_of_what_was_measured(capsys):
    row = {"rank": 1, "plan": "a", "predicted": 110.0, "measured": 100.0, "busy": 0.3}
    other = {**row, "rank": 2, "plan": "b", "measured": 88.0}
    line = {"name": "x", "ok": True, "fits": True, "void": 1, "rows": [row, other]}
    said = placements.summary([line, {**line, "fits": False, "void": 0, "rows": []}])
    assert "| x | a | 110 | 100 | +10.0% | 30% |" in capsys.readouterr().out
    assert said.startswith("2 entries, 1 do not fit, 1 runs void\npredict, 2 placements: off by 17.5% in the median")
    assert "regret, 1 entries: median 13.6% (bar 0), p95 13.6% (bar 5%)" in said
    without_the_chosen = {**line, "rows": [other, {**other, "rank": 3, "measured": 80.0}]}
    assert "regret, 1 entries" in placements.summary([line, without_the_chosen])


def test_a_step_is_the_mean_of_whole_patterns_between_the_first_and_the_last_ones():
    seconds = (9.0, 9.0, 9.0, 8.0, 1.0, 2.0, 6.0, 1.0, 2.0, 6.0, 0.5, 0.5, 0.5)
    assert placements.steady(seconds, staleness=2) == 3.0


def test_whole_jobs_are_held_against_the_better_fixed_placement(monkeypatch):
    took = {"Auto": 100.0, "Disaggregated": 120.0, "Collocated": 80.0}

    def run(manifest, *, timeout_s):
        whole = took[manifest["spec"]["placement"]["mode"]]
        return runs.Went(seconds=(whole / 60,) * 59, whole_s=whole, profiles=(), plans=(), busy=0.2)

    monkeypatch.setattr(runs, "run", run)
    at = whole_jobs.ENTRIES.index("drawn-14")
    line = whole_jobs.one(at, time_scale=1.0)
    assert (line["in_all"], line["at_last"], line["ok"]) == (1.25, 1.25, False)
    assert "in all 1.25 in the median, 1.25 at most (bar 1.1)" in whole_jobs.summary([line])
    took["Auto"] = 82.0
    assert whole_jobs.one(at, time_scale=1.0)["ok"]
    busy = runs.Went(seconds=(1.0,), whole_s=1.0, profiles=(), plans=(), busy=0.9)
    monkeypatch.setattr(runs, "run", lambda manifest, *, timeout_s: busy)
    assert whole_jobs.one(at, time_scale=1.0)["void"] == 3


@pytest.mark.parametrize(
    ("slow", "ok", "why"), [("Collocated", True, None), ("Auto", False, "Auto: not ended within 400 s")]
)
def test_a_fixed_placement_that_does_not_end_is_not_the_better_one_and_a_job_that_does_not_fails(
    slow, ok, why, monkeypatch
):
    def run(manifest, *, timeout_s):
        if manifest["spec"]["placement"]["mode"] == slow:
            raise runs.NotEnded(f"not ended within {timeout_s:.0f} s: ")
        return runs.Went(seconds=(1.0,) * 59, whole_s=60.0, profiles=(), plans=(), busy=0.2)

    monkeypatch.setattr(runs, "run", run)
    line = whole_jobs.one(whole_jobs.ENTRIES.index("drawn-14"), time_scale=1.0)
    assert (line["ok"], line.get("why")) == (ok, why)
    assert (line.get("too_long"), line.get("in_all")) == ((["Collocated"], 1.0) if ok else (None, None))


def test_what_each_plan_of_a_whole_job_promised_and_took_stands_in_its_row(monkeypatch, capsys):
    def profile(revision, steps, seconds):
        return SimpleNamespace(revision=revision, steps=steps, step_seconds=SimpleNamespace(value=seconds))

    def plan(revision, code, promised):
        predicted = Predicted(period_seconds=promised) if promised else None
        return SimpleNamespace(revision=revision, reason=PlanReasonModel(code=code), predicted=predicted)

    profiles: Any = (profile(1, 1, 9.0), profile(1, 3, 1.0), profile(1, 1, 2.0), profile(2, 1, 7.0))
    plans: Any = (plan(1, "Initial", 0), plan(2, "Probe", 1.5), plan(3, "Profiled", 0.5))
    went = runs.Went(seconds=(1.0,) * 59, whole_s=60.0, profiles=profiles, plans=plans, busy=0.2)
    monkeypatch.setattr(runs, "run", lambda manifest, *, timeout_s: went)
    line = whole_jobs.one(whole_jobs.ENTRIES.index("drawn-14"), time_scale=1.0)
    assert line["plans"] == [
        {"code": "Initial", "promised": None, "took": 1.25, "steps": 4},
        {"code": "Probe", "promised": 1.5, "took": 7.0, "steps": 1},
        {"code": "Profiled", "promised": 0.5, "took": None, "steps": 0},
    ]
    whole_jobs.summary([line])
    assert "| Initial 1.25; Probe 1.50 7.00; Profiled 0.50 |" in capsys.readouterr().out


def test_a_run_is_as_busy_as_the_cores_were_between_its_begin_and_its_end():
    times = namedtuple("times", ("user", "idle", "iowait", "guest"))
    assert runs._busy(times(10, 100, 0, 5), times(16, 112, 2, 11)) == pytest.approx(0.3)


def test_a_step_of_a_workload_is_scaled_to_a_second():
    entry = "drawn-14"
    manifest = workloads.job(workloads.entries()[entry], items=16, time_scale=placements.scale(entry))
    rollout = next(role for role in manifest["spec"]["roles"] if role["name"] == "rollout")
    assert rollout["config"] != workloads.entries()[entry]["roles"][0]
    assert 0.01 < placements.scale(entry) < 10
