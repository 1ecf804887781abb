"""spec.failurePolicy.rules as the operator obeys them: of pods that ended or wait, and of workers as a driver says."""

import pytest

from rlinf_api import failure_rules, times
from rlinf_api.job import FailureRule
from rlinf_api.report import DriverState, Failure, Ruling
from rlinf_operator.policies import restart
from rlinf_operator.reconcile import outcome
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import ppo_job

SIM = "math-sim-1-a1"


def running(*rules, max_restarts=20):
    world = ppo_job().with_spec(failurePolicy={"maxRestarts": max_restarts, "rules": list(rules)}).world().started()
    world.step()
    return world


def parsed(*rules):
    return tuple(FailureRule.model_validate(rule) for rule in rules)


def causes(world):
    """With the rules' names or places in the place of their keys."""
    rules = parsed(*world.manifest["spec"]["failurePolicy"]["rules"])
    entries = restart.read(world.status.restarts)
    told = [(e.pod, e.cause, failure_rules.called(rules, e.rule)) for e in entries]
    return [f"{pod} {cause}:{rule}".removesuffix(":") for pod, cause, rule in told]


def test_fail_job_ends_it_with_the_rule_and_the_pod_and_the_first_failure_stays():
    world = running({"name": "no-licence", "pool": "sim", "exitCodes": [3], "action": "FailJob"})
    world.exited("math-train-0-a1", 1).step()
    first = world.status.first_failure
    decision = world.later(5).exited(SIM, 3, words=Failure(role="env", worker=3, message="no licence")).step()
    assert world.condition("Failed") == ("True", "FailureRule")
    said = "rule 'no-licence' of spec.failurePolicy says FailJob: worker env/3 of pod math-sim-1-a1 on node n1"
    assert world.message("Failed").startswith(said)
    assert "no licence" in world.message("Failed")
    assert world.status.first_failure == first
    assert first.pod == "math-train-0-a1"
    assert [(e.reason, e.pod) for e in decision.events] == [("PodEnded", SIM), ("FailureRule", SIM)]
    assert decision.ruled == ("FailJob",)
    assert not decision.create_pods


def test_a_rule_comes_before_what_an_exit_code_means_without_it():
    world = running({"role": "env", "exitCodes": [64], "action": "RestartPod"})
    world.exited(SIM, 64, words=Failure(role="env", message="no card")).step()
    assert "math-sim-1-a2" in world.names()
    assert causes(world) == ["math-sim-1-a1 Program:0"]
    world.step()
    assert world.condition("Degraded") == ("True", "PodReplaced")


def test_what_no_rule_meets_is_as_ever():
    world = running({"role": "env", "exitCodes": [3], "action": "FailJob"})
    world.exited("math-train-0-a1", 3).exited(SIM, 4).step()
    assert causes(world) == ["math-sim-1-a1 Program", "math-train-0-a1 Program"]


def test_a_pod_that_names_no_role_is_one_of_each_role_of_its_pool():
    world = running({"role": "rollout", "reasons": ["NodeLost"], "action": "FailJob"})
    world.exited(SIM, 255, reason="Unknown").step()
    assert world.condition("Valid") == ("True", "Accepted")
    world.exited("math-train-0-a1", 255, reason="Unknown").step()
    assert world.condition("Failed") == ("True", "FailureRule")


def test_a_rule_that_names_a_role_or_a_pool_is_not_about_drivers_and_one_that_names_neither_is():
    for rule in ({"role": "env"}, {"pool": "sim"}):
        world = running({**rule, "action": "FailJob"})
        world.link = None
        world.exited("math-driver-a1", 1).step()
        assert "math-driver-a2" in world.names()
    world = running({"exitCodes": [1], "action": "FailJob"})
    world.link = None
    world.exited("math-driver-a1", 1).step()
    assert world.condition("Failed") == ("True", "FailureRule")


def test_ignore_replaces_and_counts_against_no_bound_of_the_spec():
    world = running({"reasons": ["OOMKilled"], "action": "Ignore"}, max_restarts=0)
    for attempt in (1, 2, 3):
        world.exited(f"math-sim-1-a{attempt}", 137, reason="OOMKilled").step()
        world.later(60).step()
        world.all_ready()
    assert "math-sim-1-a4" in world.names()
    assert set(causes(world)) == {f"math-sim-1-a{attempt} Infrastructure:0" for attempt in (1, 2, 3)}


def test_a_rules_own_bound_counts_its_own_and_nothing_else():
    world = running({"name": "mem", "reasons": ["OOMKilled"], "action": "RestartPod", "maxRestarts": 1}, max_restarts=1)
    world.exited("math-train-0-a1", 1).step()
    world.all_ready().later(5).exited(SIM, 137, reason="OOMKilled").step()
    assert "math-sim-1-a3" in world.names()
    world.all_ready().later(60).exited("math-sim-1-a3", 137, reason="OOMKilled").step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "2 failures met rule 'mem' of spec.failurePolicy, whose maxRestarts is 1" in world.message("Failed")


def test_a_rule_without_a_bound_counts_against_the_jobs():
    world = running({"exitCodes": [3], "action": "RestartPod"}, max_restarts=0)
    world.exited(SIM, 3).step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")


def test_a_back_off_is_the_pause_before_the_next_pod_and_grows():
    world = running({"exitCodes": [3], "action": "RestartPod", "backOffSeconds": 30})
    decision = world.exited(SIM, 3).step()
    assert (decision.create_pods, decision.requeue_after_s) == ((), 30.0)
    world.later(29).step()
    assert "math-sim-1-a2" not in world.names()
    world.later(1).step()
    assert "math-sim-1-a2" in world.names()
    world.all_ready().exited("math-sim-1-a2", 3).step()
    world.later(59).step()
    assert "math-sim-1-a3" not in world.names()
    world.later(1).step()
    assert "math-sim-1-a3" in world.names()


PREPENDED = {"exitCodes": [64], "action": "RestartPod", "maxRestarts": 3}
OFTEN = {"exitCodes": [3], "action": "RestartPod", "maxRestarts": 50}


def exceeded(entries, *rules):
    return restart.exceeded(entries, max_restarts=0, infrastructure_restarts=0, rules=parsed(*rules))


def test_what_one_rule_has_counted_is_not_another_ones_that_is_put_in_front_of_it():
    key = failure_rules.key_of(parsed(OFTEN)[0])
    ten = [f"2026-11-21T12:00:{second:02d}Z math-sim-1-a{second} Program:{key}" for second in range(10)]
    entries = restart.read(ten)
    assert exceeded(entries, OFTEN) == exceeded(entries, PREPENDED, OFTEN) == ""
    fewer = exceeded(entries, PREPENDED, OFTEN | {"maxRestarts": 9})
    assert fewer.startswith("10 failures met rule '1' of spec.failurePolicy, whose maxRestarts is 9; ")


def test_a_rule_in_front_ends_no_job_at_work():
    world = running(OFTEN)
    for attempt in range(1, 6):
        world.exited(f"math-sim-1-a{attempt}", 3).step()
        world.later(60).step()
        world.all_ready()
    world.edit(failurePolicy={"rules": [PREPENDED, OFTEN]}).step()
    assert not any(c.type == "Failed" for c in world.status.conditions)
    assert causes(world) == [f"math-sim-1-a{attempt} Program:1" for attempt in range(1, 6)]


NO_ROOM = "0/3 nodes are available"


@pytest.mark.parametrize("kind", ["Unschedulable", "ImagePull"])
def test_a_pod_that_waits_too_long_meets_its_rule_and_is_not_left_waiting(kind):
    rule = {"reasons": [kind], "afterSeconds": 60, "action": "FailJob"}
    world = ppo_job().with_spec(failurePolicy={"rules": [rule]}).world().created()
    if kind == "Unschedulable":
        world.waiting(SIM, unschedulable=NO_ROOM)
    else:
        world.waiting(SIM, reason="ImagePullBackOff", message="not found")
    decision = world.later(20).step()
    assert decision.requeue_after_s == pytest.approx(40.0)
    assert not any(c.type == "Failed" for c in world.status.conditions)
    world.later(40).step()
    assert world.condition("Failed") == ("True", "FailureRule")
    assert world.status.first_failure is not None
    assert (world.status.first_failure.reason, world.status.first_failure.pod) == (kind, SIM)


def test_what_a_pod_waits_for_its_image_begins_once_it_has_a_node():
    rule = {"reasons": ["ImagePull"], "afterSeconds": 300, "action": "FailJob"}
    world = ppo_job().with_spec(failurePolicy={"rules": [rule]}).world().created()
    world.waiting(SIM, unschedulable=NO_ROOM).later(590).step()
    has_node = {"type": "PodScheduled", "status": "True", "lastTransitionTime": times.text(world.now)}
    world.pods[SIM]["status"]["conditions"] = [has_node]
    decision = world.waiting(SIM, reason="ErrImagePull", message="503").later(10).step()
    assert decision.requeue_after_s == pytest.approx(290.0)
    assert not any(c.type == "Failed" for c in world.status.conditions)
    world.later(290).step()
    assert world.condition("Failed") == ("True", "FailureRule")


def test_a_pod_that_finds_no_node_is_made_anew_where_a_rule_says_so():
    rule = {"reasons": ["Unschedulable"], "afterSeconds": 10, "action": "RestartPod", "maxRestarts": 1}
    world = ppo_job().with_spec(failurePolicy={"rules": [rule]}).world().created()
    world.waiting(SIM, unschedulable=NO_ROOM).later(10)
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert [(d.name, d.why) for d in decision.delete_pods] == [(SIM, "a rule of failurePolicy replaces it")]
    assert causes(world) == ["math-sim-1-a1 Infrastructure:0"]
    assert [e.reason for e in decision.events if e.pod] == ["FailureRule"], "it did not end"


def test_too_many_that_wait_in_vain_say_why_the_last_one_did():
    rule = {"reasons": ["Unschedulable"], "afterSeconds": 10, "action": "RestartPod", "maxRestarts": 0}
    world = ppo_job().with_spec(failurePolicy={"rules": [rule]}).world().created()
    world.waiting(SIM, unschedulable=NO_ROOM).later(10).step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert world.message("Failed").endswith(f"; the last was {SIM} (Unschedulable: {NO_ROOM})")


def test_to_ignore_that_a_pod_finds_no_node_is_to_wait():
    rule = {"reasons": ["Unschedulable"], "afterSeconds": 1, "action": "Ignore"}
    world = ppo_job().with_spec(failurePolicy={"rules": [rule]}).world().created()
    world.waiting(SIM, unschedulable=NO_ROOM).later(50).step()
    assert causes(world) == []
    assert world.condition("PodsReady") == ("False", "Unschedulable")


# --- the whole job ----------------------------------------------------------------------------------------------------
def test_restart_job_makes_all_pods_anew_as_another_life_and_counts_once():
    world = running({"name": "nccl", "role": "actor", "action": "RestartJob", "maxRestarts": 1})
    world.report(step=7, plan_revision=1, checkpoint_uri="/c/b0-5", checkpoint_step=5).step()
    decision = world.exited("math-train-0-a1", 1).step()
    assert world.names() == ["math-driver-a2", "math-sim-0-a2", "math-sim-1-a2", "math-train-0-a2"]
    assert world.status.life == 2
    assert causes(world) == ["life/2 Program:nccl", "math-train-0-a1 Ruled:nccl"]
    assert world.condition("Degraded") == ("True", "JobRestarted")
    assert [e.reason for e in decision.events][:2] == ["PodEnded", "FailureRule"]
    assert world.status.first_failure.pod == "math-train-0-a1"
    assert world.status.state == "Recovering"
    world.all_ready().step()
    assert world.condition("Degraded") == ("True", "JobRestarted")
    world.report(plan_revision=1).step()
    assert world.condition("Degraded") == ("False", "Healthy")
    world.exited("math-train-0-a2", 1).step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "2 failures met rule 'nccl'" in world.message("Failed")


def test_a_place_whose_pods_had_the_job_restarted_waits_no_longer_than_the_others():
    world = running({"role": "actor", "action": "RestartJob"})
    for life in (1, 2):
        world.exited(f"math-train-0-a{life}", 1).step()
        assert f"math-train-0-a{life + 1}" in world.names()
        world.all_ready().report(plan_revision=1).step()


def test_a_restart_of_the_job_waits_for_its_back_off_and_is_one_life():
    world = running({"exitCodes": [3], "action": "RestartJob", "backOffSeconds": 30})
    decision = world.exited(SIM, 3).step()
    assert world.names() == []
    assert decision.requeue_after_s == 30.0
    assert world.status.state == "Recovering"
    for _ in range(3):
        world.later(9).step()
        assert world.names() == []
    world.later(3).step()
    assert "math-driver-a2" in world.names()
    assert (world.status.life, world.status.attempt) == (2, 2)
    assert causes(world) == ["life/2 Program:0", "math-sim-1-a1 Ruled:0"]


def test_a_restart_of_the_job_that_the_api_server_refuses_is_still_to_be_done():
    world = running({"exitCodes": [3], "action": "RestartJob"})
    world.exited(SIM, 3)
    decision = world.decide()
    observed = world.observed()
    world.status = outcome.status_after(
        Answers(writes_refused=("quota",)), observed, decided=decision.status, now=world.now
    )
    assert world.status.life == 1
    for gone in list(world.pods):
        world.vanished(gone)
    world.later(1).step()
    assert world.status.life == 2
    assert "math-driver-a2" in world.names()
    assert [c for c in causes(world) if "Infrastructure" in c] == []


def test_an_entry_of_a_life_is_read_as_it_was_written():
    entry = restart.read(["2026-11-21T12:00:00Z life/3 Program:a"])[0]
    assert (entry.life, entry.rule, entry.cause, str(entry)) == (
        3, "a", "Program", "2026-11-21T12:00:00Z life/3 Program:a",
    )  # fmt: skip
    assert restart.read(["2026-11-21T12:00:00Z math-life-3 Program"])[0].life == 0


def test_suspend_drains_and_holds_until_an_edit_and_then_begins_another_life():
    world = running({"name": "mem", "pool": "sim", "reasons": ["OOMKilled"], "action": "Suspend"})
    world.report(step=7, plan_revision=1)
    decision = world.exited(SIM, 137, reason="OOMKilled").step()
    assert decision.drain is not None
    assert world.condition("Suspended") == ("Unknown", "Draining")
    assert "rule 'mem' of spec.failurePolicy says Suspend" in world.message("Suspended")
    assert (world.status.suspended_by.rule, world.status.suspended_by.generation) == ("mem", 1)
    assert [e.reason for e in decision.events][:2] == ["PodEnded", "FailureRule"]
    world.report(state=DriverState.DRAINED, step=8, plan_revision=1, checkpoint_uri="/c", checkpoint_step=8).step()
    world.step()
    assert world.condition("Suspended") == ("True", "SuspendedByRule")
    assert "; edit the spec to go on; no pods" in world.message("Suspended")
    assert world.names() == []
    assert world.status.state == "Suspended"
    world.link = None
    world.later(3600).step()
    assert world.names() == []
    world.edit(seed=0).step()
    assert "math-sim-1-a2" in world.names()
    assert world.status.life == 2
    assert world.status.suspended_by is None
    assert world.status.first_failure.reason == "OOMKilled"


def test_a_suspension_by_a_rule_becomes_the_users_with_their_edit():
    world = running({"reasons": ["OOMKilled"], "action": "Suspend"})
    world.report(state=DriverState.DRAINED).exited(SIM, 137, reason="OOMKilled").step()
    world.step()
    world.edit(suspend=True).step()
    assert world.condition("Suspended") == ("True", "SuspendedByUser")
    assert world.status.suspended_by is None


# --- workers, by their driver's word ----------------------------------------------------------------------------------
RULE = {"role": "env", "exitCodes": [3]}


def ruling(action, *, pod=SIM, rule=""):
    failure = Failure(role="env", worker=3, pod=pod, node="n1", exit_code=3, reason="Exit3", message="no licence")
    key = rule or failure_rules.key_of(FailureRule.model_validate({**RULE, "action": action}))
    return Ruling(action=action, rule=key, failure=failure)


def test_the_pod_of_a_worker_is_replaced_where_its_driver_asks_and_only_once():
    world = running({**RULE, "action": "RestartPod"})
    world.report(plan_revision=1, rulings=(ruling("RestartPod"),))
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert [d.name for d in decision.delete_pods] == [SIM]
    assert causes(world) == ["math-sim-1-a1 Program:0"]
    assert [e.message for e in decision.events if e.reason == "FailureRule"] == [
        "rule '0' of spec.failurePolicy says RestartPod: worker env/3 of pod math-sim-1-a1 on node n1 "
        "(Exit3, exit code 3): no licence"
    ]
    assert not world.step().create_pods
    assert causes(world) == ["math-sim-1-a1 Program:0"]
    assert world.status.first_failure.worker == 3


def test_a_failure_without_an_exit_code_names_none():
    world = running({"role": "env", "reasons": ["Evicted"], "action": "RestartPod"})
    evicted = Failure(role="env", worker=3, pod=SIM, node="", exit_code=0, reason="Evicted", message="")
    (rule,) = parsed({"role": "env", "reasons": ["Evicted"], "action": "RestartPod"})
    said = Ruling(action="RestartPod", rule=failure_rules.key_of(rule), failure=evicted)
    world.report(plan_revision=1, rulings=(said,))
    assert [e.message for e in world.step().events if e.reason == "FailureRule"] == [
        "rule '0' of spec.failurePolicy says RestartPod: worker env/3 of pod math-sim-1-a1 on node n1 (Evicted)"
    ]


def test_a_pod_that_is_asked_for_waits_alive_for_its_back_off():
    world = running({**RULE, "action": "RestartPod", "backOffSeconds": 10})
    world.report(plan_revision=1, rulings=(ruling("RestartPod"),)).step()
    assert SIM in world.names()
    world.later(10).step()
    assert "math-sim-1-a2" in world.names()
    assert SIM not in world.names()


@pytest.mark.parametrize("pod", [SIM, "math-sim-1-a0"])
def test_the_whole_job_is_restarted_where_its_driver_asks(pod):
    world = running({**RULE, "action": "RestartJob"})
    world.report(plan_revision=1, rulings=(ruling("RestartJob", pod=pod),)).step()
    assert world.status.life == 2
    assert causes(world) == ["life/2 Program:0"]
    world.step()
    assert world.status.life == 2, "what the driver of an earlier life says is over"
    assert "math-driver-a2" in world.names()


def test_the_job_is_suspended_where_its_driver_asks():
    world = running({**RULE, "action": "Suspend"})
    world.report(plan_revision=1, rulings=(ruling("Suspend"),)).step()
    assert world.condition("Suspended") == ("Unknown", "Draining")
    assert "no licence" in world.message("Suspended")


def test_a_driver_goes_by_the_rules_that_it_has_read():
    world = running()
    world.report(plan_revision=1, rulings=(ruling("RestartPod", rule="gone"), ruling("Reboot", rule="gone"))).step()
    assert causes(world) == ["math-sim-1-a1 Program:gone"]


# --- agents that their driver does not hear ---------------------------------------------------------------------------
def silent(*rules):
    """A job one of whose agents is frozen, since its pod has run for a while."""
    return running(*rules).later(61).report(plan_revision=1, silent_agents=("sim-1",))


def test_a_pod_whose_agent_is_silent_is_replaced_and_nobody_waits_for_its_end():
    world = silent()
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    [deleted] = decision.delete_pods
    assert (deleted.name, deleted.grace_period_s, deleted.why) == (SIM, 1, "its agent is silent")
    assert causes(world) == ["math-sim-1-a1 Program"]
    assert [(e.reason, e.pod, e.message) for e in decision.events if e.reason == "AgentSilent"] == [
        ("AgentSilent", SIM, "pod math-sim-1-a1 on node n1 (AgentSilent): its driver hears nothing of its agent, which "
         "is frozen or cut off")
    ]  # fmt: skip
    assert decision.ruled == (), "no rule was met"
    assert world.status.first_failure.reason == "AgentSilent"
    assert not world.step().create_pods, "the driver still says so until the next agent attaches"


def test_it_counts_against_the_jobs_bound():
    world = running(max_restarts=0).later(61).report(plan_revision=1, silent_agents=("sim-1",))
    world.step()
    assert world.condition("Failed") == ("True", "TooManyRestarts")
    assert "math-sim-1-a1 (AgentSilent: its driver hears nothing of its agent" in world.message("Failed")


def test_a_pod_has_a_minute_until_its_agent_must_be_heard():
    world = running().later(20).report(plan_revision=1, silent_agents=("sim-1",))
    decision = world.step()
    assert not decision.create_pods
    assert decision.requeue_after_s is not None
    assert decision.requeue_after_s <= 40
    assert [p["metadata"]["name"] for p in world.later(40).step().create_pods] == ["math-sim-1-a2"]


def test_pods_that_do_not_run_or_are_leaving_are_not_replaced_for_it():
    world = silent()
    world.exited("math-sim-0-a1", 1).waiting(SIM, reason="ErrImagePull")
    world.pods[SIM]["status"]["phase"] = "Pending"
    world.step()
    assert "math-sim-1-a2" not in world.names()
    world = silent()
    world.deleted(SIM, disruption="DeletionByTaintManager").step()
    assert causes(world) == ["math-sim-1-a1 Infrastructure"], "its node is lost, and that has rules of its own"


@pytest.mark.parametrize(
    ("rule", "cause"),
    [({"pool": "sim", "action": "Ignore"}, "Infrastructure:0"), ({"pool": "sim", "action": "RestartPod"}, "Program:0")],
)
def test_a_rule_that_names_no_reason_is_about_a_silent_agent_too(rule, cause):
    world = silent(rule)
    decision = world.step()
    assert [p["metadata"]["name"] for p in decision.create_pods] == ["math-sim-1-a2"]
    assert causes(world) == [f"math-sim-1-a1 {cause}"]
    assert [e.reason for e in decision.events if e.pod == SIM] == ["FailureRule"]
    assert decision.ruled == (rule["action"],)


def test_a_rule_may_fail_the_job_for_it_and_one_of_another_reason_does_not():
    world = silent({"pool": "sim", "reasons": ["NodeLost"], "action": "FailJob"})
    world.step()
    assert "math-sim-1-a2" in world.names()
    world = silent({"pool": "sim", "action": "FailJob"})
    world.step()
    assert world.condition("Failed") == ("True", "FailureRule")
