"""Schedules of faults over other shapes: what is drawn, and that a job which is not as it should be is told."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from rlinf_api import supported
from tests.fakes import critic_job
from tools import resumable, running_job
from tools.chaos import schedules, shapes
from tools.chaos.schedules import Blow, Strike, Watch
from tools.running_job import Part, RunningJob


def drawn(count):
    for seed in range(count):
        rng = random.Random(seed)
        shape = shapes.drawn(rng, Path("/data"))
        yield shape, list(schedules.strikes(rng, shape.roles))


def test_shapes_have_several_rollouts_two_ranks_two_gangs_and_one_or_two_pods():
    found = [shape for shape, _ in drawn(120)]
    for shape in found:
        spec, problems = supported.validate(shape.manifest)
        assert spec is not None, problems
    assert {role.get("spares", 0) for shape in found for role in shape.manifest["spec"]["roles"]} == {0, 1}
    in_turns = [shape.manifest["spec"] for shape in found if shape.name == "turns"]
    assert {(spec["placement"]["mode"], spec["pools"][0]["pods"]) for spec in in_turns} == {
        ("Collocated", 1),
        ("Collocated", 2),
    }
    of_text = [shape.manifest["spec"] for shape in found if shape.name == "reasoning"]
    assert {spec["placement"]["mode"] for spec in of_text} == {"Collocated", "Disaggregated"}
    assert {spec["flow"]["maxStaleness"] for spec in of_text} == {0, 1, 2}
    assert {r["workers"] for spec in of_text for r in spec["roles"] if r["name"] == "rollout"} == {1, 2, 3}
    beside = [shape.manifest["spec"] for shape in found if shape.name not in ("turns", "reasoning")]
    counts = [{r["name"]: r["workers"] for r in spec["roles"]} for spec in beside]
    assert {n.get("rollout", n.get("sampler")) for n in counts} == {2, 3, 4}
    assert all(n.get("actor", n.get("train")) == 2 for n in counts)
    assert {n["critic"] for n in counts if "critic" in n} == {1, 2}
    assert {len(spec["pools"]) for spec in beside} == {1, 2}
    assert {shape.name for shape in found} == {"ppo", "critic", "pipeline", "turns", "reasoning"}


def test_strikes_hit_everybody_in_both_ways_alone_and_in_pairs_at_once_and_after_each_other():
    every = [strike for _, asked in drawn(60) for strike in asked]
    blows = [blow for strike in every for blow in strike.blows]
    assert {blow.whom for blow in blows} >= {"env", "rollout", "actor", "critic", "sampler", "train", "agent", "driver"}
    assert {len(strike.blows) for strike in every} == {1, 2}
    assert {blow.how for blow in blows if blow.whom != "agent"} == {"kill", "freeze"}
    assert {blow.how for blow in blows if blow.whom == "agent"} == {"kill", "freeze", "end"}
    pairs = {tuple(blow.how for blow in strike.blows) for strike in every if len(strike.blows) == 2}
    assert pairs > {("kill", "kill"), ("kill", "freeze"), ("freeze", "kill"), ("freeze", "freeze"), ("freeze", "end")}
    assert {len(asked) for _, asked in drawn(60)} == {1, 2, 3}
    assert any(not strike.at for strike in every)
    assert all(strike.at <= shapes.STEPS - 15 for strike in every)


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A watched job that is over, as a good one leaves it."""
    monkeypatch.setattr(RunningJob, "_start", lambda self: subprocess.Popen([sys.executable, "-c", ""]))
    file = tmp_path / "job.yaml"
    file.write_text("metadata: {name: job}\n")
    run = RunningJob(file, tmp_path)
    run.process.wait(30)
    run.work_dir.mkdir()
    (tmp_path / "out").write_text('{"condition": "Complete"}\n')
    (tmp_path / "err").write_text("")
    wanted = critic_job.learnt(upto=shapes.STEPS)
    write(run, "metrics", [{"step": n, "total": a, "critic_total": c} for n, (a, c) in wanted.items()])
    write(run, "lineage", [{"step": n, "branch": 0, "units": 8} for n in wanted])
    return Watch(run)


def write(run, name, lines):
    (run.work_dir / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run._tails[name] = running_job.Tail(run.work_dir / f"{name}.jsonl")


CRITIC = shapes._critic(random.Random(1))


def without(watch, name, step):
    write(watch.run, name, [line for line in watch.run.lines(name) if line["step"] != step])


def changed(watch, name, at, **fields):
    write(watch.run, name, [line | (fields if line["step"] == at else {}) for line in watch.run.lines(name)])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda watch: None, ""),
        (lambda watch: without(watch, "lineage", 7), "the surviving history has steps [1, 2, 3, 4, 5, 6, 8"),
        (lambda watch: changed(watch, "lineage", 7, units=9), "steps with other than 8 units: [(7, 9)]"),
        (lambda watch: changed(watch, "lineage", 7, step=6), "committed twice on their branch 1 times"),
        (lambda watch: changed(watch, "metrics", 7, total=1), "have learnt something else: step 7: (1, "),
        (lambda watch: setattr(watch, "went_on_s", 45.1), "it went on 45.1 s after a strike, wanted 45"),
        (lambda watch: setattr(watch, "unnamed_s", 5.1), "nobody that was struck () was named for 5.1 s beyond 10 s"),
        (lambda watch: (watch.run.folder / "out").write_text('{"condition": "Failed"}\n'), "exit code 0, {'condition'"),
    ],
    ids=["good", "lost", "doubled-unit", "doubled-step", "learnt", "late", "unnamed", "failed"],
)
def test_what_must_hold_at_the_end_is_told_where_it_does_not(ended, spoil, said):
    spoil(ended)
    found = "; ".join(schedules.problems(ended, CRITIC))
    assert said in found
    assert bool(found) == bool(said)


def test_workers_that_take_longer_to_start_have_so_much_longer(ended):
    ended.went_on_s = 59.9
    assert schedules.problems(ended, replace(CRITIC, start_s=15.0)) == []
    ended.went_on_s = 60.1
    assert schedules.problems(ended, replace(CRITIC, start_s=15.0)) == ["it went on 60.1 s after a strike, wanted 60"]


def test_a_job_that_does_not_end_is_told(ended):
    ended.run.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert schedules.problems(ended, CRITIC)[0].startswith("the job has not ended within 300 s; it was at step 80")
    assert ended.run.close() == []


# --- what is watched --------------------------------------------------------------------------------------------------
class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


class Still:
    """A job that is looked at."""

    def __init__(self, kind):
        self.steps, self.message, self.kind, self.more = 0, "", kind, []

    def lines(self, name):
        return [{"step": n + 1} for n in range(self.steps)]

    def objects(self, kind):
        conditions = [
            {
                "type": self.kind,
                "status": str((self.kind == "Degraded") == bool(self.message)),
                "message": self.message,
            },
            {"type": "Valid", "status": "True", "message": "rollout/1 is fine"},
        ]
        return [{"status": {"conditions": [*conditions, *self.more]}}]


@pytest.mark.parametrize("kind", ["Degraded", "Running"])
def test_a_wait_begins_with_the_last_strike_and_who_is_struck_has_ten_seconds_until_it_is_named(monkeypatch, kind):
    clock, job = Clock(monkeypatch), Still(kind)
    watch = Watch(cast("RunningJob", job))
    for second in range(4):  # before any strike nothing counts
        clock.now, job.steps = 1000.0 + 30 * second, second
        watch.look()
    assert (watch.went_on_s, watch.unnamed_s) == (0.0, 0.0)
    watch.last_strike, watch.struck = clock.now + 1, ["rollout/1"]
    began = clock.now + 1
    for second in range(14):
        clock.now = began + second
        watch.look()
    assert watch.unnamed_s == 3.0
    job.message = "rollout/2 has been silent for 13 s"
    clock.now = began + 15
    watch.look()
    assert watch.unnamed_s == 5.0, "somebody else"
    job.message = "rollout/1 has been silent for 15 s"
    for second in range(16, 31):
        clock.now = began + second
        watch.look()
    job.steps += 1
    watch.look()
    assert (watch.went_on_s, watch.unnamed_s) == (30.0, 5.0)
    assert watch.said == ["rollout/2 has been silent for 13 s", "rollout/1 has been silent for 15 s"]
    clock.now += 5
    job.steps += 1
    watch.look()
    assert watch.went_on_s == 30.0


@pytest.mark.parametrize(("ended", "unnamed_s"), [(None, 20.0), ("Complete", 0.0), ("Failed", 0.0)])
def test_what_follows_the_jobs_end_is_no_wait_of_its_steps(monkeypatch, ended, unnamed_s):
    clock, job = Clock(monkeypatch), Still("Degraded")
    watch = Watch(cast("RunningJob", job))
    watch.last_strike = watch.committed_at = clock.now
    watch.struck = ["p1-0"]
    job.more = [{"type": ended, "status": "True", "message": ""}] if ended else []
    clock.now += 30
    watch.look()
    assert watch.unnamed_s == unnamed_s


def test_a_strike_names_a_worker_by_its_name_and_an_agent_by_its_pod():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        signals = list[int]()
        process = SimpleNamespace(send_signal=signals.append, pid=child.pid)
        parts = {
            name: Part(name=name, pool="p0", pod="job-p0-0-a1", process=cast("psutil.Process", process))
            for name in ("rollout/0", "rollout/1", "agent:p0", "driver")
        }
        run = RunningJob.__new__(RunningJob)
        run.parts = lambda: dict(parts)  # type: ignore[method-assign]
        watch = Watch(run)
        blows = (Blow(how="kill", whom="rollout", which=0.9), Blow(how="freeze", whom="agent", which=0.0))
        struck = schedules._strike(watch, Strike(blows=blows, at=3, after_s=0.0))
        assert [part.name for _, part in struck] == ["rollout/1", "agent:p0"]
        assert watch.struck == ["rollout/1", "p0-0"]
        assert [int(signal) for signal in signals] == [9, 19]
        assert (
            schedules._strike(watch, Strike(blows=(Blow(how="kill", whom="env", which=0.5),), at=0, after_s=1.0)) == []
        )
        last = Strike(blows=(Blow(how="kill", whom="rollout", which=1.0),), at=0, after_s=1.0)
        assert [part.name for _, part in schedules._strike(watch, last)] == ["rollout/1"], "rounded up"
        child.communicate(b"\n")


def test_schedules_are_summed_up():
    good = {"seed": 1, "ok": True, "strikes": ["a", "b"], "went_on_s": 3.0}
    assert schedules.summary([good, {**good, "seed": 2, "ok": False, "went_on_s": 40.0}]) == (
        "1 of 2 schedules end with all steps, in time and by name (not: [2]); 4 strikes; from the last strike to the "
        "commit that ended its wait 21.5 s in the median, 40.0 at most"
    )


# --- results that are not made again ----------------------------------------------------------------------------------
@pytest.mark.parametrize("at_once", [1, 3])
def test_what_was_made_is_not_made_again_and_lines_are_in_order(tmp_path, at_once):
    path, made = tmp_path / "deep" / "lines.jsonl", list[int]()

    def one(seed):
        made.append(seed)
        return {"seed": seed, "ok": seed != 2}

    until = time.monotonic() + 60
    assert [line["seed"] for line in resumable.results(path, one, count=3, until=until, at_once=at_once)] == [0, 1, 2]
    found = resumable.results(path, one, count=5, until=until, at_once=at_once)
    assert sorted(made) == [0, 1, 2, 3, 4]
    assert [(line["seed"], line["ok"]) for line in found] == [(n, n != 2) for n in range(5)]
    assert len(path.read_text().splitlines()) == 5
    assert resumable.results(path, one, count=9, until=time.monotonic() - 1) == found, "none is begun too late"


def test_what_counts_as_not_made_is_made_again_once(tmp_path):
    made = list[int]()

    def one(seed):
        made.append(seed)
        return {"seed": seed, "void": int(seed == 1 and made.count(1) == 1)}

    until = time.monotonic() + 60
    for voids in ([0, 1, 0], [0, 0, 0], [0, 0, 0]):
        found = resumable.results(
            tmp_path / "lines.jsonl", one, count=3, until=until, again=lambda line: line["void"] > 0
        )
        assert [line["void"] for line in found] == voids
    assert made == [0, 1, 2, 1]
