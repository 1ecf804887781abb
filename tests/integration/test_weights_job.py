"""A job whose actor is a gang: each rank publishes its shards, rollouts that have no torch put them together. That the
actor asks for deltas: test_actor_publishes.py; that a delta brings the whole: test_weights.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.mark.timeout(180)
def test_two_ranks_publish_shards_as_deltas_to_two_rollouts(tmp_path):
    text = (ROOT / "examples/cartpole/rljob.yaml").read_text()
    for before, after in (
        ("kind: fsdp}", "kind: fsdp, workers: 2, config: {weightsDelta: true}}"),
        ("kind: torch}", "kind: torch, workers: 2}"),
        ("perPod: 3", "perPod: 5"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "rljob", "run", str(tmp_path / "job.yaml"), "--work-dir", str(tmp_path / "w")]
    command += ["--set", f"spec.flow.steps={STEPS}", "--output", "json"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["condition"] == "Complete"
    lines = [json.loads(line) for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    # On-policy: what the rollouts answered with is what the ranks hold, so that the first pass has no divergence to it.
    assert all(abs(line["approx_kl"]) < 0.1 for line in lines)
