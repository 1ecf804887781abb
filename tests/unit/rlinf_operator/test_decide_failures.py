"""What happens when pods end: who is replaced, what is counted, what fails the job."""

import dataclasses
import json
from datetime import timedelta

import pytest

from rlinf_api.report import DriverState, Failure
from rlinf_operator.policies import restart
from rlinf_operator.policies.failure import Cause
from rlinf_operator.policies.restart import Restart
from rlinf_operator.reconcile.state import DriverView
from rlinf_operator.settings import DEFAULTS
from tests.builders import NOW, make_job, ppo_job


def running(**spec):
    world = ppo_job().with_spec(**spec).world().started()
    world.step()
    return world


def test_a_failed_pod_is_replaced_under_the_next_attempt_and_counted():
    world = running().exited("math-sim-1-a1", 1)
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert [d.name for d in decision.delete_pods] == ["math-sim-1-a1"]
    assert world.status.restarts == ["2026-11-21T12:00:00Z math-sim-1-a1 Program"]
    assert world.status.attempt == 2
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", "math-sim-1-a1")]


def test_the_replacement_keeps_the_ordinals_name_and_gets_its_own_attempt():
    world = running().exited("math-sim-1-a1", 1)
    pod = world.step().create_pods[0]
    assert pod["spec"]["hostname"] == "sim-1"
    env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert (env["RLINF_ATTEMPT"], env["RLINF_ORDINAL"]) == ("2", "1")


def test_pods_that_fail_together_share_one_new_attempt():
    world = running().exited("math-sim-0-a1", 1).exited("math-train-0-a1", 1)
    world.step()
    assert world.names() == ["math-driver-a1", "math-sim-0-a2", "math-sim-1-a1", "math-train-0-a2"]


def test_first_failure_names_pod_node_exit_code_reason_and_words():
    world = running().exited(
        "math-sim-1-a1", 137, reason="OOMKilled", words=Failure(role="env", worker=3, message="big")
    )
    world.step()
    first = world.status.first_failure
    assert first is not None
    assert (first.role, first.worker, first.pod, first.node) == ("env", 3, "math-sim-1-a1", "n1")
    assert (first.exit_code, first.reason, first.message) == (137, "OOMKilled", "big")
    world.ready("math-sim-1-a2").later(10).exited("math-sim-1-a2", 1).step()
    assert world.status.first_failure.pod == "math-sim-1-a1"


@pytest.mark.parametrize(
    ("words", "reason"), [(Failure(reason="DriverAbsent"), "DriverAbsent"), (None, "RetryableError")]
)
def test_a_child_that_was_killed_for_memory_is_not_what_its_pod_ends_by_later(words, reason):
    """The kubelet says OOMKilled of a container in which any process was, whatever its main process exits with."""
    world = running().exited("math-sim-1-a1", 75, reason="OOMKilled", words=words)
    world.step()
    first = world.status.first_failure
    assert first is not None
    assert (first.exit_code, first.reason) == (75, reason)


def test_exit_code_64_fails_the_job_with_the_workers_words():
    world = running().exited(
        "math-sim-0-a1", 64, words=Failure(role="env", message="environment 'X-v1' does not exist")
    )
    decision = world.step()
    assert world.condition("Failed") == ("True", "UserError")
    assert world.message("Failed") == "environment 'X-v1' does not exist"
    assert not decision.create_pods
    assert world.names() == ["math-driver-a1"]
    world.later(world.settings.finish_grace_s + 1).step()
    assert world.names() == []


def test_the_driver_of_a_failed_job_is_left_to_exit_and_be_read():
    world = running().report(state=DriverState.FAILED, reason="UserError", message="no such environment")
    world.step()
    assert world.names() == ["math-driver-a1"]
    world.exited("math-driver-a1", 64).later(world.settings.finish_grace_s + 1).step()
    assert world.names() == ["math-driver-a1"]


def test_a_stale_pod_is_replaced_and_not_counted():
    world = running(failurePolicy={"maxRestarts": 0}).exited("math-sim-1-a1", 76)
    world.step()
    assert "math-sim-1-a2" in world.names()
    assert world.status.restarts == ["2026-11-21T12:00:00Z math-sim-1-a1 Stale"]
    assert not restart.exceeded(restart.read(world.status.restarts * 101), max_restarts=0, infrastructure_restarts=0)


WAITED = Failure(reason="DriverAbsent", message="no driver for 300 s")


def test_workers_that_waited_in_vain_for_a_driver_without_a_node_use_up_no_restarts():
    world = ppo_job().with_spec(failurePolicy={"maxRestarts": 0}).world().created()
    world.waiting("math-driver-a1", unschedulable="0/3 nodes are available")
    for attempt in range(1, 4):
        for pool in ("sim-0", "sim-1", "train-0"):
            world.ready(f"math-{pool}-a{attempt}")
            world.exited(f"math-{pool}-a{attempt}", 75, words=WAITED)
        world.step()
        world.later(300).step()
    assert "math-driver-a1" in world.names()
    assert "math-sim-0-a4" in world.names()
    assert world.condition("PodsReady") == ("False", "Unschedulable")
    assert {e.split()[2] for e in world.status.restarts} == {"NoDriver"}
    assert world.status.first_failure is None, "it is a consequence, whatever comes later"


def test_workers_that_do_not_reach_a_driver_that_is_ready_are_counted_as_lost():
    world = running(failurePolicy={"maxRestarts": 0}).exited("math-sim-1-a1", 75, words=WAITED)
    world.step()
    assert "math-sim-1-a2" in world.names()
    assert world.status.restarts[0].endswith("math-sim-1-a1 Infrastructure")


def test_a_worker_that_exits_75_for_any_other_reason_is_the_programs():
    world = running().exited("math-sim-1-a1", 75, words=Failure(reason="Refused"))
    world.vanished("math-driver-a1").step()
    assert "math-sim-1-a1 Program" in world.status.restarts[0]


@pytest.mark.parametrize(
    ("code", "reason", "pod_reason"),
    [(255, "Unknown", ""), (137, "Error", "Evicted"), (143, "Error", "NodeShutdown")],
)
def test_loss_of_infrastructure_does_not_count_as_the_programs_failure(code, reason, pod_reason):
    world = running(failurePolicy={"maxRestarts": 0}).exited(
        "math-sim-1-a1", code, reason=reason, pod_reason=pod_reason
    )
    world.step()
    assert "math-sim-1-a2" in world.names()
    assert world.status.restarts[0].endswith("math-sim-1-a1 Infrastructure")


LOW = "The node was low on resource: memory. Container agent was using 9Gi"


def test_why_a_kubelet_ended_a_pod_stands_in_the_condition_and_the_first_failure():
    world = running().ended_by_kubelet("math-sim-1-a1", reason="Evicted", message=LOW)
    decision = world.step()
    assert f"math-sim-1-a1 on node n1 ended (Evicted: {LOW}) and is replaced" in world.message("Degraded")
    assert world.status.first_failure is not None
    assert (world.status.first_failure.reason, world.status.first_failure.message) == ("Evicted", LOW)
    assert any(LOW in event.message for event in decision.events)


def test_a_job_that_lost_too_many_pods_says_why_the_last_one_ended():
    world = running()
    world.settings = dataclasses.replace(DEFAULTS, infrastructure_restarts=0, infrastructure_restarts_per_pod=0)
    world.ended_by_kubelet("math-sim-1-a1", reason="Evicted", message=LOW).step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert world.message("Failed").endswith(f"; the last was math-sim-1-a1 (Evicted: {LOW})")


def test_a_long_word_of_a_kubelet_is_cut():
    world = running().ended_by_kubelet("math-sim-1-a1", reason="Evicted", message="x" * 9000)
    world.step()
    assert len(world.message("Degraded")) < 700


def test_255_with_a_reason_of_its_own_is_the_programs():
    world = running().exited("math-sim-1-a1", 255, reason="Error")
    world.step()
    assert world.status.restarts[0].endswith("Program")


def test_a_pod_of_a_lost_node_is_replaced_beside_it_without_waiting():
    world = running(failurePolicy={"maxRestarts": 0})
    world.deleted("math-sim-1-a1", disruption="DeletionByTaintManager")
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert not decision.delete_pods  # it is being deleted already, and its kubelet is away
    assert {"math-sim-1-a1", "math-sim-1-a2"} < set(world.names())
    world.ready("math-sim-1-a2")
    assert not world.step().create_pods


def test_a_drained_pod_that_exits_0_is_a_loss_not_a_success():
    world = running().deleted("math-sim-1-a1", disruption="EvictionByEvictionAPI").exited("math-sim-1-a1", 0)
    world.step()
    assert "math-sim-1-a2" in world.names()


def test_a_pod_that_somebody_deleted_is_made_again_and_bounded():
    world = running().vanished("math-sim-1-a1")
    world.step()
    assert "math-sim-1-a2" in world.names()
    assert world.status.restarts == ["2026-11-21T12:00:00Z math-sim-1 Infrastructure"]


def test_worker_pods_that_exit_0_are_not_replaced_before_their_drivers_last_report():
    world = running()
    for name in ("math-sim-0-a1", "math-sim-1-a1", "math-train-0-a1"):
        world.exited(name, 0)
    decision = world.step()
    assert not decision.create_pods
    assert decision.requeue_after_s == world.settings.exit_zero_grace_s
    world.later(5).report(state=DriverState.COMPLETE, plan_revision=1).step()
    assert world.condition("Complete")[0] == "True"


def test_a_worker_pod_that_exits_0_in_the_middle_is_replaced_in_the_end():
    world = running().exited("math-sim-1-a1", 0)
    world.later(11).step()
    assert "math-sim-1-a2" in world.names()


def test_one_more_than_max_restarts_fails_the_job():
    world = running(failurePolicy={"maxRestarts": 2})
    for attempt in (1, 2):
        world.exited(f"math-sim-1-a{attempt}", 1).later(10).step()
        world.all_ready()
    world.exited("math-sim-1-a3", 1)
    decision = world.step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "3 pods ended by themselves, failurePolicy.maxRestarts is 2" in world.message("Failed")
    assert not decision.create_pods


def lost(world, attempt):
    """Each pod's node dies at once."""
    for name in world.names():
        world.deleted(name, disruption="DeletionByTaintManager", grace_s=0)
    world.step()
    world.later(10).step()  # the pauses are over
    for name in [n for n in world.names() if n.endswith(f"-a{attempt}")]:
        world.vanished(name)


def test_a_job_of_many_pods_may_lose_each_of_them_more_than_once_but_not_for_ever():
    job = make_job().role("env", "gymnasium", workers=120).role("rollout", "torch").role("actor", "fsdp")
    world = (
        job.pool("sim", ["env"], pods=120, per_pod=1).pool("train", ["rollout", "actor"], per_pod=2).world().started()
    )
    world.step()
    for attempt in (1, 2, 3):
        lost(world, attempt)
        assert f"math-sim-119-a{attempt + 1}" in world.names(), world.message("Degraded")
        world.all_ready().later(120).step()
    lost(world, 4)
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "488 pods were lost to nodes, evictions or deletion, the operator allows 366" in world.message("Failed")


def test_a_small_job_may_lose_a_hundred_pods():
    assert [restart.allowed(pods, least=100, per_pod=3) for pods in (3, 33, 34)] == [100, 100, 102]


def test_a_pools_restarts_are_those_of_its_own_pods():
    job = make_job().role("env", "gymnasium", workers=2).role("rollout", "torch").role("actor", "fsdp")
    job = job.pool("gpu", ["rollout", "actor"], per_pod=2).pool("gpu-2", ["env"], pods=2, per_pod=1)
    world = job.world().started()
    world.step()
    world.exited("math-gpu-2-0-a1", 1).vanished("math-gpu-2-1-a1").step()
    assert {p.name: p.restarts for p in world.status.pools} == {"gpu": 0, "gpu-2": 2}
    world.exited("math-gpu-0-a1", 1).step()
    assert {p.name: p.restarts for p in world.status.pools} == {"gpu": 1, "gpu-2": 2}


def test_what_does_not_count_is_forgotten_first():
    def entry(number, cause):
        return Restart(at=NOW + timedelta(seconds=number), pod=f"p{number}", cause=cause)

    counted = [entry(number, Cause.PROGRAM) for number in range(10)]
    waits = [entry(number, Cause.NO_DRIVER) for number in range(10, restart.MAX_ENTRIES + 50)]
    kept = restart.recent([*counted, *waits], now=NOW + timedelta(seconds=2000), window_s=3600.0)
    assert len(kept) == restart.MAX_ENTRIES
    assert list(kept[:10]) == counted


def test_restarts_are_forgotten_after_their_window():
    world = running(failurePolicy={"maxRestarts": 1, "resetAfterSeconds": 60})
    world.exited("math-sim-1-a1", 1).step()
    world.all_ready().later(61).exited("math-sim-1-a2", 1).step()
    assert "math-sim-1-a3" in world.names()
    assert len(world.status.restarts) == 1


def test_a_pod_that_keeps_failing_is_replaced_after_growing_pauses():
    world = running().exited("math-sim-1-a1", 1)
    world.step()
    world.exited("math-sim-1-a2", 1)
    decision = world.step()
    assert not decision.create_pods
    assert decision.requeue_after_s == 1.0
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert "math-sim-1-a2" in world.names()  # its words stay readable until its successor is there
    world.later(1.0).step()
    assert "math-sim-1-a3" in world.names()
    assert world.condition("Degraded") == ("True", "PodReplaced"), "not well for the pass that makes the next pod"
    assert "sim-1 gets its next attempt" in world.message("Degraded")
    assert [e.split()[1] for e in world.status.restarts] == ["math-sim-1-a1", "math-sim-1-a2"]


def test_a_failure_counts_once_although_the_pass_is_repeated_after_a_crash():
    world = running().exited("math-sim-1-a1", 1)
    before = world.status
    world.step()
    world.status = before  # the status write was lost; the pod had been created
    world.pods["math-sim-1-a1"] = world.pods["math-sim-1-a2"] | {}
    world.vanished("math-sim-1-a1")
    world.step()
    assert world.names().count("math-sim-1-a2") == 1
    assert world.status.attempt == 2


def test_surplus_pods_go_when_a_plan_needs_fewer():
    world = ppo_job().with_spec().world()
    world.manifest["spec"]["pools"][0]["pods"] = {"min": 1, "max": 2}
    world.started()
    world.step()
    world.manifest["spec"]["roles"][0]["workers"] = {"min": 4, "max": 8}
    smaller = world.plans[0].spec
    assert smaller is not None
    pools = [p.model_copy(update={"pods": 1}) if p.name == "sim" else p for p in smaller.pools]
    workers = [
        w.model_copy(update={"count": 4, "slots": "sim/0/[0-3]"}) if w.role == "env" else w for w in smaller.workers
    ]
    world.with_plan(smaller.model_copy(update={"revision": 2, "pools": pools, "workers": workers}))
    decision = world.step()
    assert decision.instruct is not None
    assert (decision.instruct.plan.revision, decision.instruct.steps) == (2, ("Prepare",))
    assert not decision.delete_pods
    assert world.status.plan.pending == "math-p2"
    decision = world.report(state=DriverState.RUNNING, plan_revision=2).step()
    assert [d.name for d in decision.delete_pods] == ["math-sim-1-a1"]
    assert (world.status.plan.current, world.status.plan.pending) == ("math-p2", "")
    assert [(n, s.conditions[-1].type) for n, s in decision.plan_statuses] == [
        ("math-p1", "Superseded"), ("math-p2", "Applied"),
    ]  # fmt: skip


def test_a_plan_that_does_not_fit_the_job_is_passed_over_with_its_reason():
    world = running()
    bad = world.plans[0].spec
    assert bad is not None
    workers = [
        w.model_copy(update={"slots": "sim/[0-9]/[0-3]", "count": 40}) if w.role == "env" else w for w in bad.workers
    ]
    world.with_plan(bad.model_copy(update={"revision": 2, "workers": workers}))
    decision = world.step()
    assert decision.instruct is None
    assert "math-p2 is passed over" in world.message("PlanApplied")
    assert world.status.plan.current == "math-p1"


def test_a_deleted_plan_is_asked_for_again_and_no_pod_is_touched():
    world = running()
    world.plans.clear()
    decision = world.decide()
    assert (decision.request_plan, decision.highest_revision) == ("CapacityChanged", 1), "not under the same revision"
    assert (decision.create_pods, decision.delete_pods) == ((), ())


def test_changed_inputs_replace_exactly_the_pods_that_are_made_from_them():
    world = running()
    pools = world.manifest["spec"]["pools"]
    world.edit(pools=[pools[0] | {"template": {"spec": {"priorityClassName": "low"}}}, pools[1]])
    world.step()
    assert world.names() == ["math-driver-a1", "math-sim-0-a2", "math-sim-1-a2", "math-train-0-a1"]
    assert world.status.restarts == []


def test_an_operator_upgrade_restarts_nobody():
    world = running()
    for pod in world.pods.values():
        pod["metadata"]["labels"]["app.kubernetes.io/version"] = "0.0.1"
        pod["spec"]["containers"][0]["image"] = "older"
        pod["spec"]["containers"][0]["env"] = []
    decision = world.decide()
    assert (decision.create_pods, decision.delete_pods) == ((), ())


def test_a_job_that_only_changes_its_policies_keeps_its_pods():
    world = running()
    world.edit(failurePolicy={"maxRestarts": 1}, ttlSecondsAfterFinished=5, activeDeadlineSeconds=5000)
    decision = world.step()
    assert (decision.create_pods, decision.delete_pods) == ((), ())


def test_a_driver_that_does_not_answer_is_called_unreachable_and_replaced_in_the_end():
    world = running().silent(11)
    world.step()
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.silent(59.9)
    assert world.step().create_pods == ()
    world.silent(60.0)
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-driver-a2"]
    assert [d.name for d in decision.delete_pods] == ["math-driver-a1"]
    assert [e.message for e in decision.events if e.pod] == ["pod math-driver-a1 on node n1 ended (Unresponsive)"]
    assert world.status.restarts[0].endswith("math-driver-a1 Infrastructure")


def test_the_silence_of_a_lost_driver_is_not_its_successors():
    """The pass that first sees a2 ready still has the link to a1, whose node is gone."""
    world = running()
    world.deleted("math-driver-a1", disruption="DeletionByTaintManager").step()
    world.ready("math-driver-a2", node="n2").report(attempt=1, silent_s=90.0, plan_revision=1)
    decision = world.step()
    assert (decision.create_pods, decision.delete_pods) == ((), ())
    assert world.condition("Degraded") == ("False", "Healthy")
    assert not [e for e in world.status.restarts if "math-driver-a2" in e]
    world.report(attempt=2, silent_s=61.0, plan_revision=1).step()
    assert [e for e in world.status.restarts if "math-driver-a2" in e]


def test_a_driver_that_runs_and_never_becomes_ready_is_silent_like_any_other():
    world = ppo_job().world().created()
    world.ready("math-driver-a1").pods["math-driver-a1"]["status"]["conditions"] = []
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_late_s - 1)
    assert world.step().requeue_after_s == 1
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_late_s)
    assert world.step().requeue_after_s == world.settings.driver_silent_deadline_s - world.settings.driver_late_s
    assert world.condition("Degraded") == ("True", "DriverUnreachable")
    world.link = DriverView(attempt=1, silent_s=world.settings.driver_silent_deadline_s)
    assert [p["metadata"]["name"] for p in world.step().create_pods] == ["math-driver-a2"]


def test_a_driver_pod_that_somebody_deleted_is_replaced_and_told_its_plan_again():
    world = running().deleted("math-driver-a1")
    world.step()
    world.vanished("math-driver-a1").all_ready().report(attempt=2, state=DriverState.WAITING, plan_revision=0)
    decision = world.step()
    assert decision.instruct is not None
    assert decision.instruct.target.attempt == 2


@pytest.mark.parametrize("pod", ["math-driver-a1", "math-train-0-a1"])
@pytest.mark.parametrize("reason", ["CheckpointUnreadable", "CheckpointUnwritable"])
def test_a_checkpoint_that_cannot_be_used_is_the_jobs_reason(pod, reason):
    world = ppo_job().world().started()
    world.link = None
    words = {"state": "Failed"} if "driver" in pod else {}
    world.exited(pod, 64, words=json.dumps({**words, "reason": reason, "message": "/ckpt is away"})).step()
    assert world.condition("Failed") == ("True", reason)
    assert world.message("Failed") == "/ckpt is away"
