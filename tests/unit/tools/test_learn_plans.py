"""The verdict of `make learn-plans` is not to be had for nothing: without learning, changes, or a reference."""

import subprocess
import sys

import pytest

from rlinf_api.errors import UserError
from tools.bench.foundation_parts import learn_plans
from tools.bench.foundation_parts.learn_plans import Learned
from tools.bench.foundation_parts.runs import NEVER
from tools.bench.harness import BenchError

CALM = [50_000.0, 52_000.0, 48_000.0, 51_000.0, 49_000.0]


@pytest.mark.parametrize(
    ("calm", "changed", "code", "says"),
    [
        (CALM, [52_000.0] * 5, 0, "met: 52000 env steps with changes in 5 seeds, 50000"),
        (CALM, [54_000.0] * 5, 1, "missed: 54000 .* at most 53162 wanted"),
        ([*CALM[:4], NEVER], [99_000.0] * 5, 2, r"no verdict: undisturbed seeds \[5\] never reached 475"),
        (CALM, [50_000.0, NEVER], 1, r"missed: with changes seeds \[2\] never reached 475"),
    ],
)
def test_a_seed_that_never_learns_makes_no_bar_and_meets_none(calm, changed, code, says):
    found = learn_plans.verdict(calm, changed)
    assert found.code == code
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(found.says)


def test_about_every_ten_steps_another_plan_has_to_be_in_force():
    assert learn_plans.too_few(9, steps=97) == learn_plans.too_few(7, steps=97) == ""
    assert "6 changes of plan came into force in 97 steps, wanted about 9" in learn_plans.too_few(6, steps=97)
    assert "wanted about 0" in learn_plans.too_few(0, steps=10), "a run too short for a change proves nothing"


def run(monkeypatch, learned, *arguments):
    order = []

    def learn(*, seed, steps, changed):
        order.append((seed, changed))
        return learned(seed, changed)

    monkeypatch.setattr(learn_plans, "learn", learn)
    monkeypatch.setattr(sys, "argv", ["learn-plans", *arguments])
    return learn_plans.main(), order


def learned(seed, changed, *, pauses=9):
    return Learned(returns=(500.0,), solved_at=50_000.0 + seed, pauses_s=(0.1,) * pauses if changed else ())


def test_five_seeds_of_each_in_turn(monkeypatch, capsys):
    code, order = run(monkeypatch, learned)
    assert code == 0
    assert order == [(seed, changed) for seed in range(1, 6) for changed in (False, True)]
    assert "learn-plans: met: " in capsys.readouterr().out
    assert run(monkeypatch, learned, "--seeds", "2", "--changed", "1") == (0, [(1, False), (1, True), (2, False)])


def test_a_run_without_its_changes_is_no_verdict(monkeypatch, capsys):
    code, order = run(monkeypatch, lambda seed, changed: learned(seed, changed, pauses=1))
    assert (code, order[-1]) == (2, (1, True))
    assert "no verdict: seed 1, with changes: 1 changes of plan came into force" in capsys.readouterr().err


@pytest.fixture
def child():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize(
    ("says", "error"), [("roles: not allowed", True), ("not within 60 s", True), ("refused", False)]
)
def test_a_refusal_and_a_time_out_are_failures_and_not_the_end_of_the_run(monkeypatch, tmp_path, child, says, error):
    (tmp_path / "lineage.jsonl").write_text("{}\n" * 10)

    def put(work, file, *, timeout_s):
        if error:
            raise UserError(says)
        return False, says

    monkeypatch.setattr("rljob.plan.put", put)
    with pytest.raises(BenchError, match=f"change 1, asked at step 10, is not in force: {says}"):
        learn_plans._change(child, tmp_path, tmp_path / "plan.yaml", steps=97)


def test_a_change_that_the_end_of_the_run_forestalls_is_none(monkeypatch, tmp_path, child):
    (tmp_path / "lineage.jsonl").write_text("{}\n" * 90)

    def put(work, file, *, timeout_s):
        (tmp_path / "lineage.jsonl").write_text("{}\n" * 97)
        child.communicate(b"\n")
        return False, "the job ended before it: 97 steps are done"

    monkeypatch.setattr("rljob.plan.put", put)
    learn_plans._change(child, tmp_path, tmp_path / "plan.yaml", steps=97)
