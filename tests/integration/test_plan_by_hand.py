"""A job that begins with a plan by hand: turns in which one role stays on its slots, an option, and both changed."""

import json
from itertools import pairwise
from typing import Any

import pytest
import yaml

from rljob import plan as command
from tests.rljob_runs import Run
from tools import workloads

STEPS = 100
BOTH_WAYS = 250  # through three changes of plan, on a machine that is three times slower too
ENTRY: dict[str, Any] = {
    "name": "small",
    "items": 4,
    "pools": [{"name": "gpu", "slots": 2, "memory": 100, "roles": ["rollout", "train"]}],
    "roles": [
        {
            "name": "rollout", "service": "serial", "time": {"perItemMs": 1.0}, "loadMs": 3.0, "offloadMs": 3.0,
            "memory": {"resident": 20, "peak": 60, "offloaded": 1},
        },
        {
            "name": "train", "service": "serial", "time": {"perItemMs": 1.0}, "loadMs": 3.0, "offloadMs": 3.0,
            "memory": {"resident": 10, "peak": 90, "offloaded": 1}, "options": [{"peak": 50, "perItemMs": 5.0}],
        },
    ],
    "edges": [{"from": "rollout", "to": "train"}],
}  # fmt: skip


def plan(*, stays: bool, option: str) -> dict[str, Any]:
    return {
        "pools": [{"name": "gpu", "pods": 1}],
        "workers": [
            {"role": "rollout", "count": 1, "slots": "gpu/0/1", "stays": stays},
            {"role": "train", "count": 1, "slots": "gpu/0/1", "option": option},
        ],
        "leaseSets": [{"name": "all", "slots": "gpu/0/1", "turns": [{"role": "rollout"}, {"role": "train"}]}],
    }


def pids_of(run: Run) -> dict[str, int]:
    return {name: part.pid for name in ("rollout/0", "train/0") if (part := run.part(name))}


@pytest.mark.timeout(120)
def test_a_job_begins_with_the_plan_of_a_file_and_another_changes_what_stays_in_place(tmp_path):
    job, first, second, bad = (tmp_path / name for name in ("job.yaml", "p1.yaml", "p2.yaml", "bad.yaml"))
    job.write_text(yaml.safe_dump(workloads.job(ENTRY, steps=STEPS)))
    first.write_text(yaml.safe_dump({"spec": plan(stays=True, option="0")}))
    second.write_text(yaml.safe_dump({"spec": plan(stays=False, option="base")}))
    bad.write_text(yaml.safe_dump({"spec": plan(stays=True, option="base")}))
    with Run(tmp_path, file=job, options=("--plan", str(first)), small=False) as run:
        run.until_step(10)
        shown = command.show(run.work_dir, as_yaml=False)
        assert shown.startswith("* small-p1  User"), shown
        assert "1 rollout on gpu/0/1, 1 train on gpu/0/1" in shown
        pids = pids_of(run)
        ok, says = command.put(run.work_dir, bad, timeout_s=30.0)
        assert not ok
        assert "rollout, train need 115343360" in says, "90 beside the 20 that stay"
        at = run.lines("lineage")[-1]["step"]
        ok, says = command.put(run.work_dir, second, timeout_s=30.0)
        assert ok, f"{says}\n{run.said}"
        run.until_step(run.lines("lineage")[-1]["step"] + 10)
        assert pids_of(run) == pids
        assert len(pids) == 2
        assert run.end() == 0, run.said
    lines = [line for path in (run.work_dir / "spans").glob("*.jsonl") for line in path.read_text().splitlines()]
    offloads = [span for span in map(json.loads, lines) if span.get("kind") == "offload"]
    first_of = {role: min(s["step"] for s in offloads if s["role"] == role) for role in ("rollout", "train")}
    assert first_of["rollout"] >= at - 1, "it stayed under the first plan"
    assert first_of["train"] <= 2


def apart() -> dict[str, Any]:
    return {
        "pools": [{"name": "gpu", "pods": 1}],
        "workers": [
            {"role": "rollout", "count": 1, "slots": "gpu/0/0"}, {"role": "train", "count": 1, "slots": "gpu/0/1"},
        ],
    }  # fmt: skip


def together() -> dict[str, Any]:
    """Both where they were, and a second rollout on the slot of the trainer."""
    return {
        "pools": [{"name": "gpu", "pods": 1}],
        "workers": [
            {"role": "rollout", "count": 2, "slots": "gpu/0/[0-1]"}, {"role": "train", "count": 1, "slots": "gpu/0/1"},
        ],
        "leaseSets": [{"name": "all", "slots": "gpu/0/[0-1]", "turns": [{"role": "rollout"}, {"role": "train"}]}],
    }  # fmt: skip


@pytest.mark.timeout(150)
def test_who_begins_to_take_turns_and_ceases_to_stays_in_its_process(tmp_path):
    job, first, second = (tmp_path / name for name in ("job.yaml", "p1.yaml", "p2.yaml"))
    manifest = workloads.job(ENTRY, steps=BOTH_WAYS)
    for role in manifest["spec"]["roles"]:
        role["config"]["memory"] |= {"resident": 50}  # nobody may load beside the other
        role["workers"] = 1 if role["name"] == "train" else {"min": 1, "max": 2}
    job.write_text(yaml.safe_dump(manifest))
    first.write_text(yaml.safe_dump({"spec": apart()}))
    second.write_text(yaml.safe_dump({"spec": together()}))
    with Run(tmp_path, file=job, options=("--plan", str(first)), small=False) as run:
        run.until_step(10)
        pids = pids_of(run)
        assert len(pids) == 2
        for plan_file in (second, first, second):
            ok, says = command.put(run.work_dir, plan_file, timeout_s=60.0)
            assert ok, f"{says}\n{run.said}"
            run.until_step(len(run.lines("lineage")) + 10)
            assert pids_of(run) == pids, "nobody has started again"
        assert run.end(timeout_s=120) == 0, run.said
        lines = run.lines("lineage")
        assert [line["step"] for line in lines] == list(range(1, BOTH_WAYS + 1)), "each step once, on one branch"
        assert {line["units"] for line in lines} == {4}
        events = run.lines("events")
        assert "branch" not in [event["event"] for event in events], "the gang goes on"
        pauses = [event["pause_s"] for event in events if event["event"] == "plan-switched"]
        assert len(pauses) == 3
        texts = [path.read_text() for path in (run.work_dir / "spans").iterdir()]
        spans = [json.loads(line) for text in texts for line in text.splitlines()]
    on_slot = sorted(
        (s["t0"], s["t1"], s["role"], s["kind"])
        for s in spans
        if s.get("slot") == "gpu/0/1" and s.get("kind") in ("compute", "load", "offload")
    )
    assert {role for _, _, role, _ in on_slot} == {"rollout", "train"}
    for one, other in pairwise(on_slot):
        assert one[2] == other[2] or other[0] >= one[1], f"{one} and {other} had the slot at once"
