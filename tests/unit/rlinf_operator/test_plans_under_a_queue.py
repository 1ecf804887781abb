"""Plans of a job with a queue: the fewest pods that it is asked for, a plan of those that were admitted, and none of
these the next time."""

from dataclasses import replace
from typing import Any

import pytest

from rlinf_api.conditions import PlanCondition
from rlinf_operator.manifests.asking import QueueStanding, QueueView, Share
from rlinf_operator.reconcile import plans
from rlinf_operator.reconcile.observe import plan_view
from rlinf_scheduler.jobs import plan_manifest
from tests import builders_plans
from tests.builders import World
from tests.builders_plans import store_statuses
from tests.unit.rlinf_operator.test_decide_queue import ASKED, drained, place, queued


def test_fewer_pods_than_asked_for_are_a_plan_of_fewer():
    world = queued(builders_plans.job())
    world.with_plan(builders_plans.plan(1, pods=3, source="Scheduler", reason={"code": "Initial", "message": ""}))
    less = {"driver": Share(count=1), "sim": Share(count=2), "train": Share(count=1)}
    world.queue = place(QueueStanding.GRANTED, shares=less)
    decision = world.decide()
    assert (decision.request_plan, decision.plan_within, decision.create_pods) == (
        "CapacityChanged",
        {"sim": 2, "train": 1},
        (),
    )
    world.apply(replace(decision, request_plan=""))
    world.with_plan(builders_plans.plan(2, pods=2, source="Scheduler", reason={"code": "Initial", "message": ""}))
    assert len(world.step().create_pods) == 1 + 2 + 1
    assert world.status.plan.current == "math-p2"


def scheduled(revision: int, pods: int, *, code: str = "Initial", **fields: Any):
    return builders_plans.plan(revision, pods=pods, source="Scheduler", reason={"code": code, "message": ""}, **fields)


def of_sim(world: World) -> tuple[int, int | None]:
    """(pods, fewest) that its queue would be asked for."""
    world.queue = ASKED
    told = world.decide().queue
    assert told is not None
    return next((s.count, s.least) for s in told.pod_sets if s.name == "sim")


def test_no_fewer_pods_are_asked_for_than_a_plan_could_do_with():
    world = queued(builders_plans.job()).with_plan(scheduled(1, 3))
    assert of_sim(world) == (3, 1), "by the pool's bounds alone"
    world.plans = [replace(world.plans[0], fewest={"sim": 2})]
    assert of_sim(world) == (3, 2)
    world.plans = [replace(world.plans[0], fewest={"sim": 3})]
    assert of_sim(world) == (3, None)


@pytest.mark.parametrize(
    ("written", "read"),
    [('{"sim": 2}', {"sim": 2}), ("", {}), ("{", {}), ("[2]", {}), ('{"sim": "2", "train": 0}', {})],
)
def test_how_few_would_do_is_read_off_the_plan_and_nonsense_is_not(written, read):
    plan = plan_manifest(scheduled(1, 3), namespace="team")
    plan["metadata"] |= {"uid": "x", "annotations": {"rlinf.io/fewest-pods": written}}
    view, _ = plan_view(plan)
    assert view.fewest == read


def test_a_plan_that_a_person_wants_is_admitted_as_it_is_or_not_at_all():
    world = queued(builders_plans.job()).with_plan(scheduled(1, 1)).with_plan(builders_plans.plan(2, pods=3))
    assert of_sim(builders_plans.pin(world, "math-p2")) == (3, None)
    world = queued(builders_plans.job()).with_plan(scheduled(1, 3))
    assert of_sim(builders_plans.pin(world, "math-p1")) == (3, None)


def of_fewer(pods: int) -> QueueView:
    less = {"driver": Share(count=1), "sim": Share(count=pods), "train": Share(count=1)}
    return place(QueueStanding.GRANTED, shares=less)


def test_a_job_that_was_admitted_in_part_asks_for_all_of_it_the_next_time():
    world = queued(builders_plans.job()).with_plan(scheduled(1, 3)).with_plan(scheduled(2, 2, code="CapacityChanged"))
    later = scheduled(3, 2, code="Drift", basedOn={"revision": 2})
    for known in (world, queued(builders_plans.job()).with_plan(scheduled(1, 3))):
        assert of_sim(known) == (3, 1)
    world.with_plan(later)
    assert of_sim(world) == (3, 1), "nor does what was learnt meanwhile"
    world.queue = of_fewer(2)
    assert world.decide().request_plan == ""
    world.step()
    assert world.status.plan.current == "math-p3"
    assert len(world.names()) == 1 + 2 + 1
    world.all_ready().report(plan_revision=3, plan_switches=1, step=5)
    world.step()
    world.queue = place(QueueStanding.WITHDRAWN)
    world.step()
    assert drained(world).names() == []
    assert of_sim(world) == (3, 1), "though the smaller one was in force last"

    again = queued(builders_plans.job()).with_plan(scheduled(1, 3)).with_plan(scheduled(2, 2, code="CapacityChanged"))
    again.queue = of_fewer(3)
    again.step()
    assert again.status.plan.current == "math-p1"
    assert len(again.names()) == 1 + 3 + 1
    again.all_ready().report(plan_revision=1, plan_switches=1, step=1)
    again.step()
    assert again.status.plan.pending == "", "the smaller one is not gone back to"


LESS = "CapacityChanged"


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        ([(3, "Initial", 0), (2, "Profiled", 1)], 2),
        ([(3, "Initial", 0), (2, LESS, 1)], 3),
        ([(3, "Initial", 0), (2, LESS, 1), (1, LESS, 2)], 3),
        ([(3, "Initial", 0), (2, LESS, 1), (2, "Drift", 2), (2, "Drift", 3)], 3),
        ([(3, "Initial", 0), (2, LESS, 1), (2, "Profiled", 1)], 2),
        ([(2, "Initial", 0), (3, LESS, 1)], 3),
        ([(2, "Initial", 0), (2, LESS, 1), (3, "Drift", 2), (2, LESS, 3)], 3),
        ([(3, "Initial", 0), (1, LESS, 1), (2, "Profiled", 1), (2, LESS, 3)], 2),
        ([(2, "Initial", 0), (1, LESS, 1), (2, LESS, 2)], 2),
    ],
)
def test_a_plan_that_was_made_as_fewer_pods_were_admitted_is_not_what_is_asked_for(known, asked):
    """(pods, why, made from which) of each."""
    world = queued(builders_plans.job())
    for revision, (pods, code, before) in enumerate(known, 1):
        world.with_plan(scheduled(revision, pods, code=code, basedOn={"revision": before}))
    assert of_sim(world)[0] == asked
    chosen = plans.choose(world.observed(), builders_plans.job().parsed(), None, fresh=True)
    assert chosen.pods_in_force()["sim"] == asked


def test_without_a_queue_a_smaller_plan_is_the_newest():
    world = builders_plans.job().world().with_plan(scheduled(1, 3)).with_plan(scheduled(2, 2, code="CapacityChanged"))
    world.step()
    assert world.status.plan.current == "math-p2"


def test_a_plan_that_wants_more_than_was_admitted_is_told_so():
    world = builders_plans.running()
    world.queue = place(
        QueueStanding.GRANTED, shares={"driver": Share(count=1), "sim": Share(count=1), "train": Share(count=1)}
    )
    world.with_plan(
        builders_plans.plan(2, pods=2, source="Scheduler", reason={"code": "CapacityChanged", "message": ""})
    )
    store_statuses(world)
    failed = next(c for p in world.plans if p.name == "math-p2" for c in p.status.conditions)
    assert (failed.type, failed.reason) == (PlanCondition.FAILED, "Unschedulable")
    assert failed.message == "it needs 2 pods of pool sim, and the queue admitted 1"
    assert world.status.plan.current == "math-p1"
    assert world.step().create_pods == ()
