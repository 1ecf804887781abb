"""What a pass decides about certificates, ConfigMap, NetworkPolicy, templates and moments: whole, pass by pass."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.reconcile.decide import decide
from rlinf_operator.reconcile.state import ConfigView, PolicyView
from rlinf_operator.settings import OperatorSettings
from tests.builders import ppo_job
from tests.stories import Story

STORIES = Path(__file__).parent / "stories"
SIM, TRAIN, DRIVER = "math-sim-0-a1", "math-train-0-a1", "math-driver-a1"
DAY_S = 86_400.0


def running(job=None, settings=None, **spec):
    job = (job or ppo_job()).with_spec(**({"checkpoint": {"uri": "/c"}} | spec))
    world = (job.world(settings=settings) if settings else job.world()).created().all_ready()
    world.report(plan_revision=1, plan_switches=1, step=5).step()
    return Story(world)


def test_certificates_are_renewed_when_two_thirds_of_their_life_are_over():
    story = running()
    world = story.world
    story.step("they are new")
    world.later(20 * DAY_S - 1)
    story.step("a second before")
    world.later(1)
    story.step("two thirds are over")
    world.exited(SIM, 1)
    story.step("a pod ends then")
    story.holds(STORIES / "certificates.txt")


@pytest.mark.parametrize(
    ("trusted", "issuer", "renews"),
    [((), "a", False), (("a",), "a", False), (("b", "a"), "a", False), (("b",), "a", True), (("b",), "", True)],
)
def test_certificates_of_a_ca_that_counts_no_more_are_made_anew(trusted, issuer, renews):
    world = running().world
    assert world.config is not None
    world.config = replace(world.config, issuer=issuer)
    decision = decide(replace(world.observed(), trusted=trusted), now=world.now, settings=world.settings)
    assert (decision.renew_certificates, decision.write_config) == (renews, renews)
    assert decision.certificates == (("driver", "pool:sim", "pool:train") if renews else ())
    assert decision.requeue_after_s == (None if renews else 20 * DAY_S)


def test_a_configmap_that_does_not_say_when_certificates_end_is_left_and_a_stale_one_written():
    world = running().world
    world.config = replace(world.config, certificates_expire=None)
    decision = world.decide()
    assert (decision.renew_certificates, decision.write_config, decision.requeue_after_s) == (False, False, None)
    world.config = ConfigView(inputs="older", certificates_expire=None)
    decision = world.decide()
    assert (decision.certificates, decision.write_config, decision.renew_certificates) == ((), True, False)
    world.config = None
    decision = world.decide()
    assert (decision.write_config, decision.renew_certificates) == (True, False)
    assert decision.certificates == ("driver", "pool:sim", "pool:train")


def test_pods_that_are_replaced_get_the_certificates_of_their_parts_and_first_pods_have_theirs():
    world = running().world.exited(SIM, 1).exited(DRIVER, 1)
    assert world.decide().certificates == ("driver", "pool:sim")
    first = ppo_job().world().planned()
    first.config = ConfigView(inputs="", certificates_expire=None)
    decision = first.decide()
    assert (len(decision.create_pods), decision.certificates) == (4, ())


def test_the_service_and_the_policy_are_written_where_they_are_missing_or_say_something_else():
    world = running().world
    assert (world.decide().service, world.decide().network_policy) == (None, None)
    assert world.decide().delete_network_policy == ""
    world.has_service, world.network_policy = False, PolicyView(uid="n1", inputs="older")
    decision = world.decide()
    assert decision.service is not None
    assert decision.network_policy is not None
    assert decision.delete_network_policy == ""
    world.settings = OperatorSettings(network_policy=False)
    assert (world.decide().network_policy, world.decide().delete_network_policy) == (None, "n1")
    world.network_policy = None
    assert (world.decide().network_policy, world.decide().delete_network_policy) == (None, "")


def test_what_a_template_wants_and_does_not_get_is_told_once_per_sentence_as_pods_are_made():
    job = ppo_job()
    job.spec["pools"][0]["template"] = {"spec": {"restartPolicy": "Always", "hostNetwork": True}}
    story = Story(job.world().planned())
    story.step("its pods are made")
    story.world.all_ready()
    story.step("they are ready")
    story.holds(STORIES / "templates.txt")
    unguarded = job.world(settings=OperatorSettings(network_policy=False)).planned().decide()
    assert [event.reason for event in unguarded.events_of_made] == ["TemplateOverridden"]


def test_a_job_is_looked_at_when_its_time_is_over_and_not_before():
    world = running(activeDeadlineSeconds=100).world
    assert world.decide().requeue_after_s == 100
    world.later(99.5)
    assert world.decide().requeue_after_s == 0.5
    assert world.decide().delete_pods == ()
    world.later(0.5)
    assert [c.type for c in world.decide().status.conditions if c.reason == "DeadlineExceeded"] == ["Failed"]


def test_fields_that_this_version_does_not_know_are_named_where_a_job_goes_on_without_them():
    world = running().world
    decision = decide(replace(world.observed(), unknown=("spec.later", "a of math-p1")), now=world.now)
    [message] = [c.message for c in decision.status.conditions if c.type == "Valid"]
    assert "spec.later" in message
    assert "a of math-p1" in message


@pytest.mark.parametrize(
    ("state", "silent_s", "again_s"),
    [
        (DriverState.RUNNING, 0.0, 20 * DAY_S),
        (DriverState.RUNNING, 3.0, 7.0),
        (DriverState.RUNNING, 10.0, 50.0),
        (DriverState.RUNNING, 59.0, 1.0),
    ],
)
def test_a_driver_that_is_not_heard_is_looked_at_when_it_is_late_and_when_it_is_lost(state, silent_s, again_s):
    world = running().world.report(state=state, plan_revision=1, plan_switches=1, step=5, silent_s=silent_s)
    assert world.decide().requeue_after_s == again_s


def test_a_request_that_this_very_spec_was_refused_is_not_made_again_until_it_is_edited():
    story = running()
    world = story.world
    roles = [dict(role) for role in world.manifest["spec"]["roles"]]
    roles[0]["workers"] = {"min": 1, "max": 2}
    world.edit(roles=roles)
    asks = world.decide()
    assert asks.request_plan == "CapacityChanged"
    valid = [c for c in asks.status.conditions if c.type == "Valid"]
    said = valid[0].model_copy(update={"status": "False", "reason": "Infeasible", "message": "too large"})
    others = [c for c in asks.status.conditions if c.type != "Valid"]
    world.status = asks.status.model_copy(update={"conditions": [said, *others]})
    again = world.decide()
    assert again.request_plan == ""
    assert [(c.status, c.reason, c.message) for c in again.status.conditions if c.type == "Valid"] == [
        ("False", "Infeasible", "too large")
    ]
    roles[0]["workers"] = {"min": 1, "max": 3}
    world.edit(roles=[*roles], seed=3)
    assert world.decide().request_plan == "CapacityChanged"
