"""An edit of a running job: what the driver is told, what is left alone, and what people hear of it."""

import dataclasses

import pytest

from rlinf_api.errors import WorkerUnreachable
from rlinf_api.report import DriverState, Goal
from rlinf_operator.reconcile.events import of_roll
from rlinf_operator.reconcile.state import DeletePod
from tests.builders import World, ppo_job
from tests.fakes.cluster import KEY, Cluster

BEFORE = Goal(steps=100, every_steps=20, keep=3)


def running(**fields) -> World:
    world = ppo_job().world().started()
    world.report(goal=BEFORE, plan_revision=1, **fields)
    world.step()
    return world


@pytest.mark.parametrize(
    ("change", "goal", "why"),
    [
        ({"flow": {"name": "ppo", "steps": 7}}, {"steps": 7}, "spec.flow.steps is 7 and was 100"),
        (
            {"checkpoint": {"everySteps": 5, "keep": 1}},
            {"every_steps": 5, "keep": 1},
            "spec.checkpoint.everySteps is 5 and was 20; spec.checkpoint.keep is 1 and was 3",
        ),
    ],
)
def test_a_driver_at_work_is_told_another_goal_and_no_pod_is_touched(change, goal, why):
    world = running()
    decision = world.edit(**change).step()
    assert decision.adjust is not None
    assert (decision.adjust.goal, decision.adjust.why) == (dataclasses.replace(BEFORE, **goal), why)
    assert decision.adjust.target.attempt == 1
    assert (decision.create_pods, decision.delete_pods) == ((), ())
    assert decision.write_config, "the next driver begins with it"
    world.report(goal=decision.adjust.goal, plan_revision=1)
    assert world.step().adjust is None


@pytest.mark.parametrize(
    "change",
    [
        {"placement": {"mode": "Collocated"}},
        {"ttlSecondsAfterFinished": 5, "activeDeadlineSeconds": 500},
        {"failurePolicy": {"maxRestarts": 2}},
    ],
    ids=str,
)
def test_what_a_driver_does_not_read_it_is_not_told(change):
    decision = running().edit(**change).step()
    assert (decision.adjust, decision.create_pods, decision.delete_pods) == (None, (), ())


@pytest.mark.parametrize("state", [DriverState.COMPLETE, DriverState.FAILED, DriverState.DRAINED])
def test_a_driver_that_has_ended_is_told_nothing(state):
    world = running().edit(flow={"name": "ppo", "steps": 7})
    world.report(goal=BEFORE, plan_revision=1, state=state)
    assert world.step().adjust is None


def test_a_driver_of_an_image_from_before_is_told_nothing_that_it_does_not_know():
    world = running().edit(flow={"name": "ppo", "steps": 7})
    world.report(plan_revision=1)
    assert world.step().adjust is None


def test_a_roll_is_told_with_the_field_and_the_pods():
    world = running().edit(flow={"name": "ppo", "config": {"gamma": 0.5}})
    [event] = of_roll(world.step().delete_pods)
    assert (event.type, event.reason) == ("Normal", "PodsReplaced")
    assert event.message == (
        "spec.flow.config changed: 4 pods are replaced (math-driver-a1, math-sim-0-a1, math-sim-1-a1, math-train-0-a1)"
    )


def test_a_roll_of_some_pods_names_each_field_and_a_few_of_the_pods():
    pods = [DeletePod(name=f"p{n}", uid="u", why="spec.seed changed", makes_room="x") for n in range(10)]
    other = DeletePod(name="q", uid="u", why="spec.model changed", makes_room="x")
    said = [event.message for event in of_roll([*pods, other, DeletePod(name="r", uid="u", why="it ended")])]
    assert said == [
        "spec.model changed: pod q is replaced",
        "spec.seed changed: 10 pods are replaced (p0, p1, p2, p3, p4, p5, p6, p7, ...)",
    ]


# --- through the loop -------------------------------------------------------------------------------------------------
async def at_work() -> Cluster:
    cluster = Cluster()
    await cluster.apply()
    for _ in range(6):
        await cluster.reconciler.pass_over(KEY)
        await cluster.kubelet()
    cluster.drivers.say(KEY, state=DriverState.RUNNING, plan_revision=1, goal=BEFORE)
    await cluster.reconciler.pass_over(KEY)
    return cluster


def events(cluster: Cluster, reason: str) -> list[str]:
    found = (o for (kind, _, _), o in cluster.store._objects.items() if kind == "Event")
    return [event["message"] for event in found if event["reason"] == reason]


async def test_an_adjusted_driver_is_an_event_once():
    cluster = await at_work()
    await cluster.store.patch("RLJob", "math", namespace="team", patch={"spec": {"flow": {"steps": 7}}})
    for _ in range(3):
        await cluster.reconciler.pass_over(KEY)
    assert cluster.drivers.adjusted == [dataclasses.replace(BEFORE, steps=7)]
    assert events(cluster, "Adjusted") == ["spec.flow.steps is 7 and was 100; no pod is replaced"]
    assert events(cluster, "PodsReplaced") == []


@pytest.mark.parametrize("trouble", ["it cannot", WorkerUnreachable("goal", next="it is tried again")])
async def test_a_driver_that_could_not_be_told_is_told_again(trouble, monkeypatch):
    cluster = await at_work()

    async def adjust(target, goal):
        if isinstance(trouble, Exception):
            raise trouble
        return trouble

    monkeypatch.setattr(cluster.drivers, "adjust", adjust)
    await cluster.store.patch("RLJob", "math", namespace="team", patch={"spec": {"flow": {"steps": 7}}})
    applied = await cluster.reconciler.pass_over(KEY)
    assert applied.try_again == str(trouble)
    assert events(cluster, "Adjusted") == []
    monkeypatch.undo()
    assert (await cluster.reconciler.pass_over(KEY)).try_again == ""
    assert events(cluster, "Adjusted") != []
