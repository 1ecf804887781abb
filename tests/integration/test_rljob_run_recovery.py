"""A short CartPole job in which everything is killed once: it ends as if nothing had been, but for its branches.

What entered which step is in lineage.jsonl, a line per commit with the number and the digest of the units' keys.
"""

import json
import signal
import time
from typing import Any

import pytest
import yaml

from rlinf_api import names
from tests import rljob_runs
from tests.rljob_runs import Run

STEPS, SLICES = 120, 2
SETS = (f"spec.flow.config.slices={SLICES}", f"spec.flow.steps={STEPS}", "spec.checkpoint.everySteps=5")

END_S = 120.0
"""Of a start and all steps, which took more than 50 s on two cores at a load of 20."""

pytestmark = pytest.mark.timeout(400)


def history(lines):
    """What the last weights came from: of the lines in their order, those that no later branch has made again."""
    survived: list[dict[str, Any]] = []
    for line in lines:
        while survived and survived[-1]["branch"] < line["branch"] and survived[-1]["step"] >= line["step"]:
            survived.pop()
        survived.append(line)
    return survived


def recoveries(run):
    return [line for line in run.lines("events") if line["event"] == "recovered"]


NOTICED_WITHIN_S = {"worker-exited": 2.0, "pod-lost": 6.0}
"""After a kill -9, by the event that the driver writes when it hears of it: of a worker, and of an agent and all."""


def strike(run, name, number):
    """Ends or stops one part, and waits until another has its place, steps commit again, and the driver has said how
    long that took: which it says with a later step, and not at all where it is the next to be killed before."""
    before, recovered = len(run.lines("lineage")), recoveries(run)
    run.until(lambda: run.part(name), what=f"a process of {name}")
    struck_at = time.time()
    pid = run.kill(name, number)

    def replaced():
        part = run.part(name)
        return part is not None and part.pid != pid

    run.until(replaced, what=f"another process of {name}")
    run.until(lambda: len(run.lines("lineage")) > before + 2, what=f"steps after {number.name} to {name}")
    run.until(lambda: len(recoveries(run)) > len(recovered), what=f"the account of {number.name} to {name}")
    kind = {"agent": "pod-lost", "driver": ""}.get(name, "worker-exited")
    if number is signal.SIGKILL and kind:
        of = [line for line in run.lines("events") if line["event"] == kind and line["time"] >= struck_at]
        first = next(line for line in of if kind == "pod-lost" or line["worker"] == name)
        assert first["time"] - struck_at <= NOTICED_WITHIN_S[kind], first


def test_the_history_of_a_job_leaves_out_what_was_made_again():
    def line(branch, step):
        return {"branch": branch, "step": step}

    lines = [line(0, 1), line(0, 2), line(0, 3), line(1, 2), line(1, 3), line(2, 4)]
    assert history(lines) == [line(0, 1), line(1, 2), line(1, 3), line(2, 4)]


@pytest.mark.slow("kills each part of a job once and waits until steps commit again")
def test_a_job_in_which_everything_is_killed_once_trains_on_every_unit_exactly_once(tmp_path):
    template = {"spec": {"containers": [{"name": "agent", "env": [
        {"name": names.ENV_SETTINGS, "value": '{"step_deadline_min_s": 4}'},
        {"name": names.ENV_LOG_LEVEL, "value": "DEBUG"}]}]}}  # fmt: skip
    file = rljob_runs.manifest(tmp_path / "job.yaml")
    job = yaml.safe_load(file.read_text())
    job["spec"]["pools"][0]["template"] = template
    file.write_text(yaml.safe_dump(job))
    killed = [(name, signal.SIGKILL) for name in ("env/0", "rollout/0", "actor/0", "agent", "driver")]
    with Run(tmp_path, *SETS, file=file, learns=True) as run:
        run.until_step(6)
        for name, number in [*killed, ("env/0", signal.SIGSTOP)]:
            strike(run, name, number)
        assert run.end(timeout_s=END_S) == 0, run.said
        assert run.answer["condition"] == "Complete"
        assert run.left() == []
        lines = run.lines("lineage")
        assert len({(line["branch"], line["step"]) for line in lines}) == len(lines), "no step commits twice"
        survived = [(line["step"], line["units"], line["digest"]) for line in history(lines)]
        assert survived == [rljob_runs.undisturbed(step, slices=SLICES) for step in range(1, STEPS + 1)]
        assert {line["branch"] for line in lines} >= {0, 1, 2}, "actor and agent took the weights along"
        seen = run.checksums()
        assert {version.partition("-")[0] for version, _ in seen} >= {"b0", "b1", "b2"}
        assert [key for key, by_checksum in seen.items() if len(by_checksum) > 1] == []
        logs = [set().union(*by_checksum.values()) for by_checksum in seen.values()]
        assert sum(len(written) > 1 for written in logs) > STEPS / 2, "published by one worker and received by another"
        # A stopped process answers no ping, which is noticed before its phase's deadline as often as not.
        noticed = (
            "its connection to the driver broke",
            "worker env/0 hung and was killed",
            "worker env/0 showed no sign",
        )
        assert any(text in run.said + str(run.lines("events")) for text in noticed)
        assert [line["event"] for line in run.lines("events")].count("driver") == 2
        recovered = recoveries(run)
        killed_in_order = ["env/0", "rollout/0", "actor/0", "pod cpu-0", "driver"]
        assert [line["who"] for line in recovered] == [*killed_in_order, "env/0"]
        assert all(0 < line["start_s"] <= line["seconds"] for line in recovered)
        # 16 questions a slice (SMALL): what lives anew makes what is open, and not the job from its first step on.
        paths = (run.work_dir / "spans").iterdir()
        spans = [json.loads(text) for path in paths for text in path.read_text().splitlines()]
        made = sum(span.get("role") == "env" and span.get("kind") == "compute" for span in spans)
        assert made < 1.5 * STEPS * SLICES * 16, f"{made} steps of environments"
        # Who waits for an environment or an actor waits at least as long as that needs to start.
        lost = {line["who"]: line["lost_s"] for line in recovered[:3]}
        assert lost["env/0"].keys() == {"rollout", "actor"}
        assert lost["actor/0"]["env"] > 0.5 * recovered[2]["seconds"]
        # In the events always; in a condition only where the new life took longer than reports are apart (1 s).
        assert "worker env/0 was killed by signal 9 (SIGKILL)" in str(run.lines("events"))
        assert '"level"' not in run.said
