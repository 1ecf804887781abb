"""Degraded=True/PodReplaced is of pods that take the place of others, and of nothing else that starts."""

from rlinf_api.report import DriverState
from tests.builders import make_job, ppo_job
from tests.builders_plans import pin, plan, running

WELL = ("False", "Healthy")


def replaced():
    """One simulator pod was replaced a moment ago, and all is well again."""
    world = ppo_job().world().started()
    world.step()
    world.exited("math-sim-1-a1", 1).later(1).step()
    assert world.condition("Degraded") == ("True", "PodReplaced")
    world.later(2).all_ready().step()
    assert world.condition("Degraded") == WELL
    return world


def resumed():
    world = replaced().edit(suspend=True)
    world.step()
    world.report(state=DriverState.DRAINED, plan_revision=1).step()
    world.link = None
    world.later(60).edit(suspend=False).created()
    assert len(world.status.restarts) == 1, "it still counts"
    return world


def test_of_many_pods_that_are_replaced_at_once_eight_are_named():
    job = make_job("ppo").role("env", "gymnasium", workers=10).role("rollout", "torch").role("actor", "fsdp")
    world = job.pool("sim", ["env"], pods=10, per_pod=1).pool("train", ["rollout", "actor"], pods=1, per_pod=2).world()
    world.started()
    world.step()
    for n in range(10):
        world.exited(f"math-sim-{n}-a1", 1)
    world.later(1).step()
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert len(world.message("Degraded").split("; ")) == 8, "a message has an end"


def test_first_pods_of_a_resumed_job_replace_nothing():
    world = resumed()
    assert world.condition("Degraded") == WELL
    world.later(5).step()
    assert world.condition("Degraded") == WELL


def test_a_pod_of_a_resumed_job_that_is_replaced_degrades_it():
    world = resumed().all_ready()
    world.later(5).exited("math-train-0-a3", 1).step()
    assert world.condition("Degraded") == ("True", "PodReplaced")
    world.later(5).step()
    assert world.condition("Degraded") == ("True", "PodReplaced")
    assert world.message("Degraded") == "math-train-0-a4 is starting"


def test_pods_that_an_edit_makes_anew_replace_none_that_another_place_lost():
    world = replaced().later(60)
    pools = world.manifest["spec"]["pools"]
    world.edit(pools=[pools[0], pools[1] | {"template": {"spec": {"priorityClassName": "low"}}}]).step()
    assert "math-train-0-a3" in world.names()
    world.later(1).step()
    assert world.condition("Degraded") == WELL
    assert world.condition("PodsReady") == ("False", "PodsStarting")


def test_a_pod_that_only_a_plan_on_its_way_needs_is_no_trouble_of_the_job():
    world = running()
    world.exited("math-sim-0-a1", 1).step()
    world.later(2).all_ready().step()
    world.with_plan(plan(2, pods=2))
    pin(world, "math-p2").step()
    added = next(name for name in world.names() if name.startswith("math-sim-1-"))
    world.waiting(added, unschedulable="0/3 nodes").later(5).step()
    assert world.condition("Degraded") == WELL
    assert world.condition("PlanApplied") == ("Unknown", "PlanPending")
    world.deleted(added, disruption="EvictionByEvictionAPI").step()
    assert world.condition("Degraded") == WELL
    world.vanished(added).later(5).step()
    assert world.condition("Degraded") == WELL
