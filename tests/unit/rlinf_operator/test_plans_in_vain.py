"""A job without a plan whose planner and check disagree: it says so, and plans are not written without end."""

import dataclasses

import pytest

from rlinf_api import plan_rules
from rlinf_api.conditions import Reason
from rlinf_api.errors import InvalidManifest
from rlinf_operator.reconcile import outcome, plans
from rlinf_operator.reconcile.outcome import Answers
from tests.builders import World, plan_of, ppo_job
from tests.builders_plans import name
from tests.fakes.cluster import Cluster

REFUSED = [{"name": "trajectories", "microBatch": 64, "depth": 64}]


class Disagreeing(World):
    """Its scheduler makes plans that the check refuses, until `agrees`."""

    agrees = False

    def planned(self, *, revision=1):
        if self.agrees:
            return super().planned(revision=revision)
        value = plan_of(ppo_job()).model_dump(mode="json", by_alias=True)
        return self.with_plan(
            type(plan_of(ppo_job())).model_validate({**value, "revision": revision, "channels": REFUSED})
        )

    def asked(self, passes):
        return sum(bool(self.step().request_plan) for _ in range(passes))


@pytest.fixture
def world():
    return Disagreeing(ppo_job().build())


def test_a_new_job_whose_plans_are_refused_gets_eight_and_a_sentence(world):
    assert world.asked(50) == len(world.plans) == plans.PLANS_IN_VAIN
    assert world.condition("PlanApplied") == ("False", Reason.PLAN_FAILED)
    says = world.message("PlanApplied")
    assert "the last 8 plans in a row could not be used" in says
    assert f"{name(world, 8)} is passed over" in says
    assert "delete these to have another made" in says
    assert world.condition("Running") == ("Unknown", Reason.WAITING_FOR_PLAN)
    assert not world.pods
    before = world.status
    world.step()
    assert world.status == before, "and no write for each pass"


def test_an_edit_is_worth_one_more_plan(world):
    world.asked(20)
    assert world.edit(seed=5).asked(20) == 1
    world.agrees = True
    world.edit(seed=6).created()
    assert world.status.plan.current == name(world, 10)
    assert world.pods


def test_deleted_plans_are_asked_for_again_and_not_more_of_them(world):
    world.asked(20)
    del world.plans[:2]
    assert world.asked(20) == 2


def test_plans_that_cannot_be_read_count_too(world):
    """Those of a newer version, to an operator that is rolled back."""
    world.asked(1)
    world.agrees = True
    for _ in range(20):
        world.step()
        world.plans = [dataclasses.replace(p, spec=None, problem="spec.new: it is unknown") for p in world.plans]
    assert len(world.plans) <= plans.PLANS_IN_VAIN + 1


@pytest.mark.parametrize(
    "answer", [Answers(scheduler_away="it is away"), Answers(infeasible=("role 'env' needs 9 workers",))],
    ids=["away", "infeasible"],
)  # fmt: skip
def test_an_edit_whose_request_brought_no_plan_may_ask_again(world, answer):
    world.asked(20)
    world.edit(seed=5)
    for _ in range(3):
        decision = world.decide()
        assert decision.request_plan
        world.status = outcome.status_after(answer, world.observed(), decided=decision.status, now=world.now)
    assert world.asked(20) == 1


async def test_a_job_whose_first_plan_cannot_be_used_gets_no_more_from_the_operator_as_it_is(monkeypatch):
    """Its status is what counts them: it is left to the next pass once, and not with each plan."""

    def refuse(*args, **more):
        raise InvalidManifest("scripted")

    monkeypatch.setattr(plan_rules, "check", refuse)
    cluster = Cluster()
    await cluster.apply()
    await cluster.settle(40)
    assert len(await cluster.names("RLPlan")) == plans.PLANS_IN_VAIN
    assert (await cluster.condition("PlanApplied"))[:2] == ("False", Reason.PLAN_FAILED)
