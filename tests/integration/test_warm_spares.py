"""A CartPole job with warm spares in local mode: what takes a lost worker's place, how soon, and what else may die."""

import json
import time

import psutil
import pytest
import yaml

from tests import rljob_runs
from tests.cluster import bars
from tests.rljob_runs import Run

BAR_S = 5.0
"""As of the row recover_spare of `make bench-runtime`, which holds it on a quiet machine."""
SPARES = {"actor": "spare.actor/0", "env": "spare.env/0"}

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.slow("starts of torch are waited for, with a spare and without one"),
]


def events(run, kind, after=0):
    return [line for line in run.lines("events")[after:] if line["event"] == kind]


def warm(run, role, *, after=0):
    """The process of a spare that waits for a place."""
    what = f"a warm spare of {role}"
    run.until(lambda: [e for e in events(run, "spare-warm", after) if e["role"] == role], what=what)
    return run.until(lambda: run.part(SPARES[role]), what=what).pid


def lose(run, *parts):
    """Kills these at once; the event `recovered` of the first, after which steps commit again."""
    before = len(run.lines("events"))
    for part in parts:
        run.kill(part)

    def back():
        return [event for event in events(run, "recovered", before) if event["who"] == parts[0]]

    [recovered] = run.until(back, what=f"{parts[0]} back at work")
    steps = len(run.lines("lineage"))
    run.until(lambda: len(run.lines("lineage")) > steps, what=f"steps after the loss of {parts[0]}")
    return recovered


def made(tmp_path, *sets, **roles):
    """The example, with these fields of its roles."""
    file = rljob_runs.manifest(tmp_path / "job.yaml")
    job = yaml.safe_load(file.read_text())
    for role in job["spec"]["roles"]:
        role |= roles.get(role["name"], {})
    file.write_text(yaml.safe_dump(job))
    return Run(tmp_path, "spec.flow.steps=100000", "spec.checkpoint.everySteps=5", *sets, file=file, learns=True)


@pytest.fixture
def run(tmp_path):
    with made(tmp_path, **{role: {"spares": 1} for role in SPARES}) as run:
        run.until_step(6)
        yield run


def test_a_lost_worker_is_back_from_a_warm_spare_sooner_than_from_nothing(run):
    pids, took_s = {role: warm(run, role) for role in SPARES}, dict[str, float]()
    for role, pid in pids.items():
        before, began = len(run.lines("events")), bars.look()
        recovered = lose(run, f"{role}/0")
        took_s[role] = recovered["seconds"]
        assert recovered["spares"] == 1
        assert took_s[role] <= bars.by_load(BAR_S, since=began)
        assert "from a warm spare" in recovered["message"]
        worker = run.part(f"{role}/0")
        assert worker is not None
        assert worker.pid == pid, "the very process that was warm"
        assert warm(run, role, after=before) != pid, "and another one waits"
    # Spare and worker at once: the start from nothing, which tells what a spare saves. Where the dying spare was
    # promoted all the same, its worker's second failure is followed by it.
    before = len(run.lines("events"))
    run.kill(SPARES["actor"])
    cold = lose(run, "actor/0")
    assert cold["seconds"] > took_s["actor"]
    warm(run, "actor", after=before)
    assert [e["event"] for e in run.lines("events")].count("failed") == 0


def test_a_spare_waits_without_cpu_dies_for_nothing_and_is_found_by_the_next_driver(run):
    first, before = warm(run, "actor"), len(run.lines("events"))
    spare, steps = psutil.Process(first), len(run.lines("lineage"))
    used, began = cpu_s(spare), time.monotonic()
    run.until(lambda: len(run.lines("lineage")) > steps + 50, what="50 steps")
    assert cpu_s(spare) - used < 0.1 * max(1.0, time.monotonic() - began)
    run.kill(SPARES["actor"])
    pid = warm(run, "actor", after=before)
    assert pid != first
    [lost] = events(run, "spare-lost", before)
    assert "was killed by signal 9 (SIGKILL)" in lost["message"]
    assert events(run, "recovered") == []
    assert {line["branch"] for line in run.lines("lineage")} == {0}

    before = len(run.lines("events"))
    run.kill("driver")
    run.until(lambda: events(run, "running", before), what="all workers with the next driver")
    assert warm(run, "actor", after=before) == pid
    assert lose(run, "actor/0")["spares"] == 1
    worker = run.part("actor/0")
    assert worker is not None
    assert worker.pid == pid
    assert [e["who"] for e in events(run, "recovered")] == ["driver", "actor/0"]
    run.interrupt()
    assert run.end() == 130, run.said
    assert run.left() == []


def test_a_gang_is_formed_anew_from_the_spares_of_all_its_ranks(tmp_path):
    pool = [{"name": "cpu", "roles": ["env", "rollout", "actor"], "slots": {"perPod": 4, "cpu": "500m"}}]
    with made(tmp_path, f"spec.pools={json.dumps(pool)}", actor={"workers": 2, "spares": 2}) as run:
        run.until_step(6)
        run.until(lambda: len(events(run, "spare-warm")) == 2, what="two warm spares")
        spares = {run.part(f"spare.actor/{number}").pid for number in (0, 1)}
        began = bars.look()
        recovered = lose(run, "actor/1")
        assert recovered["seconds"] <= bars.by_load(BAR_S, since=began)
        assert {run.part(f"actor/{rank}").pid for rank in (0, 1)} == spares


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
