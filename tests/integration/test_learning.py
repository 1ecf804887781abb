"""CartPole learns: the committed example, shortened, from manifest to metrics. `make learn` is the whole of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.foundation_parts import learn_plans

ROOT = Path(__file__).resolve().parents[2]
STEPS = 25  # a quarter of the example: returns go from about 20 to above 100


@pytest.mark.slow
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
    for line in lines[1:]:  # where the time went: parts of the step, none of them more than the whole
        parts = [line["collect_s"], line["update_s"], line["publish_s"]]
        assert min(parts) > 0
        assert sum(parts) < 1.2 * line["step_s"], line  # publish_s is of the version that this step began with
    assert "ms/step (collect" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_cartpole_returns_rise_while_its_plan_is_changed_every_ten_steps():
    """The short form of `make learn-plans`, which compares seeds."""
    found = learn_plans.learn(seed=1, steps=60, changed=True)
    assert len(found.returns) == 60
    assert found.pauses_s
    assert found.returns[-1] > 2 * found.returns[1], found.returns
