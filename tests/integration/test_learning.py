"""CartPole learns: the committed example, shortened, from manifest to metrics. `make learn` is the whole of it."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.foundation_parts import learn_plans

ROOT = Path(__file__).resolve().parents[2]
STEPS = 25  # a quarter of the example: returns go from about 20 to above 100


@pytest.mark.timeout(180)
def test_cartpole_returns_rise_clearly_within_a_quarter_of_the_example(tmp_path):
    command = [sys.executable, "-m", "rljob", "run", "examples/cartpole/rljob.yaml", "--work-dir", str(tmp_path / "w")]
    command += ["--seed", "1", "--set", f"spec.flow.steps={STEPS}", "--output", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    lines = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
    assert (answer["condition"], answer["steps"], len(lines)) == ("Complete", STEPS, STEPS)
    first, last = lines[1]["return_mean"], lines[-1]["return_mean"]
    assert first < 40, "an untrained policy holds the pole for about 20 steps"
    assert last > 3 * first, f"mean return of 100 episodes went from {first:.0f} to {last:.0f} only"
    assert last == pytest.approx(answer["return_mean"])
    shares = list[float]()
    for line in lines[1:]:  # where the time went: parts of the step, none of them more than the whole
        parts = [line["collect_s"], line["update_s"], line["publish_s"]]
        assert min(parts) > 0
        shares.append(sum(parts) / line["step_s"])
    assert statistics.median(shares) < 1.2, shares  # publish_s is of the version that this step began with
    assert "ms/step (collect" in done.stderr


IN_PLACE = (
    learn_plans.plan(learn_plans.TWO, micro_batch=2),
    learn_plans.plan(learn_plans.TWO, depth=4, stages=1),
    learn_plans.plan(learn_plans.TWO, pods=2, micro_batch=4),
    learn_plans.plan(learn_plans.TWO),
)


@pytest.mark.long("trains a job twice, once with its plan changed under it")
@pytest.mark.timeout(180)
def test_what_is_changed_in_place_leaves_no_trace_in_what_is_learnt(monkeypatch):
    """The short form of `make learn-plans`, which also moves environments. The job's order is lineage."""
    undisturbed = learn_plans.learn(seed=1, steps=40, changed=False)
    monkeypatch.setattr(learn_plans, "CHANGES", IN_PLACE)
    changed = learn_plans.learn(seed=1, steps=40, changed=True)
    assert changed.pauses_s, "at least one plan came into force"
    assert changed.returns == undisturbed.returns
    assert changed.returns[-1] > 2 * changed.returns[1]
