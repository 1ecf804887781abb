"""A plan with another order of turns, pinned on a running job: it comes into force in the processes that there are."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob import plan as command
from tests.integration.test_rljob_run_turns import IN_TURNS
from tests.integration.test_turns_over_pods import over_pods
from tests.rljob_runs import Run

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.slow("each case starts a job with torch and goes through two changes of its plan"),
]


def turned_round(run: Run, folder: Path) -> list[str]:
    """Puts the plan in force with its turns the other way round; the roles in their new order."""
    plan: dict[str, Any] = yaml.safe_load(command.show(run.work_dir, as_yaml=True))
    turns = plan["spec"]["leaseSets"][0]["turns"]
    turns.reverse()
    file = folder / "plan.yaml"
    file.write_text(yaml.safe_dump(plan))
    is_in_force, says = command.put(run.work_dir, file, timeout_s=60.0)
    assert is_in_force, f"{says}\n{run.said}"
    return [turn["role"] for turn in turns]


def in_force(run: Run) -> list[str]:
    plan = yaml.safe_load(command.show(run.work_dir, as_yaml=True))
    return [turn["role"] for turn in plan["spec"]["leaseSets"][0]["turns"]]


def pids(run: Run, workers: tuple[str, ...]) -> dict[str, int]:
    return {name: part.pid for name in workers if (part := run.part(name)) is not None}


def turn_it_round_twice(run: Run, folder: Path, workers: tuple[str, ...], *, steps: int) -> None:
    run.until_step(2)
    before, first = pids(run, workers), in_force(run)
    assert len(before) == len(workers)
    for _ in range(2):
        wanted = turned_round(run, folder)
        assert in_force(run) == wanted
        run.until_step(len(run.lines("lineage")) + 4)
    assert in_force(run) == first
    assert pids(run, workers) == before, "the order of turns changes in place"
    assert run.end(timeout_s=150) == 0, run.said
    assert run.answer["condition"] == "Complete"
    lines = run.lines("lineage")
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), "each step once"
    assert len({line["units"] for line in lines}) == 1, "with all of its units"
    kinds = [line["event"] for line in run.lines("events")]
    assert kinds.count("plan-switched") == 2
    assert "worker-exited" not in kinds


@pytest.mark.long("a job with torch, whose turns change as those over pods do")
def test_a_set_inside_a_pod_goes_on_under_another_order_of_turns(tmp_path):
    steps = 80
    sets = (f"spec.flow.steps={steps}", "spec.checkpoint.everySteps=1000")
    with Run(tmp_path, *sets, *IN_TURNS) as run:
        turn_it_round_twice(run, tmp_path, ("env/0", "rollout/0", "actor/0"), steps=steps)


def test_a_set_over_pods_goes_on_under_another_order_of_turns(tmp_path):
    steps = 80
    with over_pods(tmp_path, steps=steps) as run:
        workers = ("engine/0", "trainer/0", "trainer/1", "trainer/2", "trainer/3")
        turn_it_round_twice(run, tmp_path, workers, steps=steps)
        texts = [path.read_text() for path in (run.work_dir / "spans").iterdir()]
        spans = [span for text in texts for line in text.splitlines() if "kind" in (span := json.loads(line))]
        assert len([s for s in spans if (s["kind"], s["worker"]) == ("load", "trainer/0")]) >= steps // 2
        assert "held by two roles" not in run.said + str(run.lines("events"))
