"""PPO on CartPole with env, rollout and actor on one slot, in turns: it learns what it learns side by side."""

import itertools
import json
import signal

import pytest

from tests.rljob_runs import Run

SETS = ("spec.flow.steps=5", "spec.seed=3")
IN_TURNS = ("spec.placement.mode=Collocated", "spec.pools[cpu].slots.perPod=1")

pytestmark = pytest.mark.timeout(150)


def curve(run):
    """What was learnt, without what a clock measured."""
    kept = ("step", "return_mean", "policy_loss", "value_loss", "grad_norm", "env_steps")
    return [{name: value for name, value in line.items() if name in kept} for line in run.lines("metrics")]


def lineage(run):
    return [(line["step"], line["units"], line["digest"]) for line in run.lines("lineage")]


def spans(run):
    lines = [line for path in (run.work_dir / "spans").iterdir() for line in path.read_text().splitlines()]
    return [span for span in map(json.loads, lines) if "kind" in span]


def test_three_roles_in_turns_on_one_slot_learn_what_they_learn_side_by_side(tmp_path):
    with Run(tmp_path, *SETS, name="beside", learns=True) as beside:
        assert beside.end() == 0, beside.said
    with Run(tmp_path, *SETS, *IN_TURNS, name="turns", learns=True) as turns:
        assert turns.end() == 0, turns.said
        assert turns.answer["condition"] == "Complete"
    assert lineage(turns) == lineage(beside)
    assert curve(turns) == curve(beside)
    assert len(curve(turns)) == 5
    assert {span["slot"] for span in spans(turns)} == {"cpu/0/0"}
    assert {"wait_turn", "compute"} <= {span["kind"] for span in spans(turns)}
    working = sorted((s["t0"], s["t1"], s["role"]) for s in spans(turns) if s["kind"] == "compute")
    for (_, ended, role), (began, _, other) in itertools.pairwise(working):
        assert role == other or began >= ended, "two roles worked at the same time"


@pytest.mark.slow("waits for the deadline of a turn's holder that hangs")
def test_a_holder_that_is_killed_or_stopped_costs_no_unit_and_no_standstill(tmp_path):
    limits = {"step_deadline_min_s": 2.0, "idle_deadline_s": 2.0, "turn_release_s": 2.0}
    with Run(tmp_path, "spec.flow.steps=60", *IN_TURNS, settings=limits) as run:
        for worker, number in (("rollout/0", signal.SIGKILL), ("env/0", signal.SIGSTOP), ("env/0", signal.SIGKILL)):
            run.until_step(len(run.lines("lineage")) + 2)
            run.kill(worker, number)
        assert run.end(timeout_s=120.0) == 0, run.said
        assert run.answer["condition"] == "Complete"
        steps = [line["step"] for line in run.lines("lineage")]
        assert sorted(set(steps)) == list(range(1, 61))
