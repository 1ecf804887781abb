"""The normal form takes away what a slow or a quick back end may do otherwise, and nothing else."""

import pytest

from tests.conformance.parts import BEGUN, STARTING, WAITING_FOR_PLAN
from tests.conformance.recorder import Recorder, has, normal

PODS, PLAN, STEPS = "PodsReady=True/PodsReady", "PlanApplied=True/PlanInForce", "Running=True/Stepping"
MISSED, REPLACED = "Degraded=True/WorkerRestarting", "Degraded=True/PodReplaced"
AWAY, WELL = "Running=False/Recovering", "Degraded=False/Healthy"


@pytest.mark.parametrize(
    "writes",
    [
        [[PODS], [PLAN], [STEPS]],
        [[PLAN], [PODS], [STEPS]],
        [[PLAN, PODS], [STEPS]],
        [[STEPS, PLAN, PODS]],
    ],
)
def test_news_of_pods_and_of_the_driver_may_come_in_either_order_or_together(writes):
    assert normal(writes) == [PODS, PLAN, STEPS]


@pytest.mark.parametrize(
    "writes",
    [
        [["PodsReady=False/PodsStarting", REPLACED], [AWAY], [PODS, MISSED], [STEPS, WELL]],
        [["PodsReady=False/PodsStarting", REPLACED], [PODS, WELL], [AWAY, MISSED], [STEPS, WELL]],
        [[AWAY, MISSED], ["PodsReady=False/PodsStarting", REPLACED], [PODS, MISSED], [STEPS, WELL]],
    ],
)
def test_a_recovery_is_the_same_by_whichever_messenger_it_is_heard_of(writes):
    wanted = [["PodsReady=False/PodsStarting"], [REPLACED], [PODS], [AWAY], [MISSED], [STEPS], [WELL]]
    assert normal(writes) == normal(wanted)
    assert sorted(normal(writes)) == sorted(change for write in wanted for change in write)


def test_two_recoveries_are_two():
    once = [[AWAY, MISSED], [STEPS, WELL]]
    assert sorted(normal(once + once)) == sorted(normal(once) * 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([[PLAN], [STEPS]], [[STEPS], [PLAN]]),
        ([[STEPS], [WELL]], [[WELL], [STEPS]]),
        ([[PODS], ["PodsReady=False/PodsStarting"]], [["PodsReady=False/PodsStarting"], [PODS]]),
        ([[STEPS], ["Suspended=Unknown/Draining"]], [["Suspended=Unknown/Draining"], [STEPS]]),
        ([[REPLACED], [WELL], [STEPS]], [[REPLACED], [STEPS]]),
        ([[STEPS]], [["Running=True/Started"]]),
    ],
)
def test_other_sequences_stay_different(one, other):
    assert normal(one) != normal(other)


SEEN_LATE, NO_PLAN = [list(WAITING_FOR_PLAN), list(STARTING)], "Valid=False/Infeasible"
AWAY_FOR_PLANS = "Running=Unknown/SchedulerUnavailable"


def test_a_plan_that_is_made_and_not_yet_read_is_none():
    assert normal([*SEEN_LATE, [STEPS]]) == normal([list(BEGUN), [STEPS]])


@pytest.mark.parametrize(
    "writes",
    [
        SEEN_LATE[:1],
        [[NO_PLAN, *WAITING_FOR_PLAN[1:]], ["Valid=True/Accepted", *STARTING]],
        [
            ["Running=Unknown/SchedulerUnavailable" if c.startswith("Running") else c for c in WAITING_FOR_PLAN],
            STARTING,
        ],
    ],
)
def test_a_job_that_waits_for_a_plan_is_heard(writes):
    assert "PodsReady=Unknown/WaitingForPlan" in normal(writes)


def told(running):
    listed = [{"type": "Running", "status": running, "reason": "Stepping"}]
    return {"metadata": {"name": "a", "uid": "u"}, "status": {"conditions": listed}}


async def test_a_state_that_is_over_before_anybody_looks_is_seen_and_one_before_it_is_not():
    recorder = Recorder()
    for running in ("True", "False", "True"):
        recorder.feed("MODIFIED", told(running))

    async def first(text, since):
        return await recorder.until("a", lambda state: has(state.job, text), what=text, timeout_s=5, since=since)

    assert await first("Running=False", 0) == 1
    assert await first("Running=True", 1) == 2
