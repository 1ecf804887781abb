"""What agents say and who may be one: words of workers and spares, pods that may come, and what people are told."""

import json
from typing import Any

import pytest

from rlinf_api import names
from rlinf_api._pb.rlinf.agents.v1alpha1 import agents_pb2
from rlinf_api.report import DriverReport, DriverState, Failure, Goal
from rlinf_worker.channels.protocol import PolicyVersion
from rlinf_worker.driver import status
from rlinf_worker.driver.output import Output
from rlinf_worker.driver.sessions import Refuse
from rlinf_worker.driver.spares import Spares, SpareState
from tests.builders_driver import JOB_UID, Clock, make_job
from tests.unit.rlinf_worker.driver.test_workforce import SIM, Site, started, told


def events(site: Site, folder: Any) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("time", "source")} for line in found]


def test_a_worker_that_hangs_is_told_of_with_the_head_of_its_stacks(tmp_path):
    site, _ = started()
    site.job.output = Output(str(tmp_path))
    hung = agents_pb2.WorkerHung(worker="env/0", phase="step", silent_s=12.34, stacks="s" * 5000)
    assert site.agents.heard(SIM, agents_pb2.AgentMessage(hung=hung))
    assert events(site, tmp_path) == [
        {
            "event": "hung",
            "message": "worker env/0 showed no sign for 12.3 s in phase step; it is killed",
            "worker": "env/0",
            "stacks": "s" * 4096,
        }
    ]


@pytest.mark.parametrize(("ok", "said"), [(True, []), (False, ["an instruction failed in pod j-sim-0-a1: no room"])])
def test_an_instruction_that_failed_is_told_of(tmp_path, ok, said):
    site, _ = started()
    site.job.output = Output(str(tmp_path))
    result = agents_pb2.Result(instruction_id=1, ok=ok, error="" if ok else "no room")
    site.agents.heard(SIM, agents_pb2.AgentMessage(result=result))
    found = events(site, tmp_path)
    assert [(e["event"], e["message"]) for e in found] == [("instruction", text) for text in said]


def test_what_a_pod_says_that_is_no_member_is_nothing():
    site, _ = started()
    assert not site.agents.heard(("sim", 9), agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat()))
    assert ("sim", 9) not in site.members.pods


def test_people_look_again_when_a_worker_has_come_into_another_phase_and_not_at_each_sign():
    site, _ = started()

    def beat(*said: tuple[str, str]) -> bool:
        progress = [agents_pb2.Progress(worker=worker, phase=phase) for worker, phase in said]
        return site.agents.heard(SIM, agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat(progress=progress)))

    assert not beat()
    assert not beat(("env/0", "start"))
    assert beat(("env/0", "load"), ("env/7", "load"))
    assert site.record("env/0").progress == "load"
    assert not beat(("env/0", "load"))
    assert not beat(("env/7", "load")), "a worker that nobody knows"


@pytest.mark.parametrize(
    ("key", "exit_code"),
    [(("sim", 0), None), (("sim", 1), names.EXIT_STALE), (("no", 0), names.EXIT_STALE), (("gpu", 1), names.EXIT_STALE)],
)
def test_a_pod_that_no_plan_may_have_is_sent_away_for_good(key, exit_code):
    site = Site(envs=1)
    if exit_code is None:
        site.attach(key)
        return
    with pytest.raises(Refuse, match=f"^the plan has no pod {key[0]}-{key[1]}") as caught:
        site.attach(key)
    assert caught.value.exit_code == exit_code


def test_a_pod_that_another_plan_may_have_comes_again():
    site = Site(envs=1, elastic=True)  # up to two pods, one in the plan
    for ordinal, code in ((1, names.EXIT_RETRYABLE), (2, names.EXIT_STALE)):
        with pytest.raises(Refuse) as caught:
            site.attach(("sim", ordinal))
        assert caught.value.exit_code == code


def test_before_any_plan_whoever_comes_is_told_to_come_again():
    site = Site(envs=1)
    site.members.pods.clear()
    with pytest.raises(Refuse, match="no plan is in force yet; come again") as caught:
        site.attach(("no", 9))
    assert caught.value.exit_code == names.EXIT_RETRYABLE


def test_an_agent_that_attaches_is_told_of_and_its_unknown_workers_are_stopped(tmp_path):
    site = Site(envs=1)
    site.job.output = Output(str(tmp_path))
    outbox = site.attach(workers={"env/7": 3}, attempt=2)
    [told] = [m.instruction for m in outbox._messages]
    assert told.stop == agents_pb2.Stop(worker="env/7", grace_s=1, reason="not in the plan")
    assert events(site, tmp_path) == [
        {"event": "agent", "message": "agent of pod j-sim-0-a2 attached", "pod": "j-sim-0-a2", "attempt": 2}
    ]


# --- what the operator and people are told ----------------------------------------------------------------------------
def test_the_report_says_each_fact_under_its_name():
    driver, plan = make_job(envs=1, steps=9).driver(Clock(), attempt=2), make_job(envs=1, revision=4).plan
    driver.switch.first(plan, switches=3)
    job, force = driver.job, driver.workforce
    job.ledger.version, job.saved, job.sequence = PolicyVersion(2, 5), (PolicyVersion(1, 4), "/c"), 8
    driver.switch.failed, driver.switch.pause.seconds = (7, "no room"), 0.5
    force.restarts, force.toll.first_failure = 6, Failure(reason="KeyError", message="k")
    pod = job.members.pods[SIM]
    pod.pod, pod.node, pod.attached = "j-sim-0-a1", "n7", True
    record = job.members.workers[names.WorkerId("env/0")]
    record.attempt, record.restarts, record.progress = 5, 4, "load"
    found = status.report(driver)
    assert found == DriverReport(
        job_uid=JOB_UID,
        driver_attempt=2,
        state=DriverState.STARTING,
        reason="WaitingForWorkers",
        step=5,
        steps=9,
        branch=2,
        plan_revision=4,
        plan_failed=7,
        plan_message="no room",
        plan_pause_s=0.5,
        plan_switches=3,
        missing=("agent of pod gpu-0", "worker env/0 in pod j-sim-0-a1 on node n7: load"),
        first_failure=Failure(reason="KeyError", message="k"),
        restarts=6,
        checkpoint_uri="/c",
        checkpoint_step=4,
        goal=Goal(steps=9, every_steps=20, keep=3),
        sequence=8,
    )
    job.finish(saved=True)
    assert status.report(driver).missing == (), "nobody is missed at the end"


def test_a_spare_that_an_agent_still_has_is_taken_up_by_a_new_driver_and_not_stopped():
    """Or each loss of a driver would cost all pods their spares, and their imports once more."""
    site = Site(envs=1, driver_attempt=2)
    spec = site.job.spec
    roles = [role.model_copy(update={"spares": 1 if role.name == "env" else 0}) for role in spec.roles]
    site.job.spec = spec.model_copy(update={"roles": roles})
    site.force.spares = Spares(site.job)
    spare, extra = (names.spare_id("env", number) for number in (0, 1))
    outbox = site.attach(workers={"env/0": 1, spare: 1, extra: 1})
    assert told(outbox) == [("stop", extra, 0)]
    assert site.force.spares.counts()["env", SpareState.STARTING.value] == 1
