"""The verdict on chaos finds what is wrong, and the same seed draws the same faults."""

import dataclasses
import os
import random
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from rlinf_api import names
from rlinf_api.errors import UserError
from tools import running_job
from tools.chaos import faults, job, plans, rounds, verdict
from tools.chaos.faults import Fault
from tools.chaos.plans import Ask, Plans
from tools.chaos.rounds import Done, Round


def line(step, *, branch=0, digest="d", returned=400.0):
    return {"step": step, "branch": branch, "units": 4, "digest": f"{digest}{step}", "return_mean": returned}


CALM = Round(
    seed=1, exit_code=0, seconds=1.0, answer={"condition": "Complete"},
    lineage=[line(1), line(2), line(3)], metrics=[line(1), line(2), line(3)], events=[],
    checksums={("b0-1", ""): {"a"}}, left=[], said="",
)  # fmt: skip


def test_a_job_that_made_steps_again_has_the_history_of_one_that_was_left_alone():
    again = [line(1), line(2), line(2, branch=1), line(3, branch=1)]
    assert verdict.problems(dataclasses.replace(CALM, lineage=again), calm=CALM) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exit_code": 1}, "ended with exit code 1"),
        ({"answer": {"condition": "Failed"}}, "'Failed'"),
        ({"left": [12]}, r"\[12\] are left"),
        ({"unanswered": ["a change of plan (back) was neither"]}, "a change of plan"),
        ({"lineage": [line(1), line(1), line(2), line(3)]}, r"committed twice.*\(0, 1\)"),
        ({"lineage": [line(1), line(2, digest="x"), line(3)]}, "step 2: "),
        ({"lineage": [line(1), line(2)]}, "it has 2 steps, wanted 3"),
        ({"checksums": {("b0-1", ""): {"a", "b"}}}, "two checksums.*b0-1"),
        ({"checksums": {}}, "no worker has logged a checksum"),
    ],
)
def test_what_does_not_hold_is_a_sentence(changes, says):
    problems = verdict.problems(dataclasses.replace(CALM, **changes), calm=CALM)
    assert len(problems) >= 1
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("; ".join(problems))


def test_learning_is_measured_against_the_spread_of_undisturbed_seeds():
    calm = [480.0, 490.0, 470.0, 485.0, 475.0]
    assert verdict.learning([470.0], calm) == ""
    assert verdict.learning([499.0], calm) == "", "better is well"
    assert "reached a mean return of 400.0" in verdict.learning([400.0], calm)
    assert verdict.learning([494.0], [500.0] * 5) == "", "no spread at the top is not no tolerance"


def test_the_result_is_of_the_history_that_survived():
    made_again = [line(1), line(2, returned=10.0), line(2, branch=1), line(3, branch=1)]
    assert verdict.result(dataclasses.replace(CALM, metrics=made_again)) == 400.0


def drawn(seed, **how):
    chance = random.Random(seed)
    return [faults.draw(chance, **how) for _ in range(200)]


def test_the_same_seed_draws_the_same_faults_and_leaves_out_what_the_machine_has_not():
    assert drawn(3) == drawn(3) != drawn(4)
    assert {fault.kind for fault in drawn(3)} == set(faults.KINDS)
    assert {fault.kind for fault in drawn(3, lacks={"slow", "full"})} == {"kill", "kill-pod", "stop", "pause", "plan"}
    assert {fault.target for fault in drawn(3, spares=True)} >= set(faults.SPARES)
    assert not {fault.target for fault in drawn(3)} & set(faults.SPARES)
    assert not Fault(kind="kill", target=faults.SPARES[0]).replaces, "the job needs none"


@pytest.mark.parametrize(
    ("options", "tools", "lacks"),
    [
        ((), ("mount", "tc", "nsenter", "ip"), {"full": "no mount name space", "slow": "no mount name space"}),
        (("--mount",), ("mount", "tc", "nsenter", "ip"), {"slow": "no network name space"}),
        (("--mount", "--net"), ("mount", "nsenter", "ip"), {"slow": "there is no tc"}),
        (("--mount", "--net"), ("tc", "nsenter", "ip"), {"full": "there is no mount"}),
        (("--mount", "--net"), ("mount", "tc", "nsenter", "ip"), {}),
    ],
)
def test_what_a_machine_does_not_allow_is_in_the_verdict(monkeypatch, options, tools, lacks):
    monkeypatch.setattr(job, "_unshared", lambda: options)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}" if tool in tools else None)
    found = job.lacking()
    assert found.keys() == lacks.keys()
    assert all(lacks[kind] in found[kind] for kind in lacks)
    done = [fault(kind) for kind in faults.KINDS if kind not in lacks]
    said = verdict.scope([dataclasses.replace(CALM, done=done)], found)
    assert len(said) == len(lacks)
    assert all("as this machine does not allow it" in text for text in said)


def test_kinds_that_did_not_come_up_are_in_the_verdict():
    [said] = verdict.scope([dataclasses.replace(CALM, done=[fault("kill"), fault("plan")])], {})
    assert said.startswith("no fault of kind 'kill-pod', 'stop', 'pause', 'slow', 'full', as none came up")


def fault(kind, *, asks=()):
    return Done(fault=Fault(kind=kind, target="x"), at_s=0, struck=[], began=0, until=0, asks=asks)


def answered(*answer):
    ask = Ask("workers", lambda: answer)
    ask.thread.join()
    return ask


def test_changes_of_plan_of_which_none_came_into_force_are_a_problem():
    def of(*asks):
        return verdict.changes([dataclasses.replace(CALM, done=[fault("plan", asks=asks)])])

    assert of() == ""
    assert of(answered(False, "the job ended before it: 97 steps are done")) == ""
    assert of(answered(False, "no"), answered(True, "p2")) == ""
    assert of(answered(False, "no")) == "of 1 changes of plan none came into force; the last: no"


FIRST = {
    "workers": [
        {"role": "env", "count": 2, "slots": "sim/0/[0-1]"},
        {"role": "actor", "count": 1, "slots": "learn/0/1"},
    ],
    "channels": [],
}


def test_a_change_asks_for_another_plan_and_goes_back_to_the_first(monkeypatch, tmp_path):
    asked = []

    def put(work, file, *, timeout_s):
        asked.append(file.read_text())
        return True, "p2"

    def pin(work, name, *, timeout_s):
        asked.append(name)
        return True, name

    monkeypatch.setattr("rljob.plan.put", put)
    monkeypatch.setattr("rljob.plan.pin", pin)
    mine = Plans(tmp_path / "work")
    mine.first = FIRST
    for change in plans.CHANGES:
        mine.change(change).thread.join()
        mine.back().thread.join()
    assert [text for text in asked if text == "cartpole-p1"] == ["cartpole-p1"] * 2
    assert '"microBatch": 2' in asked[0]
    assert '{"role": "env", "count": 1, "slots": "sim/0/0"}' in asked[2]
    assert plans.counts([ask.as_json() for ask in mine.asked]) == {"in force": 4, "overtaken": 0, "not in force": 0}
    assert mine.problems() == []


def test_the_first_plan_that_has_failed_for_good_is_set_anew(monkeypatch, tmp_path):
    monkeypatch.setattr("rljob.plan.pin", lambda *_, timeout_s: (False, "plan cartpole-p1 has failed"))
    monkeypatch.setattr("rljob.plan.put", lambda work, file, *, timeout_s: (True, file.name))
    mine = Plans(tmp_path / "work")
    ask = mine.back()
    ask.thread.join()
    assert (ask.in_force, ask.says) == (True, "plan-first.yaml")


def test_no_answer_to_a_change_is_a_problem_unless_another_overtook_it(monkeypatch, tmp_path):
    go = threading.Event()

    def put(*_, timeout_s):
        go.wait(10)
        raise UserError("the run in x does not answer", got=f"nothing within {timeout_s:g} s")

    monkeypatch.setattr("rljob.plan.put", put)
    monkeypatch.setattr("rljob.plan.pin", put)
    mine = Plans(tmp_path / "work")
    mine.first = FIRST
    change, back = mine.change("workers"), mine.back()
    assert change.is_over, "another has overtaken it"
    assert not back.is_over
    go.set()
    mine.close()
    [said] = mine.problems()
    assert "(back) was neither in force nor refused" in said


class Still:
    """A job whose commits are counted here."""

    is_running = True

    def __init__(self):
        self.steps = 0

    def lines(self, name):
        return [{}] * self.steps


def test_a_change_of_plan_is_over_with_the_second_commit_after_its_last_answer():
    go, mine = threading.Event(), Still()
    ask = Ask("back", lambda: (go.wait(10), "p1"))
    entry = fault("plan", asks=[ask])

    def settled():
        return rounds._settled(cast("job.Job", mine), [entry])

    mine.steps = 5
    assert not settled()
    assert entry.commits_before is None, "steps of the meantime do not count"
    go.set()
    ask.thread.join()
    assert not settled()
    mine.steps = 6
    assert not settled()
    mine.steps = 7
    assert settled()
    assert entry.recovered_s is not None


def process(name, environ):
    command = ["python", "-m", "rlinf_worker", "worker"]
    fake = SimpleNamespace(name=lambda: name, environ=lambda: environ, cmdline=lambda: command)
    return cast("psutil.Process", fake)


def test_a_spare_that_was_promoted_is_the_worker_that_it_became():
    environ = {names.ENV_WORKER_ID: "spare.env/0", names.ENV_POOL: "sim"}
    waits = running_job._part(process("python", environ))
    works = running_job._part(process("env/0", environ))
    assert waits is not None
    assert works is not None
    assert (waits.name, waits.pool, works.name, works.pool) == ("spare.env/0", "sim", "env/0", "sim")


def test_what_an_undisturbed_job_leaves_is_found_by_its_work_dir(tmp_path):
    """Nobody looked at its processes while it ran."""
    mine = job.Job.__new__(job.Job)
    mine.work_dir, mine._known = tmp_path / "work", {}
    environ = {**os.environ, names.ENV_OUTPUT_DIR: str(mine.work_dir)}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environ, stdin=subprocess.PIPE) as left:
        assert [process.pid for process in mine.living()] == [left.pid]
        left.communicate(b"\n")
    assert mine.living() == []
