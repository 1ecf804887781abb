"""A pod of the plan in force that finds no node: the job is given a plan for the pods that have one, where it may."""

from dataclasses import replace

import pytest

from rlinf_api.report import DriverState
from rlinf_operator.reconcile import outcome
from rlinf_operator.reconcile.outcome import Answers, status_after
from tests.builders import World
from tests.builders_plans import name, pin, plan, running, store_statuses

ASKED = {"sim": 2, "train": 1}


def three_pods(**placement: str) -> World:
    """At work in three pods of pool sim, which may have one to three."""
    world = running(plan(2, pods=3, source="Scheduler", reason={"code": "Drift", "message": "quicker"}))
    world.edit(placement={"profileSteps": 3, **placement})
    world.step()
    world.all_ready().report(plan_revision=2, plan_switches=2, step=7)
    world.created()
    world.all_ready().report(plan_revision=2, plan_switches=2, step=7)
    store_statuses(world)
    return world.later(600.0)


def loses(world: World, ordinal: int = 1) -> str:
    """Its node goes, and another attempt of the pod finds none."""
    (pod,) = [found for found in world.pods if f"-sim-{ordinal}-" in found]
    world.vanished(pod).step()
    (again,) = [found for found in world.pods if f"-sim-{ordinal}-" in found]
    world.waiting(again, unschedulable="0/3 nodes are available")
    world.report(state=DriverState.RECOVERING, plan_revision=2, plan_switches=2, step=7)
    return again


def later(world: World, seconds: float) -> World:
    return world.later(seconds)


def fewer(world: World, revision: int = 3) -> World:
    return world.with_plan(
        plan(revision, pods=2, source="Scheduler", reason={"code": "CapacityChanged", "message": "fewer"})
    )


def test_a_plan_for_the_pods_that_have_nodes_is_asked_for_once():
    world = three_pods()
    loses(world)
    later(world, world.settings.homeless_s - 1)
    assert world.decide().request_plan == ""
    later(world, 2)
    decision = world.decide()
    assert (decision.request_plan, decision.plan_within, decision.highest_revision) == ("CapacityChanged", ASKED, 2)
    world.status = decision.status
    assert world.status.plan.asked_within == ASKED
    assert world.condition("PlanApplied") == ("True", "PlanInForce")
    said = "; a plan is asked for for the pods that have nodes, 2 of pool sim, 1 of pool train"
    assert world.message("PlanApplied") == f"math-p2: quicker{said}"
    decision = world.decide()
    assert (decision.request_plan, decision.status.plan.asked_within) == ("", ASKED)
    world.status = decision.status
    assert "; no plan came into force for the pods that have nodes" in world.message("PlanApplied")


def test_the_plan_for_fewer_comes_into_force_and_the_pod_that_finds_no_node_goes():
    world = three_pods()
    pod = loses(world)
    world.status = later(world, 61).decide().status
    fewer(world).report(state=DriverState.RECOVERING, plan_revision=2, plan_switches=2, plan_prepared=3, step=7)
    decision = world.step()
    assert decision.instruct is not None
    assert (decision.instruct.steps, decision.instruct.plan.revision) == (("Commit",), 3)
    assert (world.status.plan.pending, world.status.plan.asked_within) == (name(world, 3), ASKED)
    assert pod in world.pods, "it may find one until the plan is in force"
    world.report(plan_revision=3, plan_switches=3, step=7).step()
    assert (world.status.plan.current, world.status.plan.asked_within) == (name(world, 3), {})
    assert pod in world.pods, "which may have the node that the third one had"
    assert not [found for found in world.pods if "-sim-2-" in found]
    store_statuses(world)
    assert later(world, 50).decide().request_plan == "", "the node of the pod that went may be its own"
    assert later(world, 11).decide().plan_within == {"sim": 1, "train": 1}


def test_a_plan_for_fewer_that_cannot_be_prepared_is_not_asked_for_again():
    world = three_pods()
    loses(world)
    world.status = later(world, 61).decide().status
    fewer(world).report(
        state=DriverState.RECOVERING, plan_revision=2, plan_switches=2, plan_failed=3, plan_message="no", step=7
    )
    for _ in range(2):
        decision = world.step()
        world.plans = [replace(p, status=dict(decision.plan_statuses).get(p.name, p.status)) for p in world.plans]
        assert (decision.request_plan, world.status.plan.asked_within) == ("", ASKED)


def test_a_pod_that_is_of_no_plan_any_more_is_not_missed():
    """As of one that was given up, before it is gone."""
    world = three_pods()
    loses(world, 2)
    world.with_plan(plan(3, pods=2, source="Scheduler", reason={"code": "Drift", "message": "as quick on fewer"}))
    world.report(plan_revision=3, plan_switches=3, step=7)
    store_statuses(world)
    world.later(120.0)
    assert world.decide().request_plan == ""
    (left,) = [found for found in world.pods if "-sim-0-" in found]
    world.pods[left]["spec"].pop("nodeName")
    world.waiting(left, unschedulable="0/3 nodes are available")
    assert world.decide().plan_within == {"sim": 1, "train": 1}, "but one that is of it is"


def test_a_second_pod_without_a_node_is_another_question():
    world = three_pods()
    loses(world, 1)
    world.status = later(world, 61).decide().status
    loses(world, 2)
    assert world.decide().request_plan == ""
    decision = later(world, 61).decide()
    assert (decision.request_plan, decision.plan_within) == ("CapacityChanged", {"sim": 1, "train": 1})


@pytest.mark.parametrize(
    "so",
    ["no step yet", "it is pinned", "on approval", "a person's plan", "it found one", "as few as allowed", "a queue"],
)
def test_the_pod_is_waited_for(so):
    world = three_pods()
    pod = loses(world)
    later(world, 61)
    assert world.decide().request_plan == "CapacityChanged", "but for what follows"
    match so:
        case "no step yet":
            world.report(state=DriverState.STARTING, plan_revision=2, plan_switches=2, step=0)
            world.status = world.status.model_copy(update={"step": 0})
        case "it is pinned":
            pin(world, name(world, 2))
        case "on approval":
            world.edit(placement={"apply": "OnApproval"})
        case "a person's plan":
            world.plans = [
                replace(p, spec=p.spec.model_copy(update={"source": "User"})) if p.revision == 2 and p.spec else p
                for p in world.plans
            ]
        case "it found one":
            world.ready(pod)
        case "as few as allowed":
            pools = [dict(pool) for pool in world.manifest["spec"]["pools"]]
            pools[0]["pods"] = {"min": 3, "max": 3}
            world.edit(pools=pools)
        case "a queue":
            from rlinf_operator.manifests.asking import QueueView

            world.queue = QueueView(queue="", provider="kueue")
    assert world.decide().request_plan == ""


def test_a_new_driver_that_has_heard_of_no_step_yet_does_not_make_the_job_one_that_has_not_begun():
    world = three_pods()
    loses(world)
    world.status = world.status.model_copy(update={"step": 7})
    world.report(state=DriverState.RECOVERING, plan_revision=2, plan_switches=2, step=0)
    assert later(world, 61).decide().request_plan == "CapacityChanged"


def test_a_scheduler_that_is_away_is_asked_again():
    world = three_pods()
    loses(world)
    decision = later(world, 61).decide()
    away = status_after(
        Answers(scheduler_away="nobody listens"), world.observed(), decided=decision.status, now=world.now
    )
    assert away.plan.asked_within == {}
    world.status = away
    assert world.decide().request_plan == "CapacityChanged"


def test_where_there_is_no_plan_for_fewer_the_job_is_as_valid_as_it_was():
    world = three_pods()
    loses(world)
    before = world.condition("Valid")
    decision = later(world, 61).decide()
    assert outcome.asks_for_fewer(world.observed(), decision.status)
    answers = Answers(infeasible=("role actor needs 2 slots",))
    world.status = status_after(answers, world.observed(), decided=decision.status, now=world.now)
    assert world.condition("Valid") == before == ("True", "Accepted")
    assert not outcome.asks_for_fewer(world.observed(), world.decide().status)
    assert world.decide().request_plan == ""


def test_where_nothing_is_wrong_no_field_of_the_status_says_so():
    assert "askedWithin" not in str(three_pods().status.model_dump(mode="json", by_alias=True)["plan"])
