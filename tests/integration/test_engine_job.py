"""An engine with child processes in a whole job (tests/fakes/engine_role.py): it loses them, freezes, dies and takes
turns, and each step trains on its units once, of which every token is of weights that there were."""

import hashlib
from typing import Any

import psutil
import pytest
import yaml

from rlinf_worker.channels import lineage
from rljob import plan as command
from tests.fakes.engine_role import PROMPTS
from tests.rljob_runs import Run, own_job

SOON = {"probe_interval_s": 0.3, "probe_deadline_s": 1.5}
ROLES: dict[str, dict[str, Any]] = {
    "engine": {"kind": "tests.fakes.engine_role:EngineRole", "workers": 2},
    "judge": {"kind": "tests.fakes.engine_role:Judge"},
    "trainer": {"kind": "tests.fakes.engine_role:Pupil", "config": {"step_s": 0.05}},
}


def job(tmp_path, *, steps, roles=ROLES, slots=4, flow="flow", **spec):
    made = own_job(f"tests.fakes.engine_role:{flow}", roles, steps=steps, slots=slots)
    made["spec"] |= spec
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(made))
    return file


def children(run, worker):
    process = run.until(lambda: run.part(worker), what=f"a process of {worker}")
    return run.until(lambda: [c for c in process.children() if "tests.fakes.reference_engine" in c.cmdline()],
                     what=f"children of {worker}")  # fmt: skip


def exact(run, *, steps):
    """Every step went in once, with the units that it has whatever happens."""
    lines = {line["step"]: line for line in run.lines("lineage")}
    assert sorted(lines) == list(range(1, steps + 1))
    for step, line in lines.items():
        keys = sorted(lineage.sample("p", step, index=n, sample=0) for n in range(PROMPTS))
        wanted = hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
        assert (line["units"], line["digest"]) == (PROMPTS, wanted), step


def total(run, name):
    return sum(line["previous"].get(name, 0.0) for line in run.lines("metrics") if "previous" in line)


@pytest.mark.timeout(120)
def test_an_engine_loses_children_freezes_and_dies_and_every_token_is_right(tmp_path):
    steps = 18
    roles = {**ROLES, "engine": {**ROLES["engine"], "config": {"length": 4}}}
    file = job(tmp_path, roles=roles, steps=steps)
    with Run(tmp_path, "spec.flow.maxStaleness=1", file=file, settings=SOON, small=False) as run:
        run.until_step(4)
        killed = children(run, "engine/0")[1]
        killed.kill()
        run.until_step(7)
        [stopped, _] = children(run, "engine/1")
        stopped.suspend()
        run.until_step(10)
        of_killed = children(run, "engine/0")
        run.kill("engine/0")
        run.until(lambda: not any(map(psutil.pid_exists, (c.pid for c in of_killed))), what="the end of its children")
        run.until_step(12)
        run.kill("trainer/0")
        run.until_step(13, branch=1)
        run.kill("driver")
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
        exits = [line["message"] for line in run.lines("events") if line["event"] == "worker-exited"]
        assert run.left() == []
    exact(run, steps=steps)
    ends = iter(exits)  # one more may lie between, where the machine keeps an engine from its probe's answer
    for who, *whys in (
        # The role says it, or a probe before it: with the role's words, or as it had no answer.
        ("engine/0", "part 1 of the engine exited with -9", f"(pid {killed.pid}) is dead"),
        ("engine/1", "the engine of worker engine/1 is lost: got no answer to check_health()"),
        ("engine/0", "worker engine/0 was killed by signal 9 (SIGKILL)"),
        ("trainer/0", "worker trainer/0 was killed by signal 9 (SIGKILL)"),
    ):
        is_said = any(end.startswith(f"worker {who} exited") and any(why in end for why in whys) for end in ends)
        assert is_said, "\n".join([*whys, *exits])
    assert any(f"(pid {stopped.pid}) is stopped by a signal (SIGSTOP)" in end for end in exits), exits
    assert total(run, "continued_sum") > 0, "answers that the dead had begun were not begun anew"
    assert total(run, "mixed_sum") > 0, "some answers are of two versions, as the next one came while they were made"


@pytest.mark.timeout(120)
def test_an_engine_in_turns_leaves_in_the_middle_of_answers_and_another_plan_gives_it_other_memory(tmp_path):
    steps = 12
    roles = {**ROLES, "engine": {**ROLES["engine"], "workers": 1, "config": {"length": 6}}}
    file = job(tmp_path, roles=roles, steps=steps, slots=1, placement={"mode": "Collocated"})
    with Run(tmp_path, "spec.flow.maxStaleness=1", file=file, small=False) as run:
        run.until_step(2)
        before = run.until(lambda: run.part("engine/0"), what="the engine").pid
        plan = yaml.safe_load(command.show(run.work_dir, as_yaml=True))
        [entry] = [entry for entry in plan["spec"]["workers"] if entry["role"] == "engine"]
        entry["memory"] = {"offloaded": "1Mi", "kv": "4Mi"}
        [turn] = [turn for turn in plan["spec"]["leaseSets"][0]["turns"] if turn["role"] == "engine"]
        turn["until"] = {"units": 2}
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
        is_in_force, says = command.put(run.work_dir, tmp_path / "plan.yaml", timeout_s=60.0)
        assert is_in_force, says
        object_of = run.work_dir / "objects" / "rljob-default-engine.yaml"
        run.until(lambda: "MemoryKept" in object_of.read_text(), what="that its processes keep more than 1 MiB")
        assert run.until(lambda: run.part("engine/0"), what="the engine").pid == before, "in place"
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
    exact(run, steps=steps)
    metrics = [line["previous"] for line in run.lines("metrics") if "previous" in line]
    levels = [line["kv_bytes"] for line in metrics if "kv_bytes" in line]
    assert (levels[0], levels[-1]) == (0.0, 4 << 20), "at a step boundary"
    assert max(line.get("left", 0.0) for line in metrics) > 0, "as the trainer waited"
    kept = [line["message"] for line in run.lines("events") if "left its slots and keeps" in line["message"]]
    assert "worker engine/0 has left its slots and keeps" in kept[0]
    assert "measured, and its plan allows 1 MiB" in kept[0]


@pytest.mark.timeout(120)
@pytest.mark.long("a whole job for one call of a flow, whose rule test_exchange.py has in memory")
def test_prompts_that_a_flow_withdraws_are_aborted_and_hold_up_no_step(tmp_path):
    steps = 6
    file = job(tmp_path, steps=steps, flow="flow_of_the_quickest")
    with Run(tmp_path, file=file, small=False) as run:
        run.until_step(3)
        run.kill("engine/0")
        run.until_step(5)
        run.kill("driver")
        assert run.end(timeout_s=100) == 0, run.said
        assert run.answer["condition"] == "Complete", run.said
    exact(run, steps=steps)
