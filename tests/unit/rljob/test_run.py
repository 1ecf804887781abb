"""How a run ends: conditions to exit codes, the object of --output json, what is refused before anything starts."""

import asyncio
import errno
import io
import json
import shlex
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rlinf_api.errors import InvariantBroken, UserError
from rljob import manifest, run
from rljob.local.runner import LocalRun, WorkDir
from rljob.losable import Losable
from rljob.progress import ProgressLines
from tests import rljob_runs
from tests.local_pods import pod
from tests.rljob_runs import EXAMPLE, rljob

KEYS = {"condition", "reason", "message", "steps", "wall_s", "work_dir", "plan"}


def job(*conditions, **status):
    keys = ("type", "status", "reason", "message")
    found = [dict(zip(keys, c, strict=True)) for c in conditions]
    return {"status": {"conditions": found, **status}}


@pytest.mark.parametrize(
    ("condition", "code", "shown"),
    [
        (("Complete", "True", "FlowFinished", "done"), 0, "Complete"),
        (("Failed", "True", "UserError", "no"), 1, "Failed"),
        (("Valid", "False", "Infeasible", "no room"), 2, "Invalid"),
        (("Suspended", "True", "SuspendedByUser", "stopped"), 130, "Suspended"),
    ],
)
def test_a_condition_is_an_exit_code(condition, code, shown):
    ending = run.ended(job(("Running", "False", "Stopped", ""), condition))
    assert ending is not None
    assert (ending.exit_code, ending.condition, ending.reason) == (code, shown, condition[2])


def test_a_job_that_goes_on_has_not_ended():
    assert run.ended(job(("Failed", "False", "FlowFinished", ""), ("Valid", "True", "Accepted", ""))) is None
    assert run.ended({}) is None


def write_metrics(folder):
    lines = [{"branch": b, "step": s, "time": 9.0, "step_s": 0.5} for b, s in ((0, 1), (0, 2), (1, 2), (1, 3))]
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_answer_has_what_scripts_rely_on(tmp_path):
    write_metrics(tmp_path)
    metrics = [{"name": "return_mean", "value": "41.5"}, {"name": "env_steps", "value": "3072"}]
    ended = job(("Complete", "True", "FlowFinished", "done"), step=3, metrics=metrics, plan={"current": "c-p1"})
    ending = run.ended(ended)
    assert ending is not None
    answer = run.result(ending, work_dir=tmp_path, wall_s=9.0)
    assert answer.keys() >= KEYS
    assert answer["env_steps_per_s"] == 2048.0, "two steps of this branch, 1024 each, in a second"
    assert (answer["steps"], answer["plan"], answer["return_mean"]) == (3, "c-p1", 41.5)


@pytest.mark.parametrize(
    ("torn", "told"),
    [
        pytest.param('{"branch": 1, "st', 2048.0, id="a line that was torn counts for nothing"),
        pytest.param('{"branch": 1}\n', None, id="a line of no run"),
    ],
)
def test_a_file_of_metrics_that_is_not_whole_costs_no_answer(tmp_path, torn, told):
    with write_metrics(tmp_path).open("a") as file:
        file.write(torn)
    status = {"step": 3, "metrics": [{"name": "env_steps", "value": "3072"}]}
    ending = run.ended(job(("Complete", "True", "FlowFinished", "done"), **status))
    assert ending is not None
    assert run.result(ending, work_dir=tmp_path, wall_s=9.0).get("env_steps_per_s") == told


def test_two_interrupts_that_come_together_are_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interrupts = run.Interrupts()
    interrupts.count()
    now[0] += 0.05
    interrupts.count()
    assert interrupts.first.is_set()
    assert not interrupts.second.is_set()
    now[0] += 1.0
    interrupts.count()
    assert interrupts.second.is_set()


def test_a_terminal_that_closes_is_one_word_whatever_comes_with_it_and_never_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interrupts = run.Interrupts()
    interrupts.hang_up()
    assert interrupts.first.is_set()
    now[0] += 0.05
    interrupts.count()
    now[0] += 1.0
    interrupts.hang_up()
    assert not interrupts.second.is_set()
    now[0] += 1.0
    interrupts.count()
    assert interrupts.second.is_set()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_run_that_was_started_by_nohup_goes_on_when_its_terminal_closes(is_ignored):
    heard: dict[int, Any] = {}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        run.Interrupts().listen(lambda number, act: heard.update({number: act}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert set(heard) == {signal.SIGINT, signal.SIGTERM} | (set() if is_ignored else {signal.SIGHUP})


def test_why_no_place_is_found_is_the_conditions_message():
    stuck = job(("PodsReady", "False", "Unschedulable", "no node has room"))
    assert run._stuck(stuck, "") == ("Unschedulable", "no node has room")
    assert run._stuck(job(("PodsReady", "False", "PodsStarting", "waiting")), "") == ("LocalMachine", "")
    assert run._stuck(job(("PodsReady", "True", "Unschedulable", "it was")), "") == ("LocalMachine", "")


HELD_UP = "cartpole-cpu-0-a1: No space left on device (/dev/shm/x, 0 of 9 bytes free); make room there"


class Held:
    """A run whose machine cannot run a pod, and of whose job nothing new is heard."""

    kubelet = SimpleNamespace(held_up=HELD_UP, failure=None)

    def __init__(self, *conditions):
        self._job = job(*conditions) | {"spec": {"flow": {"steps": 2}}}

    async def changes(self):
        yield self._job
        await asyncio.Event().wait()


async def test_a_machine_that_cannot_run_a_pod_ends_a_run_that_cannot_go_on_without(monkeypatch):
    monkeypatch.setattr(run, "STUCK_TIMEOUT_S", 0.1)
    said = io.StringIO()
    held: Any = Held(("Running", "Unknown", "WaitingForDriver", ""))
    ending = await asyncio.wait_for(run._watch(held, ProgressLines(Losable(said))), 10)
    assert (ending.condition, ending.reason, ending.exit_code) == ("Failed", "LocalMachine", 1)
    assert ending.message == HELD_UP
    assert said.getvalue().count(f"this machine cannot run a pod, which is tried again: {HELD_UP}\n") == 1


@pytest.mark.parametrize("broken", ["rljob.local.runner.Reconciler.run", "rljob.local.kubelet.LocalKubelet._pod_seen"])
@pytest.mark.parametrize("error", [ZeroDivisionError("float division by zero"), None])
async def test_a_part_that_ends_by_itself_ends_the_run(tmp_path, monkeypatch, broken, error):
    async def ends(*_):
        if error is not None:
            raise error

    if error is None and "kubelet" in broken:
        broken = "rljob.local.kubelet.LocalKubelet._follow"
    monkeypatch.setattr(broken, ends)
    checked, work = run._checked(run.Options(file=EXAMPLE)), WorkDir(tmp_path)
    assert checked.spec is not None
    with pytest.raises(
        ZeroDivisionError if error else InvariantBroken, match="division" if error else "ended by itself"
    ):
        await asyncio.wait_for(run._run(checked, checked.spec, work=work, stream=Losable(io.StringIO())), 20)


def test_a_job_that_is_at_work_goes_on_without_a_pod_that_this_machine_cannot_run():
    assert run._stuck(job(("Running", "True", "Stepping", "")), "no room") == ("LocalMachine", "")
    assert run._stuck(job(("Running", "False", "Recovering", "")), "no room") == ("LocalMachine", "no room")
    assert run._stuck({}, "") == ("LocalMachine", "")


@pytest.mark.parametrize(
    ("text", "got"), [("[1]", "a list, not an object"), ("{", "Expecting property name"), (None, "Is a directory")]
)
def test_a_work_dir_whose_identity_cannot_be_read_is_refused(tmp_path, text, got):
    identity = tmp_path / "job.json"
    identity.write_text(text) if text else identity.mkdir()
    work, spec = WorkDir(tmp_path), run._checked(run.Options(file=EXAMPLE)).spec
    assert spec is not None
    with pytest.raises(UserError, match=f"got .*{got}.*choose another --work-dir"):
        work.claim("cartpole", spec)
    work.release()


def test_a_work_dir_that_cannot_be_locked_is_refused_and_no_bug_of_rljob(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)
    assert run.run(run.Options(file=EXAMPLE, work_dir=tmp_path)) == 2
    told = f"work dir {tmp_path} cannot be used: got No locks available ({tmp_path}/.lock), wanted a file system with "
    assert said.getvalue() == f"{told}file locks; choose another --work-dir\n"


async def test_a_work_dir_that_takes_no_socket_is_refused_before_the_job_is_made(tmp_path, monkeypatch):
    async def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("asyncio.start_unix_server", refuse)
    checked = run._checked(run.Options(file=EXAMPLE))
    assert checked.spec is not None
    local = LocalRun(checked.manifest, checked.spec, work_dir=WorkDir(tmp_path))
    wanted = rf"work dir {tmp_path} cannot be used: got Operation not permitted \({tmp_path}/control\.sock\), wanted a "
    with pytest.raises(UserError, match=wanted + "file system with unix sockets; choose another --work-dir"):
        await local.__aenter__()
    assert list(local.store.snapshot()) == []


async def test_the_view_of_objects_has_what_the_end_of_a_run_made_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("rljob.local.runner.DUMP_INTERVAL_S", 3600.0)
    checked = run._checked(run.Options(file=EXAMPLE))
    assert checked.spec is not None
    async with LocalRun(checked.manifest, checked.spec, work_dir=WorkDir(tmp_path)) as local:
        await local.store.create(pod("other", "sleep 600"))
        async with asyncio.timeout(20):
            while (await local.store.get("Pod", "other"))["status"]["phase"] != "Running":
                await asyncio.sleep(0.01)
        local.hurry()
    shown = yaml.safe_load((tmp_path / "objects" / "pod-default-other.yaml").read_text())
    assert shown["status"]["phase"] == "Failed"


def test_a_log_that_cannot_be_made_is_no_bug_of_rljob(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(UserError, match=r"rljob\.log cannot be written: got .*; make room, or choose another"):
        run._log_to(tmp_path / "logs" / "rljob.log")


@pytest.fixture
def gpu_job(tmp_path):
    slots = {"perPod": 3, "resource": "example.com/accelerator", "memory": "1Gi", "hostMemory": "2Gi"}
    pool = {"name": "gpu", "roles": ["env", "rollout", "actor"], "pods": 1, "slots": slots}
    return rljob_runs.manifest(tmp_path / "job.yaml", pools=[pool])


def test_a_pool_with_an_accelerator_is_refused_unless_its_slots_are_simulated(gpu_job):
    with pytest.raises(UserError, match=r"needs example\.com/accelerator, which this machine does not have; run it"):
        run._checked(run.Options(file=gpu_job))
    checked = run._checked(run.Options(file=gpu_job, simulate_slots=True))
    assert checked.problems == ()
    assert checked.manifest["spec"]["pools"][0]["slots"]["resource"] == ""


def test_what_a_template_asks_for_and_local_mode_has_not_is_refused_by_name_before_anything_starts(tmp_path):
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"]["pools"][0]["template"] = {
        "spec": {
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}, {"name": "kept", "emptyDir": {}}],
            "hostNetwork": True,
            "containers": [{"name": "agent", "livenessProbe": {"exec": {"command": ["true"]}}}],
        }
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    done = rljob("run", file, "--output", "json", "--work-dir", tmp_path / "work")
    assert done.returncode == 2, done.stderr
    told = done.stderr.splitlines()
    assert all(line.startswith("spec.pools[cpu].template: spec.") for line in told)
    assert any("(data).hostPath is not carried out in local mode; use a persistentVolumeClaim" in t for t in told)
    assert any("hostNetwork is not carried out in local mode; leave it out, or run this job on a" in t for t in told)
    assert any("(agent).livenessProbe is not carried out in local mode; leave it out: agents" in t for t in told)
    assert json.loads(done.stdout)["reason"] == "NotSupportedYet"
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ({"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}, "is no pod's: got KeyError('fieldPath'); compare it"),
        ({"envFrom": [{"secretRef": {"name": "hf"}}]}, "(agent).envFrom[0] names Secret 'hf', which nobody makes in a"),
        ({"env": [{"value": "1"}]}, "(None) has no name; write one"),
        ({"readinessProbe": 5}, "is no pod's: got TypeError("),
    ],
)
def test_a_template_that_no_api_server_would_take_is_a_sentence(agent, sentence):
    job = yaml.safe_load(EXAMPLE.read_text())
    job["spec"]["pools"][0]["template"] = {"spec": {"containers": [{"name": "agent", **agent}]}}
    checked = manifest.check(job)
    assert checked.spec is not None
    [problem] = run.beyond_local_mode("a", checked.spec)
    assert str(problem).startswith("spec.pools[cpu].template: ")
    assert sentence in str(problem)


def test_the_operators_own_secret_and_settings_are_there_for_a_template_that_asks_for_nothing():
    checked = run._checked(run.Options(file=EXAMPLE))
    assert checked.spec is not None
    assert list(run.beyond_local_mode("cartpole", checked.spec)) == []


def test_what_is_refused_before_the_start_exits_with_2_and_one_object(gpu_job):
    for arguments in ((gpu_job,), (EXAMPLE, "--set", "nonsense"), (EXAMPLE, "--set", "spec.flow.steps=x")):
        done = rljob("run", *arguments, "--output", "json")
        assert done.returncode == 2
        [line] = done.stdout.splitlines()
        answer = json.loads(line)
        assert answer.keys() >= KEYS
        assert (answer["condition"], answer["message"]) == ("Invalid", done.stderr.strip())


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, "rljob run job.yaml --work-dir '/runs/my job'"),
        ({"seed": 0}, "rljob run job.yaml --work-dir '/runs/my job' --seed 0"),
        (
            {"assignments": ("spec.flow.steps=9", "spec.roles[env].config={a: b}"), "simulate_slots": True},
            "rljob run job.yaml --work-dir '/runs/my job' --set spec.flow.steps=9 "
            "--set 'spec.roles[env].config={a: b}' --simulate-slots",
        ),
        ({"plan": Path("my plan.yaml")}, "rljob run job.yaml --work-dir '/runs/my job' --plan 'my plan.yaml'"),
        (
            {"file": Path("-")},
            "rljob run - --work-dir '/runs/my job', with the same manifest on its standard input",
        ),
    ],
)
def test_the_command_to_go_on_is_the_same_job_for_a_shell(options, command):
    spec = run._checked(run.Options(file=EXAMPLE)).spec
    assert spec is not None
    asked = run.Options(**({"file": Path("job.yaml")} | options))
    assert run.to_go_on(asked, spec, work_dir=Path("/runs/my job")) == command


def test_a_job_that_is_suspended_in_its_manifest_goes_on_by_another_word(tmp_path):
    options = run.Options(file=EXAMPLE, assignments=("spec.suspend=true",))
    spec = run._checked(options).spec
    assert spec is not None
    command = shlex.split(run.to_go_on(options, spec, work_dir=tmp_path))
    sets = tuple(command[at + 1] for at, word in enumerate(command) if word == "--set")
    again = run._checked(run.Options(file=EXAMPLE, assignments=sets)).spec
    assert again is not None
    assert not again.suspend


def test_an_option_that_does_not_exist_exits_with_2():
    done = rljob("run", EXAMPLE, "--sedd", "3")
    assert done.returncode == 2
    assert "No such option: --sedd" in done.stderr
